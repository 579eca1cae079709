"""The lease book under any order of events: a group has one lease at most, attempts only grow, nothing is lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import EndReason, GroupSpec, SamplingParams, Work
from echo2.coordinator.leases import events as le
from echo2.coordinator.leases.book import LeaseBook
from echo2.coordinator.leases.queue import may_take
from echo2.coordinator.leases.seekers import LeaseRules
from echo2.coordinator.leases.waits import slowest, waits

BOUND = 4
TIMEOUT_S = 30.0
WORKERS = [PeerId(name) for name in ("a", "b", "c")]


def spec(name: str, consume_step: int = 0, rollouts: int = 4) -> GroupSpec:
    return GroupSpec(GroupId(name), (1, 2, 3), rollouts, SamplingParams(max_new_tokens=8), consume_step)


def exam(name: str, version: int, rollouts: int = 4) -> GroupSpec:
    sampling = SamplingParams(max_new_tokens=8)
    return GroupSpec(GroupId(name), (1, 2, 3), rollouts, sampling, version, Work.EVALUATE, Version(version))


def book() -> LeaseBook:
    return LeaseBook(LeaseRules(BOUND, TIMEOUT_S))


def ready(one: LeaseBook, worker: PeerId, version: int = 0, free: int = 4, now: float = 0.0) -> list[le.Grant]:
    one.handle(le.WorkerAllowed(worker, True), now)
    return grants(one.handle(le.RolloutsWanted(worker, free, Version(version)), now))


def grants(actions: list[le.Action]) -> list[le.Grant]:
    return [action for action in actions if isinstance(action, le.Grant)]


def revoked(actions: list[le.Action]) -> list[LeaseId]:
    return [action.lease_id for action in actions if isinstance(action, le.Revoke)]


def test_most_urgent_group_goes_first_and_a_worker_that_is_too_old_gets_none() -> None:
    one = book()
    one.handle(le.GroupsOffered((spec("late", 9), spec("soon", 3), spec("next", 5))), 0.0)
    assert [grant.group.group_id for grant in ready(one, WORKERS[0], version=0, free=8)] == ["soon"]
    assert "it takes version 1 or newer" in waits(one, 0.0)[0][0]
    granted = grants(one.handle(le.RolloutsWanted(WORKERS[0], 8, Version(5)), 1.0))
    assert [grant.group.group_id for grant in granted] == ["next", "late"]


def test_a_later_turn_goes_to_the_worker_that_has_the_one_before_it_and_after_a_while_to_any() -> None:
    warm, other = WORKERS[0], WORKERS[1]
    one = book()
    one.handle(le.GroupsOffered((spec("g.0.1", rollouts=1),)), 0.0)
    (first,) = ready(one, warm, free=1)
    ready(one, other, free=8)
    one.handle(le.LeaseEnded(warm, first.lease_id, EndReason.FINISHED, ""), 1.0)
    assert grants(one.handle(le.GroupsOffered((spec("g.0.2", rollouts=1),)), 1.0)) == [], "it waits for the warm one"
    (second,) = grants(one.handle(le.RolloutsWanted(warm, 1, Version(0)), 1.2))
    assert (second.worker_id, second.group.group_id) == (warm, "g.0.2")
    one.handle(le.LeaseEnded(warm, second.lease_id, EndReason.FINISHED, ""), 2.0)
    assert (
        grants(
            one.handle(
                le.GroupsOffered(
                    (spec("g.0.3", rollouts=1), spec("h")),
                ),
                2.0,
            )
        )[0].group.group_id
        == "h"
    )
    (third,) = grants(one.handle(le.Tick(), 3.1))
    assert (third.worker_id, third.group.group_id) == (other, "g.0.3"), "the warm one wants nothing now"
    one.handle(le.WorkerLost(other, "gone"), 3.2)
    assert [g.worker_id for g in ready(one, WORKERS[2], free=8, now=3.3)] != [], "whoever is lost is not waited for"


def test_a_group_offered_again_for_an_earlier_step_takes_its_new_turn() -> None:
    one = book()
    one.handle(le.GroupsOffered((spec("g", 9), spec("h", 9))), 0.0)
    assert ready(one, WORKERS[0], version=3) == []
    actions = one.handle(le.GroupsOffered((spec("h", 6),)), 1.0)
    assert le.SaveGroup(GroupId("h")) in actions
    assert [(grant.group.group_id, grant.group.consume_step) for grant in grants(actions)] == [("h", 6)]
    assert one.handle(le.GroupsOffered((spec("h", 5),)), 2.0) == [le.SaveGroup(GroupId("h"))]
    assert one.groups[GroupId("h")].phase is le.GroupPhase.LEASED
    assert one.queued == 1


def test_a_group_of_which_the_learner_hears_nothing_leaves_a_worker_that_only_tells_of_progress() -> None:
    """And that worker is given nothing for a while, twice as long the second time."""
    one = book()

    def reminded(tokens: int, now: float) -> list[le.Action]:
        return one.handle(le.GroupsOffered((spec("g"),), (tokens,)), now)

    one.handle(le.GroupsOffered((spec("g"),)), 0.0)
    (first,) = ready(one, WORKERS[0])
    for second in range(5, 65, 5):
        one.handle(le.Progressed(WORKERS[0], first.lease_id, 0, second), float(second))
    assert revoked(reminded(0, 3.0)) == [] == revoked(reminded(7, 9.0)), "something came between the reminders"
    assert revoked(reminded(7, 9.0 + 2 * TIMEOUT_S - 1)) == []
    actions = reminded(7, 9.0 + 2 * TIMEOUT_S)
    assert revoked(actions) == [first.lease_id]
    assert any(isinstance(action, le.Note) and "nothing of it reached the learner" in action.text for action in actions)
    now = 10.0 + 2 * TIMEOUT_S
    assert ready(one, WORKERS[0], now=now) == [], "it would take it at once"
    (second_lease,) = ready(one, WORKERS[1], now=now)
    assert second_lease.is_continuation
    one.handle(le.LeaseEnded(WORKERS[1], second_lease.lease_id, EndReason.FINISHED, ""), now + 1)
    one.handle(le.GroupsOffered((spec("h"),)), now + 2)
    assert [grant.worker_id for grant in grants(one.handle(le.Tick(), now + 3))] == []
    assert [grant.worker_id for grant in grants(one.handle(le.Tick(), now + 2 * TIMEOUT_S))] == [WORKERS[0]]
    later = now + 10 * TIMEOUT_S
    assert one.records.bar(WORKERS[0], "", TIMEOUT_S, later) == 2 * TIMEOUT_S
    assert one.records.bar(WORKERS[0], "", TIMEOUT_S, later + 1) == 2 * TIMEOUT_S - 1, "several at once count as one"
    assert [one.records.is_barred(worker, WORKERS, later) for worker in WORKERS] == [True, False, False]
    assert not one.records.is_barred(WORKERS[0], [WORKERS[0]], later), "there is nobody else"


def test_a_worker_is_not_shunned_for_what_a_restarted_learner_has_lost() -> None:
    """A learner that came back holds no tokens of unfinished rollouts until their workers have sent them again."""
    one = book()
    one.handle(le.GroupsOffered((spec("g"),)), 0.0)
    (first,) = ready(one, WORKERS[0])
    one.handle(le.GroupsOffered((spec("g"),), (0,)), 3.0)
    for second in (15, 30, 45, 60):
        one.handle(le.Progressed(WORKERS[0], first.lease_id, 0, second), float(second))
    one.handle(le.GroupsSynced((spec("g"),)), 61.0)
    assert revoked(one.handle(le.GroupsOffered((spec("g"),), (0,)), 64.0)) == []
    assert one.records.of(WORKERS[0]).bars == 0
    one.handle(le.Progressed(WORKERS[0], first.lease_id, 0, 75), 75.0)
    one.handle(le.Progressed(WORKERS[0], first.lease_id, 0, 105), 105.0)
    assert revoked(one.handle(le.GroupsOffered((spec("g"),), (0,)), 64.0 + 2 * TIMEOUT_S)) == [first.lease_id]


def test_a_lease_that_ran_out_while_the_coordinator_stood_still_is_no_guilt() -> None:
    """What its worker said meanwhile may wait behind the learner's reminder."""
    one = book()
    one.handle(le.GroupsOffered((spec("g"),)), 0.0)
    (first,) = ready(one, WORKERS[0])
    one.handle(le.GroupsOffered((spec("g"),), (0,)), 3.0)
    assert revoked(one.handle(le.GroupsOffered((spec("g"),), (0,)), 3.0 + 3 * TIMEOUT_S)) == []
    assert one.records.of(WORKERS[0]).bars == 0
    assert revoked(one.handle(le.Tick(), 4.0 + 3 * TIMEOUT_S)) == [first.lease_id]


