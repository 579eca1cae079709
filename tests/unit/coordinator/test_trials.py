"""Newcomers are in the pool beside the plan until they have delivered, and prices are claims."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from echo2.base.ids import PeerId, RunId, Version
from echo2.coordinator.fleet.members import (
    TRIAL_S,
    Activation,
    LivenessRule,
    Member,
    Membership,
    OperatorSetting,
    try_newcomers,
)
from echo2.coordinator.fleet.record import WorkerRecords
from echo2.coordinator.leases.events import WorkerDelivered
from echo2.coordinator.money.market import built_in_catalogue
from echo2.coordinator.money.provisioning import NO_LIMIT, MachineOffer, MachineState, RentedMachine, price_limit
from echo2.coordinator.planning.input import believed_rate
from echo2.coordinator.planning.telemetry import Heartbeat, PublishedVersion, WorkerHello
from echo2.cost_model.plan import Plan
from echo2.cost_model.planner import plan as plan_of
from echo2.cost_model.snapshot import Hysteresis, PlanConfig
from tests.unit.coordinator.test_planner_input import board, fleet_snapshot

BEAT = Heartbeat(Version(0), rollouts_per_s=20.0, tokens_per_s=400.0, rollout_s_mean=1.0, rollout_s_p95=2.0)
LIE = replace(BEAT, rollouts_per_s=1000.0)


class Fleet:
    def __init__(self) -> None:
        self.records = WorkerRecords(30.0)
        self.membership = Membership(LivenessRule(1e6, 2e6), 1000, self.records)
        self.records.on_delivered((), 0.0)

    def worker(self, name: str, beat: Heartbeat = BEAT, price: float = 1.0, now: float = 0.0) -> Member:
        peer_id = PeerId(name)
        member = self.membership.on_hello(peer_id, WorkerHello(1, name, RunId("r"), price_usd_per_hour=price), now)
        self.membership.change_of(member, now)
        self.membership.on_message(peer_id, beat, now)
        return member

    def delivers(self, member: Member, rollouts: float, now: float = 0.0) -> None:
        self.records.on_delivered((WorkerDelivered(member.peer_id, 8, rollouts),), now)

    def on_trial(self, now: float = 0.0, cap: float = 0.0) -> set[str]:
        members = list(self.membership.members.values())
        try_newcomers(members, cap, now)
        return {member.peer_id for member in members if member.is_on_trial}

    def plan(self, now: float = 0.0) -> Plan:
        known = board(1.0)
        known.on_publish(PublishedVersion(Version(1), Version(0), 1000, 10**9, 0.0, "f"), 0.0, [], 0.0)
        snapshot = fleet_snapshot(known, list(self.membership.members.values()), now, {})
        assert snapshot is not None
        return plan_of(snapshot, PlanConfig(4, hysteresis=Hysteresis(dwell_s=0.0)))


def test_at_the_start_all_are_on_trial_and_in_the_plan_whatever_they_claim() -> None:
    fleet = Fleet()
    fleet.worker("honest")
    fleet.worker("liar", LIE, price=0.0)
    fleet.worker("loading", Heartbeat())
    assert fleet.on_trial() == {"honest", "liar", "loading"} == set(fleet.plan().pool)


def test_a_plan_is_made_of_what_was_delivered_and_no_claim_of_a_newcomer_is_in_it() -> None:
    fleet = Fleet()
    honest = [fleet.worker(f"h{number}") for number in range(5)]
    for member in honest:
        fleet.delivers(member, 200.0)
    fleet.on_trial()
    before = fleet.plan()
    assert len(before.pool) == 4 and before.predicted_utilisation > 0.95
    for number in range(20):
        fleet.worker(f"liar{number}", LIE, price=0.0)
    assert len(fleet.on_trial()) == 5, "as many as have delivered"
    after = fleet.plan()
    assert (after.pool, after.kappa, after.predicted_utilisation) == (
        before.pool, before.kappa, before.predicted_utilisation
    )  # fmt: skip
    liar = fleet.membership.members[PeerId("liar0")]
    fleet.delivers(liar, 1.0, 1.0)
    fleet.on_trial(1.0)
    assert believed_rate(liar) < 1.0
    assert len(set(fleet.plan().pool) & set(before.pool)) >= 3, "a little buys a little"


def test_trials_that_bring_nothing_end_and_come_again_after_a_time_that_doubles() -> None:
    fleet = Fleet()
    fleet.delivers(fleet.worker("honest"), 100.0)
    fleet.worker("first", now=1.0)
    fleet.worker("second", now=2.0)
    assert fleet.on_trial(2.0) == {"first"}
    assert fleet.on_trial(2.0 + TRIAL_S - 1) == {"first"}
    assert fleet.on_trial(2.0 + TRIAL_S) == {"second"}
    began, now, times = None, 2.0 + 2 * TRIAL_S, []
    while len(times) < 4:
        is_on = "first" in fleet.on_trial(now)
        if is_on and began is None:
            times.append(now)
        began = (began or now) if is_on else None
        now += 1.0
    gaps = [after - before for before, after in pairwise(times)]
    assert all(later >= 1.3 * sooner for sooner, later in pairwise(gaps)), gaps


def test_a_trial_needs_weights_room_under_the_cap_and_no_pause() -> None:
    fleet = Fleet()
    fleet.delivers(fleet.worker("honest", price=3.0), 100.0)
    fleet.worker("loading", Heartbeat())
    dear, cheap = fleet.worker("a-dear", price=2.5), fleet.worker("b-cheap", price=1.5)
    assert fleet.on_trial(cap=5.0) == {"b-cheap"}
    assert fleet.on_trial(cap=6.0) == {"b-cheap"}, "one place, and it is taken"
    fleet.records.bar(cheap.peer_id, "", 10.0, 1.0)
    assert fleet.on_trial(2.0, cap=6.0) == {"a-dear"}
    dear.setting = OperatorSetting.STANDBY
    assert fleet.on_trial(2.0, cap=6.0) == set()


def test_at_the_budget_nobody_is_on_trial() -> None:
    fleet = Fleet()
    fleet.worker("new")
    assert fleet.on_trial() == {"new"}
    members = list(fleet.membership.members.values())
    try_newcomers(members, 0.0, 1.0, is_spent=True)
    assert not members[0].is_on_trial


def test_the_operators_word_takes_a_newcomer_into_the_plan() -> None:
    fleet = Fleet()
    fleet.delivers(fleet.worker("honest"), 100.0)
    wanted = fleet.worker("wanted")
    fleet.on_trial()
    assert wanted.peer_id not in fleet.plan().pool
    fleet.membership.set(wanted.peer_id, OperatorSetting.ACTIVE, "", 0.0)
    fleet.membership.change_of(wanted, 0.0)
    fleet.on_trial()
    assert wanted.peer_id in fleet.plan().pool


OFFERS = [
    MachineOffer("big", "manual", gpu="H100", usd_per_hour=2.0),
    MachineOffer("spot", "manual", gpu="H100", usd_per_hour=1.2),
]


@pytest.mark.parametrize(
    ("machine", "gpu", "cap", "budget", "expected"),
    [
        (None, "", 0.0, 0.0, 38.4),
        (None, "cpu", 0.0, 0.0, 38.4),
        (None, "RTX4090", 0.0, 0.0, 3.5),
        (None, "4 x RTX4090", 0.0, 0.0, 14.0),
        (None, "999 x RTX4090", 0.0, 0.0, 28.0),
        (None, "H100", 0.0, 0.0, 2.0),
        (None, "A100", 0.0, 0.0, 38.4),
        (0.7, "H100", 0.0, 0.0, 0.7),
        (None, "A100", 5.0, 0.0, 5.0),
        (None, "A100", 5.0, 3.0, 3.0),
        (None, "H100", 5.0, 30.0, 2.0),
    ],
)
def test_a_price_is_bounded_by_its_machine_the_offers_the_cap_and_the_budget(
    machine: float | None, gpu: str, cap: float, budget: float, expected: float
) -> None:
    rented = None if machine is None else RentedMachine("m", "big", "manual", "", MachineState.RUNNING, machine, 0.0)
    limit = price_limit(rented, OFFERS, gpu, cap, budget, built_in_catalogue())
    assert limit.usd_per_hour == pytest.approx(expected) and limit.what
    assert limit.is_exceeded_by(expected * 1.01) and not limit.is_exceeded_by(expected)


def test_a_price_above_the_limit_waits_and_the_operator_approves_that_price_alone() -> None:
    fleet = Fleet()
    member = fleet.worker("w", price=6.0)
    assert not member.asks_too_much and member.price_limit is NO_LIMIT
    member.price_limit = price_limit(None, [], "", 5.0, 0.0, built_in_catalogue())
    assert member.activation is Activation.STANDBY and "the operator may activate it" in member.activation_reason
    fleet.membership.set(member.peer_id, OperatorSetting.ACTIVE, "agreed", 0.0)
    assert member.activation is Activation.ACTIVE
    member.hello = replace(member.hello, price_usd_per_hour=6.1)
    assert member.activation is Activation.STANDBY
    member.hello = replace(member.hello, price_usd_per_hour=5.9)
    again = Membership(LivenessRule(1.0, 2.0), 10, WorkerRecords(30.0))
    restored = Member(member.peer_id, member.hello, 0.0, 0.0, setting=OperatorSetting.ACTIVE)
    again.restore([restored], 0.0)
    restored.price_limit = member.price_limit
    assert restored.activation is Activation.ACTIVE
