"""The end of a run in the virtual world: the real daemons, and what each is told and does when the last step is made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.hub import Hub
from echo2.sim.scenario import Scenario
from echo2.sim.world import World

STEPS, KILLS_AT_STEP = 6, 3
END_S = 400.0
SEEDS = (2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 3, 4, 5)))


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


@pytest.mark.parametrize("seed", SEEDS)
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
