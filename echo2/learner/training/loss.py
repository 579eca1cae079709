"""The policy-gradient loss on packed sequences, from top to bottom: inputs, corrections, losses, their sum, metrics.

A new loss is one function and one row of `LOSSES`, or a user's own by `module:function`. Guarantees: the losses and gradients of a
batch's micro-batches add up to those of the undivided batch, however it is split between rollouts; positions off the mask
contribute neither loss nor gradient, whatever they hold (even NaN); ratios are bounded in log space, so every result is finite.

Shapes: T tokens of one packed micro-batch, R rollouts in it, M metric sums. A rollout lies within one micro-batch. Three policies:
behaviour (sampled the token, perhaps several versions ago on another machine), proximal (the learner's own weights when the batch
is consumed), current (being optimised). docs/algorithms.md has the formulas and their sources.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.base.units import imported
from echo2.config.run import LearnerSection

LOG_RATIO_LIMIT = 20.0  # e^20 is far beyond every clip and cap, and stays finite in float32


# ---- inputs


@dataclass(frozen=True, slots=True)
class Segments:
    """`sequence_T`: int64, the index of each packed token's rollout. `mask_T`: bool, which tokens count."""

    sequence_T: Tensor
    mask_T: Tensor
    rollout_count: int

    def sum_R(self, values_T: Tensor) -> Tensor:
        """Sum of the counted tokens' values in each rollout."""
        kept_T = torch.where(self.mask_T, values_T, torch.zeros_like(values_T))
        return kept_T.new_zeros(self.rollout_count).index_add(0, self.sequence_T, kept_T)

    def count_R(self) -> Tensor:
        return self.sum_R(torch.ones_like(self.sequence_T, dtype=torch.float32))

    def mean_T(self, values_T: Tensor) -> Tensor:
        """For each token, the mean over the counted tokens of its rollout."""
        return (self.sum_R(values_T) / self.count_R().clamp(min=1.0))[self.sequence_T]


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """One packed micro-batch. All `_T` tensors are aligned: element i belongs to the same token.

    logprobs_T: current policy, with gradient, at the sampling temperature. behaviour_logprobs_T: as the worker reported them.
    proximal_logprobs_T: the learner's own before this batch's first step; None if the batch makes only one step, because they
    then equal the current ones, detached. sequence_T: int64, index of the token's rollout. mask_T: bool, False for prompt,
    padding and environment tokens. advantages_T: each token's own, in place of its rollout's."""

    logprobs_T: Tensor
    behaviour_logprobs_T: Tensor
    advantages_R: Tensor
    sequence_T: Tensor
    mask_T: Tensor
    proximal_logprobs_T: Tensor | None = None
    reference_logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    advantages_T: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logprobs_T.shape
        optional = (self.proximal_logprobs_T, self.reference_logprobs_T, self.entropy_T, self.advantages_T)
        tensors = [self.behaviour_logprobs_T, self.sequence_T, self.mask_T, *(x for x in optional if x is not None)]
        assert len(shape) == 1 and all(x.shape == shape for x in tensors), "packed tensors are 1-D and aligned"
        assert self.mask_T.dtype == torch.bool, "mask_T is bool"

    @property
    def segments(self) -> Segments:
        return Segments(self.sequence_T, self.mask_T, int(self.advantages_R.shape[0]))


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Counts of at least 1 over all micro-batches and ranks of one optimiser step: the global denominators. If data parallelism
    averages gradients (FSDP, DDP), the caller multiplies the loss by the number of ranks."""

    token_count: int
    rollout_count: int
    completion_tokens_max: int


@dataclass(frozen=True, slots=True)
class LossConfig:
    """`loss`: a name of `LOSSES`, or a user's `module:function`. `clip_low`, `clip_high`: the ratio is clipped to 1 - low to 1 +
    high (cispo uses only the upper bound). `correction`: a name of `CORRECTIONS`; `cap`: of the weights of those that truncate."""

    loss: str = "dapo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    correction: str = "behaviour"
    cap: float = 2.0
    kl_coefficient: float = 0.0

    @classmethod
    def of(cls, learner: LearnerSection) -> LossConfig:
        return cls(learner.loss, *learner.clip, learner.correction, kl_coefficient=learner.kl_coefficient)

    def __post_init__(self) -> None:
        loss_named(self.loss)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss function reads; a user's own gets the same.

    logprobs_T: current policy, float32, with gradient. log_ratio_T: current over anchor, with gradient, 0 off the mask; the
    anchor is the behaviour policy, or the proximal one if the correction weighs tokens by their quotient (the caller applies
    those weights). advantage_T: float32. segments: the rollout of each token and which tokens count, with sums and means by
    rollout. Positions off the mask hold 0, and what a function returns for them is ignored."""

    logprobs_T: Tensor
    log_ratio_T: Tensor
    advantage_T: Tensor
    behaviour_logprobs_T: Tensor
    segments: Segments
    config: LossConfig


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """`loss_T`: each token's loss, with gradient. `ratio_T`: the ratio used. `low_T`, `high_T`: bool, the tokens stopped at the
    lower and the upper bound, for the metrics."""

    loss_T: Tensor
    ratio_T: Tensor
    low_T: Tensor
    high_T: Tensor


