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

from echo2.cli.run import LocalRun, workers_of
from echo2.config.run import RunConfig
from tests.patience import WAIT_S
from tests.unit.learner.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]

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
checkpoint_every_steps = 2
"""


def started(folder: Path, steps: int) -> subprocess.Popen[str]:
    if not (folder / "model").exists():
        make_tiny_model(folder / "model")
    (folder / "run.toml").write_text(RUN.format(folder=folder / "runs", model=folder / "model", steps=steps))
    command = [sys.executable, "-m", "echo2.cli.main", "run", str(folder / "run.toml"), "--workers", "2", "--plain"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )  # fmt: skip


def left_over(folder: Path) -> list[str]:
    """Processes of the run that are still there."""
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(folder) in line and "echo2.cli." in line]


def test_an_own_config_runs_to_its_end_leaves_no_process_and_goes_on_with_more_steps(tmp_path: Path) -> None:
    run = started(tmp_path, steps=4)
    said, _ = run.communicate(timeout=WAIT_S)
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
    more = started(tmp_path, steps=6)
    said, _ = more.communicate(timeout=WAIT_S)
    assert more.returncode == 0, said
    assert steps_of(tmp_path)[-1] == 6


def steps_of(folder: Path) -> list[int]:
    rows = folder / "runs" / "own" / "learner" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in rows.read_text().splitlines()] if rows.exists() else []


def trains(run: subprocess.Popen[str], folder: Path) -> None:
    """Waits until it has trained."""
    until = time.monotonic() + WAIT_S
    while len(steps_of(folder)) <= 2:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < until, f"expected steps 0 to 2 within {WAIT_S:.0f} s, got {steps_of(folder)}"
        time.sleep(0.2)


def gone(folder: Path, within_s: float) -> list[str]:
    """Processes of the run that are still there after `within_s`."""
    until = time.monotonic() + within_s
    while (left := left_over(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def test_ctrl_c_ends_all_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = started(tmp_path, steps=100_000)
    trains(run, tmp_path)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == 130
    assert "what was trained is saved in" in said and "the same command goes on from there" in said
    assert "Traceback" not in said
    assert left_over(tmp_path) == []
    log = (tmp_path / "runs" / "own" / "logs" / "learner.log").read_text()
    assert "stopped after step" in log and "the same command goes on from there" in log


@pytest.mark.soak
def test_a_second_ctrl_c_ends_all_at_once_and_in_silence(tmp_path: Path) -> None:
    run = started(tmp_path, steps=100_000)
    trains(run, tmp_path)
    run.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == 130 and "Traceback" not in said and "rror" not in said, said
    assert gone(tmp_path, WAIT_S) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGHUP, marks=pytest.mark.soak)])
def test_a_run_has_one_command_whose_end_ends_all_and_the_same_command_goes_on(tmp_path: Path, number: int) -> None:
    run = started(tmp_path, steps=100_000)
    trains(run, tmp_path)
    kept = (tmp_path / "runs" / "own" / "run.toml").read_bytes()
    second = started(tmp_path, steps=99)
    said, _ = second.communicate(timeout=WAIT_S)
    assert second.returncode == 8 and f"found echo2 (process {run.pid}); to end it: kill {run.pid}" in said
    assert (tmp_path / "runs" / "own" / "run.toml").read_bytes() == kept, "nothing is written over a live run's config"
    run.send_signal(number)
    run.communicate(timeout=WAIT_S)
    left = left_over(tmp_path) if number == signal.SIGHUP else gone(tmp_path, WAIT_S)
    assert left == [], "nobody trains for a closed terminal"
    before = steps_of(tmp_path)[-1]
    again = started(tmp_path, steps=before + 3)
    said, _ = again.communicate(timeout=WAIT_S)
    assert again.returncode == 0, said
    assert steps_of(tmp_path) == list(range(before + 4)), "it went on from what was saved"


@pytest.mark.soak
def test_two_runs_at_once_both_find_ports(tmp_path: Path) -> None:
    """Both want the same ports; the second takes what the system gives it, and says where its page is."""
    runs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        runs.append(started(tmp_path / name, steps=2))
    for run in runs:
        said, _ = run.communicate(timeout=WAIT_S)
        assert run.returncode == 0, said
        assert "dashboard http://127.0.0.1:" in said


@pytest.mark.parametrize("workers", [1, 3])
def test_the_commands_are_those_that_a_person_would_type(workers: int) -> None:
    found = LocalRun(RunConfig(), workers_of(workers)).commands()
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
    subprocess.run(model, cwd=ROOT, check=True, timeout=WAIT_S)
    command = [
        sys.executable, "-m", "echo2.cli.main", "run", "examples/agent.toml", "--workers", "1", "--plain", "--learner.steps=2",
        "--learner.rollouts_per_prompt=2", f"--model.path={tmp_path / 'digits-model'}", f"--run.folder={tmp_path / 'runs'}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    lines = (tmp_path / "runs" / "agent" / "learner" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["step"] == 2 and last["agents/calls"] >= 2 * 8 * 2, "each episode asks at least once"
    assert last["agents/restarted"] == last["agents/dropped"] == last["agents/branches"] == 0
