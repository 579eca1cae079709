"""A pool whose processes run elsewhere: what loses its machine is asked again, and not for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from echo2.contain.messages import Answer, Ending, Limits
from echo2.contain.pool import LOSSES_MAX, Pool, RunnerLost


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
