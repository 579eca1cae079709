"""How many groups to offer, and for which step each is meant.

Guarantees: what is in flight (offered, or finished and not yet drawn for a batch) never passes the cap, and the cap
never falls below one batch, so the learner can always go on. Leaves to others: the cap itself (the coordinator's
plan), who gets a group (leases), whether a worker is fresh enough to begin it (staleness.may_begin).

The step for which a group is meant is a queueing estimate: with p groups ahead of it and g groups a batch, it is
trained in batch `next_step + p // g`. Oldest first is nearly true of a fleet, and where it is not the error is a batch
or so, which the admission rule catches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OfferConfig:
    """`batches_max` bounds the cap in batches whatever the plan says: S + 1, for what lies deeper grows stale."""

    rollouts_per_step: int
    rollouts_per_group: int
    staleness_bound: int

    @property
    def groups_per_step(self) -> int:
        return self.rollouts_per_step // self.rollouts_per_group

    @property
    def batches_max(self) -> int:
        return self.staleness_bound + 1


DEFAULT_BATCHES_IN_FLIGHT = 2
REMIND_FIRST_S, REMIND_EVERY_S = 3.0, 30.0
"""While no plan has come: one batch in the making and one in the buffer."""


def cap_groups(config: OfferConfig, planned_cap_rollouts: int | None) -> int:
    """Most groups in flight: the plan's cap, at least one batch and at most S + 1."""
    planned = planned_cap_rollouts or DEFAULT_BATCHES_IN_FLIGHT * config.rollouts_per_step
    lowest, highest = config.groups_per_step, config.batches_max * config.groups_per_step
    return max(lowest, min(planned // config.rollouts_per_group, highest))


def groups_wanted(config: OfferConfig, planned_cap_rollouts: int | None, in_flight_groups: int) -> int:
    """How many groups to offer now."""
    return max(0, cap_groups(config, planned_cap_rollouts) - in_flight_groups)


def consume_step(config: OfferConfig, next_step: int, groups_ahead: int) -> int:
    """The step that is expected to train on a group with `groups_ahead` in flight before it."""
    return next_step + groups_ahead // config.groups_per_step


@dataclass(slots=True)
class Reminders:
    """When a wait for rollouts is reported again: after 3 s, 9 s, 27 s, and then every 30 s."""

    _reminded_s: float = 0.0  # how long the wait had lasted at the last reminder

    def is_due(self, waited_s: float) -> bool:
        """Whether to remind now, `waited_s` into the wait; to be asked every second or so, with 0 while nothing waits."""
        if waited_s < self._reminded_s:
            self._reminded_s = 0.0  # another wait
        if waited_s < self._reminded_s + min(REMIND_EVERY_S, max(REMIND_FIRST_S, 2 * self._reminded_s)):
            return False
        self._reminded_s = waited_s
        return True
