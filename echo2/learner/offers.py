"""How many groups to offer, and which step is expected to train on each.

Guarantees: no group is offered beyond the cap on groups in flight (offered, or finished but not yet drawn for a batch). The
cap is never below one batch, so the learner can always continue. Leaves to others: the cap itself (the coordinator's plan),
which worker gets a group (leases), whether a worker is fresh enough to begin it (staleness.may_begin).

The expected step is a queueing estimate: with p groups ahead of it and g groups per batch, a group is trained on in step
`next_step + p // g`. This assumes that groups finish in the order offered. A fleet nearly does that; otherwise the estimate
is off by about one batch, and the admission rule still refuses stale tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OfferConfig:
    """The batch shape. `batches_max`: upper bound of the cap, in batches, whatever the plan says: S + 1, because groups
    further back in the queue would go stale."""

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
"""The cap until a plan arrives: one batch being sampled and one in the buffer."""
REMIND_FIRST_S, REMIND_EVERY_S = 3.0, 30.0


def cap_groups(config: OfferConfig, planned_cap_rollouts: int | None) -> int:
    """The most groups allowed in flight: the plan's cap, bounded to 1 to S + 1 batches."""
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
    """When to report a wait for rollouts again: after 3 s, 9 s, 27 s, and then every 30 s."""

    _reminded_s: float = 0.0  # how long the wait had lasted at the last reminder

    def is_due(self, waited_s: float) -> bool:
        """Whether to report now, `waited_s` seconds into the wait. Call about every second, with 0 if nothing waits."""
        if waited_s < self._reminded_s:
            self._reminded_s = 0.0  # a new wait began
        if waited_s < self._reminded_s + min(REMIND_EVERY_S, max(REMIND_FIRST_S, 2 * self._reminded_s)):
            return False
        self._reminded_s = waited_s
        return True
