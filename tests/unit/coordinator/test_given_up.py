"""Leases that workers give up: the bound that an honest worker keeps and one that chooses does not."""

from __future__ import annotations

import numpy as np
import pytest

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import EndReason, GroupSpec, SamplingParams, Work
from echo2.coordinator.fleet.record import (
    BAR_S_MAX,
    BAR_S_MIN,
    EXPIRED,
    FINISHED_PER_PICK,
    HANDED_BACK,
    LOST,
    MISSING,
    MOVING_S,
    PICKS_MAX,
    PROMPT_WORKERS,
    REFUSED,
    SETTLE_S,
    STOP_EVERY_S,
    STOPS_MAX,
    UNFINISHED,
    WorkerRecords,
)
from echo2.coordinator.leases import events as le
from echo2.coordinator.leases.book import LeaseBook
from echo2.coordinator.leases.waits import waits
from tests.unit.coordinator.test_lease_book import TIMEOUT_S, WORKERS, book, grants

A, B, C = WORKERS
ROOM = 4


def told(*workers: PeerId) -> le.Delivered:
    """The learner has had rollouts of these."""
    return le.Delivered(tuple(le.WorkerDelivered(worker, 64, 64.0) for worker in workers))


class Run:
    """A lease book, its learner, and a clock that both follow."""

    def __init__(self, *workers: PeerId) -> None:
        self.one: LeaseBook = book()
        self.now, self.groups = 0.0, 0
        self.notes: list[str] = []
        self.workers = workers
        self.tell(told(*workers))
        for worker in workers:
            self.tell(le.WorkerAllowed(worker, True))

    def tell(self, event: le.Event) -> list[le.Action]:
        actions = self.one.handle(event, self.now)
        self.notes += [action.text for action in actions if isinstance(action, le.Note)]
        return actions

    def offer(self, prompt: int | None = None, rollouts: int = 4) -> GroupSpec:
        self.groups += 1
        tokens = (self.groups if prompt is None else prompt,)
        made = GroupSpec(GroupId(f"g{self.groups:05d}"), tokens, rollouts, SamplingParams(seed=self.groups), 0)
        self.tell(le.GroupsOffered((made,)))
        return made

    def given(self, worker: PeerId, free: int = ROOM, prompt: int | None = None) -> le.Grant | None:
        """A new group while this worker alone asks."""
        self.offer(prompt)
        found = grants(self.tell(le.RolloutsWanted(worker, free, Version(0))))
        self.tell(le.RolloutsWanted(worker, 0, Version(0)))
        return found[0] if found else None

    def ends(self, grant: le.Grant, reason: EndReason) -> None:
        self.tell(le.LeaseEnded(grant.worker_id, grant.lease_id, reason, ""))

    def finishes(self, grant: le.Grant) -> None:
        self.ends(grant, EndReason.FINISHED)
        self.closes(grant)

    def closes(self, grant: le.Grant, reason: str = "complete") -> None:
        self.tell(le.GroupsClosed((grant.group.group_id,), reason))

    def passes(self, seconds: float) -> None:
        """Leases that run go on running."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 1.0)
            self.tell(told(*self.workers))
            self.tell(le.Tick())

    def picks(self, worker: PeerId, hard: bool) -> le.Grant | None:
        """It gives up a hard prompt, and finishes the others."""
        grant = self.given(worker)
        if grant is not None and hard:
            self.ends(grant, EndReason.HANDED_BACK)
            self.closes(grant, "cancelled")
        elif grant is not None:
            self.finishes(grant)
        return grant

    def held_back_s(self, worker: PeerId) -> float:
        return self.one.records.of(worker).barred_until - self.now


def test_a_worker_that_gives_up_every_other_prompt_is_held_back_for_twice_as_long_each_time_and_shown() -> None:
    run, leases = Run(A, B), 0
    pauses: list[float] = []
    while len(pauses) < 8:
        grant = run.picks(A, hard=leases % 2 == 0)
        leases += 1
        if grant is None:
            assert len(pauses) > 0 or leases <= 3 * PICKS_MAX
        run.passes(SETTLE_S + 1)
        if run.held_back_s(A) > 0:
            (text,) = [what for what, _ in waits(run.one, run.now, str) if "is given no leases" in what]
            assert "gives up leases one by one" in text and "handed back" in text and str(A) in text
            pauses.append(run.one.records.of(A).barred_until - run.one.records.of(A).barred_at)
            assert run.given(A) is None, "it would take it"
            assert run.given(B) is not None
            run.passes(pauses[-1] + 1)
    assert pauses == [min(BAR_S_MAX, BAR_S_MIN * 2.0**number) for number in range(8)]
    assert any("is given no leases for 30 s" in note and "finished of" in note for note in run.notes)


@pytest.mark.parametrize("way", [HANDED_BACK, REFUSED, EXPIRED, MISSING, UNFINISHED, LOST])
def test_however_a_lease_is_given_up_while_others_are_kept_it_counts(way: str) -> None:
    run = Run(A, B)
    kept = run.given(A, 4 * ROOM)
    assert kept is not None
    for _ in range(int(PICKS_MAX) + 1):
        grant = run.given(A, 4 * ROOM)
        assert grant is not None
        if way in (HANDED_BACK, LOST):
            run.ends(grant, EndReason.HANDED_BACK)
        elif way == REFUSED:
            run.ends(grant, EndReason.REFUSED)
        elif way == EXPIRED:
            for _ in range(int(TIMEOUT_S) + 1):
                run.passes(1.0)
                run.tell(le.Progressed(A, kept.lease_id, 0, int(run.now)))
        elif way == MISSING:
            held = le.HeldLease(kept.lease_id, kept.group.group_id, kept.attempt, kept.deadline)
            run.tell(le.WorkerCame(A, (held,)))
            run.tell(le.WorkerAllowed(A, True))
        else:
            run.ends(grant, EndReason.FINISHED)
            run.passes(1.0)
            run.tell(le.GroupsOffered((grant.group,), (0,)))
        run.closes(grant, "cancelled")
    run.passes(SETTLE_S + 1)
    assert kept.lease_id in run.one.leases
    assert run.held_back_s(A) > 0 and run.given(A) is None


def test_preemption_gives_up_everything_at_once_and_counts_as_one_until_it_comes_too_often() -> None:
    run = Run(A, B)
    for _ in range(int(STOPS_MAX)):
        held = [run.given(A, 4 * ROOM) for _ in range(12)]
        assert all(held)
        for grant in held[:6]:
            assert grant is not None
            run.ends(grant, EndReason.HANDED_BACK)
            run.passes(0.1)
        run.tell(le.WorkerLost(A, "preemption"))
        run.tell(le.WorkerAllowed(A, True))
        for grant in held:
            assert grant is not None
            run.closes(grant, "cancelled")
        run.passes(SETTLE_S + 1)
        assert run.held_back_s(A) <= 0
    record = run.one.records.of(A)
    assert record.picks == 0 and record.stops > STOPS_MAX - 1
    held = [run.given(A, 4 * ROOM) for _ in range(2)]
    run.tell(le.WorkerCame(A, ()))
    run.tell(le.WorkerAllowed(A, True))
    run.passes(SETTLE_S + 1)
    assert run.held_back_s(A) > 0 and "all at once, again and again" in record.why
    run.now += 8 * STOP_EVERY_S
    run.tell(told(A, B))
    grants_ = [run.given(A, 4 * ROOM) for _ in range(2)]
    assert all(grants_)
    run.tell(le.WorkerCame(A, ()))
    run.passes(SETTLE_S + 1)
    assert run.held_back_s(A) <= 0, "machines are taken now and then"


def test_a_prompt_that_many_workers_give_up_is_at_fault_itself_until_somebody_finishes_it() -> None:
    run = Run(A, B, C)
    for prompt in range(1, 7):
        for worker in WORKERS[:PROMPT_WORKERS]:
            grant = run.given(worker, prompt=prompt)
            assert grant is not None
            run.ends(grant, EndReason.HANDED_BACK)
            run.closes(grant, "stale")
        run.passes(SETTLE_S + 1)
    records = run.one.records.workers
    assert [records[worker].picks for worker in WORKERS] == [0.0, 0.0, 0.0], "six each, and nobody's fault"
    assert any("3 workers gave up prompt" in note for note in run.notes)
    for prompt in range(1, 7):
        grant = run.given(C, prompt=prompt)
        assert grant is not None
        run.finishes(grant)
    assert records[A].picks == 6.0 == records[B].picks, "they could be done after all"
    last = run.given(A)
    assert last is not None
    run.ends(last, EndReason.HANDED_BACK)
    run.passes(SETTLE_S + 1)
    assert run.held_back_s(A) > 0


def test_nothing_counts_while_the_learner_is_silent_or_before_it_has_told_anything() -> None:
    run = Run(A, B)
    held = [run.given(A, 4 * ROOM) for _ in range(12)]
    run.now += 2 * TIMEOUT_S
    run.tell(le.Tick())  # all expire while nothing is heard of the learner
    run.tell(told(A, B))
    run.passes(SETTLE_S + 1)
    record = run.one.records.of(A)
    assert record.ways[EXPIRED] == len(held) == 12 and record.picks == record.stops == 0
    fresh = WorkerRecords(TIMEOUT_S)
    for number in range(20):
        group = le.OpenGroup(
            GroupSpec(GroupId(f"g{number}"), (number,), 1, SamplingParams(), 0), le.GroupPhase.LEASED, 0.0
        )
        fresh.give_up(HANDED_BACK, A, group, 0.0, 1.0)
    assert list(fresh.judge(100.0)) == [] and not fresh.is_barred(A, WORKERS, 100.0)


def test_what_was_asked_back_or_had_been_delivered_whole_is_not_given_up() -> None:
    run = Run(A, B)
    for _ in range(8):
        grant = run.given(A)
        assert grant is not None
        run.tell(le.Recall(grant.lease_id, "another is faster"))
        run.ends(grant, EndReason.HANDED_BACK)
        run.closes(grant, "cancelled")
        whole = run.given(A)
        assert whole is not None
        run.ends(whole, EndReason.HANDED_BACK)
        run.closes(whole)
        run.passes(SETTLE_S + 1)
    assert run.one.records.of(A).picks == 0 and run.held_back_s(A) <= 0


def evaluation(run: Run, worker: PeerId, version: Version, count: int) -> list[le.Grant]:
    """Questions of an evaluation of that version, offered while this worker alone asks, at that version."""
    for _ in range(count):
        run.groups += 1
        named = GroupId(f"e{run.groups:05d}")
        made = GroupSpec(named, (run.groups,), 4, SamplingParams(), int(version), Work.EVALUATE, version)
        run.tell(le.GroupsOffered((made,)))
    found = grants(run.tell(le.RolloutsWanted(worker, 64, version)))
    run.tell(le.RolloutsWanted(worker, 0, version))
    return found


def test_a_worker_that_hands_back_evaluations_chooses_none_of_that_version_for_a_while() -> None:
    run, version = Run(A, B), Version(3)
    for grant in evaluation(run, A, version, 12):
        run.ends(grant, EndReason.HANDED_BACK)
    assert not evaluation(run, A, version, 1), "others answer the rest"
    assert run.given(A, 8 * ROOM) is not None, "it may train meanwhile"
    run.passes(MOVING_S)
    assert evaluation(run, A, version, 1), "it may be the only one at this version"


@pytest.mark.parametrize("says_first", [True, False])
def test_an_evaluation_handed_back_for_a_newer_version_is_not_given_up_once_a_version(says_first: bool) -> None:
    run = Run(A, B)
    for number in range(1, 6):
        old, new = Version(number), Version(number + 1)
        given = evaluation(run, A, old, 12)
        assert len(given) == 12
        if says_first:
            run.tell(le.RolloutsWanted(A, 0, new))
        for grant in given:
            run.ends(grant, EndReason.HANDED_BACK)
        run.tell(le.RolloutsWanted(A, 0, new))
        assert not evaluation(run, A, old, 1), "nobody comes back to choose more of a version that it has left"
        assert grants(run.tell(le.RolloutsWanted(B, 64, old))), "they are for others"
        run.tell(le.RolloutsWanted(B, 0, old))
        run.passes(MOVING_S + SETTLE_S + 1)
        run.tell(told(A, B))
    record = run.one.records.of(A)
    assert record.picks == record.stops == 0 and run.held_back_s(A) <= 0


def test_nobody_is_held_back_where_nobody_else_is_left() -> None:
    run = Run(A, B)
    kept = {worker: run.given(worker, 8 * ROOM) for worker in (A, B)}
    assert all(kept.values())
    for worker in (A, B) * (int(PICKS_MAX) + 1):
        grant = run.given(worker, 8 * ROOM)
        assert grant is not None
        run.ends(grant, EndReason.HANDED_BACK)
        run.closes(grant, "cancelled")
    run.passes(SETTLE_S + 1)
    assert run.held_back_s(A) > 0 and run.held_back_s(B) > 0
    assert run.given(B, 8 * ROOM) is not None and run.given(A, 8 * ROOM) is not None
    records = run.one.records
    assert records.is_barred(A, [A, C], run.now) and not records.is_barred(A, [A, B], run.now)


def test_an_honest_worker_that_fails_one_lease_in_a_hundred_exceeds_the_bound_less_than_once_in_a_million() -> None:
    """The bucket as a Markov chain, exactly: what it holds in sixteenths, a lease a step."""
    top = int(PICKS_MAX * FINISHED_PER_PICK)

    def excess(failing: float) -> float:
        move = np.zeros((top + 1, top + 1))
        for level in range(top + 1):
            move[level, max(0, level - 1)] += 1 - failing
            move[level, min(top, level + FINISHED_PER_PICK)] += failing
        share = np.full(top + 1, 1 / (top + 1))
        for _ in range(5000):
            share = share @ move
        return float(failing * share[top - FINISHED_PER_PICK + 1 :].sum())

    assert excess(0.01) < 1e-6
    assert excess(0.2) > 0.1, "one that chooses a fifth is beyond it at once"


def test_a_lease_that_is_handed_back_before_its_first_report_or_after_goes_on_with_the_same_seed() -> None:
    """So giving up gains no new sample: whoever goes on draws by the numbers that the first would have drawn by."""
    run = Run(A, B)
    spec = run.offer()
    seeds, attempts = [], []
    for worker, tokens in ((A, 0), (B, 3), (A, 9), (B, 0)):
        (grant,) = grants(run.tell(le.RolloutsWanted(worker, ROOM, Version(0))))
        run.tell(le.RolloutsWanted(worker, 0, Version(0)))
        seeds.append(grant.group.sampling.seed)
        attempts.append(grant.attempt)
        run.tell(le.Progressed(worker, grant.lease_id, 0, tokens))
        run.ends(grant, EndReason.HANDED_BACK)
    assert set(seeds) == {spec.sampling.seed} and attempts == [1, 2, 3, 4]
