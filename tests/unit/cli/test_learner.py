"""What `echo-learner join` asks of rank 0, and of the ranks of other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.base.errors import TaskError
from echo2.cli import learner
from echo2.cli.sizing import learner_line
from echo2.config.load import load_config
from echo2.coordinator.money.market import built_in_models
from echo2.learner.options import LearnerOptions
from tests.unit.learner.tiny import make_tiny_model


def test_only_rank_0_needs_the_file_with_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "model")
    arguments = ["join", f"@{tmp_path / 'nowhere.link'}", "--folder", str(tmp_path / "run"), "--model.path", str(model)]
    followed: list[LearnerOptions] = []

    def follow(options: LearnerOptions) -> int:
        followed.append(options)
        return 0

    monkeypatch.setattr(learner, "follow_rank_0", follow)
    monkeypatch.setenv("RANK", "1")
    assert learner.main(arguments) == 0 and followed[0].join_link == "" and followed[0].link_file is None
    monkeypatch.setenv("RANK", "0")
    assert learner.main(arguments) != 0 and len(followed) == 1
    assert "expected a file with a link" in capsys.readouterr().err


def test_what_the_learner_needs_names_its_copies_and_those_that_do_not_fit_the_gpus() -> None:
    size = built_in_models()["qwen3-8b"]
    lines = {
        replicas: learner_line(load_config([], None, {"learner.replicas": str(replicas)}), size, 8, 80 << 30)
        for replicas in (1, 2, 3)
    }
    assert "on each of 8 GPUs (" in lines[1]
    assert "on each of 8 GPUs, 2 copies of 4 each (" in lines[2]
    assert "learner.replicas = 3 does not divide 8 ranks: such a learner does not start" in lines[3]


def test_rewards_that_cannot_work_end_the_learner_before_it_joins_or_loads_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    arguments = ["join", "echo2://nobody", "--folder", str(folder), "--model.path", str(tmp_path / "no-model")]
    assert learner.main([*arguments, "--task.name", "tests.unit.tasks.naughty:Always"]) == TaskError.exit_code
    assert "naughty:Always: expected a reward for a sample" in (said := capsys.readouterr().err), said
    assert not folder.exists()
