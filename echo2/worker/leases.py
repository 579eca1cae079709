"""The state machine of a worker's leases: which to request, what to generate, report and hand back.

One door, `Leases.handle(event, now) -> list[Action]`; times are on the clock of `now`. Guarantees: a lease has at most one report
in flight, so each verdict belongs to a known report; new tokens are reported every report interval, a finished rollout after
`finished_delay_s`, so that siblings travel together; the worker holds no more rollouts than keep its slots full while a new lease
travels; a revoke or a drain hands back every token or, past its time limit, only the lease; a group bound to one version
(`exact_version`) has no token of another, and a new version waits for such groups, at most `HOLD_S_MAX`. While the learner is away,
generation continues and finished rollouts wait; while the coordinator is away, only new leases are missing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from echo2.base.ids import LeaseId, Version, warm_groups
from echo2.base.rng import rollout_seed
from echo2.base.rollout import EndReason, FinishReason, GroupSpec, Rollout, RolloutSegment, SegmentVerdict, Verdict
from echo2.base.routing import REPORT_ROUTING_BYTES_MAX
from echo2.worker.demand import Demand
from echo2.worker.engines.engine import GenerateRequest, TokenChunk
from echo2.worker.options import WorkerLimits
from echo2.worker.rollouts import LeasePhase, LeaseWork, PartialRollout, expected_remaining, unheld_tokens

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
class PartialsArrived:
    """The learner's partial rollouts of a group that this worker continues."""

    lease_id: LeaseId
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """The learner refused a lease's partial rollouts or a report of it, or the engine refused a request."""

    lease_id: LeaseId
    message: str


@dataclass(frozen=True, slots=True)
class Sampled:
    chunks: tuple[TokenChunk, ...]


@dataclass(frozen=True, slots=True)
class VerdictsArrived:
    """The learner answered the report in flight of one lease."""

    lease_id: LeaseId
    verdicts: tuple[SegmentVerdict, ...]


@dataclass(frozen=True, slots=True)
class LearnerUp:
    """A report stream is open. Reports in flight on an older stream are void."""


@dataclass(frozen=True, slots=True)
class LearnerDown:
    pass


@dataclass(frozen=True, slots=True)
class CoordinatorUp:
    report_interval_s: float


@dataclass(frozen=True, slots=True)
class CoordinatorDown:
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
class VersionLive:
    """The engine's live version and number of slots."""

    version: Version
    slot_count: int


@dataclass(frozen=True, slots=True)
class VersionArrived:
    """A version has arrived and waits for `AdmitVersion`."""

    version: Version


@dataclass(frozen=True, slots=True)
class WakeUp:
    """The time requested by a `WakeAt` has come."""


