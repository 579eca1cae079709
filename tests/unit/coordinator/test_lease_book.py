"""The lease book under any order of events: a group has one lease at most, attempts only grow, nothing is lost."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2.base.ids import GroupId, LeaseId, PeerId, RunId, Version
from echo2.base.rollout import EndReason, GroupSpec, SamplingParams, Ticket, Work
from echo2.coordinator.leases import lease as le
from echo2.coordinator.leases.book import MOVES_PER_GROUP_MAX, QUIET_S, LeaseBook, WorkerPace, is_quiet, moves
from echo2.coordinator.leases.lease import EVALUATION_SHARE, Evaluators, ExpectedLength, LeaseRequest, LeaseRules
from echo2.coordinator.planning.advice import lease_waits, slowest
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

BOUND = 4
TIMEOUT_S = 30.0
WORKERS = A, B, C = [PeerId(name) for name in ("a", "b", "c")]


def spec(name: str, consume_step: int = 0, rollouts: int = 4, prompt: int = 1, limit: int = 8) -> GroupSpec:
    return GroupSpec(GroupId(name), (prompt, 2, 3), rollouts, SamplingParams(max_new_tokens=limit), consume_step)


def exam(name: str, version: int) -> GroupSpec:
    return replace(spec(name, version), work=Work.EVALUATE, exact_version=Version(version))


def book(*groups: GroupSpec) -> LeaseBook:
    """A book to which these groups are offered."""
    made = LeaseBook(LeaseRules(BOUND, TIMEOUT_S))
    made.offer(0.0, groups)
    return made


def ready(one: LeaseBook, worker: PeerId, version: int = 0, free: int = 4, now: float = 0.0) -> list[le.Grant]:
    one.allow(now, worker, True)
    return grants(one.request(now, worker, free, Version(version)))


def ticket(group: str, attempt: int, lease_id: str = "", deadline: float = 10.0) -> Ticket:
    """Of a lease that a worker says it holds."""
    group_id = GroupId(group)
    return Ticket(LeaseId(lease_id or le.lease_id_of(group_id, attempt)), group_id, A, attempt, deadline, RunId("r"))


def hold(grant: le.Grant) -> Ticket:
    return ticket(grant.group.group_id, grant.attempt, grant.lease_id, grant.deadline)


def delivery(worker: PeerId, heard: int, admitted: float) -> pb.WorkerDelivered:
    return pb.WorkerDelivered(peer_id=worker, heard_rollouts=heard, admitted_rollouts=admitted)


def grants(actions: list[le.Action]) -> list[le.Grant]:
    return [action for action in actions if isinstance(action, le.Grant)]


def revoked(actions: list[le.Action]) -> list[LeaseId]:
    return [action.lease_id for action in actions if isinstance(action, le.Revoke)]


def ends(one: LeaseBook, grant: le.Grant, reason: EndReason = EndReason.FINISHED, now: float = 1.0) -> list[le.Action]:
    return one.end(now, grant.worker_id, grant.lease_id, reason, "")


def reminded(one: LeaseBook, name: str, tokens: int, now: float) -> list[LeaseId]:
    """The learner holds so many tokens of the group and lacks the rest; returns the leases that are taken back."""
    return revoked(one.offer(now, (spec(name),), (tokens,)))


def test_the_most_urgent_group_goes_first_and_a_worker_that_is_too_old_for_it_is_told_why_it_gets_none() -> None:
    one = book(spec("late", 9), spec("soon", 3), spec("next", 5))
    assert [grant.group.group_id for grant in ready(one, A, version=0, free=8)] == ["soon"]
    assert "it takes version 1 or newer" in lease_waits(one, 0.0)[0][0]
    moved = one.offer(0.5, (spec("late", 4),))
    assert le.Save("groups", "late") in moved, "a new turn"
    assert [(grant.group.group_id, grant.group.consume_step) for grant in grants(moved)] == [("late", 4)]
    assert one.offer(0.6, (spec("late", 5),)) == [le.Save("groups", "late")], "it stays leased"
    granted = grants(one.request(1.0, A, 8, Version(5)))
    assert [grant.group.group_id for grant in granted] == ["next"]
    ready(one, B, version=0, free=80), ready(one, C, version=2, free=80)
    new = grants(one.offer(2.0, [spec(name, BOUND + 1) for name in "efg"]))
    assert [grant.worker_id for grant in new] == [C, C, C], "B has more room, but is too old"


@pytest.mark.parametrize("anew", [spec("g", prompt=9), spec("g", limit=4), spec("g", rollouts=3)])
def test_a_group_of_a_learner_with_a_new_folder_takes_the_place_of_its_namesake(anew: GroupSpec) -> None:
    one = book(spec("g"), spec("h"))
    first, second = ready(one, A, free=8)
    synced = one.sync(1.0, (anew, spec("h")))
    assert revoked(synced) == [first.lease_id] and {second.lease_id} == one.leases.keys()
    (again,) = ready(one, B)
    assert again.group == anew and again.attempt == 2, "an older ticket is void"
    assert one.sync(2.0, (anew, spec("h"))) == [] == one.end(3.0, A, first.lease_id, EndReason.HANDED_BACK, "")


def test_a_worker_that_asks_again_keeps_its_place() -> None:
    one = book()
    for now, worker in ((1.0, C), (2.0, A), (3.0, C)):
        ready(one, worker, now=now)
    (grant,) = grants(one.offer(4.0, (spec("g"),)))
    assert grant.worker_id == C, "it has waited longest, however often it asks"


def test_a_worker_that_was_lost_or_barred_gets_nothing_before_it_is_allowed_again() -> None:
    one = book(spec("g"))
    assert ready(one, A)
    one.lose(1.0, A, "quarantined")
    assert not grants(one.request(2.0, A, 4, Version(0)))
    assert [grant.worker_id for grant in grants(one.allow(3.0, A, True))] == [A]


def test_a_later_turn_goes_to_the_worker_that_has_the_one_before_it_and_after_a_while_to_any() -> None:
    one = book(spec("g.0.1", rollouts=1))
    (first,) = ready(one, A, free=1)
    ready(one, B, free=8)
    ends(one, first)
    assert grants(one.offer(1.0, (spec("g.0.2", rollouts=1),))) == [], "it waits for the warm one"
    (second,) = grants(one.request(1.2, A, 1, Version(0)))
    assert (second.worker_id, second.group.group_id) == (A, "g.0.2")
    ends(one, second, now=2.0)
    offered = (spec("g.0.3", rollouts=1), spec("h"))
    assert grants(one.offer(2.0, offered))[0].group.group_id == "h"
    (third,) = grants(one.tick(3.1))
    assert (third.worker_id, third.group.group_id) == (B, "g.0.3"), "the warm one wants nothing now"
    one.lose(3.2, B, "gone")
    assert ready(one, C, free=8, now=3.3), "whoever is lost is not waited for"


def test_a_group_of_which_the_learner_hears_nothing_leaves_a_worker_that_only_tells_of_progress() -> None:
    """And that worker is given nothing for a while, twice as long the second time."""
    one, silent_s = book(spec("g")), 2 * TIMEOUT_S
    (first,) = ready(one, A)
    for second in range(5, 65, 5):
        one.on_progress(float(second), A, first.lease_id, 0, second)
    assert reminded(one, "g", 0, 3.0) == [] == reminded(one, "g", 7, 9.0), "something came between the reminders"
    assert reminded(one, "g", 7, 9.0 + silent_s - 1) == []
    assert reminded(one, "g", 7, 9.0 + silent_s) == [first.lease_id]
    now = 10.0 + silent_s
    assert ready(one, A, now=now) == [], "it would take it at once"
    (again,) = ready(one, B, now=now)
    assert again.is_continuation
    ends(one, again, now=now + 1)
    one.offer(now + 2, (spec("h"),))
    assert grants(one.tick(now + 3)) == []
    assert [grant.worker_id for grant in grants(one.tick(now + 2 * TIMEOUT_S))] == [A]
    later = now + 10 * TIMEOUT_S
    assert one.records.bar(A, "", TIMEOUT_S, later) == 2 * TIMEOUT_S
    assert one.records.bar(A, "", TIMEOUT_S, later + 1) == 2 * TIMEOUT_S - 1, "several at once count as one"
    assert [one.records.is_barred(worker, WORKERS, later) for worker in WORKERS] == [True, False, False]
    assert not one.records.is_barred(A, [A], later), "there is nobody else"


@pytest.mark.parametrize("later", [(), ("h",), ("g", "h")])
def test_the_only_worker_has_all_its_groups_again_as_soon_as_it_or_the_learner_is_back(later: tuple[str, ...]) -> None:
    """Otherwise all of them would wait a lease's timeout for somebody else. `later`: those that the hello has no room for."""
    one = book(spec("g"), spec("h"))
    assert len(ready(one, A, free=8)) == 2
    one.lose(10.0, A, "gone")
    one.reconnect(11.0, A, ())
    held = ready(one, A, free=8, now=12.0)
    assert {grant.group.group_id for grant in held} == {"g", "h"}
    for grant in held:
        ends(one, grant, now=13.0)
    assert grants(one.request(14.0, A, 8, Version(0))) == [], "they are finished, it says"
    told = tuple(spec(name) for name in ("g", "h") if name not in later)
    again = grants(one.sync(15.0, told, frozenset(map(GroupId, later))))
    again += [grant for name in later for grant in grants(one.offer(15.0, (spec(name),)))]
    assert {grant.group.group_id for grant in again} == {"g", "h"}, "the learner lost them when it was restarted"


