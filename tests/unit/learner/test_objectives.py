"""The objectives against their textbook forms, written a second time and rollout by rollout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.learner.correction import Correction, CorrectionConfig, Segments
from echo2.learner.loss import BatchTotals, Normalisation, PackedTokens, PolicyLossConfig, policy_loss
from echo2.learner.objectives import (
    OBJECTIVES,
    GammaShape,
    Objective,
    ObjectiveConfig,
    Ratios,
    near_enough,
    surrogate,
)

LENGTHS = (4, 1, 6, 3)


def ratios_of(seed: int, spread: float = 0.6) -> Ratios:
    generator = torch.Generator().manual_seed(seed)
    sequence_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask_T = torch.rand(len(sequence_T), generator=generator) < 0.8
    log_ratio_T = spread * torch.randn(len(sequence_T), generator=generator) * mask_T
    advantage_T = torch.randn(len(LENGTHS), generator=generator)[sequence_T]
    logprobs_T = -torch.rand(len(sequence_T), generator=generator)
    return Ratios(logprobs_T, log_ratio_T, advantage_T, torch.zeros_like(log_ratio_T), Segments(sequence_T, mask_T, 4))


def test_every_objective_has_its_rule() -> None:
    assert set(OBJECTIVES) == set(Objective)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.005, 0.04, 0.3]))
def test_m2po_leaves_out_the_fewest_tokens_that_bring_the_second_moment_under_its_limit(
    seed: int, limit: float
) -> None:
    ratios = ratios_of(seed)
    held = surrogate(ratios, ObjectiveConfig(Objective.M2PO, second_moment_max=limit))
    for rollout in range(4):
        away = [
            float(log_ratio) ** 2
            for log_ratio, advantage, sequence, counts in zip(
                ratios.log_ratio_T, ratios.advantage_T, ratios.segments.sequence_T, ratios.segments.mask_T, strict=True
            )
            if counts and int(sequence) == rollout and float(log_ratio * advantage) > 0
        ]
        kept = sorted(away)
        while kept and sum(kept) / len(kept) > limit:
            kept.pop()
        mine_T = (ratios.segments.sequence_T == rollout) & ratios.segments.mask_T
        left_out = int(((held.held_low_T | held.held_high_T) & mine_T).sum())
        assert left_out == len(away) - len(kept)
    free_T = ~(held.held_low_T | held.held_high_T)
    expected_T = -torch.exp(ratios.log_ratio_T) * ratios.advantage_T
    assert torch.allclose(held.loss_T[free_T], expected_T[free_T])
    assert bool((held.loss_T[~free_T] == 0).all())


def test_off_policy_rollouts_are_dropped_only_where_the_advantage_is_negative() -> None:
    sequence_T = torch.tensor([0, 0, 1, 1, 2, 2])
    segments = Segments(sequence_T, torch.tensor([True, True, True, True, True, False]), 3)
    moved_T = torch.tensor([-0.3, -0.1, -0.3, -0.1, -0.05, -9.0])  # current less behaviour
    advantage_T = torch.tensor([1.0, -1.0, -1.0])[sequence_T]
    near_T = near_enough(moved_T, advantage_T, segments, 0.1)
    assert near_T.tolist() == [True, True, False, False, True, True]


def test_vespo_weighs_a_rollout_by_its_whole_ratio() -> None:
    ratios = ratios_of(3, spread=0.2)
    shapes = (GammaShape(2.0, 3.0), GammaShape(3.0, 2.0))
    held = surrogate(ratios, ObjectiveConfig(Objective.VESPO, vespo_shapes=shapes))
    for index, sequence in enumerate(ratios.segments.sequence_T.tolist()):
        mine_T = (ratios.segments.sequence_T == sequence) & ratios.segments.mask_T
        weight = math.exp(float(ratios.log_ratio_T[mine_T].sum()))
        shape = shapes[0] if ratios.advantage_T[index] >= 0 else shapes[1]
        phi = math.exp(shape.decay) * weight**shape.k * math.exp(-shape.decay * weight)
        if ratios.segments.mask_T[index]:
            expected = -phi * float(ratios.advantage_T[index] * ratios.logprobs_T[index])
            assert float(held.loss_T[index]) == pytest.approx(expected, rel=1e-5)


def one_token(log_ratio: float, advantage: float) -> tuple[PackedTokens, Tensor]:
    current_T = torch.tensor([-0.5], requires_grad=True)
    tokens = PackedTokens(
        current_T,
        torch.tensor([-0.5 - log_ratio]),
        torch.tensor([advantage]),
        torch.tensor([0]),
        torch.tensor([True]),
    )
    return tokens, current_T


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("log_ratio", [-25.0, -3.0, 0.0, 3.0, 25.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_losses_and_gradients_stay_finite_at_the_extremes(
    objective: Objective, log_ratio: float, advantage: float
) -> None:
    tokens, current_T = one_token(log_ratio, advantage)
    config = PolicyLossConfig(ObjectiveConfig(objective, ratio_ceiling=3.0))
    loss = policy_loss(tokens, config, BatchTotals(1, 1, 1)).loss
    loss.backward()
    assert current_T.grad is not None
    assert math.isfinite(float(loss.detach())) and math.isfinite(float(current_T.grad))
    if log_ratio == 0.0:
        assert float(current_T.grad) == pytest.approx(-advantage), "on policy every objective is the policy gradient"


def test_luspo_counts_each_rollout_by_its_length() -> None:
    ratios = ratios_of(5)
    sequence_T = ratios.segments.sequence_T
    tokens = PackedTokens(
        ratios.logprobs_T.clone().requires_grad_(),
        ratios.logprobs_T.clone(),
        torch.tensor([1.0, 1.0, 1.0, 1.0]),
        sequence_T,
        torch.ones_like(sequence_T, dtype=torch.bool),
    )
    totals = BatchTotals(sum(LENGTHS), 4, 8)
    config = PolicyLossConfig(ObjectiveConfig(Objective.GSPO), Normalisation.LUSPO)
    assert float(policy_loss(tokens, config, totals).loss.detach()) == pytest.approx(-sum(LENGTHS) / 4)


def test_settings_that_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="by token"):
        PolicyLossConfig(ObjectiveConfig(Objective.VESPO), correction=CorrectionConfig(Correction.TIS_SEQUENCE))
    with pytest.raises(ConfigError, match="lambda"):
        GammaShape(1.0, 0.0)
    with pytest.raises(ConfigError, match="m2po"):
        ObjectiveConfig(second_moment_max=0.0)
    with pytest.raises(ConfigError, match="nats"):
        ObjectiveConfig(off_policy_nats_max=-1.0)
    with pytest.raises(ConfigError, match="floor"):
        CorrectionConfig(floor=1.5)