def masked_log_ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """`numerator - denominator` in float32, clamped to +-`LOG_RATIO_LIMIT`; 0 at masked positions, even if they hold NaN."""
    difference_T = numerator_T.to(torch.float32) - denominator_T.to(torch.float32)
    # Replaced, not multiplied by zero: 0 times NaN is NaN, in the backward pass too.
    kept_T = torch.where(mask_T, difference_T, torch.zeros_like(difference_T))
    return kept_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


TOKEN_LOG_RATIO_MAX = 3.0
"""Nats, a ratio of 20: a token whose reported number is further from the learner's own is left out."""
ROLLOUT_LOG_RATIO_MAX = 1.0
"""Nats. A rollout whose mean absolute difference exceeds this is left out whole. Together with the limit per token, no rollout
weighs more than (2 + e^3) / 3, about 7.4 times, what it would weigh with honest numbers."""


def believed(logprobs_T: Tensor, behaviour_logprobs_T: Tensor, segments: Segments) -> Tensor:
    """bool_T: the counted tokens whose reported log-probability is close enough to the learner's own to train on."""
    with torch.no_grad():
        off_T = masked_log_ratio(logprobs_T, behaviour_logprobs_T, segments.mask_T).abs()
        return segments.mask_T & (off_T <= TOKEN_LOG_RATIO_MAX) & (segments.mean_T(off_T) <= ROLLOUT_LOG_RATIO_MAX)


# ---- corrections: weights, detached, that turn samples of the behaviour policy into samples of the proximal one

Weights = tuple[Tensor, Tensor]
"""Each token's weight from the log-ratio proximal over behaviour, and where a bound took effect (bool)."""


def _tis_token(log_ratio_T: Tensor, segments: Segments, cap: float) -> Weights:
    ratio_T = log_ratio_T.exp()
    return ratio_T.clamp(max=cap), ratio_T > cap


def _tis_sequence(log_ratio_T: Tensor, segments: Segments, cap: float) -> Weights:
    """The product of the ratios over the rollout."""
    return _tis_token(segments.sum_R(log_ratio_T)[segments.sequence_T], segments, cap)


def _decoupled(log_ratio_T: Tensor, segments: Segments, cap: float) -> Weights:
    return log_ratio_T.exp(), torch.zeros_like(segments.mask_T)


CORRECTIONS: Mapping[str, Callable[[Tensor, Segments, float], Weights] | None] = {
    "behaviour": None,  # no weight: the loss's own ratio is current / behaviour
    "tis_token": _tis_token,  # proximal / behaviour, truncated, token by token
    "tis_sequence": _tis_sequence,
    "decoupled": _decoupled,  # proximal / behaviour, without a bound
}


