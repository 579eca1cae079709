"""Attackers beside an honest fleet of real daemons, one at a time; what each costs goes to benchmarks/results/redteam.json.

    python -m tests.redteam.run [--seconds 20] [--only NAME]

The fleet has one core of this machine and the attacker another, in a process of its own, so that the fleet loses what its own
daemons do for the attack and no more. Each attack comes in PAIRS windows, between windows without one: each window is compared
with its two neighbours, and the median of these is what is told, since other programs of the machine slow all windows alike but
not at once. Throughput in steps a second says what an attack keeps from the fleet by work or by waiting, steps a CPU second what
it does by work alone. First of all comes nobody: what the figures say where there is no attack.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echo2.trust.ports import SHUT_OUT_MAX_S
from tests.e2e.cluster import Cluster, small_run
from tests.redteam.attacking import ATTACKERS
from tests.redteam.cost import DAEMONS, Cost, attacking, cost_of, held_bytes
from tests.redteam.hostile import DESCRIPTORS
from tests.redteam.scene import scene_of
from tests.unit.learner.tiny import make_tiny_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "redteam.json"
KEPT_MIB_MAX, HELD_MS_MAX, KEPT_MIN, CORES_MAX = 64, 50, 0.9, 0.1
PAIRS = 5
NOBODY = "nobody"
FLEET_CORE, ATTACKER_CORE = 0, (os.cpu_count() or 1) - 1


Trio = tuple[Cost, Cost, Cost]
"""A window without an attack, one with it, and the next without."""


def kept(trios: list[Trio], rate: Callable[[Cost], float]) -> float:
    """Of what the neighbours of an attack reach, the share that the fleet reaches under it."""
    return statistics.median(rate(cost) / max(1e-9, (rate(before) + rate(after)) / 2) for before, cost, after in trios)


def rows_of(name: str, trios: list[Trio], kept_bytes: dict[str, int]) -> list[dict[str, Any]]:
    costs = [cost for _, cost, _ in trios]
    ended = {daemon for trio in trios for cost in trio for daemon in cost.ended}
    spent = [
        statistics.median(cost.spent_cores(daemon, before, after) for before, cost, after in trios)
        for daemon in DAEMONS
        if daemon not in ended
    ]

    def row(what: str, value: float, unit: str, target: float | None, better: str) -> dict[str, Any]:
        return {"name": f"{name}: {what}", "value": round(value, 3), "unit": unit, "target": target, "better": better}

    return [
        row("messages sent", sum(cost.messages for cost in costs), "messages", None, "higher"),
        row("processes ended", len(ended), "processes", 0, "lower"),
        row("memory kept", max(0, *kept_bytes.values()) / 2**20, "MiB", KEPT_MIB_MAX, "lower"),
        row("loop held", max(cost.held_ms.get("coordinator", 0.0) for cost in costs), "ms", HELD_MS_MAX, "lower"),
        row("CPU of the daemon that it costs most", max(spent, default=0.0), "cores", CORES_MAX, "lower"),
        row("honest steps a CPU second kept", kept(trios, lambda c: c.steps_per_cpu_s), "share", KEPT_MIN, "higher"),
        row("honest throughput kept", kept(trios, lambda c: c.steps_per_s), "share", KEPT_MIN, "higher"),
        row("load of the machine", os.getloadavg()[0], "processes", None, "lower"),
    ]


async def measured(cluster: Cluster, seconds: float, only: str | None) -> list[dict[str, Any]]:
    scene = await scene_of(cluster.run_folder)
    await asyncio.sleep(5)  # a fleet that has just begun is slower
    rows: list[dict[str, Any]] = []
    window_s = seconds / PAIRS
    before = await cost_of(cluster, scene, None, window_s)
    for name in [NOBODY, *(name for name in ATTACKERS if only is None or only in name)]:
        trios, held = [], held_bytes(cluster)
        with contextlib.ExitStack() as stack:
            attack = None if name == NOBODY else stack.enter_context(attacking(cluster, name, core=ATTACKER_CORE))
            for _ in range(PAIRS):
                cost = await cost_of(cluster, scene, attack, window_s)
                after = await cost_of(cluster, scene, None, window_s)
                trios.append((before, cost, after))
                before = after
        assert name == NOBODY or any(cost.messages for _, cost, _ in trios), f"{name}: sent nothing, measured nothing"
        if attack is not None:
            await asyncio.sleep(SHUT_OUT_MAX_S)  # the next one comes from the same address
        rows += (found := rows_of(name, trios, {one: size - held[one] for one, size in held_bytes(cluster).items()}))
        print(name + ": " + ", ".join(f"{row['name'].rpartition(': ')[2]} {row['value']}" for row in found), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--only", help="attackers whose name has this in it; nothing is written")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = small_run(folder, make_tiny_model(folder / "model"), steps=100_000, eval_every_steps=100_000)
        with Cluster(folder, config, workers=1) as cluster:
            cluster.placed = lambda name, argv: [
                "/bin/sh", "-c", f'ulimit -n {DESCRIPTORS}; exec taskset -c {FLEET_CORE} "$@"', name, *argv
            ]  # fmt: skip
            cluster.start_all()
            cluster.wait_until(lambda: cluster.step() >= 3, "the first steps")
            rows = asyncio.run(measured(cluster, asked.seconds, asked.only))
    if asked.only is None:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
