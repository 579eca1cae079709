"""The path of a GPU, where parameters and their gradients are bf16 tensors: entered on a CPU, which can compute in bf16, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echo2.base.ids import Step
from echo2.learner.rollouts.groups import Batch
from echo2.learner.training import model as model_module
from tests.unit.learner.test_trainer import gradient_of, new_trainer, random_groups
from tests.unit.learner.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_computes_in_bf16", lambda *_: True)


@pytest.mark.usefixtures("in_bf16")
def test_parameters_are_bf16_and_the_rounded_masters_after_every_step(model_path: Path) -> None:
    trainer = new_trainer(model_path)
    for number in range(3):
        result = trainer.step(Batch(Step(number), random_groups(number)))
        assert not result.is_skipped and sum(result.left_out) == 0
    moved = 0
    for parameter, master in zip(trainer.model.parameters, trainer.model.masters, strict=True):
        assert parameter.dtype == torch.bfloat16 and master.dtype == torch.float32
        assert torch.equal(parameter, master.to(torch.bfloat16)) and parameter.grad is None
        moved += int((master != parameter.float()).sum())
    assert moved > 0, "masters hold more than bf16 does"
    published = trainer.model.snapshot()
    for name, master in trainer.model.masters_by_name().items():
        assert torch.equal(published[name], master.to(torch.bfloat16))


def test_its_gradients_are_those_of_float32_up_to_rounding(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(Step(0), random_groups(3))
    exact = gradient_of(new_trainer(model_path, grad_clip=1e9), batch)
    monkeypatch.setattr(model_module, "_computes_in_bf16", lambda *_: True)
    rounded = gradient_of(new_trainer(model_path, grad_clip=1e9), batch)
    joined, found = (torch.cat([g.flatten() for g in grads]) for grads in (exact, rounded))
    assert float(torch.nn.functional.cosine_similarity(joined, found, 0)) > 0.999
    assert float(found.norm() / joined.norm()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.usefixtures("in_bf16")
def test_gradients_of_micro_batches_are_added_in_float32(model_path: Path) -> None:
    """Added in bf16, each of many small ones would lose what is below half a step of the sum."""
    batch = Batch(Step(0), random_groups(4, count=24))
    split = {"grad_clip": 1e9, "token_budget": 30, "row_tokens": 1}
    trainer = new_trainer(model_path, **split)
    handed: list[torch.dtype] = []
    add = trainer.model._add_gradients

    def watched() -> None:
        add()
        handed.extend(master.grad.dtype for master in trainer.model.masters if master.grad is not None)
        assert all(parameter.grad is None for parameter in trainer.model.parameters)

    trainer.model._add_gradients = watched  # type: ignore[method-assign]
    many = gradient_of(trainer, batch)
    assert len(handed) > 20 * len(trainer.model.masters) and set(handed) == {torch.float32}
    whole = gradient_of(new_trainer(model_path, grad_clip=1e9), batch)
    joined, found = (torch.cat([g.flatten() for g in grads]) for grads in (whole, many))
    assert float((joined - found).norm() / joined.norm()) < 0.02
