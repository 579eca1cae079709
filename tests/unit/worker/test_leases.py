"""A worker's leases against a model engine, learner and coordinator, with streams that break at any moment; what it requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2.base.ids import GroupId, LeaseId, Version
from echo2.base.rollout import (
    EndReason,
    FinishReason,
    GroupSpec,
    Rollout,
    RolloutSegment,
    SamplingParams,
    SegmentVerdict,
    Verdict,
    Work,
    spans_of,
)
from echo2.wire import rollout as wire
from echo2.worker.demand import REPEAT_S, Demand, RateWindow
from echo2.worker.engines.engine import GenerateRequest, TokenChunk
from echo2.worker.leases import EXACT_GRACE_S, HOLD_S_MAX, REPORT_TOKENS_MAX, TURN_GRACE_S, VERDICT_GRACE_S, Leases
from echo2.worker.options import WorkerLimits
from echo2.worker.rollouts import SEGMENT_TOKENS_MAX

STOP = 9
LIMITS = WorkerLimits(leases_max=6, drain_s=2.0)
L1, L2 = LeaseId("l1"), LeaseId("l2")


def group(name: str, count: int = 2, tokens_max: int = 6) -> GroupSpec:
    sampling = SamplingParams(max_new_tokens=tokens_max, stop_token_ids=(STOP,))
    return GroupSpec(GroupId(name), (1, 2), count, sampling, 5)


def evaluation(name: str, version: int) -> GroupSpec:
    sampling = group(name).sampling
    return GroupSpec(GroupId(name), (1, 2), 1, sampling, version, Work.EVALUATE, Version(version))


def held(name: str, index: int, tokens: tuple[int, ...], reason: FinishReason = FinishReason.UNFINISHED) -> Rollout:
    """A partial rollout as the learner hands it out."""
    numbers = (-0.5,) * len(tokens)
    return Rollout(GroupId(name), index, tokens, numbers, numbers, spans_of([Version(0)] * len(tokens)), reason)


@dataclass
class Surroundings:
    """The leases' ports. The engine samples what it is told to; the learner holds tokens without gaps and never changes them."""

    limits: WorkerLimits = LIMITS
    time: float = 0.0
    running: dict[str, GenerateRequest] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    chunks: list[TokenChunk] = field(default_factory=list)
    reports: dict[LeaseId, tuple[RolloutSegment, ...]] = field(default_factory=dict)  # in flight
    fetching: list[LeaseId] = field(default_factory=list)
    ended: dict[LeaseId, tuple[EndReason, str]] = field(default_factory=dict)
    requests: list[int] = field(default_factory=list)
    admitted: int = 0
    drained: int | None = None
    wake: float = 0.0
    held: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finished: set[tuple[str, int]] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.leases = Leases(self.limits, self, self, self, self)

    def now(self) -> float:
        return self.time

    # -- the ports

    def submit(self, request: GenerateRequest) -> str:
        assert request.request_id not in self.sampled, "a request id is used once"
        self.running[request.request_id] = request
        self.sampled[request.request_id] = list(request.token_ids)
        return ""

    def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.chunks.append(TokenChunk(request_id, (), (), (), Version(0), FinishReason.ABORTED))

    def report(self, lease_id: LeaseId, segments: tuple[RolloutSegment, ...]) -> None:
        assert lease_id not in self.reports, "one report of a lease at a time"
        assert sum(len(segment.token_ids) for segment in segments) <= REPORT_TOKENS_MAX
        self.reports[lease_id] = segments

    def fetch_partials(self, lease_id: LeaseId) -> None:
        self.fetching.append(lease_id)

    def forget(self, lease_id: LeaseId) -> None:
        self.reports.pop(lease_id, None)

    def end_lease(self, lease_id: LeaseId, reason: EndReason, message: str) -> None:
        assert lease_id not in self.ended, "a lease ends once"
        self.ended[lease_id] = reason, message

    def report_progress(self, lease_id: LeaseId, finished_rollouts: int, tokens: int) -> None:
        pass

    def request_leases(self, free_rollouts: int, version: Version) -> None:
        self.requests.append(free_rollouts)

    def admit_version(self) -> None:
        self.admitted += 1

    def on_drained(self, unheld_tokens: int) -> None:
        self.drained = unheld_tokens

    def wake_at(self, at: float) -> None:
        assert at >= self.time
        self.wake = at

    # -- levers

    def begin(self, slots: int = 8, version: int = 3, *, has_learner: bool = True) -> Surroundings:
        self.leases.on_coordinator(1.0)
        if has_learner:
            self.leases.on_learner()
        self.leases.on_version_live(Version(version), slots)
        return self

    def grant(
        self, lease_id: LeaseId, spec: GroupSpec, deadline: float = 1e6, *, is_continuation: bool = False
    ) -> None:
        self.leases.grant(lease_id, spec, deadline, is_continuation=is_continuation)

    def step(self, request_id: str, *tokens: int, version: int = 3) -> None:
        """The engine samples these tokens of a request."""
        sampled, sampling = self.sampled[request_id], self.running[request_id].sampling
        sampled += tokens
        is_full, reason = len(sampled) >= sampling.max_new_tokens, FinishReason.UNFINISHED
        if tokens[-1] in sampling.stop_token_ids or is_full:
            reason = FinishReason.LENGTH if tokens[-1] not in sampling.stop_token_ids else FinishReason.STOP
            del self.running[request_id]
        numbers = (-0.5,) * len(tokens)
        self.chunks.append(TokenChunk(request_id, tokens, numbers, numbers, Version(version), reason))

    def deliver(self) -> None:
        chunks, self.chunks = tuple(self.chunks), []
        self.leases.on_tokens(chunks)

    def sample(self, request_id: str, *tokens: int, version: int = 3) -> None:
        self.step(request_id, *tokens, version=version)
        self.deliver()

    def at(self, time: float) -> None:
        self.time = time
        self.leases.wake()
        self.deliver()

    def judge(self, lease_id: LeaseId, *, is_lost: bool = False) -> None:
        verdicts = [self._judged(segment) for segment in self.reports.pop(lease_id)]
        if not is_lost:
            self.leases.on_verdicts(lease_id, verdicts)

    def _judged(self, segment: RolloutSegment) -> SegmentVerdict:
        key = (segment.group_id, segment.index)
        tokens, verdict = self.held.setdefault(key, []), Verdict.HELD
        if segment.group_id in self.closed:
            verdict = Verdict.CLOSED
        elif key in self.finished:
            verdict = Verdict.DUPLICATE
        elif segment.offset > len(tokens):
            verdict = Verdict.RESEND
        else:
            overlap = len(tokens) - segment.offset
            assert tuple(tokens[segment.offset : segment.end]) == segment.token_ids[:overlap], (
                "held tokens never change"
            )
            tokens.extend(segment.token_ids[overlap:])
            if segment.is_final:
                self.finished.add(key)
                verdict = Verdict.ADMITTED
        return SegmentVerdict(segment.group_id, segment.index, verdict, len(tokens))

    def partials(self, name: str) -> list[Rollout]:
        return [
            held(
                of, index, tuple(tokens), FinishReason.STOP if (of, index) in self.finished else FinishReason.UNFINISHED
            )
            for (of, index), tokens in self.held.items()
            if of == name
        ]