def test_an_end_that_the_learner_knows_nothing_of_sends_the_group_to_another() -> None:
    one = book()
    one.handle(le.GroupsOffered((spec("g"),)), 0.0)
    (first,) = ready(one, WORKERS[0])
    one.handle(le.LeaseEnded(WORKERS[0], first.lease_id, EndReason.FINISHED, ""), 1.0)
    assert ready(one, WORKERS[0], now=2.0) == []
    assert grants(one.handle(le.GroupsOffered((spec("g"),), (0,)), 3.0)) == [], "it has just said that of this group"
    assert [grant.worker_id for grant in ready(one, WORKERS[1], now=4.0)] == [WORKERS[1]]


def test_silent_lease_expires_to_another_worker_as_a_continuation_and_progress_renews() -> None:
    one = book()
    one.handle(le.GroupsOffered((spec("g"),)), 0.0)
    (first,) = ready(one, WORKERS[0])
    renewed = grants(one.handle(le.Progressed(WORKERS[0], first.lease_id, 0, 10), 20.0))
    assert [(grant.is_renewal, grant.deadline) for grant in renewed] == [(True, 20.0 + TIMEOUT_S)]
    assert ready(one, WORKERS[1], now=21.0) == []
    assert one.handle(le.Tick(), 49.0) == []
    actions = one.handle(le.Tick(), 50.0)
    assert revoked(actions) == [first.lease_id]
    (second,) = grants(actions)
    assert (second.worker_id, second.attempt, second.is_continuation) == (WORKERS[1], 2, True)
    late = one.handle(le.LeaseEnded(WORKERS[0], first.lease_id, EndReason.FINISHED, ""), 51.0)
    assert late == []
    assert one.groups[GroupId("g")].phase is le.GroupPhase.LEASED


