"""Which groups are offered, and which rollouts are worth training on: the cap, dynamic sampling, overlong shaping, pruning.

Guarantees: pure rules on counts, rewards, lengths and tokens. The cap on groups in flight (offered, or finished but not drawn yet)
is between one batch, so that the learner can always continue, and S + 1 batches, because groups further back would go stale.
Replacements are bounded, so a task that is too easy or too hard slows a run down but never stops it.

Sources. Dynamic sampling and soft overlong punishment: Yu et al. (DAPO), arXiv 2503.14476. Pruning: the idea is ARRoL's;
the two rules here are our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo2.base.errors import ConfigError

DROPPED_MAX_RATIO = 2
"""For one step at most so many times its groups are dropped for equal rewards; more would let a solved task stop the run."""


@dataclass(frozen=True, slots=True)
class OverlongShaping:
    """Length penalty: rises linearly over the last `buffer_tokens` before `limit_tokens`, from 0 to 1."""

    limit_tokens: int
    buffer_tokens: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens <= self.limit_tokens:
            raise ConfigError(
                f"overlong shaping: expected 0 < buffer <= limit, got buffer {self.buffer_tokens}, limit {self.limit_tokens}"
            )

    def shaped(self, reward: float, completion_tokens: int) -> float:
        """The reward minus the penalty for this length."""
        excess_tokens = completion_tokens - (self.limit_tokens - self.buffer_tokens)
        return reward - min(1.0, max(0.0, excess_tokens / self.buffer_tokens))


@dataclass(frozen=True, slots=True)
class PruningRule:
    """When to give up on a rollout in progress. Off by default: it saves generation time but adds a little bias.

    A rollout loops if its last `loop_tokens` tokens are one phrase of at most `period_max` tokens, repeated at least
    `loop_repeats` times. It is lost if the mean log-probability of its last `window_tokens` is below `logprob_floor` (nats). A
    group keeps at least `keep_min_fraction` of its rollouts. A pruned rollout is scored as it is, like one cut off by the length
    limit; dropping it would hide failures from the baseline.
    """

    loop_tokens: int = 256
    loop_repeats: int = 8
    period_max: int = 64
    window_tokens: int = 256
    logprob_floor: float = -4.0
    keep_min_fraction: float = 0.5

    def is_hopeless(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> bool:
        if len(token_ids) >= self.loop_tokens:
            tail = list(token_ids[-self.loop_tokens :])
            longest = min(self.period_max, self.loop_tokens // self.loop_repeats)
            if any(tail[period:] == tail[:-period] for period in range(1, longest + 1)):
                return True
        recent = logprobs[-self.window_tokens :]
        return len(recent) >= self.window_tokens and sum(recent) / len(recent) < self.logprob_floor

    def may_prune(self, group_size: int, pruned_count: int) -> bool:
        """Whether one more rollout of the group may be given up."""
        return group_size - pruned_count - 1 >= math.ceil(self.keep_min_fraction * group_size)


@dataclass(frozen=True, slots=True)
class GroupRules:
    """S (`staleness_bound`), R (`rollouts_per_step`), n (`rollouts_per_group`) and the rules for groups. `drops_equal_rewards`:
    replaces groups with equal rewards, which give no gradient. `pruning`: gives up on hopeless rollouts while they are sampled.
    `is_driven`: prompts come from agents, call by call."""

    staleness_bound: int
    rollouts_per_step: int
    rollouts_per_group: int
    vocabulary_size: int
    drops_equal_rewards: bool = False
    pruning: PruningRule | None = None
    is_driven: bool = False

    @property
    def groups_per_step(self) -> int:
        return self.rollouts_per_step // self.rollouts_per_group

    def cap_groups(self, planned_rollouts: int | None) -> int:
        """The most groups in flight. Until a plan arrives: one batch being sampled and one in the buffer."""
        planned = planned_rollouts or 2 * self.rollouts_per_step
        highest = (self.staleness_bound + 1) * self.groups_per_step
        return max(self.groups_per_step, min(planned // self.rollouts_per_group, highest))

    def drops(self, rewards: Sequence[float], dropped_count: int) -> bool:
        """Whether to drop a group of these rewards, if `dropped_count` groups were dropped for this step already. Rewards that
        differ by rounding noise alone count as equal."""
        if not self.drops_equal_rewards or (len(rewards) > 1 and max(rewards) - min(rewards) > 1e-6):
            return False
        return dropped_count < DROPPED_MAX_RATIO * self.groups_per_step
