"""What a worker may hold and is believed: what it has delivered, and no claim."""

from __future__ import annotations

import pytest

from echo2.base.ids import LeaseId, PeerId, Version
from echo2.base.rollout import EndReason
from echo2.coordinator.fleet.record import (
    BAR_S_MAX,
    CLAIM_MARGIN,
    GROWTH,
    SETTLE_S,
    TELLING_S_MAX,
    TRIAL_SHARE,
    WINDOWS_MAX,
    WorkerRecord,
    WorkerRecords,
)
from echo2.coordinator.leases import events as le
from echo2.coordinator.leases.waits import waits
from tests.unit.coordinator.test_lease_book import TIMEOUT_S, WORKERS, book, grants, ready, revoked, spec

A, B, C = WORKERS
ROOM = 1 << 20


def told(*workers: tuple[PeerId, int, float]) -> le.Delivered:
    return le.Delivered(tuple(le.WorkerDelivered(*one) for one in workers))


def test_before_the_learner_tells_anything_nothing_is_held_back() -> None:
    one = book()
    one.handle(le.GroupsOffered(tuple(spec(f"g{number}") for number in range(20))), 0.0)
    assert len(ready(one, A, free=ROOM)) == 20
    assert one.records.of(A).delivered_per_s is None and one.records.of(A).believed_per_s(40.0) == 40.0


def test_beside_a_proven_worker_a_newcomer_gets_one_group_and_newcomers_together_their_share() -> None:
    one = book()
    one.handle(told((A, 4, 4.0)), 0.0)
    one.handle(le.GroupsOffered(tuple(spec(f"g{number:02d}") for number in range(12))), 0.0)
    one.handle(le.WorkerAllowed(A, True), 0.0)
    newcomers = [PeerId(f"n{number}") for number in range(6)]
    granted = [ready(one, newcomer, free=ROOM) for newcomer in newcomers]
    assert [len(grant) for grant in granted] == [1, 1, 1, 0, 0, 0] and TRIAL_SHARE * 12 == 3
    assert "must deliver what they hold" in waits(one, 1.0)[0][0]
    assert len(ready(one, A, free=ROOM)) == 2 == GROWTH * 4 / 4, "twice what it was heard of at once"


def test_what_a_worker_may_hold_doubles_with_what_it_is_heard_of_and_a_newcomer_stays_below() -> None:
    one = book()
    one.handle(le.GroupsOffered(tuple(spec(f"g{number:03d}") for number in range(200))), 0.0)
    one.handle(told((A, 4, 4.0), (B, 4, 0.0)), 0.0)
    held = []
    ready(one, A, free=ROOM)
    ready(one, B, free=ROOM)
    for second in range(1, 5):
        one.handle(told((A, 4 * one.lease_count(A), 1.0), (B, 4 * one.lease_count(B), 0.0)), float(second))
        held.append((one.lease_count(A), one.lease_count(B)))
    assert held == [(4, 4), (8, 4), (16, 4), (32, 4)], "one that has not finished any holds four groups at most"


def test_at_the_start_of_a_run_every_worker_gets_its_fair_share_at_once() -> None:
    one = book()
    one.handle(told(), 0.0)
    one.handle(le.WorkerAllowed(B, True), 0.0)
    one.handle(le.GroupsOffered(tuple(spec(f"g{number}") for number in range(8))), 0.0)
    assert len(ready(one, A, free=ROOM)) == 4 == len(ready(one, B, free=ROOM))


def test_leases_of_which_nothing_comes_go_to_others_and_their_worker_waits_twice_as_long_each_time() -> None:
    one = book()
    one.handle(told((B, 4, 4.0)), 0.0)
    one.handle(le.WorkerAllowed(B, True), 0.0)
    one.handle(le.GroupsOffered((spec("g"),)), 0.0)
    now, pauses = 0.0, []
    for _ in range(3):
        ready(one, A, free=ROOM, now=now)
        (grant,) = one.leases_of(A)
        came = now
        while not (lost := revoked(one.handle(told(), now))):
            one.handle(le.Progressed(A, grant.lease_id, 0, int(now - came) + 1), now)  # its word alone
            now += 1.0
        assert lost == [grant.lease_id] and now - came == pytest.approx(one.records.first_word_s, abs=1.0)
        assert ready(one, A, free=ROOM, now=now) == []
        began = now
        while now < one.records.of(A).barred_until:
            now += 1.0
        pauses.append(now - began)
        one.groups[grant.group_id].avoid.clear()
    assert pauses == [10.0, 20.0, 40.0]
    assert one.records.bar(C, "", one.records.first_word_s, one.records.of(C).barred_until) == one.records.first_word_s
    for _ in range(30):
        longest = one.records.bar(C, "", one.records.first_word_s, one.records.of(C).barred_until)
    assert longest == BAR_S_MAX


def test_while_the_learner_is_away_nobody_falls_silent() -> None:
    one = book()
    one.handle(told((B, 4, 4.0)), 0.0)
    one.handle(le.GroupsOffered((spec("g"),)), 0.0)
    assert len(ready(one, A)) == 1
    for second in range(10, 300, 10):
        assert second % TELLING_S_MAX == 0 and revoked(one.handle(told(), float(second))) == []
    assert one.records.of(A).bars == 0


