"""Real runs of agents for `bench_agents`: `echo2 run` with the example, seed by seed, and six turns on three workers.

`learning`: examples/agent.toml as it stands, once a seed; the reward of its first and last ten steps.
`cache`: what of the prompts three workers' caches served, as the workers count it, until one of them is killed (SIGKILL) in the
middle; then what its clients saw of that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from benchmarks.agent_scene import NOTES, TURNS

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2)
EDGE_STEPS = 10
WITHIN_S = 1200.0
WORKERS = 3
WARM_STEPS = 2
KILL_AT_STEP = 8
Row = dict[str, object]

SCENE = """
preset = "local"
[run]
name = "turns"
folder = "{folder}"
[model]
path = "{folder}/model"
[task]
name = "sort_digits"
eval_prompts = 0
[agent]
harness = "benchmarks.agent_scene:play"
turns = 6
[sampling]
max_prompt_tokens = 192
max_new_tokens = 16
[worker]
slots = 16
[staleness]
bound = 4
kappa = 2
[learner]
steps = 14
prompts_per_step = 8
rollouts_per_prompt = 8
audit_share = 0
emulated_step = {step_s}
"""
STEP_S = 8.0


def learning(seeds: tuple[int, ...] = SEEDS) -> list[Row]:
    """Rows of one run of the example a seed."""
    return [row for seed in seeds for row in _learned(seed)]


def _learned(seed: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="echo2-agents-") as name:
        folder = Path(name)
        _model(folder / "model", "{}")
        began = time.monotonic()
        command = ["run", "examples/agent.toml", "--workers", "2", "--plain", f"--run.seed={seed}"]
        _finished(folder, [*command, f"--model.path={folder / 'model'}", f"--run.folder={folder}"])
        took_s = time.monotonic() - began
        rows = _metrics(folder / "agent")
    rewards = [float(row["reward/mean"]) for row in rows]
    whose, calls, last = f"learning, seed {seed}", rows[-1]["agents/calls"], rows[-1]
    first, end = fmean(rewards[:EDGE_STEPS]), fmean(rewards[-EDGE_STEPS:])
    yield _row(f"{whose}: reward, first {EDGE_STEPS} steps", round(first, 3), "")
    yield _row(f"{whose}: reward, last {EDGE_STEPS} of {len(rewards)} steps", round(end, 3), "", round(first + 0.2, 3))
    yield _row(f"{whose}: the whole run", round(took_s), "s", 600, "lower")
    yield _row(f"{whose}: calls of agents", calls, "calls")
    yield _row(f"{whose}: calls a second, training included", round(float(calls) / took_s, 1), "calls/s")
    yield _row(f"{whose}: versions published", last["version"], "versions")
    yield _row(f"{whose}: episodes lost", last["agents/restarted"] + last["agents/dropped"], "episodes", 0, "lower")


def cache() -> list[Row]:
    """Rows of six turns on three workers, one of which is killed at step 8."""
    with tempfile.TemporaryDirectory(prefix="echo2-agents-") as name:
        folder = Path(name)
        _model(folder / "model", '{"context_tokens": 512}')
        (folder / "run.toml").write_text(SCENE.format(folder=folder, step_s=STEP_S))
        with _running(folder, ["run", str(folder / "run.toml"), "--workers", str(WORKERS), "--plain"]) as run:
            counts, before = _watched(run, folder / "turns")
        rows = _metrics(folder / "turns")
        notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    return [*_cache_rows(counts, before), *_kill_rows(notes, rows)]


def _watched(run: subprocess.Popen[bytes], folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Until the run's end: what the workers counted shortly before one is killed, and what they had after the first steps."""
    counts: dict[str, int] = {}
    before: dict[str, int] = {}
    is_killed = False
    until = time.monotonic() + WITHIN_S
    while run.poll() is None and time.monotonic() < until:
        time.sleep(1.0)
        rows = _metrics(folder)
        step = len(rows)
        if is_killed or step < WARM_STEPS:
            continue
        counts = _counted(folder) | {"trained_tokens": int(rows[-1]["tokens/trained"])}
        before = before or counts
        if step >= KILL_AT_STEP:
            _kill_one(folder)
            is_killed = True
    if run.poll() != 0 or not is_killed:
        raise SystemExit(f"the run ended with {run.poll()}, a worker was{' ' if is_killed else ' not '}killed")
    return counts, before


