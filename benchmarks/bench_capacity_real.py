"""Predicted against measured utilisation with the real processes: three links of the learner, four mixes of workers.

    python -m benchmarks.bench_capacity_real [--steps 40] [--link NAME] [--mix NAME]

Each cell starts a coordinator, a learner and workers as `echo2 demo` does, on loopback with emulated links and speeds,
and reads both utilisations from the learner's record, over the steps after the first plan (`steady_utilisation`). All
processes share the machine's cores, which the model knows nothing of: a step that takes 0.15 s while the workers stand
still takes 0.45 s beside them. So the learner's step lasts a fixed time, about twice its computation, and the workers
are slowed to about half a core together. Run it on an idle machine all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.bench_capacity import RESULTS, Row, keep, show
from echo2.cli.demo.model import ModelRecipe, make_model
from echo2.cli.demo.run import WORKERS, demo_run, worker_arguments
from echo2.cli.processes import Children, RunLock
from echo2.cli.report import steady_utilisation
from echo2.config.load import to_toml

WITHIN_S = 110.0
STEP_S = 0.9
ERROR = "measured minus predicted"
LOOK_EVERY_S = 0.5
LINKS = {"1 Mbit/s": "1mbit/s", "4 Mbit/s": "4mbit/s", "10 Mbit/s": "10mbit/s"}
MIXES: dict[str, dict[str, dict[str, str]]] = {
    "three unlike": {name: {**one, "slowdown": str(2 * float(one["slowdown"]))} for name, one in WORKERS.items()},
    "two alike": {name: {**WORKERS["oregon"], "slowdown": "6"} for name in ("one", "two")},
    "one alone": {"alone": {**WORKERS["oregon"], "slowdown": "12"}},
    "one, too slow": {"alone": {**WORKERS["oregon"], "slowdown": "30"}},
}


async def run_cell(folder: Path, link: str, workers: dict[str, dict[str, str]], steps: int) -> tuple[float, float]:
    """Measured and predicted utilisation of one run."""
    overrides = {
        "run.folder": str(folder), "learner.emulated_link": f"{link} 0 0s", "task.eval_every_steps": "100000",
        "learner.checkpoint_every_steps": "100000", "learner.emulated_step": str(STEP_S),
    }  # fmt: skip
    asked = argparse.Namespace(
        name="cell", seed=0, model="made", steps=steps, staleness=4, engine="embedded", worker_python=sys.executable
    )
    run = demo_run(asked, overrides)
    run = replace(run, workers={name: worker_arguments(worker) for name, worker in workers.items()})
    make_model(Path(run.config.model.path), ModelRecipe())
    run_folder = run.folder
    lock = RunLock(run_folder)
    (run_folder / "run.toml").write_text(to_toml(run.config, with_descriptions=False))
    children = Children(run_folder, run.commands(), sys.executable, run.environment, lock)
    try:
        await children.start_coordinator()
        for name in ("learner", *workers):
            await children.start(name)
        deadline = time.monotonic() + WITHIN_S
        metrics = run_folder / "learner" / "metrics.jsonl"
        while time.monotonic() < deadline:
            children.raise_if_failed()
            if metrics.exists() and len(_steps(metrics)) >= steps:
                break
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        await children.stop_nodes()
        children.kill_all()
    measured, predicted = steady_utilisation(_steps(metrics))
    assert measured is not None and predicted is not None, f"{run_folder}: no plan was made within the run"
    return measured, predicted


def _steps(metrics: Path) -> list[dict[str, float]]:
    rows = [
        json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")
    ]  # the last may be cut off
    numbers = [{name: float(value) for name, value in row.items() if isinstance(value, int | float)} for row in rows]
    return [row for row in numbers if "step_s" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--link", choices=sorted(LINKS), action="append", default=[])
    parser.add_argument("--mix", choices=sorted(MIXES), action="append", default=[])
    own = parser.parse_args()
    rows: list[Row] = []
    for link_name in own.link or LINKS:
        for mix_name in own.mix or MIXES:
            with tempfile.TemporaryDirectory() as folder:
                cell = run_cell(Path(folder), LINKS[link_name], MIXES[mix_name], own.steps)
                measured, predicted = asyncio.run(cell)
            print(f"{link_name:10s} {mix_name:20s} measured {measured:.3f} predicted {predicted:.3f}", flush=True)
            name = f"real processes, {link_name}, {mix_name}"
            rows.append(Row(f"{name}: measured utilisation", measured, "share", None, "higher"))
            rows.append(Row(f"{name}: {ERROR}", measured - predicted, "absolute", None, "lower"))
    keep(rows, is_whole=False)
    over_all = summary()
    show([*rows, *over_all])
    keep(over_all, is_whole=False)


def summary() -> list[Row]:
    """Over all cells whose results are kept: of one run, or of the newest run of each."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    cells = [row for row in kept if row["name"].startswith("real processes, ") and row["name"].endswith(ERROR)]
    errors = [abs(row["value"]) for row in cells]
    return [
        Row("real processes: cells", len(cells), "cells", len(LINKS) * len(MIXES), "higher"),
        Row("real processes: predicted against measured, worst cell", max(errors), "absolute", 0.05, "lower"),
        Row("real processes: predicted against measured, mean", statistics.fmean(errors), "absolute", 0.05, "lower"),
    ]


if __name__ == "__main__":
    main()
