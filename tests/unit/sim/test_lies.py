"""Each lie about rollouts and offers against a fleet of real daemons: who finds it, and what the fleet still does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.base.rng import derived_rng
from echo2.learner.runtime.auditor import Auditor
from echo2.learner.runtime.daemon import LearnerDaemon
from echo2.sim.lies import Lie, LyingWorker, Mates
from echo2.sim.malice import LyingMouth, Malice
from echo2.sim.scene import Scene
from echo2.sim.world import World, WorldOutcome

FOR_S = 50.0
SEEDS = (3, pytest.param(5, marks=pytest.mark.soak), pytest.param(8, marks=pytest.mark.soak))

FOUND = {
    Lie.FORGED_NUMBERS: "are not those of the version that it claims",
    Lie.OLDER_TOKENS: "pick under an older version than it claims",
    Lie.BEST_OF: "are not those that the random numbers of its leases pick",
    Lie.MEMORISED: "are not those that the random numbers of its leases pick",
    Lie.EARLY_LENGTH: "of its reports could not be true",
}
"""Lies that end with a ban, and what it says."""


def world_of(seed: int) -> World:
    """Two honest workers. One turn a prompt, so that completions of 20 tokens are looked at whole."""
    return World(replace(Scene.of(seed), turns=1, plan_interval_s=5.0), workers=2)


def with_liars(seed: int, lie: Lie | None, count: int = 1) -> WorldOutcome:
    world = world_of(seed)
    for number in range(count if lie is not None else 0):
        world.add_worker(LyingWorker(lie, derived_rng(seed, "lie", number)))  # type: ignore[arg-type]
    outcome = world.run(FOR_S)
    assert not outcome.failure, "\n".join([*outcome.story[-40:], outcome.failure])
    return outcome


def alone(seed: int, known: dict[int, int] = {}) -> int:  # noqa: B006  (what two honest workers do is measured once)
    """Steps of the two honest workers by themselves."""
    if seed not in known:
        known[seed] = with_liars(seed, None).steps
    return known[seed]


def said(outcome: WorldOutcome, text: str) -> list[str]:
    return [line for line in outcome.story if text in line]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lie", FOUND, ids=lambda lie: lie.name.lower())
def test_a_lie_about_rollouts_ends_with_a_ban_and_the_others_go_on(lie: Lie, seed: int) -> None:
    """The checkers hold beside it: no honest worker is accused, nothing of theirs is lost."""
    outcome = with_liars(seed, lie)
    assert said(outcome, "w2 is banned now") and said(outcome, FOUND[lie]), outcome.story[-20:]
    assert outcome.restarts["w NotAllowed"], "it is turned away when it comes again"
    assert outcome.steps >= 0.75 * alone(seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "lie", [Lie.OWN_BEST_OF, Lie.HARD_BACK, Lie.LOW_PRICE, Lie.HIGH_PRICE], ids=lambda lie: lie.name.lower()
)
def test_a_lie_that_is_not_found_slows_nobody_down(lie: Lie, seed: int) -> None:
    """Best of four without seeds is bounded by how much of the work it does; the others gain nothing."""
    outcome = with_liars(seed, lie)
    assert not said(outcome, "is banned")
    assert outcome.steps >= 0.75 * alone(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_many_silent_identities_with_endless_room_starve_nobody(seed: int) -> None:
    world = world_of(seed)
    for number in range(5):
        world.add_worker(LyingMouth(Malice.FALSE_ROOM, derived_rng(seed, "liar", number)))
    outcome = world.run(FOR_S)
    assert not outcome.failure, "\n".join([*outcome.story[-40:], outcome.failure])
    assert outcome.steps >= 0.6 * alone(seed)


def auditor_of(world: World) -> Auditor:
    learner = world.daemons["learner"]
    assert isinstance(learner, LearnerDaemon) and learner.shift is not None
    return learner.shift.auditor


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scorer_that_makes_its_numbers_up_is_banned_and_those_whom_it_scored_are_not(seed: int) -> None:
    """What it says against honest workers is a dispute, which the learner's own numbers decide against it."""
    world = World(replace(Scene.of(seed), turns=1, plan_interval_s=5.0, audit_share=0.5), workers=2)
    world.add_worker(LyingWorker(Lie.FALSE_SCORES, derived_rng(seed, "lie")))
    outcome = world.run(FOR_S)
    assert not outcome.failure, "\n".join([*outcome.story[-40:], outcome.failure])
    assert said(outcome, "w2 is banned now") and said(outcome, "scores of others' rollouts are not those")
    assert auditor_of(world).disputes.counts.false_scorers == 1


@pytest.mark.parametrize("seed", (*SEEDS, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (11, 13))))
def test_two_of_six_that_bear_out_one_another_are_banned_all_the_same(seed: int) -> None:
    """Who scores whom is drawn; honest scorers, and what the learner scores too, find what mates hide."""
    world = World(replace(Scene.of(seed), turns=1, plan_interval_s=5.0, audit_share=1.0), workers=4)
    mates = Mates()
    for number in range(2):
        world.add_worker(LyingWorker(Lie.SHIELD, derived_rng(seed, "lie", number), mates))
    outcome = world.run(FOR_S if seed != 11 else 1.4 * FOR_S)  # of seed 11 few rollouts come from one of the two before
    assert not outcome.failure, "\n".join([*outcome.story[-40:], outcome.failure])
    for name in ("w4", "w5"):
        assert said(outcome, f"{name} is banned now"), outcome.story[-20:]
    assert len(auditor_of(world).accused) == 2


def test_honest_workers_are_looked_at_and_never_accused() -> None:
    """Over changes of versions, hands and turns."""
    world = World(replace(Scene.of(6), turns=3, audit_share=1.0), workers=3)
    outcome = world.run(FOR_S)
    assert not outcome.failure, outcome.failure
    auditor = auditor_of(world)
    assert auditor.counts.rollouts >= 40 and not auditor.accused
    assert auditor.scorings.counts.answered >= 20, "most of it by workers"
    assert auditor.counts.own_rollouts < auditor.counts.rollouts and not auditor.disputes.counts.disputes
