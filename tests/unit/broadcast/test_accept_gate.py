"""Which connections a libp2p listener keeps: a pure rule."""

from __future__ import annotations

from echo2.broadcast.nat.access import STRANGERS_PER_HOST, Places


def filled(places: Places, host: str, count: int, first: int, *, proven: bool) -> None:
    for number in range(first, first + count):
        assert places.came(number, host)[0]
        if proven:
            places.proved(number)


def test_of_an_addresses_strangers_the_oldest_gives_way() -> None:
    places = Places(400)
    filled(places, "a", STRANGERS_PER_HOST, 0, proven=False)
    assert places.came(1000, "a") == (True, 0)
    assert places.came(1001, "a") == (True, 1)
    assert places.came(1002, "b") == (True, None)
    assert len(places) == STRANGERS_PER_HOST + 1


def test_an_addresses_members_cannot_take_the_places_of_others() -> None:
    places = Places(100)
    filled(places, "a", 50, 0, proven=True)
    assert places.came(1000, "a") == (False, None)
    assert places.came(1001, "b") == (True, None)


def test_when_all_are_taken_strangers_give_way_and_members_stay() -> None:
    places = Places(100)
    for host in range(10):
        filled(places, f"member {host}", 9, 100 * host, proven=True)
    filled(places, "a", 10, 2000, proven=False)
    assert places.came(3000, "b") == (True, 2000)
    places.proved(3000)
    for number in range(3001, 3010):
        assert places.came(number, "c")[0]
        places.proved(number)
    assert places.came(3010, "d") == (False, None)
    assert places.is_stranger(3010) is False
    places.ended(0)
    assert places.came(3011, "d") == (True, None)


def test_what_has_ended_leaves_nothing() -> None:
    places = Places(100)
    filled(places, "a", 20, 0, proven=False)
    filled(places, "b", 20, 100, proven=True)
    for number in [*range(20), *range(100, 120), 7]:
        places.ended(number)
    assert (len(places), places._strangers, places._members) == (0, {}, {})
