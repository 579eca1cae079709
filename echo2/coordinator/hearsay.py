"""Progress that only its worker tells of: the learner's reminders name what has really come.

A worker cannot hold a group up by words: where the learner lacks a group, has been told of it by reminders for a while, and
has got not a token more under the same lease, the lease is to be taken back. Its worker is then given nothing for a time that
doubles each time, and the pool is planned without it. An honest worker tells of progress once the learner has taken it, so
what counts is what came since this learner's start, under a lease that still runs. Pure. Leaves to others: taking back and
forgetting (lease_book), what counts as certain guilt (learner/untruths).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.coordinator.lease_events import Lease, OpenGroup

UNHEARD_TIMEOUTS = 2.0
"""A lease counts as unheard of after so many lease timeouts."""
SHUN_S_MAX = 1800.0


@dataclass(slots=True)
class Hearsay:
    """`shunned`: how often a worker's leases were unheard of, and until when it is given nothing."""

    lease_timeout_s: float
    shunned: dict[PeerId, tuple[int, float]] = field(default_factory=dict)

    def unheard_s(self, group: OpenGroup, lease: Lease, tokens: int, now: float) -> float:
        """The learner holds `tokens` of the group and lacks the rest: for how long nothing came; 0 while that is short."""
        seen = group.confirmed
        if seen is None or seen[0] != lease.lease_id or tokens > seen[1]:
            group.confirmed = (lease.lease_id, tokens, now)
            return 0.0
        quiet_s = now - seen[2]
        return quiet_s if quiet_s >= UNHEARD_TIMEOUTS * self.lease_timeout_s else 0.0

    def shun(self, worker_id: PeerId, now: float) -> float:
        """For how long the worker is given nothing from now on, in seconds; several leases at once count as one."""
        times = self.shunned.get(worker_id, (0, 0.0))[0] + (not self.is_shunned(worker_id, now))
        shun_s = min(SHUN_S_MAX, self.lease_timeout_s * 2.0 ** min(times, 20))
        self.shunned[worker_id] = (times, now + shun_s)
        return shun_s

    def shunned_of(self, workers: Collection[PeerId], now: float) -> set[PeerId]:
        """Whom a pool is not to be planned with; nobody where nobody else is left."""
        found = {worker_id for worker_id in workers if self.is_shunned(worker_id, now)}
        return found if len(found) < len(workers) else set()

    def is_shunned(self, worker_id: PeerId, now: float) -> bool:
        return worker_id in self.shunned and now < self.shunned[worker_id][1]