def _counted(folder: Path) -> dict[str, int]:
    """Of all workers together."""
    found = {"prompt_tokens": 0, "shared_prompt_tokens": 0, "prefilled_tokens": 0, "sampled_tokens": 0}
    for worker in sorted((folder / "workers").iterdir()):
        command = [sys.executable, "-m", "echo2.cli.worker", "status", "--json", "--folder", str(worker)]
        told = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout)
        found = {name: count + told[name] for name, count in found.items()}
    return found


def _kill_one(folder: Path) -> None:
    """SIGKILL to worker w1, found by its run folder in its command line."""
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in listing.splitlines() if "echo2.cli.worker join" in line and str(folder) in line]
    (pid,) = (int(line.split()[0]) for line in lines if line.endswith("--name w1"))
    os.kill(pid, signal.SIGKILL)


def _cache_rows(counts: dict[str, int], before: dict[str, int]) -> Iterator[Row]:
    since = {name: count - before[name] for name, count in counts.items()}
    asked, shared, filled = since["prompt_tokens"], since["shared_prompt_tokens"], since["prefilled_tokens"]
    trained = max(1, since["trained_tokens"])
    whose = f"{TURNS} turns on {WORKERS} workers, {STEP_S:.0f} s a step"
    yield _row(f"{whose}: prompt tokens served from cache", round(shared / asked, 3), "share", 0.8)
    without = (filled + shared) / trained
    yield _row(
        f"{whose}: prefilled a trained token", round(filled / trained, 2), "tokens", round(without / 2, 2), "lower"
    )
    yield _row(f"{whose}: the same if nothing were shared", round(without, 2), "tokens")


def _kill_rows(notes: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Iterator[Row]:
    turns_s = [took for note in notes for took in note["turns_s"]]
    errors = [note["error"] for note in notes if note["error"] and "run_ended" not in note["error"]]
    ended = [error for error in errors if "session_ended" not in error and "APIConnection" not in error]
    yield _row("a worker killed (SIGKILL): errors that clients saw", len(ended), "errors", 0, "lower")
    yield _row("a worker killed (SIGKILL): episodes lost", rows[-1]["agents/restarted"], "episodes", 0, "lower")
    yield _row("a worker killed (SIGKILL): calls answered", len(turns_s), "calls")
    yield _row("a worker killed (SIGKILL): a turn, p50", round(quantiles(turns_s, n=100)[49], 2), "s", None, "lower")
    yield _row("a worker killed (SIGKILL): a turn, longest", round(max(turns_s), 2), "s", None, "lower")


# ---- runs


def _row(name: str, value: object, unit: str, target: float | None = None, better: str = "higher") -> Row:
    print(f"{name:75} {value} {unit} (asked: {target})", flush=True)
    return {"name": name, "value": value, "unit": unit, "target": target, "better": better}


def _model(folder: Path, recipe: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "echo2.cli.demo.model", str(folder), "--recipe", recipe],
        cwd=ROOT,
        check=True,
        timeout=600,
    )


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """One row a step; the last line may be half written."""
    file = folder / "learner" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if "reward/mean" in row]


def _finished(folder: Path, command: list[str]) -> None:
    with _running(folder, command) as run:
        if run.wait(WITHIN_S) != 0:
            raise SystemExit(f"{command}: ended with {run.returncode}: {(folder / 'said').read_text()[-2000:]}")


@contextmanager
def _running(folder: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """An `echo2` command with the checkout's code; it is ended where the block is left."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), NOTES: str(folder / "notes")}
    with (folder / "said").open("wb") as said:
        run = subprocess.Popen(
            [sys.executable, "-m", "echo2.cli.main", *command], cwd=ROOT, env=environment, stdout=said, stderr=said
        )
        try:
            yield run
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
                run.wait(60)
