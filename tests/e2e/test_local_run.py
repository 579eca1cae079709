"""`echo2 run RUN.toml --workers N` as a person starts it: real processes, an end and a Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echo2.cli.local_run import commands_of
from tests.unit.learner.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 400.0

RUN = """
[run]
name = "own"
folder = "{folder}"
[model]
path = "{model}"
[task]
name = "sort_digits"
eval_prompts = 0
[sampling]
max_new_tokens = 6
[learner]
steps = {steps}
prompts_per_step = 2
rollouts_per_prompt = 2
threads = 1
checkpoint_every_steps = 2
"""


def started(folder: Path, steps: int) -> subprocess.Popen[str]:
    model = make_tiny_model(folder / "model")
    (folder / "run.toml").write_text(RUN.format(folder=folder / "runs", model=model, steps=steps))
    command = [sys.executable, "-m", "echo2.cli.main", "run", str(folder / "run.toml"), "--workers", "2", "--plain"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )  # fmt: skip


def left_over(folder: Path) -> list[str]:
    """Processes of the run that are still there."""
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(folder) in line and "echo2.cli." in line]


def test_an_own_config_runs_to_its_end_and_leaves_no_process(tmp_path: Path) -> None:
    run = started(tmp_path, steps=4)
    said, _ = run.communicate(timeout=WITHIN_S)
    logs = "\n".join(path.read_text()[-1500:] for path in (tmp_path / "runs" / "own" / "logs").glob("*.log"))
    assert run.returncode == 0, said + logs
    learner = tmp_path / "runs" / "own" / "learner"
    assert f"the trained model is in {learner / 'model'}" in said.replace("\n", " ")
    assert (learner / "model" / "config.json").exists()
    rows = [json.loads(line) for line in (learner / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert "step 4/4  reward " in logs and f"the model lies in {learner / 'model'}" in logs
    assert "stopping: run own is finished after 4 steps; no work is left for workers" in logs
    assert left_over(tmp_path) == []


def test_ctrl_c_ends_all_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = started(tmp_path, steps=100_000)
    rows = tmp_path / "runs" / "own" / "learner" / "metrics.jsonl"
    until = time.monotonic() + WITHIN_S
    while not (rows.exists() and len(rows.read_text().splitlines()) > 2) and time.monotonic() < until:
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "what was trained is saved in" in said and "the same command goes on from there" in said
    assert "Traceback" not in said
    assert left_over(tmp_path) == []
    log = (tmp_path / "runs" / "own" / "logs" / "learner.log").read_text()
    assert "stopped after step" in log and "the same command goes on from there" in log


@pytest.mark.parametrize("workers", [1, 3])
def test_the_commands_are_those_that_a_person_would_type(tmp_path: Path, workers: int) -> None:
    found = commands_of(tmp_path, workers)
    assert list(found) == ["coordinator", "learner", *(f"w{n + 1}" for n in range(workers))]
    assert all(words[0] in ("echo-coordinator", "echo-learner", "echo-worker") for words in found.values())


def test_the_agent_example_trains_without_losing_an_episode(tmp_path: Path) -> None:
    model = [
        sys.executable,
        "-m",
        "echo2.cli.demo.model",
        str(tmp_path / "digits-model"),
        "--recipe",
        '{"warmup_steps": 20}',
    ]
    subprocess.run(model, cwd=ROOT, check=True, timeout=WITHIN_S)
    command = [
        sys.executable, "-m", "echo2.cli.main", "run", "examples/agent.toml", "--workers", "1", "--plain", "--learner.steps=2",
        "--learner.rollouts_per_prompt=2", f"--model.path={tmp_path / 'digits-model'}", f"--run.folder={tmp_path / 'runs'}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    lines = (tmp_path / "runs" / "agent" / "learner" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["step"] == 2 and last["agents/calls"] >= 2 * 8 * 2, "each episode asks at least once"
    assert last["agents/restarted"] == last["agents/dropped"] == last["agents/branches"] == 0
