"""The loss: exact across micro-batches, blind off the mask, equal to textbook forms; a user's own function fits in."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.learner.training.loss import (
    CORRECTIONS,
    LOSSES,
    SECOND_MOMENT_MAX,
    BatchTotals,
    LossConfig,
    LossInputs,
    PackedTokens,
    Segments,
    correction_weights,
    learning_rate_scale,
    loss_metrics,
    policy_loss,
    score_norm_sq_proxy,
)

LENGTHS = (3, 1, 5, 2, 4, 2)
OWN = f"{__name__}:own_loss"
CONFIGS = st.builds(
    LossConfig,
    loss=st.sampled_from([*LOSSES, OWN]),
    correction=st.sampled_from(list(CORRECTIONS)),
    cap=st.sampled_from([1.1, 2.0]),
    kl_coefficient=st.sampled_from([0.0, 0.1]),
)


def own_loss(inputs: LossInputs) -> Tensor:
    """A user's own: REINFORCE that leaves out tokens whose rollout has moved far, in the mean."""
    near_T = inputs.segments.mean_T(inputs.log_ratio_T.detach().abs()) < 0.5
    return -inputs.advantage_T * inputs.logprobs_T * near_T


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


def plain(log_ratios: list[float], advantages: list[float], sequence: list[int] | None = None) -> PackedTokens:
    """Tokens with these log-ratios, current over behaviour, each a rollout of its own unless `sequence` says otherwise."""
    behaviour_T = torch.full((len(log_ratios),), -4.0)
    sequence_T = torch.arange(len(log_ratios)) if sequence is None else torch.tensor(sequence)
    logprobs_T = (behaviour_T + torch.tensor(log_ratios)).requires_grad_()
    mask_T = torch.ones_like(sequence_T, dtype=torch.bool)
    return PackedTokens(logprobs_T, behaviour_T, torch.tensor(advantages), sequence_T, mask_T)


def totals_of(tokens: PackedTokens) -> BatchTotals:
    return BatchTotals(max(1, int(tokens.mask_T.sum())), len(tokens.advantages_R), 8)


def gradient_of(tokens: PackedTokens, config: LossConfig, totals: BatchTotals | None = None) -> Tensor:
    loss = policy_loss(tokens, config, totals or totals_of(tokens)).loss
    return torch.autograd.grad(loss, tokens.logprobs_T)[0]


def part(tokens: PackedTokens, first: int, last: int) -> PackedTokens:
    """Rollouts `first` to `last - 1` as a micro-batch of their own, sharing the leaf that gathers the gradient."""
    chosen = (tokens.sequence_T >= first) & (tokens.sequence_T < last)
    assert tokens.proximal_logprobs_T is not None and tokens.reference_logprobs_T is not None
    return PackedTokens(
        tokens.logprobs_T[chosen], tokens.behaviour_logprobs_T[chosen], tokens.advantages_R[first:last],
        tokens.sequence_T[chosen] - first, tokens.mask_T[chosen], tokens.proximal_logprobs_T[chosen],
        tokens.reference_logprobs_T[chosen],
    )  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000), CONFIGS, st.integers(1, 5), st.integers(1, 5))
def test_micro_batches_add_up_to_the_batch_in_loss_gradient_and_metrics(
    seed: int, config: LossConfig, first_cut: int, second_cut: int
) -> None:
    tokens = batch(seed)
    totals = totals_of(tokens)
    whole = policy_loss(tokens, config, totals)
    expected_T = gradient_of(tokens, config)
    parts = [
        policy_loss(part(tokens, a, b), config, totals)
        for a, b in pairwise(sorted({0, first_cut, second_cut, len(LENGTHS)}))
    ]
    together = torch.stack([piece.loss for piece in parts]).sum()
    torch.testing.assert_close(torch.autograd.grad(together, tokens.logprobs_T)[0], expected_T, rtol=1e-5, atol=1e-7)
    assert float(together.detach()) == pytest.approx(float(whole.loss.detach()), rel=1e-5, abs=1e-6)
    sums_M = torch.stack([piece.sums_M for piece in parts]).sum(0)
    torch.testing.assert_close(sums_M, whole.sums_M, rtol=1e-5, atol=1e-5)
    assert max(float(piece.ratio_max) for piece in parts) == float(whole.ratio_max)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), CONFIGS)
