"""Events and actions of the lease book (lease_book.py). Times are unix seconds that never go back within a process."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field

from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import EndReason, GroupSpec

REFUSAL_PAUSE_S, REFUSAL_PAUSE_S_MAX = 0.25, 30.0


def lease_id_of(group_id: GroupId, attempt: int) -> LeaseId:
    """The lease's name: a function of group and attempt, so that a replayed decision names the same lease."""
    return LeaseId("l-" + hashlib.sha256(f"{group_id}/{attempt}".encode()).hexdigest()[:20])


def refusal_pause_s(refusals: int) -> float:
    """How long a group waits that the learner refused so many times."""
    return float(min(REFUSAL_PAUSE_S_MAX, REFUSAL_PAUSE_S * 2.0 ** min(refusals, 20)))


class GroupPhase(enum.Enum):
    """Where a group is: waiting for a worker, with one, or sampled and waiting for the learner to close it."""

    QUEUED = "queued"
    LEASED = "leased"
    PRODUCED = "produced"


@dataclass(frozen=True, slots=True)
class HeldLease:
    """What a worker still works on when it comes back, by the ticket that was signed for it; `deadline`: of that ticket."""

    lease_id: LeaseId
    group_id: GroupId
    attempt: int
    deadline: float

    def may_be_adopted(self, group: OpenGroup | None, now: float, lease_timeout_s: float) -> bool:
        """A lease granted by an earlier process whose last moments are lost: taken in where nothing contradicts it.

        An old ticket is no way back to a group: it is not adopted once its time is long over.
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
    """One attempt at a group. `deadline` moves on while there is progress. `tokens_before`: what others had
    sampled, as a continuation's first report told at `measured_from`; neither is kept."""

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
    """A group that the learner wants and has not closed. `avoid`: which worker is avoided until when. `preferred`: for
    whom it was recalled, or who has the turn before it in its cache;
    `waits_until`: so long nobody else is given it;
    `moves`: how often; `made_by`: who says that it has made it; `last_worker`: who had its newest
    lease; `confirmed`: under which lease, how many tokens of it the learner had, and when it first said so. These do not
    outlive the process."""

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
class Seeker:
    """A worker that wants rollouts."""

    free_rollouts: int
    version: Version
    since: float


@dataclass(slots=True)
class LeaseCounts:
    """Since the process began."""

    granted: int = 0
    continued: int = 0
    finished: int = 0
    expired: int = 0
    handed_back: int = 0
    refused: int = 0
    revoked: int = 0
    moved: int = 0


# ---- events


@dataclass(frozen=True, slots=True)
class GroupsOffered:
    """`held_tokens`, in a reminder: how much of each group has reached the learner; else empty."""

    groups: tuple[GroupSpec, ...]
    held_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupsSynced:
    """The learner (again) says which groups still need a worker; the book is made to agree."""

    groups: tuple[GroupSpec, ...]


@dataclass(frozen=True, slots=True)
class GroupsClosed:
    group_ids: tuple[GroupId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerCame:
    """A session began, with what the worker still holds."""

    worker_id: PeerId
    held: tuple[HeldLease, ...]


@dataclass(frozen=True, slots=True)
class WorkerAllowed:
    """Whether a worker may be given new leases. Those it holds go on either way."""

    worker_id: PeerId
    is_allowed: bool


@dataclass(frozen=True, slots=True)
class RolloutsWanted:
    """How many more rollouts a worker wants to hold now: a level, not an addition."""

    worker_id: PeerId
    free_rollouts: int
    version: Version


@dataclass(frozen=True, slots=True)
class Rated:
    worker_id: PeerId
    rollouts_per_s: float


@dataclass(frozen=True, slots=True)
class WorkerDelivered:
    """By the learner's word: different rollouts that gave tokens in the last seconds, and rollouts admitted since last told."""

    worker_id: PeerId
    heard_rollouts: int
    admitted_rollouts: float


@dataclass(frozen=True, slots=True)
class Delivered:
    """All workers of which anything was heard; of the others nothing was."""

    workers: tuple[WorkerDelivered, ...]


@dataclass(frozen=True, slots=True)
class Progressed:
    worker_id: PeerId
    lease_id: LeaseId
    finished_rollouts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    worker_id: PeerId
    lease_id: LeaseId
    reason: EndReason
    message: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Gone or banned: its leases go to others."""

    worker_id: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask a worker to hand a lease back, with all its tokens, so that another (`to`, where one is meant) may go on."""

    lease_id: LeaseId
    reason: str
    to: PeerId | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    GroupsOffered
    | GroupsSynced
    | GroupsClosed
    | WorkerCame
    | WorkerAllowed
    | RolloutsWanted
    | Rated
    | Delivered
    | Progressed
    | LeaseEnded
    | WorkerLost
    | Recall
    | Tick
)

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
class SaveGroup:
    """The group changed: keep it before anything is sent."""

    group_id: GroupId


@dataclass(frozen=True, slots=True)
class DropGroup:
    group_id: GroupId


@dataclass(frozen=True, slots=True)
class SaveLease:
    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class DropLease:
    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the event log."""

    kind: str
    text: str


Action = Grant | Revoke | SaveGroup | DropGroup | SaveLease | DropLease | Note