@pytest.mark.parametrize("came_back", ["learner", "coordinator"])
def test_no_worker_is_to_blame_for_what_a_restart_lost(came_back: str) -> None:
    """A learner that came back holds no tokens of unfinished rollouts; what a worker said meanwhile may wait."""
    one = book(spec("g"))
    (first,) = ready(one, A)
    assert reminded(one, "g", 0, 3.0) == []
    if came_back == "learner":
        for second in (15, 30, 45, 60, 75, 105):
            one.on_progress(float(second), A, first.lease_id, 0, second)
            if second == 60:
                one.sync(61.0, (spec("g"),))
                assert reminded(one, "g", 0, 64.0) == [] and one.records.of(A).bars == 0
        assert reminded(one, "g", 0, 64.0 + 2 * TIMEOUT_S) == [first.lease_id]
    else:
        assert reminded(one, "g", 0, 3.0 + 3 * TIMEOUT_S) == [] and one.records.of(A).bars == 0
        assert revoked(one.tick(4.0 + 3 * TIMEOUT_S)) == [first.lease_id]


def test_what_the_learner_lacks_is_made_again_by_another_and_what_it_does_not_list_is_revoked() -> None:
    one = book(spec("g"), spec("h"), spec("i"))
    first, second, third = ready(one, A, free=16)
    ends(one, first)
    assert grants(one.offer(2.0, (spec("g"),), (0,))) == [], "A has just said that it is finished"
    one.request(2.1, A, 0, Version(0))
    ends(one, second, now=2.5)
    assert revoked(one.sync(3.0, (first.group, second.group))) == [third.lease_id]
    again = ready(one, B, free=8, now=4.0)
    assert [(grant.worker_id, grant.attempt) for grant in again] == [(B, 2), (B, 2)]


