"""Which workers evaluate: as few as bring `EXAM_SHARE` of the fleet's rate, so that training goes on at the others.

A worker that evaluates a version delays the next one until it is done. If every worker that asks were given questions, all of
them would delay it at once, and none would generate training data meanwhile.
Guarantees: a worker that evaluates a version goes on with it; where no training group is open, every worker may. Leaves to
others: which worker is best (lease_book).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from echo2.base.ids import LeaseId, PeerId, Version
from echo2.base.rollout import GroupSpec
from echo2.coordinator.lease_events import Action, DropLease, Grant, Lease

EXAM_SHARE = 0.3


@dataclass(slots=True)
class Examiners:
    """Who holds leases of exact versions."""

    _holders: dict[LeaseId, tuple[PeerId, Version]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._holders)

    def follow(self, action: Action) -> None:
        match action:
            case Grant(worker_id, lease_id, group=spec) if spec.exact_version is not None:
                self._holders[lease_id] = worker_id, spec.exact_version
            case DropLease(lease_id):
                self._holders.pop(lease_id, None)

    def restored(self, lease: Lease, spec: GroupSpec) -> None:
        """Of an earlier process."""
        if spec.exact_version is not None:
            self._holders[lease.lease_id] = lease.worker_id, spec.exact_version

    def chosen(
        self, version: Version, willing: Sequence[PeerId], fleet: Collection[PeerId], rate: Callable[[PeerId], float]
    ) -> list[PeerId]:
        """Of `willing`, best first: those that evaluate this version already, then others until the share is reached.

        `fleet`: all that work. Rates are rollouts a second; where none is known, workers count alike.
        """
        rates = {worker_id: rate(worker_id) for worker_id in fleet}
        if not any(rates.values()):
            rates = dict.fromkeys(rates, 1.0)
        wanted, at_it = (
            EXAM_SHARE * sum(rates.values()),
            {worker_id for worker_id, at in self._holders.values() if at == version},
        )
        reached = sum(rates.get(worker_id, 0.0) for worker_id in at_it)
        found: list[PeerId] = []
        for worker_id in willing:
            if worker_id not in at_it:
                if reached >= wanted:
                    continue
                reached += rates.get(worker_id, 0.0)
            found.append(worker_id)
        return found