def test_group_that_the_learner_lists_again_is_made_again_and_one_that_it_does_not_list_is_revoked() -> None:
    one = book()
    one.handle(le.GroupsOffered((spec("g"), spec("h"))), 0.0)
    first, second = ready(one, WORKERS[0], free=8)
    one.handle(le.LeaseEnded(WORKERS[0], first.lease_id, EndReason.FINISHED, ""), 1.0)
    actions = one.handle(le.GroupsSynced((first.group,)), 2.0)
    assert revoked(actions) == [second.lease_id]
    assert one.groups[first.group.group_id].phase is le.GroupPhase.QUEUED
    assert [grant.attempt for grant in ready(one, WORKERS[1], now=3.0)] == [2]


def test_worker_that_comes_back_keeps_what_it_holds_and_loses_what_it_does_not() -> None:
    one = book()
    one.handle(le.GroupsOffered((spec("g"), spec("h"))), 0.0)
    kept, lost = ready(one, WORKERS[0], free=8)
    held = (
        le.HeldLease(kept.lease_id, kept.group.group_id, 1, 10.0),
        le.HeldLease(LeaseId("l-unknown"), GroupId("never"), 3, 10.0),
    )
    actions = one.handle(le.WorkerCame(WORKERS[0], held), 5.0)
    assert [grant.lease_id for grant in grants(actions)] == [kept.lease_id]
    assert revoked(actions) == ["l-unknown"]
    assert one.groups[lost.group.group_id].phase is le.GroupPhase.QUEUED


def test_a_worker_that_comes_back_is_given_nothing_that_its_last_life_asked_for() -> None:
    one = book()
    assert ready(one, WORKERS[0]) == []
    one.handle(le.WorkerCame(WORKERS[0], ()), 5.0)
    assert grants(one.handle(le.GroupsOffered((spec("g"),)), 6.0)) == [], "its engine may not run yet"
    assert len(grants(one.handle(le.RolloutsWanted(WORKERS[0], 4, Version(0)), 7.0))) == 1


