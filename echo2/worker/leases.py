"""The state machine of a worker's leases: which to request, what to generate, report and hand back; and how fast it generates.

Its methods are named after what happens; each ends with what follows from it, through three ports. Guarantees: a lease has at
most one report in flight; new tokens are reported every report interval, a finished rollout after `finished_delay_s`; the worker
holds no more rollouts than keep its slots full while a new lease travels; a revoke or a drain hands back every token or, past its
time limit, only the lease; a group bound to one version has no token of another, and a new version waits for such groups, at most
`HOLD_S_MAX`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from echo2.base.clock import Clock
from echo2.base.ids import LeaseId, Version, warm_groups
from echo2.base.rng import rollout_seed
from echo2.base.rollout import (
    REPORT_ROUTING_BYTES_MAX,
    EndReason,
    FinishReason,
    GroupSpec,
    Rollout,
    SegmentVerdict,
    Verdict,
)  # fmt: skip
from echo2.worker.engines.engine import GenerateRequest, TokenChunk
from echo2.worker.rollouts import LeasePhase, LeaseWork, PartialRollout, expected_remaining

# How fast a worker generates, over a sliding window of busy time, and how many more rollouts it requests: enough to keep its slots
# full, and no more.
#
# A lease takes a while to arrive, and slots become free meanwhile. So the target is slots + cover, where cover is the number of
# rollouts that finish while a lease travels, rounded up to whole groups because leases are whole groups. A request states a level
# (rollouts wanted now), not an addition: it is sent when the level differs from what the coordinator believes, and repeated every
# `REPEAT_S`. Guarantees: requests at most slots + cover + one group, with cover <= slots; rates are per second in which the engine
# had something to decode, so a worker without leases does not look slow; the window and the sample of durations are bounded.

WINDOW_S = 20.0  # evens out single steps; a change of load is seen whole after as long
BUCKET_S = 0.5  # 40 marks a window
DURATIONS_MAX = 256  # 12 of them lie above the 95th percentile
BUSY_S_MIN = 0.05  # one or two steps of a large model; a rate over less is noise
REPEAT_S = 5.0  # so long at most a lost request leaves slots idle
SAFETY = 1.5  # half as many again as finish at the mean rate: a free slot costs more than a waiting rollout
FINISHES_KEPT = 64  # the rate of the last groups, not of a day
TRAVELS_KEPT = 8  # the least of the last few: one slow answer is no travel time


@dataclass(slots=True)
class Demand:
    """`group_size`: rollouts in the last group granted, the best estimate for the next."""

    slot_count: int = 0
    version: Version | None = None
    group_size: int = 1
    _believed: int = 0
    _believed_version: Version | None = None
    _asked_at: float = -math.inf
    _awaits_grant_since: float | None = None
    _finishes: deque[float] = field(default_factory=lambda: deque(maxlen=FINISHES_KEPT))
    _travels: deque[float] = field(default_factory=lambda: deque(maxlen=TRAVELS_KEPT))

    def live(self, version: Version, slot_count: int) -> None:
        self.version = version
        self.slot_count = slot_count

    def finished(self, now: float) -> None:
        self._finishes.append(now)

    def granted(self, rollout_count: int, now: float) -> None:
        self.group_size = rollout_count
        self._believed = max(0, self._believed - rollout_count)
        if self._awaits_grant_since is not None:
            self._travels.append(now - self._awaits_grant_since)
            self._awaits_grant_since = None

    def forget_request(self) -> None:
        """Forgets the last request: after a reconnect or restart the coordinator does not know it."""
        self._believed = 0

    def cover(self) -> int:
        """Rollouts that finish while a lease travels. Uses the shortest recent travel time: in longer ones the coordinator mostly
        had no work."""
        span = self._finishes[-1] - self._finishes[0] if self._finishes and self._travels else 0.0
        if span <= 0:
            return 0
        rate = (len(self._finishes) - 1) / span
        return min(self.slot_count, math.ceil(SAFETY * rate * min(self._travels)))

    def request(self, held: int, is_willing: bool, now: float) -> tuple[int, Version] | None:
        """The request to send now, if any: the level and the live version. `held`: rollouts running or waiting for a slot."""
        if self.version is None:
            return None
        missing = max(0, self.slot_count + self.cover() - held) if is_willing else 0
        level = math.ceil(missing / self.group_size) * self.group_size
        is_news = level != self._believed or (level > 0 and self.version != self._believed_version)
        is_old = level > 0 and now >= self._asked_at + REPEAT_S
        if not is_news and not is_old:
            return None
        if level > self._believed:
            self._awaits_grant_since = now
        self._believed = level
        self._believed_version = self.version
        self._asked_at = now
        return level, self.version

    def repeat_at(self) -> float:
        """When to repeat a standing request; infinity if there is none."""
        return math.inf if self._believed <= 0 else self._asked_at + REPEAT_S


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per busy second of the window. `rollout_s_*`: seconds from a rollout's start on this worker to its last token, over
    recent rollouts."""

    tokens_per_s: float
    rollouts_per_s: float
    rollout_s_mean: float
    rollout_s_p95: float


