"""Events and actions of the assignments machine (assignments.py): all that can happen to a worker's leases and all
that may have to be done about them. Times are on the clock of `now`.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import EndReason, GroupSpec, Rollout, RolloutSegment, SegmentVerdict
from echo2.worker.engine import GenerateRequest, TokenChunk

# ---- events


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease; granted again under its id, it only gets a new deadline. `deadline` is on the clock of `now`.

    `is_renewal`: the worker held it when this was sent. If it has ended the lease since, that has crossed this.
    """

    lease_id: LeaseId
    group: GroupSpec
    deadline: float
    is_continuation: bool
    is_renewal: bool = False


@dataclass(frozen=True, slots=True)
class PartialsCame:
    """What the learner holds of a group that is continued here."""

    lease_id: LeaseId
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class PartialsRefused:
    """The learner will not give the partial rollouts: it does not know the group, or not this worker's right."""

    lease_id: LeaseId
    message: str


@dataclass(frozen=True, slots=True)
class Sampled:
    chunks: tuple[TokenChunk, ...]


@dataclass(frozen=True, slots=True)
class EngineRefused:
    """The engine will not take a request: the group cannot be made here."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class Judged:
    """The learner's answer to the report under way of one lease."""

    lease_id: LeaseId
    verdicts: tuple[SegmentVerdict, ...]


@dataclass(frozen=True, slots=True)
class ReportRefused:
    """The learner refused a report whole: the ticket or the message is not accepted."""

    lease_id: LeaseId
    message: str


@dataclass(frozen=True, slots=True)
class LearnerCame:
    """A report stream stands. What was under way on an older one is void."""


@dataclass(frozen=True, slots=True)
class LearnerLost:
    pass


@dataclass(frozen=True, slots=True)
class CoordinatorCame:
    report_interval_s: float


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    pass


@dataclass(frozen=True, slots=True)
class Revoked:
    lease_id: LeaseId
    reason: str


@dataclass(frozen=True, slots=True)
class Activated:
    """Whether new leases are wanted from this worker; those held are finished either way."""

    is_active: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Hand everything back within `within_s`, take nothing new."""

    within_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class FinishUp:
    """Take nothing new; what is held is finished first."""


@dataclass(frozen=True, slots=True)
class Live:
    """The engine's version and slots."""

    version: Version
    slot_count: int


@dataclass(frozen=True, slots=True)
class VersionCame:
    """A version is decoded and waits for `LetVersion`."""

    version: Version


@dataclass(frozen=True, slots=True)
class DutyTick:
    """The time that a `WakeAt` asked for has come."""


Event = (
    Granted
    | PartialsCame
    | PartialsRefused
    | Sampled
    | EngineRefused
    | Judged
    | ReportRefused
    | LearnerCame
    | LearnerLost
    | CoordinatorCame
    | CoordinatorLost
    | Revoked
    | Activated
    | Drain
    | FinishUp
    | Live
    | VersionCame
    | DutyTick
)

# ---- actions


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class FetchPartials:
    """Ask until answered: `PartialsCame` or `PartialsRefused`; drop the answer once the lease has ended."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class Report:
    lease_id: LeaseId
    segments: tuple[RolloutSegment, ...]


@dataclass(frozen=True, slots=True)
class EndLease:
    lease_id: LeaseId
    reason: EndReason
    message: str


@dataclass(frozen=True, slots=True)
class TellProgress:
    lease_id: LeaseId
    finished_rollouts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestLeases:
    free_rollouts: int
    version: Version


@dataclass(frozen=True, slots=True)
class RolloutFinished:
    """For the telemetry: a rollout's last token was sampled, `duration_s` after it was begun here."""

    duration_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    """Everything was handed back or given up."""

    unheld_tokens: int


@dataclass(frozen=True, slots=True)
class LetVersion:
    """Nothing that needs the live version is under way any more: the one that waits may go live."""

    version: Version


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a `DutyTick` at `at`; the newest `WakeAt` counts."""

    at: float


Action = (
    Submit
    | Abort
    | FetchPartials
    | Report
    | EndLease
    | TellProgress
    | RequestLeases
    | RolloutFinished
    | Drained
    | LetVersion
    | WakeAt
)
