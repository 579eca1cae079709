"""A small internet in network namespaces: public hosts, and hosts each behind a NAT router of its own.

    lab = NatLab(public=("hub", "learner"), private=("left", "right"))    # as a context manager
    lab.command("left", ["python", ...])                                  # argv that runs there

Every host hangs on the namespace `wan` by a veth pair of its own; a private host hangs on a router that masquerades
what goes out (nftables) and drops whatever comes in unasked, as a home router does. Guarantees: nothing of it is left
when the context ends; names carry the process ID, so that several labs live side by side. `reason_unavailable` says
why a machine cannot have one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

_RULES = """
table ip nat {{
  chain out {{ type nat hook postrouting priority 100; oifname "uplink" masquerade{mode}; }}
}}
table ip guard {{
  chain input {{ type filter hook input priority 0; iifname "uplink" ct state != {{ established, related }} drop; }}
  chain forward {{ type filter hook forward priority 0; iifname "uplink" ct state != {{ established, related }} drop; }}
}}
"""


def _run(*argv: str, text: str | None = None) -> None:
    done = subprocess.run(argv, input=text, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")


def reason_unavailable() -> str:
    """Why no lab can be made here; empty when one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "nft"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        with NatLab(public=(), private=("probe",)):
            return ""
    except OSError as error:
        return f"this kernel offers no namespaces with NAT: {error}"


class NatLab:
    """`is_symmetric`: the routers give every connection a random port, which no hole punch can foresee."""

    def __init__(self, public: Sequence[str], private: Sequence[str], *, is_symmetric: bool = False) -> None:
        self._prefix = f"e2-{os.getpid()}-"
        self._namespaces: list[str] = []
        self._public, self._private = tuple(public), tuple(private)
        self._mode = " random" if is_symmetric else ""
        self.addresses: dict[str, str] = {}

    def __enter__(self) -> NatLab:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for name in self._namespaces:
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", self._prefix + name)
        self._namespaces.clear()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._prefix + host, *argv]

    def map_port(self, host: str, port: int, own_port: int) -> str:
        """What arrives at `port` of the host's router goes on to its `own_port`; returns the public address."""
        number = (*self._public, *self._private).index(host)
        rules = f"""
        table ip mapped {{
          chain in {{ type nat hook prerouting priority -100;
                     iifname "uplink" tcp dport {port} dnat to {self.addresses[host]}:{own_port}; }}
        }}
        insert rule ip guard forward ct status dnat accept
        """
        _run(*self.command(f"{host}-nat", ["nft", "-f", "-"]), text=rules)
        return f"10.90.{number}.2:{port}"

    def cut(self, host: str) -> None:
        """The host's cable is pulled."""
        self._ip(host, "link", "set", "uplink", "down")

    def _build(self) -> None:
        self._namespace("wan")
        _run(*self.command("wan", ["sysctl", "-qw", "net.ipv4.ip_forward=1"]))
        for number, host in enumerate(self._public):
            self._namespace(host)
            self.addresses[host] = self._attach(host, "wan", f"10.90.{number}", f"d{number}")
        for number, host in enumerate(self._private, start=len(self._public)):
            router = f"{host}-nat"
            self._namespace(router)
            self._namespace(host)
            self._attach(router, "wan", f"10.90.{number}", f"d{number}")
            self.addresses[host] = self._attach(host, router, f"192.168.{number}", "lan")
            _run(*self.command(router, ["sysctl", "-qw", "net.ipv4.ip_forward=1"]))
            _run(*self.command(router, ["nft", "-f", "-"]), text=_RULES.format(mode=self._mode))

    def _namespace(self, name: str) -> None:
        _run("ip", "netns", "add", self._prefix + name)
        self._namespaces.append(name)
        self._ip(name, "link", "set", "lo", "up")

    def _attach(self, host: str, gateway: str, network: str, device: str) -> str:
        """A cable from `host` (device `uplink`) to `gateway` (device `device`); returns the host's address."""
        self._ip(gateway, "link", "add", device, "type", "veth", "peer", "name", "uplink", "netns", self._prefix + host)
        self._ip(gateway, "addr", "add", f"{network}.1/24", "dev", device)
        self._ip(host, "addr", "add", f"{network}.2/24", "dev", "uplink")
        self._ip(gateway, "link", "set", device, "up")
        self._ip(host, "link", "set", "uplink", "up")
        self._ip(host, "route", "add", "default", "via", f"{network}.1")
        return f"{network}.2"

    def _ip(self, namespace: str, *argv: str) -> None:
        _run("ip", "-n", self._prefix + namespace, *argv)
