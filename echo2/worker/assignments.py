"""What a worker works on: leases, their rollouts, what is asked for, reported and handed back.

One door, `Assignments.handle(event, now) -> list[Action]`. Guarantees: at most one report of a lease is under way, so
verdicts need no guessing; new tokens are reported every report interval and a finished rollout at once (in company of
others, `finished_delay_s`); no more rollouts are held than keep the slots full while a new lease travels; a revoke or a
drain gives back every token, or, past its time, the lease alone; a group that one version alone may work on has no token of
another, and a version that has come waits for it, `HOLD_S_MAX` at most. While the learner is away, leases held go on and what
is finished waits; while the coordinator is away, nothing changes but that no new lease comes.
Leaves to others: the clock, the streams, the engine (runtime); which lease to grant (coordinator).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from echo2.base.ids import LeaseId, Version, warm_groups
from echo2.base.noise import rollout_seed
from echo2.base.rollout import EndReason, FinishReason, GroupSpec, Rollout, RolloutSegment, SegmentVerdict, Verdict
from echo2.base.routing import REPORT_ROUTING_BYTES_MAX
from echo2.worker.demand import Demand
from echo2.worker.duties import (
    Abort,
    Action,
    Activated,
    CoordinatorCame,
    CoordinatorLost,
    Drain,
    Drained,
    DutyTick,
    EndLease,
    EngineRefused,
    Event,
    FetchPartials,
    FinishUp,
    Granted,
    Judged,
    LearnerCame,
    LearnerLost,
    LetVersion,
    Live,
    PartialsCame,
    PartialsRefused,
    Report,
    ReportRefused,
    RequestLeases,
    Revoked,
    RolloutFinished,
    Sampled,
    Submit,
    TellProgress,
    VersionCame,
    WakeAt,
)
from echo2.worker.engine import GenerateRequest, TokenChunk
from echo2.worker.lease import LeasePhase, LeaseWork
from echo2.worker.length import expected_remaining
from echo2.worker.options import WorkerLimits
from echo2.worker.partial import PartialRollout, unheld_tokens

REPORT_TOKENS_MAX = 1 << 16
"""Tokens of one report; the wire allows four times as many."""
RESEND_PAUSE_S = 0.05
LENGTHS_MAX = 256
VERDICT_GRACE_S = 10.0
"""After its deadline a lease waits so long for its last verdict, counted from when the learner is there to give it."""
MARGIN_S_MAX = 2.0
"""A lease whose deadline is so near is handed back; short leases keep nine tenths of their time."""
HOLD_S_MAX = 300.0
"""A version waits so long for rollouts that only the one before may sample; then they are handed back."""
EXACT_GRACE_S, TURN_GRACE_S = 1.0, 5.0
"""After the last of those it waits so long for more of them, which are on their way from the coordinator; the second where it was a
turn or an agent's call, behind which another may come once tools have answered."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A version that has come."""

    version: Version
    since: float


