"""The real daemons in the virtual world: seeds with storms, liars, and the same trace under any hash seed."""

from dataclasses import replace
from pathlib import Path

import pytest

from echo2.base.rng import derived_rng
from echo2.coordinator import coordinator
from echo2.learner.rollouts.workers import IMPOSSIBLE_MAX
from echo2.sim.inspector import PAUSED
from echo2.sim.liars import CLAIMS, OF_STORMS, Liar, Lie
from echo2.sim.scenario import STORM_S, Fault, PlannedFault, Scenario, storm
from echo2.sim.storm import Storm
from echo2.sim.wires import AccessLink
from echo2.sim.world import World, WorldOutcome


def told(outcome: WorldOutcome) -> str:
    return "\n".join([f"make sim SEED={outcome.seed}", *outcome.events[-40:], outcome.failure])


def test_a_world_leaves_no_descriptor_open_behind_it() -> None:
    """Also of processes that were killed: thousands of worlds are run in one process."""
    before, world = descriptors(), World(Scenario.of(5))
    for at_s, name in ((8.0, "w0"), (10.0, "learner"), (12.0, "coordinator")):
        world.after(at_s, lambda name=name: world.kill(name) and world.start(name))  # type: ignore[misc]
    assert not world.run(20.0).failure
    assert descriptors() == before


def descriptors() -> list[str]:
    """What each is of; the listing's own is not there any more when it is asked for."""
    return sorted(str(path.readlink()) for path in list(Path("/proc/self/fd").iterdir()) if path.is_symlink())


def test_a_synchronous_run_in_calm_weather_trains_every_token_in_the_step_of_its_version() -> None:
    """S = 0: the first invariant holds each trained token to lag 0; nothing grows stale, since nothing is begun too early."""
    outcome = World(replace(Scenario.of(3), staleness_bound=0)).run(60.0)
    assert not outcome.failure, told(outcome)
    assert outcome.steps > 3 and outcome.version == outcome.steps and not outcome.restarts, "a version a step"
    assert outcome.checks[1] > 50 and not outcome.faults["segments answered: stale"]
    assert outcome.faults["segments answered: admitted"] > 20
    assert outcome.faults["questions answered"] >= 8, "two evaluations while it trains"
    assert outcome.faults["keyframes published"] and outcome.faults["deltas published"]


def test_an_unforeseen_error_fails_a_world_wherever_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "consolidate", lambda hub: 1 / 0)
    outcome = World(Scenario.of(3), workers=1).run()
    assert outcome.invariant == 5 and "ZeroDivisionError" in outcome.failure


def test_what_queues_on_a_clogged_link_leaves_at_full_speed_once_it_is_free() -> None:
    """It left at the clogged rate, minutes after the storm."""
    link = AccessLink(100.0, 100.0, 0.02, clog=0.1, clogged_until=10.0)
    assert link.passed_at(2.0, 50, 100.0) == 7.0
    assert link.passed_at(7.0, 1030, 100.0) == 20.0 == link.passed_at(link.passed_at(7.0, 30, 100.0), 1000, 100.0)
    assert link.passed_at(12.0, 100, 100.0) == 13.0


def test_storms_are_made_of_every_fault() -> None:
    assert {one.fault for seed in range(40) for one in storm(seed, 3)} == set(Fault)


def with_liar(seed: int, malice: Lie, **changed: object) -> tuple[World, Liar]:
    """Two honest workers and one that lies."""
    world = World(replace(Scenario.of(seed), **changed), workers=2)  # type: ignore[arg-type]
    liar = Liar(malice, derived_rng(seed, "liar"))
    world.add_worker(liar)
    return world, liar


LIARS = [
    (Lie.REPLAYED_ROLLOUTS, Lie.WRONG_VERSION),
    *(pytest.param((one,), marks=pytest.mark.soak) for one in OF_STORMS),
]


@pytest.mark.parametrize("lies", LIARS, ids=lambda lies: " ".join(one.name.lower() for one in lies))
def test_liars_harm_nobody(lies: tuple[Lie, ...]) -> None:
    world, liar = with_liar(3, lies[0])
    liars = [liar, *(Liar(lie, derived_rng(3, "liar")) for lie in lies[1:])]
    for other in liars[1:]:
        world.add_worker(other)
    outcome = world.run(60.0)
    assert not outcome.failure, told(outcome)
    assert all(one.lies_told for one in liars) or lies == (Lie.CORRUPT_CHUNKS,)
    if Lie.WRONG_VERSION in lies:
        assert outcome.restarts["w NotAllowed"], "it is turned away when it comes again"
        assert f"{IMPOSSIBLE_MAX} of its reports could not be true" in "\n".join(outcome.events)


def test_who_sends_corrupt_chunks_is_banned_by_those_who_got_them() -> None:
    """Chunks go from worker to worker where the learner's uplink is slow, and through the fastest first."""
    world = World(replace(Scenario.of(1), chunk_scale=4_000), workers=3)
    liar = Liar(Lie.CORRUPT_CHUNKS, derived_rng(1, "liar"))
    link = world.machines[world.add_worker(liar)].link
    link.up = link.down = 1e8
    outcome = world.run(40.0)
    assert not outcome.failure, told(outcome)
    assert liar.lies_told and any("banned" in line for line in outcome.events)


@pytest.mark.soak
def test_a_worker_that_only_says_that_it_works_is_given_nothing_and_the_others_go_on() -> None:
    """The cheapest and fastest of all by its words: the pool is not planned of it alone."""
    world, _ = with_liar(2, Lie.FALSE_PROGRESS)
    world.traits["w2"].price, world.traits["w2"].step_s = 0.01, 0.05
    outcome = world.run(80.0)
    assert not outcome.failure, told(outcome)
    assert outcome.faults[PAUSED]


@pytest.mark.soak
@pytest.mark.parametrize("malice", CLAIMS, ids=lambda malice: malice.name.lower())
def test_what_workers_say_of_their_own_speed_and_room_takes_no_work_from_others(malice: Lie) -> None:
    """Three of them beside two honest ones, which alone would make about as many steps, over two seeds."""

    def steps(seed: int, liars: int) -> int:
        world = World(replace(Scenario.of(seed), plan_interval_s=5.0), workers=2)
        for number in range(liars):
            traits = world.traits[world.add_worker(Liar(malice, derived_rng(seed, "liar", number)))]
            traits.slot_count, traits.step_s = 1, 1.0
        outcome = world.run(70.0)
        assert not outcome.failure, told(outcome)
        return outcome.steps

    assert sum(steps(seed, 3) for seed in (1, 2)) >= 0.75 * sum(steps(seed, 0) for seed in (1, 2))


@pytest.mark.soak
def test_what_rots_at_the_learner_and_is_nowhere_else_holds_nobody_up() -> None:
    """Newcomers without a disk need just the chunks that its disk has changed."""
    world, planned = World(Scenario.of(1), workers=2), []
    for number, at_s in enumerate(range(8, int(STORM_S), 12)):
        kind = (Fault.KILL, Fault.LOSE_DISK)[number % 2]
        planned.append(PlannedFault(at_s, kind, f"w{number % 2}", 9.0))
        planned += [PlannedFault(at_s + 3.0 + 0.3 * times, Fault.BIT_ROT, "learner", 1.0) for times in range(6)]
    Storm(world, planned)
    outcome = world.run(STORM_S)
    assert not outcome.failure, told(outcome)
    assert outcome.faults[Fault.BIT_ROT.value] > 30
