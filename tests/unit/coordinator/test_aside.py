"""What a large fleet's coordinator computes in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time

import pytest

from echo2.base.errors import ConfigError
from echo2.coordinator.runtime.aside import FLEET_MIN, Aside
from echo2.coordinator.runtime.pool_plan import make_plan
from echo2.cost_model.next_actions import Situation, next_actions
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig
from tests.unit.cost_model.fleets import learner, worker


class Unmade(Exception):
    """Can be pickled, and not be made again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def fails(kind: str) -> None:
    raise {"config": ConfigError("expected one"), "unmade": Unmade("a", "b")}[kind]


def prints() -> int:
    os.write(1, b"a library's line\n")
    return os.getpid()


def dies_in_a_child(parent: int) -> str:
    if os.getpid() != parent:
        os._exit(9)
    return "here"


def run(aside: Aside, work, *told, fleet: int = FLEET_MIN):
    return asyncio.run(aside.run(fleet, work, *told))


@pytest.fixture
def aside():
    made = Aside()
    yield made
    made.close()


def test_large_fleets_work_is_done_in_one_other_process_and_small_ones_here(aside: Aside) -> None:
    child = run(aside, prints)
    assert child != os.getpid() and run(aside, prints) == child
    assert run(aside, os.getpid, fleet=FLEET_MIN - 1) == os.getpid()
    assert run(aside, math.gcd, 12, 18) == 6


def test_plans_and_next_actions_are_the_same_there_as_here(aside: Aside) -> None:
    snapshot = FleetSnapshot(0.0, learner(), tuple(worker(f"w{index}", 1.0) for index in range(5)))
    first = make_plan(snapshot, PlanConfig(4), None)
    assert run(aside, make_plan, snapshot, PlanConfig(4), None) == first
    told = Situation(snapshot, PlanConfig(4), first.kappa, frozenset(), (), 0.0)
    assert run(aside, next_actions, told, ()) == next_actions(told, ())


def test_errors_come_back_as_they_were_raised_or_at_least_in_words(aside: Aside) -> None:
    with pytest.raises(ConfigError, match="expected one"):
        run(aside, fails, "config")
    with pytest.raises(RuntimeError, match="Unmade"):
        run(aside, fails, "unmade")
    assert run(aside, math.gcd, 12, 18) == 6, "it goes on after errors"


def test_work_of_a_process_that_dies_is_done_here_and_the_next_has_a_new_one(
    aside: Aside, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert run(aside, dies_in_a_child, os.getpid()) == "here"
        assert run(aside, dies_in_a_child, os.getpid()) == "here"
    assert sum("planner's process ended with code 9" in line for line in caplog.messages) == 1
    assert run(aside, os.getpid) != os.getpid()


def test_closing_ends_work_under_way() -> None:
    async def closed() -> float:
        aside, begun = Aside(), time.monotonic()
        task = asyncio.create_task(aside.run(FLEET_MIN, time.sleep, 60.0))
        await asyncio.sleep(0.5)
        aside.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - begun

    assert asyncio.run(closed()) < 10