def test_a_silent_lease_expires_to_another_worker_as_a_continuation_and_progress_renews_it() -> None:
    one = book(spec("g"))
    (first,) = ready(one, A)
    assert one.on_progress(14.0, A, first.lease_id, 0, 9) == [], "not with each report"
    renewed = grants(one.on_progress(20.0, A, first.lease_id, 0, 10))
    assert [(grant.is_renewal, grant.deadline) for grant in renewed] == [(True, 20.0 + TIMEOUT_S)]
    for tokens in (10, 9):
        assert one.on_progress(45.0, A, first.lease_id, 0, tokens) == [], "told again or out of order it is no progress"
    assert ready(one, B, now=46.0) == [] == one.tick(49.0)
    actions = one.tick(50.0)
    assert revoked(actions) == [first.lease_id]
    (second,) = grants(actions)
    assert (second.worker_id, second.attempt, second.is_continuation) == (B, 2, True)
    assert ends(one, first, now=51.0) == [] and one.groups[GroupId("g")].phase is le.GroupPhase.LEASED


def test_a_worker_that_comes_back_keeps_what_it_holds_and_is_given_nothing_that_its_last_life_asked_for() -> None:
    one = book(spec("g"), spec("h"))
    kept, lost = ready(one, A, free=32)  # and would take more
    actions = one.reconnect(5.0, A, (hold(kept), ticket("never", 3, "l-unknown")))
    assert [grant.lease_id for grant in grants(actions)] == [kept.lease_id] and revoked(actions) == ["l-unknown"]
    assert one.groups[lost.group.group_id].phase is le.GroupPhase.QUEUED
    assert grants(one.offer(6.0, (spec("i"),))) == [], "its engine may not run yet"
    assert len(grants(one.request(7.0, A, 4, Version(0)))) == 1


def test_a_lease_that_a_lost_process_granted_is_taken_in() -> None:
    one = book(spec("g"))
    lost = ticket("g", 7)
    assert revoked(one.reconnect(10.0 + TIMEOUT_S, A, (lost,))) == [lost.lease_id], "not for ever"
    (grant,) = grants(one.reconnect(1.0, A, (lost,)))
    assert (grant.lease_id, grant.attempt, one.queued) == (lost.lease_id, 7, 0)
    assert revoked(one.reconnect(2.0, B, (lost,))) == [lost.lease_id], "the lost process granted it as well"

    def is_refused(attempt: int, named_as: int) -> bool:
        said = ticket("g", attempt, le.lease_id_of(GroupId("g"), named_as))
        return revoked(one.reconnect(2.0, B, (said,))) == [said.lease_id]

    assert is_refused(9, 9), "another has it"
    one.lose(2.0, A, "gone")
    assert is_refused(7, 7) and is_refused(9, 8), "its time is over; it was never granted"
    assert not is_refused(8, 8)
    again = book()
    again.restore(one.groups.values(), ())  # what was saved names a lease that was not
    assert [grant.attempt for grant in ready(again, B)] == [9]


def test_a_recalled_lease_that_its_worker_still_holds_when_it_comes_back_goes_on_like_any() -> None:
    """The word was lost with its stream: it expired in the midst of progress, and its only worker might not go on with it."""
    one = book(spec("g"))
    (first,) = ready(one, A)
    one.recall(1.0, first.lease_id, "its machine will go")
    one.reconnect(2.0, A, (hold(first),))
    for now in (20.0, 40.0, 60.0):
        one.on_progress(now, A, first.lease_id, 0, int(now))
    assert one.tick(61.0) == []
    one.recall(62.0, first.lease_id, "its machine will go")
    actions = one.reconnect(63.0, A, (hold(first),), False)
    assert revoked(actions) == [first.lease_id], "it is told again"
    one.on_progress(64.0, A, first.lease_id, 0, 64)
    one.tick(63.0 + one.rules.recall_s)
    assert first.lease_id not in one.leases


