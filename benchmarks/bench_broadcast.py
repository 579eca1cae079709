"""Time until every worker holds a verified version, against the fluid bound: real node processes, real transports.

    make bench-broadcast                                   # the whole table, 15 to 18 minutes
    python -m benchmarks.bench_broadcast --short           # every cell with 16 MiB, 5 minutes: does it work?
    python -m benchmarks.bench_broadcast --only homogeneous/8 --mib 128 --scale 0.2 --repeat 3

With root, namespaces, /dev/net/tun and a C compiler every node gets a namespace of its own, and wan/emulator.c carries
its packets: real TCP over drop-tail links. Else the transport's shaper stands in, which has no TCP in it; the first
line says which. Ratio = slowest worker / fluid bound; in namespaces the bound counts TCP/IP headers. Rates are those of
broadcast_scene.py times a scale at which the machine's cores are not the limit (`cores` shows how many were used, and
says where they were). Baselines in the same run: star (the seed sends all, our transport), libtorrent (`pip install
libtorrent`) as it comes and tuned, and bytes over asyncio TLS with nothing else, for the CPU. Large fleets are the real
session cores on a virtual clock.

Results are written after each cell, so an interrupted run leaves what it has; a cell that fails is reported as failed
and the rest goes on. With --only, --short or another size nothing is written unless --out says where.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import broadcast_cpu
from benchmarks.broadcast_run import Outcome, run
from benchmarks.broadcast_scene import Fault, Scene, fluid_s, make_scene
from benchmarks.wan.lab import missing
from echo2.sim.broadcast_scenarios import broadcast, wan_fleet

RESULTS = Path(__file__).parent / "results" / "broadcast.json"
CPU_S_PER_BYTE = 4e-8  # of a relayed byte, both ends and the emulator, and more with every neighbour: to choose a scale
NEIGHBOURS_DOUBLING_COST = 32
CORES_SHARE = 0.8
SATURATED_SHARE, LATE_SHARE = 0.85, 0.02
SHORT_MIB = 16
SEED_TARGET = 1.15
SIM_TARGET = 1.15
HEADER = (
    "| links | workers | method | scale | MiB | slowest s | bound s | ratio | target | seed sent / optimum | dup % "
    "| cores | cpu s / GiB | late % |"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement of the table. `scale` 0: chosen by the number of cores."""

    kind: str
    workers: int
    method: str = "echo2"
    mib: float = 128
    scale: float = 0.0
    chunk_kib: int = 0  # 0: as the plan says
    natted: int = 0
    loss: float = 0.0
    fault: Fault | None = None

    def scene(self) -> Scene:
        scale = self.scale or scale_for(self.kind, self.workers)
        return make_scene(
            self.kind, self.workers, scale=scale, mib=self.mib, chunk_kib=self.chunk_kib, fault=self.fault,
            natted=self.natted, loss=self.loss,
        )  # fmt: skip

    @property
    def name(self) -> str:
        return f"{self.scene().name}/{self.workers}/{self.method}"


BOTH = ("homogeneous", "heterogeneous")
TABLE = (
    *(Cell(kind, 8) for kind in BOTH),
    *(Cell(kind, 4) for kind in BOTH),
    Cell("homogeneous", 8, fault=Fault("dies")),
    Cell("homogeneous", 8, natted=2, loss=0.001),
    *(Cell(kind, 8, "libtorrent tuned") for kind in BOTH),
    *(Cell(kind, 8, "libtorrent") for kind in BOTH),
    *(Cell(kind, 8, "star", mib=8) for kind in BOTH),  # its ratio does not depend on the size, its time does
    Cell("homogeneous", 8, "asyncio TLS", mib=8),
    # At the scale that two cores allow 16 workers, unequal ones would get chunks of 16 KiB, which cost twice the CPU.
    *(Cell(kind, 16, mib=64, chunk_kib=32) for kind in BOTH),
)