Event = (
    Granted
    | PartialsArrived
    | LeaseRefused
    | Sampled
    | VerdictsArrived
    | LearnerUp
    | LearnerDown
    | CoordinatorUp
    | CoordinatorDown
    | Revoked
    | Activated
    | Drain
    | FinishUp
    | VersionLive
    | VersionArrived
    | WakeUp
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
    """Ask the learner until it answers (`PartialsArrived` or `LeaseRefused`); drop the answer once the lease has ended."""

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
class ReportProgress:
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
class AdmitVersion:
    """The waiting version may go live: no lease needs the live one any more."""

    version: Version


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a `WakeUp` at `at`; a newer `WakeAt` replaces it."""

    at: float


Action = (
    Submit
    | Abort
    | FetchPartials
    | Report
    | EndLease
    | ReportProgress
    | RequestLeases
    | RolloutFinished
    | Drained
    | AdmitVersion
    | WakeAt
)


REPORT_TOKENS_MAX = 1 << 16
"""Most tokens in one report, as the wire allows."""
RESEND_PAUSE_S = 0.05  # verdicts of a group come together, so one report answers all of them
LENGTHS_MAX = 256  # of the last rollouts, for the estimate of what a rollout still has to come
VERDICT_GRACE_S = 10.0
"""How long a lease waits for its last verdict, counted from its deadline or from the learner's connection if that came later."""
MARGIN_S_MAX = 2.0
"""A lease is handed back this long before its deadline, or a tenth of its duration if that is less."""
HOLD_S_MAX = 300.0
"""How long a new version waits for leases bound to the live version; then they are handed back."""
EXACT_GRACE_S, TURN_GRACE_S = 1.0, 5.0
"""After the last such lease the version waits this long for further ones, which may be on their way from the coordinator. The
second applies if that lease was a turn or an agent's call: another may follow once the tools have answered."""


def lease_of(request_id: str) -> LeaseId:
    """The lease of a request, whose id is the lease's and the rollout's index."""
    return LeaseId(request_id.rpartition("/")[0])


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A version that waits to go live."""

    version: Version
    since: float


@dataclass(slots=True)
class Leases:
    """The state machine. `report_interval_s`: the coordinator's."""

    limits: WorkerLimits
    report_interval_s: float = 2.0
    _leases: dict[LeaseId, LeaseWork] = field(default_factory=dict)
    _demand: Demand = field(default_factory=Demand)
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=LENGTHS_MAX))
    _learner_since: float | None = None
    _is_coordinator_up: bool = False
    _is_active: bool = True
    _is_leaving: bool = False
    _drain_deadline: float | None = None
    _is_drained: bool = False
    _wake_at: float = 0.0
    _now: float = 0.0
    _waiting: _Waiting | None = None
    _exact_grace_until: float = -math.inf

    # -- read by others

    @property
    def lease_ids(self) -> tuple[LeaseId, ...]:
        return tuple(self._leases)

    def group_of(self, lease_id: LeaseId) -> GroupSpec | None:
        lease = self._leases.get(lease_id)
        return lease.group if lease else None

    @property
    def running_rollouts(self) -> int:
        return sum(lease.running for lease in self._leases.values())

    @property
    def is_running(self) -> bool:
        """Whether the engine has work or will get some."""
        return any(lease.is_running for lease in self._leases.values())

    @property
    def exact_leases(self) -> list[LeaseWork]:
        """The leases whose group may contain tokens of one version only."""
        return [lease for lease in self._leases.values() if lease.group.exact_version is not None]

    @property
    def unheld_tokens(self) -> int:
        """Number of tokens that the learner does not hold yet: the loss if this worker died now."""
        return sum(unheld_tokens(tuple(lease.rollouts.values())) for lease in self._leases.values())

    # -- the door

    def handle(self, event: Event, now: float) -> list[Action]:
        self._now = now
        actions = list(self._on(event, now))
        # By far the commonest event is tokens that end no rollout: nothing follows from it before the requested wake-up.
        if actions or now >= self._wake_at or not isinstance(event, Sampled):
            actions += self._follow_up(now)
        return actions

    def _on(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case Granted():
                yield from self._granted(event, now)
            case PartialsArrived(lease_id, rollouts):
                yield from self._resumed(lease_id, rollouts, now)
            case LeaseRefused(lease_id, message):
                # REFUSED, so that the coordinator pauses before it tries the group again.
                yield from self._ended(lease_id, EndReason.REFUSED, message)
            case Sampled(chunks):
                for chunk in chunks:
                    yield from self._sampled(chunk, now)
            case VerdictsArrived(lease_id, verdicts):
                yield from self._judged(lease_id, verdicts, now)
            case LearnerUp():
                self._learner_since = now
                self._void_reports(now)
            case LearnerDown():
                self._learner_since = None
                self._void_reports(now)
            case CoordinatorUp(report_interval_s):
                self._is_coordinator_up = True
                self.report_interval_s = report_interval_s
                self._demand.forget_request()
            case CoordinatorDown():
                self._is_coordinator_up = False
            case Revoked(lease_id, reason):
                yield from self._hand_back(lease_id, reason, now)
            case Activated(is_active):
                self._is_active = is_active
            case FinishUp():
                self._is_leaving = True
            case Drain(within_s, reason):
                self._is_leaving = True
                self._drain_deadline = now + within_s
                for lease_id in list(self._leases):
                    yield from self._hand_back(lease_id, reason, now)
            case VersionLive(version, slot_count):
                self._demand.live(version, slot_count)
                for lease in self.exact_leases:
                    if lease.group.exact_version != version:
                        yield from self._hand_back(lease.lease_id, f"version {version} is live now", now)
            case VersionArrived(version):
                self._waiting = _Waiting(version, now)
            case WakeUp():
                pass

    # -- leases

    def _granted(self, grant: Granted, now: float) -> Iterator[Action]:
        known = self._leases.get(grant.lease_id)
        if known is not None:
            known.deadline = grant.deadline
            return
        if grant.is_renewal:
            return  # ended here meanwhile; the coordinator has not heard of it yet
        self._demand.granted(grant.group.rollout_count, now)
        if self._is_leaving:
            yield EndLease(grant.lease_id, EndReason.HANDED_BACK, "this worker is draining")
            return
        if len(self._leases) >= self.limits.leases_max:
            message = f"this worker holds {len(self._leases)} leases, its limit"
            yield EndLease(grant.lease_id, EndReason.HANDED_BACK, message)
            return
        group = grant.group
        if group.exact_version not in (None, self._demand.version):
            message = f"it is for version {group.exact_version}, the live one is {self._demand.version}"
            yield EndLease(grant.lease_id, EndReason.HANDED_BACK, message)
            return
        lease = LeaseWork(
            lease_id=grant.lease_id,
            group=group,
            deadline=grant.deadline,
            margin_s=min(MARGIN_S_MAX, max(0.0, grant.deadline - now) / 10),
            phase=LeasePhase.FETCHING if grant.is_continuation else LeasePhase.RUNNING,
            rollouts={i: PartialRollout(group.group_id, i, now) for i in range(group.rollout_count)},
            report_due=now + self.report_interval_s,
        )
        self._leases[grant.lease_id] = lease
        if grant.is_continuation:
            yield FetchPartials(grant.lease_id)
        else:
            yield from self._submitted(lease)

    def _resumed(self, lease_id: LeaseId, rollouts: tuple[Rollout, ...], now: float) -> Iterator[Action]:
        lease = self._leases.get(lease_id)
        if lease is None or lease.phase is not LeasePhase.FETCHING:
            return
        for partial in rollouts:
            rollout = lease.rollouts.get(partial.index)
            if rollout is None or partial.group_id != lease.group.group_id:
                message = (
                    f"partial rollout {partial.index} of group {partial.group_id}: expected group "
                    f"{lease.group.group_id} and an index below {lease.group.rollout_count}"
                )
                yield from self._ended(lease_id, EndReason.REFUSED, message)
                return
            rollout.resume(partial, lease.group.sampling)
            rollout.started_at = now
        lease.phase = LeasePhase.RUNNING
        yield from self._submitted(lease)

    def _submitted(self, lease: LeaseWork) -> Iterator[Action]:
        group = lease.group
        for index, rollout in lease.rollouts.items():
            if not rollout.is_stopped:
                yield Submit(
                    GenerateRequest(
                        request_id=f"{lease.lease_id}/{index}",
                        prompt_token_ids=group.prompt_token_ids,
                        token_ids=tuple(rollout.token_ids),
                        sampling=replace(group.sampling, seed=rollout_seed(group.sampling.seed, index)),
                        prefix_key=group.group_id,
                    )
                )

    def _aborts(self, lease: LeaseWork) -> Iterator[Action]:
        for index, rollout in lease.rollouts.items():
            if not rollout.is_stopped:
                yield Abort(f"{lease.lease_id}/{index}")

    def _hand_back(self, lease_id: LeaseId, reason: str, now: float) -> Iterator[Action]:
        lease = self._leases.get(lease_id)
        if lease is None or lease.phase is LeasePhase.HANDING_BACK:
            return
        if lease.phase is LeasePhase.FETCHING:
            yield from self._ended(lease_id, EndReason.HANDED_BACK, reason)
            return
        lease.phase = LeasePhase.HANDING_BACK
        lease.end_message = reason
        lease.report_due = now
        yield from self._aborts(lease)

    def _ended(self, lease_id: LeaseId, reason: EndReason, message: str) -> Iterator[Action]:
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            if lease.group.exact_version is not None:
                grace_s = TURN_GRACE_S if warm_groups(lease.group.group_id) else EXACT_GRACE_S
                self._exact_grace_until = max(self._exact_grace_until, self._now + grace_s)
            yield from self._aborts(lease)
            yield EndLease(lease_id, reason, message)

    # -- tokens

    def _sampled(self, chunk: TokenChunk, now: float) -> Iterator[Action]:
        lease = self._leases.get(lease_of(chunk.request_id))
        if lease is None:
            return  # ended meanwhile; its sequences were aborted
        rollout = lease.rollouts[int(chunk.request_id.rpartition("/")[2])]
        was_ended = rollout.is_ended
        if rollout.is_settled or was_ended:
            return  # the engine continued past a stop string before the abort reached it
        if lease.group.exact_version not in (None, chunk.version):  # the engine swapped before the abort reached it
            chunk = TokenChunk(chunk.request_id, (), (), (), chunk.version, FinishReason.ABORTED)
        ended = rollout.up_to_stop(chunk, lease.group.sampling)
        rollout.append(ended)
        if ended is not chunk and chunk.finish_reason is FinishReason.UNFINISHED:
            yield Abort(chunk.request_id)
        if lease.phase is LeasePhase.HANDING_BACK:
            lease.report_due = self._wake_at = now
        if rollout.is_ended:
            self._lengths.append(len(rollout.token_ids))
            self._demand.finished(now)
            lease.report_due = min(lease.report_due, now + self.limits.finished_delay_s)
            yield RolloutFinished(now - rollout.started_at)

    def _judged(self, lease_id: LeaseId, verdicts: tuple[SegmentVerdict, ...], now: float) -> Iterator[Action]:
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        lease.is_reporting = False
        for verdict in verdicts:
            rollout = lease.rollouts.get(verdict.index)
            if rollout is None or verdict.group_id != lease.group.group_id:
                continue
            if verdict.verdict is Verdict.CLOSED:
                yield from self._ended(lease_id, EndReason.FINISHED, verdict.message or "the group is closed")
                return
            if verdict.verdict is Verdict.REFUSED:
                yield from self._ended(lease_id, EndReason.REFUSED, verdict.message)
                return
            rollout.judge(verdict)
            if verdict.verdict is Verdict.RESEND:
                lease.report_due = min(lease.report_due, now + RESEND_PAUSE_S)
            if rollout.is_settled and not rollout.is_stopped:
                rollout.is_stopped = True
                yield Abort(f"{lease_id}/{verdict.index}")
        if lease.has_finished_news or lease.phase is LeasePhase.HANDING_BACK:
            lease.report_due = min(lease.report_due, now + RESEND_PAUSE_S)
        yield ReportProgress(
            lease_id,
            sum(1 for rollout in lease.rollouts.values() if rollout.is_ended),
            sum(len(rollout.token_ids) for rollout in lease.rollouts.values()),
        )

    def _void_reports(self, now: float) -> None:
        # Only verdicts count tokens as held, so whatever was in flight is simply sent again.
        for lease in self._leases.values():
            lease.is_reporting = False
            if lease.has_finished_news or lease.phase is LeasePhase.HANDING_BACK:
                lease.report_due = now

    def _news(self, lease: LeaseWork) -> Iterator[RolloutSegment]:
        room, routing_room = REPORT_TOKENS_MAX, REPORT_ROUTING_BYTES_MAX
        siblings = [len(r.token_ids) for r in lease.rollouts.values() if r.is_ended]
        # Finished rollouts first: the learner waits for them.
        for rollout in sorted(lease.rollouts.values(), key=lambda r: not r.is_ended):
            if rollout.row_bytes:
                room = min(room, routing_room // rollout.row_bytes)
            if not rollout.has_news or room <= 0:
                continue
            guess = 0
            if not rollout.is_ended:
                limit = lease.group.sampling.max_new_tokens
                guess = expected_remaining(len(rollout.token_ids), limit, siblings, self._lengths)
            segment = rollout.news(room, guess)
            room -= len(segment.token_ids)
            routing_room -= len(segment.routing.tokens) + len(segment.routing.prompt)
            yield segment

    # -- after every event

    def _follow_up(self, now: float) -> Iterator[Action]:
        for lease in list(self._leases.values()):
            yield from self._check_end(lease, now)
        yield from self._drained(now)
        yield from self._admit_version(now)
        if self._learner_since is not None:
            yield from self._reports(now)
        if self._is_coordinator_up:
            request = self._demand.request(self.running_rollouts, self._is_willing(), now)
            if request is not None:
                yield RequestLeases(*request)
        self._wake_at = self._next_time(now)
        if self._wake_at < math.inf:
            yield WakeAt(self._wake_at)

    def _check_end(self, lease: LeaseWork, now: float) -> Iterator[Action]:
        if lease.is_settled:
            yield from self._ended(lease.lease_id, EndReason.FINISHED, "")
        elif lease.phase is LeasePhase.HANDING_BACK and not lease.is_reporting and lease.is_handed_back:
            yield from self._ended(lease.lease_id, EndReason.HANDED_BACK, lease.end_message)
        elif now >= self._verdict_deadline(lease):
            yield from self._ended(lease.lease_id, EndReason.HANDED_BACK, "its deadline has passed")
        elif now >= lease.deadline - lease.margin_s:
            yield from self._hand_back(lease.lease_id, "its deadline is near", now)

    def _admit_version(self, now: float) -> Iterator[Action]:
        """Lets the waiting version go live once no lease needs the live one, or after `HOLD_S_MAX`."""
        if self._waiting is None or now < self._admission_at(self._waiting):
            return
        for lease in self.exact_leases:
            yield from self._hand_back(lease.lease_id, f"version {self._waiting.version} has waited long enough", now)
        yield AdmitVersion(self._waiting.version)
        self._waiting = None

    def _admission_at(self, waiting: _Waiting) -> float:
        latest = waiting.since + HOLD_S_MAX
        return latest if self.exact_leases else min(latest, self._exact_grace_until)

    def _verdict_deadline(self, lease: LeaseWork) -> float:
        if self._learner_since is None:
            return math.inf
        return max(lease.deadline, self._learner_since) + VERDICT_GRACE_S

    def _drained(self, now: float) -> Iterator[Action]:
        if not self._is_leaving or self._is_drained:
            return
        lost = 0
        if self._drain_deadline is not None and now >= self._drain_deadline:
            lost = self.unheld_tokens
            for lease_id in list(self._leases):
                yield from self._ended(lease_id, EndReason.HANDED_BACK, "the drain ran out of time")
        if not self._leases:
            self._is_drained = True
            yield Drained(lost)

    def _reports(self, now: float) -> Iterator[Action]:
        for lease in self._leases.values():
            if lease.is_reporting or now < lease.report_due:
                continue
            segments = tuple(self._news(lease))
            if segments:
                lease.is_reporting = True
                yield Report(lease.lease_id, segments)
            lease.report_due = now + self.report_interval_s

    def _is_willing(self) -> bool:
        return (
            self._is_active
            and not self._is_leaving
            and len(self._leases) < self.limits.leases_max
            and self.unheld_tokens < self.limits.unheld_tokens_max
        )

    def _next_time(self, now: float) -> float:
        times = [math.inf]
        for lease in self._leases.values():
            if lease.phase is not LeasePhase.HANDING_BACK:
                times.append(lease.deadline - lease.margin_s)
            else:
                times.append(self._verdict_deadline(lease))
            if self._learner_since is not None and not lease.is_reporting:
                times.append(lease.report_due)
        if self._waiting is not None:
            times.append(self._admission_at(self._waiting))
        if self._drain_deadline is not None and not self._is_drained:
            times.append(self._drain_deadline)
        repeat_at = self._demand.repeat_at()
        if self._is_coordinator_up and repeat_at is not None:
            times.append(repeat_at)
        return max(now, min(times))
