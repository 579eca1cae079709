"""Evaluations go to few workers, and training goes on at the others."""

from __future__ import annotations

from collections import Counter

from echo2.base.ids import PeerId, Version
from echo2.base.rollout import EndReason, GroupSpec
from echo2.coordinator.leases import events as le
from echo2.coordinator.leases.book import LeaseBook
from echo2.coordinator.leases.evaluations import EVALUATION_SHARE, Evaluators
from tests.unit.coordinator.test_lease_book import book, exam, grants, spec

FLEET = [PeerId(f"w{index}") for index in range(10)]


def fleet_with(
    groups: tuple[GroupSpec, ...], rates: dict[PeerId, float] | None = None
) -> tuple[LeaseBook, list[le.Grant]]:
    """Ten workers at version 3 with room for two groups of four each."""
    one = book()
    for worker in FLEET:
        one.handle(le.WorkerAllowed(worker, True), 0.0)
        if rates:
            one.handle(le.Rated(worker, rates[worker]), 0.0)
    found = grants(one.handle(le.GroupsOffered(groups, ()), 0.0))
    for worker in FLEET:
        found += grants(one.handle(le.RolloutsWanted(worker, 8, Version(3)), 0.0))
    return one, found


def at_it(found: list[le.Grant]) -> Counter[PeerId]:
    return Counter(grant.worker_id for grant in found if grant.group.exact_version is not None)


def test_a_share_of_the_fleet_evaluates_and_the_rest_trains() -> None:
    groups = tuple(spec(f"g{index}", 3) for index in range(40)) + tuple(exam(f"e{index}", 3) for index in range(20))
    one, found = fleet_with(groups)
    evaluators = at_it(found)
    assert len(evaluators) == round(EVALUATION_SHARE * len(FLEET)), evaluators
    assert all(count == 2 for count in evaluators.values()), "whoever is at it takes nothing else meanwhile"
    trainers = {grant.worker_id for grant in found if grant.group.exact_version is None}
    assert trainers == set(FLEET) - set(evaluators)
    lost = next(iter(evaluators))
    more = grants(one.handle(le.WorkerLost(lost, "gone"), 1.0))
    for worker in FLEET:
        if worker != lost and worker not in evaluators:
            more += grants(one.handle(le.RolloutsWanted(worker, 16, Version(3)), 1.0))
    assert len(at_it(more)) == 1, "another takes the place of one that is lost"


def test_whoever_is_through_with_its_questions_counts_no_more() -> None:
    """They may be busy with training then, and others must take what is asked next."""
    groups = tuple(spec(f"g{index}", 3) for index in range(40)) + tuple(exam(f"e{index}", 3) for index in range(6))
    one, found = fleet_with(groups)
    evaluators = set(at_it(found))
    for grant in found:
        if grant.group.exact_version is not None:
            one.handle(le.LeaseEnded(grant.worker_id, grant.lease_id, EndReason.FINISHED, ""), 1.0)
    one.handle(le.GroupsOffered((exam("next", 3),), ()), 1.0)
    other = next(worker for worker in FLEET if worker not in evaluators)
    for worker in evaluators:
        one.handle(le.RolloutsWanted(worker, 0, Version(3)), 1.0)
    assert at_it(grants(one.handle(le.RolloutsWanted(other, 16, Version(3)), 1.0))) == {other: 1}


def test_where_nothing_is_open_to_train_on_everybody_evaluates() -> None:
    _, found = fleet_with(tuple(exam(f"e{index}", 3) for index in range(20)))
    assert len(at_it(found)) == len(FLEET)


def test_a_fast_worker_is_enough_alone() -> None:
    chosen = Evaluators().chosen(Version(3), FLEET, FLEET, lambda worker: 9.0 if worker == FLEET[0] else 1.0)
    assert chosen == [FLEET[0]]


def test_a_single_worker_does_both() -> None:
    one = book()
    one.handle(le.WorkerAllowed(FLEET[0], True), 0.0)
    one.handle(le.GroupsOffered((spec("g", 3), exam("e", 3)), ()), 0.0)
    found = grants(one.handle(le.RolloutsWanted(FLEET[0], 8, Version(3)), 0.0))
    assert [grant.group.group_id for grant in found] == ["e", "g"]