def scale_for(kind: str, workers: int) -> float:
    """The largest scale, up to a quarter, that leaves the cores room."""
    full = make_scene(kind, workers, scale=1.0, mib=1, chunk_kib=64)
    relayed_per_s = workers * full.size_bytes / fluid_s(full.nodes, full.size_bytes)
    cost = CPU_S_PER_BYTE * (1 + workers / NEIGHBOURS_DOUBLING_COST)
    return float(min(0.25, CORES_SHARE * (os.cpu_count() or 1) / (relayed_per_s * cost)))


def is_saturated(got: Outcome) -> bool:
    """Whether the machine may have been the limit: hardly a core was free, or the emulator came late."""
    return got.cores_used > SATURATED_SHARE * (os.cpu_count() or 1) or got.late > LATE_SHARE


def printed(cell: Cell, scene: Scene, got: Outcome) -> str:
    target = scene.target if cell.method == "echo2" else None
    return (
        f"| {scene.name} | {scene.workers} | {got.method} | {scene.nodes[0].up / 25e6:.3f} | {scene.size_bytes >> 20} | "
        f"{got.slowest_s:.2f} | {got.bound_s:.2f} | {got.ratio:.3f} | {target or '-'} | "
        f"{got.seed_sent_bytes / scene.optimum_seed_bytes():.2f} | "
        f"{100 * got.duplicate_bytes / max(1, got.sent_bytes):.2f} | "
        f"{got.cores_used:.2f}{' (saturated)' if is_saturated(got) else ''} | {got.cpu_s_per_gib(scene):.0f} | "
        f"{100 * got.late:.2f} |"
    )


