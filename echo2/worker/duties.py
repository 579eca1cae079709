"""Events and actions of the assignments machine (assignments.py). Times are on the clock of `now`."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import EndReason, GroupSpec, Rollout, RolloutSegment, SegmentVerdict
from echo2.worker.engine import GenerateRequest, TokenChunk

# ---- events


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease was granted. A second grant under the same id only sets a new deadline.

    `is_renewal`: the worker held the lease when the coordinator sent this. If the lease has ended here since, the two messages
    crossed.
    """

    lease_id: LeaseId
    group: GroupSpec
    deadline: float
    is_continuation: bool
    is_renewal: bool = False


@dataclass(frozen=True, slots=True)
class PartialsCame:
    """The learner's partial rollouts of a group that this worker continues."""

    lease_id: LeaseId
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class PartialsRefused:
    """The learner refused the partial rollouts: it does not know the group, or does not accept this worker's ticket."""

    lease_id: LeaseId
    message: str


@dataclass(frozen=True, slots=True)
class Sampled:
    chunks: tuple[TokenChunk, ...]


@dataclass(frozen=True, slots=True)
class EngineRefused:
    """The engine refused a request: this worker cannot generate the group."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class Judged:
    """The learner answered the report in flight of one lease."""

    lease_id: LeaseId
    verdicts: tuple[SegmentVerdict, ...]


@dataclass(frozen=True, slots=True)
class ReportRefused:
    """The learner refused a whole report: it does not accept the ticket or the message."""

    lease_id: LeaseId
    message: str


@dataclass(frozen=True, slots=True)
class LearnerCame:
    """A report stream is open. Reports in flight on an older stream are void."""


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
    """Whether this worker may request leases; it finishes those it holds either way."""

    is_active: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Hand all leases back within `within_s` and take no new ones."""

    within_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class FinishUp:
    """Finish the leases held and take no new ones."""


@dataclass(frozen=True, slots=True)
class Live:
    """The engine's live version and number of slots."""

    version: Version
    slot_count: int


@dataclass(frozen=True, slots=True)
class VersionCame:
    """A version has arrived and waits for `LetVersion`."""

    version: Version


@dataclass(frozen=True, slots=True)
class DutyTick:
    """The time requested by a `WakeAt` has come."""


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
    """Ask the learner until it answers (`PartialsCame` or `PartialsRefused`); drop the answer once the lease has ended."""

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
    """For telemetry: a rollout's last token was sampled, `duration_s` after this worker started on it."""

    duration_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    """All leases were handed back or given up. `unheld_tokens`: tokens lost because the learner did not hold them."""

    unheld_tokens: int


@dataclass(frozen=True, slots=True)
class LetVersion:
    """The waiting version may go live: no lease needs the live one any more."""

    version: Version


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a `DutyTick` at `at`; a newer `WakeAt` replaces it."""

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
