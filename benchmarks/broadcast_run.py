"""Runs one scene of bench_broadcast: a process per node, in a namespace each or behind the transport's own shaper.

Everyone says READY once it is connected, all are told GO, the seed notes when it begins; a worker is done when it has
decoded the last verified block. Bytes are compared by xxh3, which costs a fortieth of what SHA-256 would add to every method's CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.broadcast_scene import RTT_S, Scene, fluid_s
from benchmarks.wan.lab import Lab, LabHost, lab
from echo2.base.ids import RunId
from echo2.base.units import address_of
from echo2.trust import tls
from echo2.trust.identity import Role, RunAuthority, TlsKey, certificate_request

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S, START_LIMIT_S = 240.0, 120.0
PEERS = {
    "echo2": "benchmarks.broadcast_peer", "star": "benchmarks.broadcast_peer", "all alike": "benchmarks.broadcast_peer",
    "libtorrent": "benchmarks.broadcast_torrent", "libtorrent tuned": "benchmarks.broadcast_torrent",
    "asyncio TLS": "benchmarks.broadcast_tls",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds and bytes of one run; `late` is the emulator's share of packets more than 5 ms late."""

    method: str
    slowest_s: float
    bound_s: float
    seed_sent_bytes: int
    sent_bytes: int
    duplicate_bytes: int
    pulled: int
    cpu_s: float
    emulator_cpu_s: float
    late: float
    dropped: int
    rss_mib: float
    connections: int
    topology: str
    times: dict[str, float]
    versions_s: tuple[float, ...] = ()  # when the last worker was done with each version; empty of one version

    @property
    def version_ratios(self) -> list[float]:
        """Of each version's time to the bound of its bytes and those before it."""
        count = len(self.versions_s)
        return [count * done_s / (number * self.bound_s) for number, done_s in enumerate(self.versions_s, start=1)]

    @property
    def ratio(self) -> float:
        return self.slowest_s / self.bound_s

    @property
    def cores_used(self) -> float:
        return (self.cpu_s + self.emulator_cpu_s) / self.slowest_s

    def cpu_s_per_gib(self, scene: Scene) -> float:
        """Of all nodes together, per GiB that workers received; without the emulator."""
        return self.cpu_s / (scene.workers * scene.size_bytes / 2**30)


