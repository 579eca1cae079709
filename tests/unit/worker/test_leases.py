"""The assignments machine against a model engine and a model learner, with streams that break at any moment."""

from __future__ import annotations

import random
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
    SamplingParams,
    SegmentVerdict,
    Verdict,
    Work,
    spans_of,
)
from echo2.wire import rollout as wire
from echo2.worker import leases as d
from echo2.worker import leases as machine
from echo2.worker import rollouts as partial
from echo2.worker.demand import REPEAT_S, Demand
from echo2.worker.engines.engine import TokenChunk
from echo2.worker.leases import Leases
from echo2.worker.options import WorkerLimits

STOP = 9
LIMITS = WorkerLimits(leases_max=6, drain_s=2.0)


def group(name: str, count: int = 2, tokens_max: int = 6) -> GroupSpec:
    sampling = SamplingParams(max_new_tokens=tokens_max, stop_token_ids=(STOP,))
    return GroupSpec(GroupId(name), (1, 2), count, sampling, 5)


@dataclass
class ModelEngine:
    """Samples what it is told to, keeps every token that it ever sampled."""

    running: dict[str, d.Submit] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    out: list[TokenChunk] = field(default_factory=list)

    def submit(self, action: d.Submit) -> None:
        request_id = action.request.request_id
        assert request_id not in self.sampled, "a request id is used once"
        self.running[request_id] = action
        self.sampled[request_id] = list(action.request.token_ids)

    def step(self, request_id: str, token: int, version: int) -> None:
        tokens = self.sampled[request_id]
        tokens.append(token)
        sampling = self.running[request_id].request.sampling
        reason = FinishReason.UNFINISHED
        if token in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif len(tokens) >= sampling.max_new_tokens:
            reason = FinishReason.LENGTH
        self.out.append(TokenChunk(request_id, (token,), (-0.5,), (-0.25,), Version(version), reason))
        if reason is not FinishReason.UNFINISHED:
            del self.running[request_id]

    def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.out.append(TokenChunk(request_id, (), (), (), Version(0), FinishReason.ABORTED))


@dataclass
class ModelLearner:
    """Holds tokens by (group, index) as the real one does: no gaps, no change of what it holds."""

    held: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ended: set[tuple[str, int]] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)

    def judge(self, report: d.Report) -> d.VerdictsArrived:
        return d.VerdictsArrived(report.lease_id, tuple(self._judge(segment) for segment in report.segments))

    def _judge(self, segment: machine.RolloutSegment) -> SegmentVerdict:
        key = (segment.group_id, segment.index)
        tokens = self.held.setdefault(key, [])

        def said(verdict: Verdict) -> SegmentVerdict:
            return SegmentVerdict(segment.group_id, segment.index, verdict, len(tokens))

        if segment.group_id in self.closed:
            return said(Verdict.CLOSED)
        if key in self.ended:
            return said(Verdict.DUPLICATE)
        if segment.offset > len(tokens):
            return said(Verdict.RESEND)
        overlap = len(tokens) - segment.offset
        assert tuple(tokens[segment.offset : segment.end]) == segment.token_ids[:overlap], "tokens held never change"
        tokens.extend(segment.token_ids[overlap:])
        if segment.is_final:
            self.ended.add(key)
            return said(Verdict.ADMITTED)
        return said(Verdict.HELD)

    def partials(self, group_id: str) -> tuple[Rollout, ...]:
        found = []
        for (name, index), tokens in self.held.items():
            if name == group_id:
                n = len(tokens)
                reason = FinishReason.STOP if (name, index) in self.ended else FinishReason.UNFINISHED
                spans = spans_of([Version(0)] * n)
                found.append(Rollout(GroupId(name), index, tuple(tokens), (-0.5,) * n, (-0.25,) * n, spans, reason))
        return tuple(found)