@dataclass(slots=True)
class RateWindow:
    """Counts tokens and finished rollouts as they come. The caller reports through `busy` when the engine has work."""

    sampled_tokens: int = 0
    finished_rollouts: int = 0
    _busy_s: float = 0.0
    _busy_since: float | None = None
    # Times, with the tokens, rollouts and busy seconds until then; the window begins with the first.
    _marks: deque[tuple[float, int, int, float]] = field(default_factory=deque)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=DURATIONS_MAX))
    _last: Rates = Rates(0.0, 0.0, 0.0, 0.0)

    def sampled(self, tokens: int, now: float) -> None:
        self._mark(now)
        self.sampled_tokens += tokens

    def finished(self, duration_s: float, now: float) -> None:
        self._mark(now)
        self.finished_rollouts += 1
        self._durations.append(duration_s)

    def declare(self, tokens_per_s: float) -> None:
        """Sets the rate measured before the first lease; it holds until leases give measured rates."""
        self._last = Rates(tokens_per_s, 0.0, 0.0, 0.0)

    def busy(self, is_busy: bool, now: float) -> None:
        self._mark(now, is_busy != (self._busy_since is not None))
        self._busy_since = now if is_busy else None

    def rates(self, now: float) -> Rates:
        """Rates over the window; the last known ones while the window holds less than `BUSY_S_MIN` of busy time."""
        self._mark(now)
        _, tokens, rollouts, before_s = self._marks[0]
        busy_s, durations = self._busy_s - before_s, sorted(self._durations)
        if busy_s >= BUSY_S_MIN:
            self._last = Rates(
                tokens_per_s=(self.sampled_tokens - tokens) / busy_s,
                rollouts_per_s=(self.finished_rollouts - rollouts) / busy_s,
                rollout_s_mean=sum(durations) / len(durations) if durations else 0.0,
                rollout_s_p95=durations[min(len(durations) - 1, int(0.95 * len(durations)))] if durations else 0.0,
            )
        return self._last

    def _mark(self, now: float, is_change: bool = False) -> None:
        """Adds up the busy time until now, and moves the window's beginning."""
        if self._busy_since is not None:
            self._busy_s += max(0.0, now - self._busy_since)
            self._busy_since = now
        if is_change or not self._marks or now >= self._marks[-1][0] + BUCKET_S:
            self._marks.append((now, self.sampled_tokens, self.finished_rollouts, self._busy_s))
        while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_S:
            self._marks.popleft()


