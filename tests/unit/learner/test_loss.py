"""The loss and its advantages: exact across micro-batches, blind off the mask, textbook forms, TRL's numbers; a user's own."""

import asyncio
import json
import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.learner.loop import TrainingLoop
from echo2.learner.training.loss import (
    CORRECTIONS,
    LOSSES,
    SECOND_MOMENT_MAX,
    BatchTotals,
    LossConfig,
    LossInputs,
    PackedTokens,
    correction_weights,
    group_advantages,
    loss_metrics,
    minimum_variance_weights,
    policy_loss,
)
from tests.patience import WAIT_S

LENGTHS = (3, 1, 5, 2, 4, 2)
OWN = f"{__name__}:own_loss"
CONFIGS = st.builds(
    LossConfig, loss=st.sampled_from([*LOSSES, OWN]), correction=st.sampled_from(list(CORRECTIONS)),
    cap=st.sampled_from([1.1, 2.0]), kl_coefficient=st.sampled_from([0.0, 0.1]),
)  # fmt: skip


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
def test_micro_batches_add_up_to_the_batch(seed: int, config: LossConfig, first_cut: int, second_cut: int) -> None:
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


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_stay_finite_at_the_extremes(loss: str, correction: str) -> None:
    for log_ratio, advantage in product([-25.0, -3.0, 0.0, 3.0, 25.0], [-2.0, 0.0, 2.0]):
        behaviour_T = torch.tensor([-4.0])
        logprobs_T, advantages_R = (behaviour_T + log_ratio).requires_grad_(), torch.tensor([advantage])
        tokens = PackedTokens(logprobs_T, behaviour_T, advantages_R, torch.tensor([0]), torch.tensor([True]))
        found = policy_loss(tokens, LossConfig(loss, correction=correction), BatchTotals(1, 1, 1)).loss
        (gradient,) = torch.autograd.grad(found, tokens.logprobs_T)[0].tolist()
        assert math.isfinite(float(found.detach())) and math.isfinite(gradient)
        if log_ratio == 0.0:
            assert gradient == pytest.approx(-advantage), "on policy every loss is the policy gradient"


def test_the_metrics_are_those_of_their_formulas() -> None:
    tokens = batch(3)
    entropy_T = torch.rand(len(tokens.mask_T), generator=torch.Generator().manual_seed(0))
    found = []
    for entropies_T in (None, entropy_T):
        config = LossConfig(correction="tis_token", cap=1.1)
        result = policy_loss(replace(tokens, entropy_T=entropies_T), config, totals_of(tokens))
        found.append(loss_metrics(result.sums_M, float(result.ratio_max)))
    every_T = (tokens.logprobs_T, tokens.behaviour_logprobs_T, tokens.proximal_logprobs_T, tokens.reference_logprobs_T)
    current_N, behaviour_N, proximal_N, reference_N = (x_T.detach()[tokens.mask_T].double() for x_T in every_T)
    ratio_N, weight_N = (current_N - behaviour_N).exp(), (proximal_N - behaviour_N).exp()
    sequence_N = tokens.sequence_T[tokens.mask_T]
    clipped_N, is_good_N = (current_N - proximal_N).exp(), tokens.advantages_R[sequence_N] > 0
    low, high = ((clipped_N < 0.8) & ~is_good_N).double().mean(), ((clipped_N > 1.28) & is_good_N).double().mean()
    ratio_R = torch.stack([ratio_N[sequence_N == rollout].prod() for rollout in sequence_N.unique()])
    expected = {
        "loss": result.loss.detach(), "policy/entropy": entropy_T[tokens.mask_T].mean(), "ratio/mean": ratio_N.mean(),
        "ratio/max": ratio_N.max(), "clip_fraction/low": low, "clip_fraction/high": high, "clip_fraction": low + high,
        "ratio/ess": ratio_N.sum() ** 2 / (ratio_N**2).sum() / len(ratio_N),
        "ratio/rollout_ess": ratio_R.sum() ** 2 / (ratio_R**2).sum() / len(ratio_R),
        "correction/weight_mean": weight_N.clamp(max=1.1).mean(),
        "correction/altered_fraction": (weight_N > 1.1).double().mean(), "kl": (ratio_N - 1 - ratio_N.log()).mean(),
        "kl/reference": ((reference_N - current_N).exp() - 1 - (reference_N - current_N)).mean(),
    }  # fmt: skip
    assert {name: found[1][name] for name in expected} == pytest.approx({n: float(x) for n, x in expected.items()})
    assert found[0]["policy/entropy"] == pytest.approx(-float(current_N.mean()))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.05, 0.2, 0.6]))
