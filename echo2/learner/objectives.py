"""The objectives: each token's contribution to the loss, computed from the policy ratio and the advantage.

Each objective is one function and one line in `OBJECTIVES`. Guarantees: reductions over tokens (a mean ratio, a second
moment) stay within the counted tokens of one rollout, so a batch may be split between any two rollouts; results are
finite for every finite input, because log-ratios are clamped. Leaves to others: correction weights, KL, normalisation (loss).

Shapes: T tokens of one packed micro-batch, R rollouts in it; r is the ratio current over anchor, A the advantage.

Sources. Clipped surrogate: Schulman et al., arXiv 1707.06347; asymmetric clip: Yu et al., arXiv 2503.14476; ratio ceiling
(dual clip): Ye et al., arXiv 1912.09729; gspo: Zheng et al., arXiv 2507.18071; cispo: MiniMax-M1, arXiv 2506.13585; sapo:
arXiv 2511.20347; vespo: arXiv 2602.10693; m2po: arXiv 2510.01161, here by rollout instead of by batch; off-policy sequence
masking: DeepSeek-V3.2, arXiv 2512.02556.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.learner.correction import LOG_RATIO_LIMIT, Segments

LOG_WEIGHT_MIN = math.log(1e-8)
"""Lower clamp of vespo's log-weights. A smaller weight is practically 0, and a weight of 0 has no finite logarithm."""


class Objective(enum.Enum):
    """Whether the ratio is by token or by rollout, and how it is bounded."""

    TOKEN_CLIP = "token"  # min(r A, clip(r) A), token by token
    GSPO = "gspo"  # the same with one length-normalised ratio per rollout
    CISPO = "cispo"  # -min(r, 1 + clip_high) A log p, the ratio detached: every token keeps a gradient
    SAPO = "sapo"  # a sigmoid gate around r = 1 instead of a clip
    VESPO = "vespo"  # -phi(w) A log p, with w the whole rollout's ratio and phi a Gamma-shaped weight
    M2PO = "m2po"  # r A, without the tokens that push a rollout's second moment of log r above a limit


@dataclass(frozen=True, slots=True)
class GammaShape:
    """phi(w) = e^lambda w^k e^(-lambda w), which is 1 at w = 1. `k` damps small weights, `decay` (lambda) large ones."""

    k: float
    decay: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.k) and self.k >= 0 and math.isfinite(self.decay) and self.decay > 0):
            raise ConfigError(f"vespo: expected k of 0 or more and lambda above 0, got {self.k} and {self.decay}")


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    """`clip_low`, `clip_high`: the ratio is clipped to 1 - low to 1 + high (token, gspo; cispo uses only the upper bound).

    `ratio_ceiling` bounds the ratio where the advantage is negative (token, gspo); None leaves it unbounded.
    `sapo_temperatures`: for positive advantages, and for the others. `vespo_shapes`: for advantages of 0 or more, and for
    negative ones. `second_moment_max`: m2po's limit on a rollout's mean (log r)^2. `off_policy_nats_max`: leaves out every
    rollout of negative advantage whose mean log-ratio, behaviour over current, exceeds it, under any objective; None: off.
    """

    kind: Objective = Objective.TOKEN_CLIP
    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio_ceiling: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo_shapes: tuple[GammaShape, GammaShape] = (GammaShape(2.0, 3.0), GammaShape(3.0, 2.0))
    second_moment_max: float = 0.04
    off_policy_nats_max: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.clip_low <= 1 and 0 < self.clip_high < math.inf):
            raise ConfigError(f"clip: expected 0 < low <= 1 and high > 0, got {self.clip_low} and {self.clip_high}")
        if self.ratio_ceiling is not None and not self.ratio_ceiling >= 1 + self.clip_high:
            raise ConfigError(f"ratio ceiling: expected at least 1 + clip_high, got {self.ratio_ceiling}")
        if not all(0 < temperature < math.inf for temperature in self.sapo_temperatures):
            raise ConfigError(f"sapo temperatures: expected above 0, got {self.sapo_temperatures}")
        if not 0 < self.second_moment_max < math.inf:
            raise ConfigError(f"m2po's limit: expected above 0, got {self.second_moment_max}")
        if self.off_policy_nats_max is not None and not 0 < self.off_policy_nats_max < math.inf:
            raise ConfigError(f"off-policy limit: expected above 0 nats, got {self.off_policy_nats_max}")