LEASES_MAX = 1024
UNHELD_TOKENS_MAX = 1 << 22  # tokens the learner does not hold yet; above this no lease is requested
FINISHED_DELAY_S = 0.02  # a finished rollout waits this long so that siblings share its report
REPORT_TOKENS_MAX = 1 << 16  # most tokens in one report, as the wire allows
RESEND_PAUSE_S = 0.05  # verdicts of a group come together, so one report answers all of them
LENGTHS_MAX = 256  # of the last rollouts, for the estimate of what a rollout still has to come
VERDICT_GRACE_S = 10.0
"""How long a lease waits for its last verdict, counted from its deadline or from the learner's connection if that came later."""
MARGIN_S_MAX = 2.0  # a lease is handed back this long before its deadline, or a tenth of its duration if that is less
HOLD_S_MAX = 300.0  # how long a new version waits for leases bound to the live version; then they are handed back
EXACT_GRACE_S, TURN_GRACE_S = 1.0, 5.0
"""After the last such lease the version waits this long for further ones, which may be on their way from the coordinator. The
second applies if that lease was a turn or an agent's call: another may follow once the tools have answered."""
_log = logging.getLogger("echo2.worker")


class LearnerPort(Protocol):
    def report(self, lease_id: LeaseId, segments: tuple[Rollout, ...]) -> None: ...

    def fetch_partials(self, lease_id: LeaseId) -> None:
        """Asks the learner until it answers (`on_partials` or `refuse`); drops the answer once the lease has ended."""
        ...

    def forget(self, lease_id: LeaseId) -> None: ...


class CoordinatorPort(Protocol):
    """The session with the coordinator; does nothing while there is none."""

    def end_lease(self, lease_id: LeaseId, reason: EndReason, message: str) -> None: ...

    def report_progress(self, lease_id: LeaseId, finished_rollouts: int, tokens: int) -> None: ...

    def request_leases(self, free_rollouts: int, version: Version) -> None: ...


class GenerationPort(Protocol):
    """The engine, the clock's alarm and those who wait for the leases."""

    def submit(self, request: GenerateRequest) -> str:
        """Queues a sequence; returns why the engine refuses it; empty: it does not."""
        ...

    def abort(self, request_id: str) -> None: ...

    def admit_version(self) -> None:
        """The version that waits (`on_version_arrived`) may go live: no lease needs the live one any more."""
        ...

    def on_drained(self, unheld_tokens: int) -> None:
        """All leases were handed back or given up. `unheld_tokens`: lost, because the learner did not hold them."""
        ...

    def wake_at(self, at: float) -> None:
        """Calls `Leases.wake` at that time; replaces the last such wish."""
        ...


