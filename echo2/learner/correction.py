"""Corrections for stale and mismatched samples: weights that turn samples of one policy into samples of another.

Three policies: behaviour (sampled the token, perhaps several versions ago and on another machine), proximal (the
learner's own weights when the batch is consumed), current (being optimised). A correction weighs each token by
proximal over behaviour; the objective's clipped ratio is then current over proximal.

Guarantees: weights are detached, finite and at least 0; masked positions get weight 0. Leaves to others: the
objective (loss), whether a token is fresh enough (staleness/).

Shapes: T tokens of a packed micro-batch, R rollouts; `sequence_T` is the index of each token's rollout.

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
"""Nats (a ratio of 20). A token whose reported log-probability is further than this from the learner's own is left out."""
ROLLOUT_LOG_RATIO_MAX = 1.0
"""Nats. A rollout whose mean absolute difference exceeds this is left out whole. Together with the limit per token, no
rollout weighs more than (2 + e^3) / 3, about 7.4 times, what it would weigh with honest numbers."""


class Correction(enum.Enum):
    """How samples of another policy are corrected."""

    NONE = "none"  # not at all: the ratio is current / proximal, behaviour is ignored
    BEHAVIOUR_RATIO = "behaviour"  # the objective's clipped ratio is current / behaviour
    TIS_TOKEN = "tis_token"  # weight proximal / behaviour, clamped to floor and cap, token by token
    TIS_SEQUENCE = "tis_sequence"  # the same with the product of the ratios over the rollout
    MASKED = "masked"  # weight proximal / behaviour inside the band, 0 outside (IcePop)
    MASKED_SEQUENCE = "masked_sequence"  # the same with the product over the rollout: keeps or drops whole rollouts
    DECOUPLED = "decoupled"  # weight proximal / behaviour, neither capped nor masked


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """`cap`, `floor`: upper and lower bound of the TIS weights (floor 0: no lower bound). `mask_low`, `mask_high`: the band of
    ratios that the masked corrections keep.
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
    """`weights_T`: factor on each token's loss. `altered_T`: bool, True where floor, cap or band took effect."""

    weights_T: Tensor
    altered_T: Tensor


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
        """Number of counted tokens of each rollout, float32."""
        return self.sum_R(torch.ones_like(self.sequence_T, dtype=torch.float32))


def correction_weights(
    proximal_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, segments: Segments, config: CorrectionConfig
) -> CorrectionWeights:
    """Weight of each token: proximal over behaviour, bounded as in `config`. 1 for NONE and BEHAVIOUR_RATIO."""
    with torch.no_grad():
        log_ratio_T = masked_log_ratio(proximal_logprobs_T, behaviour_logprobs_T, segments.mask_T)
        weights_T, altered_T = _weights(log_ratio_T, segments, config)
        return CorrectionWeights(weights_T * segments.mask_T, altered_T & segments.mask_T)


def masked_log_ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """`numerator - denominator` in float32, clamped to +-`LOG_RATIO_LIMIT`; 0 at masked positions, even if they hold NaN."""
    difference_T = numerator_T.to(torch.float32) - denominator_T.to(torch.float32)
    kept_T = torch.where(mask_T, difference_T, torch.zeros_like(difference_T))
    return kept_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def believed(logprobs_T: Tensor, behaviour_logprobs_T: Tensor, segments: Segments) -> Tensor:
    """bool_T: the counted tokens whose reported log-probability is close enough to the learner's own to train on."""
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
"""Each rule maps ratios to weights, and a mask that is True where the rule took effect."""
OF_WHOLE_ROLLOUTS = {Correction.TIS_SEQUENCE, Correction.MASKED_SEQUENCE}
"""Corrections whose ratio is the product over the rollout, the same for all its tokens."""


def _weights(log_ratio_T: Tensor, segments: Segments, config: CorrectionConfig) -> Bounded:
    if config.kind in OF_WHOLE_ROLLOUTS:
        log_ratio_T = segments.sum_R(log_ratio_T)[segments.sequence_T].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return RULES[config.kind](torch.exp(log_ratio_T), config)


def learning_rate_scale(sample_fraction: float, floor: float = 0.0) -> float:
    """VCPO's factor on the learning rate: the square root of the effective sample fraction (the rule for Adam), at least
    `floor`. Raises `ConfigError` if the fraction is not within 0 to 1."""
    if not (math.isfinite(sample_fraction) and 0.0 <= sample_fraction <= 1.0 + 1e-6):
        raise ConfigError(f"effective sample fraction: expected 0 to 1, got {sample_fraction}")
    return max(floor, math.sqrt(min(1.0, sample_fraction)))


def score_norm_sq_proxy(logprobs_T: Tensor, segments: Segments) -> Tensor:
    """Approximates each rollout's squared gradient norm from its log-probabilities.

    The gradient of log p(token) with respect to the logits is `onehot - p`, whose squared norm lies between
    `(1 - p_token)^2` and twice that; tokens are summed as if independent. VCPO instead measures true gradient norms, with
    one backward pass per rollout; this proxy costs nothing and keeps the order of sure and unsure rollouts.
    """
    with torch.no_grad():
        miss_T = 1.0 - torch.exp(logprobs_T.to(torch.float32).clamp(max=0.0))
        return segments.sum_R(miss_T.square())