def test_a_refused_group_pauses_and_a_recalled_one_moves_once_it_was_handed_back() -> None:
    one, now = book(spec("g")), 1.0
    (second,) = ready(one, A)
    for pause_s in (0.5, 1.0, 2.0):  # a learner that is full again and again is asked less often
        ends(one, second, EndReason.REFUSED, now)
        for worker in (A, B):
            assert ready(one, worker, now=now + 0.9 * pause_s) == []
        assert "refused" in lease_waits(one, now + 0.9 * pause_s)[0][0]
        one.request(now + pause_s, B, 0, Version(0))
        now += 1.1 * pause_s
        (second,) = grants(one.tick(now))
    assert (second.worker_id, second.attempt) == (A, 4)
    assert revoked(one.recall(now, second.lease_id, "a faster worker is free")) == [second.lease_id]
    assert one.recall(now, second.lease_id, "and another", C) == [], "it is on its way"
    assert ready(one, A, now=now) == []
    assert grants(ends(one, second, EndReason.HANDED_BACK, now + 1)) == [], "not to the one that was asked for it"
    assert [grant.is_continuation for grant in ready(one, B, now=now + 1)] == [True]


def test_leases_that_stand_still_are_told_by_worker_the_longest_first() -> None:
    one = book(spec("g"), spec("h"), spec("i"))
    _, second = ready(one, A, free=8)
    ready(one, B, now=3.0)
    assert lease_waits(one, TIMEOUT_S / 4) == []
    one.on_progress(1.0, A, second.lease_id, 0, 7)
    now = TIMEOUT_S / 4 + 4.0
    assert lease_waits(one, now, lambda peer: f"worker {peer}") == [
        ("2 leases on worker a without progress at 7 tokens", 0.0),
        (f"lease {one.leases_of(B)[0].lease_id} on worker b without progress at 0 tokens", 3.0),
    ]
    assert slowest(one, now).startswith("2 leases on a, lease l-")


def test_a_length_is_guessed_from_the_prompt_else_from_all_and_claims_are_bounded_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = ExpectedLength()

    def guess(prompt: int, limit: int = 1000) -> float:
        return lengths.guess(spec("g", prompt=prompt, limit=limit))

    assert guess(1) == 0
    lengths.learn(spec("a", prompt=1, limit=1000), 400, 4)
    assert guess(1) == 400 == guess(2), "of all prompts"
    lengths.learn(spec("b", prompt=2, limit=1000), 4 * 900, 4)
    assert (guess(1), guess(2), guess(2, limit=50)) == (400, 3600, 200)
    rests = ((0, 0, 1000), (240, 1, 1000), (800, 3, 1000), (800, 3, 210), (800, 4, 1000))
    left = [lengths.rest(spec("c", prompt=1, limit=limit), tokens, done) for tokens, done, limit in rests]
    assert left == [400, 3 * 40, 100, 10, 0], "twice the expectation: half as many again, up to the limit"
    lengths.learn(spec("d", prompt=3, limit=1000), 1 << 60, 1)
    for number in range(12):
        lengths.learn(spec(f"e{number}", prompt=3, limit=1000), 10, 1)
    assert guess(3) < 4 * 30
    monkeypatch.setattr(le, "PROMPTS_MAX", 2)
    lengths.learn(spec("f", prompt=4, limit=1000), 4 * 700, 4)
    assert guess(4) == 2800 and guess(3) < 4 * 30 and guess(1) == guess(5), "the oldest prompt is forgotten"


