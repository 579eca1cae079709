"""`echo2 run RUN.toml --workers N` as a person starts it, to its end and ended from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import ROOT
from tests.patience import WAIT_S


def steps_of(run: Path) -> list[int]:
    rows = run / "learner" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in rows.read_text().splitlines()] if rows.exists() else []


def trains(process: subprocess.Popen[str], run: Path, beyond: int = 1) -> None:
    until = time.monotonic() + WAIT_S
    while len(steps_of(run)) <= beyond + 1:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, f"expected steps beyond {beyond} within {WAIT_S:.0f} s, got {steps_of(run)}"
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


WHERE: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "cwd": ROOT}


def _command(folder: Path, base_model: Path, steps: int) -> list[str]:
    return [
        sys.executable, "-m", "echo2.cli.main", "run", "examples/agent.toml", "--workers", "1", "--plain",
        f"--learner.steps={steps}", "--learner.prompts_per_step=2", "--learner.rollouts_per_prompt=2", "--task.eval_prompts=2",
        f"--model.path={base_model}", f"--run.folder={folder / 'runs'}",
    ]  # fmt: skip


ENDS = {"hangup": (signal.SIGHUP,), "twice": (signal.SIGINT, signal.SIGINT), "kill": (signal.SIGKILL,)}


@pytest.mark.soak
@pytest.mark.parametrize("how", ENDS)
def test_a_closed_terminal_two_ctrl_c_and_a_kill_end_all_in_silence(tmp_path: Path, base_model: Path, how: str) -> None:
    """The kill: nobody trains for a command that is gone; tests/unit/cli/test_commands.py has it of one process."""
    run = subprocess.Popen(
        _command(tmp_path, base_model, 100000), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **WHERE
    )
    trains(run, tmp_path / "runs" / "agent")
    for number in ENDS[how]:
        run.send_signal(number)
        time.sleep(0.3)
    said, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == (-signal.SIGKILL if how == "kill" else 130)
    assert "Traceback" not in said and "rror" not in said, said
    assert left_over(tmp_path, WAIT_S) == []


@pytest.mark.soak
def test_a_run_ends_with_its_last_step_and_goes_on_when_it_is_given_more(tmp_path: Path, base_model: Path) -> None:
    for steps in (2, 3):
        done = subprocess.run(
            _command(tmp_path, base_model, steps), capture_output=True, text=True, timeout=WAIT_S, check=False, **WHERE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert steps_of(tmp_path / "runs" / "agent") == list(range(steps + 1))
        assert left_over(tmp_path) == []
