"""Which groups and rollouts are worth training on: dynamic sampling, overlong shaping, pruning of hopeless rollouts.

Guarantees: pure rules on rewards, lengths and tokens; replacements are bounded, so a task that is too easy or too hard
slows a run down but never stops it. Leaves to others: drawing the replacements and aborting pruned rollouts
(batcher, runtime), staleness (staleness/).

Sources. Dynamic sampling and soft overlong punishment: Yu et al. (DAPO), arXiv 2503.14476. Pruning: the idea is ARRoL's;
the two rules here are our own.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo2.base.errors import ConfigError

CONTRAST_MIN = 1e-6
"""Rewards of a group that differ by no more than this count as equal: their advantages would be rounding noise."""


def has_contrast(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ, so that the group gives a gradient."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > CONTRAST_MIN


class GroupVerdict(enum.Enum):
    """What to do with a scored group."""

    TRAIN = "train"
    DROP = "drop"  # no contrast: draw another prompt in its place
    TRAIN_ANYWAY = "train_anyway"  # no contrast, but the step has reached its limit of dropped groups


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """`dropped_max_ratio`: limit on the groups dropped for one step, as a multiple of `groups_per_step`.

    0 switches dynamic sampling off: groups with equal rewards are trained on (their gradient is zero).
    """

    groups_per_step: int
    dropped_max_ratio: float = 2.0

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or not (math.isfinite(self.dropped_max_ratio) and self.dropped_max_ratio >= 0):
            raise ConfigError(
                "dynamic sampling: expected at least one group a step and a ratio of 0 or more, got "
                f"{self.groups_per_step} and {self.dropped_max_ratio}"
            )

    def verdict(self, rewards: Sequence[float], dropped_count: int) -> GroupVerdict:
        """What to do with a group of these rewards, if `dropped_count` groups were dropped for this step already."""
        if has_contrast(rewards):
            return GroupVerdict.TRAIN
        can_drop = dropped_count < int(self.dropped_max_ratio * self.groups_per_step)
        return GroupVerdict.DROP if can_drop else GroupVerdict.TRAIN_ANYWAY


@dataclass(frozen=True, slots=True)
class OverlongShaping:
    """Length penalty: rises linearly over the last `buffer_tokens` before `limit_tokens`, from 0 to `penalty`."""

    limit_tokens: int
    buffer_tokens: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens <= self.limit_tokens or not self.penalty >= 0:
            raise ConfigError(
                f"overlong shaping: expected 0 < buffer <= limit and a penalty of 0 or more, got buffer "
                f"{self.buffer_tokens}, limit {self.limit_tokens}, penalty {self.penalty}"
            )

    def shaped(self, reward: float, completion_tokens: int) -> float:
        """The reward minus the penalty for this length."""
        excess_tokens = completion_tokens - (self.limit_tokens - self.buffer_tokens)
        return reward - self.penalty * min(1.0, max(0.0, excess_tokens / self.buffer_tokens))


class Hopeless(enum.Enum):
    """Why a rollout in progress is given up."""

    LOOP = "loop"  # repeats itself token by token
    LOST = "lost"  # has had low log-probabilities for a long stretch


@dataclass(frozen=True, slots=True)
class PruningRule:
    """When to give up on a rollout in progress. Off by default: it saves generation time but adds a little bias.

    LOOP: the last `loop_tokens` tokens are one phrase of at most `period_max` tokens, repeated at least `loop_repeats`
    times. LOST: the mean log-probability of the last `window_tokens` is below `logprob_floor` (nats). A group keeps at least
    `keep_min_fraction` of its rollouts. A pruned rollout is scored as it is, like one cut off by the length limit;
    dropping it would hide failures from the baseline.
    """

    loop_tokens: int = 256
    loop_repeats: int = 8
    period_max: int = 64
    window_tokens: int = 256
    logprob_floor: float = -4.0
    keep_min_fraction: float = 0.5

    def __post_init__(self) -> None:
        if min(self.loop_tokens, self.loop_repeats, self.period_max, self.window_tokens) < 1:
            raise ConfigError(f"pruning: expected counts of at least 1, got {self}")
        if not 0 <= self.keep_min_fraction <= 1:
            raise ConfigError(f"pruning: expected a fraction to keep from 0 to 1, got {self.keep_min_fraction}")

    def reason(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> Hopeless | None:
        """Why this rollout is hopeless; None if it is not."""
        if self._is_loop(token_ids):
            return Hopeless.LOOP
        recent = logprobs[-self.window_tokens :]
        if len(recent) >= self.window_tokens and sum(recent) / len(recent) < self.logprob_floor:
            return Hopeless.LOST
        return None

    def may_prune(self, group_size: int, pruned_count: int) -> bool:
        """Whether one more rollout of the group may be given up."""
        return group_size - pruned_count - 1 >= math.ceil(self.keep_min_fraction * group_size)

    def _is_loop(self, token_ids: Sequence[int]) -> bool:
        if len(token_ids) < self.loop_tokens:
            return False
        tail = list(token_ids[-self.loop_tokens :])
        longest = min(self.period_max, self.loop_tokens // self.loop_repeats)
        return any(tail[period:] == tail[:-period] for period in range(1, longest + 1))