def correction_weights(tokens: PackedTokens, proximal_T: Tensor, config: LossConfig) -> Weights:
    """Weight of each token, 0 off the mask, and where a bound took effect."""
    rule, segments = CORRECTIONS[config.correction], tokens.segments
    if rule is None:
        return tokens.mask_T.to(torch.float32), torch.zeros_like(tokens.mask_T)
    with torch.no_grad():
        log_ratio_T = masked_log_ratio(proximal_T, tokens.behaviour_logprobs_T, tokens.mask_T)
        weights_T, bounded_T = rule(log_ratio_T, segments, config.cap)
        return weights_T * tokens.mask_T, bounded_T & tokens.mask_T


# ---- losses; r is the ratio current over anchor, A the advantage


def clipped(inputs: LossInputs) -> TokenLosses:
    """-min(r A, clip(r) A), token by token."""
    return _clipped(inputs.log_ratio_T, inputs)


def gspo(inputs: LossInputs) -> TokenLosses:
    """The same with one length-normalised ratio per rollout."""
    return _clipped(inputs.segments.mean_T(inputs.log_ratio_T), inputs)


def _clipped(log_ratio_T: Tensor, inputs: LossInputs) -> TokenLosses:
    ratio_T, advantage_T = log_ratio_T.exp(), inputs.advantage_T
    lowest, highest = 1.0 - inputs.config.clip_low, 1.0 + inputs.config.clip_high
    loss_T = -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(lowest, highest) * advantage_T)
    return TokenLosses(loss_T, ratio_T, (ratio_T < lowest) & (advantage_T < 0), (ratio_T > highest) & (advantage_T > 0))


def cispo(inputs: LossInputs) -> TokenLosses:
    """-min(r, 1 + clip_high) A log p with the ratio detached: every token keeps a gradient."""
    ratio_T, highest = inputs.log_ratio_T.exp(), 1.0 + inputs.config.clip_high
    loss_T = -ratio_T.detach().clamp(max=highest) * inputs.advantage_T * inputs.logprobs_T
    high_T = (ratio_T > highest) & (inputs.advantage_T > 0)
    return TokenLosses(loss_T, ratio_T, torch.zeros_like(high_T), high_T)


SECOND_MOMENT_MAX = 0.04  # m2po's limit on a rollout's mean (log r)^2: its paper's


def m2po(inputs: LossInputs) -> TokenLosses:
    """-r A. Of a rollout's tokens that push the policy further from the anchor (those that a clip would stop), the largest (log
    r)^2 are left out until the others' mean is within the limit."""
    ratio_T, advantage_T = inputs.log_ratio_T.exp(), inputs.advantage_T
    with torch.no_grad():
        square_T, sequence_T = inputs.log_ratio_T.square(), inputs.segments.sequence_T
        away_T = inputs.log_ratio_T * advantage_T > 0  # False off the mask, where the log-ratio is 0
        # By rollout, then by size: the mean of a rollout's k smallest squares rises with k, so a token stays if the mean up to it
        # holds.
        order_T = torch.argsort(square_T, stable=True)
        order_T = order_T[torch.argsort(sequence_T[order_T], stable=True)]
        counted_T = away_T[order_T].to(torch.float64)
        running_T, number_T = torch.cumsum(square_T[order_T] * counted_T, 0), torch.cumsum(counted_T, 0)
        first_T = torch.searchsorted(sequence_T[order_T], sequence_T[order_T])
        sum_T = running_T - torch.nn.functional.pad(running_T, (1, 0))[first_T]
        count_T = number_T - torch.nn.functional.pad(number_T, (1, 0))[first_T]
        left_out_T = torch.empty_like(away_T)
        left_out_T[order_T] = sum_T > SECOND_MOMENT_MAX * count_T
        left_out_T &= away_T
    loss_T = torch.where(left_out_T, torch.zeros_like(ratio_T), -ratio_T * advantage_T)
    return TokenLosses(loss_T, ratio_T, left_out_T & (advantage_T < 0), left_out_T & (advantage_T > 0))


