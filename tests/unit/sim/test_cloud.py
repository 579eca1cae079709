"""Machines that the real coordinator rents in the virtual world, from a cloud that is slow, refuses and takes them away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.coordinator.money import provisioning
from echo2.sim.scenario import Fault, PlannedFault, Scenario
from echo2.sim.storm import Storm
from echo2.sim.world import World


def test_what_a_pool_lacks_is_rented_and_what_stands_by_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provisioning, "IDLE_RELEASE_S", 60.0)
    world = World(replace(Scenario.of(3), offers_max=2), workers=1)

    def slow_down() -> None:
        world.train_s = 60.0  # one rented machine keeps up, and costs less than w0

    world.after(60.0, slow_down)
    outcome = world.run(260.0)
    assert not outcome.failure, "\n".join([*outcome.events[-40:], outcome.failure])
    rented = [name for name in world.traits if name != "w0"]
    reported = {name for name in rented if any(f"{name} " in line and "connected" in line for line in outcome.events)}
    assert outcome.faults["cloud: machine rented"] >= 2 and reported
    assert outcome.faults["cloud: machine given back"] == outcome.faults["cloud: machine rented"] - 1, "one is enough"


def test_no_kill_of_the_coordinator_leaves_a_machine_that_nobody_knows() -> None:
    """Killed again and again in the midst of renting, while machines are taken away."""
    world, planned = World(replace(Scenario.of(4), offers_max=3), workers=2), []
    for number in range(7):
        planned.append(PlannedFault(9.0 + 6.5 * number, Fault.KILL, "coordinator", 1.0))
        if number % 3 == 2:
            kind = (Fault.PREEMPT, Fault.PREEMPT_NOTICE)[number % 2]
            planned.append(PlannedFault(12.0 + 6.5 * number, kind, f"w{2 + number // 3}", 30.0))
    Storm(world, planned)
    outcome = world.run(60.0)
    assert not outcome.failure, "\n".join([*outcome.events[-40:], outcome.failure])
    assert outcome.faults["cloud: machine rented"] >= 2
    assert outcome.faults["cloud: machine taken"] and outcome.faults[Fault.KILL.value] == 7
