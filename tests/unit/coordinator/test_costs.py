"""The money meter against a second bill, kept by the second: who costs what from when to when, and what of it bought work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo2.base.ids import PeerId
from echo2.coordinator.fleet.members import (
    Activation,
    Liveness,
    LivenessRule,
    Membership,
    OperatorSetting,
    PriceLimit,
)
from echo2.coordinator.fleet.record import WorkerRecords
from echo2.coordinator.fleet.tokens import TokenBook
from echo2.coordinator.money.costs import FleetCosts, Money, meter
from echo2.coordinator.money.provisioning import MachineState, RentedMachine
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

OWN, RENTED, DEAR = (PeerId(name) for name in ("own", "rented", "dear"))
USD_PER_S = {OWN: 1.0, RENTED: 3.0, DEAR: 4.0}
MACHINE_USD_PER_S = 2.0
LIMIT = PriceLimit(3600.0, "the dearest offer")
SETTINGS = {one.value: one for one in OperatorSetting}


class Bill:
    """A fleet with its meter, and what each second of it should cost. A worker is charged for a second in which it is there: at
    once while its stream stands; of a broken stream once it is back, and not at all if it turns out to be gone. One whose price
    nobody has agreed to is charged only while it works."""

    def __init__(self) -> None:
        self.fleet, self.now = Membership(LivenessRule(3.0, 9.0), 8, WorkerRecords(60.0)), 0.0
        self.tokens = TokenBook(1)
        token = self.tokens.create("s" * 43, "worker", "", 1e6, 0, 0.0)
        token.peers.add(RENTED)
        self.machine = RentedMachine(
            "m", "gpu", "cloud", "", MachineState.RUNNING, 3600 * MACHINE_USD_PER_S, 0.0, token_id=token.token_id
        )
        self.open_s, self.is_rented = 0.0, True
        self.due_s = dict.fromkeys(USD_PER_S, 0.0)
        self.worked, self.stood_by = dict.fromkeys(USD_PER_S, 0.0), dict.fromkeys(USD_PER_S, 0.0)
        self.heard = set(USD_PER_S)

    def happens(self, what: str, peer_id: PeerId) -> None:
        members = self.fleet.members
        if what == "come" and (peer_id not in members or members[peer_id].setting is not OperatorSetting.BANNED):
            price = 3600.0 * USD_PER_S[peer_id]
            member = self.fleet.on_hello(peer_id, pb.WorkerHello(name=peer_id, price_usd_per_hour=price), self.now)
            member.price_limit = LIMIT if peer_id == DEAR else member.price_limit
            self.heard.add(peer_id)
        elif what == "end the machine" and self.is_rented:
            self.machine.state, self.machine.ended_at, self.is_rented = MachineState.GONE, self.now, False
        elif what == "restart":  # the coordinator is away for so long, and nobody was charged for it yet
            self.passes(100.0)
            before, self.fleet = self.fleet, Membership(LivenessRule(3.0, 9.0), 8, WorkerRecords(60.0))
            self.fleet.restore(list(before.members.values()), self.now)
        elif peer_id in members:
            match what:
                case "cut":
                    self.fleet.on_disconnect(peer_id, self.now)
                case "leave":
                    self.fleet.on_leave(peer_id, self.now)
                case "fall silent":
                    self.heard.discard(peer_id)
                case "automatic" | "active" | "standby" | "draining" | "quarantined" | "banned":
                    self.fleet.set(peer_id, SETTINGS[what], "")
        if what != "restart":
            self.judge()

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.open_s += seconds * self.is_rented
        for peer_id, member in self.fleet.members.items():
            self.due_s[peer_id] += seconds * (member.last_liveness is not Liveness.GONE)

    def judge(self) -> None:
        for peer_id, member in self.fleet.members.items():
            self.fleet.change_of(member, self.now)
            if member.last_liveness is Liveness.SUSPECT and member.cut_at is not None:
                continue
            due_s, self.due_s[peer_id] = self.due_s[peer_id], 0.0
            if member.last_liveness is not Liveness.GONE:
                works = member.last_activation in (Activation.ACTIVE, Activation.DRAINING)
                if works or peer_id != DEAR or member.price_approved:
                    (self.worked if works else self.stood_by)[peer_id] += due_s * USD_PER_S[peer_id]
        meter(self.fleet.members.values(), self.now)

    def second(self) -> None:
        self.passes(1.0)
        for peer_id in self.heard & set(self.fleet.members):
            self.fleet.members[peer_id].heard_at = self.now
        self.judge()

    def metered(self, standby_before: float = 0.0) -> FleetCosts:
        money = Money(self.fleet, self.tokens, SimpleNamespace(now=lambda: self.now))
        money.machines["m"], money.standby_before = self.machine, standby_before
        return money.sums()

    def expected(self) -> tuple[float, ...]:
        """As `FleetCosts`: what was spent, of which useful, of which chosen, each with what it is an hour."""
        rent, own = self.open_s * MACHINE_USD_PER_S, self.worked[OWN] + self.worked[DEAR]
        living = {peer: one for peer, one in self.fleet.members.items() if one.last_liveness is not Liveness.GONE}
        works = {p for p, one in living.items() if one.last_activation in (Activation.ACTIVE, Activation.DRAINING)}
        there = works | {peer for peer, one in living.items() if peer != DEAR or one.price_approved}
        rent_h = 3600 * MACHINE_USD_PER_S * self.is_rented
        works_h, there_h = (3600 * sum(USD_PER_S[one] for one in peers - {RENTED}) for peers in (works, there))
        return (
            own + self.stood_by[OWN] + self.stood_by[DEAR] + rent, there_h + rent_h,
            own + min(rent, self.worked[RENTED]), works_h + rent_h * (RENTED in works),
            own + rent, works_h + rent_h,
        )  # fmt: skip


WHAT = [*SETTINGS, "come", "come", "cut", "leave", "fall silent", "end the machine", "restart"]


@given(st.lists(st.tuples(st.sampled_from(WHAT), st.sampled_from(sorted(USD_PER_S)), st.integers(0, 12)), max_size=30))
@example(
    [
        ("active", DEAR, 4),
        ("standby", DEAR, 4),
        ("restart", OWN, 2),
        ("come", OWN, 9),
        ("cut", OWN, 2),
        ("come", OWN, 1),
    ]
)
@example([("end the machine", RENTED, 3), ("leave", RENTED, 3), ("come", RENTED, 3), ("draining", OWN, 3)])
def test_the_bill_is_what_each_second_costs(steps: list[tuple[str, PeerId, int]]) -> None:
    bill = Bill()
    for peer_id in USD_PER_S:
        bill.happens("come", peer_id)
    for what, peer_id, seconds in steps:
        bill.happens(what, peer_id)
        for _ in range(seconds):
            bill.second()
        found = bill.metered()
        assert found == bill.metered(), "asking costs nothing"
        assert tuple(getattr(found, name) for name in FleetCosts.__slots__) == pytest.approx(bill.expected())
    earlier = bill.metered(standby_before=100.0)
    assert earlier.usd_spent == pytest.approx(bill.metered().usd_spent + 100), "standby of an earlier process"
    assert earlier.usd_chosen == bill.metered().usd_chosen, "which neither cap nor budget bounds"


def test_a_clock_that_is_set_back_gives_nothing_back_and_charges_no_second_again() -> None:
    bill = Bill()
    bill.happens("come", OWN)
    bill.second()
    bill.second()
    for now, spent in ((1.0, 2), (2.0, 2), (3.0, 3)):
        meter(bill.fleet.members.values(), now)
        assert bill.fleet.members[OWN].usd_spent == spent
