from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo2.base.errors import StateError
from echo2.learner.run_folder import RunFolder


def test_what_a_run_is_may_not_change(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check_identity({"seed": 0, "task": "sums"}, {"model_path": "here"})
    folder.check_identity({"seed": 0, "task": "sums"}, {"model_path": "moved"})
    with pytest.raises(StateError, match='expected task "sums" as when the run began, got "products"'):
        folder.check_identity({"seed": 0, "task": "products"})


def test_every_flipped_bit_of_what_the_run_is_stops_the_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    wanted = {"seed": 0, "task": "sums", "lora": [0, 0]}
    folder.check_identity(wanted, {"model_path": "here"})
    path, refused = tmp_path / "run.json", 0
    whole = path.read_bytes()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << (at % 8)
        path.write_bytes(data)
        try:
            folder.check_identity(wanted)
        except StateError as error:
            assert "expected the run's identity" in str(error) and "restore it from a backup" in str(error)
            refused += 1
        else:
            assert json.loads(path.read_bytes())["model_path"] == "here", at
    assert refused > 0.7 * len(whole)  # the rest is white space and the name of the checksum


def test_a_run_that_has_begun_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "journal").mkdir()
    folder.check_identity({"seed": 0})
    (tmp_path / "run.json").unlink()
    (tmp_path / "journal" / "segment-00000000.records").touch()
    with pytest.raises(StateError, match=r"run\.json: expected it beside segment-00000000\.records, found none"):
        folder.check_identity({"seed": 1})
