"""Group-relative advantages: how much better a rollout did than its siblings on the same prompt.

Guarantees: groups may be ragged (rollouts lost, pruned or refused); a group with equal rewards, or with a single rollout,
gets advantage zero and never NaN; the arithmetic is in float64, the results are float32. Leaves to others: which rollouts
are admitted (staleness/), dropping groups with equal rewards (selection), the loss itself (loss).

Shapes: R rollouts of the batch, G groups.

Sources. grpo: Shao et al., arXiv 2402.03300, with the unbiased std and 1e-4 outside the root, as in TRL.
dr_grpo (no division): Liu et al., arXiv 2503.20783. rloo: Ahmadian et al., arXiv 2402.14740. mc_grpo (median, median
absolute deviation, pivot left out): Kim, arXiv 2601.22582. minimum variance: Huang et al. (VCPO), arXiv 2602.17616.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from echo2.base.errors import ConfigError

STD_EPSILON = 1e-4
"""Added to the spread before dividing, outside the root, as TRL does; keeps an all-equal group at zero."""


class Baseline(enum.Enum):
    """What is subtracted from a rollout's reward."""

    MEAN = "mean"  # the group's mean, this rollout included
    LEAVE_ONE_OUT = "leave_one_out"  # the mean of the other rollouts of the group
    MEDIAN = "median"  # the group's median; the pivot (the median rollout itself) is left out of the gradient
    MINIMUM_VARIANCE = "minimum_variance"  # the mean weighted by squared importance ratio times squared gradient norm


class Scale(enum.Enum):
    """What the centred reward is divided by."""

    NONE = "none"
    GROUP_STD = "group_std"
    BATCH_STD = "batch_std"
    GROUP_MAD = "group_mad"  # median absolute deviation


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """A baseline and a scale; the usual pairs have names in `ADVANTAGES`."""

    baseline: Baseline = Baseline.MEAN
    scale: Scale = Scale.GROUP_STD


