"""The policy-gradient loss on packed sequences, exact across micro-batches.

Guarantees: the losses and gradients of a batch's micro-batches add up to those of the undivided batch, however it is split
between rollouts, for every normalisation except bnpo, which is defined per micro-batch; masked positions contribute neither
loss nor gradient, whatever they hold (even NaN); the metrics are sums and counts, so they add up too. Leaves to others: the
forward pass that computes `logprobs_T`, each token's contribution (objectives), advantages, the optimiser.

Shapes: T tokens of one packed micro-batch, R rollouts in it, M metric sums. A rollout lies within one micro-batch.

Sources. Token normalisation (dapo): Yu et al., arXiv 2503.14476; dr_grpo: arXiv 2503.20783; luspo: arXiv 2602.05261; k3
estimate of the KL: Schulman 2020.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.learner.correction import (
    OF_WHOLE_ROLLOUTS,
    Correction,
    CorrectionConfig,
    Segments,
    correction_weights,
    masked_log_ratio,
)
from echo2.learner.objectives import Objective, ObjectiveConfig, Ratios, near_enough, surrogate


class Normalisation(enum.Enum):
    """What the sum of token losses is divided by."""

    DAPO = "dapo"  # the number of tokens in the whole batch
    BNPO = "bnpo"  # the number of tokens in the micro-batch, then the number of micro-batches
    DR_GRPO = "dr_grpo"  # the number of rollouts times the longest completion allowed: a constant
    GRPO = "grpo"  # each rollout's sum by its number of tokens, then by the number of rollouts in the whole batch
    LUSPO = (
        "luspo"  # the number of rollouts in the whole batch: with gspo, a rollout weighs in proportion to its length
    )


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """What the loss consists of. `kl_weighted_by_ratio` multiplies the k3 term by the ratio, which makes its gradient
    unbiased off policy.
    """

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    normalisation: Normalisation = Normalisation.DAPO
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kl_coefficient: float = 0.0
    kl_weighted_by_ratio: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.kl_coefficient) and self.kl_coefficient >= 0):
            raise ConfigError(f"KL coefficient: expected 0 or more, got {self.kl_coefficient}")
        if self.objective.kind is Objective.VESPO and self.correction.kind in OF_WHOLE_ROLLOUTS:
            raise ConfigError(
                f"objective vespo weighs whole rollouts itself: expected a correction by token, got {self.correction.kind.value}"
            )


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Counts over all micro-batches and ranks of one optimiser step: the global denominators.

    If data parallelism averages gradients (FSDP, DDP), the caller multiplies the loss by the number of ranks.
    """

    token_count: int
    rollout_count: int
    completion_tokens_max: int
    microbatch_count: int = 1

    def __post_init__(self) -> None:
        smallest = min(self.token_count, self.rollout_count, self.completion_tokens_max, self.microbatch_count)
        if smallest < 1:
            raise ConfigError(f"batch totals: expected counts of at least 1, got {self}")


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """One packed micro-batch. All `_T` tensors are aligned: element i belongs to the same token.

    logprobs_T: current policy, with gradient, at the sampling temperature. behaviour_logprobs_T: as the worker
    reported them. proximal_logprobs_T: the learner's own before this batch's first step; None if the batch makes only
    one step, because they then equal the current ones, detached. sequence_T: int64, index of the token's rollout. mask_T:
    bool, False for prompt, padding and environment tokens.
    """

    logprobs_T: Tensor
    behaviour_logprobs_T: Tensor
    advantages_R: Tensor
    sequence_T: Tensor
    mask_T: Tensor
    proximal_logprobs_T: Tensor | None = None
    reference_logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logprobs_T.shape
        optional = (self.proximal_logprobs_T, self.reference_logprobs_T, self.entropy_T)
        given = [self.behaviour_logprobs_T, self.sequence_T, self.mask_T, *(x for x in optional if x is not None)]
        assert len(shape) == 1 and all(x.shape == shape for x in given), "packed tensors are 1-D and aligned"
        assert self.mask_T.dtype == torch.bool, "mask_T is bool"

    @property
    def segments(self) -> Segments:
        return Segments(self.sequence_T, self.mask_T, int(self.advantages_R.shape[0]))