def test_m2po_leaves_out_the_fewest_tokens_that_keep_its_limit(seed: int, spread: float) -> None:
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


def test_a_loss_that_is_not_there_or_gives_no_loss_of_each_token_is_told_what_was_expected() -> None:
    for loss, said in (
        ("sapo", r"learner.loss: expected one of grpo, .* or module:function, got 'sapo'"),
        ("no.such.module:loss", "expected an importable module no.such.module"),
        (f"{__name__}:no_such_loss", "expected a function or class no_such_loss in"),
    ):
        with pytest.raises(ConfigError, match=said):
            LossConfig(loss)
    tokens = batch(1)
    for loss, came in (("mean_loss", r"got shape \(\)"), ("fixed_loss", "without gradient")):
        with pytest.raises(ConfigError, match=f"{loss}: expected a tensor of shape .17,., each token's loss.*{came}"):
            policy_loss(tokens, LossConfig(f"{__name__}:{loss}"), totals_of(tokens))


async def test_an_own_loss_that_raises_stop_iteration_is_an_error_and_keeps_nobody_waiting() -> None:
    with ThreadPoolExecutor(1) as executor:
        loop = cast(TrainingLoop, SimpleNamespace(executor=executor))
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(TrainingLoop.in_trainer(loop, lambda: next(iter(()))), WAIT_S)


# ---- advantages: invariances of every estimator, the known closed forms, ragged and degenerate groups

REWARDS = st.lists(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=6), min_size=1, max_size=5)
ESTIMATORS = st.sampled_from(["dr_grpo", "grpo", "mc_grpo", "vcpo"])


def rewarded(groups: list[list[float]]) -> tuple[Tensor, Tensor]:
    rewards = [reward for group in groups for reward in group]
    index = [g for g, group in enumerate(groups) for _ in group]
    return torch.tensor(rewards, dtype=torch.float32), torch.tensor(index, dtype=torch.int64)


def formula(rewards: list[float], weights: list[float], name: str) -> list[float]:
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    spread, centre = statistics.stdev(rewards), statistics.fmean(rewards, weights if name == "vcpo" else None)
    if name == "mc_grpo":
        centre = statistics.median_low(rewards)
        spread = statistics.median_low(abs(reward - centre) for reward in rewards) or spread
    return [(reward - centre) / (1.0 if name == "dr_grpo" else spread + 1e-4) for reward in rewards]


@settings(max_examples=100, deadline=None)
@given(REWARDS, ESTIMATORS, st.sampled_from([0.0, 1000.0]))
@example([[0.3, 0.3, 0.3], [1.0], [1.0, 1.0, 1.0, 0.0, 0.5]], "mc_grpo", 0.0)
def test_advantages_are_those_of_the_formulas_in_any_order(groups: list[list[float]], name: str, offset: float) -> None:
    rewards_R, group_R = rewarded([[reward + offset for reward in group] for group in groups])
    weight_R = torch.linspace(0.5, 1.5, rewards_R.numel())
    of_groups = [(rewards_R[group_R == g].tolist(), weight_R[group_R == g].tolist()) for g in range(len(groups))]
    expected_R = torch.tensor([value for pair in of_groups for value in formula(*pair, name)], dtype=torch.float32)
    order = torch.randperm(rewards_R.numel(), generator=torch.Generator().manual_seed(1))
    values_R = group_advantages(rewards_R[order], group_R[order], name, weight_R[order]).values_R
    torch.testing.assert_close(values_R, expected_R[order], rtol=1e-5, atol=1e-6)


def test_the_median_rollout_of_an_odd_group_is_left_out_and_of_an_even_group_none_is() -> None:
    rewards_R, group_R = rewarded([[0.0, 1.0, 0.5], [1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0]])
    result = group_advantages(rewards_R, group_R, "mc_grpo")
    assert result.trained_R.tolist() == [True, True, False, True, True, False, True, True, True, True]
    assert result.values_R[~result.trained_R].tolist() == [0.0, 0.0]


