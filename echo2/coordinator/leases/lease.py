"""Leases and groups, and what the lease book (book.py) wants done. Times are unix seconds that never go back within a process."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, Literal, ParamSpec

from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import GroupSpec


def lease_id_of(group_id: GroupId, attempt: int) -> LeaseId:
    """The lease's id: a function of group and attempt, so that a replayed decision names the same lease."""
    return LeaseId("l-" + hashlib.sha256(f"{group_id}/{attempt}".encode()).hexdigest()[:20])


class GroupPhase(enum.Enum):
    """Where a group is: waiting for a worker, with one, or sampled and waiting for the learner to close it."""

    QUEUED = "queued"
    LEASED = "leased"
    PRODUCED = "produced"


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that a worker still works on when it reconnects, taken from its signed ticket. `deadline`: the ticket's."""

    lease_id: LeaseId
    group_id: GroupId
    attempt: int
    deadline: float

    def may_be_adopted(self, group: OpenGroup | None, now: float, lease_timeout_s: float) -> bool:
        """Whether to adopt a lease that is missing from the book because an earlier process granted it just before it died.

        The group must be queued and have had no attempt as late as this one. An old ticket does not win a group back: the lease is
        not adopted once a whole lease timeout has passed since its deadline.
        """
        if (
            group is None
            or group.phase is not GroupPhase.QUEUED
            or self.lease_id != lease_id_of(self.group_id, self.attempt)
        ):
            return False
        return now < self.deadline + lease_timeout_s and self.attempt > group.attempts


@dataclass(slots=True)
class Lease:
    """One attempt at a group. `deadline` moves on while there is progress. `tokens_before`: tokens in a continuation's first
    report, at `measured_from`; earlier attempts had sampled these. Neither is saved."""

    lease_id: LeaseId
    group_id: GroupId
    worker_id: PeerId
    attempt: int
    granted_at: float
    deadline: float
    progress_at: float
    finished_rollouts: int = 0
    tokens: int = 0
    is_recalled: bool = False
    tokens_before: int = 0
    measured_from: float = 0.0


@dataclass(slots=True)
class OpenGroup:
    """A group that the learner wants and has not closed.

    `avoid`: maps workers that must not get it to the time until which that holds. `preferred`: the worker for which it was
    recalled, or that has the previous turn in its KV cache; `waits_until`: until then no other worker gets it. `moves`: how often
    it was recalled for another worker; `made_by`: the worker that claims to have finished it; `last_worker`: holder of its newest
    lease; `confirmed`: a lease, the tokens that the learner held under it, and when it first reported that number. These fields
    are not saved.
    """

    spec: GroupSpec
    phase: GroupPhase
    since: float
    attempts: int = 0
    refusals: int = 0
    lease_id: LeaseId | None = None
    not_before: float = 0.0
    expected_tokens: float = 0.0
    avoid: dict[PeerId, float] = field(default_factory=dict)
    preferred: PeerId | None = None
    waits_until: float = 0.0
    moves: int = 0
    made_by: PeerId | None = None
    last_worker: PeerId | None = None
    confirmed: tuple[LeaseId, int, float] | None = None

    @property
    def is_continuation(self) -> bool:
        return self.attempts > 0


@dataclass(slots=True)
class LeaseRequest:
    free_rollouts: int
    version: Version
    since: float


@dataclass(slots=True)
class LeaseCounts:
    """Counts since the process began."""

    granted: int = 0
    continued: int = 0
    finished: int = 0
    expired: int = 0
    handed_back: int = 0
    refused: int = 0
    revoked: int = 0
    moved: int = 0


@dataclass(frozen=True, slots=True)
class WorkerDelivery:
    """What the learner received from one worker: distinct rollouts that brought tokens in the last seconds, and rollouts admitted
    since the last report."""

    worker_id: PeerId
    heard_rollouts: int
    admitted_rollouts: float


# ---- actions


@dataclass(frozen=True, slots=True)
class Grant:
    """Send the lease with a signed ticket. `is_renewal`: the worker has it already and gets a new deadline."""

    worker_id: PeerId
    lease_id: LeaseId
    attempt: int
    deadline: float
    group: GroupSpec
    is_continuation: bool
    is_renewal: bool


@dataclass(frozen=True, slots=True)
class Revoke:
    worker_id: PeerId
    lease_id: LeaseId
    reason: str


@dataclass(frozen=True, slots=True)
class Save:
    """The group or the lease with this id changed or is gone: save that before anything is sent."""

    kind: Literal["groups", "leases"]
    key: str


@dataclass(frozen=True, slots=True)
class Note:
    kind: str
    text: str


Action = Grant | Revoke | Save | Note

P = ParamSpec("P")
BookMethod = Callable[Concatenate[float, P], list[Action]]
"""A method of the lease book: it takes the time first and returns what is to be done, in order."""