@dataclass(slots=True)
class Assignments:
    """The machine. `report_interval_s` is the coordinator's unless `fixed_report_interval_s` is given."""

    limits: WorkerLimits
    fixed_report_interval_s: float = 0.0
    report_interval_s: float = 2.0
    _leases: dict[LeaseId, LeaseWork] = field(default_factory=dict)
    _demand: Demand = field(default_factory=Demand)
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=LENGTHS_MAX))
    _learner_since: float | None = None
    _coordinator_is_here: bool = False
    _is_active: bool = True
    _is_leaving: bool = False
    _drain_deadline: float | None = None
    _is_drained: bool = False
    _wake_at: float = 0.0
    _now: float = 0.0
    _waiting: _Waiting | None = None
    _exact_grace_until: float = -math.inf

    def __post_init__(self) -> None:
        self.report_interval_s = self.fixed_report_interval_s or self.report_interval_s

    # -- what others may look at

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
        """Whether the engine has or will have something to do."""
        return any(lease.is_running for lease in self._leases.values())

    @property
    def exact_leases(self) -> list[LeaseWork]:
        """Those whose group may have tokens of one version alone."""
        return [lease for lease in self._leases.values() if lease.group.exact_version is not None]

    @property
    def unheld_tokens(self) -> int:
        """Tokens that the learner does not hold yet: what a sudden death of this worker would cost."""
        return sum(unheld_tokens(tuple(lease.rollouts.values())) for lease in self._leases.values())

    # -- the door

    def handle(self, event: Event, now: float) -> list[Action]:
        self._now = now
        actions = list(self._on(event, now))
        # Tokens that end nothing change nothing before the next time that was asked for: by far the commonest event.
        if actions or now >= self._wake_at or not isinstance(event, Sampled):
            actions += self._follow_up(now)
        return actions

    def _on(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case Granted():
                yield from self._granted(event, now)
            case PartialsCame(lease_id, rollouts):
                yield from self._resumed(lease_id, rollouts, now)
            case PartialsRefused(lease_id, message) | ReportRefused(lease_id, message):
                yield from self._ended(lease_id, EndReason.REFUSED, message)
            case Sampled(chunks):
                for chunk in chunks:
                    yield from self._sampled(chunk, now)
            case EngineRefused(request_id, message):
                # As a refusal, so that the coordinator pauses before it tries the group again.
                yield from self._ended(LeaseId(request_id.rpartition("/")[0]), EndReason.REFUSED, message)
            case Judged(lease_id, verdicts):
                yield from self._judged(lease_id, verdicts, now)
            case LearnerCame():
                self._learner_since = now
                self._void_reports(now)
            case LearnerLost():
                self._learner_since = None
                self._void_reports(now)
            case CoordinatorCame(report_interval_s):
                self._coordinator_is_here = True
                self.report_interval_s = self.fixed_report_interval_s or report_interval_s
                self._demand.forget_request()
            case CoordinatorLost():
                self._coordinator_is_here = False
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
            case Live(version, slot_count):
                self._demand.live(version, slot_count)
                for lease in self.exact_leases:
                    if lease.group.exact_version != version:
                        yield from self._hand_back(lease.lease_id, f"version {version} is live now", now)
            case VersionCame(version):
                self._waiting = _Waiting(version, now)
            case DutyTick():
                pass

    # -- leases

    def _granted(self, grant: Granted, now: float) -> Iterator[Action]:
        known = self._leases.get(grant.lease_id)
        if known is not None:
            known.deadline = grant.deadline
            return
        if grant.is_renewal:
            return  # ended here meanwhile, which the coordinator is about to hear
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
        lease_id, _, index = chunk.request_id.rpartition("/")
        lease = self._leases.get(LeaseId(lease_id))
        if lease is None:
            return  # ended meanwhile; its sequences were aborted
        rollout = lease.rollouts[int(index)]
        was_ended = rollout.is_ended
        if rollout.is_settled or was_ended:
            return  # the engine ran on behind a stop string, until it heard of it
        if lease.group.exact_version not in (None, chunk.version):  # it ran on while it was being handed back
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
        yield TellProgress(
            lease_id,
            sum(1 for rollout in lease.rollouts.values() if rollout.is_ended),
            sum(len(rollout.token_ids) for rollout in lease.rollouts.values()),
        )

    def _void_reports(self, now: float) -> None:
        # Tokens are counted as held by verdicts only, so what was under way is simply sent again.
        for lease in self._leases.values():
            lease.is_reporting = False
            if lease.has_finished_news or lease.phase is LeasePhase.HANDING_BACK:
                lease.report_due = now

    def _news(self, lease: LeaseWork) -> Iterator[RolloutSegment]:
        room, routing_room = REPORT_TOKENS_MAX, REPORT_ROUTING_BYTES_MAX
        siblings = [len(r.token_ids) for r in lease.rollouts.values() if r.is_ended]
        # Finished rollouts first: others wait for them.
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

    # -- what follows from any event

    def _follow_up(self, now: float) -> Iterator[Action]:
        for lease in list(self._leases.values()):
            yield from self._outlook(lease, now)
        yield from self._drained(now)
        yield from self._let_version(now)
        if self._learner_since is not None:
            yield from self._reports(now)
        if self._coordinator_is_here:
            request = self._demand.request(self.running_rollouts, self._is_willing(), now)
            if request is not None:
                yield RequestLeases(*request)
        self._wake_at = self._next_time(now)
        if self._wake_at < math.inf:
            yield WakeAt(self._wake_at)

    def _outlook(self, lease: LeaseWork, now: float) -> Iterator[Action]:
        if lease.is_settled:
            yield from self._ended(lease.lease_id, EndReason.FINISHED, "")
        elif lease.phase is LeasePhase.HANDING_BACK and not lease.is_reporting and lease.is_handed_back:
            yield from self._ended(lease.lease_id, EndReason.HANDED_BACK, lease.end_message)
        elif now >= self._verdict_deadline(lease):
            yield from self._ended(lease.lease_id, EndReason.HANDED_BACK, "its deadline has passed")
        elif now >= lease.deadline - lease.margin_s:
            yield from self._hand_back(lease.lease_id, "its deadline is near", now)

    def _let_version(self, now: float) -> Iterator[Action]:
        """Lets the version that waits go live, once nothing needs the one before."""
        if self._waiting is None or now < self._may_go_at(self._waiting):
            return
        for lease in self.exact_leases:
            yield from self._hand_back(lease.lease_id, f"version {self._waiting.version} has waited long enough", now)
        yield LetVersion(self._waiting.version)
        self._waiting = None

    def _may_go_at(self, waiting: _Waiting) -> float:
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
            times.append(self._may_go_at(self._waiting))
        if self._drain_deadline is not None and not self._is_drained:
            times.append(self._drain_deadline)
        repeat_at = self._demand.repeat_at()
        if self._coordinator_is_here and repeat_at is not None:
            times.append(repeat_at)
        return max(now, min(times))
