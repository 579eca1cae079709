"""A worker's record: what it may hold and is believed follows from what it delivered, and giving leases up has a bound."""

from collections.abc import Callable, Iterable

import pytest

from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import EndReason, GroupSpec, SamplingParams, Work
from echo2.coordinator.fleet import record as fleet_record
from echo2.coordinator.fleet.record import BAR_S_MAX, EXPIRED, HANDED_BACK, PICKS_MAX, REFUSED, SETTLE_S, STOPS_MAX
from echo2.coordinator.leases import lease as le
from echo2.coordinator.planning.advice import lease_waits
from tests.unit.coordinator.test_lease_book import TIMEOUT_S, WORKERS, A, B, C, book, delivery, grants, hold, revoked

ROOM, ALL = 4, 1 << 20


class Run:
    """A lease book, its learner, and a clock that both follow. `proven`: the learner has had rollouts of these."""

    def __init__(self, *proven: PeerId, is_told: bool = True) -> None:
        self.one = book()
        self.now, self.groups = 0.0, 0
        self.notes: list[str] = []
        self.proven = proven
        if is_told:
            self.hears(*((worker, 64, 64.0) for worker in proven))
        for worker in proven:
            self.tell(self.one.allow, worker, True)

    def tell(self, method: Callable[..., list[le.Action]], *args: object) -> list[le.Action]:
        actions = method(self.now, *args)
        self.notes += [action.text for action in actions if isinstance(action, le.Note)]
        return actions

    def hears(self, *workers: tuple[PeerId, int, float]) -> list[le.Action]:
        """The learner reports from whom it has received what."""
        return self.tell(self.one.on_delivered, tuple(delivery(*worker) for worker in workers))

    def offer(self, count: int = 1, prompt: int | None = None, exam: Version | None = None) -> list[GroupSpec]:
        found = []
        for _ in range(count):
            self.groups += 1
            tokens, sampling = (self.groups if prompt is None else prompt,), SamplingParams(seed=self.groups)
            work = {} if exam is None else {"work": Work.EVALUATE, "exact_version": exam}
            found.append(GroupSpec(GroupId(f"g{self.groups:05d}"), tokens, ROOM, sampling, int(exam or 0), **work))
        self.tell(self.one.offer, tuple(found))
        return found

    def asks(self, worker: PeerId, free: int = ALL, version: int = 0) -> list[le.Grant]:
        """Once, and not for what comes later."""
        self.tell(self.one.allow, worker, True)
        found = grants(self.tell(self.one.request, worker, free, Version(version)))
        self.tell(self.one.request, worker, 0, Version(version))
        return found

    def given(self, worker: PeerId, free: int = ROOM, prompt: int | None = None) -> le.Grant:
        """A new group while this worker alone asks."""
        self.offer(prompt=prompt)
        (found,) = self.asks(worker, free)
        return found

    def gets_none(self, worker: PeerId) -> bool:
        self.offer()
        return not self.asks(worker, ROOM)

    def ends(self, grant: le.Grant, reason: EndReason = EndReason.HANDED_BACK, closed: str = "") -> None:
        self.tell(self.one.end, grant.worker_id, grant.lease_id, reason, "")
        if closed:
            self.tell(self.one.close, (grant.group.group_id,), closed)

    def passes(self, seconds: float = SETTLE_S + 1) -> None:
        """Leases that run go on running."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 1.0)
            self.hears(*((worker, 64, 64.0) for worker in self.proven))
            self.tell(self.one.tick)

    def record(self, worker: PeerId) -> fleet_record.WorkerRecord:
        return self.one.records.of(worker)

    def is_barred(self, worker: PeerId) -> bool:
        return self.record(worker).barred_until > self.now


# ---- what was delivered


def test_room_grows_with_what_is_delivered_and_newcomers_hold_a_share_together() -> None:
    run = Run(is_told=False)
    run.offer(20)
    assert len(run.asks(A)) == 20 and run.record(A).believed_per_s(40.0) == 40.0, "the learner has told nothing yet"

    start = Run()
    start.hears()
    start.tell(start.one.allow, B, True)
    start.offer(8)
    assert len(start.asks(A)) == 4 == len(start.asks(B)), "at the start of a run each has its fair share"

    later = Run()
    later.hears((A, 4, 4.0))
    later.offer(12)
    later.tell(later.one.allow, A, True)
    new = [PeerId(f"n{number}") for number in range(6)]
    given = [later.asks(worker) for worker in new]
    assert list(map(len, given)) == [1, 1, 1, 0, 0, 0] and fleet_record.TRIAL_SHARE * 12 == 3
    later.tell(later.one.request, new[5], ROOM, Version(0))
    assert "must deliver what they hold" in lease_waits(later.one, 1.0)[0][0]
    assert len(later.asks(A)) == 2 == fleet_record.GROWTH * 4 / 4, "twice what it was heard of at once"
    later.ends(given[0][0])
    assert later.one.lease_count(new[5]) == 1, "the share of one that gave its own back is free"
    later.hears((A, 4, 4.0), (new[1], 4, 1.0))
    assert [len(later.asks(worker)) for worker in new[3:5]] == [1, 0], "and of one that has delivered"

    grows = Run()
    grows.offer(200)
    grows.hears((A, 4, 4.0), (B, 4, 0.0))
    held = []
    for worker in (A, B):
        grows.tell(grows.one.allow, worker, True)
        grows.tell(grows.one.request, worker, ALL, Version(0))
    for second in range(1, 5):
        grows.now = float(second)
        grows.hears(*((worker, 4 * grows.one.lease_count(worker), float(worker == A)) for worker in (A, B)))
        held.append((grows.one.lease_count(A), grows.one.lease_count(B)))
    assert held == [(4, 4), (8, 4), (16, 4), (32, 4)], "one that has not finished any holds four groups at most"


def test_leases_of_which_nothing_comes_go_to_others_and_their_worker_waits_twice_as_long_each_time() -> None:
    run, pauses = Run(B), []
    run.offer()
    for _ in range(3):
        (grant,) = run.asks(A)
        began = run.now
        while not (lost := revoked(run.hears())):
            run.tell(run.one.on_progress, A, grant.lease_id, 0, int(run.now - began) + 1)  # its word alone
            run.now += 1.0
        assert lost == [grant.lease_id] and run.now - began == pytest.approx(run.one.records.first_word_s, abs=1.0)
        assert run.asks(A) == []
        pauses.append(run.record(A).barred_until - run.now)
        run.now = run.record(A).barred_until
        run.one.groups[grant.group.group_id].avoid.clear()
    assert pauses == [10.0, 20.0, 40.0]
    run.ends(run.given(A), EndReason.FINISHED)  # it says
    while not run.is_barred(A):
        run.hears()
        run.now += 1.0
    run.now = run.record(A).barred_until
    run.hears()
    assert run.given(A), "what it never delivered is not held against it for ever"
    for _ in range(30):
        longest = run.one.records.bar(C, "", 10.0, run.record(C).barred_until)
    assert longest == BAR_S_MAX


def test_while_the_learner_is_away_nobody_falls_silent() -> None:
    run = Run(B)
    run.offer()
    assert len(run.asks(A)) == 1
    for second in range(10, 300, 10):
        run.now = float(second)
        assert second % fleet_record.TELLING_S_MAX == 0 and revoked(run.hears()) == []
    assert run.record(A).bars == 0


def test_a_proven_worker_that_falls_silent_is_given_as_long_as_a_lease_and_then_begins_anew() -> None:
    run = Run(B)
    run.hears((A, 40, 40.0))
    run.offer(40)
    assert len(run.asks(A)) == 20
    lost: list[LeaseId] = []
    heard_at = TIMEOUT_S - 1
    while not lost:
        run.now += 1.0
        lost = revoked(run.hears((B, 4, 1.0), *([(A, 4, 1.0)] if run.now == heard_at else [])))
    assert len(lost) == 20 and run.now == heard_at + TIMEOUT_S, "since it was last heard of"
    run.now += run.one.records.first_word_s + 1
    for group in run.one.groups.values():
        group.avoid.clear()
    assert len(run.asks(A)) == 1, "its room is that of a newcomer"


def test_a_rate_is_what_was_admitted_by_the_second_with_leases_and_a_claim_counts_to_twice_that() -> None:
    records = fleet_record.WorkerRecords(TIMEOUT_S)

    def rate_after(seconds: Iterable[int], admitted: float) -> float:
        for second in seconds:
            records.on_delivered((delivery(A, 8, admitted),), float(second))
        return records.of(A).delivered_per_s or 0.0

    records.on_delivered((), 0.0)
    records.on_grant(A, LeaseId("l"), 8)
    assert rate_after([1], 4.0) == pytest.approx(4 / (1 + SETTLE_S)), "its first rollouts say little"
    rate = rate_after(range(2, 102), 2.0)
    assert rate == pytest.approx(2.0, rel=0.2)
    assert records.of(A).believed_per_s(40.0) == fleet_record.CLAIM_MARGIN * rate
    assert records.of(A).believed_per_s(1.5) == 1.5
    assert records.of(B).believed_per_s(40.0) == 0.0
    assert rate_after(range(102, 200), 0.0) < 0.7, "it holds leases and delivers nothing any more"
    records.on_return(A, LeaseId("l"), False)
    before, room = records.of(A).delivered_per_s, records.of(A).peak_rollouts
    for second in range(200, 2000):
        records.on_delivered((), float(second))
    assert (records.of(A).delivered_per_s, records.of(A).peak_rollouts) == (before, room), "one that idles keeps both"
    assert rate_after(range(2000, 5000), 0.001) >= 0 and len(records.of(A).windows) <= fleet_record.WINDOWS_MAX


def test_claimed_rates_do_not_decide_who_gets_the_next_group() -> None:
    """The one that is through soonest gets it, and how soon is told by what it has delivered."""
    run = Run(A, B)
    run.one.rate(A, 20.0)
    run.one.rate(B, 1e9)
    for worker in (A, B):
        run.tell(run.one.request, worker, ALL, Version(0))
    for _ in range(4):
        run.offer()
    assert run.one.lease_count(A) == 2 == run.one.lease_count(B)


# ---- what was given up


def test_a_worker_that_gives_up_every_other_prompt_is_held_back_for_twice_as_long_each_time_and_shown() -> None:
    run, pauses, leases = Run(A, B), [], 0
    while len(pauses) < 8:
        grant = run.given(A)
        leases += 1
        if leases % 2:
            run.ends(grant, EndReason.HANDED_BACK, "cancelled")
        else:
            run.ends(grant, EndReason.FINISHED, "complete")
        run.passes()
        if run.is_barred(A):
            assert pauses or leases <= 3 * PICKS_MAX
            (text,) = [what for what, _ in lease_waits(run.one, run.now, str) if "is given no leases" in what]
            assert "gives up leases one by one" in text and "handed back" in text and str(A) in text
            pauses.append(run.record(A).barred_until - run.record(A).barred_at)
            assert run.gets_none(A) and run.asks(B, ROOM), "A would take it"
            run.passes(pauses[-1] + 1)
    assert pauses == [min(BAR_S_MAX, fleet_record.BAR_S_MIN * 2.0**number) for number in range(8)]
    assert any("is given no leases for 30 s" in note and "finished of" in note for note in run.notes)
    worst = Run(A, B)
    kept, *many = [worst.given(A, ALL) for _ in range(6 * int(PICKS_MAX))]
    for grant in many:
        worst.ends(grant, closed="cancelled")
    worst.passes()
    worst.ends(kept, EndReason.FINISHED, "complete")
    worst.passes(worst.record(A).barred_until - worst.now)
    for _ in range(fleet_record.FINISHED_PER_PICK):
        worst.ends(worst.given(A, ALL), EndReason.FINISHED, "complete")
    worst.ends(worst.given(A, ALL), closed="cancelled")
    worst.passes()
    assert not worst.is_barred(A), "the bar was for all that it gave up"


@pytest.mark.parametrize("way", [HANDED_BACK, REFUSED, EXPIRED, fleet_record.MISSING, fleet_record.UNFINISHED])
def test_however_a_lease_is_given_up_while_others_are_kept_it_counts(way: str) -> None:
    run = Run(A, B)
    kept = run.given(A, ALL)
    for _ in range(int(PICKS_MAX) + 1):
        grant = run.given(A, ALL)
        if way in (HANDED_BACK, REFUSED):
            run.ends(grant, EndReason.REFUSED if way == REFUSED else EndReason.HANDED_BACK)
        elif way == EXPIRED:
            for _ in range(int(TIMEOUT_S) + 1):
                run.passes(1.0)
                run.tell(run.one.on_progress, A, kept.lease_id, 0, int(run.now))
        elif way == fleet_record.MISSING:
            run.tell(run.one.reconnect, A, (hold(kept),))
        else:
            run.ends(grant, EndReason.FINISHED)
            run.passes(1.0)
            run.tell(run.one.offer, (grant.group,), (0,))
        run.tell(run.one.close, (grant.group.group_id,), "cancelled")
    run.passes()
    assert kept.lease_id in run.one.leases and run.record(A).ways[way] > PICKS_MAX
    assert run.is_barred(A) and run.gets_none(A)


def test_preemption_gives_up_everything_at_once_and_counts_as_one_until_it_comes_too_often() -> None:
    run = Run(A, B)
    run.now = STOPS_MAX * fleet_record.STOP_EVERY_S  # into the run
    run.passes(1.0)
    for _ in range(int(STOPS_MAX)):
        held = [run.given(A, ALL) for _ in range(12)]
        for grant in held[:6]:
            run.ends(grant)
            run.passes(0.1)
        run.tell(run.one.lose, A, "preemption")
        for grant in held:
            run.tell(run.one.close, (grant.group.group_id,), "cancelled")
        run.passes()
        assert not run.is_barred(A)
    assert run.record(A).picks == 0 and run.record(A).stops > STOPS_MAX - 1 and run.record(A).ways[fleet_record.LOST]
    for is_soon in (True, False):
        run.now += 0.0 if is_soon else 8 * fleet_record.STOP_EVERY_S
        run.hears((A, 64, 64.0), (B, 64, 64.0))
        held = [run.given(A, ALL) for _ in range(2)]
        run.tell(run.one.reconnect, A, ())
        for grant in held:
            run.tell(run.one.close, (grant.group.group_id,), "cancelled")
        run.passes()
        assert run.is_barred(A) == is_soon, "machines are taken now and then"
        assert "all at once, again and again" in run.record(A).why
        assert run.record(A).stops <= STOPS_MAX, "the bar was for it"


def test_a_prompt_that_many_workers_give_up_is_at_fault_itself_until_somebody_finishes_it() -> None:
    run = Run(A, B, C)
    for prompt in range(1, 7):
        for worker in WORKERS[: fleet_record.PROMPT_WORKERS]:
            run.ends(run.given(worker, prompt=prompt), closed="stale")
        run.passes()
    assert [run.record(worker).picks for worker in WORKERS] == [0.0, 0.0, 0.0], "six each, and nobody's fault"
    assert any("3 workers gave up prompt" in note for note in run.notes)
    run.ends(run.given(B, prompt=6), closed="stale")
    run.passes()
    for prompt in range(1, 7):
        run.ends(run.given(C, prompt=prompt), EndReason.FINISHED, "complete")
    assert (run.record(A).picks, run.record(B).picks) == (6.0, 7.0), "they could be done after all"
    run.ends(run.given(A))
    run.passes()
    assert run.is_barred(A)


def test_what_is_no_fault_of_the_worker_does_not_count() -> None:
    """The learner is silent, the lease was asked back, or it had been delivered whole."""
    run = Run(A, B)
    for _ in range(8):
        grant = run.given(A)
        run.tell(run.one.recall, grant.lease_id, "another is faster")
        run.ends(grant, closed="cancelled")
        run.ends(run.given(A), closed="complete")
        run.ends(grant := run.given(A), EndReason.FINISHED)
        run.now += 2 * fleet_record.TELLING_S_MAX  # in which the learner may have lost it
        run.hears(*((worker, 64, 64.0) for worker in (A, B)))
        run.tell(run.one.offer, (grant.group,), (0,))
        run.tell(run.one.close, (grant.group.group_id,), "cancelled")
        run.passes()
    assert run.record(A).ways[fleet_record.UNFINISHED] == 8 and run.record(A).picks == 0
    held = [run.given(A, ALL) for _ in range(12)]
    run.now += 2 * TIMEOUT_S
    run.tell(run.one.tick)  # all expire while nothing is heard of the learner
    run.passes()
    record = run.record(A)
    assert record.ways[EXPIRED] == len(held) == 12 and record.picks == record.stops == 0 and not run.is_barred(A)
    early = Run(A, B, is_told=False)
    for _ in range(20):
        early.ends(early.given(A))
    early.now += 100.0
    early.tell(early.one.tick)
    assert not early.is_barred(A) and not early.gets_none(A)


def test_evaluations_handed_back_for_a_newer_version_cost_nothing_but_are_not_chosen_from() -> None:
    run = Run(A, B)
    for number in range(1, 6):
        old = Version(number)
        run.offer(12, exam=old)
        given = run.asks(A, 64, old)
        assert len(given) >= 12
        if number % 2:  # it may say so before or after
            run.asks(A, 0, old + 1)
        for grant in given:
            run.ends(grant)
        run.offer(exam=old)
        assert not run.asks(A, 64, old), "nobody comes back to choose more of a version that it has left"
        assert len(run.asks(B, 4 * ROOM, old)) >= 1, "they are for others"
        run.ends(run.given(A, 8 * ROOM), EndReason.FINISHED, "complete")  # it may train meanwhile
        run.passes(fleet_record.MOVING_S + SETTLE_S + 1)
        run.offer(exam=old)
        again = run.asks(A, 64, old)
        assert again, "it may be the only one at this version"
        for grant in again:
            run.ends(grant, EndReason.FINISHED, "complete")
    assert run.record(A).picks == run.record(A).stops == 0 and not run.is_barred(A)


def test_nobody_is_held_back_where_nobody_else_is_left() -> None:
    run = Run(A, B)
    for worker in (A, B):
        run.given(worker, ALL)
    for worker in (A, B) * (int(PICKS_MAX) + 1):
        run.ends(run.given(worker, ALL), closed="cancelled")
    run.passes()
    assert run.is_barred(A) and run.is_barred(B)
    assert run.given(B, ALL) and run.given(A, ALL)
    records = run.one.records
    assert records.is_barred(A, [A, C], run.now) and not records.is_barred(A, [A, B], run.now)