class AnyOrder(RuleBasedStateMachine):
    """Learner, workers and the clock do as they please; the process dies and its saved state comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.book, self.now, self.made = book(), 0.0, 0
        self.attempts: dict[GroupId, int] = {}
        self.versions: dict[PeerId, int] = dict.fromkeys(WORKERS, 0)
        self.open: dict[GroupId, GroupSpec] = {}
        self.saved: dict[str, dict[str, Any]] = {"groups": {}, "leases": {}}
        self.avoided: dict[GroupId, tuple[PeerId, float]] = {}

    def tell(self, method: Callable[..., list[le.Action]], *args: object) -> None:
        before = dict(self.book.leases)
        actions = method(self.now, *args)
        for lease_id in revoked(actions):  # taken back, for what its worker may have failed
            lease = before.get(lease_id)
            if lease is not None and lease_id not in self.book.leases:
                avoided_s = TIMEOUT_S if method != self.book.offer else 0
                self.avoided[lease.group_id] = lease.worker_id, self.now + avoided_s
        for save in [action for action in actions if isinstance(action, le.Save)]:
            row = getattr(self.book, save.kind).get(save.key)
            self.saved[save.kind].pop(save.key, None)
            if row is not None:
                self.saved[save.kind][save.key] = replace(row)
        for grant in grants(actions):
            if grant.is_renewal:
                continue
            group_id = grant.group.group_id
            assert grant.attempt > self.attempts.get(group_id, 0), "an attempt number was given twice"
            assert group_id in self.open, "a group that the learner does not want was leased"
            worker_id, until = self.avoided.pop(group_id, (None, 0.0))
            assert grant.worker_id != worker_id or self.now >= until, "it goes back to the one that it was taken from"
            version, exact = self.versions[grant.worker_id], grant.group.exact_version
            assert version == exact if exact is not None else version >= grant.group.consume_step - BOUND
            self.attempts[group_id] = grant.attempt

    def some_lease(self, data: st.DataObject) -> LeaseId:
        return data.draw(st.sampled_from(sorted(self.book.leases) or [LeaseId("l-none")]))

    @rule(count=st.integers(1, 4), at=st.integers(0, 8), is_exam=st.booleans())
    def offer(self, count: int, at: int, is_exam: bool) -> None:
        fresh = [(exam if is_exam else spec)(f"g{self.made + i}", at) for i in range(count)]
        self.made += count
        self.open.update({one.group_id: one for one in fresh})
        self.tell(self.book.offer, tuple(fresh))

    @rule(worker=st.sampled_from(WORKERS), free=st.integers(0, 12), version=st.integers(0, 6))
    def want(self, worker: PeerId, free: int, version: int) -> None:
        self.versions[worker] = version
        self.tell(self.book.allow, worker, True)
        self.tell(self.book.request, worker, free, Version(version))

    @rule(worker=st.sampled_from(WORKERS), data=st.data(), reason=st.sampled_from(EndReason))
    def end(self, worker: PeerId, data: st.DataObject, reason: EndReason) -> None:
        lease_id = self.some_lease(data)
        held = self.book.leases.get(lease_id)
        if held is not None and held.worker_id == worker and held.is_recalled and reason is EndReason.HANDED_BACK:
            self.avoided[held.group_id] = worker, self.now + TIMEOUT_S
        self.tell(self.book.end, worker, lease_id, reason, "said so")
        assert held is None or (self.book.leases.get(lease_id) is held) == (held.worker_id != worker), (
            "the holder's alone"
        )

    @rule(data=st.data(), finished=st.integers(0, 4), tokens=st.integers(0, 50))
    def progress(self, data: st.DataObject, finished: int, tokens: int) -> None:
        lease_id = self.some_lease(data)
        held = self.book.leases.get(lease_id)
        worker = data.draw(st.sampled_from([held.worker_id, *WORKERS] if held is not None else WORKERS))
        before = replace(held) if held is not None else None
        self.tell(self.book.on_progress, worker, lease_id, finished, tokens)
        assert held is None or held.worker_id == worker or held == before, "the holder's alone"
        if held is not None and before is not None and held.worker_id == worker:
            most = max((before.finished_rollouts, before.tokens), (finished, tokens))
            assert (held.finished_rollouts, held.tokens) == most

    @rule(data=st.data(), to=st.sampled_from([None, *WORKERS]))
    def recall(self, data: st.DataObject, to: PeerId | None) -> None:
        self.tell(self.book.recall, self.some_lease(data), "it is slow", to)

    @rule(heard=st.lists(st.builds(delivery, st.sampled_from(WORKERS), st.integers(0, 9), st.floats(0, 9))))
    def deliver(self, heard: list[pb.WorkerDelivered]) -> None:
        self.tell(self.book.on_delivered, tuple({one.peer_id: one for one in heard}.values()))

    @rule(worker=st.sampled_from(WORKERS))
    def lose(self, worker: PeerId) -> None:
        self.tell(self.book.lose, worker, "gone")
        assert not self.book.leases_of(worker)

    @rule(worker=st.sampled_from(WORKERS), keep=st.integers(0, 3))
    def come_back(self, worker: PeerId, keep: int) -> None:
        held = self.book.leases_of(worker)[:keep]
        tickets = [ticket(lease.group_id, lease.attempt, lease.lease_id, lease.deadline) for lease in held]
        self.tell(self.book.reconnect, worker, tuple(tickets))
        assert {lease.lease_id for lease in self.book.leases_of(worker)} >= {lease.lease_id for lease in held}

    @precondition(lambda self: self.open)
    @rule(data=st.data(), reason=st.sampled_from(["complete", "stale"]))
    def close(self, data: st.DataObject, reason: str) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[group_id]
        self.tell(self.book.close, (group_id,), reason)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.integers(0, 9))
    def remind(self, data: st.DataObject, tokens: int) -> None:
        self.tell(self.book.offer, (self.open[data.draw(st.sampled_from(sorted(self.open)))],), (tokens,))

    @rule(data=st.data(), first=st.integers(0, 9))
    def sync(self, data: st.DataObject, first: int) -> None:
        kept = data.draw(st.lists(st.sampled_from(sorted(self.open)), unique=True)) if self.open else []
        self.open = {group_id: self.open[group_id] for group_id in kept}
        listed, held = tuple(self.open.values()), {lease.group_id: lease for lease in self.book.leases.values()}
        self.tell(self.book.sync, listed[:first], frozenset(kept[first:]))
        self.tell(self.book.offer, listed[first:])
        still = [held[group_id] for group_id in kept if group_id in held]
        assert all(self.book.leases.get(lease.lease_id) is lease for lease in still)

    @rule(passed_s=st.floats(0.1, 40.0))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s
        self.tell(self.book.tick)
        assert all(lease.deadline > self.now for lease in self.book.leases.values())

    @rule()
    def die_and_come_back(self) -> None:
        old, self.book = self.book, book()
        self.avoided.clear()  # that is not saved
        self.book.restore(*(map(replace, rows.values()) for rows in self.saved.values()))
        for worker in WORKERS:
            held = sum(old.groups[lease.group_id].spec.rollout_count for lease in old.leases_of(worker))
            assert self.book.records.of(worker).used == held

    @invariant()
    def one_lease_a_group_and_nothing_lost(self) -> None:
        assert set(self.book.groups) == set(self.open)
        leased = [lease.group_id for lease in self.book.leases.values()]
        assert len(leased) == len(set(leased))
        for group_id, group in self.book.groups.items():
            assert (group.phase is le.GroupPhase.LEASED) == (group_id in leased)
        queued = sum(group.phase is le.GroupPhase.QUEUED for group in self.book.groups.values())
        assert self.book.queued == queued

    @invariant()
    def what_must_outlive_the_process_is_saved(self) -> None:
        groups, leases = self.saved["groups"], self.saved["leases"]
        assert (groups.keys(), leases.keys()) == (self.book.groups.keys(), self.book.leases.keys())
        for group_id, now in self.book.groups.items():
            group = groups[group_id]
            assert (group.spec, group.phase, group.lease_id) == (now.spec, now.phase, now.lease_id)
            assert (group.attempts, group.refusals) == (now.attempts, now.refusals)
        for lease_id, held in self.book.leases.items():
            lease = leases[lease_id]
            assert (lease.worker_id, lease.deadline) == (held.worker_id, held.deadline)
            assert lease.is_recalled == held.is_recalled


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- evaluations go to few workers, at their very version, and training goes on at the others

FLEET = [PeerId(f"w{index}") for index in range(10)]
TRAINING = tuple(spec(f"g{index}", 3) for index in range(40))


def exams(count: int) -> tuple[GroupSpec, ...]:
    return tuple(exam(f"e{index}", 3) for index in range(count))


def fleet_with(*groups: GroupSpec) -> tuple[LeaseBook, list[le.Grant]]:
    """Ten workers at version 3 with room for two groups of four each."""
    one = book(*groups)
    for worker in FLEET:
        one.allow(0.0, worker, True)
    return one, [grant for worker in FLEET for grant in grants(one.request(0.0, worker, 8, Version(3)))]


def at_it(found: list[le.Grant]) -> Counter[PeerId]:
    return Counter(grant.worker_id for grant in found if grant.group.exact_version is not None)


def test_an_evaluation_goes_before_training_to_workers_at_its_very_version_alone() -> None:
    one = book(spec("g", 4), exam("e3", 3), exam("e4", 4))
    assert [grant.group.group_id for grant in ready(one, A, version=4, free=8)] == ["e4", "g"], "a single one does both"
    assert ready(one, B, version=5) == []
    assert "an evaluation of version 3, at which none of 1 willing workers is" in lease_waits(one, 0.0)[0][0]
    assert [grant.group.group_id for grant in ready(one, C, version=3)] == ["e3"]
    assert [le.may_take(exam("e", 3), Version(version), 4) for version in (2, 3, 4)] == [False, True, False]


def test_a_share_of_the_fleet_evaluates_the_rest_trains_and_a_restart_changes_neither() -> None:
    one, found = fleet_with(*TRAINING, *exams(20))
    evaluators = at_it(found)
    assert len(evaluators) == round(EVALUATION_SHARE * len(FLEET)), evaluators
    assert all(count == 2 for count in evaluators.values()), "whoever is at it takes nothing else meanwhile"
    trainers = {grant.worker_id for grant in found if grant.group.exact_version is None}
    assert trainers == set(FLEET) - set(evaluators)
    again = LeaseBook(one.rules)
    again.restore(one.groups.values(), one.leases.values())
    for worker in FLEET:
        again.allow(1.0, worker, True)
    more = at_it([grant for worker in reversed(FLEET) for grant in ready(again, worker, 3, 8, 1.0)])
    assert more and set(more) <= set(evaluators), "who evaluated before goes on with it"
    lost = next(iter(evaluators))
    taken = grants(again.lose(2.0, lost, "gone"))
    taken += [grant for worker in FLEET if worker not in evaluators for grant in ready(again, worker, 3, 16, 2.0)]
    assert len(at_it(taken)) == 1, "another takes the place of one that is lost"


def test_whoever_is_through_with_its_questions_counts_no_more_and_others_take_what_comes_next() -> None:
    one, found = fleet_with(*TRAINING, *exams(6))
    evaluators = set(at_it(found))
    for grant in found:
        if grant.group.exact_version is not None:
            ends(one, grant)
    one.offer(1.0, (exam("next", 3),))
    for worker in evaluators:
        one.request(1.0, worker, 0, Version(3))
    other = next(worker for worker in FLEET if worker not in evaluators)
    assert at_it(ready(one, other, 3, 16, 1.0)) == {other: 1}


def test_everybody_evaluates_where_nothing_is_open_to_train_on_and_a_fast_worker_is_enough_alone() -> None:
    _, found = fleet_with(*exams(20))
    assert len(at_it(found)) == len(FLEET)
    evaluators = Evaluators()
    chosen = evaluators.chosen(Version(3), FLEET, FLEET, lambda worker: 9.0 if worker == FLEET[0] else 1.0)
    assert chosen == [FLEET[0]]
    evaluators.on_grant(le.Lease(LeaseId("l"), GroupId("e"), FLEET[0], 1, 0.0, 30.0, 0.0), exam("e", 3))
    for slow in FLEET[:2]:
        evaluators.on_overtake(slow, Version(3))
    assert evaluators.chosen(Version(3), FLEET, FLEET, lambda worker: 1.0) == FLEET[2:5], "both were too slow for it"


def test_a_question_held_far_longer_than_leases_take_goes_to_another() -> None:
    def takes_s(version_of_other: int) -> float:
        """When the slow worker's question goes to the other, which needs five seconds for each of its leases."""
        one = book(exam("e", 3), *(spec(f"g{index}", 4) for index in range(80)))
        held = next(grant for grant in ready(one, A, version=3) if grant.group.group_id == "e")
        one.allow(0.0, B, True)
        now = 1.0
        while now < 20 * one.rules.lease_timeout_s:
            one.request(now, A, 4, Version(3))
            for grant in ready(one, B, version_of_other, 4, now):
                if grant.group.group_id == "e":
                    assert grant.is_continuation and held.lease_id not in one.leases
                    one.lose(now, B, "gone")
                    assert GroupId("e") not in {each.group_id for each in one.leases_of(A)}, "it was taken from it"
                    for lease in one.leases_of(A):
                        one.end(now, A, lease.lease_id, EndReason.HANDED_BACK, "it idles")
                    one.offer(now, (exam("next", 3),))
                    one.allow(now, B, True)
                    one.wanting |= {worker: LeaseRequest(8, Version(3), now) for worker in (A, B)}
                    given = grants(one.tick(now))
                    assert {each.worker_id for each in given if each.group.group_id == "next"} == {B}, "A is slow"
                    return now
                now += 5.0
                heard = (delivery(A, 1, 0.0), delivery(B, 4, 4.0))
                one.on_progress(now, A, held.lease_id, 0, int(now))
                one.on_delivered(now, heard)
                ends(one, grant, EndReason.FINISHED, now)
                one.offer(now, (spec(f"later{now}", 4),))
        assert held.lease_id in one.leases
        return float("inf")

    assert 30.0 <= takes_s(3) <= 30.0 + 5.0, "once that is longer than four leases and a lease's time-out"
    assert takes_s(4) == float("inf"), "a slow worker alone at its version keeps its questions"


