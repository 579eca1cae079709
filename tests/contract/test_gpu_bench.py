"""What `make gpu` runs on a GPU runs here, on shapes that a CPU does: every part gives its rows, and the bits are the learner's."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import WAIT_S

ROOT = Path(__file__).parents[2]
PARTS = ("attention", "step", "states", "publishing", "noise")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    done = command("--device", "cpu", "--small", "--only", *PARTS, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["name"]: row for row in json.loads(out.read_text())}


@pytest.mark.soak
def test_every_part_gives_figures(rows: dict[str, dict[str, Any]]) -> None:
    measured = {name: row["value"] for name, row in rows.items() if row["value"] is not None}
    assert len(measured) >= 18 and all(math.isfinite(value) for value in measured.values())
    unmeasured = {row["why"] for row in rows.values() if row["value"] is None}
    assert unmeasured <= {rows["machine"]["why"], "not installed: trl"}
    assert all(set(row) >= {"name", "value", "unit", "target", "better"} for row in rows.values())


@pytest.mark.soak
def test_bits_and_numbers_are_the_learners(rows: dict[str, dict[str, Any]]) -> None:
    for name in ("live weights have the learner's bits", "live weights have the learner's bits after 20 deltas",
                 "two steps trained again give the same bits"):  # fmt: skip
        assert rows[f"small: {name}"]["value"] == 1.0, name
    assert rows["attention, largest difference of the two"]["value"] <= 1e-4
    assert rows["small: noise of log-probabilities, root mean square"]["value"] <= 1e-3
    assert 0.0 < rows["small: delta"]["value"] < 0.02


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = command("--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 1 and "expected a CUDA device" in done.stdout and not (tmp_path / "gpu.json").exists()


def test_a_part_that_fails_is_a_row_and_ends_the_command_with_1(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = command("--device", "cpu", "--small", "--only", "attention", "--seconds", "0.2", "--out", str(out))
    assert done.returncode == 1
    assert "failed: not done after 0.2 s" in json.loads(out.read_text())[1]["why"]
