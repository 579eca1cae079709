"""Corrections for stale and mismatched samples: weights that turn samples of one policy into samples of another.

Three policies: behaviour (sampled the token, perhaps several versions ago and on another machine), proximal (the
learner's own weights when the batch is consumed), current (being optimised). A correction weighs a token by
proximal over behaviour; the clipped ratio of the objective then goes from proximal to current.

Guarantees: weights are detached, finite and at least 0; positions off the mask get weight 0. Leaves to others: the
objective (loss), whether a token is fresh enough at all (staleness/).

Shapes: T tokens of a packed micro-batch, R rollouts; `sequence_T` is the rollout that a token belongs to.

Sources. Truncated importance sampling: Ionides 2008; for the mismatch of engine and trainer Yao et al. 2025.
Masking outside a band: IcePop (Ling team 2025), arXiv 2510.18855. Decoupled: Hilton et al., arXiv 2110.00641; AReaL,
arXiv 2505.24298. Effective sample size: Kong 1992; as a scale of the learning rate VCPO, arXiv 2602.17616.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from echo2.base.errors import ConfigError

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before `exp`: e^20 is far beyond every clip and cap, and stays finite in float32."""


TOKEN_LOG_RATIO_MAX = 3.0
"""A reported log-probability this far from the learner's own (a ratio of 20) is not believed: its token is left out."""
ROLLOUT_LOG_RATIO_MAX = 1.0
"""A rollout whose tokens are off by more than this on average, in nats, is left out whole. With the limit for a token, no
rollout weighs more than (2 + e^3) / 3, about 7.4 times, what it would with honest numbers."""


class Correction(enum.Enum):
    """What is done about samples of another policy."""

    NONE = "none"  # trust them: the ratio goes from proximal to current, behaviour is ignored
    BEHAVIOUR_RATIO = "behaviour"  # the objective's clipped ratio goes straight from behaviour to current
    TIS_TOKEN = "tis_token"  # weight proximal / behaviour within floor and cap, token by token
    TIS_SEQUENCE = "tis_sequence"  # the same on the product over the rollout
    MASKED = "masked"  # weight proximal / behaviour inside the band, 0 outside (IcePop)
    MASKED_SEQUENCE = "masked_sequence"  # the same on the product over the rollout: a rollout is in or out
    DECOUPLED = "decoupled"  # weight proximal / behaviour, neither capped nor masked


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """`cap` bounds the truncated weights from above, `floor` from below (0: not at all); `mask_low` to `mask_high` is the band
    of the masked ones.
    """

    kind: Correction = Correction.BEHAVIOUR_RATIO
    cap: float = 2.0
    floor: float = 0.0
    mask_low: float = 0.5
    mask_high: float = 5.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cap) and self.cap > 0):
            raise ConfigError(f"correction cap: expected above 0, got {self.cap}")
        if not 0 <= self.floor <= min(1.0, self.cap):
            raise ConfigError(f"correction floor: expected 0 to 1 and at most the cap {self.cap}, got {self.floor}")
        if not 0 <= self.mask_low < 1 < self.mask_high:
            raise ConfigError(f"correction band: expected it to hold 1, got {self.mask_low} to {self.mask_high}")


@dataclass(frozen=True, slots=True)
class CorrectionWeights:
    """`weights_T`: what a token's loss is multiplied by. `altered_T`: True where the cap or the band took effect."""

    weights_T: Tensor
    altered_T: Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Which rollout each packed token belongs to (`sequence_T` int64), which tokens count (`mask_T` bool)."""

    sequence_T: Tensor
    mask_T: Tensor
    rollout_count: int

    def sum_R(self, values_T: Tensor) -> Tensor:
        """Sum of the counted tokens' values in each rollout."""
        kept_T = torch.where(self.mask_T, values_T, torch.zeros_like(values_T))
        return kept_T.new_zeros(self.rollout_count).index_add(0, self.sequence_T, kept_T)

    def count_R(self) -> Tensor:
        """Counted tokens of each rollout, as float."""
        return self.sum_R(torch.ones_like(self.sequence_T, dtype=torch.float32))


def correction_weights(
    proximal_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, segments: Segments, config: CorrectionConfig
) -> CorrectionWeights:
    """Weight of each token, proximal over behaviour, as `config` bounds it. NONE and BEHAVIOUR_RATIO give ones."""
    with torch.no_grad():
        log_ratio_T = masked_log_ratio(proximal_logprobs_T, behaviour_logprobs_T, segments.mask_T)
        weights_T, altered_T = _weights(log_ratio_T, segments, config)
        return CorrectionWeights(weights_T * segments.mask_T, altered_T & segments.mask_T)