class LeaseRules(RuleBasedStateMachine):
    """Grants, tokens, verdicts, losses and closings in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.it = Surroundings().begin(4, 0)
        self.granted = 0

    @rule(is_continued=st.booleans(), count=st.integers(1, 3), lasts_s=st.floats(0.5, 30))
    def grant(self, is_continued: bool, count: int, lasts_s: float) -> None:
        self.granted += 1
        name = f"g{self.granted}"
        if is_continued:
            self.it.held[(name, 0)] = [3] * (self.granted % 4)
        lease_id, deadline = LeaseId(f"l{self.granted}"), self.it.time + lasts_s
        self.it.grant(lease_id, group(name, count), deadline, is_continuation=is_continued)

    @precondition(lambda self: self.it.fetching)
    @rule(is_refused=st.booleans())
    def answer_fetch(self, is_refused: bool) -> None:
        lease_id = self.it.fetching.pop(0)
        if is_refused:
            self.it.leases.refuse(lease_id, "not known")
        else:
            self.it.leases.on_partials(lease_id, self.it.partials("g" + lease_id[1:]))

    @precondition(lambda self: self.it.running)
    @rule(data=st.data(), token=st.sampled_from([3, 4, STOP]), version=st.integers(0, 3))
    def sample(self, data: st.DataObject, token: int, version: int) -> None:
        self.it.step(data.draw(st.sampled_from(sorted(self.it.running))), token, version=version)

    @rule()
    def deliver(self) -> None:
        self.it.deliver()

    @precondition(lambda self: self.it.reports)
    @rule(is_lost=st.booleans())
    def judge(self, is_lost: bool) -> None:
        self.it.judge(next(iter(self.it.reports)), is_lost=is_lost)
        if is_lost:  # the learner took it, the answer is lost with the stream
            self.learner(False)
            self.learner(True)

    @rule(is_here=st.booleans())
    def learner(self, is_here: bool) -> None:
        self.it.reports.clear()
        (self.it.leases.on_learner if is_here else self.it.leases.on_learner_lost)()

    @rule(is_here=st.booleans())
    def coordinator(self, is_here: bool) -> None:
        if is_here:
            self.it.leases.on_coordinator(1.0)
        else:
            self.it.leases.on_coordinator_lost()

    @rule()
    def restart_of_the_learner_forgets_partials(self) -> None:
        self.learner(False)
        self.it.held = {key: tokens for key, tokens in self.it.held.items() if key in self.it.finished}
        while self.it.fetching:
            self.answer_fetch(True)
        self.learner(True)

    @precondition(lambda self: self.it.leases.lease_ids)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        self.it.leases.revoke(data.draw(st.sampled_from(self.it.leases.lease_ids)), "rebalanced")

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.it.closed.add(f"g{data.draw(st.integers(1, self.granted))}")

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.it.time += seconds
        if self.it.time >= self.it.wake:
            self.it.leases.wake()

    @invariant()
    def the_learner_holds_a_prefix_of_what_was_sampled(self) -> None:
        for request_id, tokens in self.it.sampled.items():
            lease_id, _, index = request_id.rpartition("/")
            known = self.it.held.get(("g" + lease_id[1:], int(index)), [])
            assert tokens[: len(known)] == known

    @invariant()
    def an_ended_lease_leaves_nothing_in_the_engine_and_no_more_is_requested_than_fits(self) -> None:
        assert {LeaseId(name.rpartition("/")[0]) for name in self.it.running} <= set(self.it.leases.lease_ids)
        assert all(0 <= count <= 4 + 4 + 3 for count in self.it.requests), "slots, cover and a group"

    def teardown(self) -> None:
        """Once nothing fails any more, every lease ends, and one that finished left all its tokens with the learner."""
        self.it.leases.on_coordinator(1.0)
        self.learner(True)
        for _ in range(200):
            while self.it.fetching:
                self.answer_fetch(is_refused=False)
            for request_id in sorted(self.it.running):
                self.it.step(request_id, STOP)
            self.it.deliver()
            while self.it.reports:
                self.judge(is_lost=False)
            if not self.it.leases.lease_ids:
                break
            self.it.at(max(self.it.time, self.it.wake))
        assert not self.it.leases.lease_ids and len(self.it.ended) == self.granted
        for lease_id, (reason, _) in self.it.ended.items():
            name = "g" + lease_id[1:]
            if reason is EndReason.FINISHED and name not in self.it.closed:
                for request_id, tokens in self.it.sampled.items():
                    if request_id.startswith(f"{lease_id}/"):
                        key = (name, int(request_id.rpartition("/")[2]))
                        assert key in self.it.finished and self.it.held[key] == tokens


TestLeases = LeaseRules.TestCase
TestLeases.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_finished_rollout_is_reported_at_once_a_growing_one_every_interval_and_the_group_ends_its_lease() -> None:
    it = Surroundings().begin()
    it.grant(L1, group("g1", 1))
    it.sample("l1/0", 3)
    assert not it.reports
    it.at(1.0)
    (segment,) = it.reports[L1]
    assert segment.token_ids == (3,) and segment.expected_remaining_tokens >= 1
    it.judge(L1)
    it.time = 1.1
    it.sample("l1/0", STOP, version=4)
    assert not it.reports and it.wake == pytest.approx(1.1 + LIMITS.finished_delay_s)
    it.at(it.wake)
    (segment,) = it.reports[L1]
    assert (segment.offset, segment.token_ids, segment.finish_reason) == (1, (STOP,), FinishReason.STOP)
    assert segment.version_spans == spans_of([Version(4)])
    it.judge(L1)
    assert it.ended == {L1: (EndReason.FINISHED, "")}


@given(gaps_s=st.lists(st.floats(0.01, 0.7), min_size=5, max_size=60))
def test_a_worker_killed_at_any_moment_costs_at_most_one_report_interval_of_tokens(gaps_s: list[float]) -> None:
    it = Surroundings().begin()
    it.grant(L1, group("g1", 2, 1 << 20))
    sampled_at: list[float] = []
    for number, gap_s in enumerate(gaps_s):
        until = it.time + gap_s
        while it.wake <= until:
            it.at(it.wake)
            if L1 in it.reports:
                it.judge(L1)
        it.time = until
        it.sample(f"l1/{number % 2}", 3)
        sampled_at.append(until)
        safe = sum(at <= until - it.leases.report_interval_s for at in sampled_at)
        assert sum(map(len, it.held.values())) >= safe, "held by the learner, so another worker goes on behind them"


def test_what_finishes_while_the_learner_is_away_outlives_its_lease_until_the_learner_has_judged_it() -> None:
    it = Surroundings().begin(has_learner=False)
    it.grant(L1, group("g1", 1), 10.0)
    it.sample("l1/0", STOP)
    it.at(1000.0)
    assert not it.ended and not it.reports and it.leases.unheld_tokens == 1
    it.leases.on_learner()
    assert it.reports[L1][0].is_final
    it.judge(L1)
    assert it.ended == {L1: (EndReason.FINISHED, "")}


def test_a_lease_near_its_deadline_is_handed_back_with_its_tokens() -> None:
    it = Surroundings().begin()
    it.grant(L1, group("g1", 1), 10.0)
    it.sample("l1/0", 3)
    it.at(9.0)
    assert not it.running and it.reports[L1][0].token_ids == (3,)
    it.at(10.0 + VERDICT_GRACE_S)
    assert it.ended == {L1: (EndReason.HANDED_BACK, "its deadline has passed")}


def test_a_drain_hands_back_every_token_and_then_says_so() -> None:
    it = Surroundings().begin()
    it.grant(L1, group("g1"))
    it.sample("l1/0", 3)
    it.leases.drain(2.0, "preempted")
    it.deliver()
    assert not it.running and it.reports[L1][0].token_ids == (3,) and it.drained is None
    it.judge(L1)
    assert it.ended == {L1: (EndReason.HANDED_BACK, "preempted")} and it.drained == 0
    it.grant(L2, group("g2"))
    assert it.ended[L2] == (EndReason.HANDED_BACK, "this worker is draining")


def test_a_drain_without_a_learner_ends_in_time_and_counts_what_is_lost() -> None:
    it = Surroundings().begin(has_learner=False)
    it.grant(L1, group("g1", 1))
    it.sample("l1/0", 3)
    it.leases.drain(2.0, "preempted")
    assert it.wake == 2.0 and it.drained is None
    it.at(2.0)
    assert it.drained == 1


def test_a_worker_that_finishes_up_takes_nothing_new_and_ends_with_the_last_rollout() -> None:
    it = Surroundings().begin()
    it.grant(L1, group("g1", 1))
    it.leases.finish_up()
    assert it.running and it.drained is None and it.requests[-1] == 0
    it.grant(L2, group("g2"))
    assert it.ended[L2][0] is EndReason.HANDED_BACK
    it.sample("l1/0", STOP)
    it.at(1.0)
    it.judge(L1)
    assert it.drained == 0


def test_a_closed_group_is_stopped_and_a_stale_rollout_alone() -> None:
    it = Surroundings().begin()
    for number in "12":
        it.grant(LeaseId(f"l{number}"), group(f"g{number}"))
    it.leases.on_verdicts(L1, [SegmentVerdict(GroupId("g1"), 0, Verdict.CLOSED, 0)])
    assert set(it.running) == {"l2/0", "l2/1"}
    it.leases.on_verdicts(L2, [SegmentVerdict(GroupId("g2"), 0, Verdict.STALE, 0)])
    assert set(it.running) == {"l2/1"} and it.leases.lease_ids == (L2,)


def test_a_request_that_the_engine_refuses_costs_its_lease() -> None:
    it = Surroundings().begin()
    it.submit = lambda request: "too long"  # type: ignore[method-assign]
    it.grant(L1, group("g1"))
    assert it.ended == {L1: (EndReason.REFUSED, "too long")} and not it.leases.lease_ids


def test_a_continuation_goes_on_behind_the_tokens_that_the_learner_holds() -> None:
    it = Surroundings().begin()
    it.grant(L1, group("g1", 4), is_continuation=True)
    assert it.fetching == [L1] and not it.running
    lost_end = held("g1", 2, (3, STOP))
    it.leases.on_partials(L1, [held("g1", 0, (3, 4)), held("g1", 1, (3, STOP), FinishReason.STOP), lost_end])
    assert {name: request.token_ids for name, request in it.running.items()} == {"l1/0": (3, 4), "l1/3": ()}
    it.at(1.0)
    (segment,) = it.reports[L1]
    assert (segment.index, segment.offset, segment.finish_reason) == (2, 2, FinishReason.STOP)


@pytest.mark.parametrize("count", [1, SEGMENT_TOKENS_MAX + 1, 3 * REPORT_TOKENS_MAX])
def test_a_long_rollout_is_reported_in_bounded_segments(count: int) -> None:
    assert SEGMENT_TOKENS_MAX <= wire.SEGMENT_TOKENS_MAX and REPORT_TOKENS_MAX <= wire.REPORT_TOKENS_MAX
    it = Surroundings().begin()
    it.grant(L1, group("g1", 1, 1 << 20))
    it.sample("l1/0", *(3,) * (count - 1), STOP)
    for second in range(1, 50):
        it.at(float(second))
        if L1 in it.reports:
            (segment,) = it.reports[L1]
            assert len(segment.token_ids) <= SEGMENT_TOKENS_MAX
            it.judge(L1)
    assert it.held[("g1", 0)] == it.sampled["l1/0"] and not it.leases.lease_ids


@pytest.mark.parametrize(("name", "grace_s"), [("e1", EXACT_GRACE_S), ("x1.0.1", TURN_GRACE_S)])
def test_a_version_waits_for_what_only_the_one_before_may_sample(name: str, grace_s: float) -> None:
    """Also for more of it on its way, and longer for an agent's next call: its tools may run for seconds between two."""
    it = Surroundings().begin()
    it.grant(L1, evaluation(name, 3))
    it.grant(L2, group("g2", 1))
    it.leases.on_version_arrived()
    it.time = 1.0
    it.sample("l1/0", STOP)
    it.at(1.1)
    it.judge(L1)
    it.at(1.0 + grace_s)
    assert not it.admitted
    it.at(1.1 + grace_s)
    assert it.admitted == 1 and it.leases.lease_ids == (L2,)
    it.leases.on_version_arrived()
    assert it.admitted == 2, "at once where nothing needs the one before"


