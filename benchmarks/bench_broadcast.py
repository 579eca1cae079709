"""Time until every worker holds a verified version, against the fluid bound: real node processes, real transports.

    make bench-broadcast                                   # the whole table, about 20 minutes
    python -m benchmarks.bench_broadcast --list            # the names of its parts, and about how long each takes
    python -m benchmarks.bench_broadcast --only homogeneous/4/ NAT       # some parts; their rows replace the old ones
    python -m benchmarks.bench_broadcast --short           # every cell with 16 MiB, 5 minutes: does it work?
    python -m benchmarks.bench_broadcast --only homogeneous/8 --mib 128 --scale 0.2 --repeat 3

With root, namespaces, /dev/net/tun and a C compiler every node gets a namespace of its own, and wan/emulator.c carries
its packets: real TCP over drop-tail links. Else the transport's shaper stands in, which has no TCP in it; the first
line says which. Ratio = slowest worker / fluid bound; in namespaces the bound counts TCP/IP headers. Rates are those of
broadcast_scene.py times a scale at which the machine's cores are not the limit (`cores` shows how many were used, and
says where they were). Baselines in the same run: star (the seed sends all, our transport), libtorrent (`pip install
libtorrent`) as it comes and tuned, and bytes over asyncio TLS with nothing else, for the CPU. Large fleets are the real
session cores on a virtual clock.

Results are written after each part, so an interrupted run leaves what it has; a part that fails is reported as failed
and the rest goes on. Every row says when and of which commit it was measured; rows of parts that did not run stay as they
are. With --short or another size nothing is written unless --out says where.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import broadcast_cpu
from benchmarks.broadcast_model.scenarios import (
    BroadcastOutcome as Simulated,
    broadcast,
    partly_needed_fleet,
    wan_fleet,
    weighted_and_alike,
)
from benchmarks.broadcast_run import Outcome, run
from benchmarks.broadcast_scene import (
    OWN_EARLIEST_TARGET,
    POLICER_QUEUE_S,
    Fault,
    Scene,
    fluid_s,
    make_partly_needed_scene,
    make_scene,
)
from benchmarks.wan.lab import QUEUE_S, missing
from echo2.broadcast.trees import plan

RESULTS = Path(__file__).parent / "results" / "broadcast.json"
CPU_S_PER_BYTE = 4e-8  # of a relayed byte, both ends and the emulator, and more with every neighbour: to choose a scale
NEIGHBOURS_DOUBLING_COST = 32
CORES_SHARE = 0.8
SATURATED_SHARE, LATE_SHARE = 0.85, 0.02
SHORT_MIB = 16
SEED_TARGET = 1.15
SIM_TARGET, PLAN_TARGET_MS, CONNECTIONS_TARGET = 1.15, 200.0, 32
WEIGHTED_WORKERS, WEIGHTED_STANDBY, WEIGHTED_SHARE, WEIGHTED_MIB, WEIGHTED_TARGET = 16, 4, 0.9, 64, 1.0
LATE_WORKERS, LATE_STANDBY, LATE_MIB = 8, 2, 24  # as many as two cores carry at a quarter of the rates
SIM_MIB = {64: 64, 256: 64, 1000: 128}  # larger fleets have longer paths: short artifacts are not limited by rates
START_AND_END_S = 8.0  # of a cell's processes, beside the broadcast
HEADER = (
    "| links | workers | method | scale | MiB | slowest s | bound s | ratio | target | seed sent / optimum | dup % "
    "| cores | cpu s / GiB | late % | dropped |"
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
    is_seed_natted: bool = False
    loss: float = 0.0
    fault: Fault | None = None
    is_bbr_offered: bool = True
    is_second: bool = False
    versions: int = 1
    is_ipv6: bool = False
    swing_s: float = 0.0
    queue_s: float = QUEUE_S

    def scene(self) -> Scene:
        scale = self.scale or scale_for(self.kind, self.workers)
        made = make_scene(
            self.kind, self.workers, scale=scale, mib=self.mib, chunk_kib=self.chunk_kib, fault=self.fault,
            natted=self.natted, loss=self.loss,
        )  # fmt: skip
        seed = replace(made.nodes[0], is_natted=self.is_seed_natted)
        nodes = (seed, *made.nodes[1:])
        kind = f"{made.kind}, full rates" if self.scale == 1.0 else made.kind
        return replace(
            made,
            kind=kind,
            nodes=nodes,
            is_bbr_offered=self.is_bbr_offered,
            is_second=self.is_second,
            versions=self.versions,
            is_ipv6=self.is_ipv6,
            swing_s=self.swing_s,
            queue_s=self.queue_s,
        )

    @property
    def name(self) -> str:
        return f"{self.scene().name}/{self.workers}/{self.method}"


BOTH = ("homogeneous", "heterogeneous")
OF_LINKS = (("slow downlink", 6, 48), ("giant relay", 8, 64), ("home uplinks", 6, 32))
TABLE = (
    *(Cell(kind, 8) for kind in BOTH),
    *(Cell(kind, 4) for kind in BOTH),
    *(Cell("homogeneous", 4, method, 256, scale=1.0) for method in ("echo2", "libtorrent tuned")),
    Cell("homogeneous", 8, fault=Fault("dies")),
    Cell("homogeneous", 8, natted=2, loss=0.001),
    Cell("homogeneous", 8, natted=2, loss=0.001, is_bbr_offered=False),
    *(Cell(kind, 8, "libtorrent tuned") for kind in BOTH),
    *(Cell(kind, 8, "libtorrent") for kind in BOTH),
    *(Cell(kind, count, method, mib) for kind, count, mib in OF_LINKS for method in ("echo2", "libtorrent tuned")),
    *(Cell("heterogeneous", 10, method, 64, natted=3, loss=0.003) for method in ("echo2", "libtorrent tuned")),
    *(Cell("homogeneous", 8, method, 64, is_seed_natted=True) for method in ("echo2", "libtorrent tuned")),
    *(Cell("homogeneous", 8, method, 64, is_ipv6=True) for method in ("echo2", "libtorrent tuned")),
    *(Cell("thin pipe", 8, method, 64) for method in ("echo2", "libtorrent tuned")),
    *(Cell("homogeneous", 8, method, 64, swing_s=4.0) for method in ("echo2", "libtorrent tuned")),
    *(Cell("homogeneous", 8, method, 64, queue_s=POLICER_QUEUE_S) for method in ("echo2", "libtorrent tuned")),
    *(Cell("satellite", 6, method, 64) for method in ("echo2", "libtorrent tuned")),
    *(Cell("small delta", 8, method, 2) for method in ("echo2", "libtorrent tuned")),
    Cell("small delta", 8, mib=2, is_second=True),
    Cell("homogeneous", 8, mib=48, versions=3),
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
        f"{100 * got.late:.2f} | {got.dropped} |"
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
        way_s = scene.path_s if cell.kind == "small delta" else 0.0  # of a short transfer it is no small part
        ratio = statistics.median([got.slowest_s / (got.bound_s + way_s) for got in outcomes])
        bound = "x fluid bound + one way over a relay" if way_s else "x fluid bound"
        rows.append(row(f"{where}/{cell.method}", ratio, f"{bound} ({conditions})", scene.target if is_ours else None))
    for number in range(1, cell.versions):
        ratio = statistics.median([got.version_ratios[number - 1] for got in outcomes])
        bound = f"x fluid bound of {number}/{cell.versions} of the bytes"
        rows.append(row(f"{where}/{cell.method}, version {number}", ratio, bound, scene.target))
    if cell.kind == "slow downlink":
        own = scene.own_earliest_s(scene.overhead)
        others = [name for name, time_s in own.items() if time_s < 0.99 * max(own.values())]
        mean = statistics.median(
            [sum(got.times[name] / own[name] for name in others) / len(others) for got in outcomes]
        )
        print(f"{where}, {cell.method}: the others' mean is {mean:.3f} of their own earliest times", flush=True)
        target = OWN_EARLIEST_TARGET if is_ours else None
        rows.append(row(f"{where}/{cell.method}, others", mean, "x their own earliest times, mean", target))
    if is_ours:
        sent = statistics.median([got.seed_sent_bytes / scene.optimum_seed_bytes() for got in outcomes])
        has_goal = scene.fault is None
        rows.append(row(f"{where}/learner sent", sent, "x fluid optimum", SEED_TARGET if has_goal else None))
        most = max(got.connections for got in outcomes)
        rows.append(row(f"{where}/connections", most, "of the node with the most", CONNECTIONS_TARGET))
        memory = statistics.median([got.rss_mib for got in outcomes])
        rows.append(row(f"{where}/memory", memory, "MiB, of the largest node's process", None))
        rows.append(row(f"{where}/cores used", statistics.median([got.cores_used for got in outcomes]), "cores", None))
    dropped = statistics.median([got.dropped for got in outcomes])
    rows.append(row(f"{where}/{cell.method}, dropped", dropped, "packets that queues had no room for", None))
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
            if got.versions_s:
                print("versions: " + ", ".join(f"{ratio:.3f}" for ratio in got.version_ratios), flush=True)
    if outcomes:
        return kept(cell, scene, outcomes)
    target = scene.target if cell.method == "echo2" else None
    return [row(f"{scene.name}/{cell.workers}/{cell.method}", None, f"failed: {failure[:200]}", target)]


def _simulate(kind: str, count: int, mib: int) -> Simulated:
    return broadcast(wan_fleet(kind, count), mib << 20, 256 << 10)


def simulated(fleets: list[tuple[str, int]]) -> Iterator[list[dict[str, Any]]]:
    """The real session cores on a virtual clock, a fleet per core of this machine at a time; rows do not depend on it."""
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        sizes = [SIM_MIB.get(count, 128) for _, count in fleets]
        waiting = {
            pool.submit(_simulate, kind, count, mib): (kind, count, mib)
            for (kind, count), mib in zip(fleets, sizes, strict=True)
        }
        for done in as_completed(waiting):
            kind, count, mib = waiting[done]
            got = done.result()
            print(
                f"| {kind}, simulated | {count} | echo2 | 1 | {mib} | {got.slowest_s:.2f} | {got.bound_s:.2f} | "
                f"{got.ratio:.3f} | {SIM_TARGET} | {got.seed_copies:.2f} copies | 0 | - | - | - |", flush=True,
            )  # fmt: skip
            yield [
                row(f"{kind}, simulated/{count}/echo2", got.ratio, f"x fluid bound ({mib} MiB)", SIM_TARGET),
                row(
                    f"{kind}, simulated/{count}/connections", got.degree, "of the node with the most",
                    CONNECTIONS_TARGET,
                ),
            ]  # fmt: skip


def weighted() -> list[dict[str, Any]]:
    """When the needed part of a pool holds a version, by the plan that weighs workers and by the one that does not: the
    real session cores on a virtual clock."""
    nodes, needs = partly_needed_fleet(WEIGHTED_WORKERS, WEIGHTED_STANDBY, WEIGHTED_SHARE)
    ours, alike = weighted_and_alike(nodes, needs, WEIGHTED_MIB << 20, 256 << 10)
    where = f"weighted, simulated/{WEIGHTED_WORKERS}"
    part = f"{needs.share:.0%} of the rate; {WEIGHTED_STANDBY} slow on standby, {WEIGHTED_MIB} MiB"
    print(
        f"{where}: needed part after {ours.needed_s:.2f} s (predicted {ours.predicted_needed_s:.2f}), all after "
        f"{ours.all_s:.2f} s; with all alike {alike.needed_s:.2f} s and {alike.all_s:.2f} s", flush=True,
    )  # fmt: skip
    return [
        row(f"{where}/needed part", ours.needed_s / alike.needed_s, f"x plan with all alike ({part})", WEIGHTED_TARGET),
        row(f"{where}/all", ours.all_s / alike.all_s, f"x plan with all alike ({part})", None),
        row(f"{where}/prediction", ours.needed_s / ours.predicted_needed_s, "x predicted, of the needed part", None),
    ]


def late_workers(options: argparse.Namespace, in_lab: bool) -> list[dict[str, Any]]:
    """The same question of real processes: when the needed part holds a version, by either plan."""
    scene = make_partly_needed_scene(
        LATE_WORKERS, LATE_STANDBY, share=WEIGHTED_SHARE, scale=options.scale or 0.25,
        mib=options.mib or (SHORT_MIB if options.short else LATE_MIB),
    )  # fmt: skip
    scene = replace(scene, is_bbr_offered=not options.without_bbr)
    needed, last, connections = dict[str, list[float]](), dict[str, list[float]](), 0
    where = f"weighted/{LATE_WORKERS}"
    part = f"{scene.share:.0%} of the rate; {LATE_STANDBY} slow on standby, {scene.size_bytes >> 20} MiB"
    try:
        for method in ("echo2", "all alike") * options.repeat:
            got = run(
                scene, method, in_lab=in_lab, congestion_control=options.congestion_control, is_lifted=True,
                limit_s=options.limit_s,
            )  # fmt: skip
            needed_s = scene.needs.needed_s([got.times[node.name] for node in scene.nodes[1:]])
            needed.setdefault(method, []).append(needed_s)
            last.setdefault(method, []).append(got.slowest_s)
            connections = max(connections, got.connections)
            print(
                f"{where}, {method}: needed part after {needed_s:.2f} s, all after {got.slowest_s:.2f} s; "
                f"{got.cores_used:.2f} cores{' (saturated)' if is_saturated(got) else ''}", flush=True,
            )  # fmt: skip
    except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"{where}: failed: {error}", flush=True)
        return [row(f"{where}/needed part", None, f"failed: {str(error)[:200]}", WEIGHTED_TARGET)]
    ours, alike = statistics.median(needed["echo2"]), statistics.median(needed["all alike"])
    all_ours, all_alike = statistics.median(last["echo2"]), statistics.median(last["all alike"])
    return [
        row(f"{where}/needed part", ours / alike, f"x plan with all alike ({part})", WEIGHTED_TARGET),
        row(f"{where}/all", all_ours / all_alike, f"x plan with all alike ({part})", None),
        row(f"{where}/connections", connections, "of the node with the most", CONNECTIONS_TARGET),
    ]


def plan_time() -> list[dict[str, Any]]:
    """CPU time of one plan; the least of three."""
    rows = []
    for count in SIM_MIB:
        nodes, taken = wan_fleet("heterogeneous", count), list[float]()
        for _ in range(3):
            begun = time.process_time()
            plan(nodes, 1, 128 << 20, 256 << 10)
            taken.append(1e3 * (time.process_time() - begun))
        print(f"a plan for {count} workers: {min(taken):.0f} ms", flush=True)
        rows.append(row(f"plan for {count} workers", min(taken), "ms", PLAN_TARGET_MS))
    return rows


def loopback_cost() -> list[dict[str, Any]]:
    """CPU of one byte moved over loopback, both ends: through relays that check and store it, and by TLS alone."""
    raw, ours = broadcast_cpu.cpu_s_per_gib(), broadcast_cpu.relayed_cpu_s_per_gib()
    print(f"over loopback, CPU s per GiB, both ends: ours {ours:.1f}, asyncio TLS alone {raw:.1f}", flush=True)
    return [
        row("loopback/echo2, CPU", ours, "CPU s per relayed GiB", None),
        row("loopback/asyncio TLS, CPU", raw, "CPU s per GiB", None),
    ]


def _measured_alone(cell: Cell, options: argparse.Namespace, in_lab: bool) -> list[list[dict[str, Any]]]:
    return [measured(cell, options, in_lab)]


def _commit() -> str:
    """Of the code that runs; with a mark where it has changes that are not committed."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    others = [line for line in changed.stdout.splitlines() if "/results/" not in line]
    return head.stdout.strip() + (" and changes" if others else "")