def test_lease_that_a_lost_process_granted_is_taken_in() -> None:
    one = book()
    one.handle(le.GroupsSynced((spec("g"),)), 0.0)
    held = le.HeldLease(le.lease_id_of(GroupId("g"), 7), GroupId("g"), 7, 10.0)
    actions = one.handle(le.WorkerCame(WORKERS[0], (held,)), 1.0)
    (grant,) = grants(actions)
    assert (grant.lease_id, grant.attempt) == (held.lease_id, 7)
    assert one.queued == 0


def test_refused_group_pauses_and_avoids_the_worker_for_a_while() -> None:
    one = book()
    one.handle(le.GroupsOffered((spec("g"),)), 0.0)
    (first,) = ready(one, WORKERS[0])
    one.handle(le.LeaseEnded(WORKERS[0], first.lease_id, EndReason.REFUSED, "no"), 1.0)
    assert ready(one, WORKERS[0], now=1.1) == []
    assert "refused" in waits(one, 1.1)[0][0]
    assert [grant.attempt for grant in grants(one.handle(le.Tick(), 2.0))] == [2]


def test_recalled_lease_moves_once_it_was_handed_back() -> None:
    one = book()
    one.handle(le.GroupsOffered((spec("g"),)), 0.0)
    (first,) = ready(one, WORKERS[0])
    assert revoked(one.handle(le.Recall(first.lease_id, "a faster worker is free"), 1.0)) == [first.lease_id]
    assert ready(one, WORKERS[1], now=1.5) == []
    moved = grants(one.handle(le.LeaseEnded(WORKERS[0], first.lease_id, EndReason.HANDED_BACK, ""), 2.0))
    assert [(grant.worker_id, grant.is_continuation) for grant in moved] == [(WORKERS[1], True)]


def test_an_evaluation_goes_before_training_to_workers_at_its_very_version_alone() -> None:
    one = book()
    one.handle(le.GroupsOffered((spec("g", 4), exam("e3", 3), exam("e4", 4))), 0.0)
    assert [grant.group.group_id for grant in ready(one, WORKERS[0], version=4, free=8)] == ["e4", "g"]
    assert ready(one, WORKERS[1], version=5) == []
    assert "an evaluation of version 3, at which none of 1 willing workers is" in waits(one, 0.0)[0][0]
    assert [grant.group.group_id for grant in ready(one, WORKERS[2], version=3)] == ["e3"]


def test_a_worker_whose_version_moved_on_gives_an_evaluation_back_without_blame() -> None:
    one = book()
    one.handle(le.GroupsOffered(tuple(exam(f"e{number}", 3, 1) for number in range(8))), 0.0)
    leases = ready(one, WORKERS[0], version=3, free=8)
    assert len(leases) == 8
    for number, lease in enumerate(leases):  # one by one, while it goes on with others
        one.handle(
            le.LeaseEnded(WORKERS[0], lease.lease_id, EndReason.HANDED_BACK, "version 4 is live now"), 7.0 * number
        )
    one.handle(le.GroupsOffered((spec("g"),)), 60.0)
    assert [grant.group.group_id for grant in ready(one, WORKERS[0], version=4, now=60.0)] == ["g"]


