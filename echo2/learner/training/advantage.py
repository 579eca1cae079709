"""Group-relative advantages: how much better a rollout did than its siblings on the same prompt.

Guarantees: groups may be ragged (rollouts lost or refused); a group with equal rewards, or with a single rollout,
gets advantage zero and never NaN; the arithmetic is in float64, the results are float32.

Shapes: R rollouts of the batch, G groups. docs/algorithms.md has the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from echo2.base.errors import ConfigError

ADVANTAGES = ("grpo", "dr_grpo", "mc_grpo", "vcpo")
SPREAD_EPSILON = 1e-4  # added to the spread outside the root, as TRL does; keeps an all-equal group at zero


@dataclass(frozen=True, slots=True)
class Advantages:
    """`values_R`: float32. `trained_R`: bool, False for a pivot, which gets no backward pass and is not counted."""

    values_R: Tensor
    trained_R: Tensor


def group_advantages(rewards_R: Tensor, group_R: Tensor, name: str, weight_R: Tensor | None = None) -> Advantages:
    """Computes the advantage of each rollout within its group.

    rewards_R: any float dtype, finite. group_R: int64, the index of each rollout's group (0 to G-1, in any order; an index
    may be unused). weight_R: for vcpo, squared importance ratio times squared gradient norm of each rollout
    (`minimum_variance_weights`). Raises `ConfigError` for a name that is not known, and if vcpo gets no weights.
    """
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
        case "vcpo":
            if weight_R is None:
                raise ConfigError("advantage vcpo: expected weights from the importance ratios, got none")
            weight_R = weight_R.to(torch.float64)
            total_R = _sums(weight_R, group_R)
            weighted_R = _sums(weight_R * values_R, group_R) / total_R.clamp(min=1e-300)
            mean_R = torch.where(
                total_R > 1e-300, weighted_R, mean_R
            )  # the plain one where all weights have underflowed
            centred_R, spread_R = values_R - mean_R, std_R + SPREAD_EPSILON
        case _:
            raise ConfigError(f"advantage: expected one of {', '.join(ADVANTAGES)}, got {name!r}")
    return Advantages(torch.where(count_R < 2, 0.0, centred_R / spread_R).to(torch.float32), trained_R)


def minimum_variance_weights(log_ratio_R: Tensor, gradient_norm_sq_R: Tensor) -> Tensor:
    """Computes the weights of the baseline that minimises the variance of `sum_i w_i (r_i - b) g_i`.

    Setting the derivative of `sum_i w_i^2 |g_i|^2 (r_i - b)^2` to zero gives b as the mean of the rewards weighted by
    `w_i^2 |g_i|^2`. log_ratio_R: log of each rollout's importance ratio, current over behaviour. gradient_norm_sq_R: the
    squared norm of its score function. Only proportions matter, so the largest ratio is scaled to 1 to stay finite.
    """
    log_weight_R = 2.0 * log_ratio_R.detach().to(torch.float64)
    weight_R = torch.exp(log_weight_R - log_weight_R.max()) if log_weight_R.numel() else log_weight_R
    return weight_R * gradient_norm_sq_R.detach().to(torch.float64)


def _sums(values_R: Tensor, group_R: Tensor) -> Tensor:
    """For each rollout, the sum over its group."""
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