def kept(cell: Cell, scene: Scene, outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """The rows of one cell: medians over its repetitions."""
    where = f"{scene.name}/{cell.workers}"
    conditions = f"{scene.size_bytes >> 20} MiB at {scene.nodes[0].up / 25e6:.3f} of the rates"
    if any(map(is_saturated, outcomes)):
        conditions += ", cores saturated"
    is_ours = cell.method == "echo2"
    rows = []
    if cell.method != "asyncio TLS":
        ratio = statistics.median([got.ratio for got in outcomes])
        rows.append(
            row(f"{where}/{cell.method}", ratio, f"x fluid bound ({conditions})", scene.target if is_ours else None)
        )
    if is_ours:
        sent = statistics.median([got.seed_sent_bytes / scene.optimum_seed_bytes() for got in outcomes])
        has_goal = scene.fault is None
        rows.append(row(f"{where}/learner sent", sent, "x fluid optimum", SEED_TARGET if has_goal else None))
        rows.append(row(f"{where}/cores used", statistics.median([got.cores_used for got in outcomes]), "cores", None))
    cost = statistics.median([got.cpu_s_per_gib(scene) for got in outcomes])
    rows.append(row(f"{where}/{cell.method}, CPU", cost, "CPU s per relayed GiB", None))
    return rows


def row(name: str, value: float | None, unit: str, target: float | None) -> dict[str, Any]:
    shown = None if value is None else round(value, 4)
    return {"name": name, "value": shown, "unit": unit, "target": target, "better": "lower"}


def measured(cell: Cell, options: argparse.Namespace, in_lab: bool) -> list[dict[str, Any]]:
    """Prints the cell's lines; its rows. A failure is a row too."""
    scene, outcomes, failure = cell.scene(), list[Outcome](), ""
    for _ in range(options.repeat):
        try:
            got = run(
                scene, cell.method, in_lab=in_lab, congestion_control=options.congestion_control, is_lifted=True,
                limit_s=options.limit_s,
            )  # fmt: skip
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            failure = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            print(f"| {scene.name} | {cell.workers} | {cell.method} | failed: {error} |", flush=True)
        else:
            outcomes.append(got)
            print(printed(cell, scene, got), flush=True)
    if outcomes:
        return kept(cell, scene, outcomes)
    target = scene.target if cell.method == "echo2" else None
    return [row(f"{scene.name}/{cell.workers}/{cell.method}", None, f"failed: {failure[:200]}", target)]


def simulated(workers: list[int], mib: int) -> Iterator[list[dict[str, Any]]]:
    for kind in BOTH:
        for count in workers:
            got = broadcast(wan_fleet(kind, count), mib << 20, 256 << 10)
            print(
                f"| {kind}, simulated | {count} | echo2 | 1 | {mib} | {got.slowest_s:.2f} | {got.bound_s:.2f} | "
                f"{got.ratio:.3f} | {SIM_TARGET} | {got.seed_copies:.2f} copies | 0 | - | - | - |", flush=True,
            )  # fmt: skip
            yield [row(f"{kind}, simulated/{count}/echo2", got.ratio, f"x fluid bound ({mib} MiB)", SIM_TARGET)]


def loopback_cost() -> list[dict[str, Any]]:
    """CPU of one byte moved over loopback, both ends: through relays that check and store it, and by TLS alone."""
    raw, ours = broadcast_cpu.cpu_s_per_gib(), broadcast_cpu.relayed_cpu_s_per_gib()
    print(f"over loopback, CPU s per GiB, both ends: ours {ours:.1f}, asyncio TLS alone {raw:.1f}", flush=True)
    return [
        row("loopback/echo2, CPU", ours, "CPU s per relayed GiB", None),
        row("loopback/asyncio TLS, CPU", raw, "CPU s per GiB", None),
    ]


class Results:
    """Rows so far, on disk after each addition; `path` None: only printed."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []

    def add(self, rows: list[dict[str, Any]]) -> None:
        self._rows += rows
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(json.dumps(self._rows, indent=1) + "\n")


def cells_of(options: argparse.Namespace, in_lab: bool) -> list[Cell]:
    found = []
    for cell in TABLE:
        if cell.method == "asyncio TLS" and not in_lab:
            continue  # it has no shaper; loopback_cost tells what it costs
        if cell.method.startswith("libtorrent") and not (in_lab and importlib.util.find_spec("libtorrent")):
            print(f"left out: {cell.name} (needs namespaces and `pip install libtorrent`)")
            continue
        mib = options.mib or (min(cell.mib, SHORT_MIB) if options.short else cell.mib)
        chosen = replace(cell, mib=mib, scale=options.scale or cell.scale)
        if not options.only or any(part in chosen.name for part in options.only):
            found.append(chosen)
    return found


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="cells whose name has one of these in it")
    parser.add_argument("--short", action="store_true", help=f"{SHORT_MIB} MiB in every cell")
    parser.add_argument("--repeat", type=int, default=1, help="of each cell; medians are kept")
    parser.add_argument("--mib", type=float, default=0.0)
    parser.add_argument("--scale", type=float, default=0.0, help="of the rates; 0: chosen by the number of cores")
    parser.add_argument("--congestion-control", default="cubic")
    parser.add_argument("--limit-s", type=float, default=240.0, help="after which a cell counts as failed")
    parser.add_argument("--shaped", action="store_true", help="the transport's shaper even where namespaces are")
    parser.add_argument("--sim", type=int, nargs="*", default=[64, 256], help="fleets to simulate")
    parser.add_argument("--sim-mib", type=int, default=64)
    parser.add_argument("--out", type=Path, help=f"where the rows go; the whole table: {RESULTS.name}")
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
    lacking = "asked for" if options.shaped else missing()
    print(f"network: {'transport-level shaper (' + lacking + ')' if lacking else 'namespaces, real TCP, own emulator'}")
    is_whole = not (options.only or options.short or options.mib or options.scale or options.shaped)
    results = Results(options.out or (RESULTS if is_whole else None))
    cells = cells_of(options, not lacking)
    print(HEADER + "\n" + "|---" * (HEADER.count("|") - 1) + "|", flush=True)
    if not options.only:
        results.add(loopback_cost())
    for cell in cells:
        results.add(measured(cell, options, not lacking))
    if not options.only:
        for rows in simulated(options.sim, options.sim_mib):
            results.add(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
