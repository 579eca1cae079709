"""The money meter: who is on the bill from when to when, what of it bought work, and what cap and budget bound."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import PeerId
from echo2.coordinator.fleet.members import Activation, Liveness, LivenessRule, Member, Membership, OperatorSetting
from echo2.coordinator.fleet.record import WorkerRecords
from echo2.coordinator.money.costs import FleetCosts, meter, sums
from echo2.coordinator.money.provisioning import MachineState, PriceLimit, RentedMachine
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

A, B, C = (PeerId(name) for name in "abc")
RULE = LivenessRule(suspect_after_s=3.0, gone_after_s=9.0)
DEAR = PriceLimit(1.0, "the dearest offer")


def hello(name: str, usd_per_s: float) -> pb.WorkerHello:
    return pb.WorkerHello(name=name, price_usd_per_hour=3600.0 * usd_per_s)


class Bill:
    """A fleet and its meter, which is read as the coordinator reads it: once it was judged who lives."""

    def __init__(self) -> None:
        self.fleet, self.now = Membership(RULE, 8, WorkerRecords(60.0)), 0.0
        self.machines: list[RentedMachine] = []
        self.on: dict[PeerId, str] = {}

    def come(self, peer_id: PeerId = A, usd_per_s: float = 1.0, limit: PriceLimit | None = None) -> Member:
        member = self.fleet.on_hello(peer_id, hello(peer_id, usd_per_s), self.now)
        member.price_limit = limit or member.price_limit
        self._judge(member)
        return member

    def set(self, peer_id: PeerId, setting: OperatorSetting) -> None:
        self.fleet.set(peer_id, setting, "", self.now)
        self._judge(self.fleet.members[peer_id])

    def leave(self, peer_id: PeerId) -> None:
        self.fleet.on_leave(peer_id, self.now)
        self._judge(self.fleet.members[peer_id])

    def _judge(self, member: Member) -> None:
        """At once, as the coordinator does with whoever has changed."""
        self.fleet.change_of(member, self.now)
        meter([member], self.now)

    def rent(self, name: str, usd_per_s: float, *workers: PeerId) -> RentedMachine:
        price = 3600.0 * usd_per_s
        machine = RentedMachine(name, "gpu", "cloud", "", MachineState.RUNNING, price, self.now)
        self.machines.append(machine)
        self.on |= dict.fromkeys(workers, name)
        return machine

    def after(self, seconds: float, *heard: PeerId) -> FleetCosts:
        """The bill then; only those named have said anything meanwhile."""
        self.now += seconds
        for peer_id in heard:
            self.fleet.members[peer_id].heard_at = self.now
        for member in self.fleet.members.values():
            self.fleet.change_of(member, self.now)
        return self.costs()

    def costs(self) -> FleetCosts:
        members = self.fleet.members.values()
        meter(members, self.now)
        standby = sum(member.usd_standby for member in members if member.peer_id not in self.on)
        return sums(members, self.machines, self.on, self.now, standby)

    def restart(self, after_s: float) -> None:
        """The coordinator is away for so long; nobody was charged for it yet."""
        self.now += after_s
        before, self.fleet = self.fleet, Membership(RULE, 8, WorkerRecords(60.0))
        self.fleet.restore(list(before.members.values()), self.now)


def costs(spent: tuple[float, float, float], per_s: tuple[float, float, float]) -> FleetCosts:
    """The bill, of which useful, of which chosen: so far, and a second."""
    hourly = [3600.0 * one for one in per_s]
    return FleetCosts(spent[0], hourly[0], spent[1], hourly[1], spent[2], hourly[2])


def test_a_worker_is_on_the_bill_from_its_first_word_until_it_is_gone() -> None:
    bill = Bill()
    bill.now = 100.0
    bill.come()
    assert bill.costs() == costs((0, 0, 0), (1, 1, 1))
    assert bill.after(2, A) == costs((2, 2, 2), (1, 1, 1))
    bill.leave(A)
    assert bill.after(50) == costs((2, 2, 2), (0, 0, 0))
    bill.come()
    assert bill.after(1, A) == costs((3, 3, 3), (1, 1, 1)), "and again from when it comes back"


@pytest.mark.parametrize(
    ("setting", "is_useful"),
    [
        (OperatorSetting.AUTOMATIC, True),
        (OperatorSetting.ACTIVE, True),
        (OperatorSetting.DRAINING, True),
        (OperatorSetting.STANDBY, False),
        (OperatorSetting.QUARANTINED, False),
        (OperatorSetting.BANNED, False),
    ],
)
def test_what_buys_work_is_what_a_worker_costs_while_it_is_active_or_draining(
    setting: OperatorSetting, is_useful: bool
) -> None:
    bill = Bill()
    bill.come()
    bill.set(A, setting)
    found = bill.after(2, A)
    work = 2 if is_useful else 0
    assert (found.usd_spent, found.usd_useful, found.usd_chosen) == (2, work, work)


def test_a_price_that_nobody_agreed_to_costs_nothing_until_the_operator_does() -> None:
    """A claim is no debt: anybody may name one."""
    bill = Bill()
    member = bill.come(A, usd_per_s=1.0, limit=DEAR)
    assert member.asks_too_much and member.activation is Activation.STANDBY
    assert bill.after(2, A) == costs((0, 0, 0), (0, 0, 0))
    bill.set(A, OperatorSetting.STANDBY)
    assert bill.after(2, A) == costs((0, 0, 0), (0, 0, 0)), "to let it stand by is not to agree"
    bill.set(A, OperatorSetting.ACTIVE)
    assert bill.after(2, A) == costs((2, 2, 2), (1, 1, 1)), "from then on, and not before, though it is above the limit"
    bill.set(A, OperatorSetting.STANDBY)
    assert bill.after(2, A) == costs((4, 2, 2), (1, 0, 0)), "the price is agreed to, so standing by costs it"


def test_a_worker_that_is_away_is_charged_once_it_is_back_and_not_if_it_turns_out_to_be_gone() -> None:
    bill = Bill()
    bill.come()
    bill.after(1, A)
    bill.fleet.on_disconnect(A, bill.now)
    assert bill.after(2).usd_spent == 1, "nothing is decided yet"
    bill.come()
    assert bill.costs().usd_spent == 3, "it is back"
    bill.fleet.on_disconnect(A, bill.now)
    assert bill.after(12) == costs((3, 3, 3), (0, 0, 0))
    bill.come()
    assert bill.costs().usd_spent == 3, "and not when it comes again, either"


@pytest.mark.parametrize("is_back", [True, False])
def test_the_gap_of_a_restart_is_charged_to_who_comes_back_within_its_grace_and_never_to_who_is_gone(
    is_back: bool,
) -> None:
    bill = Bill()
    bill.come(A)
    bill.come(B)
    bill.after(2, A, B)
    bill.restart(after_s=100)
    assert bill.costs().usd_spent == 2 * 2
    bill.come(B)
    assert bill.costs().usd_spent == 2 + 102
    assert bill.after(8, B).usd_spent == 2 + 110, "A has its grace still, and its meter stands"
    if is_back:
        bill.come(A)
        assert bill.costs().usd_spent == 110 + 110
    assert bill.after(8, B).usd_spent == (118 + 118 if is_back else 2 + 118)


def test_a_clock_that_is_set_back_gives_nothing_back_and_charges_no_second_again() -> None:
    bill = Bill()
    bill.come()
    bill.after(2, A)
    for now, spent in ((1.0, 2), (2.0, 2), (3.0, 3)):
        meter(bill.fleet.members.values(), now)
        assert bill.fleet.members[A].usd_spent == spent


def test_a_rented_machine_costs_its_own_price_from_the_rent_to_its_end_whatever_its_workers_declare() -> None:
    bill = Bill()
    machine = bill.rent("m", 2.0, A)
    assert bill.after(2) == costs((4, 0, 4), (2, 0, 2)), "nobody has come yet"
    bill.come(A, usd_per_s=1.0)
    assert bill.after(2, A) == costs((8, 2, 8), (2, 2, 2)), (
        "its worker has worked for that, and costs nothing beside it"
    )
    bill.set(A, OperatorSetting.STANDBY)
    assert bill.after(2, A) == costs((12, 2, 12), (2, 0, 2)), "chosen as long as it is rented"
    machine.state, machine.ended_at = MachineState.GONE, bill.now
    bill.leave(A)
    assert bill.after(50) == costs((12, 2, 12), (0, 0, 0))


def test_the_bill_is_of_own_workers_and_machines_together() -> None:
    bill = Bill()
    bill.rent("m", 2.0, B)
    bill.come(A, usd_per_s=1.0)
    bill.come(B, usd_per_s=9.0)  # no more of a machine is useful than it costs
    bill.come(C, usd_per_s=4.0)
    bill.set(C, OperatorSetting.STANDBY)
    assert bill.after(2, A, B, C) == costs((6 + 8, 6, 6), (3 + 4, 3, 3))
    members = bill.fleet.members.values()
    earlier = sums(members, bill.machines, bill.on, bill.now, standby_usd=100.0)
    assert (earlier.usd_spent, earlier.usd_chosen) == (6 + 100, 6), "standby of an earlier process is on the bill alone"


EVENTS: Mapping[str, OperatorSetting | None] = {
    "tick": None, "beat": None, "cut": None, "come": None, "leave": None,
    "work": OperatorSetting.ACTIVE, "stand by": OperatorSetting.STANDBY,
}  # fmt: skip


@given(steps=st.lists(st.tuples(st.floats(0, 20), st.sampled_from(sorted(EVENTS))), max_size=30))
def test_no_second_is_charged_twice_and_none_of_a_gone_worker(steps: list[tuple[float, str]]) -> None:
    bill = Bill()
    member = bill.come()
    for pause_s, what in steps:
        before, was_gone = bill.costs(), member.last_liveness is Liveness.GONE
        is_heard = what == "beat" and member.cut_at is None and not was_gone
        found = bill.after(pause_s, *([A] if is_heard else []))
        assert found == bill.costs(), "asking costs nothing"
        assert before.usd_spent <= found.usd_spent <= bill.now + 1e-6  # one dollar a second
        assert found.usd_useful <= found.usd_spent + 1e-6 and found.usd_chosen == found.usd_useful
        if was_gone or member.last_liveness is Liveness.GONE:
            assert found.usd_spent == before.usd_spent
        match what:
            case "cut":
                bill.fleet.on_disconnect(A, bill.now)
            case "come":
                bill.come()
            case "leave":
                bill.leave(A)
        if (setting := EVENTS[what]) is not None:
            bill.set(A, setting)