def test_what_stands_off_the_mask_changes_nothing_and_gets_no_gradient(seed: int, config: LossConfig) -> None:
    tokens = batch(seed)
    loss = policy_loss(tokens, config, totals_of(tokens)).loss
    poisoned_T = torch.where(tokens.mask_T, tokens.behaviour_logprobs_T, torch.nan)
    logprobs_T = torch.where(tokens.mask_T, tokens.logprobs_T.detach(), torch.inf).requires_grad_()
    poisoned = replace(tokens, logprobs_T=logprobs_T, behaviour_logprobs_T=poisoned_T)
    other = policy_loss(poisoned, config, totals_of(tokens)).loss
    gradient_T = torch.autograd.grad(other, logprobs_T)[0]
    assert float(other.detach()) == pytest.approx(float(loss.detach()), rel=1e-6, abs=1e-7)
    assert bool((gradient_T[~tokens.mask_T] == 0).all()) and bool(torch.isfinite(gradient_T).all())


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_stay_finite_at_the_extremes(loss: str) -> None:
    for log_ratio, advantage in product([-25.0, -3.0, 0.0, 3.0, 25.0], [-2.0, 0.0, 2.0]):
        tokens = plain([log_ratio], [advantage])
        found = policy_loss(tokens, LossConfig(loss), BatchTotals(1, 1, 1)).loss
        (gradient,) = torch.autograd.grad(found, tokens.logprobs_T)[0].tolist()
        assert math.isfinite(float(found.detach())) and math.isfinite(gradient)
        if log_ratio == 0.0:
            assert gradient == pytest.approx(-advantage), "on policy every loss is the policy gradient"


def test_the_asymmetric_clip_stops_the_gradient_only_on_the_side_that_would_go_further() -> None:
    ratios, advantages = [1.5, 0.5, 1.5, 0.5, 1.25], [1.0, -1.0, -1.0, 1.0, 1.0]
    tokens = plain([math.log(ratio) for ratio in ratios], advantages)
    torch.testing.assert_close(gradient_of(tokens, LossConfig()), torch.tensor([0.0, 0.0, 1.5, -0.5, -1.25]) / 5)
    result = policy_loss(tokens, LossConfig(), totals_of(tokens))
    metrics = loss_metrics(result.sums_M, float(result.ratio_max))
    assert metrics["clip_fraction/high"] == metrics["clip_fraction/low"] == pytest.approx(1 / 5)
    assert metrics["ratio/max"] == pytest.approx(1.5, rel=1e-5)


def test_every_divisor_is_what_it_says() -> None:
    tokens = replace(plain([0.0] * 6, [1.0, -2.0], [0, 0, 0, 0, 1, 1]))
    tokens = replace(tokens, mask_T=torch.tensor([True, True, True, False, True, False]))
    totals = BatchTotals(token_count=10, rollout_count=5, completion_tokens_max=8)

    def loss(name: str) -> float:
        return float(policy_loss(tokens, LossConfig(name), totals).loss.detach())

    assert loss("dapo") == pytest.approx((-3 + 2) / 10)
    assert loss("dr_grpo") == pytest.approx((-3 + 2) / 40)
    assert loss("grpo") == pytest.approx((-1 + 2) / 5)
    assert loss("luspo") == pytest.approx((-3 + 2) / 5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.05, 0.2, 0.6]))
def test_m2po_leaves_out_the_fewest_tokens_that_bring_the_second_moment_under_its_limit(
    seed: int, spread: float
) -> None:
    tokens = replace(batch(seed, spread=spread), reference_logprobs_T=None)
    gradient_T = gradient_of(tokens, LossConfig("m2po"))
    log_ratio_T = tokens.logprobs_T.detach() - tokens.behaviour_logprobs_T
    advantage_T = tokens.advantages_R[tokens.sequence_T]
    for rollout in range(len(LENGTHS)):
        mine_T = (tokens.sequence_T == rollout) & tokens.mask_T
        away_T = mine_T & (log_ratio_T * advantage_T > 0)
        kept = sorted(float(x) ** 2 for x in log_ratio_T[away_T])
        while kept and sum(kept) / len(kept) > SECOND_MOMENT_MAX:
            kept.pop()
        assert int((gradient_T[away_T] != 0).sum()) == len(kept)
        stays_T = mine_T & (gradient_T != 0)
        expected_T = -(log_ratio_T.exp() * advantage_T)[stays_T] / max(1, int(tokens.mask_T.sum()))
        torch.testing.assert_close(gradient_T[stays_T], expected_T)
        assert bool((gradient_T[mine_T & ~away_T] != 0).all())


