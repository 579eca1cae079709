"""`echo2 run RUN.toml --workers N` as a person starts it (the example of an agent): `echo2 tail`, `echo2 stop`, an end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from echo2.config.run import RunConfig
from tests.e2e.cluster import ROOT
from tests.patience import WAIT_S

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def started(folder: Path, model: Path, steps: int) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "echo2.cli.main", "run", "examples/agent.toml", "--workers", "1", "--plain",
        f"--learner.steps={steps}", "--learner.prompts_per_step=2", "--learner.rollouts_per_prompt=2", "--task.eval_prompts=2",
        "--learner.checkpoint_every_steps=2", f"--model.path={model}", f"--run.folder={folder / 'runs'}",
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, cwd=ROOT
    )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = folder / "runs" / "agent" / "learner" / "metrics.jsonl"
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def steps_of(folder: Path) -> list[int]:
    return [row["step"] for row in rows_of(folder)]


def trains(run: subprocess.Popen[str], folder: Path, beyond: int = 1) -> None:
    """Waits until it has trained."""
    until = time.monotonic() + WAIT_S
    while len(steps_of(folder)) <= beyond + 1:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < until, f"expected steps beyond {beyond} within {WAIT_S:.0f} s, got {steps_of(folder)}"
        time.sleep(0.2)


def left_over(folder: Path, within_s: float = 0.0) -> list[str]:
    """Processes of the run that are still there after `within_s`."""
    until = time.monotonic() + within_s
    while True:
        found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        left = [line for line in found.splitlines() if str(folder) in line and "echo2.cli." in line]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.2)


def test_one_command_starts_all_ends_all_and_goes_on_until_the_model_is_there(tmp_path: Path, base_model: Path) -> None:
    """A stop, the last step; a second command in the folder and another run's port are left alone."""
    try:
        taken = socket.create_server(("127.0.0.1", RunConfig().coordinator.dashboard_port))
    except OSError:  # somebody else's run has it
        taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        run = started(tmp_path, base_model, steps=100_000)
        trains(run, tmp_path)
        row = rows_of(tmp_path)[-1]
        assert row["agents/calls"] >= 2 * 2 * row["step"], "each episode asks at least once"
        assert row["agents/restarted"] == row["agents/dropped"] == row["agents/branches"] == 0
        kept = (tmp_path / "runs" / "agent" / "run.toml").read_bytes()
        second = started(tmp_path, base_model, steps=99)
        said, _ = second.communicate(timeout=WAIT_S)
        assert second.returncode == 8 and f"found echo2 (process {run.pid}); to end it: kill {run.pid}" in said
        assert (tmp_path / "runs" / "agent" / "run.toml").read_bytes() == kept, (
            "a live run's config is not written over"
        )
        tail, stop = (
            subprocess.Popen(
                [sys.executable, "-m", "echo2.cli.main", word, str(tmp_path / "runs" / "agent")],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
            )
            for word in ("tail", "stop")
        )  # fmt: skip
        said, _ = run.communicate(timeout=WAIT_S)
        stopped, followed = stop.communicate(timeout=WAIT_S)[0], tail.communicate(timeout=WAIT_S)[0]
        assert (stop.returncode, tail.returncode) == (0, 0) and "the same `echo2 run` goes on from" in stopped
        assert all(re.match(r"(coordinator|learner|w1) +\d\d:\d\d:\d\d ", line) for line in followed.splitlines())
        assert re.search("learner .*stopped after step", followed), "it follows until the last process has ended"
        assert run.returncode == 130 and "dashboard http://127.0.0.1:" in said
    assert "what was trained is saved in" in said and "the same command goes on from there" in said
    assert "Traceback" not in said and left_over(tmp_path) == []
    log = tmp_path / "runs" / "agent" / "logs" / "learner.log"
    assert "stopped after step" in log.read_text() and "the same command goes on from there" in log.read_text()

    last = steps_of(tmp_path)[-1] + 3
    run = started(tmp_path, base_model, steps=last)
    said, _ = run.communicate(timeout=WAIT_S)
    logs = "\n".join(path.read_text()[-1500:] for path in (tmp_path / "runs" / "agent" / "logs").glob("*.log"))
    assert run.returncode == 0, said + logs
    assert steps_of(tmp_path) == list(range(last + 1)), "it went on from what was saved"
    learner = tmp_path / "runs" / "agent" / "learner"
    assert str(learner / "model") in "".join(said.split()), "the report says where the model is"
    assert (learner / "model" / "config.json").exists() and f"the model lies in {learner / 'model'}" in logs
    assert f"step {last}/{last}  reward " in logs
    assert f"run agent is finished after {last} steps" in logs, "the coordinator heard of the end"
    assert left_over(tmp_path) == []


ENDS = {"hangup": (signal.SIGHUP,), "twice": (signal.SIGINT, signal.SIGINT), "kill": (signal.SIGKILL,)}


@pytest.mark.soak
@pytest.mark.parametrize("how", ENDS)
def test_a_closed_terminal_a_second_ctrl_c_and_a_kill_end_all_in_silence(
    tmp_path: Path, base_model: Path, how: str
) -> None:
    """The kill: nobody trains for a command that is gone; tests/unit/cli/test_commands.py has it of one process."""
    run = started(tmp_path, base_model, steps=100_000)
    trains(run, tmp_path)
    for number in ENDS[how]:
        run.send_signal(number)
        time.sleep(0.3)
    said, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == (-signal.SIGKILL if how == "kill" else 130)
    assert "Traceback" not in said and "rror" not in said, said
    assert left_over(tmp_path, WAIT_S) == []
