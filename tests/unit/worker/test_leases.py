"""A worker's leases against a model engine, learner and coordinator, with streams that break at any moment; what it requests."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field, replace

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2.base import rollout
from echo2.base.ids import GroupId, LeaseId, Version, warm_groups
from echo2.base.rng import rollout_seed
from echo2.base.rollout import EndReason, FinishReason, GroupSpec, Rollout, Routing, SegmentVerdict, Verdict, spans_of
from echo2.wire import rollout as wire
from echo2.worker import leases
from echo2.worker.engines.engine import GenerateRequest, TokenChunk
from echo2.worker.rollouts import SEGMENT_TOKENS_MAX

STOP, SLOTS = 9, 4
LEASES_MAX, DRAIN_S = 6, 2.0
L1 = LeaseId("l1")
PAST = ("its deadline has passed", "the drain ran out of time")


@pytest.fixture(autouse=True)
def few_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASES_MAX", LEASES_MAX)


def group(name: str, count: int = 2, tokens_max: int = 6, version: int | None = None) -> GroupSpec:
    """One to train on; an evaluation of `version` if that is given."""
    sampling = rollout.SamplingParams(max_new_tokens=tokens_max, stop_token_ids=(STOP,))
    if version is None:
        return GroupSpec(GroupId(name), (1, 2), count, sampling, 5)
    return GroupSpec(GroupId(name), (1, 2), count, sampling, version, rollout.Work.EVALUATE, Version(version))


def held(name: str, index: int, tokens: tuple[int, ...], reason: FinishReason = FinishReason.UNFINISHED) -> Rollout:
    """A partial rollout as the learner hands it out."""
    numbers = (-0.5,) * len(tokens)
    return Rollout(GroupId(name), index, tokens, numbers, numbers, spans_of([Version(0)] * len(tokens)), reason)


@dataclass
class Surroundings:
    """The leases' ports. The engine samples what it is told to; the learner holds tokens without gaps and never changes them."""

    time: float = 0.0
    version: int = 3
    refusal: str = ""  # of the engine
    running: dict[str, GenerateRequest] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    chunks: list[TokenChunk] = field(default_factory=list)
    reports: dict[LeaseId, tuple[Rollout, ...]] = field(default_factory=dict)  # in flight
    fetching: list[LeaseId] = field(default_factory=list)
    ended: dict[LeaseId, tuple[EndReason, str]] = field(default_factory=dict)
    ended_at: dict[LeaseId, float] = field(default_factory=dict)
    requests: list[int] = field(default_factory=list)
    wanted: int = 0  # by the coordinator's reckoning
    progress: dict[LeaseId, tuple[int, int]] = field(default_factory=dict)
    admitted_at: list[float] = field(default_factory=list)
    drained: int | None = None
    wake: float = 0.0
    held: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finished: set[tuple[str, int]] = field(default_factory=set)
    settled: set[tuple[str, int]] = field(default_factory=set)
    # Groups of which it samples a token under the next version before it stops.
    exact: set[str] = field(default_factory=set)
    verdicts: dict[str, Verdict] = field(default_factory=dict)  # on all of a group, whatever is reported

    def __post_init__(self) -> None:
        self.leases = leases.Leases(self, self, self, self)

    def now(self) -> float:
        return self.time

    # -- the ports

    def submit(self, request: GenerateRequest) -> str:
        assert request.request_id not in self.sampled, "a request id is used once"
        assert request.sampling.seed == rollout_seed(0, int(request.request_id.rpartition("/")[2])), "siblings differ"
        if not self.refusal:
            self.running[request.request_id] = request
            self.sampled[request.request_id] = list(request.token_ids)
        return self.refusal

    def abort(self, request_id: str) -> None:
        request = self.running.pop(request_id, None)
        if request is not None:
            if request.prefix_key in self.exact:
                late = Version(self.version + 1)
                self.chunks.append(TokenChunk(request_id, (7,), (-0.5,), (-0.5,), late, FinishReason.UNFINISHED))
            self.chunks.append(TokenChunk(request_id, (), (), (), Version(0), FinishReason.ABORTED))

    def report(self, lease_id: LeaseId, segments: tuple[Rollout, ...]) -> None:
        assert segments and lease_id not in self.reports, "one report of a lease at a time"
        assert sum(len(segment.token_ids) for segment in segments) <= leases.REPORT_TOKENS_MAX
        self.reports[lease_id] = segments

    def fetch_partials(self, lease_id: LeaseId) -> None:
        self.fetching.append(lease_id)

    def forget(self, lease_id: LeaseId) -> None:
        self.reports.pop(lease_id, None)

    def end_lease(self, lease_id: LeaseId, reason: EndReason, message: str) -> None:
        assert lease_id not in self.ended, "a lease ends once"
        self.ended[lease_id], self.ended_at[lease_id] = (reason, message), self.time

    def report_progress(self, lease_id: LeaseId, finished_rollouts: int, tokens: int) -> None:
        self.progress[lease_id] = finished_rollouts, tokens

    def request_leases(self, free_rollouts: int, version: Version) -> None:
        self.requests.append(free_rollouts)
        self.wanted = free_rollouts

    def admit_version(self) -> None:
        self.admitted_at.append(self.time)

    def on_drained(self, unheld_tokens: int) -> None:
        assert self.drained is None and not self.leases.lease_ids
        self.drained = unheld_tokens

    def wake_at(self, at: float) -> None:
        assert at >= self.time
        self.wake = at

    # -- levers

    def begin(self, slots: int = 8, *, has_learner: bool = True) -> Surroundings:
        self.leases.on_coordinator(1.0)
        if has_learner:
            self.leases.on_learner()
        self.leases.on_version_live(Version(self.version), slots)
        return self

    def grant(
        self, lease_id: LeaseId, spec: GroupSpec, deadline: float = 1e6, *, is_continuation: bool = False
    ) -> None:
        self.wanted = max(0, self.wanted - spec.rollout_count)
        self.leases.grant(lease_id, spec, deadline, is_continuation=is_continuation)

    def step(self, request_id: str, *tokens: int) -> None:
        """The engine samples these tokens of a request."""
        sampled, sampling = self.sampled[request_id], self.running[request_id].sampling
        sampled += tokens
        is_full, reason = len(sampled) >= sampling.max_new_tokens, FinishReason.UNFINISHED
        if tokens[-1] in sampling.stop_token_ids or is_full:
            reason = FinishReason.LENGTH if tokens[-1] not in sampling.stop_token_ids else FinishReason.STOP
            del self.running[request_id]
        numbers = (-0.5,) * len(tokens)
        self.chunks.append(TokenChunk(request_id, tokens, numbers, numbers, Version(self.version), reason))

    def deliver(self) -> None:
        chunks, self.chunks = tuple(self.chunks), []
        self.leases.on_tokens(chunks)

    def sample(self, request_id: str, *tokens: int) -> None:
        self.step(request_id, *tokens)
        self.deliver()

    def at(self, time: float) -> None:
        self.time = time
        self.leases.wake()
        self.deliver()

    def judge(self, lease_id: LeaseId, *, is_lost: bool = False) -> None:
        verdicts = [self._judged(segment) for segment in self.reports.pop(lease_id)]
        if not is_lost:
            self.settled |= {(v.group_id, v.index) for v in verdicts if v.verdict not in (Verdict.HELD, Verdict.RESEND)}
            of_another = replace(verdicts[0], group_id=GroupId("another"), verdict=Verdict.REFUSED)
            self.leases.on_verdicts(lease_id, [of_another, *verdicts])

    def _judged(self, segment: Rollout) -> SegmentVerdict:
        key = (segment.group_id, segment.index)
        tokens, verdict = self.held.setdefault(key, []), Verdict.HELD
        if segment.group_id in self.verdicts:
            verdict = self.verdicts[segment.group_id]
        elif key in self.finished:
            verdict = Verdict.DUPLICATE
        elif segment.offset > len(tokens):
            verdict = Verdict.RESEND
        else:
            overlap = len(tokens) - segment.offset
            assert tuple(tokens[segment.offset : segment.end]) == segment.token_ids[:overlap], "held ones never change"
            tokens.extend(segment.token_ids[overlap:])
            if segment.is_finished:
                self.finished.add(key)
                verdict = Verdict.ADMITTED
        return SegmentVerdict(segment.group_id, segment.index, verdict, len(tokens))

    def partials(self, name: str) -> list[Rollout]:
        reasons = {True: FinishReason.STOP, False: FinishReason.UNFINISHED}
        own = [(key, tuple(tokens)) for key, tokens in self.held.items() if key[0] == name]
        return [held(*key, tokens, reasons[key in self.finished]) for key, tokens in own]


