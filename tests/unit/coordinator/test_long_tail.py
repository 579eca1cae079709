"""Stragglers move to fast workers when the model says that it pays, and only then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import EndReason, GroupSpec, SamplingParams, Work
from echo2.coordinator.leases import events as le
from echo2.coordinator.leases.book import LeaseBook
from echo2.coordinator.leases.events import Seeker
from echo2.coordinator.leases.long_tail import (
    MOVES_PER_GROUP_MAX,
    QUIET_S,
    WorkerPace,
    is_quiet,
    moves,
    prefill_rate,
)
from echo2.coordinator.leases.seekers import LeaseRules
from echo2.coordinator.money.market import built_in_catalogue, built_in_models
from echo2.cost_model.machines import worker_prior
from echo2.cost_model.sizing import RunLengths

SLOW, FAST = PeerId("slow"), PeerId("fast")
HAND_OVER_S = 3.0
LIMIT, SIZE = 1000, 4


def pace(tokens_per_s: float) -> WorkerPace:
    return WorkerPace(tokens_per_s, 100 * tokens_per_s)


SPEEDS = {SLOW: pace(5.0), FAST: pace(50.0)}


def spec(name: str, step: int = 0) -> GroupSpec:
    return GroupSpec(GroupId(name), (1, 2, 3), SIZE, SamplingParams(max_new_tokens=LIMIT), step)


def taught(expected: int = 800) -> LeaseBook:
    """A book that expects so many tokens of a rollout."""
    book = LeaseBook(LeaseRules(4, 600.0))
    book.lengths.learn(spec("earlier"), SIZE * expected, SIZE)
    return book


def straggler(tokens: int, now: float, step: int = 0) -> LeaseBook:
    """One group on the slow worker with so many tokens of each rollout; the fast one idles."""
    book = taught()
    book.handle(le.GroupsOffered((spec("g", step),)), 0.0)
    book.handle(le.WorkerAllowed(SLOW, True), 0.0)
    (_, _, grant) = book.handle(le.RolloutsWanted(SLOW, SIZE, Version(0)), 0.0)
    assert isinstance(grant, le.Grant)
    book.handle(le.Progressed(SLOW, grant.lease_id, 0, SIZE * tokens), now)
    book.handle(le.WorkerAllowed(FAST, True), now)
    book.handle(le.RolloutsWanted(FAST, SIZE, Version(0)), now)
    return book


def found(book: LeaseBook) -> list[PeerId]:
    return [move.to for move in moves(book, SPEEDS, HAND_OVER_S, {SLOW: "slow"})]


def test_a_straggler_moves_when_that_ends_it_sooner() -> None:
    book = straggler(tokens=100, now=20.0)
    (move,) = moves(book, SPEEDS, HAND_OVER_S, {SLOW: "berlin"})
    assert (move.to, round(move.gain_s)) == (FAST, round(700 / 5 - (3 + 403 / 5000 + 700 / 50)))
    assert "140.0 s more on berlin, 17.1 s on fast" in move.reason


def test_an_evaluation_stays_with_the_worker_that_holds_its_version() -> None:
    """The fast one would swap to a newer version before the lease reaches it, and then nobody could finish it."""
    book = taught()
    asked = replace(spec("e"), work=Work.EVALUATE, exact_version=Version(0))
    book.handle(le.GroupsOffered((asked,)), 0.0)
    book.handle(le.WorkerAllowed(SLOW, True), 0.0)
    (grant,) = [a for a in book.handle(le.RolloutsWanted(SLOW, SIZE, Version(0)), 0.0) if isinstance(a, le.Grant)]
    book.handle(le.Progressed(SLOW, grant.lease_id, 0, SIZE * 100), 20.0)
    book.handle(le.WorkerAllowed(FAST, True), 20.0)
    book.handle(le.RolloutsWanted(FAST, SIZE, Version(0)), 20.0)
    assert found(book) == []


def test_what_is_nearly_done_or_not_slower_stays() -> None:
    assert found(straggler(tokens=780, now=156.0)) == [], "20 tokens to go: the hand-over costs more"
    assert found(straggler(tokens=700, now=14.0)) == [], "it is as fast where it is"


def test_nothing_moves_while_a_queued_group_could_use_the_room() -> None:
    book = straggler(tokens=100, now=20.0)
    book.handle(le.RolloutsWanted(FAST, 0, Version(0)), 20.0)
    book.handle(le.GroupsOffered((spec("h"),)), 20.0)
    book.seekers.wanting[FAST] = Seeker(SIZE, Version(0), 20.0)  # as between the word of its room and the next match
    assert found(book) == []


def test_nothing_is_near_its_end_while_groups_are_being_offered() -> None:
    book = straggler(tokens=100, now=20.0)
    book.handle(le.WorkerAllowed(FAST, False), 20.0)
    assert not is_quiet(book, 20.0), "nobody has room"
    book.handle(le.WorkerAllowed(FAST, True), 20.0)
    assert is_quiet(book, 20.0)
    book.handle(le.GroupsOffered((spec("later", step=99),)), 21.0)
    assert not is_quiet(book, 21.0)
    assert is_quiet(book, 21.0 + QUIET_S), "what waits is for a version that nobody has yet"


def test_a_lease_that_has_not_reported_yet_is_judged_by_its_workers_mean() -> None:
    book = straggler(tokens=0, now=20.0)
    assert found(book) == [FAST]
    assert moves(book, {SLOW: pace(50.0), FAST: pace(50.0)}, HAND_OVER_S, {}) == []


def test_recall_brings_the_group_to_the_worker_that_was_meant_and_not_for_ever() -> None:
    book = straggler(tokens=100, now=20.0)
    book.handle(le.WorkerAllowed(PeerId("third"), True), 20.0)
    book.handle(le.RolloutsWanted(PeerId("third"), SIZE, Version(0)), 20.0)
    now, workers = 20.0, []
    for _ in range(MOVES_PER_GROUP_MAX + 1):
        speeds = {**SPEEDS, PeerId("third"): pace(40.0)}
        planned = moves(book, speeds, HAND_OVER_S, {})
        if not planned:
            break
        (lease,) = book.leases.values()
        revoked = book.handle(le.Recall(planned[0].lease_id, planned[0].reason, planned[0].to), now)
        assert [type(one) for one in revoked] == [le.SaveLease, le.Revoke]
        assert moves(book, speeds, HAND_OVER_S, {}) == [], "it is on its way already"
        actions = book.handle(le.LeaseEnded(lease.worker_id, lease.lease_id, EndReason.HANDED_BACK, ""), now + 1)
        (grant,) = [one for one in actions if isinstance(one, le.Grant)]
        assert (grant.worker_id, grant.is_continuation) == (planned[0].to, True)
        workers.append(grant.worker_id)
        now += 60.0
        book.handle(le.Progressed(grant.worker_id, grant.lease_id, 0, SIZE * 100 + len(workers)), now - 50)
        book.handle(le.Progressed(grant.worker_id, grant.lease_id, 0, SIZE * 110), now)  # slow here, too
        book.handle(le.RolloutsWanted(PeerId("third"), SIZE, Version(0)), now)
    assert workers == [FAST, PeerId("third")]
    assert book.counts.moved == MOVES_PER_GROUP_MAX


def test_a_continuation_is_judged_by_what_it_made_itself() -> None:
    book = straggler(tokens=100, now=20.0)
    (lease,) = book.leases.values()
    book.handle(le.WorkerLost(SLOW, "gone"), 20.0)
    (lease,) = book.leases.values()
    assert lease.worker_id == FAST
    book.handle(le.Progressed(FAST, lease.lease_id, 0, SIZE * 120), 21.0)
    book.handle(le.Progressed(FAST, lease.lease_id, 0, SIZE * 220), 23.0)
    assert lease.tokens_before == SIZE * 120
    book.handle(le.RolloutsWanted(PeerId("third"), SIZE, Version(0)), 24.0)
    book.handle(le.WorkerAllowed(PeerId("third"), True), 24.0)
    assert moves(book, {**SPEEDS, PeerId("third"): pace(60.0)}, HAND_OVER_S, {}) == []


def finish_s(consolidates: bool) -> float:
    """A virtual run: six groups, four slow workers and a fast one; when the last group is done."""
    book, speeds = taught(500), {PeerId(f"slow{i}"): 4.0 for i in range(4)} | {FAST: 60.0}
    book.handle(le.GroupsOffered(tuple(spec(f"g{i}") for i in range(6))), 0.0)
    made: dict[str, float] = {}
    now, back_at = 0.0, {}
    for worker in speeds:
        book.handle(le.WorkerAllowed(worker, True), now)
    while any(group.phase is not le.GroupPhase.PRODUCED for group in book.groups.values()):
        for worker in speeds:
            if not book.leases_of(worker):
                book.handle(le.RolloutsWanted(worker, SIZE, Version(0)), now)
        now += 1.0
        assert now < 1000
        for lease in list(book.leases.values()):
            if lease.is_recalled:
                if now >= back_at[lease.lease_id]:
                    book.handle(le.LeaseEnded(lease.worker_id, lease.lease_id, EndReason.HANDED_BACK, ""), now)
                continue
            made[lease.group_id] = min(500.0, made.get(lease.group_id, 0.0) + speeds[lease.worker_id])
            book.handle(le.Progressed(lease.worker_id, lease.lease_id, 0, int(SIZE * made[lease.group_id])), now)
            if made[lease.group_id] >= 500:
                book.handle(le.LeaseEnded(lease.worker_id, lease.lease_id, EndReason.FINISHED, ""), now)
        if consolidates:
            for move in moves(book, {one: pace(speed) for one, speed in speeds.items()}, HAND_OVER_S, {}):
                back_at[move.lease_id] = now + 2.0
                book.handle(le.Recall(move.lease_id, move.reason, move.to), now)
    return now


def test_the_last_group_of_a_step_is_done_in_less_than_half_the_time() -> None:
    assert finish_s(consolidates=False) == 125.0
    assert finish_s(consolidates=True) < 60.0


def test_reading_what_a_straggler_holds_takes_as_long_as_the_machine_there_prefills() -> None:
    """Sixteen rollouts of 6,000 tokens: 27 s on two RTX3090, and 3 s on an H100, whose sequences may be no faster."""
    gpus, size, lengths = built_in_catalogue(), built_in_models()["qwen3-8b"], RunLengths(9216)
    slow, fast = (
        prefill_rate(gpu, size, lengths, 2500.0, gpus)
        for gpu in ("2 x NVIDIA GeForce RTX 3090", "NVIDIA H100 80GB HBM3")
    )
    sampled = worker_prior(gpus["RTX3090"], size, lengths, 2500.0).tokens_per_s
    assert 2.0 < slow / sampled < 6.0 and 5 * slow < fast
    book = straggler(tokens=100, now=20.0)
    by_rate = {
        rate: moves(book, {SLOW: pace(5.0), FAST: WorkerPace(50.0, rate)}, HAND_OVER_S, {SLOW: "slow"})
        for rate in (4.0, slow)
    }
    assert by_rate[4.0] == [] and len(by_rate[slow]) == 1, "403 tokens at 4 a second take longer than to stay"
    assert by_rate[slow][0].gain_s == pytest.approx(700 / 5 - (3 + 403 / slow + 700 / 50))


def test_a_machine_without_a_data_sheet_prefills_by_what_it_samples() -> None:
    gpus = built_in_catalogue()
    assert prefill_rate("GTX 480", built_in_models()["qwen3-8b"], RunLengths(9216), 2500.0, gpus) == 0.0
    assert prefill_rate("H100", None, RunLengths(0), 0.0, gpus) == 0.0, "no rollout was trained on yet"
    assert prefill_rate("RTX4090", built_in_models()["qwen3-32b"], RunLengths(9216), 2500.0, gpus) == 0.0