class Results:
    """The rows of a file, on disk after each addition; `path` None: only printed. A row replaces that of its name."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._commit = _commit()
        is_there = path is not None and path.exists()
        self._rows: dict[str, dict[str, Any]] = (
            {kept["name"]: kept for kept in json.loads(path.read_text())} if path is not None and is_there else {}
        )

    def add(self, rows: list[dict[str, Any]]) -> None:
        measured = {"measured": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "commit": self._commit}
        self._rows |= {added["name"]: added | measured for added in rows}
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(json.dumps(list(self._rows.values()), indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Part:
    """What --only names; `about_s`: how long it takes."""

    name: str
    about_s: float
    run: Callable[[], Iterable[list[dict[str, Any]]]]


def parts_of(options: argparse.Namespace, in_lab: bool) -> list[Part]:
    found = [Part("loopback", 30, lambda: [loopback_cost()]), Part("plan", 1, lambda: [plan_time()])]
    found.append(Part("weighted, simulated", 8, lambda: [weighted()]))
    found.append(Part("weighted", 85 * options.repeat, lambda: [late_workers(options, in_lab)]))
    for cell in cells_of(options, in_lab):
        copies = 5 if cell.method == "star" else 1.2
        about_s = options.repeat * (START_AND_END_S + copies * cell.scene().bound_s(cell.scene().overhead))
        found.append(Part(cell.name, about_s, partial(_measured_alone, cell, options, in_lab)))
    fleets = [(kind, count) for count in sorted(options.sim, reverse=True) for kind in BOTH]
    if fleets:
        found.append(Part("simulated", 0.15 * sum(count for _, count in fleets), lambda: simulated(fleets)))
    return [part for part in found if not options.only or any(name in part.name for name in options.only)]


def cells_of(options: argparse.Namespace, in_lab: bool) -> list[Cell]:
    found = []
    for cell in TABLE:
        if cell.method == "asyncio TLS" and not in_lab:
            continue  # it has no shaper; loopback_cost tells what it costs
        if cell.method.startswith("libtorrent") and not (in_lab and importlib.util.find_spec("libtorrent")):
            print(f"left out: {cell.name} (needs namespaces and `pip install libtorrent`)")
            continue
        mib = options.mib or (min(cell.mib, SHORT_MIB) if options.short else cell.mib)
        is_bbr_offered = cell.is_bbr_offered and not options.without_bbr
        found.append(replace(cell, mib=mib, scale=options.scale or cell.scale, is_bbr_offered=is_bbr_offered))
    return found


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="parts whose name has one of these in it")
    parser.add_argument("--list", action="store_true", help="the parts and about how long each takes; runs nothing")
    parser.add_argument("--short", action="store_true", help=f"{SHORT_MIB} MiB in every cell")
    parser.add_argument("--repeat", type=int, default=1, help="of each cell; medians are kept")
    parser.add_argument("--mib", type=float, default=0.0)
    parser.add_argument("--scale", type=float, default=0.0, help="of the rates; 0: chosen by the number of cores")
    parser.add_argument("--congestion-control", default="cubic")
    parser.add_argument(
        "--without-bbr", action="store_true", help="every cell as in a container that may not choose it"
    )
    parser.add_argument("--limit-s", type=float, default=240.0, help="after which a cell counts as failed")
    parser.add_argument("--shaped", action="store_true", help="the transport's shaper even where namespaces are")
    parser.add_argument("--sim", type=int, nargs="*", default=list(SIM_MIB), help="fleets to simulate")
    parser.add_argument("--out", type=Path, help=f"where the rows go; the whole table: {RESULTS.name}")
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
    lacking = "asked for" if options.shaped else missing()
    print(f"network: {'transport-level shaper (' + lacking + ')' if lacking else 'namespaces, real TCP, own emulator'}")
    is_kept = not (options.short or options.mib or options.scale or options.shaped or options.without_bbr)
    parts = parts_of(options, not lacking)
    if options.list:
        for part in parts:
            print(f"{part.about_s:5.0f} s  {part.name}")
        print(f"{sum(part.about_s for part in parts):5.0f} s  in all")
        return 0
    results = Results(options.out or (RESULTS if is_kept else None))
    print(HEADER + "\n" + "|---" * (HEADER.count("|") - 1) + "|", flush=True)
    for part in parts:
        for rows in part.run():
            results.add(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