def test_who_evaluated_before_a_restart_goes_on_with_it() -> None:
    groups = tuple(spec(f"g{index}", 3) for index in range(40)) + tuple(exam(f"e{index}", 3) for index in range(20))
    one, found = fleet_with(groups)
    again = LeaseBook(one.rules)
    again.restore(one.groups.values(), one.leases.values())
    more: list[le.Grant] = []
    for worker in reversed(FLEET):
        again.handle(le.WorkerAllowed(worker, True), 1.0)
    for worker in reversed(FLEET):
        more += grants(again.handle(le.RolloutsWanted(worker, 8, Version(3)), 1.0))
    assert set(at_it(more)) <= set(at_it(found)) and at_it(more)


def test_a_question_that_a_worker_holds_far_longer_than_leases_take_goes_to_another_although_tokens_come() -> None:
    slow, other = FLEET[:2]
    one = book()
    one.handle(le.WorkerAllowed(slow, True), 0.0)
    one.handle(le.WorkerAllowed(other, True), 0.0)
    one.handle(le.GroupsOffered((exam("e", 3), *(spec(f"g{index}", 3) for index in range(8))), ()), 0.0)
    (held,) = (g for g in grants(one.handle(le.RolloutsWanted(slow, 4, Version(3)), 0.0)) if g.group.group_id == "e")
    one.handle(le.Delivered((le.WorkerDelivered(other, 4, 4.0),)), 0.5)
    now = 1.0
    for index in range(5):  # the other worker needs five seconds for each of its leases
        (grant,) = grants(one.handle(le.RolloutsWanted(other, 4, Version(3)), now))
        now += 5.0
        one.handle(le.Progressed(slow, held.lease_id, 0, index + 1), now)
        one.handle(le.LeaseEnded(other, grant.lease_id, EndReason.FINISHED, ""), now)
    assert now < one.rules.lease_timeout_s, "no lease is taken before that, whatever others need"
    for token in range(100):
        now += 5.0
        one.handle(le.Progressed(slow, held.lease_id, 0, 10 + token), now)
        one.handle(le.Delivered((le.WorkerDelivered(slow, 1, 0.0),)), now)
        one.handle(le.RolloutsWanted(slow, 4, Version(3)), now)
        actions = one.handle(le.RolloutsWanted(other, 4, Version(3)), now)
        if moved := [grant for grant in grants(actions) if grant.group.group_id == "e"]:
            break
    assert moved and moved[0].worker_id == other and moved[0].is_continuation
    assert now <= one.rules.lease_timeout_s + 5.0, "at once"
    assert any(isinstance(action, le.Revoke) and action.worker_id == slow for action in actions)


def test_a_slow_worker_alone_at_its_version_keeps_its_questions() -> None:
    slow, other = FLEET[:2]
    one = book()
    for worker in (slow, other):
        one.handle(le.WorkerAllowed(worker, True), 0.0)
    one.handle(le.GroupsOffered((exam("e", 3),), ()), 0.0)
    (held,) = grants(one.handle(le.RolloutsWanted(slow, 4, Version(3)), 0.0))
    one.handle(le.GroupsOffered(tuple(spec(f"g{index}", 4) for index in range(8)), ()), 0.0)
    one.handle(le.Delivered((le.WorkerDelivered(other, 4, 4.0),)), 0.5)
    for second in range(1, 300):
        one.handle(le.Progressed(slow, held.lease_id, 0, second), float(second))
        one.handle(le.Delivered((le.WorkerDelivered(slow, 4, 0.0), le.WorkerDelivered(other, 4, 1.0))), float(second))
        for grant in grants(one.handle(le.RolloutsWanted(other, 4, Version(4)), float(second))):
            one.handle(le.LeaseEnded(other, grant.lease_id, EndReason.FINISHED, ""), second + 0.5)
    assert held.lease_id in one.leases
