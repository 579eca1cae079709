"""A pool: whose request is next, so that a sender whose requests take long delays its own; what loses its machine is asked again,
and not for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from echo2.contain.messages import Answer, Ending, Limits
from echo2.contain.pool import LOSSES_MAX, FairQueue, Pool, RunnerLost


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


class Elsewhere:
    """Loses its machine as often as a request says, then answers; `is_there` says when one is ready."""

    def __init__(self, seen: list[int], is_there: threading.Event) -> None:
        self.seen, self.is_there, self.has_ended = seen, is_there, False

    def prepare(self, is_wanted: Callable[[], bool]) -> bool:
        while is_wanted():
            if self.is_there.wait(0.01):
                return True
        return False

    def ask(self, body: Mapping[str, Any], times: int = 1) -> Answer:
        self.seen.append(body["number"])
        if self.seen.count(body["number"]) <= body["losses"]:
            raise RunnerLost("its machine is gone")
        return Answer(Ending.ANSWERED, str(body["number"]).encode())

    def kill(self) -> None:
        self.has_ended = True


def opened(count: int = 2) -> tuple[Pool, list[int], threading.Event, list[Elsewhere]]:
    seen, is_there, made = list[int](), threading.Event(), list[Elsewhere]()

    def make() -> Elsewhere:
        made.append(Elsewhere(seen, is_there))
        return made[-1]

    return Pool(make, Limits(), count, 100), seen, is_there, made


def test_what_lost_its_machine_is_asked_again_and_then_given_up() -> None:
    pool, seen, is_there, _ = opened()
    is_there.set()
    told = {0: 0, 1: 1, 2: LOSSES_MAX, 3: LOSSES_MAX + 1}
    futures = [
        pool.submit({"number": number, "losses": losses}, lambda answer: answer) for number, losses in told.items()
    ]
    answers = [future.result(20) for future in futures]
    assert [answer.ending for answer in answers] == [Ending.ANSWERED] * 3 + [Ending.FAULT]
    assert answers[3].note == "its machine is gone"
    assert [seen.count(number) for number in told] == [1, 2, LOSSES_MAX + 1, LOSSES_MAX + 1]
    pool.close()


def test_no_request_is_taken_before_a_machine_is_there_and_closing_does_not_wait_for_one() -> None:
    pool, seen, is_there, made = opened(1)
    future = pool.submit({"number": 0, "losses": 0}, lambda answer: answer)
    threading.Event().wait(0.1)
    assert not seen and not future.running()
    is_there.set()
    assert future.result(20).ending is Ending.ANSWERED
    is_there.clear()
    late = pool.submit({"number": 1, "losses": 0}, lambda answer: answer)
    pool.close()
    assert late.cancelled() and made[0].has_ended