def cross_entropy(inputs: LossInputs) -> Tensor:
    """-log p of tokens that are to be learned as they are: the supervised warm start's."""
    return -inputs.logprobs_T


class Divisor(enum.Enum):
    TOKENS = "tokens"  # the number of tokens in the whole batch
    CONSTANT = "constant"  # the number of rollouts times the longest completion allowed
    EACH_ROLLOUT = "each rollout"  # each rollout's sum by its number of tokens, then by the number of rollouts
    ROLLOUTS = "rollouts"  # the number of rollouts: one weighs in proportion to its length


LossFunction = Callable[[LossInputs], TokenLosses | Tensor]
LOSSES: dict[str, tuple[LossFunction, Divisor]] = {
    "grpo": (clipped, Divisor.EACH_ROLLOUT),
    "dapo": (clipped, Divisor.TOKENS),
    "dr_grpo": (clipped, Divisor.CONSTANT),
    "gspo": (gspo, Divisor.EACH_ROLLOUT),
    "luspo": (gspo, Divisor.ROLLOUTS),
    "cispo": (cispo, Divisor.TOKENS),
    "m2po": (m2po, Divisor.TOKENS),
}


def loss_named(name: str) -> tuple[LossFunction, Divisor]:
    """A row of `LOSSES`, or a user's own function, divided by tokens. Raises `ConfigError` if there is none of that name."""
    if ":" in name:
        return imported(name, "learner.loss"), Divisor.TOKENS
    if name not in LOSSES:
        raise ConfigError(f"learner.loss: expected one of {', '.join(LOSSES)} or module:function, got {name!r}")
    return LOSSES[name]


def token_losses(inputs: LossInputs) -> TokenLosses:
    """Each token's loss; checks what a user's own function returns."""
    name = inputs.config.loss
    losses = loss_named(name)[0](inputs)
    if not isinstance(losses, TokenLosses):
        none_T = torch.zeros_like(inputs.segments.mask_T)
        losses = TokenLosses(losses, inputs.log_ratio_T.exp(), none_T, none_T)
    loss_T, count = losses.loss_T, len(inputs.logprobs_T)
    if not isinstance(loss_T, Tensor) or loss_T.shape != (count,) or not (loss_T.requires_grad or not count):
        actual = type(loss_T).__name__
        if isinstance(loss_T, Tensor):
            actual = f"shape {tuple(loss_T.shape)}" + ("" if loss_T.requires_grad else " without gradient")
        raise ConfigError(
            f"learner.loss {name}: expected a tensor of shape ({count},), each token's loss, computed with gradient from "
            f"logprobs_T or log_ratio_T; got {actual}"
        )
    return losses


