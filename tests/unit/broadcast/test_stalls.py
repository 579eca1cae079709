from __future__ import annotations

from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.route import FORGOTTEN_S, LATE_STALL_S, STALL_S, Stalls

A, B = ArtifactKey(b"a"), ArtifactKey(b"b")


def test_what_stops_coming_is_stalled_until_a_chunk_of_it_comes() -> None:
    stalls = Stalls()
    assert not stalls.look({A: 3}, {}, True, 0.0)
    assert not stalls.look({A: 4}, {}, True, 10.0)
    assert not stalls.look({A: 4}, {}, True, 9.9 + STALL_S)
    assert stalls.look({A: 4}, {}, True, 10.0 + STALL_S) and stalls.keys == {A}
    assert not stalls.look({B: 0}, {A: 4}, True, 11.0 + STALL_S), "another way was taken"
    assert not stalls.look({B: 1}, {A: 4}, True, 12.0 + STALL_S) and stalls.keys == {A}
    assert stalls.look({B: 1}, {A: 5}, True, 13.0 + STALL_S) and not stalls.keys


def test_nothing_stalls_while_anything_wanted_comes_or_nobody_is_there() -> None:
    stalls = Stalls()
    for second in range(100):
        assert not stalls.look({A: 3, B: second // 15}, {}, True, float(second)), "B comes, and A waits for its turn"
    for second in range(100, 200):
        assert not stalls.look({A: 3, B: 6}, {}, False, float(second)), "a cut link is no stall"


def test_what_is_dropped_or_published_anew_counts_no_longer() -> None:
    stalls = Stalls()
    stalls.look({A: 3}, {}, True, 0.0)
    stalls.look({A: 3}, {}, True, 0.5)
    assert stalls.look({A: 3}, {}, True, 1.0 + STALL_S)
    assert stalls.look({}, {}, True, 2.0 + STALL_S) and not stalls.keys


def test_what_stalled_is_tried_again_later() -> None:
    stalls, end = Stalls(), STALL_S + FORGOTTEN_S
    stalls.look({A: 3}, {}, True, 0.0)
    stalls.look({A: 3}, {}, True, 0.5)
    assert stalls.look({A: 3}, {}, True, STALL_S) and stalls.keys == {A}
    assert not stalls.look({}, {A: 3}, True, end - 1.0)
    assert stalls.look({}, {A: 3}, True, end) and not stalls.keys


def test_a_node_that_is_served_last_waits_longer_and_not_for_ever() -> None:
    stalls = Stalls()
    stalls.look({A: 3}, {}, True, 0.0, is_late=True)
    stalls.look({A: 3}, {}, True, 0.5, is_late=True)
    assert not stalls.look({A: 3}, {}, True, LATE_STALL_S - 1.0, is_late=True)
    assert stalls.look({A: 3}, {}, True, LATE_STALL_S, is_late=True) and stalls.keys == {A}
