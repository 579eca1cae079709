"""Chooses which workers evaluate: as few as make up `EVALUATION_SHARE` of the fleet's rate, so that the others keep training.

A worker that evaluates a version does not switch to the next one until it is done. If every worker that asked were given
questions, all of them would delay the next version at once, and none would generate training data meanwhile.
Guarantees: a worker that evaluates a version keeps evaluating it; if no training group is open, every worker may evaluate; a
question that its worker holds `SLOW_TIMES` as long as the fleet usually needs for a lease goes to another as soon as one wants it,
even if tokens still come. Leaves to others: which worker is best (book).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from echo2.base.ids import LeaseId, PeerId, Version
from echo2.base.rollout import GroupSpec
from echo2.coordinator.leases.lease import Lease

EVALUATION_SHARE = 0.3  # of the fleet: what delays the next version by little and ends an evaluation soon
SLOW_TIMES = 4.0
"""A multiple of the usual time that honest machines of one fleet stay below: their speeds differ less."""
LEASES_KEPT, LEASES_MIN = 64, 4
"""The usual time is the median of the newest finished leases, once there are so many."""


@dataclass(slots=True)
class Evaluators:
    """Which workers hold leases that are tied to an exact version (evaluations). `at_least_s`: how long a question may always
    take."""

    at_least_s: float = 0.0
    _holders: dict[LeaseId, tuple[PeerId, Version]] = field(default_factory=dict)
    _finished_s: deque[float] = field(default_factory=lambda: deque(maxlen=LEASES_KEPT))
    _limit_s: float | None = None
    _slow: set[tuple[PeerId, Version]] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._holders)

    def on_grant(self, lease: Lease, spec: GroupSpec) -> None:
        if spec.exact_version is not None:
            self._holders[lease.lease_id] = lease.worker_id, spec.exact_version

    def on_return(self, lease_id: LeaseId) -> None:
        self._holders.pop(lease_id, None)

    def on_finish(self, lease_s: float) -> None:
        """A worker that has delivered before finished a lease, of either kind, after `lease_s`."""
        self._finished_s.append(lease_s)
        if len(self._finished_s) >= LEASES_MIN:
            self._limit_s = max(self.at_least_s, SLOW_TIMES * statistics.median(self._finished_s))

    def overdue(self, leases: Mapping[LeaseId, Lease], now: float) -> Iterator[tuple[Lease, Version]]:
        """The evaluation leases that have taken too long by the fleet's speed, and their versions, oldest first."""
        if self._limit_s is None:
            return
        for lease_id, (_, version) in list(self._holders.items()):  # in the order in which they were granted
            if now - leases[lease_id].granted_at < self._limit_s:
                return
            yield leases[lease_id], version

    def on_overtake(self, worker_id: PeerId, version: Version) -> None:
        """A question of this version was taken from the worker: others come first with the rest."""
        self._slow = {(slow, at) for slow, at in self._slow if at >= version} | {(worker_id, version)}

    def chosen(
        self, version: Version, willing: Sequence[PeerId], fleet: Collection[PeerId], rate: Callable[[PeerId], float]
    ) -> list[PeerId]:
        """Chooses from `willing` (best first) those that already evaluate this version, and others until the share is reached.

        `fleet`: all active workers. `rate`: a worker's rollouts per second; if no rate is known, all workers count the same.
        """
        rates = {worker_id: rate(worker_id) for worker_id in fleet}
        if not any(rates.values()):
            rates = dict.fromkeys(rates, 1.0)
        wanted = EVALUATION_SHARE * sum(rates.values())
        at_it = {w for w, at in self._holders.values() if at == version and (w, version) not in self._slow}
        reached = sum(rates.get(worker_id, 0.0) for worker_id in at_it)
        found: list[PeerId] = []
        for worker_id in sorted(willing, key=lambda worker_id: (worker_id, version) in self._slow):
            if worker_id not in at_it:
                if reached >= wanted:
                    continue
                reached += rates.get(worker_id, 0.0)
            found.append(worker_id)
        return found
