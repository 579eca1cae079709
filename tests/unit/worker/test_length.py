from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.worker.length import expected_remaining

LENGTHS = st.lists(st.integers(0, 500), max_size=20)


@given(length=st.integers(0, 600), room=st.integers(1, 600), siblings=LENGTHS, others=LENGTHS)
def test_the_guess_is_at_least_one_token_and_at_most_the_room(
    length: int, room: int, siblings: list[int], others: list[int]
) -> None:
    assert 1 <= expected_remaining(length, length + room, siblings, others) <= room


def test_siblings_weigh_more_than_strangers_and_only_longer_ones_count() -> None:
    assert expected_remaining(10, 1000, [20, 20], []) == 10
    assert expected_remaining(10, 1000, [20], [60]) == 18
    assert expected_remaining(50, 1000, [20, 20], [60]) == 10
    assert expected_remaining(64, 1000, [20, 20], [60]) == 64