# ---- the loss of a micro-batch


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss`: scalar with gradient, this micro-batch's share. `sums_M`: float64, detached; add them up over micro-batches and
    ranks, then read them with `loss_metrics`. `ratio_max`: scalar, detached, over the counted tokens."""

    loss: Tensor
    sums_M: Tensor
    ratio_max: Tensor


def policy_loss(tokens: PackedTokens, config: LossConfig, totals: BatchTotals) -> PolicyLoss:
    """Computes this micro-batch's share of the batch's loss, and its metric sums."""
    mask_T, segments = tokens.mask_T, tokens.segments
    nothing_T = torch.zeros_like(tokens.logprobs_T, dtype=torch.float32)
    logprobs_T = torch.where(mask_T, tokens.logprobs_T.to(torch.float32), nothing_T)
    behaviour_T = torch.where(mask_T, tokens.behaviour_logprobs_T, nothing_T)
    proximal_T = logprobs_T.detach() if tokens.proximal_logprobs_T is None else tokens.proximal_logprobs_T
    weights_T, bounded_T = correction_weights(tokens, proximal_T, config)
    anchor_T = behaviour_T if config.correction == "behaviour" else proximal_T
    log_ratio_T = masked_log_ratio(logprobs_T, anchor_T, mask_T)
    advantage_T = tokens.advantages_T
    if advantage_T is None:
        advantage_T = tokens.advantages_R.to(torch.float32)[tokens.sequence_T]
    inputs = LossInputs(logprobs_T, log_ratio_T, advantage_T, behaviour_T, segments, config)
    losses = token_losses(inputs)
    loss_T = torch.where(mask_T, losses.loss_T, nothing_T) * weights_T
    kl_T = nothing_T
    if tokens.reference_logprobs_T is not None:
        # k3, never negative. Times the ratio, its gradient is unbiased off policy.
        off_T = masked_log_ratio(tokens.reference_logprobs_T, logprobs_T, mask_T)
        kl_T = torch.expm1(off_T) - off_T
        loss_T = loss_T + config.kl_coefficient * kl_T * torch.where(mask_T, losses.ratio_T, 0.0)
    loss = _divided(loss_T, segments, loss_named(config.loss)[1], totals)
    with torch.no_grad():
        moved_T = masked_log_ratio(logprobs_T, behaviour_T, mask_T)
        ratio_max = moved_T.exp().masked_fill(~mask_T, 0.0).amax() if loss_T.numel() else loss
        flags = {"clipped_low": losses.low_T, "clipped_high": losses.high_T, "altered": bounded_T}
        sums_M = _metric_sums(tokens, {"weight": weights_T, "kl_reference": kl_T, **flags}, moved_T, loss)
    return PolicyLoss(loss, sums_M, ratio_max.detach())


def _divided(loss_T: Tensor, segments: Segments, divisor: Divisor, totals: BatchTotals) -> Tensor:
    if divisor is Divisor.EACH_ROLLOUT:
        return (segments.sum_R(loss_T) / segments.count_R().clamp(min=1.0)).sum() / totals.rollout_count
    longest = totals.rollout_count * totals.completion_tokens_max
    counts = {Divisor.TOKENS: totals.token_count, Divisor.CONSTANT: longest, Divisor.ROLLOUTS: totals.rollout_count}
    return loss_T.sum() / counts[divisor]


# ---- metrics

SUM_NAMES = (
    "tokens", "rollouts", "loss", "ratio", "ratio_sq", "clipped_low", "clipped_high", "weight", "altered",
    "kl_behaviour", "kl_reference", "entropy", "sampled_nll", "rollout_ratio", "rollout_ratio_sq",
)  # fmt: skip  # the elements of `PolicyLoss.sums_M`, in order: sums over tokens, unless the name says rollout


def loss_metrics(sums_M: Tensor, ratio_max: float) -> dict[str, float]:
    """The metrics of one batch under their names in its row, from sums added up over micro-batches and ranks. Ratios are
    current over behaviour. `ratio/ess`, `ratio/rollout_ess`: effective sample size (Kong 1992) as a fraction, by token and by
    rollout (1: on policy). `policy/entropy`, nats per token: of the model's distributions if given, else estimated as minus log
    p of the sampled tokens."""
    sums = dict(zip(SUM_NAMES, sums_M.tolist(), strict=True))
    tokens, rollouts = max(sums["tokens"], 1.0), max(sums["rollouts"], 1.0)

    def ess(name: str, count: float) -> float:
        return sums[name] ** 2 / (count * sums[f"{name}_sq"]) if sums[f"{name}_sq"] > 0 else 1.0

    return {
        "loss": sums["loss"],
        "policy/entropy": (sums["entropy"] if sums["entropy"] > 0 else sums["sampled_nll"]) / tokens,
        "ratio/mean": sums["ratio"] / tokens,
        "ratio/max": ratio_max,
        "ratio/ess": ess("ratio", tokens),
        "ratio/rollout_ess": ess("rollout_ratio", rollouts),
        "clip_fraction": sums["clipped_low"] / tokens + sums["clipped_high"] / tokens,
        "clip_fraction/low": sums["clipped_low"] / tokens,
        "clip_fraction/high": sums["clipped_high"] / tokens,
        "correction/weight_mean": sums["weight"] / tokens,
        "correction/altered_fraction": sums["altered"] / tokens,
        "kl": sums["kl_behaviour"] / tokens,
        "kl/reference": sums["kl_reference"] / tokens,
    }


def _metric_sums(tokens: PackedTokens, values: Mapping[str, Tensor], moved_T: Tensor, loss: Tensor) -> Tensor:
    """`values`: by token under their names. `moved_T`: log-ratio current over behaviour."""
    segments, ratio_T = tokens.segments, moved_T.exp()
    rollout_ratio_R = segments.sum_R(moved_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    rollout_ratio_R = rollout_ratio_R[segments.count_R() > 0].to(torch.float64)
    by_token = {
        **values,
        "tokens": torch.ones_like(ratio_T),
        "ratio": ratio_T,
        "ratio_sq": ratio_T.square(),
        "kl_behaviour": ratio_T - 1.0 - moved_T,
        "sampled_nll": -tokens.logprobs_T.detach(),
        "entropy": torch.zeros_like(ratio_T) if tokens.entropy_T is None else tokens.entropy_T,
    }
    sums = {name: torch.where(tokens.mask_T, by_token[name].to(torch.float64), 0.0).sum() for name in by_token}
    sums |= {
        "rollouts": rollout_ratio_R.new_tensor(rollout_ratio_R.numel()),
        "rollout_ratio": rollout_ratio_R.sum(),
        "rollout_ratio_sq": rollout_ratio_R.square().sum(),
        "loss": loss.detach().to(torch.float64),
    }
    return torch.stack([sums[name] for name in SUM_NAMES])


# ---- what VCPO takes from the ratios


def learning_rate_scale(sample_fraction: float, floor: float = 0.0) -> float:
    """VCPO's factor on the learning rate: the square root of the effective sample fraction (the rule for Adam), at least
    `floor`."""
    return max(floor, math.sqrt(min(1.0, sample_fraction)))


def score_norm_sq_proxy(logprobs_T: Tensor, segments: Segments) -> Tensor:
    """Approximates each rollout's squared gradient norm from its log-probabilities. The gradient of log p(token) with respect
    to the logits is `onehot - p`, whose squared norm lies between `(1 - p_token)^2` and twice that; tokens are summed as if
    independent. VCPO instead measures true gradient norms, with one backward pass per rollout; this proxy costs nothing and
    keeps the order of sure and unsure rollouts."""
    with torch.no_grad():
        return segments.sum_R((1.0 - torch.exp(logprobs_T.to(torch.float32).clamp(max=0.0))).square())


# ---- advantages; R rollouts of the batch, G groups, which may be ragged; docs/algorithms.md has the formulas and their sources

SPREAD_EPSILON = 1e-4  # added to the spread outside the root, as TRL does; keeps an all-equal group at zero


@dataclass(frozen=True, slots=True)
class Advantages:
    """`values_R`: float32. `trained_R`: bool, False for a pivot, which gets no backward pass and is not counted."""

    values_R: Tensor
    trained_R: Tensor


def group_advantages(rewards_R: Tensor, group_R: Tensor, name: str, weight_R: Tensor | None = None) -> Advantages:
    """Computes the advantage of each rollout within its group. rewards_R: any float dtype, finite. group_R: int64, the index of
    each rollout's group (0 to G-1, in any order; an index may be unused). weight_R: for vcpo, squared importance ratio times
    squared gradient norm of each rollout (`minimum_variance_weights`)."""
    assert rewards_R.shape == group_R.shape and rewards_R.ndim == 1, "one reward and one group index a rollout"
    values_R = rewards_R.detach().to(torch.float64)
    trained_R = torch.ones_like(group_R, dtype=torch.bool)
    if not values_R.numel():
        return Advantages(values_R.to(torch.float32), trained_R)
    count_R = _sums(torch.ones_like(values_R), group_R)
    mean_R = _sums(values_R, group_R) / count_R
    std_R = (_sums((values_R - mean_R).square(), group_R) / (count_R - 1).clamp(min=1)).sqrt()
    match name:
        case "grpo":
            centred_R, spread_R = values_R - mean_R, std_R + SPREAD_EPSILON
        case "dr_grpo":
            centred_R, spread_R = values_R - mean_R, torch.ones_like(std_R)
        case "mc_grpo":
            centred_R = values_R - _by_group(values_R, group_R, torch.median)
            mad_R = _by_group(centred_R.abs(), group_R, torch.median)
            # With binary rewards, more than half of a group's rewards are often equal. Its MAD is then 0 although it has
            # contrast, and dividing by epsilon alone would scale the advantages up ten-thousandfold. So use the std.
            spread_R = torch.where(mad_R > 0, mad_R, std_R) + SPREAD_EPSILON
            trained_R = ~_pivots(centred_R, group_R)
        case _:
            assert name == "vcpo" and weight_R is not None, "vcpo weighs by the importance ratios"
            weight_R = weight_R.to(torch.float64)
            total_R = _sums(weight_R, group_R)
            weighted_R = _sums(weight_R * values_R, group_R) / total_R.clamp(min=1e-300)
            # The plain one where all weights have underflowed.
            mean_R = torch.where(total_R > 1e-300, weighted_R, mean_R)
            centred_R, spread_R = values_R - mean_R, std_R + SPREAD_EPSILON
    return Advantages(torch.where(count_R < 2, 0.0, centred_R / spread_R).to(torch.float32), trained_R)


def minimum_variance_weights(log_ratio_R: Tensor, gradient_norm_sq_R: Tensor) -> Tensor:
    """Computes the weights of the baseline that minimises the variance of `sum_i w_i (r_i - b) g_i`. Setting the derivative of
    `sum_i w_i^2 |g_i|^2 (r_i - b)^2` to zero gives b as the mean of the rewards weighted by `w_i^2 |g_i|^2`. log_ratio_R: log
    of each rollout's importance ratio, current over behaviour. gradient_norm_sq_R: the squared norm of its score function. Only
    proportions matter, so the largest ratio is scaled to 1 to stay finite."""
    log_weight_R = 2.0 * log_ratio_R.detach().to(torch.float64)
    weight_R = torch.exp(log_weight_R - log_weight_R.max()) if log_weight_R.numel() else log_weight_R
    return weight_R * gradient_norm_sq_R.detach().to(torch.float64)


def _sums(values_R: Tensor, group_R: Tensor) -> Tensor:
    return values_R.new_zeros(int(group_R.max()) + 1).index_add(0, group_R, values_R)[group_R]


def _by_group(values_R: Tensor, group_R: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    """For each rollout, `of` the values of its group. torch's median of an even count is the lower middle value, so that it is
    always one rollout's."""
    found_R = torch.empty_like(values_R)
    for group in set(group_R.tolist()):
        found_R[group_R == group] = of(values_R[group_R == group])
    return found_R


def _pivots(centred_R: Tensor, group_R: Tensor) -> Tensor:
    """bool_R: in each group of odd size, the first rollout whose reward is the median. Even groups have no pivot."""
    pivot_R = torch.zeros_like(group_R, dtype=torch.bool)
    for group in set(group_R.tolist()):
        members = torch.nonzero(group_R == group).flatten()
        if members.numel() % 2 == 1:
            pivot_R[members[centred_R[members] == 0][0]] = True
    return pivot_R
