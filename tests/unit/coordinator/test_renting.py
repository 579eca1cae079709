"""What to rent and what to give back: by need, price, limits and money."""

from __future__ import annotations

from dataclasses import replace

from echo2.base.ids import PeerId
from echo2.coordinator.fleet.members import Activation, Liveness, Member
from echo2.coordinator.money.market import built_in_catalogue
from echo2.coordinator.money.provisioning import (
    IDLE_RELEASE_S,
    JOIN_S_MAX,
    RENT_AT_ONCE,
    Budget,
    FleetAdvice,
    MachineOffer,
    MachineState,
    RentedMachine,
    advise,
    rates_by_gpu,
    shortage_rollouts_per_s,
)
from echo2.cost_model.plan import Plan
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.cost_model.fleets import plan_of as plan

NOW = 10_000.0
SMALL, BIG = MachineOffer("small", "local", "RTX 4090", 0.4), MachineOffer("big", "local", "H100", 2.4)
RICH = Budget(1, 0, usd_per_hour_cap=1000)
RATES = {"RTX 4090": 1.0, "H100": 5.0, "": 1.0}


def machine(
    name: str, offer: MachineOffer, state: MachineState = MachineState.RUNNING, rented_at: float = NOW
) -> RentedMachine:
    return RentedMachine(name, offer.name, offer.provider, "", state, offer.usd_per_hour, rented_at)


def worker(rate: float = 0.0, activation: Activation = Activation.ACTIVE, since: float = NOW) -> Member:
    hello = pb.WorkerHello(name="w", gpu="H100")
    return Member(
        PeerId("w"), hello, 0.0, NOW, heartbeat=pb.Heartbeat(rollouts_per_s=rate), last_activation=activation,
        activation_since=since,
    )  # fmt: skip


def ask(
    lack: Plan | None, machines: list[RentedMachine], workers: dict[str, list[Member]], purse: Budget = RICH
) -> FleetAdvice:
    return advise(lack, [SMALL, BIG], machines, workers, lambda: RATES, purse, NOW)


def test_the_cheapest_rollouts_are_rented_as_many_as_are_missing() -> None:
    assert shortage_rollouts_per_s(plan(3, 9)) == 6
    (wish,) = ask(plan(3, 9), [], {}).rent
    assert (wish.offer, wish.count, wish.usd_per_hour) == ("small", RENT_AT_ONCE, 4 * 0.4)
    dearer = advise(plan(3, 9), [replace(SMALL, usd_per_hour=0.6), BIG], [], {}, lambda: RATES, RICH, NOW)
    assert [(wish.offer, wish.count) for wish in dearer.rent] == [("big", 2)]
    assert "lacks 6 rollouts/s" in dearer.rent[0].reason


def test_nothing_is_rented_without_need_plan_or_room() -> None:
    assert ask(plan(9, 9), [], {}) == FleetAdvice(reason="the pool makes what the learner needs")
    assert "no plan yet" in ask(None, [], {}).reason
    full = [machine(f"m{i}", SMALL) for i in range(8)] + [machine(f"n{i}", BIG) for i in range(8)]
    busy = {one.machine_id: [worker(1.0)] for one in full}
    assert ask(plan(3, 9), full, busy) == FleetAdvice(reason="there is no offer with room")


def test_machines_on_their_way_count_as_there() -> None:
    coming = [machine("m", BIG, MachineState.STARTING), machine("n", BIG, MachineState.WANTED)]
    assert "on their way" in ask(plan(3, 9), coming, {}).reason
    (wish,) = ask(plan(3, 9), coming[:1], {}).rent
    assert (wish.offer, wish.count) == ("small", 1)


def test_an_offer_that_nobody_has_measured_is_tried_with_one() -> None:
    (wish,) = advise(plan(3, 9), [SMALL], [], {}, dict, RICH, NOW).rent
    assert (wish.count, "nobody has measured" in wish.reason) == (1, True)
    for state in (MachineState.WANTED, MachineState.RUNNING):
        told = advise(plan(3, 9), [SMALL], [machine("m", SMALL, state)], {"m": [worker(0.0)]}, dict, RICH, NOW)
        assert told == FleetAdvice(reason="a machine of small has to be measured first")
    assert rates_by_gpu([worker(4.0), worker(6.0), worker(0.0)], ()) == {"H100": 5.0, "": 5.0}
    (other, unnamed), kinds = (worker(6.0), worker(8.0)), built_in_catalogue()
    other.hello.gpu, unnamed.hello.gpu = "NVIDIA H100 80GB HBM3", ""
    assert rates_by_gpu([worker(4.0), other, unnamed], kinds) == {"H100": 5.0, "": 6.0}, "spellings of one kind are one"


def test_cap_and_budget_bound_what_is_rented() -> None:
    (wish,) = ask(plan(3, 9), [], {}, Budget(1.0, 0.0, usd_per_hour_cap=1.9)).rent
    assert (wish.offer, wish.count) == ("small", 2)
    assert "cap or the budget" in ask(plan(3, 9), [], {}, Budget(1.0, 0.0, usd_per_hour_cap=1.2)).reason
    assert "cap or the budget" in ask(plan(3, 9), [], {}, Budget(1.0, 8.9, usd_budget=10)).reason
    spent = ask(plan(3, 9), [machine("m", BIG)], {"m": [worker(1.0)]}, Budget(1.0, 10.0, usd_budget=10))
    assert [one.machine_id for one in spent.release] == ["m"]


def test_what_is_billed_in_any_case_is_paid_for_by_the_budget_and_used_until_then_and_so_is_one_busy_worker() -> None:
    assert [Budget(0, 0, usd_budget=10).affordable(1.0, hours) for hours in (0, 2.5, 4, 11)] == [4, 4, 2, 0]
    billed, idle = replace(BIG, hours_least=2.0), worker(1.0, Activation.STANDBY, NOW - IDLE_RELEASE_S)
    for rented_h, workers, is_released in (
        (1.9, [idle], False),
        (2.1, [idle], True),
        (2.1, [idle, worker(1.0)], False),
    ):
        rented = machine("m", billed, rented_at=NOW - 3600 * rented_h)
        told = advise(plan(9, 9), [billed], [rented], {"m": workers}, lambda: RATES, RICH, NOW)
        assert bool(told.release) is is_released


def test_idle_and_useless_machines_are_given_back_the_dearest_first() -> None:
    idle = worker(1.0, Activation.STANDBY, NOW - IDLE_RELEASE_S)
    machines = [
        machine("a", SMALL, rented_at=NOW - JOIN_S_MAX),
        machine("b", BIG),
        machine("c", BIG),
        machine("d", BIG),
    ]
    joined = {"b": [idle], "c": [worker(1.0)], "d": [worker(1.0, Activation.STANDBY, NOW - 10)]}
    released = ask(plan(9, 9), machines, joined).release
    assert [one.machine_id for one in released] == ["b", "a"]
    assert ("stood by for 10 min" in released[0].reason, "no worker has joined" in released[1].reason) == (True, True)
    gone = replace(idle, last_liveness=Liveness.GONE, heard_at=NOW - IDLE_RELEASE_S)
    assert [one.machine_id for one in ask(plan(9, 9), machines[1:2], {"b": [gone]}).release] == ["b"]
    assert ask(plan(9, 9), machines[1:2], {"b": [worker(1.0)]}).release == ()