class LeaseRules(RuleBasedStateMachine):
    """Grants, tokens, verdicts, losses and closings in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sut = Leases(LIMITS)
        self.engine = ModelEngine()
        self.learner = ModelLearner()
        self.on_the_way: dict[str, d.Report] = {}
        self.fetching: list[LeaseId] = []
        self.ended: dict[str, d.EndLease] = {}
        self.granted = 0
        self.wake_at = 0.0
        self.send(d.CoordinatorUp(1.0))
        self.send(d.LearnerUp())
        self.send(d.VersionLive(Version(0), 4))

    def send(self, event: d.Event) -> None:
        for action in self.sut.handle(event, self.now):
            match action:
                case d.Submit():
                    self.engine.submit(action)
                case d.Abort(request_id):
                    self.engine.abort(request_id)
                case d.FetchPartials(lease_id):
                    self.fetching.append(lease_id)
                case d.Report(lease_id):
                    assert lease_id not in self.on_the_way, "one report of a lease at a time"
                    assert sum(len(s.token_ids) for s in action.segments) <= machine.REPORT_TOKENS_MAX
                    self.on_the_way[lease_id] = action
                case d.EndLease(lease_id):
                    assert lease_id not in self.ended, "a lease ends once"
                    self.ended[lease_id] = action
                case d.WakeAt(at):
                    assert at >= self.now
                    self.wake_at = at
                case d.RequestLeases(free_rollouts):
                    assert 0 <= free_rollouts <= 4 + 4 + 3, "no more than slots, cover and a group"
                case _:
                    pass

    @rule(continues=st.booleans(), count=st.integers(1, 3), lasts_s=st.floats(0.5, 30))
    def grant(self, continues: bool, count: int, lasts_s: float) -> None:
        self.granted += 1
        name = f"g{self.granted}"
        if continues:
            tokens = [3] * (self.granted % 4)
            self.learner.held[(name, 0)] = tokens
        self.send(d.Granted(LeaseId(f"l{self.granted}"), group(name, count), self.now + lasts_s, continues))

    @precondition(lambda self: self.fetching)
    @rule(is_refused=st.booleans())
    def answer_fetch(self, is_refused: bool) -> None:
        lease_id = self.fetching.pop(0)
        if is_refused:
            self.send(d.LeaseRefused(lease_id, "not known"))
        else:
            self.send(d.PartialsArrived(lease_id, self.learner.partials("g" + lease_id[1:])))

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), token=st.sampled_from([3, 4, STOP]), version=st.integers(0, 3))
    def sample(self, data: st.DataObject, token: int, version: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.engine.running)))
        self.engine.step(request_id, token, version)

    @rule()
    def deliver_chunks(self) -> None:
        chunks, self.engine.out = tuple(self.engine.out), []
        self.send(d.Sampled(chunks))

    @precondition(lambda self: self.on_the_way)
    @rule(is_lost=st.booleans())
    def judge(self, is_lost: bool) -> None:
        lease_id = next(iter(self.on_the_way))
        report = self.on_the_way.pop(lease_id)
        judged = self.learner.judge(report)
        if is_lost:  # the learner took it, the answer is lost with the stream
            self.lose_learner()
            self.send(d.LearnerUp())
        else:
            self.send(judged)

    @rule()
    def lose_learner(self) -> None:
        self.on_the_way.clear()
        self.send(d.LearnerDown())

    @rule()
    def find_learner(self) -> None:
        self.on_the_way.clear()
        self.send(d.LearnerUp())

    @rule(is_here=st.booleans())
    def coordinator(self, is_here: bool) -> None:
        self.send(d.CoordinatorUp(1.0) if is_here else d.CoordinatorDown())

    @rule()
    def restart_of_the_learner_forgets_partials(self) -> None:
        self.lose_learner()
        for key in list(self.learner.held):
            if key not in self.learner.ended:
                del self.learner.held[key]
        for lease_id in list(self.fetching):
            self.fetching.remove(lease_id)
            self.send(d.LeaseRefused(lease_id, "not known"))
        self.send(d.LearnerUp())

    @precondition(lambda self: self.sut.lease_ids)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        self.send(d.Revoked(data.draw(st.sampled_from(self.sut.lease_ids)), "rebalanced"))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.learner.closed.add(f"g{data.draw(st.integers(1, self.granted))}")

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.wake_at:
            self.send(d.WakeUp())

    @invariant()
    def learner_holds_a_prefix_of_what_was_sampled(self) -> None:
        for request_id, tokens in self.engine.sampled.items():
            lease_id, _, index = request_id.rpartition("/")
            held = self.learner.held.get(("g" + lease_id[1:], int(index)), [])
            assert tokens[: len(held)] == held

    @invariant()
    def an_ended_lease_leaves_nothing_in_the_engine(self) -> None:
        live = {LeaseId(request_id.rpartition("/")[0]) for request_id in self.engine.running}
        assert live <= set(self.sut.lease_ids)

    def teardown(self) -> None:
        """Once nothing fails any more, every lease ends, and one that finished left all its tokens with the learner."""
        self.send(d.CoordinatorUp(1.0))
        self.on_the_way.clear()
        self.send(d.LearnerUp())
        for _ in range(200):
            while self.fetching:
                self.answer_fetch(is_refused=False)
            for request_id in sorted(self.engine.running):
                self.engine.step(request_id, STOP, 3)
            self.deliver_chunks()
            while self.on_the_way:
                self.judge(is_lost=False)
            if not self.sut.lease_ids:
                break
            self.now = max(self.now, self.wake_at)
            self.send(d.WakeUp())
        assert not self.sut.lease_ids
        assert len(self.ended) == self.granted
        for lease_id, end in self.ended.items():
            name = "g" + lease_id[1:]
            if end.reason is EndReason.FINISHED and name not in self.learner.closed:
                for request_id, tokens in self.engine.sampled.items():
                    if request_id.startswith(f"{lease_id}/"):
                        key = (name, int(request_id.rpartition("/")[2]))
                        assert key in self.learner.ended
                        assert self.learner.held[key] == tokens


TestAssignments = LeaseRules.TestCase
TestAssignments.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- examples


@dataclass
class Bench:
    """One machine with a hand on every lever."""

    sut: Leases
    engine: ModelEngine = field(default_factory=ModelEngine)
    now: float = 0.0

    def send(self, event: d.Event) -> list[d.Action]:
        actions = self.sut.handle(event, self.now)
        for action in actions:
            if isinstance(action, d.Submit):
                self.engine.submit(action)
            elif isinstance(action, d.Abort):
                self.engine.abort(action.request_id)
        return actions

    def sampled(self) -> list[d.Action]:
        chunks, self.engine.out = tuple(self.engine.out), []
        return self.send(d.Sampled(chunks))


def of(kind: type, actions: list[d.Action]) -> list:  # type: ignore[type-arg]
    return [action for action in actions if isinstance(action, kind)]


def bench(slots: int = 8, is_learner_here: bool = True) -> Bench:
    made = Bench(Leases(LIMITS))
    made.send(d.CoordinatorUp(1.0))
    if is_learner_here:
        made.send(d.LearnerUp())
    made.send(d.VersionLive(Version(3), slots))
    return made


def test_the_slots_are_asked_for_in_whole_groups_and_no_more_once_they_are_full() -> None:
    made = Bench(Leases(LIMITS))
    made.send(d.VersionLive(Version(3), 5))
    asked = of(d.RequestLeases, made.send(d.CoordinatorUp(1.0)))
    assert asked == [d.RequestLeases(5, Version(3))]
    first = of(d.RequestLeases, made.send(d.Granted(LeaseId("l1"), group("g1", 2), 100.0, False)))
    assert first == [d.RequestLeases(4, Version(3))]  # three slots are free: two groups of two
    made.send(d.Granted(LeaseId("l2"), group("g2", 2), 100.0, False))
    made.send(d.Granted(LeaseId("l3"), group("g3", 2), 100.0, False))
    assert made.sut.running_rollouts == 6
    made.now = 60.0
    assert not of(d.RequestLeases, made.send(d.WakeUp()))


def test_a_finished_rollout_is_reported_at_once_and_a_growing_one_every_interval() -> None:
    made = bench()
    made.send(d.Granted(LeaseId("l1"), group("g1", 1), 100.0, False))
    made.engine.step("l1/0", 3, 3)
    assert not of(d.Report, made.sampled())
    made.now = 1.0
    (report,) = of(d.Report, made.send(d.WakeUp()))
    assert report.segments[0].token_ids == (3,)
    assert report.segments[0].expected_remaining_tokens >= 1
    made.send(d.VerdictsArrived(LeaseId("l1"), (SegmentVerdict(GroupId("g1"), 0, Verdict.HELD, 1),)))
    made.now = 1.1
    made.engine.step("l1/0", STOP, 4)
    (wake,) = of(d.WakeAt, made.sampled())
    assert wake.at == pytest.approx(1.1 + LIMITS.finished_delay_s)
    made.now = wake.at
    (report,) = of(d.Report, made.send(d.WakeUp()))
    (segment,) = report.segments
    assert (segment.offset, segment.token_ids, segment.finish_reason) == (1, (STOP,), FinishReason.STOP)
    assert segment.version_spans == spans_of([Version(4)])
    (end,) = of(
        d.EndLease,
        made.send(d.VerdictsArrived(LeaseId("l1"), (SegmentVerdict(GroupId("g1"), 0, Verdict.ADMITTED, 2),))),
    )
    assert end.reason is EndReason.FINISHED


def test_what_finishes_while_the_learner_is_away_is_kept_and_delivered_when_it_comes() -> None:
    made = bench(is_learner_here=False)
    made.send(d.Granted(LeaseId("l1"), group("g1", 1), 100.0, False))
    made.engine.step("l1/0", STOP, 3)
    assert not of(d.Report, made.sampled())
    made.now = 50.0
    assert not of(d.Report, made.send(d.WakeUp()))
    assert made.sut.unheld_tokens == 1
    (report,) = of(d.Report, made.send(d.LearnerUp()))
    assert report.segments[0].is_final


def test_nothing_more_is_asked_for_while_too_many_tokens_wait_for_the_learner() -> None:
    made = Bench(Leases(replace(LIMITS, unheld_tokens_max=3)))
    made.send(d.CoordinatorUp(1.0))
    made.send(d.VersionLive(Version(3), 8))
    made.send(d.Granted(LeaseId("l1"), group("g1", 2), 100.0, False))
    for token in (3, 3, STOP):
        made.engine.step("l1/0", token, 3)
    assert of(d.RequestLeases, made.sampled()) == [d.RequestLeases(0, Version(3))]


def test_a_drain_hands_back_every_token_and_then_says_so() -> None:
    made = bench()
    made.send(d.Granted(LeaseId("l1"), group("g1", 2), 100.0, False))
    made.engine.step("l1/0", 3, 3)
    made.sampled()
    actions = made.send(d.Drain(2.0, "preempted"))
    assert {abort.request_id for abort in of(d.Abort, actions)} == {"l1/0", "l1/1"}
    (report,) = of(d.Report, actions)
    made.sampled()
    actions = made.send(d.VerdictsArrived(LeaseId("l1"), (SegmentVerdict(GroupId("g1"), 0, Verdict.HELD, 1),)))
    assert [end.reason for end in of(d.EndLease, actions)] == [EndReason.HANDED_BACK]
    assert of(d.Drained, actions) == [d.Drained(0)]
    assert report.segments[0].token_ids == (3,)
    late = made.send(d.Granted(LeaseId("l2"), group("g2", 2), 100.0, False))
    assert [end.message for end in of(d.EndLease, late)] == ["this worker is draining"]


def test_finishing_up_takes_nothing_new_and_ends_with_the_last_rollout() -> None:
    made = bench()
    made.send(d.Granted(LeaseId("l1"), group("g1", 1), 100.0, False))
    actions = made.send(d.FinishUp())
    assert not of(d.Abort, actions) and not of(d.Drained, actions)
    assert of(d.RequestLeases, actions) == [d.RequestLeases(0, Version(3))]
    late = made.send(d.Granted(LeaseId("l2"), group("g2", 2), 100.0, False))
    assert [end.reason for end in of(d.EndLease, late)] == [EndReason.HANDED_BACK]
    made.engine.step("l1/0", STOP, 3)
    made.sampled()
    made.now = 1.0
    assert of(d.Report, made.send(d.WakeUp()))
    judged = d.VerdictsArrived(LeaseId("l1"), (SegmentVerdict(GroupId("g1"), 0, Verdict.ADMITTED, 1),))
    assert of(d.Drained, made.send(judged)) == [d.Drained(0)]


def test_a_drain_without_a_learner_ends_in_time_and_counts_what_is_lost() -> None:
    made = bench(is_learner_here=False)
    made.send(d.Granted(LeaseId("l1"), group("g1", 1), 100.0, False))
    made.engine.step("l1/0", 3, 3)
    made.sampled()
    actions = made.send(d.Drain(2.0, "preempted"))
    assert [wake.at for wake in of(d.WakeAt, actions)] == [2.0]
    made.now = 2.0
    actions = made.send(d.WakeUp())
    assert of(d.Drained, actions) == [d.Drained(1)]


def test_a_closed_group_is_stopped_and_a_stale_rollout_alone() -> None:
    made = bench()
    for name in ("1", "2"):
        made.send(d.Granted(LeaseId(f"l{name}"), group(f"g{name}", 2), 100.0, False))
    closed = SegmentVerdict(GroupId("g1"), 0, Verdict.CLOSED, 0)
    actions = made.send(d.VerdictsArrived(LeaseId("l1"), (closed,)))
    assert {abort.request_id for abort in of(d.Abort, actions)} == {"l1/0", "l1/1"}
    stale = SegmentVerdict(GroupId("g2"), 0, Verdict.STALE, 0)
    actions = made.send(d.VerdictsArrived(LeaseId("l2"), (stale,)))
    assert [abort.request_id for abort in of(d.Abort, actions)] == ["l2/0"]
    assert made.sut.lease_ids == ("l2",)


def test_a_continuation_goes_on_behind_the_tokens_that_the_learner_holds() -> None:
    made = bench()
    actions = made.send(d.Granted(LeaseId("l1"), group("g1", 4), 100.0, True))
    assert of(d.FetchPartials, actions) == [d.FetchPartials(LeaseId("l1"))]
    assert not of(d.Submit, actions)

    def held(index: int, tokens: tuple[int, ...], reason: FinishReason) -> Rollout:
        n = len(tokens)
        logprobs = (-0.5,) * n
        return Rollout(GroupId("g1"), index, tokens, logprobs, logprobs, spans_of([Version(1)] * n), reason)

    partials = (
        held(0, (3, 4), FinishReason.UNFINISHED),
        held(1, (3, STOP), FinishReason.STOP),
        held(2, (3, STOP), FinishReason.UNFINISHED),  # its end got lost
    )
    actions = made.send(d.PartialsArrived(LeaseId("l1"), partials))
    submitted = {s.request.request_id: s.request.token_ids for s in of(d.Submit, actions)}
    assert submitted == {"l1/0": (3, 4), "l1/3": ()}
    made.now = 1.0
    (report,) = of(d.Report, made.send(d.WakeUp()))
    (segment,) = report.segments
    assert (segment.index, segment.offset, segment.finish_reason) == (2, 2, FinishReason.STOP)


def test_a_lease_near_its_deadline_is_handed_back_with_its_tokens() -> None:
    made = bench()
    made.send(d.Granted(LeaseId("l1"), group("g1", 1), 10.0, False))
    made.engine.step("l1/0", 3, 3)
    made.sampled()
    made.now = 9.0
    actions = made.send(d.WakeUp())
    assert of(d.Abort, actions) and of(d.Report, actions)
    made.sampled()
    made.now = 10.0 + machine.VERDICT_GRACE_S
    (end,) = of(d.EndLease, made.send(d.WakeUp()))
    assert "deadline has passed" in end.message


def test_what_is_finished_outlives_its_lease_until_the_learner_has_said_its_word() -> None:
    made = bench(is_learner_here=False)
    made.send(d.Granted(LeaseId("l1"), group("g1", 1), 10.0, False))
    made.engine.step("l1/0", STOP, 3)
    made.sampled()
    made.now = 1000.0
    assert not of(d.EndLease, made.send(d.WakeUp()))
    (report,) = of(d.Report, made.send(d.LearnerUp()))
    assert report.segments[0].is_final
    (end,) = of(
        d.EndLease,
        made.send(d.VerdictsArrived(LeaseId("l1"), (SegmentVerdict(GroupId("g1"), 0, Verdict.ADMITTED, 1),))),
    )
    assert end.reason is EndReason.FINISHED


def test_limits_of_reports_are_within_those_of_the_wire() -> None:
    assert partial.SEGMENT_TOKENS_MAX <= wire.SEGMENT_TOKENS_MAX
    assert machine.REPORT_TOKENS_MAX <= wire.REPORT_TOKENS_MAX


@given(seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_a_long_rollout_is_reported_in_bounded_segments(seed: int) -> None:
    rng = random.Random(seed)
    made = bench()
    count = rng.randint(1, 3 * machine.REPORT_TOKENS_MAX)
    made.send(d.Granted(LeaseId("l1"), group("g1", 1, 1 << 20), 1e6, False))
    made.send(
        d.Sampled((TokenChunk("l1/0", (3,) * count, (-0.5,) * count, (-0.5,) * count, Version(1), FinishReason.STOP),))
    )
    held = 0
    for _ in range(100):
        made.now += 1.0
        reports = of(d.Report, made.send(d.WakeUp()))
        if not reports:
            break
        (segment,) = reports[0].segments
        assert segment.offset == held and len(segment.token_ids) <= partial.SEGMENT_TOKENS_MAX
        held = segment.end
        verdict = Verdict.ADMITTED if segment.is_final else Verdict.HELD
        made.send(d.VerdictsArrived(LeaseId("l1"), (SegmentVerdict(GroupId("g1"), 0, verdict, held),)))
    assert held == count
    assert not made.sut.lease_ids


def test_the_renewal_of_a_lease_that_has_ended_here_does_not_begin_it_again() -> None:
    made = bench()
    made.send(d.Granted(LeaseId("l1"), group("g1", 2), 100.0, False))
    made.send(d.Granted(LeaseId("l1"), group("g1", 2), 200.0, False, is_renewal=True))
    assert made.sut.lease_ids == ("l1",)
    made.send(d.LeaseRefused(LeaseId("l1"), "the group is closed"))
    assert of(d.Submit, made.send(d.Granted(LeaseId("l1"), group("g1", 2), 300.0, False, is_renewal=True))) == []
    assert made.sut.lease_ids == ()


def exam(name: str, version: int, count: int = 1) -> GroupSpec:
    sampling = SamplingParams(max_new_tokens=6, stop_token_ids=(STOP,))
    return GroupSpec(GroupId(name), (1, 2), count, sampling, version, Work.EVALUATE, Version(version))


def test_a_version_waits_for_what_only_the_one_before_may_sample() -> None:
    made = bench()
    made.send(d.Granted(LeaseId("l1"), exam("e1", 3), 1000.0, False))
    made.send(d.Granted(LeaseId("l2"), group("g2", 1), 1000.0, False))
    assert not of(d.AdmitVersion, made.send(d.VersionArrived(Version(4))))
    made.now = 1.0
    made.engine.step("l1/0", STOP, 3)
    (report,) = of(d.Report, [*made.sampled(), *_later(made, 1.1)])
    judged = d.VerdictsArrived(
        LeaseId("l1"), (SegmentVerdict(GroupId("e1"), 0, Verdict.ADMITTED, len(report.segments[0].token_ids)),)
    )
    assert not of(d.AdmitVersion, made.send(judged)), "more of them may be on their way"
    assert of(d.AdmitVersion, _later(made, 1.1 + machine.EXACT_GRACE_S)) == [d.AdmitVersion(Version(4))]
    assert made.sut.lease_ids == (LeaseId("l2"),)


def test_a_version_waits_longer_for_an_agents_next_call() -> None:
    """Its tools may run for seconds between two."""
    made = bench()
    made.send(d.Granted(LeaseId("l1"), exam("x1.0.1", 3), 1000.0, False))
    made.send(d.VersionArrived(Version(4)))
    made.now = 1.0
    made.engine.step("l1/0", STOP, 3)
    (report,) = of(d.Report, [*made.sampled(), *_later(made, 1.1)])
    held = len(report.segments[0].token_ids)
    made.send(d.VerdictsArrived(LeaseId("l1"), (SegmentVerdict(GroupId("x1.0.1"), 0, Verdict.ADMITTED, held),)))
    assert not of(d.AdmitVersion, _later(made, 1.1 + machine.EXACT_GRACE_S))
    made.send(d.Granted(LeaseId("l2"), exam("x1.0.2", 3), 1000.0, False))
    assert not of(d.AdmitVersion, _later(made, 1.1 + 2 * machine.TURN_GRACE_S)), "the next call has come in time"


def test_a_version_goes_live_at_once_where_nothing_needs_the_one_before() -> None:
    made = bench()
    made.send(d.Granted(LeaseId("l1"), group("g1"), 1000.0, False))
    assert of(d.AdmitVersion, made.send(d.VersionArrived(Version(4)))) == [d.AdmitVersion(Version(4))]


def test_what_holds_a_version_up_too_long_is_handed_back_without_a_token_of_another_version() -> None:
    made = bench()
    made.send(d.Granted(LeaseId("l1"), exam("e1", 3), 1e6, False))
    made.engine.step("l1/0", 5, 3)
    made.sampled()
    made.send(d.VersionArrived(Version(4)))
    early = _later(made, machine.HOLD_S_MAX - 1)
    assert not of(d.AdmitVersion, early)
    made.engine.step("l1/0", 6, 4)  # on its way while the lease is given back
    actions = _later(made, machine.HOLD_S_MAX)
    assert of(d.AdmitVersion, actions) == [d.AdmitVersion(Version(4))]
    (segment,) = of(d.Report, [*early, *actions, *made.sampled()])[-1].segments
    assert segment.token_ids == (5,) and {span.version for span in segment.version_spans} == {Version(3)}
    ended = made.send(d.VerdictsArrived(LeaseId("l1"), (SegmentVerdict(GroupId("e1"), 0, Verdict.HELD, 1),)))
    assert [action.reason for action in of(d.EndLease, ended)] == [EndReason.HANDED_BACK]


def test_an_evaluation_of_another_version_is_given_back_at_once() -> None:
    made = bench()
    (ended,) = of(d.EndLease, made.send(d.Granted(LeaseId("l1"), exam("e1", 2), 1000.0, False)))
    assert ended.reason is EndReason.HANDED_BACK and "it is for version 2, the live one is 3" in ended.message
    made.send(d.Granted(LeaseId("l2"), exam("e2", 3), 1000.0, False))
    made.send(d.VersionLive(Version(4), 8))
    assert not made.engine.running


def _later(made: Bench, at: float) -> list[d.Action]:
    made.now = at
    return made.send(d.WakeUp())


def test_a_standing_request_is_not_repeated_before_its_time() -> None:
    demand = Demand()
    assert demand.request(0, True, 0.0) is None  # no weights yet
    demand.live(Version(1), 4)
    assert demand.request(0, True, 0.0) == (4, Version(1))
    assert demand.request(0, True, 1.0) is None
    assert demand.repeat_at() == REPEAT_S
    assert demand.request(0, True, REPEAT_S) == (4, Version(1))


def test_a_new_version_renews_the_request_because_it_may_open_newer_groups() -> None:
    demand = Demand()
    demand.live(Version(1), 4)
    demand.request(0, True, 0.0)
    demand.live(Version(2), 4)
    assert demand.request(0, True, 0.1) == (4, Version(2))


def test_a_worker_that_is_not_willing_takes_its_request_back() -> None:
    demand = Demand()
    demand.live(Version(1), 4)
    demand.request(0, True, 0.0)
    assert demand.request(0, False, 0.1) == (0, Version(1))
    assert demand.request(0, False, 100.0) is None


def test_slots_that_fall_free_while_a_lease_travels_are_asked_for_ahead() -> None:
    demand = Demand()
    demand.live(Version(1), 8)
    demand.request(0, True, 0.0)
    demand.granted(1, 0.5)  # a lease travels half a second
    for i in range(20):
        demand.finished(i * 0.25)  # four rollouts a second
    assert demand.cover() == 3
    assert demand.level(8, True) == 3


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
    held = 0
    now = 0.0
    for size, ended in zip(sizes, finishing, strict=False):
        now += 0.1
        for _ in range(min(held, ended)):
            held -= 1
            demand.finished(now)
        level = demand.level(held, True)
        demand.request(held, True, now)
        granted = 0
        while granted < level:
            demand.granted(size, now + 0.01)
            granted += size
        held += granted
        assert slots <= held <= 2 * slots + 2 * max(sizes)
