"""The loss: exact across micro-batches, blind off the mask, and equal to its textbook forms where those are known."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.learner.correction import OF_WHOLE_ROLLOUTS, Correction, CorrectionConfig
from echo2.learner.loss import (
    SUM_NAMES,
    BatchTotals,
    Normalisation,
    PackedTokens,
    PolicyLossConfig,
    loss_metrics,
    policy_loss,
)
from echo2.learner.objectives import Objective, ObjectiveConfig

LENGTHS = (3, 1, 5, 2, 4, 2)
OBJECTIVES = st.builds(
    ObjectiveConfig,
    st.sampled_from(list(Objective)),
    ratio_ceiling=st.sampled_from([None, 3.0]),
    off_policy_nats_max=st.sampled_from([None, 0.05]),
)
CORRECTIONS = st.builds(CorrectionConfig, st.sampled_from(list(Correction)), floor=st.sampled_from([0.0, 0.8]))
CONFIGS = (
    st.tuples(OBJECTIVES, CORRECTIONS)
    .filter(lambda both: both[0].kind is not Objective.VESPO or both[1].kind not in OF_WHOLE_ROLLOUTS)
    .flatmap(
        lambda both: st.builds(
            PolicyLossConfig,
            objective=st.just(both[0]),
            correction=st.just(both[1]),
            normalisation=st.sampled_from([n for n in Normalisation if n is not Normalisation.BNPO]),
            kl_coefficient=st.sampled_from([0.0, 0.1]),
            kl_weighted_by_ratio=st.booleans(),
        )
    )
)


def batch(seed: int, lengths: tuple[int, ...] = LENGTHS, spread: float = 0.5) -> PackedTokens:
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)

    def near(base_T: Tensor) -> Tensor:
        return (base_T + spread * torch.randn(count, generator=generator)).clamp(max=0.0)

    base_T = -2.0 * torch.rand(count, generator=generator)
    return PackedTokens(
        logprobs_T=base_T.clone().requires_grad_(),
        behaviour_logprobs_T=near(base_T),
        advantages_R=torch.randn(len(lengths), generator=generator),
        sequence_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        mask_T=torch.rand(count, generator=generator) < 0.8,
        proximal_logprobs_T=near(base_T),
        reference_logprobs_T=near(base_T),
    )


def totals_of(tokens: PackedTokens, microbatch_count: int = 1) -> BatchTotals:
    return BatchTotals(max(1, int(tokens.mask_T.sum())), len(tokens.advantages_R), 8, microbatch_count)


def part(tokens: PackedTokens, first: int, last: int) -> PackedTokens:
    """Rollouts `first` to `last - 1` as a micro-batch of their own, sharing the leaf that gathers the gradient."""
    chosen = (tokens.sequence_T >= first) & (tokens.sequence_T < last)
    assert tokens.proximal_logprobs_T is not None and tokens.reference_logprobs_T is not None
    return PackedTokens(
        tokens.logprobs_T[chosen],
        tokens.behaviour_logprobs_T[chosen],
        tokens.advantages_R[first:last],
        tokens.sequence_T[chosen] - first,
        tokens.mask_T[chosen],
        tokens.proximal_logprobs_T[chosen],
        tokens.reference_logprobs_T[chosen],
    )


def gradient_of(tokens: PackedTokens) -> Tensor:
    assert tokens.logprobs_T.grad is not None
    return tokens.logprobs_T.grad.clone()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000), CONFIGS, st.integers(1, 5), st.integers(1, 5))
def test_micro_batches_add_up_to_the_batch_in_loss_gradient_and_metrics(
    seed: int, config: PolicyLossConfig, first_cut: int, second_cut: int
) -> None:
    tokens = batch(seed)
    totals = totals_of(tokens)
    whole = policy_loss(tokens, config, totals)
    whole.loss.backward()
    expected_T = gradient_of(tokens)
    assert tokens.logprobs_T.grad is not None
    tokens.logprobs_T.grad.zero_()
    cuts = sorted({0, first_cut, second_cut, len(LENGTHS)})
    parts = [policy_loss(part(tokens, a, b), config, totals) for a, b in pairwise(cuts)]
    for piece in parts:
        piece.loss.backward()
    torch.testing.assert_close(gradient_of(tokens), expected_T, rtol=1e-5, atol=1e-7)
    assert sum(float(piece.loss.detach()) for piece in parts) == pytest.approx(
        float(whole.loss.detach()), rel=1e-5, abs=1e-6
    )
    sums_M = torch.stack([piece.sums_M for piece in parts]).sum(0)
    torch.testing.assert_close(sums_M, whole.sums_M, rtol=1e-5, atol=1e-5)
    assert max(float(piece.ratio_max) for piece in parts) == float(whole.ratio_max)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), CONFIGS)
def test_what_stands_off_the_mask_changes_nothing_and_gets_no_gradient(seed: int, config: PolicyLossConfig) -> None:
    tokens = batch(seed)
    loss = policy_loss(tokens, config, totals_of(tokens)).loss
    poisoned_T = torch.where(tokens.mask_T, tokens.behaviour_logprobs_T, torch.nan)
    logprobs_T = torch.where(tokens.mask_T, tokens.logprobs_T.detach(), torch.inf).requires_grad_()
    poisoned = replace(tokens, logprobs_T=logprobs_T, behaviour_logprobs_T=poisoned_T)
    other = policy_loss(poisoned, config, totals_of(tokens)).loss
    other.backward()
    assert float(other.detach()) == pytest.approx(float(loss.detach()), rel=1e-6, abs=1e-7)
    assert logprobs_T.grad is not None
    assert bool((logprobs_T.grad[~tokens.mask_T] == 0).all())
    assert bool(torch.isfinite(logprobs_T.grad).all())


@pytest.mark.parametrize("kind", list(Correction))
def test_on_policy_every_correction_gives_the_reinforce_gradient(kind: Correction) -> None:
    tokens = batch(3)
    on_policy_T = tokens.logprobs_T.detach().clone()
    tokens = replace(tokens, behaviour_logprobs_T=on_policy_T, proximal_logprobs_T=None)
    config = PolicyLossConfig(correction=CorrectionConfig(kind))
    totals = totals_of(tokens)
    policy_loss(tokens, config, totals).loss.backward()
    expected_T = -tokens.advantages_R[tokens.sequence_T] * tokens.mask_T / totals.token_count
    torch.testing.assert_close(gradient_of(tokens), expected_T)


def test_the_asymmetric_clip_stops_the_gradient_only_on_the_side_that_would_go_further() -> None:
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.25, 50.0])
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0])
    behaviour_T = torch.full((6,), -4.0)
    tokens = PackedTokens(
        (behaviour_T + ratios.log()).requires_grad_(),
        behaviour_T,
        advantages,
        torch.arange(6),
        torch.ones(6, dtype=torch.bool),
    )
    result = policy_loss(tokens, PolicyLossConfig(ObjectiveConfig(ratio_ceiling=10.0)), BatchTotals(6, 6, 1))
    result.loss.backward()
    expected = torch.tensor([0.0, 0.0, 1.5, -0.5, -1.25, 0.0]) / 6
    torch.testing.assert_close(gradient_of(tokens), expected)
    metrics = loss_metrics(result.sums_M, float(result.ratio_max))
    assert metrics.clip_high_fraction == pytest.approx(1 / 6)
    assert metrics.clip_low_fraction == pytest.approx(1 / 6)
    assert metrics.ceiling_fraction == pytest.approx(1 / 6)
    assert metrics.ratio_max == pytest.approx(50.0, rel=1e-5)


def test_gspo_gives_all_tokens_of_a_rollout_the_same_length_normalised_ratio() -> None:
    behaviour_T = torch.tensor([-1.0, -1.0, -1.0])
    tokens = PackedTokens(
        torch.tensor([-0.9, -1.1, -0.7], requires_grad=True),
        behaviour_T,
        torch.tensor([1.0]),
        torch.zeros(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
    )
    config = PolicyLossConfig(ObjectiveConfig(Objective.GSPO), Normalisation.GRPO)
    result = policy_loss(tokens, config, BatchTotals(3, 1, 3))
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(-math.exp(0.1), rel=1e-5)
    torch.testing.assert_close(gradient_of(tokens), torch.full((3,), -math.exp(0.1) / 3))


def test_the_four_normalisations_divide_by_what_they_say() -> None:
    tokens = batch(5, lengths=(4, 2))
    tokens = replace(
        tokens,
        behaviour_logprobs_T=tokens.logprobs_T.detach().clone(),
        mask_T=torch.tensor([True, True, True, False, True, False]),
        advantages_R=torch.tensor([1.0, -2.0]),
    )
    totals = BatchTotals(token_count=10, rollout_count=5, completion_tokens_max=8, microbatch_count=2)
    loss = {
        normalisation: float(policy_loss(tokens, PolicyLossConfig(normalisation=normalisation), totals).loss.detach())
        for normalisation in Normalisation
    }
    assert loss[Normalisation.DAPO] == pytest.approx((-3 + 2) / 10)
    assert loss[Normalisation.BNPO] == pytest.approx((-3 + 2) / 4 / 2)
    assert loss[Normalisation.DR_GRPO] == pytest.approx((-3 + 2) / 40)
    assert loss[Normalisation.GRPO] == pytest.approx((-1 + 2) / 5)


def test_the_k3_term_is_zero_at_the_reference_and_its_gradient_pulls_towards_it() -> None:
    base_T = torch.tensor([-1.0, -2.0])
    for offset, sign in ((0.0, 0.0), (0.3, 1.0), (-0.3, -1.0)):
        tokens = PackedTokens(
            (base_T + offset).requires_grad_(),
            base_T + offset,
            torch.zeros(2),
            torch.tensor([0, 1]),
            torch.ones(2, dtype=torch.bool),
            reference_logprobs_T=base_T,
        )
        config = PolicyLossConfig(kl_coefficient=1.0, kl_weighted_by_ratio=False)
        result = policy_loss(tokens, config, BatchTotals(2, 2, 1))
        result.loss.backward()
        assert float(result.loss.detach()) == pytest.approx(math.exp(-offset) + offset - 1, abs=1e-6)
        assert torch.sign(gradient_of(tokens)).tolist() == [sign, sign]


def test_metrics_read_the_effective_sample_and_the_entropy() -> None:
    tokens = batch(7, spread=0.0)
    tokens = replace(tokens, entropy_T=torch.full_like(tokens.behaviour_logprobs_T, 1.25))
    result = policy_loss(tokens, PolicyLossConfig(), totals_of(tokens))
    metrics = loss_metrics(result.sums_M, float(result.ratio_max))
    assert metrics.ratio_ess == pytest.approx(1.0)
    assert metrics.rollout_ratio_ess == pytest.approx(1.0)
    assert metrics.kl_behaviour == pytest.approx(0.0, abs=1e-6)
    assert metrics.entropy == pytest.approx(1.25)
    assert metrics.token_count == int(tokens.mask_T.sum())
    assert len(result.sums_M) == len(SUM_NAMES)


def test_wrong_settings_are_refused_with_the_value_that_came() -> None:
    tokens = replace(batch(1), reference_logprobs_T=None)
    with pytest.raises(ConfigError, match="reference"):
        policy_loss(tokens, PolicyLossConfig(kl_coefficient=0.1), totals_of(tokens))
    with pytest.raises(ConfigError, match=r"0\.0"):
        ObjectiveConfig(clip_low=0.0)
    with pytest.raises(ConfigError, match="ceiling"):
        ObjectiveConfig(ratio_ceiling=1.1)
    with pytest.raises(ConfigError, match="at least 1"):
        BatchTotals(0, 1, 1)


def test_token_truncation_without_its_cap_is_the_behaviour_ratio_without_its_clip() -> None:
    """With one optimiser step a batch the proximal policy is the current one, so no clip ever acts on the former."""
    gradients = []
    for kind in (Correction.TIS_TOKEN, Correction.DECOUPLED, Correction.BEHAVIOUR_RATIO):
        tokens = replace(batch(3), proximal_logprobs_T=None)
        config = PolicyLossConfig(
            ObjectiveConfig(clip_low=1.0, clip_high=1e9), correction=CorrectionConfig(kind, cap=1e9)
        )
        totals = BatchTotals(int(tokens.mask_T.sum()), len(LENGTHS), 8)
        gradients.append(torch.autograd.grad(policy_loss(tokens, config, totals).loss, tokens.logprobs_T)[0])
    assert gradients[0].abs().sum() > 0
    assert torch.allclose(gradients[0], gradients[2], atol=1e-7)
    assert torch.allclose(gradients[1], gradients[2], atol=1e-7)
