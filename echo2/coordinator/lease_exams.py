"""Chooses which workers evaluate: as few as make up `EXAM_SHARE` of the fleet's rate, so that the others keep training.

A worker that evaluates a version does not switch to the next one until it is done. If every worker that asked were given
questions, all of them would delay the next version at once, and none would generate training data meanwhile.
Guarantees: a worker that evaluates a version keeps evaluating it; if no training group is open, every worker may evaluate.
Leaves to others: which worker is best (lease_book).
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
    """Which workers hold leases that are tied to an exact version (evaluations)."""

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
        """Records a lease that an earlier process granted."""
        if spec.exact_version is not None:
            self._holders[lease.lease_id] = lease.worker_id, spec.exact_version

    def chosen(
        self, version: Version, willing: Sequence[PeerId], fleet: Collection[PeerId], rate: Callable[[PeerId], float]
    ) -> list[PeerId]:
        """Chooses from `willing` (best first) those that already evaluate this version, and others until the share is reached.

        `fleet`: all active workers. `rate`: a worker's rollouts per second; if no rate is known, all workers count the same.
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
