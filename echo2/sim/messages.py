"""What simulated processes send each other: the cores' own values where there are any, the rest here."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.ids import GroupId, LeaseId, PeerId
from echo2.base.rollout import GroupSpec, Rollout, RolloutSegment, SegmentVerdict
from echo2.broadcast import events as be
from echo2.broadcast.events import Route
from echo2.broadcast.manifest import ArtifactKey, Chunk, Header, Seal
from echo2.coordinator.telemetry import LearnerReport


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to report a group, as the coordinator signs it."""

    lease_id: LeaseId
    group_id: GroupId
    worker_id: PeerId
    attempt: int
    deadline_unix_s: float


@dataclass(frozen=True, slots=True)
class Whereabouts:
    peer_id: PeerId
    address: str


@dataclass(frozen=True, slots=True)
class Welcome:
    heartbeat_interval_s: float
    report_interval_s: float
    learner: Whereabouts | None


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    ticket: Ticket
    group: GroupSpec
    is_continuation: bool
    is_renewal: bool


@dataclass(frozen=True, slots=True)
class Activate:
    is_active: bool


@dataclass(frozen=True, slots=True)
class Leaving:
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    message: str


@dataclass(frozen=True, slots=True)
class PlanUpdate:
    kappa: int
    in_flight_cap_rollouts: int


@dataclass(frozen=True, slots=True)
class LearnerBeat:
    """The learner's heartbeat; beside it, for the checkers alone, which groups it holds, and which of them lack rollouts."""

    report: LearnerReport
    held: frozenset[GroupId]
    lacking: frozenset[GroupId]


@dataclass(frozen=True, slots=True)
class Accused:
    """By the learner, with certainty."""

    worker_id: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerReport:
    sequence: int
    ticket: Ticket
    segments: tuple[RolloutSegment, ...]


@dataclass(frozen=True, slots=True)
class ReportVerdict:
    sequence: int
    verdicts: tuple[SegmentVerdict, ...]
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class AskPartials:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Partials:
    lease_id: LeaseId
    rollouts: tuple[Rollout, ...]
    refusal: str = ""


# ---- between broadcast nodes: (payload, what the session needs to know)


@dataclass(frozen=True, slots=True)
class HeaderMessage:
    header: Header


@dataclass(frozen=True, slots=True)
class ChunkMessage:
    chunk: Chunk
    route: Route | None
    is_answer: bool


@dataclass(frozen=True, slots=True)
class SealMessage:
    seal: Seal


@dataclass(frozen=True, slots=True)
class HaveMessage:
    key: ArtifactKey
    bitmap: int
    is_sealed: bool


@dataclass(frozen=True, slots=True)
class RequestMessage:
    key: ArtifactKey
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelMessage:
    key: ArtifactKey
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RelayAckMessage:
    key: ArtifactKey
    index: int
    backlog: int


def of_session(action: be.Action) -> object | None:
    """What a session's action says to a peer, where nothing of the store goes with it."""
    match action:
        case be.SendHave():
            return HaveMessage(action.key, action.bitmap, action.is_sealed)
        case be.SendRequest():
            return RequestMessage(action.key, action.indices)
        case be.SendCancel():
            return CancelMessage(action.key, action.indices)
        case be.SendRelayAck():
            return RelayAckMessage(action.key, action.index, action.backlog)
        case _:
            return None
