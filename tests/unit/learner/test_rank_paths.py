"""Two ranks over gloo on the paths that a GPU or a mixture of experts takes, against one process on the same path."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.base.ids import Version
from echo2.learner.training.agreement import difference
from echo2.learner.training.ranks import Ranks
from echo2.weights import FrameReader, HostWeights, fingerprint
from tests.patience import WAIT_S
from tests.unit.learner import rank_paths
from tests.unit.learner.tiny import make_tiny_model
from tests.unit.weights.models import decoded


def make_tiny_mixture(folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.contract.engine_rig import tiny_config

    make_tiny_model(folder)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config("qwen3_moe"))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """What two processes left in a folder, and both models. All scenarios in one start: torch takes seconds to load."""
    torch.set_num_threads(1)
    dense, moe = make_tiny_model(tmp_path_factory.mktemp("dense")), make_tiny_mixture(tmp_path_factory.mktemp("moe"))
    folder = tmp_path_factory.mktemp("two")
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.learner.rank_paths", str(rank), str(dense), str(moe), str(folder)],
            env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            said, _ = rank.communicate(timeout=WAIT_S)
            assert rank.returncode == 0, said[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()
    return folder, dense, moe


@pytest.mark.parametrize("scenario", rank_paths.SCENARIOS)
def test_two_ranks_train_and_publish_as_one_process_on_the_same_path(
    two: tuple[Path, Path, Path], tmp_path: Path, scenario: str
) -> None:
    folder, dense, moe = two
    found: dict[str, Any] = torch.load(folder / f"{scenario}.pt", weights_only=False)
    options = rank_paths.options_of(scenario, dense, moe, tmp_path)
    one = rank_paths.team_of(scenario, options, Ranks())
    assert found["dtypes"] == {str(p.dtype) for p in one.model.parameters}
    is_rounded = scenario.endswith("as_on_gpu")
    assert found["dtypes"] == {"torch.bfloat16" if is_rounded else "torch.float32"}
    base = one.snapshot()
    for step in range(rank_paths.STEPS):
        result = one.step(rank_paths.batch(step))
        assert result.metrics is not None
        for name, value in {**asdict(result.metrics), "grad_norm": result.grad_norm}.items():
            near = {"rel": 3e-2, "abs": 2e-3} if is_rounded else {"rel": 2e-3, "abs": 2e-5}
            assert found["steps"][step][name] == pytest.approx(value, **near), (step, name)
    for name, tensor in one.snapshot().items():
        # In bf16 a step moves a weight by 1e-3 at the most, up or down where its gradient is lost in rounding.
        near = {"rtol": 1e-2, "atol": 5e-3 if is_rounded else 2e-4}
        assert torch.allclose(found["whole"][name].float(), tensor.float(), **near), name
    assert_published(found, base)


def assert_published(found: dict[str, Any], base: dict[str, torch.Tensor]) -> None:
    """A worker that takes the keyframe and the delta holds the ranks' weights to the bit."""
    worker = HostWeights.empty()
    for name in ("keyframe", "delta"):
        worker.commit(decoded(worker, FrameReader().feed(found[name])))
        if name == "keyframe":
            assert worker.fingerprint() == fingerprint(base, rank_paths.KEY), "both begin with the same weights"
    assert worker.version == Version(1)
    held = worker.tensors()
    assert held.keys() == found["whole"].keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in found["whole"].items())


@pytest.mark.parametrize("scenario", ["copies", "copies_as_on_gpu"])
def test_copies_add_up_their_gradients_once_an_update(two: tuple[Path, Path, Path], scenario: str) -> None:
    """However many micro-batches there are: two layers and the rest, each as large as this rank's rows of it."""
    found = torch.load(two[0] / f"{scenario}.pt", weights_only=False)
    assert min(found["microbatches"]) > 1
    assert len(found["met"]) == 3 * rank_paths.STEPS
    elements = sum(tensor.numel() for tensor in found["whole"].values())
    assert sum(found["met"]) == rank_paths.STEPS * elements


@pytest.mark.parametrize("pair", [("bf16", "bf16_as_on_gpu"), ("copies", "copies_as_on_gpu")])
def test_the_gpus_path_moves_weights_as_the_ordinary_one_does(
    two: tuple[Path, Path, Path], pair: tuple[str, str]
) -> None:
    ordinary, gpus = (torch.load(two[0] / f"{name}.pt", weights_only=False) for name in pair)
    for one, other in zip(ordinary["steps"], gpus["steps"], strict=True):
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.05)
        assert other["loss"] == pytest.approx(one["loss"], rel=0.05, abs=5e-3)


def test_ranks_that_were_told_something_else_are_refused_by_name(two: tuple[Path, Path, Path]) -> None:
    said = torch.load(two[0] / "moe.pt", weights_only=False)["refused"]
    assert (
        "trainer's token_budget of rank 1 on " in said and "expected 40, as on rank 0 on " in said and "got 41." in said
    )


def test_another_model_is_named_by_its_file_and_its_machine() -> None:
    first = {"host": "a", "model": "a folder", "model file model.safetensors": "8 bytes of sum 1"}
    same = {**first, "host": "b"}
    assert difference([first, same]) == ""
    other = {**same, "model file model.safetensors": "8 bytes of sum 2"}
    assert difference([first, same, other]) == (
        "model file model.safetensors of rank 2 on b: expected 8 bytes of sum 1, as on rank 0 on a, got 8 bytes of sum 2. "
        "Put the same model on every machine"
    )
    missing = {"host": "b", "model": "no folder /models/x"}
    assert difference([first, missing]).startswith(
        "model of rank 1 on b: expected a folder, as on rank 0 on a, got no folder"
    )
