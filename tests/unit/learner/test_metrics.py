from __future__ import annotations

import re
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError
from echo2.learner.runtime.metrics import JsonLines, open_sinks

DOCS = Path(__file__).parents[3] / "docs" / "learner.md"


def documented_names() -> set[str]:
    table = DOCS.read_text().split("## metrics.jsonl", 1)[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_a_torn_last_row_is_cut_off_and_no_step_gets_a_second_row(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(3):
        sink.write({"step": step})
    sink.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    sink = JsonLines(tmp_path / "metrics.jsonl")
    assert sink.last_step == 2
    for step in (1, 2, 3):
        sink.write({"step": step})
    sink.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 0}', '{"step": 1}', '{"step": 2}', '{"step": 3}']


def test_an_unknown_sink_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensorboard or wandb"):
        open_sinks(tmp_path, "run", ("graphite",))


def test_the_page_names_the_usual_metrics() -> None:
    assert {"reward/mean", "policy/entropy", "ratio/ess", "clip_fraction", "kl", "lag/histogram"} <= documented_names()