@dataclass(frozen=True, slots=True)
class Ratios:
    """An objective's inputs. All `_T` tensors are aligned.

    logprobs_T: current policy, float32, with gradient. log_ratio_T: current over anchor, clamped, 0 at masked positions, with
    gradient. advantage_T: float32. log_weight_T: logarithm of the correction's weights, detached.
    """

    logprobs_T: Tensor
    log_ratio_T: Tensor
    advantage_T: Tensor
    log_weight_T: Tensor
    segments: Segments


@dataclass(frozen=True, slots=True)
class Surrogate:
    """`loss_T`: loss per token, without the correction's weights unless `is_weighted`. `ratio_T`: the ratio used. `held_low_T`,
    `held_high_T`, `ceiling_T`: bool, the tokens bounded by the lower clip, the upper clip and the ceiling, for the metrics.
    """

    loss_T: Tensor
    ratio_T: Tensor
    held_low_T: Tensor
    held_high_T: Tensor
    ceiling_T: Tensor
    is_weighted: bool = False


def surrogate(ratios: Ratios, config: ObjectiveConfig) -> Surrogate:
    """Computes each token's loss with the configured objective."""
    return OBJECTIVES[config.kind](ratios, config)


def near_enough(behaviour_log_ratio_T: Tensor, advantage_T: Tensor, segments: Segments, limit: float) -> Tensor:
    """bool_T: False for tokens of rollouts with negative advantage that the policy has moved away from by more than `limit`.

    `behaviour_log_ratio_T` is current over behaviour. Such rollouts penalise what the policy no longer does; their gradient
    is mostly noise (off-policy sequence masking).
    """
    with torch.no_grad():
        moved_R = -segments.sum_R(behaviour_log_ratio_T) / segments.count_R().clamp(min=1.0)
        return (advantage_T >= 0) | (moved_R <= limit)[segments.sequence_T]


def _token_clip(ratios: Ratios, config: ObjectiveConfig) -> Surrogate:
    ratio_T, advantage_T = torch.exp(ratios.log_ratio_T), ratios.advantage_T
    clipped_T = ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    bounded_T = ratio_T if config.ratio_ceiling is None else ratio_T.clamp(max=config.ratio_ceiling)
    loss_T = -torch.minimum(bounded_T * advantage_T, clipped_T * advantage_T)
    with torch.no_grad():
        low_T = (ratio_T < 1.0 - config.clip_low) & (advantage_T < 0)
        high_T = (ratio_T > 1.0 + config.clip_high) & (advantage_T > 0)
        ceiling_T = (bounded_T < ratio_T) & (advantage_T < 0)
    return Surrogate(loss_T, ratio_T, low_T, high_T, ceiling_T)


def _gspo(ratios: Ratios, config: ObjectiveConfig) -> Surrogate:
    segments = ratios.segments
    mean_R = segments.sum_R(ratios.log_ratio_T) / segments.count_R().clamp(min=1.0)
    return _token_clip(_with(ratios, mean_R[segments.sequence_T]), config)


def _cispo(ratios: Ratios, config: ObjectiveConfig) -> Surrogate:
    ratio_T = torch.exp(ratios.log_ratio_T)
    weight_T = ratio_T.detach().clamp(max=1.0 + config.clip_high)
    high_T = (ratio_T.detach() > 1.0 + config.clip_high) & (ratios.advantage_T > 0)
    return _score_function(ratios, weight_T, ratio_T, high_T)


def _sapo(ratios: Ratios, config: ObjectiveConfig) -> Surrogate:
    positive, other = config.sapo_temperatures
    ratio_T, advantage_T = torch.exp(ratios.log_ratio_T), ratios.advantage_T
    temperature_T = torch.where(advantage_T > 0, positive, other)
    gate_T = torch.sigmoid(temperature_T * (ratio_T - 1.0)) * 4.0 / temperature_T
    none_T = torch.zeros_like(advantage_T, dtype=torch.bool)
    return Surrogate(-gate_T * advantage_T, ratio_T, none_T, none_T, none_T)


