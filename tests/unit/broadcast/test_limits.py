"""What anybody may hold at a node: links, connections of a libp2p listener, circuits of a relay. Pure rules."""

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from echo2.base.errors import LimitExceeded, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.connections import LINKS_MAX, NEWCOMERS_MAX, PER_HOST_MAX, PER_TOKEN_MAX, Slot, giving_way
from echo2.broadcast.nat.access import STRANGERS_PER_HOST, Places
from echo2.broadcast.nat.relay_book import HOUR_S, RelayBook, RelayLimits

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


class Links:
    """Links of a node, as they come."""

    def __init__(self, *, has_plan: bool = True) -> None:
        self.held: list[Slot] = []
        self.has_plan = has_plan

    def come(self, peer: str, host: str = "10.0.0.1", **fields: object) -> PeerId | None:
        new = Slot(PeerId(peer), host, fields.pop("is_planned", False), **fields)  # type: ignore[arg-type]
        gone = giving_way(new, self.held, has_plan=self.has_plan)
        self.held = [slot for slot in self.held if slot.peer != gone] + [new]
        return gone

    def flood(self, host: Callable[[int], str], token: str = "") -> None:
        for number in range(300):
            with contextlib.suppress(Unreachable):
                self.come(f"hostile{number} {len(self.held)}", host(number), token=token)


def test_many_identities_of_one_address_or_of_many_leave_room_for_newcomers_and_for_the_plan() -> None:
    links = Links()
    links.flood(lambda number: "10.6.6.6")
    assert len(links.held) == PER_HOST_MAX and links.come("honest") is None
    links.flood(lambda number: f"10.6.{number % 250}.6")
    assert len(links.held) == NEWCOMERS_MAX
    for number in range(LINKS_MAX):
        links.come(f"planned{number}", is_planned=True)
    assert len(links.held) == LINKS_MAX and all(slot.is_planned for slot in links.held)
    with pytest.raises(Unreachable):
        links.come("one more", is_planned=True)


@pytest.mark.parametrize("has_plan", [True, False])
def test_one_token_with_an_address_for_each_identity_leaves_places_to_others(has_plan: bool) -> None:
    links = Links(has_plan=has_plan)
    links.flood(lambda number: f"10.6.{number % 250}.6", "theirs")
    links.come("honest", token="ours")
    links.flood(lambda number: f"10.6.{number % 250}.6", "theirs")
    assert "honest" in {slot.peer for slot in links.held}
    most = PER_TOKEN_MAX if has_plan else LINKS_MAX - 1
    assert sum(slot.token == "theirs" for slot in links.held) <= most


def test_whoever_has_delivered_work_gives_way_to_the_plan_alone() -> None:
    links = Links()
    for number in range(LINKS_MAX):
        assert links.come(f"p{number}", token="t", is_proven=True) is None
    with pytest.raises(Unreachable):
        links.come("new", "10.0.0.2", token="u")
    assert links.come("planned", "10.0.0.2", is_planned=True) == "p0"


def filled(places: Places, host: str, count: int, first: int, *, proven: bool) -> None:
    for number in range(first, first + count):
        assert places.admit(number, host)[0]
        if proven:
            places.proved(number)


def test_of_an_addresses_strangers_the_oldest_gives_way_and_its_members_cannot_take_the_places_of_others() -> None:
    places = Places(400)
    filled(places, "a", STRANGERS_PER_HOST, 0, proven=False)
    assert [places.admit(1000, "a"), places.admit(1001, "a"), places.admit(1002, "b")] == [
        (True, 0), (True, 1), (True, None),
    ]  # fmt: skip
    few = Places(100)
    filled(few, "a", 50, 0, proven=True)
    assert few.admit(1000, "a") == (False, None) and few.admit(1001, "b") == (True, None)


def test_when_all_are_taken_strangers_give_way_members_stay_and_what_has_ended_makes_room() -> None:
    places = Places(100)
    for host in range(10):
        filled(places, f"member {host}", 9, 100 * host, proven=True)
    filled(places, "a", 10, 2000, proven=False)
    for number in range(3000, 3010):
        assert places.admit(number, "c") == (True, number - 1000)
        places.proved(number)
    assert places.admit(3010, "d") == (False, None) and not places.is_stranger(3010)
    places.ended(0)
    assert places.admit(3011, "d") == (True, None)
    for number in [n for host in range(10) for n in range(100 * host, 100 * host + 9)] + [*range(3000, 3012)]:
        places.ended(number)
    assert len(places) == 0


def book(**limits: float) -> RelayBook:
    made = RelayBook(RelayLimits(**limits))  # type: ignore[arg-type]
    for peer in (A, B):
        made.reserve(peer, 0.0)
    return made


def test_a_relay_refuses_beyond_each_of_its_limits_and_names_it() -> None:
    with pytest.raises(LimitExceeded, match="c holds no place"):
        book().open(A, C, 0.0)
    places = book(reservations_max=2, reservation_s=10.0)
    with pytest.raises(LimitExceeded, match="2 places"):
        places.reserve(C, 5.0)
    places.reserve(A, 8.0)
    with pytest.raises(LimitExceeded, match="b holds no place"):
        places.open(A, B, 12.0)
    assert places.reserve(C, 12.0) == 22.0, "of a place that ended"
    members = book(circuits_per_member_max=1)
    first = members.open(A, B, 0.0)
    with pytest.raises(LimitExceeded, match="1 circuits"):
        members.open(B, A, 0.0)
    members.reserve(C, 0.0)
    for source, target in ((C, B), (B, C), (C, A)):
        with pytest.raises(LimitExceeded, match="1 circuits"):  # of whoever is at either end
            members.open(source, target, 0.0)
    members.close(first)
    members.open(B, A, 0.0)
    circuits = book(circuits_max=1, circuit_bytes_max=100, circuit_s_max=10.0)
    circuit = circuits.open(A, B, 0.0)
    with pytest.raises(LimitExceeded, match="all 1 circuits"):
        circuits.open(A, B, 0.0)
    circuits.move(circuit, 100, 1.0)
    with pytest.raises(LimitExceeded, match="100 bytes"):
        circuits.move(circuit, 1, 1.0)
    with pytest.raises(LimitExceeded, match="10 s old"):
        circuits.move(circuit, 0, 10.0)


def test_another_circuit_does_not_evade_the_hours_bytes() -> None:
    relay = book(member_bytes_per_hour=100)
    first = relay.open(A, B, 0.0)
    relay.move(first, 100, 1.0)
    relay.close(first)
    with pytest.raises(LimitExceeded, match="within an hour"):
        relay.open(A, B, 2.0)
    for peer in (A, B):
        relay.reserve(peer, HOUR_S)
    relay.open(A, B, HOUR_S + 2)


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.sampled_from("ABC"), st.integers(0, 60)), max_size=60))
def test_no_order_of_requests_moves_more_than_the_limits(steps: list[tuple[str, str, int]]) -> None:
    limits = RelayLimits(circuits_max=3, circuits_per_member_max=2, circuit_bytes_max=100, member_bytes_per_hour=150)
    relay = RelayBook(limits)
    moved: dict[PeerId, int] = {}
    for source, target, count in steps:
        try:
            relay.reserve(PeerId(target), 0.0)
            circuit = relay.open(PeerId(source), PeerId(target), 0.0)
            relay.move(circuit, count, 0.0)
        except LimitExceeded:
            continue
        for peer in {circuit.source, circuit.target}:
            moved[peer] = moved.get(peer, 0) + count
        if count % 2:
            relay.close(circuit)
        assert len(relay.circuits) <= 3
    assert all(count <= 150 for count in moved.values())