def masked_log_ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """`numerator - denominator` in float32, clamped to the limit; 0 off the mask, whatever stands there (even NaN)."""
    difference_T = numerator_T.to(torch.float32) - denominator_T.to(torch.float32)
    kept_T = torch.where(mask_T, difference_T, torch.zeros_like(difference_T))
    return kept_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def believed(logprobs_T: Tensor, behaviour_logprobs_T: Tensor, segments: Segments) -> Tensor:
    """bool_T: the counted tokens whose reported number is near enough to the learner's own to be trained on."""
    with torch.no_grad():
        off_T = masked_log_ratio(logprobs_T, behaviour_logprobs_T, segments.mask_T).abs()
        mean_R = segments.sum_R(off_T) / segments.count_R().clamp(min=1.0)
        return segments.mask_T & (off_T <= TOKEN_LOG_RATIO_MAX) & (mean_R <= ROLLOUT_LOG_RATIO_MAX)[segments.sequence_T]


Bounded = tuple[Tensor, Tensor]


def _trusted(ratio_T: Tensor, config: CorrectionConfig) -> Bounded:
    return torch.ones_like(ratio_T), torch.zeros_like(ratio_T, dtype=torch.bool)


def _capped(ratio_T: Tensor, config: CorrectionConfig) -> Bounded:
    return ratio_T.clamp(config.floor, config.cap), (ratio_T > config.cap) | (ratio_T < config.floor)


def _in_band(ratio_T: Tensor, config: CorrectionConfig) -> Bounded:
    outside_T = (ratio_T < config.mask_low) | (ratio_T > config.mask_high)
    return torch.where(outside_T, torch.zeros_like(ratio_T), ratio_T), outside_T


def _as_it_is(ratio_T: Tensor, config: CorrectionConfig) -> Bounded:
    return ratio_T, torch.zeros_like(ratio_T, dtype=torch.bool)


RULES: dict[Correction, Callable[[Tensor, CorrectionConfig], Bounded]] = {
    Correction.NONE: _trusted,
    Correction.BEHAVIOUR_RATIO: _trusted,
    Correction.TIS_TOKEN: _capped,
    Correction.TIS_SEQUENCE: _capped,
    Correction.MASKED: _in_band,
    Correction.MASKED_SEQUENCE: _in_band,
    Correction.DECOUPLED: _as_it_is,
}
"""From ratios to weights, and True where the rule took effect."""
OF_WHOLE_ROLLOUTS = {Correction.TIS_SEQUENCE, Correction.MASKED_SEQUENCE}
"""Their ratio is the product over the rollout, the same for all its tokens."""


def _weights(log_ratio_T: Tensor, segments: Segments, config: CorrectionConfig) -> Bounded:
    if config.kind in OF_WHOLE_ROLLOUTS:
        log_ratio_T = segments.sum_R(log_ratio_T)[segments.sequence_T].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return RULES[config.kind](torch.exp(log_ratio_T), config)


def learning_rate_scale(sample_fraction: float, floor: float = 0.0) -> float:
    """VCPO's factor on the learning rate: the root of the effective fraction (the rule for Adam), at least `floor`."""
    if not (math.isfinite(sample_fraction) and 0.0 <= sample_fraction <= 1.0 + 1e-6):
        raise ConfigError(f"effective sample fraction: expected 0 to 1, got {sample_fraction}")
    return max(floor, math.sqrt(min(1.0, sample_fraction)))


def score_norm_sq_proxy(logprobs_T: Tensor, segments: Segments) -> Tensor:
    """A stand-in for each rollout's squared gradient norm, from the log-probabilities at hand.

    The gradient of log p(token) with respect to the logits is `onehot - p`, whose squared norm lies between
    `(1 - p_token)^2` and twice that; tokens add up as if independent. Ours, not VCPO's, which measures true gradient
    norms with one backward pass a rollout; it costs nothing and keeps the ordering of sure and unsure rollouts.
    """
    with torch.no_grad():
        miss_T = 1.0 - torch.exp(logprobs_T.to(torch.float32).clamp(max=0.0))
        return segments.sum_R(miss_T.square())