SUM_NAMES = (
    "tokens", "rollouts", "loss", "ratio", "ratio_sq", "clipped_low", "clipped_high", "ceiling", "weight",
    "weight_sq", "altered", "kl_behaviour", "kl_reference", "entropy", "sampled_nll", "rollout_ratio",
    "rollout_ratio_sq",
)  # fmt: skip
"""The elements of `PolicyLoss.sums_M`, in order: sums over tokens, unless the name says rollout."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss`: scalar with gradient, this micro-batch's share. `sums_M`: float64, detached; add them up over
    micro-batches and ranks, then read them with `loss_metrics`. `ratio_max`: scalar, detached, over the counted tokens.
    """

    loss: Tensor
    sums_M: Tensor
    ratio_max: Tensor


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Metrics of one batch. Ratios are current over behaviour.

    `ratio_ess`, `rollout_ratio_ess`: effective sample size as a fraction, by token and by rollout (1: on policy).
    `entropy`, nats per token: of the model's distributions if given, else estimated as minus log p of the sampled tokens.
    """

    token_count: int
    rollout_count: int
    loss: float
    ratio_mean: float
    ratio_max: float
    ratio_ess: float
    rollout_ratio_ess: float
    clip_low_fraction: float
    clip_high_fraction: float
    ceiling_fraction: float
    correction_weight_mean: float
    correction_ess: float
    correction_altered_fraction: float
    kl_behaviour: float
    kl_reference: float
    entropy: float


def policy_loss(tokens: PackedTokens, config: PolicyLossConfig, totals: BatchTotals) -> PolicyLoss:
    """Computes this micro-batch's share of the batch's loss, and its metric sums. Raises `ConfigError` if the KL coefficient
    is above 0 and the reference log-probabilities are missing."""
    segments = tokens.segments
    logprobs_T = tokens.logprobs_T.to(torch.float32)
    proximal_T = logprobs_T.detach() if tokens.proximal_logprobs_T is None else tokens.proximal_logprobs_T
    behaviour_is_anchor = config.correction.kind is Correction.BEHAVIOUR_RATIO
    anchor_T = tokens.behaviour_logprobs_T if behaviour_is_anchor else proximal_T
    weights = correction_weights(proximal_T, tokens.behaviour_logprobs_T, segments, config.correction)
    advantage_T = tokens.advantages_R.to(torch.float32)[tokens.sequence_T]
    log_ratio_T = masked_log_ratio(logprobs_T, anchor_T, tokens.mask_T)
    log_weight_T = torch.where(tokens.mask_T, weights.weights_T, 1.0).log()
    held = surrogate(Ratios(logprobs_T, log_ratio_T, advantage_T, log_weight_T, segments), config.objective)
    behaviour_log_ratio_T = masked_log_ratio(logprobs_T.detach(), tokens.behaviour_logprobs_T, tokens.mask_T)
    loss_T = held.loss_T if held.is_weighted else held.loss_T * weights.weights_T
    limit = config.objective.off_policy_nats_max
    if limit is not None:
        near_T = near_enough(behaviour_log_ratio_T, advantage_T, segments, limit)
        loss_T = torch.where(near_T, loss_T, torch.zeros_like(loss_T))
    kl_T = _kl_reference(logprobs_T, tokens)
    if config.kl_coefficient > 0:
        if tokens.reference_logprobs_T is None:
            raise ConfigError("KL coefficient above 0: expected log-probabilities of the reference model, got none")
        kl_loss_T = kl_T * held.ratio_T if config.kl_weighted_by_ratio else kl_T
        loss_T = loss_T + config.kl_coefficient * kl_loss_T
    loss_T = torch.where(tokens.mask_T, loss_T, torch.zeros_like(loss_T))
    loss = _normalised(loss_T, segments, config.normalisation, totals)
    with torch.no_grad():
        ratio_max = torch.exp(behaviour_log_ratio_T).masked_fill(~tokens.mask_T, 0.0).amax() if loss_T.numel() else loss
        flags = (held.held_low_T, held.held_high_T, held.ceiling_T)
        sums_M = _metric_sums(tokens, flags, (weights.weights_T, weights.altered_T), behaviour_log_ratio_T, kl_T)
        sums_M[SUM_NAMES.index("loss")] = loss.detach().to(torch.float64)
    return PolicyLoss(loss, sums_M, ratio_max.detach())


def loss_metrics(sums_M: Tensor, ratio_max: float) -> LossMetrics:
    """Computes the metrics from sums added up over micro-batches and ranks."""
    sums = dict(zip(SUM_NAMES, sums_M.tolist(), strict=True))
    tokens, rollouts = max(sums["tokens"], 1.0), max(sums["rollouts"], 1.0)
    return LossMetrics(
        token_count=round(sums["tokens"]),
        rollout_count=round(sums["rollouts"]),
        loss=sums["loss"],
        ratio_mean=sums["ratio"] / tokens,
        ratio_max=ratio_max,
        ratio_ess=_ess(sums["ratio"], sums["ratio_sq"], tokens),
        rollout_ratio_ess=_ess(sums["rollout_ratio"], sums["rollout_ratio_sq"], rollouts),
        clip_low_fraction=sums["clipped_low"] / tokens,
        clip_high_fraction=sums["clipped_high"] / tokens,
        ceiling_fraction=sums["ceiling"] / tokens,
        correction_weight_mean=sums["weight"] / tokens,
        correction_ess=_ess(sums["weight"], sums["weight_sq"], tokens),
        correction_altered_fraction=sums["altered"] / tokens,
        kl_behaviour=sums["kl_behaviour"] / tokens,
        kl_reference=sums["kl_reference"] / tokens,
        entropy=(sums["entropy"] if sums["entropy"] > 0 else sums["sampled_nll"]) / tokens,
    )


def _kl_reference(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """k3 estimate of KL(current || reference): `exp(d) - d - 1` with d = log reference - log current; never negative."""
    if tokens.reference_logprobs_T is None:
        return torch.zeros_like(logprobs_T)
    log_ratio_T = masked_log_ratio(tokens.reference_logprobs_T, logprobs_T, tokens.mask_T)
    return torch.expm1(log_ratio_T) - log_ratio_T


def _normalised(loss_T: Tensor, segments: Segments, normalisation: Normalisation, totals: BatchTotals) -> Tensor:
    match normalisation:
        case Normalisation.DAPO:
            return loss_T.sum() / totals.token_count
        case Normalisation.BNPO:
            return loss_T.sum() / segments.mask_T.sum().clamp(min=1) / totals.microbatch_count
        case Normalisation.DR_GRPO:
            return loss_T.sum() / (totals.rollout_count * totals.completion_tokens_max)
        case Normalisation.GRPO:
            return (segments.sum_R(loss_T) / segments.count_R().clamp(min=1.0)).sum() / totals.rollout_count
        case Normalisation.LUSPO:
            return loss_T.sum() / totals.rollout_count


def _metric_sums(
    tokens: PackedTokens,
    flags: tuple[Tensor, Tensor, Tensor],
    correction: tuple[Tensor, Tensor],
    behaviour_log_ratio_T: Tensor,
    kl_T: Tensor,
) -> Tensor:
    segments = tokens.segments
    ratio_T = torch.exp(behaviour_log_ratio_T)
    rollout_ratio_R = torch.exp(segments.sum_R(behaviour_log_ratio_T).clamp(-20.0, 20.0))
    present_R = segments.count_R() > 0
    sums: dict[str, Tensor] = {
        "tokens": _counted(torch.ones_like(ratio_T), tokens),
        "rollouts": present_R.sum(),
        "ratio": _counted(ratio_T, tokens),
        "ratio_sq": _counted(ratio_T.square(), tokens),
        "clipped_low": _counted(flags[0], tokens),
        "clipped_high": _counted(flags[1], tokens),
        "ceiling": _counted(flags[2], tokens),
        "weight": _counted(correction[0], tokens),
        "weight_sq": _counted(correction[0].square(), tokens),
        "altered": _counted(correction[1], tokens),
        "kl_behaviour": _counted(ratio_T - 1.0 - behaviour_log_ratio_T, tokens),
        "kl_reference": _counted(kl_T, tokens),
        "sampled_nll": _counted(-tokens.logprobs_T, tokens),
        "rollout_ratio": rollout_ratio_R[present_R].to(torch.float64).sum(),
        "rollout_ratio_sq": rollout_ratio_R[present_R].to(torch.float64).square().sum(),
    }
    if tokens.entropy_T is not None:
        sums["entropy"] = _counted(tokens.entropy_T, tokens)
    sums_M = torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=ratio_T.device)
    for index, name in enumerate(SUM_NAMES):
        if name in sums:
            sums_M[index] = sums[name].to(torch.float64)
    return sums_M


def _counted(values_T: Tensor, tokens: PackedTokens) -> Tensor:
    return torch.where(tokens.mask_T, values_T.detach().to(torch.float64), 0.0).sum()


def _ess(total: float, total_sq: float, count: float) -> float:
    return total * total / (count * total_sq) if total_sq > 0 else 1.0
