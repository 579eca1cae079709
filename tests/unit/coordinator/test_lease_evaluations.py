"""Evaluations go to few workers, at their very version, and training goes on at the others."""

from __future__ import annotations

from collections import Counter

from echo2.base.ids import PeerId, Version
from echo2.base.rollout import EndReason, GroupSpec
from echo2.coordinator.leases import lease as le
from echo2.coordinator.leases.book import LeaseBook
from echo2.coordinator.leases.lease import EVALUATION_SHARE, Evaluators, may_take
from echo2.coordinator.planning.advice import lease_waits
from tests.unit.coordinator.test_lease_book import A, B, C, book, ends, exam, grants, ready, spec

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
    assert [may_take(exam("e", 3), Version(version), 4) for version in (2, 3, 4)] == [False, True, False]


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
    chosen = Evaluators().chosen(Version(3), FLEET, FLEET, lambda worker: 9.0 if worker == FLEET[0] else 1.0)
    assert chosen == [FLEET[0]]


def test_a_question_that_a_worker_holds_far_longer_than_leases_take_goes_to_another_at_its_version_although_tokens_come(
) -> None:  # fmt: skip
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
                    return now
                now += 5.0
                heard = (le.WorkerDelivery(A, 1, 0.0), le.WorkerDelivery(B, 4, 4.0))
                one.on_progress(now, A, held.lease_id, 0, int(now))
                one.on_delivered(now, heard)
                ends(one, grant, EndReason.FINISHED, now)
                one.offer(now, (spec(f"later{now}", 4),))
        assert held.lease_id in one.leases
        return float("inf")

    assert 30.0 <= takes_s(3) <= 30.0 + 5.0, "once that is longer than four leases and a lease's time-out"
    assert takes_s(4) == float("inf"), "a slow worker alone at its version keeps its questions"
