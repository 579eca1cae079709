"""Attackers beside an honest fleet of real daemons, one at a time; what each costs goes to benchmarks/results/redteam.json.

    python -m tests.redteam.run [--seconds 20] [--only NAME]

The fleet has one core of this machine and the attacker another, in a process of its own, so that the fleet loses what its own
daemons do for the attack and no more. Before and after each attack the fleet is watched for as long without one: its throughput in
steps a second says what an attack keeps from it by work or by waiting, its steps a CPU second what it does by work alone, which
other programs of the machine change little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.cluster import Cluster, small_run
from tests.redteam.attacking import ATTACKERS
from tests.redteam.cost import DAEMONS, Cost, attacking, cost_of
from tests.redteam.scene import scene_of
from tests.redteam.target import DESCRIPTORS
from tests.unit.learner.tiny import make_tiny_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "redteam.json"
KEPT_MIB_MAX, HELD_MS_MAX, KEPT_MIN, CORES_MAX = 64, 50, 0.9, 0.1
FLEET_CORE, ATTACKER_CORE = 0, (os.cpu_count() or 1) - 1


def rows_of(name: str, cost: Cost, quiet: Cost) -> list[dict[str, Any]]:
    kept = max(cost.kept_bytes[d] - max(0, quiet.kept_bytes.get(d, 0)) for d in cost.kept_bytes) / 2**20
    spent = max(cost.spent_cores(daemon, quiet) for daemon in DAEMONS if daemon in cost.cpu_s)

    def row(what: str, value: float, unit: str, target: float | None, better: str) -> dict[str, Any]:
        return {"name": f"{name}: {what}", "value": round(value, 3), "unit": unit, "target": target, "better": better}

    return [
        row("messages sent", cost.messages, "messages", None, "higher"),
        row("processes ended", len(cost.ended), "processes", 0, "lower"),
        row("memory kept", max(0.0, kept), "MiB", KEPT_MIB_MAX, "lower"),
        row("loop held", cost.held_ms.get("coordinator", 0.0), "ms", HELD_MS_MAX, "lower"),
        row("CPU of the daemon that it costs most", spent, "cores", CORES_MAX, "lower"),
        row(
            "honest steps a CPU second kept", cost.steps_per_cpu_s / quiet.steps_per_cpu_s, "share", KEPT_MIN, "higher"
        ),
        row("honest throughput kept", cost.steps_per_s / quiet.steps_per_s, "share", KEPT_MIN, "higher"),
    ]


async def measured(cluster: Cluster, seconds: float, only: str | None) -> list[dict[str, Any]]:
    scene = await scene_of(cluster.run_folder)
    await asyncio.sleep(5)  # a fleet that has just begun is slower
    rows: list[dict[str, Any]] = []
    before = await cost_of(cluster, scene, None, seconds / 2)
    for name in ATTACKERS if only is None else [name for name in ATTACKERS if only in name]:
        with attacking(cluster, name, core=ATTACKER_CORE) as attack:
            cost = await cost_of(cluster, scene, attack, seconds)
        after = await cost_of(cluster, scene, None, seconds / 2)
        rows += (found := rows_of(name, cost, before + after))
        before = after
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
            cluster.wait_until(lambda: cluster.step() >= 3, 180, "the first steps")
            rows = asyncio.run(measured(cluster, asked.seconds, asked.only))
    if asked.only is None:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
