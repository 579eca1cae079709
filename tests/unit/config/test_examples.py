"""The run files of examples/ are what the programs take, and their tasks exist."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from echo2.base.errors import TaskError
from echo2.cli.learner import learner_options
from echo2.cli.options import add_config_arguments, parse
from echo2.config.run import RunConfig
from echo2.tasks.registry import is_environment, make_environment_source, make_task
from echo2.tasks.task import TaskSpec

ROOT = Path(__file__).parents[3]
RUNS = sorted((ROOT / "examples" / "configs").glob("*.toml"))


def parsed(path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """As the programs take it, with its folder on the module path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    parser = ArgumentParser()
    add_config_arguments(parser)
    return parse(parser, ["--config", str(path)])[1]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_file_gives_options_and_its_task_can_be_made(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parsed(path, monkeypatch)
    assert config.run.name in path.read_text()
    made_of = learner_options(config, "", tmp_path).config  # with what "auto" means of the training step
    assert made_of.model_copy(update={"learner": config.learner}) == config
    spec = TaskSpec(config.task.name, config.task.args, seed=0)
    if config.task.name == "math":
        with pytest.raises(TaskError, match=r"data/math\.parquet"):
            make_task(spec)  # the data is yours to bring
        return
    made = make_environment_source(spec) if is_environment(spec) else make_task(spec)
    assert made.name


def test_page_lists_every_run_file() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    for path in RUNS:
        assert path.stem.removeprefix("math-qwen3") in page, path.name