def test_leases_that_are_said_to_be_finished_count_until_the_learner_has_heard_of_them() -> None:
    one = book()
    one.handle(told((B, 4, 4.0)), 0.0)
    one.handle(le.GroupsOffered(tuple(spec(f"g{number}") for number in range(8))), 0.0)
    one.handle(le.WorkerAllowed(B, True), 0.0)
    (grant,) = ready(one, A, free=ROOM)
    one.handle(le.LeaseEnded(A, grant.lease_id, EndReason.FINISHED, ""), 0.1)
    assert ready(one, A, free=ROOM, now=0.2) == []
    assert len(grants(one.handle(told((A, 4, 4.0)), 1.0))) > 0, "and once it has, it goes on at once"


def test_a_proven_worker_that_falls_silent_is_given_as_long_as_a_lease_and_then_begins_anew() -> None:
    one = book()
    one.handle(told((A, 40, 40.0), (B, 4, 4.0)), 0.0)
    one.handle(le.GroupsOffered(tuple(spec(f"g{number:02d}") for number in range(40))), 0.0)
    one.handle(le.WorkerAllowed(B, True), 0.0)
    assert len(ready(one, A, free=ROOM)) == 20
    now, lost = 0.0, []
    while not lost:
        now += 1.0
        lost = revoked(one.handle(told((B, 4, 1.0)), now))
        for lease in one.leases_of(A):
            one.handle(le.Progressed(A, lease.lease_id, 0, int(now)), now)
    assert len(lost) == 20 and now == TIMEOUT_S
    later = now + one.records.first_word_s + 1
    for group in one.groups.values():
        group.avoid.clear()
    ready(one, A, free=ROOM, now=later)
    assert one.lease_count(A) == 1, "its room is that of a newcomer"


def test_a_rate_is_what_was_admitted_by_the_second_with_leases_and_a_claim_counts_to_twice_that() -> None:
    records = WorkerRecords(TIMEOUT_S)
    records.on_delivered((), 0.0)
    records.on_grant(A, LeaseId("l"), 8)
    for second in range(1, 101):
        records.on_delivered((le.WorkerDelivered(A, 8, 2.0),), float(second))
    assert records.of(A).delivered_per_s == pytest.approx(2.0, rel=0.2)
    assert records.of(A).believed_per_s(40.0) == CLAIM_MARGIN * (records.of(A).delivered_per_s or 0.0)
    assert records.of(A).believed_per_s(1.5) == 1.5
    assert records.of(B).believed_per_s(40.0) == 0.0
    for second in range(101, 200):
        records.on_delivered((le.WorkerDelivered(A, 8, 0.0),), float(second))
    assert (records.of(A).delivered_per_s or 0.0) < 0.7, "it holds leases and delivers nothing any more"


def test_the_first_rollouts_of_a_worker_say_little_and_records_stay_small() -> None:
    record = WorkerRecord()
    record.add_window(0.1, 4.0)
    assert record.rollouts / (record.seconds + SETTLE_S) == pytest.approx(4 / (0.1 + SETTLE_S))
    for _ in range(10_000):
        record.add_window(1.0, 0.001)
    assert len(record.windows) <= WINDOWS_MAX
    assert sum(seconds for seconds, _ in record.windows) == pytest.approx(record.seconds)
    assert sum(rollouts for _, rollouts in record.windows) == pytest.approx(record.rollouts)


def test_a_worker_that_idles_keeps_its_rate_and_its_room() -> None:
    one = book()
    one.handle(told((A, 16, 16.0)), 0.0)
    before = one.records.of(A).delivered_per_s
    for second in range(1, 2000):
        one.handle(told(), float(second))
    assert one.records.of(A).delivered_per_s == before
    one.handle(le.GroupsOffered(tuple(spec(f"g{number:02d}") for number in range(40))), 2000.0)
    assert len(ready(one, A, free=ROOM, now=2000.0)) == 8


def test_a_restored_book_knows_what_each_worker_holds() -> None:
    one = book()
    one.handle(le.GroupsOffered((spec("g"), spec("h"))), 0.0)
    ready(one, A, free=8)
    again = book()
    again.restore(one.groups.values(), one.leases.values())
    assert again.records.of(A).used == 8
    again.handle(le.WorkerLost(A, "gone"), 1.0)
    assert again.records.of(A).used == 0


def test_claimed_rates_do_not_decide_who_gets_the_next_group() -> None:
    """The one that is through soonest gets it, and how soon is told by what it has delivered."""
    one = book()
    one.handle(told((A, 8, 8.0), (B, 8, 8.0)), 0.0)
    one.handle(le.Rated(A, 3.0), 0.0)
    one.handle(le.Rated(B, 1e9), 0.0)
    for worker in (A, B):
        one.handle(le.WorkerAllowed(worker, True), 0.0)
    one.handle(le.GroupsOffered((spec("g"), spec("h"))), 0.0)
    one.handle(le.RolloutsWanted(B, 4, Version(0)), 0.0)
    one.handle(le.RolloutsWanted(A, ROOM, Version(0)), 1.0)
    one.handle(le.RolloutsWanted(B, ROOM, Version(0)), 1.0)
    one.handle(le.GroupsOffered(tuple(spec(f"i{number}") for number in range(2))), 2.0)
    assert one.lease_count(A) == 2 == one.lease_count(B)