def test_after_a_restart_the_question_that_is_held_longest_is_still_the_first_that_goes_to_another() -> None:
    """What is read comes by name: the oldest was hidden behind a newer one."""
    one = book(exam("z", 3))
    (oldest,) = ready(one, A, 3)
    one.on_progress(20.0, A, oldest.lease_id, 0, 1)
    one.offer(25.0, (exam("a", 3),))
    ready(one, B, 3, now=25.0)
    again = LeaseBook(one.rules)
    again.restore((one.groups[GroupId(name)] for name in "az"), one.leases.values())
    again.offer(25.0, tuple(spec(name, 3) for name in "cdef"))
    again.on_delivered(25.0, (delivery(C, 16, 16.0),))
    for grant in ready(again, C, 3, 16, 25.0):
        ends(again, grant, now=26.0)
    assert [grant.group.group_id for grant in ready(again, C, 3, 4, 31.0)] == ["z"]


# ---- stragglers move to fast workers when the model says that it pays, and only then

SLOW, FAST, THIRD = PeerId("slow"), PeerId("fast"), PeerId("third")
HAND_OVER_S = 3.0
LIMIT, SIZE = 1000, 4


def pace(tokens_per_s: float) -> WorkerPace:
    return WorkerPace(tokens_per_s, 100 * tokens_per_s)