class AnyOrder(RuleBasedStateMachine):
    """Learner, workers and the clock do as they please; the process dies and its saved state comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.book, self.now, self.made = book(), 0.0, 0
        self.attempts: dict[GroupId, int] = {}
        self.versions: dict[PeerId, int] = dict.fromkeys(WORKERS, 0)
        self.open: dict[GroupId, GroupSpec] = {}

    def tell(self, event: le.Event) -> None:
        for grant in grants(self.book.handle(event, self.now)):
            if grant.is_renewal:
                continue
            group_id = grant.group.group_id
            assert grant.attempt > self.attempts.get(group_id, 0), "an attempt number was given twice"
            assert group_id in self.open, "a group that the learner does not want was leased"
            assert may_take(grant.group, Version(self.versions[grant.worker_id]), BOUND)
            self.attempts[group_id] = grant.attempt

    @rule(count=st.integers(1, 4), step=st.integers(0, 8))
    def offer(self, count: int, step: int) -> None:
        fresh = [spec(f"g{self.made + i}", step) for i in range(count)]
        self.made += count
        self.open.update({one.group_id: one for one in fresh})
        self.tell(le.GroupsOffered(tuple(fresh)))

    @rule(count=st.integers(1, 4), version=st.integers(0, 6))
    def offer_exam(self, count: int, version: int) -> None:
        fresh = [exam(f"e{self.made + i}", version) for i in range(count)]
        self.made += count
        self.open.update({one.group_id: one for one in fresh})
        self.tell(le.GroupsOffered(tuple(fresh)))

    @rule(worker=st.sampled_from(WORKERS), free=st.integers(0, 12), version=st.integers(0, 6))
    def want(self, worker: PeerId, free: int, version: int) -> None:
        self.versions[worker] = version
        self.tell(le.WorkerAllowed(worker, True))
        self.tell(le.RolloutsWanted(worker, free, Version(version)))

    @rule(worker=st.sampled_from(WORKERS), data=st.data(), reason=st.sampled_from(EndReason))
    def end(self, worker: PeerId, data: st.DataObject, reason: EndReason) -> None:
        names = sorted(self.book.leases) or [LeaseId("l-none")]
        self.tell(le.LeaseEnded(worker, data.draw(st.sampled_from(names)), reason, "said so"))

    @rule(worker=st.sampled_from(WORKERS), data=st.data(), tokens=st.integers(0, 50))
    def progress(self, worker: PeerId, data: st.DataObject, tokens: int) -> None:
        names = sorted(self.book.leases) or [LeaseId("l-none")]
        self.tell(le.Progressed(worker, data.draw(st.sampled_from(names)), 0, tokens))

    @rule(worker=st.sampled_from(WORKERS))
    def lose(self, worker: PeerId) -> None:
        self.tell(le.WorkerLost(worker, "gone"))
        assert not self.book.leases_of(worker)

    @rule(worker=st.sampled_from(WORKERS), keep=st.integers(0, 3))
    def come_back(self, worker: PeerId, keep: int) -> None:
        held = self.book.leases_of(worker)[:keep]
        self.tell(
            le.WorkerCame(worker, tuple(le.HeldLease(x.lease_id, x.group_id, x.attempt, x.deadline) for x in held))
        )
        assert {lease.lease_id for lease in self.book.leases_of(worker)} >= {lease.lease_id for lease in held}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[group_id]
        self.tell(le.GroupsClosed((group_id,), "complete"))

    @rule(data=st.data())
    def sync(self, data: st.DataObject) -> None:
        kept = data.draw(st.lists(st.sampled_from(sorted(self.open)), unique=True)) if self.open else []
        self.open = {group_id: self.open[group_id] for group_id in kept}
        self.tell(le.GroupsSynced(tuple(self.open.values())))

    @rule(passed_s=st.floats(0.1, 40.0))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s
        self.tell(le.Tick())
        assert all(lease.deadline > self.now for lease in self.book.leases.values())

    @rule()
    def die_and_come_back(self) -> None:
        old, self.book = self.book, book()
        self.book.restore(old.groups.values(), old.leases.values())

    @invariant()
    def one_lease_a_group_and_nothing_lost(self) -> None:
        assert set(self.book.groups) == set(self.open)
        leased = [lease.group_id for lease in self.book.leases.values()]
        assert len(leased) == len(set(leased))
        for group_id, group in self.book.groups.items():
            assert (group.phase is le.GroupPhase.LEASED) == (group_id in leased)
        queued = sum(group.phase is le.GroupPhase.QUEUED for group in self.book.groups.values())
        assert self.book.queued == queued


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_leases_that_stand_still_are_told_by_worker_the_longest_first() -> None:
    one = book()
    one.handle(le.GroupsOffered((spec("g"), spec("h"), spec("i"))), 0.0)
    first, second = ready(one, WORKERS[0], free=8)
    ready(one, WORKERS[1], now=3.0)
    assert waits(one, TIMEOUT_S / 4) == []
    one.handle(le.Progressed(WORKERS[0], second.lease_id, 0, 7), 1.0)
    told = waits(one, TIMEOUT_S / 4 + 4.0, lambda peer: f"worker {peer}")
    assert told == [
        ("2 leases on worker a without progress at 7 tokens", 0.0),
        (f"lease {one.leases_of(WORKERS[1])[0].lease_id} on worker b without progress at 0 tokens", 3.0),
    ]
    assert slowest(one, TIMEOUT_S / 4 + 4.0).startswith("2 leases on a, lease l-")
    assert first.worker_id == WORKERS[0]