class LeaseRules(RuleBasedStateMachine):
    """Grants, tokens, verdicts, losses, versions and closings in any order; every wake-up comes that was wished for.

    `why`: what may end each lease before its rollouts do. `exact`: since when each is held that only one version may sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self.it = Surroundings().begin(SLOTS)
        self.specs: dict[LeaseId, GroupSpec] = {}
        self.deadlines: dict[LeaseId, float] = {}
        self.why: dict[LeaseId, set[str]] = {}
        self.learner_since: float | None = 0.0
        self.waits_since: float | None = None
        self.exact: dict[LeaseId, float] = {}
        self.is_leaving, self.is_up, self.is_swapping = False, True, False
        self.drains_until = math.inf
        self.judged: set[LeaseId] = set()
        self.forgotten: dict[tuple[str, int], int] = {}  # tokens that a restart of the learner lost

    @rule(
        kind=st.sampled_from(["new", "new", "continued", "evaluation", "call of an agent", "of another version"]),
        count=st.integers(1, 3), lasts_s=st.floats(0.5, 30) | st.just(1e6), refusal=st.sampled_from(["", "", "", "too long"]),
    )  # fmt: skip
    def grant(self, kind: str, count: int, lasts_s: float, refusal: str) -> None:
        lease_id, is_new = LeaseId(f"l{len(self.specs)}"), kind in ("new", "continued")
        name = f"g{lease_id[1:]}" + (".0.1" if kind == "call of an agent" else "")
        version = None if is_new else self.it.version + (kind == "of another version")
        self.specs[lease_id] = spec = group(name, count, version=version)
        self.deadlines[lease_id] = deadline = self.it.time + lasts_s
        is_taken = not self.is_leaving and len(self.it.leases.lease_ids) < LEASES_MAX and spec.exact_version in (
            None, self.it.version,
        )  # fmt: skip
        self.why[lease_id] = {"", "too long", "its deadline is near", "a new version has waited long enough"}
        if kind == "continued":
            self.it.held[(name, 0)] = [3] * (count + 1) + [STOP] * (count == 2)
        self.it.refusal = refusal
        self.it.grant(lease_id, spec, deadline, is_continuation=kind == "continued")
        assert (lease_id in self.it.fetching) == (is_taken and kind == "continued")
        if is_taken and version is not None:
            self.exact[lease_id] = self.it.time
            self.it.exact.add(spec.group_id)
        elif not is_taken:
            assert self.it.ended[lease_id][0] is EndReason.HANDED_BACK, "given back at once"
            self.why[lease_id].add(self.it.ended[lease_id][1])

    @precondition(lambda self: self.it.fetching)
    @rule(is_refused=st.booleans())
    def answer_fetch(self, is_refused: bool) -> None:
        lease_id = self.it.fetching.pop(0)
        self.why[lease_id].add("not known")
        if is_refused:
            self.it.leases.refuse(lease_id, "not known")
            return
        partials = self.it.partials(self.specs[lease_id].group_id)
        for _ in range(2):  # an answer may come twice
            self.it.leases.on_partials(lease_id, partials)
        for partial in partials:
            request = self.it.running.get(f"{lease_id}/{partial.index}")
            assert request is None or request.token_ids == partial.token_ids, "it goes on behind them"
            assert request is None or STOP not in partial.token_ids, "nothing is sampled behind an end"

    @precondition(lambda self: self.it.running)
    @rule(data=st.data(), token=st.sampled_from([3, 4, STOP]))
    def sample(self, data: st.DataObject, token: int) -> None:
        self.it.step(data.draw(st.sampled_from(sorted(self.it.running))), token)

    @rule()
    def deliver(self) -> None:
        self.it.deliver()

    @precondition(lambda self: self.it.reports)
    @rule(is_lost=st.booleans())
    def judge(self, is_lost: bool) -> None:
        lease_id = next(iter(self.it.reports))
        self.it.judge(lease_id, is_lost=is_lost)
        if is_lost:  # the learner took it, the answer is lost with the stream
            self.learner(False)
            self.learner(True)

    @rule(is_here=st.booleans())
    def learner(self, is_here: bool) -> None:
        self.it.reports.clear()
        self.learner_since = self.it.time if is_here else None
        (self.it.leases.on_learner if is_here else self.it.leases.on_learner_lost)()

    @rule()
    def restart_of_the_learner_forgets_partials(self) -> None:
        self.learner(False)
        self.forgotten |= {key: len(tokens) for key, tokens in self.it.held.items() if key not in self.it.finished}
        self.it.held = {key: tokens for key, tokens in self.it.held.items() if key in self.it.finished}
        while self.it.fetching:
            self.answer_fetch(True)
        self.learner(True)

    @rule(is_here=st.booleans())
    def coordinator(self, is_here: bool) -> None:
        self.is_up = is_here
        self.it.wanted = 0
        if is_here:
            self.it.leases.on_coordinator(1.0)
        else:
            self.it.leases.on_coordinator_lost()

    @precondition(lambda self: self.it.leases.lease_ids)
    @rule(data=st.data(), what=st.sampled_from(["revoked", "refused", Verdict.CLOSED, Verdict.STALE, Verdict.REFUSED]))
    def lose(self, data: st.DataObject, what: str | Verdict) -> None:
        lease_id = data.draw(st.sampled_from(self.it.leases.lease_ids))
        if isinstance(what, Verdict):
            self.why[lease_id].add("the group is closed")
            self.it.verdicts[self.specs[lease_id].group_id] = what
        else:
            is_fetching = lease_id in self.it.fetching
            self.why[lease_id].add(what)
            (self.it.leases.revoke if what == "revoked" else self.it.leases.refuse)(lease_id, what)
            assert lease_id in self.it.ended or not is_fetching, "nothing is waited for"

    @precondition(lambda self: self.waits_since is None and not self.is_swapping)
    @rule()
    def a_version_arrives(self) -> None:
        self.waits_since = self.it.time
        self.it.leases.on_version_arrived()

    @precondition(lambda self: self.is_swapping)
    @rule()
    def it_goes_live(self) -> None:
        self.is_swapping = False
        self.it.version += 1
        for why in self.why.values():
            why.add(f"version {self.it.version} is live now")
        self.it.leases.on_version_live(Version(self.it.version), SLOTS)
        assert not [name for name in self.exact if f"{name}/0" in self.it.running], "none is sampled under another"

    @precondition(lambda self: not self.is_leaving)
    @rule(kind=st.sampled_from(["", "", "", "drain", "finish up"]))
    def leave(self, kind: str) -> None:
        self.is_leaving = bool(kind)
        if kind == "drain":
            for why in self.why.values():
                why |= {"preempted", "the drain ran out of time"}
            self.drains_until = self.it.time + DRAIN_S
            self.it.leases.drain(DRAIN_S, "preempted")
        elif kind:
            self.it.leases.finish_up()

    @rule(seconds=st.sampled_from([0.0, 0.02, 0.3, 1.0, 3.0, 30.0, leases.HOLD_S_MAX]))
    def time_passes(self, seconds: float) -> None:
        until = self.it.time + seconds
        while self.it.time < until:
            self.it.time, self.it.wake = min(until, max(self.it.time + 1e-3, self.it.wake)), math.inf
            self.it.leases.wake()

    def lacking(self, lease_id: LeaseId) -> bool:
        """Whether the learner lacks tokens of it. Those that it held once and forgot are sent again only with the next ones:
        without these, who continues the group samples them again."""
        spec = self.specs[lease_id]
        keys = [(spec.group_id, index) for index in range(spec.rollout_count)]
        held = [max(len(self.it.held.get(key, [])), self.forgotten.get(key, 0)) for key in keys]
        return any(len(self.it.sampled.get(f"{lease_id}/{index}", [])) > count for index, count in enumerate(held))

    def is_free(self, at: float) -> bool:
        """Whether nothing needs the live version then, nor may need it within the grace."""
        for name in (name for name, since in self.exact.items() if since <= at):
            is_turn = warm_groups(self.specs[name].group_id)
            grace_s = leases.TURN_GRACE_S if is_turn else leases.EXACT_GRACE_S
            if self.it.ended_at.get(name, math.inf) + grace_s > at:
                return False
        return True

    @invariant()
    def a_version_goes_live_once_nothing_needs_the_one_before_and_after_the_hold_at_the_latest(self) -> None:
        if self.waits_since is None:
            return
        latest = self.waits_since + leases.HOLD_S_MAX
        if not self.it.admitted_at:
            assert self.it.time < latest and not self.is_free(self.it.time)
            return
        at = self.it.admitted_at.pop()
        assert at >= latest or self.is_free(at)
        self.waits_since, self.is_swapping = None, True

    @invariant()
    def the_learner_holds_a_prefix_of_what_was_sampled(self) -> None:
        for request_id, tokens in self.it.sampled.items():
            lease_id, _, index = request_id.rpartition("/")
            known = self.it.held.get((self.specs[LeaseId(lease_id)].group_id, int(index)), [])
            assert tokens[: len(known)] == known

    @invariant()
    def an_ended_lease_leaves_nothing_in_the_engine_and_what_ended_it_is_said(self) -> None:
        """A lease that is handed back has all its tokens at the learner; no more is requested than fits, nothing while leaving."""
        it = self.it
        for request_id in it.running:
            name, _, index = request_id.rpartition("/")
            lease_id = LeaseId(name)
            assert lease_id in it.leases.lease_ids and it.time <= self.deadlines[lease_id]
            assert (self.specs[lease_id].group_id, int(index)) not in it.settled
        assert it.time < self.drains_until or it.drained is not None
        assert all(0 <= count <= SLOTS + SLOTS + 3 for count in it.requests), "slots, cover and a group"
        assert not (self.is_leaving and self.is_up and it.wanted)
        for lease_id, (reason, message) in it.ended.items():
            if lease_id not in self.judged:
                self.judged.add(lease_id)
                spec, why = self.specs[lease_id], self.why[lease_id]
                assert message in why or (message == PAST[0] and self.is_past(lease_id)), (message, why)
                if reason is EndReason.HANDED_BACK and message not in PAST and spec.group_id not in it.verdicts:
                    assert not self.lacking(lease_id), "every token is handed back"

    def is_past(self, lease_id: LeaseId) -> bool:
        since = self.learner_since
        return since is not None and self.it.time >= max(self.deadlines[lease_id], since) + leases.VERDICT_GRACE_S

    def teardown(self) -> None:
        """Once nothing fails any more, every lease ends, and one that finished left all its tokens with the learner."""
        it = self.it
        it.leases.on_coordinator(1.0)
        self.learner(True)
        latest = it.time + 30.0 + leases.VERDICT_GRACE_S
        for _ in range(200):
            while it.fetching:
                self.answer_fetch(is_refused=False)
            for request_id in sorted(it.running):
                it.step(request_id, STOP)
            it.deliver()
            while it.reports:
                self.judge(is_lost=False)
            if not it.leases.lease_ids:
                break
            it.at(max(it.time, it.wake))
        assert not it.leases.lease_ids and set(it.ended) == set(self.specs) and it.time <= latest
        assert (it.drained is not None) == self.is_leaving
        for lease_id, (reason, _) in it.ended.items():
            group_id = self.specs[lease_id].group_id
            if reason is EndReason.FINISHED and group_id not in it.verdicts:
                for index in range(self.specs[lease_id].rollout_count):
                    key, tokens = (group_id, index), it.sampled.get(f"{lease_id}/{index}")
                    assert key in it.finished and tokens in (None, it.held[key])


TestLeases = LeaseRules.TestCase
TestLeases.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_finished_rollout_is_reported_at_once_a_growing_one_every_interval_and_the_group_ends_its_lease() -> None:
    it = Surroundings().begin()
    it.grant(L1, group("g1", 1))
    it.sample("l1/0", 3)
    assert not it.reports
    it.at(1.0)
    (segment,) = it.reports[L1]
    assert segment.token_ids == (3,) and segment.expected_remaining_tokens >= 1
    it.judge(L1)
    it.time, it.version = 1.1, 4
    it.sample("l1/0", STOP)
    assert not it.reports and it.wake == pytest.approx(1.1 + leases.FINISHED_DELAY_S)
    it.at(it.wake)
    (segment,) = it.reports[L1]
    assert (segment.offset, segment.token_ids, segment.finish_reason) == (1, (STOP,), FinishReason.STOP)
    assert segment.version_spans == spans_of([Version(4)]) and segment.expected_remaining_tokens == 0
    it.judge(L1)
    assert it.ended == {L1: (EndReason.FINISHED, "")} and it.progress == {L1: (1, 2)}
    assert astuple(it.leases.rates.rates(10.0)) == pytest.approx((2 / 1.1, 1 / 1.1, 1.1, 1.1)), "while it had work"
    it.grant(LeaseId("l2"), group("g2", 1), is_continuation=True)
    it.time = 31.1
    it.leases.on_partials(LeaseId("l2"), [held("g2", 0, (3,))])
    it.time = 31.6
    it.sample(next(iter(it.running)), STOP)
    seconds = it.leases.rates.rates(31.6).rollout_s_mean
    assert seconds == pytest.approx((1.1 + 0.5) / 2), "without the wait for the learner"


@pytest.mark.parametrize(("lasts_s", "before_s"), [(10.0, 1.0), (100.0, 2.0)])
def test_a_lease_is_handed_back_before_its_deadline_which_a_renewal_moves(lasts_s: float, before_s: float) -> None:
    it = Surroundings().begin(has_learner=False)
    it.leases.on_coordinator_lost()
    for deadline in (lasts_s, lasts_s + 5.0):
        it.grant(L1, group("g1"), deadline)
        assert it.wake == deadline - before_s and it.running
    it.sample("l1/0", 3)
    it.at(it.wake)
    assert not it.running
    it.time = 2 * lasts_s
    it.leases.on_learner()
    it.at(it.wake)
    assert it.ended[L1] == (EndReason.HANDED_BACK, PAST[0]) and it.time == 2 * lasts_s + leases.VERDICT_GRACE_S


def test_what_the_learner_wants_no_more_is_sampled_no_more_and_what_it_lacks_comes_soon() -> None:
    it = Surroundings().begin()
    it.grant(L1, group("g1", 3))
    for at, name, verdict, left in (
        (1.0, "l1/0", Verdict.RESEND, 3), (1.05, "l1/0", Verdict.STALE, 2), (2.05, "l1/1", Verdict.CLOSED, 0),
    ):  # fmt: skip
        it.verdicts["g1"] = verdict
        it.sample(name, 3)
        it.at(it.wake)
        it.judge(L1)
        assert (it.time, len(it.running)) == (pytest.approx(at), left)
    assert it.ended == {L1: (EndReason.FINISHED, "the group is closed")}
    it.grant(LeaseId("l2"), group("g2", 1))
    it.sample(next(iter(it.running)), STOP)
    it.at(it.wake)
    it.reports.clear()
    it.leases.on_learner()
    assert it.reports, "the stream broke: what is finished is sent again at once"


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


@pytest.mark.parametrize(
    ("name", "ends_at", "expected"),
    [
        ("g1", 0.0, leases.EXACT_GRACE_S), ("g1.0.1", 0.0, leases.TURN_GRACE_S), ("g1", leases.HOLD_S_MAX - 0.1, leases.HOLD_S_MAX),
        ("g1", math.inf, leases.HOLD_S_MAX),
    ],
    ids=["alone", "a turn", "late", "never"],
)  # fmt: skip
def test_a_version_waits_for_evaluations_and_next_calls_awhile(name: str, ends_at: float, expected: float) -> None:
    it = Surroundings().begin(has_learner=False)
    it.leases.on_coordinator_lost()
    it.grant(L1, group(name, 1, version=3))
    it.leases.on_version_arrived()
    if ends_at < leases.HOLD_S_MAX:
        it.time = ends_at
        it.leases.revoke(L1, "revoked")
        it.deliver()
    it.at(it.wake)
    assert it.admitted_at == [expected] and not it.running


def test_what_was_granted_for_a_version_while_the_next_was_swapped_in_takes_no_slot_any_more() -> None:
    it = Surroundings().begin(has_learner=False)
    it.grant(L1, group("g1", 1, version=3))
    (request_id,) = it.running
    late = TokenChunk(request_id, (7,), (-0.5,), (-0.5,), Version(4), FinishReason.UNFINISHED)
    it.leases.on_tokens([late])  # proven before the leases are told of the version
    it.version = 4
    it.leases.on_version_live(Version(4), 4)
    assert not it.running


@pytest.mark.parametrize("count", [1, SEGMENT_TOKENS_MAX + 1, 3 * leases.REPORT_TOKENS_MAX])
def test_long_rollouts_are_reported_in_bounded_segments_and_finished_ones_first(count: int) -> None:
    assert SEGMENT_TOKENS_MAX <= wire.SEGMENT_TOKENS_MAX and leases.REPORT_TOKENS_MAX <= wire.REPORT_TOKENS_MAX
    it = Surroundings().begin()
    it.grant(L1, group("g1", 7, 1 << 20))
    for index in range(1, 7):
        it.step(f"l1/{index}", *(3,) * (count - 1), STOP)
    it.sample("l1/0", 3)
    while len(it.finished) < 6:
        it.at(it.wake)
        segments = it.reports[L1]
        assert max(len(s.token_ids) for s in segments) <= SEGMENT_TOKENS_MAX and all(s.index for s in segments[:-1])
        it.judge(L1)
    assert all(it.held["g1", index] == it.sampled[f"l1/{index}"] for index in range(1, 7))
    assert it.time < 1.5, "soon one after another"


def test_the_routing_of_a_rollout_is_reported_beside_its_tokens_within_bounds_or_not_at_all() -> None:
    it = Surroundings().begin()
    it.grant(L1, group("g1", 2, 1 << 14))

    def reported(at: float, *counts: int, row: bytes = bytes(2048)) -> list[tuple[int, int]]:
        """Of each rollout the rows of its prompt and of its tokens, once it has sampled so many more with such rows."""
        for index, count in enumerate(counts):
            it.step(f"l1/{index}", *(3,) * count)
            it.chunks[-1] = replace(it.chunks[-1], routing=Routing(row, count * row))
        it.deliver()
        it.at(at)
        routings = [segment.routing for segment in it.reports[L1]]
        it.judge(L1)
        return [(len(routing.prompt) // 2048, len(routing.tokens) // 2048) for routing in routings]

    assert reported(1.0, 1000, 1000) == [(1, 1000), (0, 535)], "siblings share the prompt; 3 MiB a report"
    assert reported(2.0, 1) == [(0, 1), (0, 465)]
    assert reported(3.0, 8000, 1) == [(0, 0), (0, 1)], "16 MiB a rollout"
    assert reported(4.0, 1, 1, row=b"") == reported(5.0, 1, 1) == [(0, 0)] * 2, "once a token lacks it, no other has it"


def test_slots_are_requested_in_whole_groups_and_nothing_while_too_many_tokens_wait_for_the_learner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "UNHELD_TOKENS_MAX", 3)
    it = Surroundings().begin(5, has_learner=False)
    assert it.requests == [5] and it.wake == leases.REPEAT_S
    it.grant(L1, group("g1"))
    it.leases.activate(False)
    it.leases.activate(True)
    assert it.requests == [5, 4, 0, 4], "three slots are free: two groups of two; nothing on standby"
    it.sample("l1/0", 3, 3, STOP)
    assert it.requests[-1] == 0
    it.leases.drain(2.0, "preempted")
    assert it.wake == 2.0 and it.drained is None
    it.at(2.0)
    assert it.drained == 3, "without a learner a drain ends in time and counts what is lost"
    monkeypatch.setattr(leases, "LEASES_MAX", 1)
    full = Surroundings().begin()
    full.grant(L1, group("g1"))
    assert full.requests == [8, 0]
    lost = Surroundings().begin()
    lost.leases.on_coordinator_lost()
    lost.leases.on_coordinator(1.0)
    assert lost.requests == [8, 8], "it may not know of the first"


def test_a_standing_request_is_repeated_in_time_renewed_by_a_version_and_taken_back() -> None:
    demand = leases.Demand()
    assert demand.request(0, True, 0.0) is None  # no weights yet
    demand.live(Version(1), 4)
    assert demand.request(0, True, 0.0) == (4, Version(1))
    assert demand.request(0, True, 1.0) is None and demand.repeat_at() == leases.REPEAT_S
    assert demand.request(0, True, leases.REPEAT_S) == (4, Version(1))
    demand.live(Version(2), 3)
    assert demand.request(0, True, 5.1) == (3, Version(2)), "it may open newer groups"
    assert demand.request(0, False, 5.2) == (0, Version(2)) and demand.request(0, False, 100.0) is None


@pytest.mark.parametrize(("gap_s", "wanted"), [(0.25, 5), (0.01, 6)])
def test_slots_that_fall_free_while_a_lease_travels_are_requested_ahead(gap_s: float, wanted: int) -> None:
    it = Surroundings().begin(4)
    it.time = 0.5  # a lease travels half a second
    for number in range(4):
        it.grant(LeaseId(f"l{number}"), group(f"g{number}", 1))
    for number in range(2):
        it.time += gap_s
        it.sample(f"l{number}/0", 3, 3, 3, STOP)
    assert it.requests[-1] == wanted, "two slots are free, three will be, or all"
    it.sample("l2/0", 3)
    it.at(3.0)
    assert it.reports[LeaseId("l2")][0].expected_remaining_tokens == 3


@given(rate=st.floats(1, 1000), idle_s=st.floats(0, 100), busy_s=st.floats(1, 15))
def test_rates_are_those_of_busy_time_however_long_it_stood_idle(rate: float, idle_s: float, busy_s: float) -> None:
    window, now, steps = leases.RateWindow(), idle_s, 50
    window.busy(True, now)
    each = round(rate * busy_s / steps)
    for _ in range(steps):
        now += busy_s / steps
        window.sampled(each, now)
        window.busy(True, now)
    assert window.rates(now).tokens_per_s == pytest.approx(steps * each / busy_s, rel=1e-6)
    window.busy(False, now)
    assert window.rates(now + 1000).tokens_per_s == pytest.approx(steps * each / busy_s, rel=1e-6)
    window.busy(True, now + 1000)
    for second in range(1, 31):  # old work leaves the window
        window.sampled(10, now + 1000 + second)
        window.busy(True, now + 1000 + second)
    for i in range(1, 101):
        window.finished(float(i), now + 1030)
    rates = window.rates(now + 1030)
    assert rates.tokens_per_s == pytest.approx(10, rel=0.15)
    assert (rates.rollout_s_mean, rates.rollout_s_p95) == (pytest.approx(50.5), 96.0)