def test_what_holds_a_version_up_too_long_is_handed_back_without_a_token_of_another_version() -> None:
    it = Surroundings().begin()
    it.grant(L1, evaluation("e1", 3))
    it.sample("l1/0", 5)
    it.leases.on_version_arrived()
    it.at(HOLD_S_MAX - 1)
    it.judge(L1)
    assert not it.admitted
    it.step("l1/0", 6, version=4)  # on its way while the lease is given back
    it.at(HOLD_S_MAX)
    assert it.admitted == 1 and it.held[("e1", 0)] == [5]
    assert it.ended[L1][0] is EndReason.HANDED_BACK


def test_an_evaluation_of_another_version_is_given_back_at_once() -> None:
    it = Surroundings().begin()
    it.grant(L1, evaluation("e1", 2))
    assert it.ended == {L1: (EndReason.HANDED_BACK, "it is for version 2, the live one is 3")}
    it.grant(L2, evaluation("e2", 3))
    it.leases.on_version_live(Version(4), 8)
    assert not it.running


# ---- what is requested


def test_slots_are_requested_in_whole_groups_and_nothing_while_too_many_tokens_wait_for_the_learner() -> None:
    it = Surroundings(replace(LIMITS, unheld_tokens_max=3)).begin(5, has_learner=False)
    assert it.requests == [5]
    it.grant(L1, group("g1"))
    assert it.requests == [5, 4], "three slots are free: two groups of two"
    it.sample("l1/0", 3, 3, STOP)
    assert it.requests[-1] == 0


