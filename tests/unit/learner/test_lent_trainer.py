"""The hand-over between the learner's thread and a user's, with the two in any order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from echo2.base.errors import StateError
from echo2.base.ids import Step
from echo2.learner.batch import Batch
from echo2.learner.runtime.lent_trainer import DeclaredModel, LentTrainer, TrainerLeft
from echo2.learner.runtime.model import PolicyModel
from tests.unit.learner.tiny import make_tiny_model

WITHIN_S = 20.0


def trainer_of(path: Path) -> tuple[LentTrainer, dict[str, torch.Tensor]]:
    model = DeclaredModel(str(path), "bfloat16")
    weights = {name: torch.ones(shape) for name, shape in model.shapes.items()}
    lent = LentTrainer(model)
    lent.begin(0, weights)
    return lent, weights


def stepping(lent: LentTrainer, step: int, failures: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            lent.step(Batch(Step(step), ()), is_published=True)
        except TrainerLeft as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_declared_model_is_told_as_the_learners_own_is(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    for dtype in ("bfloat16", "float32"):
        own = PolicyModel(str(path), dtype, torch.device("cpu"), 1.0)
        declared = DeclaredModel(str(path), dtype)
        assert declared.config_json() == own.config_json() and declared.digest() == own.digest()
        assert declared.stop_token_ids == own.stop_token_ids == (1,)


def test_a_batch_that_is_there_before_it_is_asked_for_is_taken(tmp_path: Path) -> None:
    lent, weights = trainer_of(make_tiny_model(tmp_path / "model"))
    failures: list[BaseException] = []
    for step in range(3):
        thread = stepping(lent, step, failures)
        while lent._batch is None:
            thread.join(0.001)
        batch = lent.next_batch()
        assert batch is not None and batch.step == step
        with pytest.raises(StateError, match=f"expected it to be called after step {step + 1}, before more rollouts"):
            lent.next_batch()
        with pytest.raises(StateError, match=f"publish: expected step {step + 1}, got {step + 2}"):
            lent.hand_in(step + 2, weights)
        assert lent.hand_in(step + 1, weights)
        thread.join(WITHIN_S)
        assert not thread.is_alive() and not failures


def test_whoever_waits_is_woken_when_the_other_leaves(tmp_path: Path) -> None:
    lent, _ = trainer_of(make_tiny_model(tmp_path / "model"))
    failures: list[BaseException] = []
    thread = stepping(lent, 0, failures)
    lent.end()
    thread.join(WITHIN_S)
    assert not thread.is_alive() and isinstance(failures[0], TrainerLeft)
