"""Attackers beside an honest fleet of real daemons, one at a time; what each costs goes to benchmarks/results/redteam.json.

    python -m tests.redteam.run [--seconds 20] [--only NAME]

All runs on this machine: what the attacker's own process takes of its cores is missing to the fleet, too, so the honest
throughput beside an attack is a lower bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import tests.redteam.attackers
from tests.e2e.cluster import Cluster, small_run
from tests.redteam.scene import ATTACKERS, Cost, cost_of, scene_of
from tests.unit.learner.tiny import make_tiny_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "redteam.json"
KEPT_MIB_MAX, HELD_MS_MAX, THROUGHPUT_MIN = 64, 50, 0.9
assert tests.redteam.attackers  # registers them


def rows_of(name: str, cost: Cost, quiet: Cost) -> list[dict[str, Any]]:
    kept = max(cost.kept_bytes[d] - max(0, quiet.kept_bytes.get(d, 0)) for d in cost.kept_bytes) / 2**20
    share = cost.steps_per_s / quiet.steps_per_s if quiet.steps_per_s else 0.0

    def row(what: str, value: float, unit: str, target: float | None, better: str) -> dict[str, Any]:
        return {"name": f"{name}: {what}", "value": round(value, 3), "unit": unit, "target": target, "better": better}

    return [
        row("messages sent", cost.messages, "messages", None, "higher"),
        row("processes ended", len(cost.ended), "processes", 0, "lower"),
        row("memory kept", max(0.0, kept), "MiB", KEPT_MIB_MAX, "lower"),
        row("loop held", cost.held_ms.get("coordinator", 0.0), "ms", HELD_MS_MAX, "lower"),
        row("CPU", sum(cost.cpu_share.values()), "cores", None, "lower"),
        row("honest throughput kept", share, "share", THROUGHPUT_MIN, "higher"),
    ]


async def measured(cluster: Cluster, config: str, seconds: float, only: str | None) -> list[dict[str, Any]]:
    scene = await scene_of(cluster, config)
    await asyncio.sleep(5)  # a fleet that has just begun is slower
    rows: list[dict[str, Any]] = []
    for name, attack in ATTACKERS.items():
        if only is None or only == name:
            quiet = await cost_of(scene, None, seconds)
            cost = await cost_of(scene, attack, seconds)
            rows += rows_of(name, cost, quiet)
            print(*(f"{row['name']}: {row['value']} {row['unit']}" for row in rows[-6:]), sep="\n", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--only", choices=list(ATTACKERS))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = small_run(folder, make_tiny_model(folder / "model"), steps=100_000, eval_every_steps=100_000)
        with Cluster(folder, config, workers=1) as cluster:
            cluster.start_all()
            cluster.wait_until(lambda: cluster.step() >= 3, 120, "the first steps")
            rows = asyncio.run(measured(cluster, config, asked.seconds, asked.only))
    if asked.only is None:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