class Leases:
    """One per worker. `report_interval_s`: the coordinator's. No port calls a method before it returns."""

    def __init__(
        self, clock: Clock, learner: LearnerPort, coordinator: CoordinatorPort, generation: GenerationPort
    ) -> None:
        self.rates = RateWindow()
        self.report_interval_s = 2.0
        self._clock = clock
        self._learner, self._coordinator, self._generation = learner, coordinator, generation
        self._leases: dict[LeaseId, LeaseWork] = {}
        self._demand = Demand()
        self._lengths: deque[int] = deque(maxlen=LENGTHS_MAX)
        self._learner_since: float | None = None
        self._is_coordinator_up, self._is_active = False, True
        self._is_leaving, self._drain_deadline, self._is_drained = False, math.inf, False
        self._wake_at = 0.0
        self._waiting_since: float | None = None  # of a version that waits to go live
        self._exact_grace_until = -math.inf

    # -- read by others

    @property
    def lease_ids(self) -> tuple[LeaseId, ...]:
        return tuple(self._leases)

    @property
    def open_requests(self) -> list[str]:
        """Requests that the engine has, and whose last chunk has not come."""
        has = (lease for lease in self._leases.values() if lease.phase is not LeasePhase.FETCHING)
        return [f"{lease.lease_id}/{i}" for lease in has for i, r in lease.rollouts.items() if not r.is_stopped]

    @property
    def is_running(self) -> bool:
        """Whether the engine has work or will get some."""
        return any(not r.is_over for lease in self._leases.values() for r in lease.rollouts.values())

    @property
    def exact_leases(self) -> list[LeaseWork]:
        """The leases whose group may contain tokens of one version only."""
        return [lease for lease in self._leases.values() if lease.group.exact_version is not None]

    @property
    def unheld_tokens(self) -> int:
        """Number of tokens that the learner does not hold yet: the loss if this worker died now."""
        return sum(lease.unheld_tokens for lease in self._leases.values())

    # -- the coordinator

    def on_coordinator(self, report_interval_s: float) -> None:
        self._is_coordinator_up, self.report_interval_s = True, report_interval_s
        self._demand.forget_request()
        self._follow_up()

    def on_coordinator_lost(self) -> None:
        self._is_coordinator_up = False
        self._follow_up()

    def grant(self, lease_id: LeaseId, group: GroupSpec, deadline: float, *, is_continuation: bool) -> None:
        """A lease was granted. A second grant under the same id only sets a new deadline."""
        now, known = self._clock.now(), self._leases.get(lease_id)
        if known is not None:
            known.deadline = deadline
            self._follow_up()
            return
        self._demand.granted(group.rollout_count, now)
        if message := self._why_not(group):
            self._coordinator.end_lease(lease_id, EndReason.HANDED_BACK, message)
            self._learner.forget(lease_id)
            self._follow_up()
            return
        lease = self._leases[lease_id] = LeaseWork(
            lease_id=lease_id,
            group=group,
            deadline=deadline,
            margin_s=min(MARGIN_S_MAX, max(0.0, deadline - now) / 10),
            phase=LeasePhase.FETCHING if is_continuation else LeasePhase.RUNNING,
            rollouts={i: PartialRollout(group.group_id, i, now) for i in range(group.rollout_count)},
            report_due=now + self.report_interval_s,
        )
        if is_continuation:
            self._learner.fetch_partials(lease_id)
        else:
            self._submit(lease)
        self._follow_up()

    def _why_not(self, group: GroupSpec) -> str:
        """Why a new lease is handed back at once; empty: it is not."""
        if self._is_leaving:
            return "this worker is draining"
        if len(self._leases) >= LEASES_MAX:
            return f"this worker holds {len(self._leases)} leases, its limit"
        if group.exact_version not in (None, self._demand.version):
            return f"it is for version {group.exact_version}, the live one is {self._demand.version}"
        return ""

    def _submit(self, lease: LeaseWork) -> None:
        group = lease.group
        for index, rollout in lease.rollouts.items():
            if rollout.is_stopped:
                continue
            request = GenerateRequest(
                request_id=f"{lease.lease_id}/{index}",
                prompt_token_ids=group.prompt_token_ids,
                token_ids=tuple(rollout.token_ids),
                sampling=replace(group.sampling, seed=rollout_seed(group.sampling.seed, index)),
                prefix_key=group.group_id,
            )
            if refusal := self._generation.submit(request):
                self._end(lease, EndReason.REFUSED, refusal)
                return

    def revoke(self, lease_id: LeaseId, reason: str) -> None:
        """Hands a lease back with every token."""
        if lease_id in self._leases:
            self._hand_back(self._leases[lease_id], reason)
        self._follow_up()

    def activate(self, is_active: bool) -> None:
        """Whether this worker may request leases; it finishes those it holds either way."""
        self._is_active = is_active
        self._follow_up()

    # -- the learner

    def on_learner(self) -> None:
        """A report stream is open. Reports in flight on an older stream are void."""
        self._learner_since = self._clock.now()
        self._void_reports()
        self._follow_up()

    def on_learner_lost(self) -> None:
        self._learner_since = None
        self._void_reports()
        self._follow_up()

    def on_another_learner(self) -> None:
        """A learner with a new folder has the run now: its groups have the names of those before, and other prompts."""
        for lease in list(self._leases.values()):
            self._end(lease, EndReason.HANDED_BACK, "its learner is gone, another has come")
        self._follow_up()

    def refuse(self, lease_id: LeaseId, message: str) -> None:
        """The learner refused a lease's partial rollouts or a report of it."""
        if lease_id in self._leases:
            # REFUSED, so that the coordinator pauses before it tries the group again.
            self._end(self._leases[lease_id], EndReason.REFUSED, message)
        self._follow_up()

    def on_partials(self, lease_id: LeaseId, rollouts: Sequence[Rollout]) -> None:
        """The learner's partial rollouts of a group that this worker continues."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.phase is LeasePhase.FETCHING:
            self._resume(lease, rollouts)
        self._follow_up()

    def _resume(self, lease: LeaseWork, rollouts: Sequence[Rollout]) -> None:
        group = lease.group
        for partial in rollouts:
            rollout = lease.rollouts.get(partial.index)
            if rollout is None or partial.group_id != group.group_id:
                expected = f"expected group {group.group_id} and an index below {group.rollout_count}"
                message = f"partial rollout {partial.index} of group {partial.group_id}: {expected}"
                self._end(lease, EndReason.REFUSED, message)
                return
            rollout.resume(partial, group.sampling)
            rollout.started_at = self._clock.now()  # the learner may have let it wait
        lease.phase = LeasePhase.RUNNING
        self._submit(lease)

    def on_verdicts(self, lease_id: LeaseId, verdicts: Sequence[SegmentVerdict]) -> None:
        """The learner answered the report in flight of one lease."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._judge(lease, verdicts)
        self._follow_up()

    def _judge(self, lease: LeaseWork, verdicts: Sequence[SegmentVerdict]) -> None:
        soon = self._clock.now() + RESEND_PAUSE_S
        lease.is_reporting = False
        for verdict in verdicts:
            rollout = lease.rollouts.get(verdict.index)
            if rollout is None or verdict.group_id != lease.group.group_id:
                continue
            if verdict.verdict is Verdict.CLOSED:
                self._end(lease, EndReason.FINISHED, verdict.message or "the group is closed")
                return
            if verdict.verdict is Verdict.REFUSED:
                self._end(lease, EndReason.REFUSED, verdict.message)
                return
            rollout.judge(verdict)
            if verdict.verdict is Verdict.RESEND:
                lease.report_due = min(lease.report_due, soon)
            if rollout.is_settled and not rollout.is_stopped:
                rollout.is_stopped = True
                self._generation.abort(f"{lease.lease_id}/{verdict.index}")
        if lease.has_finished_news or lease.phase is LeasePhase.HANDING_BACK:
            lease.report_due = min(lease.report_due, soon)
        rollouts = lease.rollouts.values()
        tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        self._coordinator.report_progress(lease.lease_id, sum(rollout.is_ended for rollout in rollouts), tokens)

    def _void_reports(self) -> None:
        # Only verdicts count tokens as held, so whatever was in flight is simply sent again.
        for lease in self._leases.values():
            lease.is_reporting = False
            if lease.has_finished_news or lease.phase is LeasePhase.HANDING_BACK:
                lease.report_due = self._clock.now()

    # -- the engine

    def on_tokens(self, chunks: Sequence[TokenChunk]) -> None:
        now = self._clock.now()
        self.rates.sampled(sum(len(chunk.token_ids) for chunk in chunks), now)
        has_news = [self._take(chunk) for chunk in chunks]
        # Mostly these are tokens that end no rollout: nothing follows from them before the requested wake-up.
        if any(has_news) or now >= self._wake_at:
            self._follow_up()

    def _take(self, chunk: TokenChunk) -> bool:
        """Keeps one sequence's tokens; returns whether something follows at once."""
        lease_id, _, index = chunk.request_id.rpartition("/")
        now, lease = self._clock.now(), self._leases.get(LeaseId(lease_id))
        if lease is None:
            return False  # ended meanwhile; its sequences were aborted
        rollout = lease.rollouts[int(index)]
        if rollout.is_settled or rollout.finish_reason is not FinishReason.UNFINISHED:
            return False  # the engine continued past a stop string before the abort reached it
        ended = rollout.up_to_stop(chunk, lease.group.sampling)
        if lease.group.exact_version not in (None, chunk.version):  # the engine swapped before the abort reached it
            ended = TokenChunk(chunk.request_id, (), (), (), chunk.version, FinishReason.ABORTED)
        rollout.append(ended)
        if ended is not chunk:
            self._generation.abort(chunk.request_id)
        is_handing_back = lease.phase is LeasePhase.HANDING_BACK
        if is_handing_back:
            lease.report_due = now
        if rollout.is_ended:
            self._lengths.append(len(rollout.token_ids))
            self._demand.finished(now)
            self.rates.finished(now - rollout.started_at, now)
            lease.report_due = min(lease.report_due, now + FINISHED_DELAY_S)
        return is_handing_back or rollout.is_ended

    def on_version_arrived(self) -> None:
        """A version has arrived and waits for `admit_version`."""
        self._waiting_since = self._clock.now()
        self._follow_up()

    def on_version_live(self, version: Version, slot_count: int) -> None:
        """The engine's live version and number of slots."""
        self._demand.live(version, slot_count)
        for lease in self.exact_leases:
            if lease.group.exact_version != version:
                self._hand_back(lease, f"version {version} is live now")
        self._follow_up()

    # -- the end

    def finish_up(self) -> None:
        """Finishes the leases held and takes no new ones."""
        self._is_leaving = True
        self._follow_up()

    def drain(self, within_s: float, reason: str) -> None:
        """Hands all leases back within `within_s` and takes no new ones."""
        self._is_leaving, self._drain_deadline = True, self._clock.now() + within_s
        for lease in list(self._leases.values()):
            self._hand_back(lease, reason)
        self._follow_up()

    def wake(self) -> None:
        self._follow_up()

    def _hand_back(self, lease: LeaseWork, reason: str) -> None:
        if lease.phase is LeasePhase.FETCHING:
            self._end(lease, EndReason.HANDED_BACK, reason)
        elif lease.phase is LeasePhase.RUNNING:
            lease.phase, lease.end_message, lease.report_due = LeasePhase.HANDING_BACK, reason, self._clock.now()
            self._abort(lease)

    def _end(self, lease: LeaseWork, reason: EndReason, message: str) -> None:
        del self._leases[lease.lease_id]
        if lease.group.exact_version is not None:
            grace_s = TURN_GRACE_S if warm_groups(lease.group.group_id) else EXACT_GRACE_S
            self._exact_grace_until = max(self._exact_grace_until, self._clock.now() + grace_s)
        self._abort(lease)
        level = logging.WARNING if reason is EndReason.REFUSED else logging.DEBUG
        _log.log(level, "lease %s: %s%s", lease.lease_id, reason.value, f" ({message})" if message else "")
        self._coordinator.end_lease(lease.lease_id, reason, message)
        self._learner.forget(lease.lease_id)

    def _abort(self, lease: LeaseWork) -> None:
        for index, rollout in lease.rollouts.items():
            if not rollout.is_stopped:
                self._generation.abort(f"{lease.lease_id}/{index}")

    # -- what follows

    def _follow_up(self) -> None:
        now = self._clock.now()
        for lease in list(self._leases.values()):
            self._check_end(lease, now)
        self._check_drained(now)
        self._admit_version(now)
        if self._learner_since is not None:
            self._report(now)
        if self._is_coordinator_up:
            running = sum(not r.is_over for lease in self._leases.values() for r in lease.rollouts.values())
            has_room = len(self._leases) < LEASES_MAX and self.unheld_tokens < UNHELD_TOKENS_MAX
            request = self._demand.request(running, self._is_active and not self._is_leaving and has_room, now)
            if request is not None:
                self._coordinator.request_leases(*request)
        self.rates.busy(self.is_running, now)
        self._wake_at = self._next_time()
        if self._wake_at < math.inf:
            self._generation.wake_at(self._wake_at)

    def _check_end(self, lease: LeaseWork, now: float) -> None:
        if lease.is_settled:
            self._end(lease, EndReason.FINISHED, "")
        elif lease.phase is LeasePhase.HANDING_BACK and not lease.is_reporting and lease.is_handed_back:
            self._end(lease, EndReason.HANDED_BACK, lease.end_message)
        elif now >= self._verdict_deadline(lease):
            self._end(lease, EndReason.HANDED_BACK, "its deadline has passed")
        elif now >= lease.deadline - lease.margin_s:
            self._hand_back(lease, "its deadline is near")

    def _admit_version(self, now: float) -> None:
        """Lets the waiting version go live once no lease needs the live one, or after `HOLD_S_MAX`."""
        if now < self._admission_at():
            return
        for lease in self.exact_leases:
            self._hand_back(lease, "a new version has waited long enough")
        self._waiting_since = None
        self._generation.admit_version()

    def _admission_at(self) -> float:
        if self._waiting_since is None:
            return math.inf
        latest = self._waiting_since + HOLD_S_MAX
        return latest if self.exact_leases else min(latest, self._exact_grace_until)

    def _verdict_deadline(self, lease: LeaseWork) -> float:
        if self._learner_since is None:
            return math.inf
        return max(lease.deadline, self._learner_since) + VERDICT_GRACE_S

    def _check_drained(self, now: float) -> None:
        if not self._is_leaving or self._is_drained:
            return
        lost = 0
        if now >= self._drain_deadline:
            lost = self.unheld_tokens
            for lease in list(self._leases.values()):
                self._end(lease, EndReason.HANDED_BACK, "the drain ran out of time")
        if not self._leases:
            self._is_drained = True
            self._generation.on_drained(lost)

    def _report(self, now: float) -> None:
        for lease in self._leases.values():
            if lease.is_reporting or now < lease.report_due:
                continue
            segments = self._news(lease)
            if segments:
                lease.is_reporting = True
                self._learner.report(lease.lease_id, segments)
            lease.report_due = now + self.report_interval_s

    def _news(self, lease: LeaseWork) -> tuple[Rollout, ...]:
        """What the learner does not hold yet, as much as one report takes."""
        room, routing_room = REPORT_TOKENS_MAX, REPORT_ROUTING_BYTES_MAX
        siblings = [len(r.token_ids) for r in lease.rollouts.values() if r.is_ended]
        segments = []
        # Finished rollouts first: the learner waits for them.
        for rollout in sorted(lease.rollouts.values(), key=lambda r: not r.is_ended):
            if rollout.row_bytes:
                room = min(room, routing_room // rollout.row_bytes)
            if not rollout.has_news or room <= 0:
                continue
            limit = lease.group.sampling.max_new_tokens
            segment = rollout.news(room, expected_remaining(len(rollout.token_ids), limit, siblings, self._lengths))
            room -= len(segment.token_ids)
            routing_room -= len(segment.routing.tokens) + len(segment.routing.prompt)
            segments.append(segment)
        return tuple(segments)

    def _next_time(self) -> float:
        times = [self._admission_at()]
        for lease in self._leases.values():
            is_handing_back = lease.phase is LeasePhase.HANDING_BACK
            times.append(self._verdict_deadline(lease) if is_handing_back else lease.deadline - lease.margin_s)
            if self._learner_since is not None and not lease.is_reporting:
                times.append(lease.report_due)
        if not self._is_drained:
            times.append(self._drain_deadline)
        if self._is_coordinator_up:
            times.append(self._demand.repeat_at())
        return min(times)
