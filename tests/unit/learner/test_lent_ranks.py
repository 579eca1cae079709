"""A trainer of the user's own over two real processes, split by transformers' tensor parallelism; published where its rows lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from echo2.learner.runtime.checkpoint import CheckpointStore
from echo2.learner.runtime.options import CheckpointOptions
from tests.unit.learner.lent_two_ranks import STEPS
from tests.unit.learner.tiny import make_tiny_model

TIMEOUT_S = 240


def test_a_tensor_parallel_engine_on_two_ranks_publishes_bit_for_bit_and_goes_on(tmp_path: Path) -> None:
    model, folder = make_tiny_model(tmp_path / "model"), tmp_path / "run"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    arguments = ["--standalone", "--nproc-per-node", "2", "-m", "tests.unit.learner.lent_two_ranks"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, str(model), str(folder)],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads((folder / "summary.json").read_text())
    assert said["steps"] == STEPS and said["followed"] == said["fingerprint"]
    assert [2, 0] in said["versions"] and [4, 2] in said["versions"]  # deltas were applied
    # The engine's layout is its own: some tensors are split, some are on both ranks.
    assert set(said["layouts"].values()) == {"DTensor", "Tensor"}
    trained, followed = torch.load(folder / "trained.pt"), torch.load(folder / "followed.pt")
    start = torch.load(folder / "start.pt")
    assert trained.keys() == followed.keys()
    assert all(torch.equal(followed[name], tensor) for name, tensor in trained.items())
    assert any(not torch.equal(start[name], tensor) for name, tensor in trained.items())
    # Each rank holds its rows and no more, and both wrote theirs.
    rank1 = json.loads((folder / "rank1.json").read_text())
    total = sum(tensor.numel() for tensor in trained.values())
    assert rank1["newest"] == STEPS and abs(rank1["own_elements"] - total / 2) < 0.02 * total
    kept = CheckpointStore(folder / "checkpoints", CheckpointOptions(), is_owner=False).load_newest()
    assert kept is not None and kept.step == STEPS
    assert all(torch.equal(kept.published[name], tensor) for name, tensor in trained.items())
    went_on, refused = json.loads((folder / "again.json").read_text())
    assert went_on == str(STEPS)
    assert "expected the weights that were published as version 4, got others" in refused