SPEEDS = {SLOW: pace(5.0), FAST: pace(50.0)}


def long_group(name: str, step: int = 0) -> GroupSpec:
    return GroupSpec(GroupId(name), (1, 2, 3), SIZE, SamplingParams(max_new_tokens=LIMIT), step)


def expecting(tokens: int, *groups: GroupSpec) -> LeaseBook:
    """A book that expects so many tokens of a rollout."""
    book = LeaseBook(LeaseRules(4, 600.0))
    book.lengths.learn(long_group("earlier"), SIZE * tokens, SIZE)
    book.offer(0.0, groups)
    return book


def straggler(tokens: int, now: float, group: GroupSpec | None = None) -> LeaseBook:
    """One group on the slow worker with so many tokens of each rollout; the fast one idles."""
    book = expecting(800, group or long_group("g"))
    (grant,) = ready(book, SLOW, free=SIZE)
    book.on_progress(now, SLOW, grant.lease_id, 0, SIZE * tokens)
    ready(book, FAST, free=SIZE, now=now)
    return book


def found(book: LeaseBook, **speeds: float) -> list[PeerId]:
    paces = SPEEDS | {PeerId(name): pace(speed) for name, speed in speeds.items()}
    return [to for _, to, _ in moves(book, paces, HAND_OVER_S, {})]


