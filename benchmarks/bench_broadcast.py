"""Time until every worker holds a verified version, against the fluid bound: real node processes, real transports.

    make bench-broadcast
    python -m benchmarks.bench_broadcast [--workers 4 8] [--kind homogeneous] [--mib 128] [--scale 0.15] [--sim 64 1000]

With root, namespaces, /dev/net/tun and a C compiler every node gets a namespace of its own, and wan/emulator.c carries
its packets: real TCP over drop-tail links. Else the transport's shaper stands in, which has no TCP in it; the first
line says which. Ratio = slowest worker / fluid bound; in namespaces the bound counts TCP/IP headers. Rates are those of
broadcast_scene.py times a scale at which the machine's cores are not the limit; `cores` shows how many were used.
Baselines: star (the seed sends all, our transport) and libtorrent (`pip install libtorrent`), the better of two
settings. Large fleets are the real session cores on a virtual clock.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks import broadcast_cpu
from benchmarks.broadcast_run import Outcome, run
from benchmarks.broadcast_scene import Fault, Scene, fluid_s, make_scene
from benchmarks.wan.lab import missing
from echo2.sim.broadcast_scenarios import broadcast, wan_fleet

RESULTS = Path(__file__).parent / "results" / "broadcast.json"
CPU_S_PER_BYTE = 6e-8  # of a relayed byte, both ends and the emulator: only for choosing a scale
CORES_SHARE = 0.55
STAR_MIB = 4  # star's ratio does not depend on the size, its time does
SIM_TARGET = 1.15
HEADER = (
    "| links | workers | method | scale | MiB | slowest s | bound s | ratio | target | seed sent / optimum | dup % "
    "| cores | cpu s / GiB | late % |"
)


def scale_for(kind: str, workers: int) -> float:
    """The largest scale, up to a quarter, that leaves the cores room."""
    full = make_scene(kind, workers, scale=1.0, mib=1, chunk_kib=64)
    relayed_per_s = workers * full.size_bytes / fluid_s(full.nodes, full.size_bytes)
    return float(min(0.25, CORES_SHARE * (os.cpu_count() or 1) / (relayed_per_s * CPU_S_PER_BYTE)))


def scenes(options: argparse.Namespace) -> list[Scene]:
    def scene(kind: str, workers: int, **more: Any) -> Scene:
        scale = options.scale or scale_for(kind, workers)
        return make_scene(kind, workers, scale=scale, mib=options.mib, chunk_kib=options.chunk_kib, **more)

    found = [scene(kind, workers) for kind in options.kind for workers in options.workers]
    if not options.no_faults:
        found += [scene("homogeneous", 8, fault=Fault("dies")), scene("homogeneous", 8, natted=2, loss=0.001)]
    return found


def row(scene: Scene, got: Outcome) -> str:
    target = scene.target if got.method == "echo2" else None
    scale = scene.nodes[0].up / 25e6
    return (
        f"| {scene.name} | {scene.workers} | {got.method} | {scale:.3f} | {scene.size_bytes >> 20} | "
        f"{got.slowest_s:.2f} | {got.bound_s:.2f} | {got.ratio:.3f} | {target or '-'} | "
        f"{got.seed_sent_bytes / scene.optimum_seed_bytes():.2f} | "
        f"{100 * got.duplicate_bytes / max(1, got.sent_bytes):.2f} | {got.cores_used:.2f} | "
        f"{got.cpu_s / (scene.workers * scene.size_bytes / 2**30):.0f} | {100 * got.late:.2f} |"
    )


def measured(scene: Scene, options: argparse.Namespace, in_lab: bool) -> list[dict[str, Any]]:
    """Prints the scene's lines; the rows to keep."""
    rows: list[dict[str, Any]] = []
    has_fault = scene.fault is not None or any(node.is_natted for node in scene.nodes)
    for method in options.method:
        if (method == "star" and has_fault) or ("libtorrent" in method and not (in_lab and _has_libtorrent())):
            continue
        chosen = scene
        if method == "star" and options.mib > STAR_MIB:
            chosen = Scene(scene.kind, scene.nodes, STAR_MIB << 20, scene.chunk_bytes, scene.loss, scene.fault)
        got = run(chosen, method, in_lab=in_lab, congestion_control=options.congestion_control, is_lifted=True)
        print(row(chosen, got), flush=True)
        target = scene.target if method == "echo2" else None
        rows.append(_kept(f"{scene.name}/{scene.workers}/{method}", got.ratio, "x fluid bound", target))
        if method == "echo2":
            sent = got.seed_sent_bytes / scene.optimum_seed_bytes()
            has_goal = scene.fault is None
            rows.append(
                _kept(f"{scene.name}/{scene.workers}/seed sent", sent, "x fluid optimum", 1.15 if has_goal else None)
            )
            cost = got.cpu_s / (scene.workers * scene.size_bytes / 2**30)
            rows.append(_kept(f"{scene.name}/{scene.workers}/cpu", cost, "CPU s per relayed GiB", None))
    return rows


def simulated(workers: list[int], mib: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kind in ("homogeneous", "heterogeneous"):
        for count in workers:
            got = broadcast(wan_fleet(kind, count), mib << 20, 256 << 10)
            print(
                f"| {kind}, simulated | {count} | echo2 | 1 | {mib} | {got.slowest_s:.2f} | {got.bound_s:.2f} | "
                f"{got.ratio:.3f} | {SIM_TARGET} | {got.seed_copies:.2f} copies | 0 | - | - | - |", flush=True,
            )  # fmt: skip
            rows.append(_kept(f"{kind}, simulated/{count}/echo2", got.ratio, "x fluid bound", SIM_TARGET))
    return rows


def _kept(name: str, value: float, unit: str, target: float | None) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "unit": unit, "target": target, "better": "lower"}


def _has_libtorrent() -> bool:
    return importlib.util.find_spec("libtorrent") is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--kind", nargs="+", default=["homogeneous", "heterogeneous"])
    parser.add_argument("--method", nargs="+", default=["star", "libtorrent", "libtorrent tuned", "echo2"])
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--scale", type=float, default=0.0, help="of the rates; 0: chosen by the number of cores")
    parser.add_argument("--chunk-kib", type=int, default=0, help="0: chosen from the plan")
    parser.add_argument("--congestion-control", default="cubic")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--no-cpu", action="store_true")
    parser.add_argument("--shaped", action="store_true", help="the transport's shaper even where namespaces are")
    parser.add_argument("--sim", type=int, nargs="*", default=[64, 256], help="fleets to simulate")
    parser.add_argument("--sim-mib", type=int, default=128)
    options = parser.parse_args()
    lacking = "asked for" if options.shaped else missing()
    print(f"network: {'transport-level shaper (' + lacking + ')' if lacking else 'namespaces, real TCP, own emulator'}")
    if not _has_libtorrent():
        print("libtorrent is not installed: `pip install libtorrent` adds its rows")
    print(HEADER + "\n" + "|---" * (HEADER.count("|") - 1) + "|")
    rows: list[dict[str, Any]] = []
    for scene in scenes(options):
        rows += measured(scene, options, not lacking)
    rows += simulated(options.sim, options.sim_mib)
    if not options.no_cpu:
        raw = broadcast_cpu.cpu_s_per_gib()
        print(f"raw asyncio TLS over loopback: {raw:.1f} CPU s per GiB, both ends")
        rows.append(_kept("asyncio TLS/cpu", raw, "CPU s per GiB", None))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
