"""Each lie about rollouts and offers against a fleet of real daemons: who finds it, and what the fleet still does."""

import functools
from dataclasses import replace

import pytest

from echo2.base.rng import derived_rng
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.hub import Hub
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


def with_liars(seed: int, *lies: Lie, for_s: float = FOR_S) -> WorldOutcome:
    """Beside two honest workers. One turn a prompt, so that completions of 20 tokens are looked at whole."""
    world = World(replace(Scenario.of(seed), turns=1, plan_interval_s=5.0), workers=2)
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


# ---- the end of a run in the virtual world: the real daemons, and what each is told and does when the last step is made

STEPS, KILLS_AT_STEP = 6, 3
END_S = 400.0
ENDING_SEEDS = (2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 3, 4, 5)))


class Ends(World):
    """Learner and coordinator are killed on the way. Once the run is finished, a worker comes that was never there, the coordinator
    is killed, and it comes again; then the operator gives the run more steps, and starts learner and workers again."""

    async def _play(self, faults_until_s: float) -> None:
        await self._begin()
        await self._until(lambda: self.truth.step >= KILLS_AT_STEP, END_S)
        for name in ("learner", "coordinator"):
            assert self.kill(name)
            self.after(3.0, lambda name=name: self.start(name))  # type: ignore[misc]
        await self._until(lambda: self.hub is not None and self.hub.learner.session is not None, END_S)
        self.check(not self.hub_of().ending.text, "a learner that was killed has finished nothing")
        await self._finishes(STEPS)
        await self._lets_nobody_in()
        self.steps = 2 * STEPS
        for name in ("learner", *self.workers):
            self.start(name)
        await self._finishes(2 * STEPS)

    async def _finishes(self, steps: int) -> None:
        is_done = await self._until(lambda: self.truth.step >= steps and not self.is_up("learner"), END_S)
        self.check(is_done, f"the run of {steps} steps stands at step {self.truth.step}: {self._waits()}")
        self.check(await self._until(lambda: not self.up(), 30.0), f"{self.up()} go on in a finished run")

    async def _lets_nobody_in(self) -> None:
        is_free = await self._until(
            lambda: self.hub_of().money.sums().usd_per_hour == 0, 30.0
        )  # machines are given back
        bill = self.hub_of().money.sums()
        self.check(is_free, f"the fleet of a finished run costs {bill.usd_per_hour} USD/h")
        late = self.add_worker()
        for _ in range(2):
            self.start(late)
            self.check(await self._until(lambda: not self.is_up(late), 60.0), "a late worker was not sent away")
            spent = self.hub_of().money.sums().usd_spent
            self.check(abs(spent - bill.usd_spent) < 1e-5, f"a late worker has cost {spent - bill.usd_spent} USD")
            self.kill("coordinator")
            self.start("coordinator")
            if not await self._until(lambda: self.hub is not None, 10.0) or self.failure is not None:
                return
            self.check(bool(self.hub_of().ending.text), "a coordinator that was killed forgot that the run is finished")

    @property
    def hub(self) -> Hub | None:
        daemon = self.daemons.get("coordinator")
        return daemon.hub if isinstance(daemon, CoordinatorDaemon) else None

    def hub_of(self) -> Hub:
        assert self.hub is not None
        return self.hub

    def up(self) -> list[str]:
        return [name for name in self.workers if self.is_up(name)]

    def check(self, holds: bool, text: str) -> None:
        self._check(holds, text)


@pytest.mark.parametrize("seed", ENDING_SEEDS)
def test_a_finished_run_sends_its_workers_home_and_lets_none_in_until_it_is_given_more_steps(seed: int) -> None:
    outcome = Ends(replace(Scenario.of(seed), train_s=1.0), steps=STEPS).run()
    assert not outcome.failure, "\n".join([*outcome.events[-40:], outcome.failure])
    text = "\n".join(outcome.events)
    assert "stopping: run simulated is finished after 6 steps; no work is left for workers" in text
    refused = {"w BadToken"} if "rent failed" in text else set()  # the machine came all the same, its token was revoked
    ends = {name for name in outcome.restarts if name.startswith("w ")}
    assert ends <= {"w ended"} | refused, "all ended in order"
    assert outcome.steps == 2 * STEPS
    assert f"run: goes on: step {STEPS} of {2 * STEPS}; workers may join again" in text
