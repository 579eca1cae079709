"""Stragglers move to fast workers when the model says that it pays, and only then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import EndReason, GroupSpec, SamplingParams, Work
from echo2.coordinator.leases.book import MOVES_PER_GROUP_MAX, QUIET_S, LeaseBook, WorkerPace, is_quiet, moves
from echo2.coordinator.leases.lease import LeaseRequest, LeaseRules
from tests.unit.coordinator.test_lease_book import grants, ready

SLOW, FAST, THIRD = PeerId("slow"), PeerId("fast"), PeerId("third")
HAND_OVER_S = 3.0
LIMIT, SIZE = 1000, 4


def pace(tokens_per_s: float) -> WorkerPace:
    return WorkerPace(tokens_per_s, 100 * tokens_per_s)


SPEEDS = {SLOW: pace(5.0), FAST: pace(50.0)}


def spec(name: str, step: int = 0) -> GroupSpec:
    return GroupSpec(GroupId(name), (1, 2, 3), SIZE, SamplingParams(max_new_tokens=LIMIT), step)


def expecting(tokens: int, *groups: GroupSpec) -> LeaseBook:
    """A book that expects so many tokens of a rollout."""
    book = LeaseBook(LeaseRules(4, 600.0))
    book.lengths.learn(spec("earlier"), SIZE * tokens, SIZE)
    book.offer(0.0, groups)
    return book


def straggler(tokens: int, now: float, group: GroupSpec | None = None) -> LeaseBook:
    """One group on the slow worker with so many tokens of each rollout; the fast one idles."""
    book = expecting(800, group or spec("g"))
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


@pytest.mark.parametrize(
    "why", ["nearly done", "as fast where it is", "no faster worker", "evaluation", "queued group", "only its own room"]
)
def test_a_lease_stays_if_nothing_is_gained_or_somebody_else_could_use_the_room(why: str) -> None:
    exam = replace(spec("e"), work=Work.EVALUATE, exact_version=Version(0))
    tokens, now = {"nearly done": (780, 156.0), "as fast where it is": (700, 14.0)}.get(why, (100, 20.0))
    book = straggler(tokens, now, exam if why == "evaluation" else None)
    if why == "queued group":
        book.request(now, FAST, 0, Version(0))
        book.offer(now, (spec("h"),))
        book.wanting[FAST] = LeaseRequest(SIZE, Version(0), now)  # between the word of its room and the next match
    if why == "only its own room":
        book.request(now, FAST, 0, Version(0))
        book.request(now, SLOW, SIZE, Version(0))
    fast = {"no faster worker": {"fast": 5.0}, "only its own room": {"slow": 50.0}}
    assert found(book, **fast.get(why, {})) == []


def test_nothing_is_near_its_end_while_groups_are_being_offered() -> None:
    book = straggler(tokens=100, now=20.0)
    book.allow(20.0, FAST, False)
    assert not is_quiet(book, 20.0), "nobody has room"
    book.allow(20.0, FAST, True)
    assert is_quiet(book, 20.0)
    book.offer(21.0, (spec("later", step=99),))
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
