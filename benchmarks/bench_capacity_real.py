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
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.bench_capacity import RESULTS, Row, keep, show
from echo2.cli.demo.launch import Children, prepare_run_folder
from echo2.cli.demo.model import ModelRecipe, cached_model_folder, make_model
from echo2.cli.demo.plan import PORTS, WORKERS, DemoOptions, DemoWorker, commands, demo_config
from echo2.cli.demo.ports import choose_ports
from echo2.cli.demo.run import CACHE
from echo2.cli.demo.summary import steady_utilisation
from echo2.config.load import to_toml

WITHIN_S = 110.0
STEP_S = 0.9
ERROR = "measured minus predicted"
LOOK_EVERY_S = 0.5
LINKS = {"1 Mbit/s": "1mbit/s", "4 Mbit/s": "4mbit/s", "10 Mbit/s": "10mbit/s"}
_MIDDLE = WORKERS[1]
MIXES: dict[str, tuple[DemoWorker, ...]] = {
    "three unlike": tuple(replace(worker, slowdown=2.0 * worker.slowdown) for worker in WORKERS),
    "two alike": tuple(replace(_MIDDLE, name=name, slowdown=6.0) for name in ("one", "two")),
    "one alone": (replace(_MIDDLE, name="alone", slowdown=12.0),),
    "one, too slow": (replace(_MIDDLE, name="alone", slowdown=30.0),),
}


async def run_cell(folder: Path, link: str, workers: tuple[DemoWorker, ...], steps: int) -> tuple[float, float]:
    """Measured and predicted utilisation of one run."""
    recipe = ModelRecipe()
    model = cached_model_folder(CACHE.expanduser(), recipe)
    if not (model / "config.json").exists():
        make_model(model, recipe)
    overrides = {
        "run.folder": str(folder), "broadcast.emulated_uplink": link, "task.eval_every_steps": "100000",
        "learner.checkpoint_every_steps": "100000", "learner.emulated_step_s": str(STEP_S),
    }  # fmt: skip
    options = DemoOptions("cell", steps=steps, overrides=overrides)
    config = demo_config(options, model, recipe, choose_ports(PORTS))
    run_folder = folder / "cell"
    prepare_run_folder(run_folder)
    (run_folder / "run.toml").write_text(to_toml(config, with_descriptions=False))
    children = Children(run_folder, options)
    children.commands = commands(run_folder, workers)
    try:
        await children.start("coordinator")
        await children.wait_for_links()
        for name in ("learner", *(worker.name for worker in workers)):
            await children.start(name)
        deadline = time.monotonic() + WITHIN_S
        metrics = run_folder / "learner" / "metrics.jsonl"
        while time.monotonic() < deadline:
            children.raise_if_failed()
            if metrics.exists() and len(_steps(metrics)) >= steps:
                break
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        await children.stop_all()
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
