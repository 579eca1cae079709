"""Advantages: invariances of every estimator, the known closed forms, ragged and degenerate groups."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.learner.training.loss import ADVANTAGES, group_advantages, minimum_variance_weights

REWARDS = st.lists(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=6), min_size=1, max_size=5)
NAMES = st.sampled_from(sorted(ADVANTAGES))


def batch(groups: list[list[float]]) -> tuple[Tensor, Tensor]:
    rewards = [reward for group in groups for reward in group]
    index = [g for g, group in enumerate(groups) for _ in group]
    return torch.tensor(rewards, dtype=torch.float32), torch.tensor(index, dtype=torch.int64)


def advantages(groups: list[list[float]], name: str) -> Tensor:
    rewards_R, group_R = batch(groups)
    return group_advantages(rewards_R, group_R, name, torch.ones_like(rewards_R)).values_R


@settings(max_examples=60, deadline=None)
@given(REWARDS, NAMES)
def test_advantages_are_finite_and_do_not_depend_on_the_order_of_rollouts(groups: list[list[float]], name: str) -> None:
    rewards_R, group_R = batch(groups)
    weight_R = torch.linspace(0.5, 1.5, rewards_R.numel())
    order = torch.randperm(rewards_R.numel(), generator=torch.Generator().manual_seed(1))
    straight = group_advantages(rewards_R, group_R, name, weight_R).values_R
    shuffled = group_advantages(rewards_R[order], group_R[order], name, weight_R[order]).values_R
    assert bool(torch.isfinite(straight).all())
    torch.testing.assert_close(straight[order], shuffled, rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(REWARDS, st.sampled_from(["grpo", "dr_grpo"]))
def test_mean_advantages_sum_to_zero_in_each_group(groups: list[list[float]], name: str) -> None:
    values_R = advantages(groups, name)
    _, group_R = batch(groups)
    for g in range(len(groups)):
        assert abs(float(values_R[group_R == g].sum())) < 1e-3


@settings(max_examples=60, deadline=None)
@given(REWARDS, NAMES, st.floats(-3, 3))
def test_adding_a_constant_to_all_rewards_changes_no_advantage(
    groups: list[list[float]], name: str, shift: float
) -> None:
    rounded = [[round(reward, 2) for reward in group] for group in groups]
    shifted = [[reward + shift for reward in group] for group in rounded]
    torch.testing.assert_close(advantages(rounded, name), advantages(shifted, name), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_group_without_contrast_and_a_lone_rollout_get_zero(name: str) -> None:
    values = advantages([[0.3, 0.3, 0.3], [1.0], [1.0, 0.0, 0.5]], name)
    assert values[:4].abs().max().item() < 1e-6
    assert values[4:].abs().max().item() > 0


def test_the_median_rollout_of_an_odd_group_is_left_out_and_of_an_even_group_none_is() -> None:
    rewards_R, group_R = batch([[0.0, 1.0, 0.5], [1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0]])
    result = group_advantages(rewards_R, group_R, "mc_grpo")
    assert result.trained_R.tolist() == [True, True, False, True, True, False, True, True, True, True]
    assert result.values_R[~result.trained_R].tolist() == [0.0, 0.0]
    assert result.values_R[0].item() == pytest.approx(-0.5 / (0.5 + 1e-4))


def test_median_scaling_stays_bounded_when_most_of_a_group_is_equal() -> None:
    assert advantages([[0.0, 0.0, 0.0, 0.0, 1.0]], "mc_grpo").abs().max().item() < 5


def test_the_minimum_variance_baseline_minimises_the_variance_of_the_weighted_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards_R = torch.rand(7, generator=generator)
    log_ratio_R = torch.randn(7, generator=generator)
    norm_sq_R = torch.rand(7, generator=generator) + 0.1
    weight_R = minimum_variance_weights(log_ratio_R, norm_sq_R)
    group_R = torch.zeros(7, dtype=torch.int64)
    centred = group_advantages(rewards_R, group_R, "vcpo", weight_R).values_R[0] * (rewards_R.std() + 1e-4)
    chosen = rewards_R[0] - centred

    def second_moment(baseline: float) -> float:
        return float((torch.exp(2 * log_ratio_R) * norm_sq_R * (rewards_R - baseline) ** 2).sum())

    assert second_moment(chosen.item()) <= min(second_moment(chosen.item() + d) for d in (-0.01, 0.01, 0.1))


def test_minimum_variance_weights_survive_ratios_that_would_overflow() -> None:
    weight_R = minimum_variance_weights(torch.tensor([900.0, 0.0, -900.0]), torch.ones(3))
    assert weight_R.tolist() == [1.0, 0.0, 0.0]
    rewards_R, group_R = batch([[1.0, 0.0], [1.0, 0.0]])
    far_R = minimum_variance_weights(torch.tensor([900.0, 900.0, -900.0, -900.0]), torch.ones(4))
    values_R = group_advantages(rewards_R, group_R, "vcpo", far_R).values_R
    assert all(math.isfinite(value) for value in values_R.tolist())
    with pytest.raises(ConfigError, match="vcpo: expected weights"):
        group_advantages(rewards_R, group_R, "vcpo")