def _vespo(ratios: Ratios, config: ObjectiveConfig) -> Surrogate:
    positive, negative = config.vespo_shapes
    segments, is_good_T = ratios.segments, ratios.advantage_T >= 0
    with torch.no_grad():
        moved_R = segments.sum_R(ratios.log_ratio_T + ratios.log_weight_T.clamp(LOG_WEIGHT_MIN, LOG_RATIO_LIMIT))
        log_w_T = moved_R.clamp(LOG_WEIGHT_MIN, LOG_RATIO_LIMIT)[segments.sequence_T]
        k_T = torch.where(is_good_T, positive.k, negative.k)
        decay_T = torch.where(is_good_T, positive.decay, negative.decay)
        phi_T = torch.exp(decay_T + k_T * log_w_T - decay_T * torch.exp(log_w_T))
    none_T = torch.zeros_like(is_good_T)
    return _score_function(ratios, phi_T, torch.exp(ratios.log_ratio_T), none_T, is_weighted=True)


def _m2po(ratios: Ratios, config: ObjectiveConfig) -> Surrogate:
    """Limits only tokens whose gradient pushes the policy further from the anchor: those that a clip would stop."""
    ratio_T, advantage_T = torch.exp(ratios.log_ratio_T), ratios.advantage_T
    with torch.no_grad():
        square_T = ratios.log_ratio_T.square()
        away_T = ratios.log_ratio_T * advantage_T > 0  # False at masked positions, whose log-ratio is 0
        kept_T = _within_moment(
            square_T, Segments(ratios.segments.sequence_T, away_T, ratios.segments.rollout_count), config
        )
        left_out_T = away_T & ~kept_T
        low_T, high_T = left_out_T & (advantage_T < 0), left_out_T & (advantage_T > 0)
    loss_T = torch.where(left_out_T, torch.zeros_like(ratio_T), -ratio_T * advantage_T)
    return Surrogate(loss_T, ratio_T, low_T, high_T, torch.zeros_like(left_out_T))


def _within_moment(square_T: Tensor, away: Segments, config: ObjectiveConfig) -> Tensor:
    """bool_T: in each rollout, the largest set of tokens, smallest squares first, whose mean square is at most the limit.

    Sorts tokens by rollout, then by size. The mean of a rollout's k smallest squares rises with k, so the tokens to keep are
    those at which this running mean is still within the limit.
    """
    order_T = torch.argsort(square_T, stable=True)
    order_T = order_T[torch.argsort(away.sequence_T[order_T], stable=True)]
    counted_T = away.mask_T[order_T].to(torch.float64)
    running_T = torch.cumsum(square_T[order_T].to(torch.float64) * counted_T, 0)
    number_T = torch.cumsum(counted_T, 0)
    sequence_T = away.sequence_T[order_T]
    first_T = torch.searchsorted(sequence_T.contiguous(), sequence_T.contiguous())
    padded = torch.nn.functional.pad
    sum_T = running_T - padded(running_T, (1, 0))[first_T]
    count_T = (number_T - padded(number_T, (1, 0))[first_T]).clamp(min=1.0)
    kept_T = torch.empty_like(away.mask_T)
    kept_T[order_T] = sum_T / count_T <= config.second_moment_max
    return kept_T


def _with(ratios: Ratios, log_ratio_T: Tensor) -> Ratios:
    return Ratios(ratios.logprobs_T, log_ratio_T, ratios.advantage_T, ratios.log_weight_T, ratios.segments)


def _score_function(
    ratios: Ratios, weight_T: Tensor, ratio_T: Tensor, high_T: Tensor, is_weighted: bool = False
) -> Surrogate:
    """The loss -weight A log p with a detached weight: REINFORCE with a bounded weight."""
    none_T = torch.zeros_like(high_T)
    kept_T = torch.where(ratios.segments.mask_T, ratios.logprobs_T, torch.zeros_like(ratios.logprobs_T))
    return Surrogate(-weight_T * ratios.advantage_T * kept_T, ratio_T, none_T, high_T, none_T, is_weighted)


OBJECTIVES: Mapping[Objective, Callable[[Ratios, ObjectiveConfig], Surrogate]] = {
    Objective.TOKEN_CLIP: _token_clip,
    Objective.GSPO: _gspo,
    Objective.CISPO: _cispo,
    Objective.SAPO: _sapo,
    Objective.VESPO: _vespo,
    Objective.M2PO: _m2po,
}
