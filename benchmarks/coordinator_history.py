"""What a simulated fleet said and was told, in order, and the judge of it: the checker of the coordinator's promises.

The load generator writes down every operation and every answer on its side: joins that were welcomed, groups offered and
closed, leases granted, ended and revoked, rollouts admitted. `judge_saved` holds a state that was kept (what a new
process loads after a kill) against it; `judge` holds the whole history against the invariants. Both return violations,
each a sentence; none means that all held. One process writes the history, so its order is the real order.

Invariants (numbers: those of the design's "what must always hold"):
  2  a group is trained once at most, a group that was admitted is not lost and is not leased again once the coordinator
     has heard the learner's list;
  5  after a kill the state holds every join that was welcomed and every lease that was told and has not ended, for the
     same worker under the same attempt; no attempt at a group is ever granted to two workers; attempts only grow; a lease
     that a worker holds when it comes back is renewed unless its group is closed or has gone on elsewhere;
  6  every group that was offered before a kill is made in the end, or still waits or is leased when the run ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.coordinator.leases.lease import GroupPhase
from echo2.coordinator.store import StateSnapshot


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease as its worker knows it."""

    lease_id: str
    group_id: str
    worker: PeerId
    attempt: int


@dataclass(slots=True)
class History:
    """`said_ended`, `said_closed`: told to the coordinator; whether it heard is not known until it acts on it."""

    violations: list[str] = field(default_factory=list)
    welcomed: set[PeerId] = field(default_factory=set)
    offered: set[str] = field(default_factory=set)
    attempts: dict[str, dict[int, PeerId]] = field(default_factory=dict)
    held: dict[str, HeldLease] = field(default_factory=dict)
    said_ended: set[str] = field(default_factory=set)
    said_closed: set[str] = field(default_factory=set)
    admitted: dict[str, int] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    duplicates: int = 0
    grants: int = 0
    renewals: int = 0
    revokes: int = 0
    operations: int = 0

    # ---- the worker's side

    def is_welcomed(self, worker: PeerId) -> None:
        self.operations += 1
        self.welcomed.add(worker)

    def is_granted(self, lease_id: str, group_id: str, worker: PeerId, attempt: int, deadline_s: float) -> bool:
        """Returns whether it is news to the worker."""
        self.operations += 1
        known = self.held.get(lease_id)
        if known is not None:
            self.renewals += 1
            if known.worker != worker:
                self.violations.append(f"lease {lease_id} of {known.worker} was told to {worker}")
            return False
        self.grants += 1
        attempts = self.attempts.setdefault(group_id, {})
        holder = attempts.get(attempt)
        if holder is not None and holder != worker:
            self.violations.append(f"attempt {attempt} at {group_id} was granted to {holder} and to {worker}")
        if attempts and attempt < max(attempts):
            self.violations.append(f"attempt {attempt} at {group_id} was granted after attempt {max(attempts)}")
        if group_id not in self.offered:
            self.violations.append(f"group {group_id} was granted and never offered")
        if deadline_s <= 0:
            self.violations.append(f"lease {lease_id} has no deadline")
        attempts[attempt] = worker
        self.held[lease_id] = HeldLease(lease_id, group_id, worker, attempt)
        return True

    def has_ended(self, lease_id: str) -> None:
        """The worker has told the end of its lease, or is about to."""
        self.operations += 1
        self.said_ended.add(lease_id)
        self.held.pop(lease_id, None)

    def is_revoked(self, lease_id: str, is_foreign: bool) -> None:
        """`is_foreign`: with the words that it is not this worker's, and not as a recall or for want of progress."""
        self.operations += 1
        self.revokes += 1
        lease = self.held.pop(lease_id, None)
        if lease is None or not is_foreign:
            return
        newest = max(self.attempts[lease.group_id])
        if lease.group_id not in self.said_closed and newest <= lease.attempt:
            self.violations.append(
                f"lease {lease_id} of {lease.worker} was revoked, but group {lease.group_id} is open and attempt "
                f"{lease.attempt} is its newest"
            )

    # ---- the learner's side

    def is_offered(self, group_ids: Iterable[str]) -> None:
        self.operations += 1
        self.offered.update(group_ids)

    def is_admitted(self, group_id: str, attempt: int) -> bool:
        """A finished group reached the learner; returns whether it is the first, which alone is trained on."""
        self.operations += 1
        if group_id in self.admitted:
            self.duplicates += 1
            return False
        self.admitted[group_id] = attempt
        if group_id in self.trained:
            self.violations.append(f"group {group_id} was trained twice")
        self.trained.add(group_id)
        return True

    def is_closed(self, group_ids: Iterable[str]) -> None:
        self.operations += 1
        self.said_closed.update(group_ids)

    # ---- judging

    def judge_saved(self, saved: StateSnapshot, away: Collection[PeerId] = ()) -> list[str]:
        """The state that a new process will load, against what was told before the kill. `away`: workers without a stream.

        A lease of theirs may have been taken back after `gone_after_s`, and they cannot have heard of it.
        """
        found = []
        members = {member.peer_id for member in saved.members}
        found += [f"worker {worker} was welcomed and is not in the state" for worker in sorted(self.welcomed - members)]
        leases = {lease.lease_id: lease for lease in saved.leases}
        groups = {group.spec.group_id: group for group in saved.groups}
        for lease in self.held.values():
            if lease.group_id in self.said_closed:
                continue
            kept = leases.get(lease.lease_id)
            if kept is None and lease.worker in away and lease.group_id in groups:
                continue
            if kept is None:
                found.append(f"lease {lease.lease_id} was told to {lease.worker} and is not in the state")
            elif (kept.worker_id, kept.attempt) != (lease.worker, lease.attempt):
                found.append(
                    f"lease {lease.lease_id} was told to {lease.worker} as attempt {lease.attempt}, the state has "
                    f"{kept.worker_id} as attempt {kept.attempt}"
                )
        for group_id, group in groups.items():
            told = self.attempts.get(group_id)
            if told and max(told) > group.attempts:
                found.append(f"attempt {max(told)} at {group_id} was told, the state knows {group.attempts}")
            if group.phase is GroupPhase.LEASED and group.lease_id not in leases:
                found.append(f"group {group_id} is leased under {group.lease_id}, which is not in the state")
        by_group = [lease.group_id for lease in leases.values()]
        found += [
            f"group {group_id} has two leases" for group_id in sorted({g for g in by_group if by_group.count(g) > 1})
        ]
        return found

    def judge(self, saved: StateSnapshot, before_kill: Iterable[str]) -> list[str]:
        """The whole history at the end. `before_kill`: groups that had been offered when a coordinator was killed."""
        found = list(self.violations) + self.judge_saved(saved)
        groups = {group.spec.group_id for group in saved.groups}
        for group_id in sorted(before_kill):
            if group_id not in self.admitted and group_id not in groups:
                found.append(f"group {group_id} was offered before a kill and is neither made nor waiting")
        doubled = [group_id for group_id in groups if group_id in self.said_closed and group_id in self.admitted]
        in_work = {lease.group_id for lease in saved.leases}
        found += [
            f"group {group_id} is admitted and closed and leased again" for group_id in doubled if group_id in in_work
        ]
        return found