def test_a_standing_request_is_repeated_in_time_renewed_by_a_version_and_taken_back() -> None:
    demand = Demand()
    assert demand.request(0, True, 0.0) is None  # no weights yet
    demand.live(Version(1), 4)
    assert demand.request(0, True, 0.0) == (4, Version(1))
    assert demand.request(0, True, 1.0) is None and demand.repeat_at() == REPEAT_S
    assert demand.request(0, True, REPEAT_S) == (4, Version(1))
    demand.live(Version(2), 4)
    assert demand.request(0, True, 5.1) == (4, Version(2)), "it may open newer groups"
    assert demand.request(0, False, 5.2) == (0, Version(2)) and demand.request(0, False, 100.0) is None


def test_slots_that_fall_free_while_a_lease_travels_are_requested_ahead() -> None:
    demand = Demand()
    demand.live(Version(1), 8)
    demand.request(0, True, 0.0)
    demand.granted(1, 0.5)  # a lease travels half a second
    for i in range(20):
        demand.finished(i * 0.25)  # four rollouts a second
    assert demand.cover() == 3 == demand.level(8, True)


@given(
    slots=st.integers(1, 64),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=60),
    finishing=st.lists(st.integers(0, 8), min_size=1, max_size=60),
)
def test_slots_are_full_after_each_answer_and_never_overfilled_by_more_than_cover_and_a_group(
    slots: int, sizes: list[int], finishing: list[int]
) -> None:
    demand = Demand()
    demand.live(Version(1), slots)
    running, now = 0, 0.0
    for size, ended in zip(sizes, finishing, strict=False):
        now += 0.1
        for _ in range(min(running, ended)):
            running -= 1
            demand.finished(now)
        level = demand.level(running, True)
        demand.request(running, True, now)
        granted = 0
        while granted < level:
            demand.granted(size, now + 0.01)
            granted += size
        running += granted
        assert slots <= running <= 2 * slots + 2 * max(sizes)


