"""Places at a node: one address cannot fill them, and the plan's peers always find one."""

from __future__ import annotations

import pytest

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.places import NEWCOMERS_MAX, PER_HOST_MAX, PLACES_MAX, Place, giving_way


def test_however_many_identities_an_address_brings_the_next_newcomer_gets_a_place() -> None:
    held: list[Place] = []
    for number in range(200):
        new = Place(PeerId(f"hostile{number}"), "10.6.6.6", is_planned=False)
        gone = giving_way(new, held, has_plan=True)
        held = [place for place in held if place.peer != gone] + [new]
    assert len(held) == PER_HOST_MAX
    assert giving_way(Place(PeerId("honest"), "10.0.0.1", is_planned=False), held, has_plan=True) is None
    assert giving_way(Place(PeerId("honest"), "10.6.6.6", is_planned=False), held, has_plan=True) == held[0].peer


def test_many_addresses_leave_the_places_of_the_plan_alone() -> None:
    held: list[Place] = []
    for number in range(500):
        new = Place(PeerId(f"hostile{number}"), f"10.6.{number % 250}.6", is_planned=False)
        gone = giving_way(new, held, has_plan=True)
        held = [place for place in held if place.peer != gone] + [new]
    assert len(held) == NEWCOMERS_MAX
    for number in range(PLACES_MAX):
        new = Place(PeerId(f"planned{number}"), "10.0.0.1", is_planned=True)
        gone = giving_way(new, held, has_plan=True)
        held = [place for place in held if place.peer != gone] + [new]
    assert len(held) == PLACES_MAX
    assert all(place.is_planned for place in held)
    with pytest.raises(Unreachable):
        giving_way(Place(PeerId("one more"), "10.0.0.1", is_planned=True), held, has_plan=True)


def test_without_a_plan_the_places_go_to_whoever_comes_first() -> None:
    held = [Place(PeerId(f"p{number}"), "10.0.0.1", is_planned=False) for number in range(PLACES_MAX)]
    assert giving_way(held[-1], held[:-1], has_plan=False) is None
    with pytest.raises(Unreachable):
        giving_way(Place(PeerId("late"), "10.0.0.1", is_planned=False), held, has_plan=False)
    assert giving_way(Place(PeerId("wanted"), "10.0.0.1", is_planned=True), held, has_plan=False) == held[0].peer