def test_minimum_variance_weights_survive_ratios_that_would_overflow() -> None:
    weight_R = minimum_variance_weights(torch.tensor([900.0, 0.0, -900.0]), torch.ones(3))
    assert weight_R.tolist() == [1.0, 0.0, 0.0]
    rewards_R, group_R = rewarded([[1.0, 0.0], [1.0, 0.0]])
    far_R = minimum_variance_weights(torch.tensor([900.0, 900.0, -900.0, -900.0]), torch.ones(4))
    values_R = group_advantages(rewards_R, group_R, "vcpo", far_R).values_R
    assert all(math.isfinite(value) for value in values_R.tolist())


# ---- the same batch through TRL's GRPOTrainer, whose results the fixture holds (tests/make_trl_fixtures.py made it)

TOLERANCE = 1e-5
FIXTURE = json.loads((Path(__file__).parents[2] / "fixtures" / "trl_grpo.json").read_text())
BATCH: dict[str, Any] = FIXTURE["batch"]
CASES: list[dict[str, Any]] = FIXTURE["cases"]
SETTINGS = [{k: v for k, v in case.items() if k not in ("advantages", "loss", "gradient")} for case in CASES]
NAMES = [" ".join(f"{k}={v}" for k, v in settings.items()) for settings in SETTINGS]


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([number for row in rows for number in row], dtype=torch.float32)


def correction_of(case: dict[str, Any]) -> str:
    if "mode" not in case:
        return "behaviour"
    if case["clip_max"] >= 1e6:
        return "decoupled"
    return {"token_truncate": "tis_token", "sequence_truncate": "tis_sequence"}[case["mode"]]


def config_of(case: dict[str, Any]) -> LossConfig:
    """TRL's `epsilon_high` of cispo is the bound itself, ours is measured from 1."""
    loss, high = case["loss_type"], case.get("epsilon_high", 0.28)
    is_gspo = loss == "grpo" and case.get("importance_sampling_level") == "sequence"
    return LossConfig(
        "gspo" if is_gspo else loss, clip_low=case.get("epsilon", 0.2),
        clip_high=high - 1.0 if loss == "cispo" else high, correction=correction_of(case),
        cap=case.get("clip_max", 2.0), kl_coefficient=case.get("beta", 0.0),
    )  # fmt: skip


def loss_and_gradient(case: dict[str, Any], advantages_R: Tensor) -> tuple[float, Tensor]:
    lengths = torch.tensor(BATCH["lengths"])
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    mask_T = flat(BATCH["mask"]) > 0
    current_T = flat(BATCH["current"]).requires_grad_()
    micro_batches = case.get("accumulation", 1)
    totals = BatchTotals(int(mask_T.sum()), len(lengths), BATCH["completion_tokens_max"])
    # Without a correction, TRL's old policy is the ratio's anchor.
    old = {"none": current_T.detach(), "proximal": flat(BATCH["proximal"]), "behaviour": flat(BATCH["behaviour"])}
    anchor_T = flat(BATCH["behaviour"]) if "mode" in case else old[case["old"]]
    size = len(lengths) // micro_batches
    total = 0.0
    for first in range(0, len(lengths), size):
        part_T = (sequence_T >= first) & (sequence_T < first + size)
        tokens = PackedTokens(
            current_T[part_T], anchor_T[part_T], advantages_R[first : first + size], sequence_T[part_T] - first,
            mask_T[part_T], None if case["old"] == "none" else flat(BATCH["proximal"])[part_T],
            flat(BATCH["reference"])[part_T],
        )  # fmt: skip
        loss = policy_loss(tokens, config_of(case), totals).loss
        loss.backward()
        total += float(loss.detach())
    assert current_T.grad is not None
    return total, current_T.grad


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_advantages_loss_and_gradient_agree_with_trl(case: dict[str, Any]) -> None:
    rewards_R = torch.tensor(BATCH["rewards"], dtype=torch.float32)
    group_R = torch.arange(len(rewards_R)) // BATCH["group_size"]
    name = {"group": "grpo", "none": "dr_grpo"}[case.get("scale_rewards", "group")]
    advantages_R = group_advantages(rewards_R, group_R, name).values_R
    expected_R = torch.tensor(case["advantages"])
    torch.testing.assert_close(advantages_R, expected_R, rtol=TOLERANCE, atol=TOLERANCE)
    loss, gradient_T = loss_and_gradient(case, advantages_R)
    assert loss == pytest.approx(case["loss"], rel=TOLERANCE, abs=TOLERANCE)
    expected_T = flat(case["gradient"])
    torch.testing.assert_close(gradient_T, expected_T, rtol=0.0, atol=TOLERANCE * float(expected_T.abs().max()))
