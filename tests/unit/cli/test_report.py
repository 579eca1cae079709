"""The end of a run: its report as text, file and page, in main of echo2 status and samples, as of run and demo."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from echo2.base.errors import Unreachable
from echo2.cli.main import main
from echo2.cli.report import is_reported, write_report
from echo2.wire.gen.echo2.v1 import coordinator_pb2


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a coordinator's machine; drawing them takes seconds."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    learner = tmp_path / "learner"
    learner.mkdir()
    (tmp_path / "run.toml").write_text("")
    steps = [
        {"step": n, "reward/mean": n / 4, "step_s": 2.0, "phase/wait_s": 1.0, "lag/histogram": [9]} for n in range(1, 5)
    ]
    (learner / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    evaluations = [{"step": 0, "eval/reward": 0.25}, {"step": 4, "eval/reward": 0.75}]
    (learner / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    samples = [
        {"step": step, "prompt": "2+2=", "answer": "4", "completion": said, "reward": reward}
        for step, said, reward in ((0, "<b>5", 0.0), (4, "4", 1.0))
    ]
    (learner / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (learner / "trackers.json").write_text('["https://tracker.example/mine"]')
    return tmp_path


def status_of(step: int) -> coordinator_pb2.RunStatus:
    status = coordinator_pb2.RunStatus(usd_spent=1.5)
    status.learner.step, status.learner.trained_tokens = step, 1000
    status.learner_hello.step_limit, status.learner_hello.staleness_bound = 4, 2
    return status


def test_the_report_has_rewards_cost_time_samples_and_tracker_and_a_page_that_needs_no_server(finished: Path) -> None:
    report = write_report(finished, status_of(4))
    assert not report.problems
    for text in ("0.25 -> 0.75 in 4 steps", "12 s of", "USD 1.5000", "expected '4'", "https://tracker.example/mine"):
        assert text in report.text
    assert all(len(line) <= 80 for line in report.text.splitlines() if str(finished) not in line)
    page = (finished / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "&lt;b&gt;5" in page, "a model's text is no markup"
    assert not re.search(r'(src|href)="?(/|http)', page)


def test_status_of_a_finished_run_shows_its_report_until_it_trains_on(
    finished: Path, without_plots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(finished, status_of(4))
    assert main(["status", str(finished)]) == 0 and "0.25 -> 0.75" in capsys.readouterr().out
    assert main(["samples", str(finished)]) == 0 and "after '4' (1.00)" in capsys.readouterr().out
    newer = (finished / "summary.json").stat().st_mtime + 5
    os.utime(finished / "learner" / "metrics.jsonl", (newer, newer))
    assert not is_reported(finished)
    assert main(["status", str(finished)]) != 0 and "links/operator.link" in capsys.readouterr().err


def test_missing_steps_and_three_without_a_reward_are_problems(finished: Path, without_plots: None) -> None:
    assert write_report(finished, status_of(3)).problems == ("expected 4 steps, got 3",)
    status = status_of(4)
    status.learner.equal_reward_steps = 1
    assert not write_report(finished, status).problems
    status.learner.equal_reward_steps = 3
    assert "the last 3 steps had none" in write_report(finished, status).problems[0]


def test_status_of_a_run_at_rest_says_so_and_asks_nobody(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "run.lock").write_text("echo2 999999999\n")
    assert main(["status", str(finished)]) == Unreachable.exit_code
    assert "no process of the run is at work; the same `echo2 run` goes on" in capsys.readouterr().err
