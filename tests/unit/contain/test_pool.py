"""A pool: whose request is next, so that a sender whose requests take long delays its own; what loses its machine is asked again,
and not for ever."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, strategies as st

from echo2.contain.messages import Answer, Ending, Limits
from echo2.contain.pool import LOSSES_MAX, FairQueue, Pool, RunnerLost


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.1, 1.0, 9.0]), st.booleans()), max_size=60))
def test_everything_comes_out_once_and_a_sender_in_debt_has_one_request_running(
    steps: list[tuple[int, float, bool]],
) -> None:
    queue: FairQueue[int] = FairQueue()
    out, running, in_debt = list[int](), list[str](), set[str]()
    for number, (sender, seconds, is_held) in enumerate(steps):
        queue.push(str(sender), number)
        if number % 3 and (found := queue.pop()) is not None:
            assert not (found[0] in in_debt and found[0] in running), "the other process is kept for others"
            running.append(found[0])
            out.append(found[1])
        if number % 2 and running:
            done = running.pop(0)
            queue.done(done, seconds, is_held)
            (in_debt.add if is_held else in_debt.discard)(done)
    for sender in running:
        queue.done(sender, 0.0, is_held=False)
    while (found := queue.pop()) is not None:
        out.append(found[1])
        queue.done(found[0], 0.0, is_held=True)
    assert sorted(out) == list(range(len(steps))) and len(queue) == 0


def test_who_used_little_is_next_and_being_away_earns_nothing() -> None:
    queue: FairQueue[int] = FairQueue()
    served = list[str]()

    def serve(count: int) -> None:
        for name, _ in (queue.pop() or ("", 0) for _ in range(count)):
            served.append(name)
            queue.done(name, 100.0 if name == "slow" else 1.0, is_held=False)

    for number in range(200):
        queue.push("busy", number)
    for _ in ("a newcomer", "one that was away"):
        serve(50)
        for number in range(10):
            queue.push("idle", number)
        serve(10)
        assert 4 <= served[-10:].count("busy") <= 6, "what was not used while away is not paid back"
    queue.push("slow", 0)
    serve(3)
    queue.push("slow", 0)
    rest = [queue.pop() for _ in range(len(queue))]
    assert served.count("slow") == 1 and rest[-1] == ("slow", 0), "one that used much waits behind others"


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


def test_what_lost_its_machine_is_asked_again_and_given_up_and_closing_waits_for_no_machine() -> None:
    seen, is_there, made = list[int](), threading.Event(), list[Elsewhere]()

    def make() -> Elsewhere:
        made.append(Elsewhere(seen, is_there))
        return made[-1]

    pool = Pool(make, Limits(), 1, 100)
    told = {0: 0, 1: 1, 2: LOSSES_MAX, 3: LOSSES_MAX + 1}
    futures = [
        pool.submit({"number": number, "losses": losses}, lambda answer: answer) for number, losses in told.items()
    ]
    threading.Event().wait(0.1)
    assert not seen and not futures[0].running(), "no request is taken before a machine is there"
    is_there.set()
    answers = [future.result(20) for future in futures]
    assert [answer.ending for answer in answers] == [Ending.ANSWERED] * 3 + [Ending.FAULT]
    assert answers[3].note == "its machine is gone"
    assert [seen.count(number) for number in told] == [1, 2, LOSSES_MAX + 1, LOSSES_MAX + 1]
    is_there.clear()
    late = pool.submit({"number": 4, "losses": 0}, lambda answer: answer)
    pool.close()
    assert late.cancelled() and made[0].has_ended


def test_what_waits_for_another_machine_as_the_pool_is_closed_is_answered() -> None:
    class Once(Elsewhere):
        def ask(self, body: Mapping[str, Any], times: int = 1) -> Answer:
            self.is_there.clear()
            raise RunnerLost("its machine is gone")

    is_there = threading.Event()
    is_there.set()
    pool = Pool(lambda: Once([], is_there), Limits(), 1, 100)
    waiting = pool.submit({}, lambda answer: answer)
    for _ in range(1000):
        if not is_there.wait(0.01):
            break
    threading.Event().wait(0.1)
    pool.close()
    assert waiting.result(20).ending is Ending.FAULT


def test_a_runner_that_fails_otherwise_than_it_may_fails_its_request_alone() -> None:
    class Broken(Elsewhere):
        def ask(self, body: Mapping[str, Any], times: int = 1) -> Answer:
            if body["number"] == 0:
                raise ValueError("not as agreed")
            return super().ask(body, times)

    is_there = threading.Event()
    is_there.set()
    pool = Pool(lambda: Broken([], is_there), Limits(), 1, 100)
    futures = [pool.submit({"number": number, "losses": 0}, lambda answer: answer) for number in (0, 1)]
    with pytest.raises(ValueError, match="not as agreed"):
        futures[0].result(20)
    assert futures[1].result(20).ending is Ending.ANSWERED
    pool.close()
