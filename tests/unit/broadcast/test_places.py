"""Slots at a node: one address cannot fill them, and the plan's peers always find one."""

from __future__ import annotations

import pytest

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.dialling import LINKS_MAX, NEWCOMERS_MAX, PER_HOST_MAX, PER_TOKEN_MAX, Slot, giving_way


def test_however_many_identities_an_address_brings_the_next_newcomer_gets_a_place() -> None:
    held: list[Slot] = []
    for number in range(200):
        new = Slot(PeerId(f"hostile{number}"), "10.6.6.6", is_planned=False)
        gone = giving_way(new, held, has_plan=True)
        held = [place for place in held if place.peer != gone] + [new]
    assert len(held) == PER_HOST_MAX
    assert giving_way(Slot(PeerId("honest"), "10.0.0.1", is_planned=False), held, has_plan=True) is None
    assert giving_way(Slot(PeerId("honest"), "10.6.6.6", is_planned=False), held, has_plan=True) == held[0].peer


def test_many_addresses_leave_the_places_of_the_plan_alone() -> None:
    held: list[Slot] = []
    for number in range(500):
        new = Slot(PeerId(f"hostile{number}"), f"10.6.{number % 250}.6", is_planned=False)
        gone = giving_way(new, held, has_plan=True)
        held = [place for place in held if place.peer != gone] + [new]
    assert len(held) == NEWCOMERS_MAX
    for number in range(LINKS_MAX):
        new = Slot(PeerId(f"planned{number}"), "10.0.0.1", is_planned=True)
        gone = giving_way(new, held, has_plan=True)
        held = [place for place in held if place.peer != gone] + [new]
    assert len(held) == LINKS_MAX
    assert all(place.is_planned for place in held)
    with pytest.raises(Unreachable):
        giving_way(Slot(PeerId("one more"), "10.0.0.1", is_planned=True), held, has_plan=True)


@pytest.mark.parametrize("has_plan", [True, False])
def test_one_link_with_an_address_for_each_identity_leaves_places_to_newcomers_of_others(has_plan: bool) -> None:
    held: list[Slot] = []

    def come(new: Slot) -> None:
        nonlocal held
        try:
            gone = giving_way(new, held, has_plan=has_plan)
        except Unreachable:
            return
        held = [place for place in held if place.peer != gone] + [new]

    def flood(begin: int) -> None:
        for number in range(begin, begin + 200):
            come(Slot(PeerId(f"hostile{number}"), f"10.6.{number % 250}.6", is_planned=False, token="theirs"))

    flood(0)
    come(Slot(PeerId("honest"), "10.0.0.1", is_planned=False, token="ours"))
    flood(1000)
    assert "honest" in {place.peer for place in held}
    assert sum(place.token == "theirs" for place in held) <= (PER_TOKEN_MAX if has_plan else LINKS_MAX - 1)


def test_the_proven_keep_their_places_and_give_way_to_the_plan_alone() -> None:
    proven = [Slot(PeerId(f"p{n}"), "10.0.0.1", is_planned=False, token="t", is_proven=True) for n in range(LINKS_MAX)]
    assert giving_way(Slot(PeerId("proven too"), "10.0.0.1", False, "t", True), proven[:-1], has_plan=True) is None
    with pytest.raises(Unreachable):
        giving_way(Slot(PeerId("new"), "10.0.0.2", is_planned=False, token="u"), proven, has_plan=True)
    assert giving_way(Slot(PeerId("planned"), "10.0.0.2", is_planned=True), proven, has_plan=True) == "p0"


def test_without_a_plan_the_places_go_to_whoever_comes_first() -> None:
    held = [Slot(PeerId(f"p{number}"), "10.0.0.1", is_planned=False) for number in range(LINKS_MAX)]
    assert giving_way(held[-1], held[:-1], has_plan=False) is None
    with pytest.raises(Unreachable):
        giving_way(Slot(PeerId("late"), "10.0.0.1", is_planned=False), held, has_plan=False)
    assert giving_way(Slot(PeerId("wanted"), "10.0.0.1", is_planned=True), held, has_plan=False) == held[0].peer
