"""The coordinator under load: lease latency, CPU and memory with thousands of real gRPC streams, and recovery from kills.

    python -m benchmarks.bench_coordinator [--workers 2000] [--seconds 30] [--kills 3]

The coordinator runs as a process of its own; the simulated fleet, real streams over mutual TLS, in this one. A lease
operation is the time from a worker's request until its grant arrives; heartbeats, progress and ends come beside it. After
the measured window the coordinator is killed with SIGKILL under the same load and started again at once, several times;
recovery is the time from the kill to the first grant after it. The state that each kill leaves is copied before the
restart and held against what the fleet had been told, and the whole history against the invariants
(coordinator_history): the number of violations is a row of the table.
"""

from __future__ import annotations

import argparse
import asyncio
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
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.coordinator_load import Ledger, Shape, run_load
from echo2.base.ids import RunId
from echo2.coordinator.runtime.store import SqlStore
from echo2.coordinator.saved import SavedState

RESULTS = Path(__file__).parent / "results" / "coordinator.json"
RUN = RunId("bench")
RECOVERY_S_MAX = 60.0
HEARTBEAT_S = 5.0
_SERVE = """
import asyncio, pathlib, sys
from echo2.base.ids import RunId
from echo2.coordinator.options import CoordinatorOptions, PlannerMode
from echo2.coordinator.runtime.daemon import CoordinatorDaemon
async def main():
    daemon = CoordinatorDaemon(CoordinatorOptions(RunId("bench"), pathlib.Path(sys.argv[1]), enrol_port=0, port=0,
        dashboard_port=0, heartbeat_interval_s=float(sys.argv[2]), planner_mode=PlannerMode.ADVISE))
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
        self.start_s = time.monotonic() - self.began

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self, name: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) / 1024

    def kill(self) -> None:
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
    memory_mb: float = 0.0
    peak_memory_mb: float = 0.0
    listening_s: list[float] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    streams_back_s: list[float] = field(default_factory=list)
    grants_after: int = 0
    violations: list[str] = field(default_factory=list)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def copied_state(folder: Path, to: Path) -> Path:
    """What the dead process has left on disk."""
    to.mkdir()
    for path in (folder / "coordinator").glob("state.sqlite*"):
        shutil.copy(path, to / path.name)
    return to / "state.sqlite"


def loaded(path: Path) -> SavedState:
    with closing(SqlStore(f"sqlite:///{path}", RUN)) as store:
        return store.load()


async def measure(workers: int, seconds: float, groups_per_s: float, kills: int) -> Outcome:
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name:
        folder, ledger = Path(name) / "run", Ledger()
        served = Served(folder)
        await served.wait_until_it_listens()
        outcome.start_s = served.start_s
        # Work lasts so long that the fleet finishes a little more than `groups_per_s` groups a second, four kinds of
        # GPU of 1.98 on average; groups are always queued.
        shape = Shape(workers, groups_per_s, 1.8 * workers / groups_per_s, HEARTBEAT_S, int(1.5 * workers) + 100)
        load = asyncio.create_task(run_load(folder, RUN, served.address, shape, 3600, ledger))
        await _settled(ledger, workers, load)
        await _window(outcome, ledger, served, seconds)
        states: list[tuple[Path, set[str]]] = []
        for number in range(kills):
            served = await _killed(outcome, ledger, served, folder, states, Path(name) / f"kill-{number}", workers)
            await asyncio.sleep(min(seconds, 5))
        load.cancel()
        ended = (await asyncio.gather(load, return_exceptions=True))[0]
        await asyncio.sleep(1.0)  # what was said is heard
        served.kill()
        if isinstance(ended, Exception):
            raise ended
        offered = set().union(*(groups for _, groups in states)) if states else set()
        outcome.violations += ledger.history.judge(loaded(copied_state(folder, Path(name) / "end")), offered)
    return outcome


async def _window(outcome: Outcome, ledger: Ledger, served: Served, seconds: float) -> None:
    ledger.grant_s.clear()
    operations, cpu_s, began = ledger.history.operations, served.cpu_s(), time.monotonic()
    own = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(seconds)
    outcome.window_s = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    outcome.cpu = (served.cpu_s() - cpu_s) / outcome.window_s
    outcome.load_cpu = (after.ru_utime + after.ru_stime - own.ru_utime - own.ru_stime) / outcome.window_s
    outcome.grant_s, outcome.operations = list(ledger.grant_s), ledger.history.operations - operations
    outcome.memory_mb, outcome.peak_memory_mb = served.memory_mb("VmRSS"), served.memory_mb("VmHWM")


async def _killed(
    outcome: Outcome,
    ledger: Ledger,
    served: Served,
    folder: Path,
    states: list[tuple[Path, set[str]]],
    copy_to: Path,
    workers: int,
) -> Served:
    history, streams = ledger.history, len(ledger.connected)
    offered, grants = set(history.offered), history.grants
    at = time.monotonic()
    served.kill()
    copy = copied_state(folder, copy_to)
    # Judged before another answer can come: nothing that was told may be missing.
    judging = time.monotonic()
    outcome.violations += history.judge_saved(loaded(copy))
    at += time.monotonic() - judging
    states.append((copy, offered))
    served = Served(folder)
    await served.wait_until_it_listens()
    outcome.listening_s.append(time.monotonic() - at)
    while history.grants == grants and time.monotonic() - at < RECOVERY_S_MAX:
        await asyncio.sleep(0.01)
    outcome.recovery_s.append(time.monotonic() - at)
    while len(ledger.connected) < 0.95 * streams and time.monotonic() - at < RECOVERY_S_MAX:
        await asyncio.sleep(0.02)
    outcome.streams_back_s.append(time.monotonic() - at)
    outcome.grants_after += history.grants - grants
    return served


async def _settled(ledger: Ledger, workers: int, load: asyncio.Task[None]) -> None:
    """Until every worker has a lease and its join is a while ago, or a stated time has passed."""
    until = time.monotonic() + 60 + workers / 10
    while len(ledger.history.held) < 0.97 * workers and time.monotonic() < until and not load.done():
        await asyncio.sleep(0.5)
    await asyncio.sleep(2 * HEARTBEAT_S)
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
        row("load generator's CPU", outcome.load_cpu, "cores", 1.0),
        row("cold start", outcome.start_s, "s", 1.0),
        row("listening again after SIGKILL, median", statistics.median(outcome.listening_s), "s", 1.5),
        row("recovery after SIGKILL, median", statistics.median(outcome.recovery_s), "s", 3.0),
        row("recovery after SIGKILL, slowest", max(outcome.recovery_s), "s", 3.0),
        row("95 % of streams back, median", statistics.median(outcome.streams_back_s), "s", 15.0),
        row("kills", len(outcome.recovery_s), "", 3, "higher"),
        row("violations of the history", len(outcome.violations), "", 0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--groups-per-s", type=float, default=50)
    parser.add_argument("--kills", type=int, default=3)
    own = parser.parse_args()
    outcome = asyncio.run(measure(own.workers, own.seconds, own.groups_per_s, own.kills))
    for violation in outcome.violations[:20]:
        print(f"violation: {violation}")
    rows = rows_of(outcome, own.workers)
    print(f"{'coordinator':<46}{'ours':>12}  {'target':>8}  {'ratio':>7}")
    for row in rows:
        value, target = float(str(row["value"])), float(str(row["target"]))
        ratio = f"{value / target:.2f}" if target else "-"
        print(f"{row['name']!s:<46}{value:>12.3f}  {target:>8g}  {ratio:>7} {row['unit']}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(1 if outcome.violations else 0)


if __name__ == "__main__":
    main()