def test_a_straggler_moves_when_that_ends_it_sooner_and_the_reason_says_by_how_much() -> None:
    ((_, to, reason),) = moves(straggler(tokens=100, now=20.0), SPEEDS, HAND_OVER_S, {SLOW: "berlin"})
    stay_s, move_s = 700 / 5, 3 + 403 / 5000 + 700 / 50
    assert to == FAST and f"{stay_s:.1f} s more on berlin, {move_s:.1f} s on fast" in reason
    reads_slowly = {**SPEEDS, FAST: WorkerPace(50.0, 4.0)}
    assert moves(straggler(100, 20.0), reads_slowly, HAND_OVER_S, {}) == [], "403 tokens at 4 a second take longer"
    assert found(straggler(tokens=0, now=20.0)) == [FAST], "before its first report its worker's mean counts"
    two = straggler(tokens=100, now=20.0)
    two.request(20.0, FAST, 0, Version(0))
    two.offer(20.0, (long_group("h"),))
    assert len(ready(two, SLOW, free=SIZE, now=20.0)) == 1
    two.request(20.0, FAST, SIZE, Version(0))
    assert found(two) == [FAST], "it has room for one"


@pytest.mark.parametrize(
    "why",
    [
        "nearly done", "as fast where it is", "no faster worker", "evaluation", "queued group", "queued evaluation",
        "only its own room", "too old",
    ],
)  # fmt: skip
def test_a_lease_stays_if_nothing_is_gained_or_somebody_else_could_use_the_room(why: str) -> None:
    exam = replace(long_group("e"), work=Work.EVALUATE, exact_version=Version(0))
    tokens, now = {"nearly done": (780, 156.0), "as fast where it is": (700, 14.0)}.get(why, (100, 20.0))
    book = straggler(tokens, now, exam if why == "evaluation" else None)
    if why == "too old":  # the slow one has made it with a newer version
        book.offer(now, (long_group("g", step=5),))
    if why in ("queued group", "queued evaluation"):
        book.request(now, FAST, 0, Version(0))
        book.offer(now, (exam if why == "queued evaluation" else long_group("h"),))
        book.wanting[FAST] = LeaseRequest(SIZE, Version(0), now)  # between the word of its room and the next match
    if why == "only its own room":
        book.request(now, FAST, 0, Version(0))
        book.request(now, SLOW, SIZE, Version(0))
    fast = {"no faster worker": {"fast": 5.0}, "only its own room": {"slow": 50.0}}
    assert found(book, **fast.get(why, {})) == []


@pytest.mark.parametrize(("more", "moves_to"), [(450, []), (45, [FAST])])
def test_a_lease_of_which_one_rollout_goes_on_is_as_fast_as_that_one(more: int, moves_to: list[PeerId]) -> None:
    """It was taken for four times as slow, and moved to another that is no faster."""
    book = expecting(800, long_group("g"))
    (grant,) = ready(book, SLOW, free=SIZE)
    book.on_progress(1.0, SLOW, grant.lease_id, SIZE - 1, SIZE * 50)
    book.on_progress(10.0, SLOW, grant.lease_id, SIZE - 1, SIZE * 50 + more)
    ready(book, FAST, free=SIZE, now=10.0)
    assert found(book, slow=50.0, fast=30.0) == moves_to


def test_nothing_is_near_its_end_while_groups_are_being_offered() -> None:
    book = straggler(tokens=100, now=20.0)
    book.allow(20.0, FAST, False)
    assert not is_quiet(book, 20.0), "nobody has room"
    book.allow(20.0, FAST, True)
    assert is_quiet(book, 20.0)
    book.offer(21.0, (long_group("later", step=99),))
    assert not is_quiet(book, 21.0)
    assert is_quiet(book, 21.0 + QUIET_S), "what waits is for a version that nobody has yet"


def test_recall_brings_the_group_to_the_worker_that_was_meant_and_not_for_ever() -> None:
    book = straggler(tokens=100, now=20.0)
    ready(book, THIRD, free=SIZE, now=20.0)
    now, workers = 20.0, []
    while planned := moves(book, SPEEDS | {THIRD: pace(40.0)}, HAND_OVER_S, {}):
        lease_id, to, reason = planned[0]
        book.recall(now, lease_id, reason, to)
        assert found(book, third=40.0) == [], "it is on its way already"
        (lease,) = book.leases.values()
        actions = book.end(now + 1, lease.worker_id, lease.lease_id, EndReason.HANDED_BACK, "")
        (grant,) = grants(actions)
        assert (grant.worker_id, grant.is_continuation) == (to, True)
        workers.append(grant.worker_id)
        assert len(workers) <= MOVES_PER_GROUP_MAX
        now += 60.0
        book.on_progress(now - 50, grant.worker_id, grant.lease_id, 0, SIZE * 100 + len(workers))
        book.on_progress(now, grant.worker_id, grant.lease_id, 0, SIZE * 110)  # slow here, too
        for other in {FAST, THIRD} - {grant.worker_id}:
            book.request(now, other, SIZE, Version(0))
    assert workers == [FAST, THIRD]
    assert book.counts.moved == MOVES_PER_GROUP_MAX


def test_a_continuation_is_judged_by_what_it_made_itself() -> None:
    book = straggler(tokens=100, now=20.0)
    book.lose(20.0, SLOW, "gone")
    (lease,) = book.leases.values()
    assert lease.worker_id == FAST
    book.on_progress(21.0, FAST, lease.lease_id, 0, SIZE * 120)
    book.on_progress(23.0, FAST, lease.lease_id, 0, SIZE * 220)
    ready(book, THIRD, free=SIZE, now=24.0)
    assert found(book, third=60.0) == []
