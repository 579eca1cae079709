"""The coordinator under load: lease latency, CPU and memory with thousands of real gRPC streams, and recovery from a kill.

    python -m benchmarks.bench_coordinator [--workers 2000] [--seconds 60]

The coordinator runs as a process of its own; the simulated fleet in this one. Half way the coordinator is killed with
SIGKILL and started again. A lease operation is the time from a worker's request until its grant arrives; recovery is
the time from the kill until the first grant after it. The history is checked: no attempt at a group was ever granted to
two workers, and no group that the learner wants was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.coordinator_load import Ledger, Shape, run_load
from echo2.base.ids import RunId

RESULTS = Path(__file__).parent / "results" / "coordinator.json"
RUN = RunId("bench")
_SERVE = """
import asyncio, pathlib, sys
from echo2.base.ids import RunId
from echo2.coordinator.options import CoordinatorLimits, CoordinatorOptions
from echo2.coordinator.runtime.daemon import CoordinatorDaemon
async def main():
    daemon = CoordinatorDaemon(CoordinatorOptions(RunId("bench"), pathlib.Path(sys.argv[1]), enrol_port=0, port=0,
        dashboard_port=0, heartbeat_interval_s=5.0))
    task = asyncio.create_task(daemon.run())
    await daemon.started.wait()
    print(daemon.services_address, flush=True)
    await task
asyncio.run(main())
"""


class Served:
    """The coordinator's process."""

    def __init__(self, folder: Path) -> None:
        began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.start_s = time.monotonic() - began

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


async def measure(workers: int, seconds: float, groups_per_s: float) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as name:
        folder, ledger = Path(name), Ledger()
        served = Served(folder)
        # Work lasts so long that the fleet finishes `groups_per_s` groups a second; groups are always queued.
        shape = Shape(workers, groups_per_s, max(1.0, 1.5 * workers / groups_per_s), 5.0, int(1.5 * workers) + 100)
        load = asyncio.create_task(run_load(folder, RUN, served.address, shape, 3600, ledger))
        await _settled(ledger, workers, load)
        ledger.grant_s.clear()
        cpu_s, began = served.cpu_s(), time.monotonic()
        await asyncio.sleep(seconds)
        cpu, grants = (served.cpu_s() - cpu_s) / (time.monotonic() - began), list(ledger.grant_s)
        memory_mb, start_s = served.memory_mb(), served.start_s
        killed = time.monotonic()
        served.kill()
        served = Served(folder)
        before = len(ledger.granted)
        while len(ledger.granted) == before and not load.done() and time.monotonic() - killed < 60:
            await asyncio.sleep(0.02)
        recovery_s = time.monotonic() - killed
        await asyncio.sleep(min(seconds, 15))
        went_on = len(ledger.granted) - before
        load.cancel()
        outcome = (await asyncio.gather(load, return_exceptions=True))[0]
        served.kill()
        if isinstance(outcome, AssertionError):
            raise outcome
    row = lambda name, value, unit, target, better="lower": {  # noqa: E731
        "name": name, "value": round(value, 3), "unit": unit, "target": target, "better": better,
    }  # fmt: skip
    return [
        row("workers", workers, "streams", 2000, "higher"),
        row("lease operations", len(grants) / seconds, "1/s", 50, "higher"),
        row("lease operation p50", 1e3 * statistics.median(grants or [float("nan")]), "ms", 50),
        row("lease operation p99", 1e3 * percentile(grants, 0.99), "ms", 50),
        row("coordinator's CPU", cpu, "cores", 1.0),
        row("coordinator's memory, peak", memory_mb, "MB", 1024),
        row("cold start", start_s, "s", 1.0),
        row("recovery after SIGKILL, to the first grant", recovery_s, "s", 3.0),
        row("grants after recovery", went_on, "", 1, "higher"),
        row("attempts granted twice", 0, "", 0),
    ]


async def _settled(ledger: Ledger, workers: int, load: asyncio.Task[None]) -> None:
    """Until every worker has been given something, or a stated time has passed."""
    until = time.monotonic() + 60 + workers / 10
    while len(set(ledger.granted.values())) < 0.98 * workers and time.monotonic() < until and not load.done():
        await asyncio.sleep(0.5)
    if load.done():
        load.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--groups-per-s", type=float, default=50)
    own = parser.parse_args()
    rows = asyncio.run(measure(own.workers, own.seconds, own.groups_per_s))
    print(f"{'coordinator':<46}{'ours':>12}  {'target':>8}  {'ratio':>7}")
    for row in rows:
        value, target = float(str(row["value"])), float(str(row["target"]))
        ratio = f"{value / target:.2f}" if target else "-"
        print(f"{row['name']!s:<46}{value:>12.3f}  {target:>8g}  {ratio:>7} {row['unit']}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
