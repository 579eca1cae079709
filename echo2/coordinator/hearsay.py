"""Detects leases whose worker claims progress that never reaches the learner: the learner's reminders name what has arrived.

So a worker cannot block a group by claims alone. If the learner's reminders have named a group for a while, and the learner has
received no further token under the same lease, the lease must be taken back. Its worker is then given nothing for a time that
doubles each time, and the pool is planned without it. An honest worker reports progress only after the learner has taken the
tokens, so what counts is what arrived since this learner's start, under a lease that still runs. Pure. Leaves to others: taking
leases back and resetting `confirmed` (lease_book), what counts as proof of fraud (learner/untruths).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.coordinator.lease_events import Lease, OpenGroup

UNHEARD_TIMEOUTS = 2.0
"""Lease timeouts without a new token at the learner after which a lease is taken back."""
SHUN_S_MAX = 1800.0


@dataclass(slots=True)
class Hearsay:
    """`shunned`: for each worker, how often its leases were taken back for this, and until when it is given nothing."""

    lease_timeout_s: float
    shunned: dict[PeerId, tuple[int, float]] = field(default_factory=dict)

    def unheard_s(self, group: OpenGroup, lease: Lease, tokens: int, now: float) -> float:
        """The learner holds `tokens` of the group and lacks the rest. Returns for how many seconds nothing has arrived; 0 while
        that is below the limit."""
        seen = group.confirmed
        if seen is None or seen[0] != lease.lease_id or tokens > seen[1]:
            group.confirmed = (lease.lease_id, tokens, now)
            return 0.0
        quiet_s = now - seen[2]
        return quiet_s if quiet_s >= UNHEARD_TIMEOUTS * self.lease_timeout_s else 0.0

    def shun(self, worker_id: PeerId, now: float) -> float:
        """Shuns the worker and returns for how many seconds from now; several leases at once count as one."""
        times = self.shunned.get(worker_id, (0, 0.0))[0] + (not self.is_shunned(worker_id, now))
        shun_s = min(SHUN_S_MAX, self.lease_timeout_s * 2.0 ** min(times, 20))
        self.shunned[worker_id] = (times, now + shun_s)
        return shun_s

    def shunned_of(self, workers: Collection[PeerId], now: float) -> set[PeerId]:
        """The workers that a pool must be planned without; none if that would leave no worker."""
        found = {worker_id for worker_id in workers if self.is_shunned(worker_id, now)}
        return found if len(found) < len(workers) else set()

    def is_shunned(self, worker_id: PeerId, now: float) -> bool:
        return worker_id in self.shunned and now < self.shunned[worker_id][1]
