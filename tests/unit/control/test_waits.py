from __future__ import annotations

from echo2.control.waits import Waits


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