@given(rate=st.floats(1, 1000), idle_s=st.floats(0, 100), busy_s=st.floats(1, 15))
def test_rates_are_those_of_busy_time_however_long_the_worker_stood_idle(
    rate: float, idle_s: float, busy_s: float
) -> None:
    window, now, steps = RateWindow(), idle_s, 50
    window.busy(True, now)
    each = round(rate * busy_s / steps)
    for _ in range(steps):
        now += busy_s / steps
        window.sampled(each, now)
        window.busy(True, now)
    assert window.rates(now).tokens_per_s == pytest.approx(steps * each / busy_s, rel=1e-6)
    window.busy(False, now)
    assert window.rates(now + 1000).tokens_per_s == pytest.approx(steps * each / busy_s, rel=1e-6)


def test_old_work_leaves_the_window_and_durations_give_mean_and_tail() -> None:
    window = RateWindow(window_s=10.0)
    window.busy(True, 0.0)
    for second in range(1, 61):
        window.sampled(100 if second <= 30 else 10, float(second))
        window.busy(True, float(second))
    assert window.rates(60.0).tokens_per_s == pytest.approx(10, rel=0.15)
    for i in range(1, 101):
        window.finished(float(i), 60.0)
    rates = window.rates(60.0)
    assert (rates.rollout_s_mean, rates.rollout_s_p95) == (pytest.approx(50.5), 96.0)
