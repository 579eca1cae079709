"""Collects changes and writes them in one transaction: the gate between deciding and sending.

Guarantees: `flush` returns only once everything noted before it is saved; each object is written once per flush, in its state at
that time. Leaves to others: when to flush (hub: before it sends any order that follows from a change).
"""

from __future__ import annotations

from collections import deque

from echo2.base.ids import GroupId, LeaseId, PeerId
from echo2.coordinator.lease_book import LeaseBook
from echo2.coordinator.membership import Membership
from echo2.coordinator.provisioning import RentedMachine
from echo2.coordinator.saved import CurvePoint, LoggedEvent, PaidAction, StateStore, StoreChanges
from echo2.coordinator.tokens import TokenBook

SAMPLES_KEPT = 4_000
PRUNE_EVERY_FLUSHES = 2_000


class Keeper:
    def __init__(
        self, store: StateStore, book: LeaseBook, membership: Membership, tokens: TokenBook, events_kept: int
    ) -> None:
        self._store, self._book, self._membership, self._tokens = store, book, membership, tokens
        self._groups: set[GroupId] = set()
        self._leases: set[LeaseId] = set()
        self._members: set[PeerId] = set()
        self._token_ids: set[str] = set()
        self._changes = StoreChanges()
        self._flushes = 0
        self._events_kept = events_kept
        self.events: deque[LoggedEvent] = deque(maxlen=events_kept)
        self.samples: deque[CurvePoint] = deque(maxlen=SAMPLES_KEPT)
        self.paid: deque[PaidAction] = deque(maxlen=events_kept)

    def group(self, group_id: GroupId) -> None:
        self._groups.add(group_id)

    def lease(self, lease_id: LeaseId) -> None:
        self._leases.add(lease_id)

    def member(self, peer_id: PeerId) -> None:
        self._members.add(peer_id)

    def token(self, token_id: str) -> None:
        self._token_ids.add(token_id)

    def lasting(self) -> None:
        """Makes the next flush sync to disk before it returns. Only for rare changes, because it waits for the disk."""
        self._changes.must_last = True

    def event(self, event: LoggedEvent) -> None:
        self.events.append(event)
        self._changes.events.append(event)

    def sample(self, sample: CurvePoint) -> None:
        self.samples.append(sample)
        self._changes.samples.append(sample)

    def paid_action(self, action: PaidAction) -> None:
        self.paid.append(action)
        self._changes.paid.append(action)

    def machine(self, machine: RentedMachine) -> None:
        self._changes.machines.append(machine)

    def meta(self, key: str, value: str) -> None:
        self._changes.meta[key] = value

    def flush(self) -> None:
        """Writes all noted changes. DiskFull or StateError if they cannot be written."""
        changes, self._changes = self._changes, StoreChanges()
        for group_id in sorted(self._groups):
            group = self._book.groups.get(group_id)
            if group is None:
                changes.groups_dropped.append(group_id)
            else:
                changes.groups.append(group)
        for lease_id in sorted(self._leases):
            lease = self._book.leases.get(lease_id)
            if lease is None:
                changes.leases_dropped.append(lease_id)
            else:
                changes.leases.append(lease)
        changes.members = [self._membership.members[peer_id] for peer_id in sorted(self._members)]
        changes.tokens = [self._tokens.tokens[token_id] for token_id in sorted(self._token_ids)]
        for dirty in (self._groups, self._leases, self._members, self._token_ids):
            dirty.clear()
        self._store.write(changes)
        self._flushes += 1
        if self._flushes % PRUNE_EVERY_FLUSHES == 0:
            self._store.prune(self._events_kept, SAMPLES_KEPT)