def run(
    scene: Scene, method: str, *, in_lab: bool, congestion_control: str = "cubic", is_lifted: bool = False,
    is_shaped: bool = True, limit_s: float = LIMIT_S,
) -> Outcome:  # fmt: skip
    """Measures `method` (a key of PEERS) on the scene; RuntimeError when it is not through in `limit_s` after the start.

    `is_lifted`: before other programs of the machine. `is_shaped` False: outside a lab nothing holds the links to their
    rates."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        source = os.urandom(scene.size_bytes)
        (folder / "source").write_bytes(source)
        digest = xxhash.xxh3_128(source).hexdigest()
        del source
        with _network(scene, in_lab, congestion_control) as made:
            _prepare(
                folder, scene, {"method": method, "is_lifted": is_lifted, "is_shaped": is_shaped and not in_lab}, made
            )
            results = _Processes(folder, scene, method, made).measure(limit_s)
            stats = made.stats() if made is not None else {}
    for number, result in enumerate(results):
        if number and result and result.get("digest") != digest:
            raise RuntimeError(
                f"{result['name']}: expected digest {digest}, got {result.get('digest')}; {result.get('trouble')}"
            )
    return _outcome(scene, method, results, stats)


@contextlib.contextmanager
def _network(scene: Scene, in_lab: bool, congestion_control: str) -> Iterator[Lab | None]:
    if not in_lab:
        yield None
        return
    hosts = [
        LabHost(n.name, n.up, n.down, n.region, scene.loss / 2, not n.is_natted, scene.queue_s) for n in scene.nodes
    ]
    with lab(hosts, RTT_S, congestion_control, is_ipv6=scene.is_ipv6, pipe_bytes_per_s=scene.pipe) as made:
        yield made


def _prepare(folder: Path, scene: Scene, how: dict[str, Any], made: Lab | None) -> None:
    """Identities and certificates of a run made for this measurement, and what every process reads."""
    coordinator = tls.load_or_create_identity(folder / "coordinator")
    authority = RunAuthority.create(coordinator, RunId("bench"), time.time())
    told: dict[str, Any] = scene.as_dict() | how | {"peer_ids": []}
    # Addresses of this run alone: a port found free on 127.0.0.1 may be somebody else's before the node opens it.
    loopback = f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(256)}"
    for number, node in enumerate(told["nodes"]):
        node["address"] = address_of(made.address(number) if made else f"{loopback}.{number + 1}", 7400)
        identity, key = tls.load_or_create_identity(folder / node["name"]), TlsKey.generate()
        role = Role.LEARNER if number == 0 else Role.WORKER
        issued = authority.issue(certificate_request(identity, key), role, time.time())
        credentials = tls.Credentials(
            identity, key.to_pem(), issued, authority.certificate_pem, RunId("bench"), coordinator.peer_id, "none:1"
        )
        tls.save_credentials(folder / node["name"], credentials)
        told["peer_ids"].append(identity.peer_id)
    (folder / "scene.json").write_text(json.dumps(told))


def _reap(process: subprocess.Popen[str]) -> None:
    process.wait(20)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class _Processes:
    """The nodes of one run, told what to do over their stdin."""

    def __init__(self, folder: Path, scene: Scene, method: str, made: Lab | None) -> None:
        self._folder, self._scene, self._method, self._lab = folder, scene, method, made
        self._all: list[subprocess.Popen[str]] = []
        self._done = threading.Event()

    def measure(self, limit_s: float) -> list[dict[str, Any]]:
        """One result per node; empty for a node that was killed."""
        nodes = range(len(self._scene.nodes))
        watchdog = self._watched(START_LIMIT_S)
        try:
            self._all = [self._start(number) for number in nodes]
            for number in nodes:
                self._expect_ready(number)
            watchdog.cancel()
            watchdog = self._watched(limit_s)
            for number in reversed(nodes):  # the seed last
                self._tell(number, "GO")
            begun_at = time.monotonic()
            swinging = threading.Thread(target=self._swing, args=(begun_at,))
            swinging.start()
            self._befall(begun_at)
            gone = self._scene.fault.node if self._scene.fault and self._scene.fault.kind == "dies" else None
            living = [number for number in nodes if number != gone]
            results: list[dict[str, Any]] = [{} for _ in nodes]
            for number in living:
                results[number] = json.loads(self._line(number))
            if not self._scene.is_second:
                results[0]["begun_at"] = min(begun_at, results[0]["begun_at"])
            self._done.set()
            swinging.join()
            for number in living:
                self._tell(number, "STOP")
            for number in living:
                results[number] |= json.loads(self._line(number))
            return results
        finally:
            watchdog.cancel()
            self._done.set()
            self._end()
            for process in self._all:
                _reap(process)

    def _watched(self, limit_s: float) -> threading.Timer:
        """Ends all processes in `limit_s`, so that nobody waits for a line that does not come."""
        made = threading.Timer(limit_s, self._end)
        made.start()
        return made

    def _end(self) -> None:
        for process in self._all:
            process.kill()

    def _swing(self, begun_at: float) -> None:
        """Sets the uplinks that change, until all is done."""
        while self._lab is not None and self._scene.swing_s:
            elapsed_s = time.monotonic() - begun_at
            for number, node in enumerate(self._scene.nodes):
                self._lab.set_rates(number, self._scene.up_at(number, elapsed_s), node.down)
            if self._done.wait(self._scene.swing_s - elapsed_s % self._scene.swing_s):
                return

    def _befall(self, begun_at: float) -> None:
        """The scene's fault, at its time."""
        fault = self._scene.fault
        if fault is None:
            return
        size = self._scene.size_bytes * (self._scene.overhead if self._lab is not None else 1.0)
        time.sleep(max(0.0, begun_at + fault.at * fluid_s(self._scene.nodes, size) - time.monotonic()))
        process = self._all[fault.node]
        match fault.kind:
            case "dies":
                process.kill()
            case "freezes":
                process.send_signal(signal.SIGSTOP)
                time.sleep(fault.for_s)
                process.send_signal(signal.SIGCONT)
            case "link is cut":
                assert self._lab is not None, "only a lab can cut a link"
                self._lab.set_link(fault.node, is_up=False)
                time.sleep(fault.for_s)
                self._lab.set_link(fault.node, is_up=True)
            case "is restarted":
                process.kill()
                _reap(process)
                self._all[fault.node] = self._start(fault.node)
                self._expect_ready(fault.node)
                self._tell(fault.node, "GO")

    def _expect_ready(self, number: int) -> None:
        if (word := self._line(number).strip()) != "READY":
            raise RuntimeError(f"{self._scene.nodes[number].name}: expected READY, got {word!r}")

    def _start(self, number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", PEERS[self._method], str(self._folder), str(number)]
        if self._lab is not None:
            command = self._lab.command(number, *command)
        with (self._folder / f"{self._scene.nodes[number].name}.log").open("a") as log:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
            )  # fmt: skip

    def _tell(self, number: int, word: str) -> None:
        stdin = self._all[number].stdin
        assert stdin is not None
        stdin.write(word + "\n")
        stdin.flush()

    def _line(self, number: int) -> str:
        stdout = self._all[number].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            self._all[number].wait(5)
            raise RuntimeError("\n".join(self._ended(n) for n in self._first_ended(number)))
        return line

    def _first_ended(self, number: int) -> list[int]:
        """Nodes that ended by themselves, or else `number`, which the watchdog may have ended because it waited for them."""
        return [n for n, p in enumerate(self._all) if p.poll() not in (None, -signal.SIGKILL)] or [number]

    def _ended(self, number: int) -> str:
        name = self._scene.nodes[number].name
        log = (self._folder / f"{name}.log").read_text()[-2000:]
        return f"{name} ended early with code {self._all[number].returncode}:\n{log}"


