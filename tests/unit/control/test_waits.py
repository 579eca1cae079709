"""."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from echo2.base.clock import FLOOR_SHARE, Backoff, Waits


class _Clock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


def test_all_waits_are_told_and_the_longest_comes_first() -> None:
    clock = _Clock()
    waits = Waits(clock)
    assert waits.longest() == ("", 0.0) and waits.by_age() == []
    waits.begin("learner", "the learner to join the run")
    clock.time_s = 5.0
    waits.begin("coordinator", "a connection to the coordinator")
    clock.time_s = 7.0
    assert waits.by_age() == [("the learner to join the run", 7.0), ("a connection to the coordinator", 2.0)]
    waits.begin("learner", "a connection to the learner")
    assert waits.longest() == ("a connection to the learner", 7.0), "another text is the same wait"
    waits.end("learner")
    assert waits.longest() == ("a connection to the coordinator", 2.0)


@given(seed=st.integers(), failures=st.integers(0, 200))
def test_pauses_grow_to_the_longest_and_start_over_after_success(seed: int, failures: int) -> None:
    backoff = Backoff(random.Random(seed), first_s=0.2, longest_s=5.0)
    pauses = [backoff.next_pause_s() for _ in range(failures)]
    for i, pause in enumerate(pauses):
        ceiling = min(5.0, 0.2 * 2.0 ** min(i, 30))
        assert FLOOR_SHARE * ceiling <= pause <= ceiling
    backoff.succeeded()
    assert backoff.next_pause_s() <= 0.2