def test_metrics_read_the_effective_sample_and_the_entropy() -> None:
    tokens = replace(batch(7, spread=0.0), entropy_T=torch.full((sum(LENGTHS),), 1.25))
    result = policy_loss(tokens, LossConfig(), totals_of(tokens))
    metrics = loss_metrics(result.sums_M, float(result.ratio_max))
    assert metrics["ratio/ess"] == metrics["ratio/rollout_ess"] == pytest.approx(1.0)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["policy/entropy"] == pytest.approx(1.25)


# ---- what vcpo takes from the ratios


def test_the_learning_rate_scale_is_the_root_and_has_a_floor() -> None:
    assert learning_rate_scale(0.25) == pytest.approx(0.5)
    assert learning_rate_scale(0.0, floor=0.1) == 0.1
    with pytest.raises(ConfigError, match="expected 0 to 1"):
        learning_rate_scale(math.nan)


def test_the_score_norm_proxy_is_zero_for_sure_tokens_and_grows_with_doubt() -> None:
    segments = Segments(torch.tensor([0, 0, 1, 1]), torch.tensor([True, True, True, False]), 2)
    norm_sq_R = score_norm_sq_proxy(torch.tensor([0.0, 0.0, math.log(0.5), -9.0]), segments)
    assert norm_sq_R.tolist() == pytest.approx([0.0, 0.25])


# ---- a user's own function


def mean_loss(inputs: LossInputs) -> Tensor:
    return inputs.log_ratio_T.mean()


def fixed_loss(inputs: LossInputs) -> Tensor:
    return torch.zeros_like(inputs.advantage_T)


def test_an_own_loss_is_masked_weighed_and_divided_like_ours() -> None:
    tokens = replace(batch(11, spread=0.05), reference_logprobs_T=None)
    expected_T = -tokens.advantages_R[tokens.sequence_T] * tokens.mask_T / int(tokens.mask_T.sum())
    torch.testing.assert_close(gradient_of(tokens, LossConfig(OWN)), expected_T)
    weights_T, _ = correction_weights(tokens, tokens.logprobs_T.detach(), LossConfig(correction="decoupled"))
    tokens = replace(tokens, proximal_logprobs_T=None)
    found_T = gradient_of(tokens, LossConfig(OWN, correction="decoupled"))
    torch.testing.assert_close(found_T, expected_T * weights_T)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("sapo", r"learner.loss: expected one of grpo, .* or module:function, got 'sapo'"),
        ("no.such.module:loss", "expected an importable module no.such.module"),
        (f"{__name__}:no_such_loss", "expected a function or class no_such_loss in"),
    ],
)
def test_a_loss_that_is_not_there_is_refused_by_name(loss: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LossConfig(loss)


def test_an_own_loss_that_gives_no_loss_of_each_token_is_told_what_was_expected() -> None:
    tokens = batch(1)
    for loss, came in (("mean_loss", r"got shape \(\)"), ("fixed_loss", "without gradient")):
        with pytest.raises(ConfigError, match=f"{loss}: expected a tensor of shape .17,., each token's loss.*{came}"):
            policy_loss(tokens, LossConfig(f"{__name__}:{loss}"), totals_of(tokens))


def test_wrong_settings_are_refused_with_the_value_that_came() -> None:
    tokens = replace(batch(1), reference_logprobs_T=None)
    with pytest.raises(ConfigError, match="reference"):
        policy_loss(tokens, LossConfig(kl_coefficient=0.1), totals_of(tokens))
    for options, said in (({"clip_low": 0.0}, r"0\.0"), ({"cap": 0.0}, "cap"), ({"correction": "masked"}, "masked")):
        with pytest.raises(ConfigError, match=said):
            LossConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        BatchTotals(0, 1, 1)
