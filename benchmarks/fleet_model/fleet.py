"""Fleet simulation: the real planner, lease book, offers, broadcast planner, staleness rule and ledger on a virtual clock.

Rollouts are drawn one by one, run in slots, and continue on another worker after a preemption (fleet_leases). Versions
cross the links one at a time along the broadcast planner's trees, and a newer one replaces a waiting one (fleet_links).
Finished groups wait in a buffer, oldest version first. Guarantees: no token over the bound is trained on (the ledger
asserts it); the same scenario gives the same report. Leaves to others: chunks and message loss (broadcast simulation).

A step waits for R admissible rollouts and is woken by a finished group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.fleet_model.clock import VirtualClock
from benchmarks.fleet_model.leases import Generation
from benchmarks.fleet_model.links import Dissemination
from benchmarks.fleet_model.scenario import FleetScenario
from benchmarks.fleet_model.worker import NO_VERSION, SimGroup, SimWorker
from echo2.base.ids import Step, Version
from echo2.base.rng import derived_rng
from echo2.base.rollout import VersionSpan
from echo2.cost_model.plan import Plan
from echo2.staleness.rule import Ledger, is_admissible

Planner = Callable[["FleetSim", str], Plan]


@dataclass(slots=True)
class SimCounters:
    """Counters and logs of one simulation."""

    step_started_s: list[float] = field(default_factory=list)
    usd_at_step: list[float] = field(default_factory=list)
    dropped_rollouts: int = 0
    trained_rollouts: int = 0
    preemptions: int = 0
    activations: int = 0
    drains: int = 0
    plans: int = 0
    plan_log: list[tuple[float, int, str, float, str]] = field(default_factory=list)


class FleetSim:
    """State and transitions; `run` drives it to the scenario's last step."""

    def __init__(self, scenario: FleetScenario, planner: Planner) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        self.planner = planner
        self.learner = scenario.learner
        self.bound = scenario.config.staleness_bound
        self.workers = [SimWorker(truth, i, truth.price_usd_per_hour) for i, truth in enumerate(scenario.workers)]
        self.counters = SimCounters()
        self.ledger = Ledger(self.bound)
        self.step = 0  # batches started
        self.completed = 0
        self.is_training = False
        self.finished: list[SimGroup] = []
        self.newest = Version(0)
        self.generation = Generation(scenario, self.clock, self._group_finished, self._emptied)
        self.links = Dissemination(scenario, self.clock, self._live)
        self._loss_rng = derived_rng(scenario.seed, "losses")
        self._train_rng = derived_rng(scenario.seed, "train")
        self.plan = planner(self, "start")
        self._carry_out(self.plan, is_start=True)
        for change in scenario.price_changes:
            self.clock.at(change.at_s, partial(self._change_price, change.gpu, change.factor))

    def run(self, until_s: float = 1e12) -> SimCounters:
        """Runs the scenario and returns its counters."""
        self._offer()
        self.clock.run(until_s)
        now = self.clock.now()
        for worker in self.workers:
            worker.pay(now)
        return self.counters

    @property
    def usd_spent(self) -> float:
        """USD spent on all workers up to now."""
        for worker in self.workers:
            worker.pay(self.clock.now())
        return sum(worker.usd for worker in self.workers)

    @property
    def worker_hours(self) -> float:
        """Paid hours of all workers together."""
        return sum(worker.paid_s for worker in self.workers) / 3600

    # ---- plans

    def replan(self, why: str) -> None:
        """Asks the planner and carries out the changes."""
        plan = self.planner(self, why)
        if plan is not self.plan:
            self.plan = plan
            self._carry_out(plan, is_start=False)

    def _carry_out(self, plan: Plan, is_start: bool) -> None:
        pool = set(plan.pool)
        counters = self.counters
        counters.plans += 1
        counters.plan_log.append(
            (self.clock.now(), plan.kappa, plan.reason, plan.predicted_utilisation, plan.binding.value)
        )
        for worker in self.workers:
            is_wanted = worker.truth.name in pool
            if is_wanted and not worker.is_wanted and not worker.is_lost:
                counters.activations += not is_start
                self._activate(worker, 0.0 if is_start else worker.truth.join_s)
            elif worker.is_wanted and not is_wanted:
                counters.drains += 1
                self._drain(worker)

    def _activate(self, worker: SimWorker, join_s: float) -> None:
        worker.is_wanted = True
        worker.state_since_s = self.clock.now()
        worker.pay(self.clock.now())
        worker.paid_since_s = self.clock.now()
        self.clock.after(join_s, partial(self._joined, worker, worker.life))

    def _joined(self, worker: SimWorker, life: int) -> None:
        if worker.life != life or not worker.is_wanted or worker.is_active:
            return
        worker.is_active = True
        worker.version = max(worker.version, self.links.sent)
        if worker.truth.hazard_per_hour > 0:
            lifetime_s = self._loss_rng.expovariate(worker.truth.hazard_per_hour / 3600)
            self.clock.after(lifetime_s, partial(self._lose, worker, worker.life))
        self.generation.came(worker)

    def _drain(self, worker: SimWorker) -> None:
        """Stops leasing to the worker; once its running rollouts have finished, its machine is no longer paid for."""
        worker.is_wanted = False
        worker.state_since_s = self.clock.now()
        if worker.is_active:
            worker.is_active = False
            self.generation.drain(worker)
        self._emptied(worker)

    def _emptied(self, worker: SimWorker) -> None:
        if not worker.is_wanted and not worker.has_work:
            worker.pay(self.clock.now())
            worker.paid_since_s = None

    def _lose(self, worker: SimWorker, life: int) -> None:
        """Preempts the worker; the machine can be rented again after its join time."""
        if worker.life != life or not worker.is_active:
            return
        self.counters.preemptions += 1
        worker.life += 1
        worker.is_lost, worker.is_active, worker.is_wanted = True, False, False
        self.generation.lose(worker, self.scenario.config.preemption_loss_s)
        self._emptied(worker)
        self.clock.after(max(worker.truth.join_s, 1.0), partial(self._found, worker))
        self.replan(f"{worker.truth.name} was lost")

    def _found(self, worker: SimWorker) -> None:
        worker.is_lost = False
        worker.version = NO_VERSION
        self.replan(f"{worker.truth.name} can be had again")

    def _change_price(self, gpu: str, factor: float) -> None:
        for worker in self.workers:
            if worker.truth.gpu == gpu:
                worker.pay(self.clock.now())
                worker.price = worker.truth.price_usd_per_hour * factor
        self.replan(f"{gpu} costs {factor:g} times as much")

    # ---- generation

    def _offer(self) -> None:
        self.generation.offer(self.step, self.plan.in_flight_cap_rollouts)

    def _group_finished(self, group: SimGroup) -> None:
        self.finished.append(group)
        self._try_step()

    # ---- learning

    def _try_step(self) -> None:
        """Starts a step if the learner is free and R admissible rollouts wait."""
        if self.is_training:
            return
        fresh = [g for g in self.finished if is_admissible(Step(self.step), _begun(g), self.bound)]
        if len(fresh) < len(self.finished):
            kept = {group.group_id for group in fresh}
            stale = [group for group in self.finished if group.group_id not in kept]
            self.finished = fresh
            self.counters.dropped_rollouts += len(stale) * self.learner.rollouts_per_group
            self.generation.close(stale, "over the staleness bound")
            self._offer()
        need = self.generation.groups_per_step
        if len(self.finished) >= need and not self.is_training:
            self.finished.sort(key=_begun)
            batch, self.finished = self.finished[:need], self.finished[need:]
            self._start_step(batch)

    def _start_step(self, batch: Sequence[SimGroup]) -> None:
        now, counters = self.clock.now(), self.counters
        counters.step_started_s.append(now)
        counters.usd_at_step.append(self.usd_spent)
        if self.step == self.scenario.steps:
            self.clock.stop()
            return
        for group in batch:
            span = VersionSpan(_begun(group), max(1, int(group.tokens)))
            self.ledger.record(group.group_id, Step(self.step), [span])
        self.ledger.forget_before(Step(self.step - self.bound))
        self.generation.close(batch, "trained")
        counters.trained_rollouts += len(batch) * self.learner.rollouts_per_group
        self.step += 1
        self.is_training = True
        cv = self.scenario.train_cv
        factor = max(0.1, self._train_rng.gauss(1.0, cv)) if cv else 1.0
        self.clock.after(self.learner.train_s * factor, self._step_done)
        self._offer()

    def _step_done(self) -> None:
        self.is_training = False
        self.completed += 1
        if self.completed - self.newest >= self.plan.kappa:
            self.newest = Version(self.completed)
            self.links.publish(self.newest, self.plan.kappa, self._wanted)
            self.replan(f"version {self.newest}")
        self._try_step()

    # ---- dissemination

    def _wanted(self) -> Sequence[SimWorker]:
        return [worker for worker in self.workers if worker.is_wanted]

    def _live(self, worker: SimWorker, life: int, version: Version) -> None:
        if worker.life != life:
            return
        worker.version = max(worker.version, version)
        worker.stand_still(self.clock.now(), worker.truth.swap_s)
        self.generation.seek(worker)


def _begun(group: SimGroup) -> Version:
    assert group.oldest is not None, f"group {group.group_id} is finished and was never begun"
    return group.oldest
