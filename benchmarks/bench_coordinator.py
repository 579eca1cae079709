"""The coordinator under load: lease latency, CPU and memory with thousands of real gRPC streams, and recovery from kills.

    python -m benchmarks.bench_coordinator [--workers 2000] [--seconds 30] [--kills 3] [--limit-s 280]

The coordinator runs as a process of its own; the simulated fleet, real streams over mutual TLS, in this one. A lease
operation is the time from a worker's request until its grant arrives; heartbeats, progress and ends come beside it. What
the generator itself adds is told by two rows: its CPU, and how late its own loop is.

After the measured window the coordinator is killed with SIGKILL under the same load and started again at once, several
times. Recovery is the time from the kill to the first new lease after it: from then on whoever has come back works as
before, while all who hold leases have gone on anyway. When half and 95 % of the streams stand again is told beside it,
with the CPU that a stream costs either side (a handshake of mutual TLS, a hello, its answers): on one machine both sides
share the cores. The state that each kill leaves is copied before the restart and held against what the fleet had been
told, and the whole history against the invariants (coordinator_history): the number of violations is a row of the table.

Before that, a few hundred workers join a coordinator of their own, one that has nothing else to do: its CPU for each. After the
window the page's state is asked for, again at once and a second of heartbeats later: the time until it is there.

It ends by itself within `--limit-s`, with what it was doing then, when it is not through by then.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.coordinator_load import Issuer, Ledger, Shape, SimWorker, run_load
from echo2.base.ids import RunId
from echo2.coordinator.store import SqlStore, StateSnapshot
from echo2.trust.identity import Role

RESULTS = Path(__file__).parent / "results" / "coordinator.json"
RUN = RunId("bench")
RECOVERY_S_MAX = 60.0
HEARTBEAT_S = 5.0
LAG_LOOK_S, QUIET_S = 0.01, 3.0
JOINS_MAX = 300  # CPU seconds enough for a clock of 10 ms
STATES = 10  # of the page, of each kind
_SERVE = """
import asyncio, pathlib, sys
from echo2.config.run import RunConfig, RunSection
from echo2.coordinator.hub import CoordinatorOptions, timed_section
from echo2.coordinator.coordinator import CoordinatorDaemon
async def main():
    section = timed_section(enrol_port=0, port=0, dashboard_port=0, planner_mode="advise", heartbeat_interval=float(sys.argv[2]),
        suspect_after=15.0, gone_after=45.0)
    config = RunConfig(run=RunSection(name="bench"), coordinator=section)
    daemon = CoordinatorDaemon(CoordinatorOptions(pathlib.Path(sys.argv[1]), config))
    task = asyncio.create_task(daemon.run())
    await daemon.started.wait()
    print(daemon.services_address, flush=True)
    await task
