"""Limits of a relay: places, circuits, bytes, time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import LimitExceeded
from echo2.base.ids import PeerId
from echo2.broadcast.nat.relay_book import HOUR_S, RelayBook, RelayLimits

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def book(**limits: float) -> RelayBook:
    made = RelayBook(RelayLimits(**limits))  # type: ignore[arg-type]
    for peer in (A, B):
        made.reserve(peer, 0.0)
    return made


def test_a_peer_without_a_place_is_not_reached() -> None:
    with pytest.raises(LimitExceeded, match="c holds no place"):
        book().open(A, C, 0.0)


def test_a_place_ends_unless_it_is_renewed() -> None:
    relay = book(reservation_s=10.0)
    relay.reserve(A, 8.0)
    relay.open(B, A, 12.0)
    with pytest.raises(LimitExceeded, match="holds no place"):
        relay.open(A, B, 12.0)


def test_places_are_bounded_and_those_that_ended_are_given_away() -> None:
    relay = book(reservations_max=2, reservation_s=10.0)
    with pytest.raises(LimitExceeded, match="2 places"):
        relay.reserve(C, 5.0)
    assert relay.reserve(C, 11.0) == 21.0


def test_circuits_of_a_member_are_bounded_and_closing_one_makes_room() -> None:
    relay = book(circuits_per_member_max=1)
    first = relay.open(A, B, 0.0)
    with pytest.raises(LimitExceeded, match="1 circuits"):
        relay.open(B, A, 0.0)
    relay.close(first)
    relay.open(B, A, 0.0)


def test_circuits_of_the_relay_are_bounded() -> None:
    relay = book(circuits_max=1)
    relay.open(A, B, 0.0)
    with pytest.raises(LimitExceeded, match="all 1 circuits"):
        relay.open(A, B, 0.0)


def test_a_circuit_ends_by_bytes_and_by_time() -> None:
    relay = book(circuit_bytes_max=100, circuit_s_max=10.0)
    circuit = relay.open(A, B, 0.0)
    relay.move(circuit, 100, 1.0)
    with pytest.raises(LimitExceeded, match="100 bytes"):
        relay.move(circuit, 1, 1.0)
    with pytest.raises(LimitExceeded, match="10 s old"):
        relay.move(circuit, 0, 10.0)


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
