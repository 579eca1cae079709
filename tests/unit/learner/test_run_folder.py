from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo2.base.errors import StateError
from echo2.learner.runtime.run_folder import RunFolder


def test_what_a_run_is_may_not_change(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check_identity({"seed": 0, "task": "sums"}, {"model_path": "here"})
    folder.check_identity({"seed": 0, "task": "sums"}, {"model_path": "moved"})
    with pytest.raises(StateError, match='expected task "sums" as when the run began, got "products"'):
        folder.check_identity({"seed": 0, "task": "products"})


def test_what_an_older_release_did_not_note_is_held_from_now_on(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"seed": 0, "model_path": "here"}))
    folder = RunFolder(tmp_path)
    folder.check_identity({"seed": 0, "lora": [0, 0]})
    assert json.loads((tmp_path / "run.json").read_text()) == {"seed": 0, "model_path": "here", "lora": [0, 0]}
    with pytest.raises(StateError, match=r"expected lora \[0, 0\] as when the run began, got \[8, 16\]"):
        folder.check_identity({"seed": 0, "lora": [8, 16]})
