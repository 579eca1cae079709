"""Whose request is next: a sender whose requests take long delays its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.contain.pool import FairQueue


def test_a_sender_that_used_much_waits_behind_those_that_used_little() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.push("slow", f"slow {number}")
    assert queue.pop() == ("slow", "slow 0")
    for number in range(2):
        queue.push("quick", f"quick {number}")
    queue.done("slow", 10.0, is_held=False)
    taken = []
    while (found := queue.pop()) is not None:
        taken.append(found[1])
        queue.done(found[0], 0.1, is_held=False)
    assert taken == ["quick 0", "quick 1", "slow 1", "slow 2"]


def test_of_a_sender_in_debt_one_request_runs_at_a_time() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(4):
        queue.push("bomber", number)
    assert queue.pop() == ("bomber", 0)
    queue.done("bomber", 5.0, is_held=True)
    assert queue.pop() == ("bomber", 1)
    assert queue.pop() is None, "the other process is kept for others"
    queue.push("honest", 7)
    assert queue.pop() == ("honest", 7)
    queue.done("bomber", 0.1, is_held=False)
    assert queue.pop() == ("bomber", 2) and queue.pop() == ("bomber", 3)


def test_being_away_earns_nothing() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.push("busy", 0)
    for number in range(50):
        assert queue.pop() == ("busy", number)
        queue.push("busy", number + 1)
        queue.done("busy", 1.0, is_held=False)
    for number in range(60):
        queue.push("idle", number)
    served = []
    for number in range(20):
        found = queue.pop()
        assert found is not None
        served.append(found[0])
        queue.push("busy", 100 + number)
        queue.done(found[0], 1.0, is_held=False)
    assert 9 <= served.count("busy") <= 11, "what it did not use while away is not paid back"


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 9), st.booleans()), max_size=60))
def test_everything_pushed_comes_out_once(steps: list[tuple[int, float, bool]]) -> None:
    queue: FairQueue[int] = FairQueue()
    out: list[int] = []
    for number, (sender, seconds, is_held) in enumerate(steps):
        queue.push(str(sender), number)
        if number % 2 and (found := queue.pop()) is not None:
            out.append(found[1])
            queue.done(found[0], seconds, is_held)
    while (found := queue.pop()) is not None:
        out.append(found[1])
        queue.done(found[0], 0.0, is_held=True)
    assert sorted(out) == list(range(len(steps))) and len(queue) == 0
