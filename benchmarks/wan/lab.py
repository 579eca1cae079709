"""An emulated wide-area network on one Linux machine: one namespace per host, all packets pass emulator.c.

Needs root, namespaces, /dev/net/tun, `ip`, and a C compiler for the first use; `missing()` says what is not there.
Guarantees: rates, queues, delays and losses are those asked for (`stats()` says how late packets were); nothing stays
behind, also after a crash of the program that used it (the emulator ends with its input, namespaces of dead owners are
removed by the next lab). Leaves to others: what runs in the hosts.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PREFIX = "echo2lab"
QUEUE_S = 0.060  # of each link: a home or data-centre uplink's drop-tail queue
QUEUE_BYTES_MIN = 16 * 1500


@dataclass(frozen=True, slots=True)
class LabHost:
    """One host; rates count IP bytes per second. `accepts_inbound` False: nobody can open a TCP connection to it. `queue_s`: of
    its link's drop-tail queues."""

    name: str
    up: float
    down: float
    region: str = ""
    loss: float = 0.0
    accepts_inbound: bool = True
    queue_s: float = QUEUE_S


def missing() -> str:
    """What this machine lacks for a lab; empty when it has everything."""
    if not sys.platform.startswith("linux"):
        return "Linux"
    if os.geteuid() != 0:
        return "root"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun"
    for tool in ("ip", "nsenter"):
        if shutil.which(tool) is None:
            return f"the program {tool}"
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        return "a C compiler"
    probe = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
    return "" if probe.returncode == 0 else "network namespaces"


class Lab:
    """Hosts that are up. Address of host i: 10.87.0.(i+1), or the same at the end of an IPv6 address."""

    def __init__(self, hosts: Sequence[LabHost], emulator: subprocess.Popen[str], *, is_ipv6: bool) -> None:
        self.hosts = list(hosts)
        self._emulator = emulator
        self._is_ipv6 = is_ipv6

    def address(self, index: int) -> str:
        return str(ipaddress.IPv6Address(f"fd87::{self._ipv4(index)}")) if self._is_ipv6 else self._ipv4(index)

    def _ipv4(self, index: int) -> str:
        return f"10.87.{index // 250}.{index % 250 + 1}"

    def namespace(self, index: int) -> str:
        return f"{PREFIX}-{os.getpid()}-{self.hosts[index].name}"

    def command(self, index: int, *arguments: str) -> list[str]:
        """The command line that runs a program on a host."""
        return ["nsenter", f"--net=/run/netns/{self.namespace(index)}", "--", *arguments]

    def set_link(self, index: int, is_up: bool) -> None:
        """Cuts a host's link (packets vanish, nobody is told) or restores it."""
        self._do(f"link {index} {int(is_up)}")

    def set_rates(self, index: int, up: float, down: float) -> None:
        """Of a host's link, from now on; its queues keep their bytes."""
        self._do(f"rates {index} {up} {down}")

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._ask("stats"))
        return found

    def _do(self, command: str) -> None:
        if (answer := self._ask(command)) != "ok":
            raise RuntimeError(f"the emulator was told {command!r} and answered {answer!r}")

    def _ask(self, command: str) -> str:
        assert self._emulator.stdin is not None and self._emulator.stdout is not None
        self._emulator.stdin.write(command + "\n")
        self._emulator.stdin.flush()
        return self._emulator.stdout.readline().strip()

    def _set_up(self, rtt_s: dict[tuple[str, str], float], congestion_control: str, pipe_bytes_per_s: float) -> None:
        for index, host in enumerate(self.hosts):
            space = self.namespace(index)
            _run("ip", "netns", "add", space)
            queues = " ".join(str(max(QUEUE_BYTES_MIN, int(rate * host.queue_s))) for rate in (host.up, host.down))
            self._do(
                f"host /run/netns/{space} {self._ipv4(index)} {host.up} {host.down} {queues} "
                f"{int(host.accepts_inbound)}"
            )
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "addr", "add", f"{self._ipv4(index)}/16", "dev", "wan0")
            _run("ip", "-n", space, "link", "set", "wan0", "mtu", "1500", "txqueuelen", "5000", "up")
            _run("ip", "-n", space, "route", "replace", "10.87.0.0/16", "dev", "wan0", "congctl", congestion_control)
            if self._is_ipv6:
                _run("ip", "-n", space, "addr", "add", f"{self.address(index)}/64", "dev", "wan0", "nodad")
                _run("ip", "-n", space, "route", "replace", "fd87::/64", "dev", "wan0", "congctl", congestion_control)
            forget = ["sysctl", "-qw", "net.ipv4.tcp_no_metrics_save=1"]
            _run("nsenter", f"--net=/run/netns/{space}", "--", *forget)
        pipes: dict[tuple[str, str], int] = {}
        for a, first in enumerate(self.hosts):
            for b, second in enumerate(self.hosts):
                if a != b:
                    regions = (min(first.region, second.region), max(first.region, second.region))
                    loss = 1 - (1 - first.loss) * (1 - second.loss)
                    way = (first.region, second.region)
                    if pipe_bytes_per_s and first.region != second.region and way not in pipes:
                        pipes[way] = len(pipes)
                        self._do(f"pipe {pipe_bytes_per_s} {int(pipe_bytes_per_s * QUEUE_S)}")
                    self._do(f"path {a} {b} {rtt_s[regions] * 5e5} {loss * 1e6} {pipes.get(way, -1)}")

    def _tear_down(self) -> None:
        if self._emulator.stdin is not None:
            self._emulator.stdin.close()
        self._emulator.wait(5)
        if self._emulator.stdout is not None:
            self._emulator.stdout.close()
        for index in range(len(self.hosts)):
            _remove(self.namespace(index))


@contextmanager
def lab(
    hosts: Sequence[LabHost],
    rtt_s: dict[tuple[str, str], float],
    congestion_control: str = "cubic",
    *,
    is_ipv6: bool = False,
    pipe_bytes_per_s: float = 0.0,
) -> Iterator[Lab]:
    """Brings the hosts up. `rtt_s` by pair of regions, the names of a pair in alphabetical order. `is_ipv6`: their addresses
    are of IPv6; the others work as well. `pipe_bytes_per_s`: what all bytes from one region to another share, each way."""
    _remove_left()
    emulator = subprocess.Popen([_compiled()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    made = Lab(hosts, emulator, is_ipv6=is_ipv6)
    try:
        made._set_up(rtt_s, congestion_control, pipe_bytes_per_s)
        yield made
    finally:
        made._tear_down()


def _compiled() -> Path:
    """The emulator's program, made anew when its source is newer."""
    source, folder = HERE / "emulator.c", Path(tempfile.gettempdir()) / f"echo2-wan-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder}: expected a folder of our own, got one of user {folder.stat().st_uid}")
    program = folder / "emulator"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        _run(shutil.which("cc") or "gcc", "-O2", "-o", str(program), str(source), "-lm")
    return program


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True, timeout=30)


def _remove_left() -> None:
    """Namespaces of labs whose owner is gone."""
    folder = Path("/run/netns")
    for path in folder.glob(f"{PREFIX}-*") if folder.is_dir() else ():
        owner = path.name.split("-")[1]
        if not Path(f"/proc/{owner}").exists():
            _remove(path.name)