def _outcome(scene: Scene, method: str, results: list[dict[str, Any]], stats: dict[str, Any]) -> Outcome:
    begun = results[0]["begun_at"]
    times = {r["name"]: r["done_at"] - begun for r in results[1:] if "done_at" in r}
    sealed = [r["sealed_at"] for r in results[1:] if scene.versions > 1 and "sealed_at" in r]
    living = [r for r in results if r]
    count = 2 if scene.is_second else 1  # artifacts that the counters have in them
    return Outcome(
        method=method, slowest_s=max(times.values()), bound_s=scene.bound_s(scene.overhead if stats else 1.0),
        seed_sent_bytes=results[0]["sent"] // count, sent_bytes=sum(r["sent"] for r in living) // count,
        duplicate_bytes=sum(r["duplicates"] for r in living), pulled=sum(r["pulled"] for r in living),
        cpu_s=sum(r["cpu_s"] for r in living) / count, emulator_cpu_s=stats.get("cpu_s", 0.0),
        late=stats["late_frames"] / max(1, stats["frames"]) if stats else 0.0,
        dropped=sum(
            pipe[name] for pipe in (*stats["hosts"], *stats["pipes"]) for name in pipe if name.endswith("dropped")
        ) if stats else 0,
        rss_mib=max(r["rss_mib"] for r in living),
        connections=max(r.get("connections", 0) for r in living), topology=results[0]["topology"], times=times,
        versions_s=tuple(max(at) - begun for at in zip(*sealed, strict=True)),
    )  # fmt: skip
