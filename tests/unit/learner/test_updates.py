"""Several updates of one batch, and completions that were cut off."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echo2.base.ids import Step
from echo2.base.rollout import FinishReason
from echo2.learner.rollouts.groups import Batch, TrainGroup
from echo2.learner.training.loss import LossConfig
from echo2.learner.training.packing import Attention, PackedInputs
from echo2.learner.training.trainer import Trainer
from tests.unit.learner.test_trainer import gradient_of, new_trainer, random_groups
from tests.unit.learner.tiny import make_tiny_model

PLAIN = {"weights_dtype": "float32", "grad_clip": 1e9}
DECOUPLED = LossConfig(correction="decoupled")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def own_logprobs(path: Path, groups: tuple[TrainGroup, ...]) -> tuple[TrainGroup, ...]:
    """The groups as the policy itself would have sampled them."""
    exact = iter(new_trainer(path, **PLAIN).logprobs(groups))
    made = []
    for group in groups:
        rollouts = [replace(r, logprobs=tuple(next(exact).tolist())) for r in group.rollouts]
        made.append(replace(group, rollouts=tuple(replace(r, raw_logprobs=r.logprobs) for r in rollouts)))
    return tuple(made)


def test_each_update_trains_on_its_share_as_a_batch_of_its_own_would(model_path: Path) -> None:
    groups = own_logprobs(model_path, random_groups(7, count=4))
    options = {**PLAIN, "loss": DECOUPLED}
    parts = new_trainer(model_path, updates_per_batch=2, **options)
    result = parts.step(Batch(Step(0), groups))
    apart = new_trainer(model_path, **options)
    first, second = (apart.step(Batch(Step(0), half)) for half in (groups[:2], groups[2:]))
    assert result.step == parts.step_count == 1
    assert result.sampled_tokens == first.sampled_tokens + second.sampled_tokens
    assert result.metrics is not None and first.metrics is not None and second.metrics is not None
    assert result.metrics.token_count == first.metrics.token_count + second.metrics.token_count
    # The ratio of the second update starts from the policy before the batch, so ratio times weight is the same either way.
    assert result.metrics.loss == pytest.approx((first.metrics.loss + second.metrics.loss) / 2, rel=1e-4)
    moved = [float((a - b).abs().max()) for a, b in zip(parts.model.masters, apart.model.masters, strict=True)]
    assert 0 < max(moved) < 1e-2


def test_the_ratio_of_later_updates_starts_from_the_policy_before_the_batch(model_path: Path) -> None:
    """A copy of the first half as second half: tokens that the first update moved beyond the clip get no gradient again."""
    half = own_logprobs(model_path, random_groups(8, count=2))
    trainer = new_trainer(model_path, updates_per_batch=2, loss=DECOUPLED, **{**PLAIN})
    for group in trainer.optimiser.param_groups:
        group["lr"] = 0.05
    trainer.options = replace(trainer.options, lr=0.05)
    result = trainer.step(Batch(Step(0), half + half))
    assert result.metrics is not None
    clipped = result.metrics.clip_low_fraction + result.metrics.clip_high_fraction
    assert 0.0 < clipped <= 0.5, "the first update clips nothing, the second what the first moved"


def test_an_update_that_is_not_finite_is_told_though_the_next_one_is(model_path: Path) -> None:
    first, second = random_groups(13, count=2)
    broken = replace(first, rewards=(math.nan, *first.rewards[1:]))
    trainer = new_trainer(model_path, updates_per_batch=2)
    result = trainer.step(Batch(Step(0), (broken, second)))
    assert result.is_skipped and result.lr == 1e-3 and trainer.nonfinite_steps == 1


def test_the_minimum_variance_baseline_and_several_updates_share_one_pass(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(model_path, updates_per_batch=2, advantage="vcpo")
    passes: list[bool] = []
    forward = trainer.model.policy.forward

    def counted(inputs: PackedInputs, with_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        passes.append(torch.is_grad_enabled())
        return forward(inputs, with_entropy)

    monkeypatch.setattr(trainer.model.policy, "forward", counted)
    trainer.step(Batch(Step(0), random_groups(12, count=2)))
    assert passes == [False, False, True, True]
    assert torch.is_grad_enabled()


def test_the_reference_attends_as_the_policy_does(model_path: Path) -> None:
    """It reads the same rows; a dense mask of long ones would undo what blocks save."""
    trainer = new_trainer(model_path, loss=LossConfig(kl_coefficient=0.1))
    trainer.model.policy.attend_by(Attention.FLEX)
    again = Trainer(trainer.model, trainer.options, 10)
    assert again.reference is not None and again.reference.policy.attention is Attention.FLEX


def test_more_updates_than_groups_make_one_of_each(model_path: Path) -> None:
    trainer = new_trainer(model_path, updates_per_batch=9)
    result = trainer.step(Batch(Step(0), random_groups(9, count=3)))
    assert result.step == 1 and not result.is_skipped
    steps = {int(state["step"]) for state in trainer.optimiser.state.values()}
    assert steps == {3}


def test_what_was_cut_off_counts_in_the_baseline_and_is_not_trained_on(model_path: Path) -> None:
    whole = random_groups(10, count=2)
    cut = tuple(
        replace(g, rollouts=(replace(g.rollouts[0], finish_reason=FinishReason.LENGTH), *g.rollouts[1:])) for g in whole
    )
    trainer = new_trainer(model_path, trains_on_truncated=False, **PLAIN)
    result = trainer.step(Batch(Step(0), cut))
    expected = sum(len(r.token_ids) for g in cut for r in g.rollouts[1:])
    assert result.sampled_tokens == expected
    # The same advantages without the rollout in the loss: a gradient unlike that of groups which lack it.
    lacking = tuple(replace(g, rollouts=g.rollouts[1:], rewards=g.rewards[1:]) for g in whole)
    found = gradient_of(new_trainer(model_path, trains_on_truncated=False, **PLAIN), Batch(Step(0), cut))
    other = gradient_of(new_trainer(model_path, **PLAIN), Batch(Step(0), lacking))
    everything = gradient_of(new_trainer(model_path, **PLAIN), Batch(Step(0), cut))
    assert any(not torch.allclose(a, b, atol=1e-6) for a, b in zip(found, other, strict=True))
    assert any(not torch.allclose(a, b, atol=1e-6) for a, b in zip(found, everything, strict=True))


def test_a_batch_that_was_cut_off_throughout_changes_nothing(model_path: Path) -> None:
    groups = tuple(
        replace(g, rollouts=tuple(replace(r, finish_reason=FinishReason.LENGTH) for r in g.rollouts))
        for g in random_groups(11, count=2)
    )
    trainer = new_trainer(model_path, trains_on_truncated=False, **PLAIN)
    before = [master.detach().clone() for master in trainer.model.masters]
    result = trainer.step(Batch(Step(0), groups))
    assert result.metrics is not None and result.metrics.token_count == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.masters, strict=True))