asyncio.run(main())
"""


class Served:
    """The coordinator's process."""

    def __init__(self, folder: Path) -> None:
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(folder), str(HEARTBEAT_S)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        self.address, self.start_s = "", float("nan")

    async def wait_until_it_listens(self) -> None:
        assert self.process.stdout is not None
        self.address = (await asyncio.to_thread(self.process.stdout.readline)).strip()
        self.check_alive()
        self.start_s = time.monotonic() - self.began

    def check_alive(self) -> None:
        """RuntimeError where it has ended by itself; why, it has said on stderr."""
        if not self.address or self.process.poll() is not None:
            raise RuntimeError(f"expected the coordinator to run, it ended with {self.process.wait()}")

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self, name: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) / 1024

    def kill(self) -> None:
        """Told again it does nothing."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@dataclass
class Outcome:
    """What was measured."""

    start_s: float = 0.0
    window_s: float = 0.0
    grant_s: list[float] = field(default_factory=list)
    operations: int = 0
    cpu: float = 0.0
    load_cpu: float = 0.0
    load_lag_s: list[float] = field(default_factory=list)
    heartbeats: int = 0
    memory_mb: float = 0.0
    peak_memory_mb: float = 0.0
    listening_s: list[float] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    half_back_s: list[float] = field(default_factory=list)
    streams_back_s: list[float] = field(default_factory=list)
    cpu_ms_per_stream: list[float] = field(default_factory=list)
    load_cpu_ms_per_stream: list[float] = field(default_factory=list)
    grants_after: int = 0
    violations: list[str] = field(default_factory=list)
    join_cpu_ms: float = 0.0
    state_s: list[float] = field(default_factory=list)
    state_later_s: list[float] = field(default_factory=list)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def copied_state(folder: Path, to: Path) -> Path:
    """What the dead process has left on disk."""
    to.mkdir()
    for path in (folder / "coordinator").glob("state.sqlite*"):
        shutil.copy(path, to / path.name)
    return to / "state.sqlite"


def loaded(path: Path) -> StateSnapshot:
    with closing(SqlStore(f"sqlite:///{path}", RUN)) as store:
        return store.load()


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(
    outcome: Outcome, workers: int, seconds: float, groups_per_s: float, kills: int, doing: Callable[[str], None]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, ledger = Path(name) / "run", Ledger()
        served = Served(folder)
        load: asyncio.Task[None] | None = None
        try:
            doing("starting the coordinator")
            await served.wait_until_it_listens()
            outcome.start_s = served.start_s
            # Work lasts so long that the fleet finishes a little more than `groups_per_s` groups a second, four kinds of
            # GPU of 1.98 on average; groups are always queued.
            shape = Shape(workers, groups_per_s, 1.8 * workers / groups_per_s, HEARTBEAT_S, int(1.5 * workers) + 100)
            load = asyncio.create_task(run_load(folder, RUN, served.address, shape, 3600, ledger))
            doing(f"waiting until {workers} workers have joined and been given leases")
            await _settled(ledger, served, workers, load)
            doing("measuring")
            await _window(outcome, ledger, served, seconds)
            doing("asking for the page's state")
            await asyncio.to_thread(_page, outcome, (folder / "links" / "dashboard.url").read_text().strip())
            states: list[tuple[Path, set[str]]] = []
            for number in range(kills):
                doing(f"waiting for the fleet after kill {number + 1} of {kills}")
                served = await _killed(outcome, ledger, served, folder, states, Path(name) / f"kill-{number}")
                await asyncio.sleep(min(seconds, 5))
            doing("judging the history")
            ledger.goes_on.clear()
            await asyncio.sleep(QUIET_S)  # what was said is heard, on both sides
            served.check_alive()
            if load.done():
                load.result()
            if ledger.refused:
                raise SystemExit(f"{len(ledger.refused)} workers were refused, the first {ledger.refused[0]}")
            served.kill()
            offered = set().union(*(groups for _, groups in states)) if states else set()
            found = ledger.history.judge(loaded(copied_state(folder, Path(name) / "end")), offered)
            outcome.violations += [f"at the end: {violation}" for violation in found]
        finally:
            served.kill()
            if load is not None:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)


async def _joins(folder: Path, count: int) -> float:
    """CPU milliseconds of a coordinator for each worker that joins: handshake, hello, its answers, what is saved."""
    served, ledger = Served(folder), Ledger()
    try:
        await served.wait_until_it_listens()
        issuer = Issuer(folder, RUN, served.address)
        workers = [SimWorker(n, issuer.credentials(Role.WORKER), ledger, 3600.0, 3600.0) for n in range(count)]
        await asyncio.sleep(1.0)  # its start is over
        before = served.cpu_s()
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        while len(ledger.connected) < count:
            await asyncio.sleep(0.05)
            served.check_alive()
        await asyncio.sleep(0.5)
        spent_s = served.cpu_s() - before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return 1e3 * spent_s / count
    finally:
        served.kill()


def _page(outcome: Outcome, address: str) -> None:
    def asked() -> float:
        began = time.monotonic()
        with urllib.request.urlopen(f"{address}api/state") as answer:
            answer.read()
        return time.monotonic() - began

    for _ in range(STATES):
        time.sleep(1.0)
        outcome.state_later_s.append(asked())
        outcome.state_s.append(asked())


async def _window(outcome: Outcome, ledger: Ledger, served: Served, seconds: float) -> None:
    ledger.grant_s.clear()
    operations, beats = ledger.history.operations, ledger.heartbeats
    cpu_s, own_s, began = served.cpu_s(), own_cpu_s(), time.monotonic()
    while (left_s := began + seconds - time.monotonic()) > 0:
        at = time.monotonic()
        await asyncio.sleep(min(LAG_LOOK_S, left_s))
        outcome.load_lag_s.append(max(0.0, time.monotonic() - at - LAG_LOOK_S))
    served.check_alive()
    outcome.window_s = time.monotonic() - began
    outcome.cpu = (served.cpu_s() - cpu_s) / outcome.window_s
    outcome.load_cpu = (own_cpu_s() - own_s) / outcome.window_s
    outcome.grant_s, outcome.operations = list(ledger.grant_s), ledger.history.operations - operations
    outcome.heartbeats = ledger.heartbeats - beats
    outcome.memory_mb, outcome.peak_memory_mb = served.memory_mb("VmRSS"), served.memory_mb("VmHWM")


async def _killed(
    outcome: Outcome,
    ledger: Ledger,
    served: Served,
    folder: Path,
    states: list[tuple[Path, set[str]]],
    copy_to: Path,
) -> Served:
    history, streams = ledger.history, len(ledger.connected)
    offered, grants = set(history.offered), history.grants
    at = time.monotonic()
    served.kill()
    copy = copied_state(folder, copy_to)
    # Judged before another answer can come: nothing that was told may be missing.
    judging = time.monotonic()
    found = history.judge_saved(loaded(copy), history.welcomed - ledger.connected)
    outcome.violations += [f"at kill {len(states) + 1}: {violation}" for violation in found]
    at += time.monotonic() - judging
    states.append((copy, offered))
    served, own_s = Served(folder), own_cpu_s()
    await served.wait_until_it_listens()
    outcome.listening_s.append(time.monotonic() - at)

    async def seconds_until(is_so: Callable[[], bool]) -> float:
        while not is_so() and time.monotonic() - at < RECOVERY_S_MAX:
            await asyncio.sleep(0.01)
            served.check_alive()
        return time.monotonic() - at

    outcome.recovery_s.append(await seconds_until(lambda: history.grants > grants))
    outcome.half_back_s.append(await seconds_until(lambda: len(ledger.connected) >= 0.5 * streams))
    outcome.streams_back_s.append(await seconds_until(lambda: len(ledger.connected) >= 0.95 * streams))
    back = max(1, len(ledger.connected))
    outcome.cpu_ms_per_stream.append(1e3 * served.cpu_s() / back)
    outcome.load_cpu_ms_per_stream.append(1e3 * (own_cpu_s() - own_s) / back)
    outcome.grants_after += history.grants - grants
    return served


async def _settled(ledger: Ledger, served: Served, workers: int, load: asyncio.Task[None]) -> None:
    """Until every worker has a lease and its join is a while ago, or a stated time has passed."""
    until = time.monotonic() + 30 + workers / 20
    while len(ledger.history.held) < 0.97 * workers and time.monotonic() < until and not load.done():
        served.check_alive()
        await asyncio.sleep(0.5)
    await asyncio.sleep(3 * HEARTBEAT_S)
    if load.done():
        load.result()


def rows_of(outcome: Outcome, workers: int) -> list[dict[str, object]]:
    row = lambda name, value, unit, target, better="lower": {  # noqa: E731
        "name": name, "value": round(value, 3), "unit": unit, "target": target, "better": better,
    }  # fmt: skip
    grants = outcome.grant_s
    return [
        row("workers", workers, "streams", 2000, "higher"),
        row("lease operations", len(grants) / outcome.window_s, "1/s", 50, "higher"),
        row("lease operation p50", 1e3 * statistics.median(grants or [float("nan")]), "ms", 50),
        row("lease operation p99", 1e3 * percentile(grants, 0.99), "ms", 50),
        row("lease operation, slowest", 1e3 * max(grants, default=float("nan")), "ms", 1000),
        row("coordinator's CPU", outcome.cpu, "cores", 1.0),
        row("coordinator's memory", outcome.memory_mb, "MB", 1024),
        row("coordinator's memory, peak", outcome.peak_memory_mb, "MB", 1024),
        row("heartbeats", outcome.heartbeats / outcome.window_s, "1/s", 0.99 * workers / HEARTBEAT_S, "higher"),
        row("load generator's CPU", outcome.load_cpu, "cores", 1.0),
        row("load generator's own lag, p99", 1e3 * percentile(outcome.load_lag_s, 0.99), "ms", 50),
        row("a join, coordinator's CPU", outcome.join_cpu_ms, "ms", 10),
        row("page's state, asked again at once, median", 1e3 * statistics.median(outcome.state_s), "ms", 20),
        row("page's state, a second later, median", 1e3 * statistics.median(outcome.state_later_s), "ms", 20),
        row("cold start", outcome.start_s, "s", 1.0),
        row("listening again after SIGKILL, median", statistics.median(outcome.listening_s), "s", 1.5),
        row("recovery after SIGKILL, median", statistics.median(outcome.recovery_s), "s", 3.0),
        row("recovery after SIGKILL, slowest", max(outcome.recovery_s), "s", 3.0),
        row("half of the streams back, median", statistics.median(outcome.half_back_s), "s", 10.0),
        row("95 % of streams back, median", statistics.median(outcome.streams_back_s), "s", 15.0),
        row("coordinator's CPU to restart, per stream", statistics.median(outcome.cpu_ms_per_stream), "ms", None),
        row("load generator's CPU, per stream", statistics.median(outcome.load_cpu_ms_per_stream), "ms", None),
        row("kills", len(outcome.recovery_s), "", 3, "higher"),
        row("violations of the history", len(outcome.violations), "", 0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--groups-per-s", type=float, default=50)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=280)
    own = parser.parse_args()
    outcome, doing = Outcome(), ["nothing yet"]
    gc.disable()  # the collector's walks over 2,000 workers of ours would be taken for the coordinator's pauses

    async def limited() -> None:
        async with asyncio.timeout(own.limit_s):
            doing.append("joining")
            with tempfile.TemporaryDirectory() as name:
                outcome.join_cpu_ms = await _joins(Path(name), min(own.workers, JOINS_MAX))
            await measure(outcome, own.workers, own.seconds, own.groups_per_s, own.kills, doing.append)

    try:
        asyncio.run(limited())
    except TimeoutError:
        sys.exit(f"not through within {own.limit_s:.0f} s; it was {doing[-1]}")
    for violation in outcome.violations[:20]:
        print(f"violation: {violation}")
    rows = rows_of(outcome, own.workers)
    print(f"{'coordinator':<46}{'ours':>12}  {'target':>8}  {'ratio':>7}")
    for row in rows:
        value, target = float(str(row["value"])), row["target"]
        asked = "" if target is None else f"{float(str(target)):g}"
        ratio = f"{value / float(str(target)):.2f}" if target else "-"
        print(f"{row['name']!s:<46}{value:>12.3f}  {asked:>8}  {ratio:>7} {row['unit']}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(1 if outcome.violations else 0)


if __name__ == "__main__":
    main()
