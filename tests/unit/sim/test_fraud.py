"""Each lie about rollouts and offers against a fleet of real daemons: who finds it, and what the fleet still does."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from echo2.base.rng import derived_rng
from echo2.learner.audit import Auditor
from echo2.learner.learner import LearnerDaemon
from echo2.sim.liars import Liar, Lie
from echo2.sim.scenario import Scenario
from echo2.sim.world import World, WorldOutcome

FOR_S = 50.0
SEEDS = (3, 5, 8)

FOUND = {
    Lie.FORGED_NUMBERS: ("audit: its log-probabilities are",),
    Lie.OLDER_TOKENS: ("audit: its tokens differ from those", "audit: its tokens are not those"),
    Lie.BEST_OF: ("audit: its tokens differ from those", "audit: its tokens are not those"),
    Lie.MEMORISED: ("audit: its tokens differ from those", "audit: its tokens are not those"),
    Lie.EARLY_LENGTH: ("of its reports could not be true",),
}
"""Lies that are found, and what the operator reads of one."""
UNFOUND = (Lie.OWN_BEST_OF, Lie.HARD_BACK, Lie.LOW_PRICE, Lie.HIGH_PRICE)


def world_of(seed: int) -> World:
    """Two honest workers. One turn a prompt, so that completions of 20 tokens are looked at whole."""
    return World(replace(Scenario.of(seed), turns=1, plan_interval_s=5.0), workers=2)


def with_liars(seed: int, *lies: Lie, for_s: float = FOR_S) -> WorldOutcome:
    world = world_of(seed)
    for number, lie in enumerate(lies):
        world.add_worker(Liar(lie, derived_rng(seed, "lie", number)))
    outcome = world.run(for_s)
    assert not outcome.failure, "\n".join([*outcome.events[-40:], outcome.failure])
    return outcome


@functools.cache
def alone(seed: int, for_s: float = FOR_S) -> int:
    """Steps of the two honest workers by themselves."""
    return with_liars(seed, for_s=for_s).steps


def said(outcome: WorldOutcome, text: str) -> list[str]:
    return [line for line in outcome.events if text in line]


def is_found(outcome: WorldOutcome, worker: str, lie: Lie) -> bool:
    """Banned or quarantined, and the operator reads why."""
    ends = said(outcome, f"{worker} is banned now") + said(outcome, f"{worker} is quarantined now")
    return bool(ends) and any(said(outcome, text) for text in FOUND[lie])


def test_lies_about_rollouts_are_found_beside_one_another_and_the_others_go_on() -> None:
    """The checkers hold beside it: no honest worker is accused, nothing of theirs is lost. Best of four without seeds is not found,
    and bounded by how much of the work it does."""
    outcome = with_liars(3, Lie.FORGED_NUMBERS, Lie.BEST_OF, Lie.OWN_BEST_OF)
    assert is_found(outcome, "w2", Lie.FORGED_NUMBERS) and is_found(outcome, "w3", Lie.BEST_OF), outcome.events[-20:]
    assert not said(outcome, "w4 is banned") and outcome.restarts["w NotAllowed"], "who is banned is turned away"
    assert outcome.steps >= 0.75 * alone(3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lie", [*FOUND, *UNFOUND], ids=lambda lie: lie.name.lower())
def test_a_lie_is_found_if_it_can_be_and_slows_nobody_down(lie: Lie, seed: int) -> None:
    outcome = with_liars(seed, lie)
    if lie in FOUND:
        assert is_found(outcome, "w2", lie), outcome.events[-20:]
    else:
        assert not said(outcome, "is banned")
    assert outcome.restarts["w NotAllowed"] or not said(outcome, "w2 is banned now"), "it comes again"
    assert outcome.steps >= 0.75 * alone(seed)


def auditor_of(world: World) -> Auditor:
    learner = world.daemons["learner"]
    assert isinstance(learner, LearnerDaemon) and learner.learner is not None
    return learner.learner.auditor


@pytest.mark.soak
def test_honest_workers_are_looked_at_and_never_accused() -> None:
    """Over changes of versions, hands and turns; tests/unit/learner/test_audit.py has it without a fleet."""
    world = World(replace(Scenario.of(6), turns=3, audit_share=1.0), workers=3)
    outcome = world.run(FOR_S)
    assert not outcome.failure, outcome.failure
    auditor = auditor_of(world)
    assert auditor.counts.rollouts >= 40 and not auditor.accused