ADVANTAGES: Mapping[str, AdvantageConfig] = {
    "grpo": AdvantageConfig(Baseline.MEAN, Scale.GROUP_STD),
    "dr_grpo": AdvantageConfig(Baseline.MEAN, Scale.NONE),
    "batch_std": AdvantageConfig(Baseline.MEAN, Scale.BATCH_STD),
    "rloo": AdvantageConfig(Baseline.LEAVE_ONE_OUT, Scale.NONE),
    "mc_grpo": AdvantageConfig(Baseline.MEDIAN, Scale.GROUP_MAD),
    "vcpo": AdvantageConfig(Baseline.MINIMUM_VARIANCE, Scale.GROUP_STD),
}
"""Well-known estimators, by their name in the configuration."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """`values_R`: float32. `trained_R`: bool, False for a pivot, which gets no backward pass and is not counted."""

    values_R: Tensor
    trained_R: Tensor


def group_advantages(
    rewards_R: Tensor, group_R: Tensor, config: AdvantageConfig, weight_R: Tensor | None = None
) -> Advantages:
    """Computes the advantage of each rollout within its group.

    rewards_R: any float dtype, finite. group_R: int64, the index of each rollout's group (0 to G-1, in any order; an index
    may be unused). weight_R: for MINIMUM_VARIANCE, squared importance ratio times squared gradient norm of each rollout
    (`minimum_variance_weights`); the other baselines ignore it. Raises `ConfigError` if MINIMUM_VARIANCE gets no weights.
    """
    assert rewards_R.shape == group_R.shape and rewards_R.ndim == 1, "one reward and one group index a rollout"
    values_R = rewards_R.detach().to(torch.float64)
    group_count = int(group_R.max()) + 1 if group_R.numel() else 0
    baseline_R = _baseline(values_R, group_R, group_count, config.baseline, weight_R)
    centred_R = values_R - baseline_R
    alone_R = _sum_by(torch.ones_like(values_R), group_R, group_count)[group_R] < 2
    scaled_R = centred_R / _spread(values_R, group_R, group_count, config.scale)
    trained_R = torch.ones_like(alone_R)
    if config.baseline is Baseline.MEDIAN:
        trained_R = ~_pivot(values_R, group_R, group_count)
    return Advantages(torch.where(alone_R, 0.0, scaled_R).to(torch.float32), trained_R)


def minimum_variance_weights(log_ratio_R: Tensor, gradient_norm_sq_R: Tensor | None) -> Tensor:
    """Computes the weights of the baseline that minimises the variance of `sum_i w_i (r_i - b) g_i`.

    Setting the derivative of `sum_i w_i^2 |g_i|^2 (r_i - b)^2` to zero gives b as the mean of the rewards weighted by
    `w_i^2 |g_i|^2`. log_ratio_R: log of each rollout's importance ratio, current over behaviour. gradient_norm_sq_R: the
    squared norm of its score function; None assumes equal norms. Only proportions matter, so the largest ratio is
    scaled to 1 to stay finite.
    """
    log_weight_R = 2.0 * log_ratio_R.detach().to(torch.float64)
    weight_R = torch.exp(log_weight_R - log_weight_R.max()) if log_weight_R.numel() else log_weight_R
    if gradient_norm_sq_R is None:
        return weight_R
    return weight_R * gradient_norm_sq_R.detach().to(torch.float64)


def _baseline(
    values_R: Tensor, group_R: Tensor, group_count: int, baseline: Baseline, weight_R: Tensor | None
) -> Tensor:
    match baseline:
        case Baseline.MEAN:
            return _mean_by(values_R, group_R, group_count)[group_R]
        case Baseline.LEAVE_ONE_OUT:
            sums_R = _sum_by(values_R, group_R, group_count)[group_R]
            count_R = _sum_by(torch.ones_like(values_R), group_R, group_count)[group_R]
            return (sums_R - values_R) / (count_R - 1).clamp(min=1)
        case Baseline.MEDIAN:
            return _median_by(values_R, group_R, group_count)[group_R]
        case Baseline.MINIMUM_VARIANCE:
            if weight_R is None:
                raise ConfigError("minimum-variance baseline: expected weights from the importance ratios, got none")
            return _weighted_mean_by(values_R, weight_R.to(torch.float64), group_R, group_count)[group_R]


def _spread(values_R: Tensor, group_R: Tensor, group_count: int, scale: Scale) -> Tensor:
    match scale:
        case Scale.NONE:
            return torch.ones_like(values_R)
        case Scale.GROUP_STD:
            return _std_by(values_R, group_R, group_count)[group_R] + STD_EPSILON
        case Scale.BATCH_STD:
            one_group_R = torch.zeros_like(group_R)
            return _std_by(values_R, one_group_R, 1)[one_group_R] + STD_EPSILON
        case Scale.GROUP_MAD:
            deviation_R = (values_R - _median_by(values_R, group_R, group_count)[group_R]).abs()
            mad_R = _median_by(deviation_R, group_R, group_count)[group_R]
            # With binary rewards, more than half of a group's rewards are often equal. Its MAD is then 0 although it has
            # contrast, and dividing by epsilon alone would scale the advantages up ten-thousandfold. So use the std.
            std_R = _std_by(values_R, group_R, group_count)[group_R]
            return torch.where(mad_R > 0, mad_R, std_R) + STD_EPSILON


def _sum_by(values_R: Tensor, group_R: Tensor, group_count: int) -> Tensor:
    return values_R.new_zeros(group_count).index_add(0, group_R, values_R)


def _mean_by(values_R: Tensor, group_R: Tensor, group_count: int) -> Tensor:
    count_G = _sum_by(torch.ones_like(values_R), group_R, group_count)
    return _sum_by(values_R, group_R, group_count) / count_G.clamp(min=1)


def _weighted_mean_by(values_R: Tensor, weight_R: Tensor, group_R: Tensor, group_count: int) -> Tensor:
    """Weighted mean of each group; the plain mean if all weights of a group have underflowed."""
    weight_G = _sum_by(weight_R, group_R, group_count)
    weighted_G = _sum_by(weight_R * values_R, group_R, group_count) / weight_G.clamp(min=1e-300)
    return torch.where(weight_G > 1e-300, weighted_G, _mean_by(values_R, group_R, group_count))


def _std_by(values_R: Tensor, group_R: Tensor, group_count: int) -> Tensor:
    centred_R = values_R - _mean_by(values_R, group_R, group_count)[group_R]
    count_G = _sum_by(torch.ones_like(values_R), group_R, group_count)
    return (_sum_by(centred_R.square(), group_R, group_count) / (count_G - 1).clamp(min=1)).sqrt()


def _median_by(values_R: Tensor, group_R: Tensor, group_count: int) -> Tensor:
    """Median of each group. For an even count, the lower middle value, so the median is always one rollout's value."""
    medians = [
        values_R[group_R == g].median() if bool((group_R == g).any()) else values_R.new_zeros(())
        for g in range(group_count)
    ]
    return torch.stack(medians) if medians else values_R.new_zeros(0)


def _pivot(values_R: Tensor, group_R: Tensor, group_count: int) -> Tensor:
    """bool_R: in each group of odd size, the first rollout whose reward is the median. Even groups have no pivot."""
    pivot_R = torch.zeros_like(group_R, dtype=torch.bool)
    median_G = _median_by(values_R, group_R, group_count)
    for g in range(group_count):
        members = torch.nonzero(group_R == g).flatten()
        if members.numel() % 2 == 1:
            pivot_R[members[values_R[members] == median_G[g]][0]] = True
    return pivot_R
