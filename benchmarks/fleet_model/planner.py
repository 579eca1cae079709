"""Planners for the fleet simulation: a fixed pool, and the real planner fed with noisy estimates.

Guarantees: the real `plan` decides, only from what telemetry could report. Leaves to others: carrying plans out (fleet).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from benchmarks.fleet_model.fleet import FleetSim
from benchmarks.fleet_model.lengths import LengthDistribution
from benchmarks.fleet_model.scenario import WorkerTruth
from benchmarks.fleet_model.worker import SimWorker
from echo2.base.ids import PeerId
from echo2.base.rng import derived_rng
from echo2.cost_model.plan import Plan
from echo2.cost_model.planner import plan
from echo2.cost_model.snapshot import FleetSnapshot, LearnerEstimate, PlanConfig, WorkerEstimate, WorkerState

TAIL_SHARE = 0.95
NOISE_LIMIT = 0.5


def estimate_of(truth: WorkerTruth, lengths: LengthDistribution) -> WorkerEstimate:
    """The estimate that perfect telemetry would give for a machine."""
    mean_tokens = lengths.mean_tokens
    return WorkerEstimate(
        worker_id=PeerId(truth.name),
        rollouts_per_s=truth.slots * truth.sequence_tokens_per_s / mean_tokens,
        price_usd_per_hour=truth.price_usd_per_hour,
        link=truth.link,
        rollout_s_mean=mean_tokens / truth.sequence_tokens_per_s,
        rollout_s_tail=lengths.at(TAIL_SHARE) / truth.sequence_tokens_per_s,
        rollout_s_max=lengths.at(1.0) / truth.sequence_tokens_per_s,
        tokens_per_s=truth.slots * truth.sequence_tokens_per_s,
        join_s=truth.join_s,
        hazard_per_hour=truth.hazard_per_hour,
        apply_s=truth.apply_s,
        swap_s=truth.swap_s,
    )


@dataclass(slots=True)
class FixedPlanner:
    """Keeps all workers active at one period and cap, for checking predictions."""

    config: PlanConfig
    in_flight_cap_rollouts: int = 0  # 0: the plan's own
    _plan: Plan | None = None

    def __call__(self, sim: FleetSim, why: str) -> Plan:
        if self._plan is None:
            lengths = sim.scenario.lengths
            workers = tuple(replace(estimate_of(one.truth, lengths), is_pinned=True) for one in sim.workers)
            made = plan(FleetSnapshot(0.0, sim.learner, workers), self.config)
            if self.in_flight_cap_rollouts:
                made = replace(made, in_flight_cap_rollouts=self.in_flight_cap_rollouts)
            self._plan = made
        return self._plan


@dataclass(slots=True)
class LivePlanner:
    """The real planner; every estimate is off by `estimate_noise` (relative, normal), drawn anew for each plan."""

    seed: int
    _estimates: dict[int, WorkerEstimate] = field(default_factory=dict)
    _previous: Plan | None = None
    _rng: random.Random | None = None

    def __call__(self, sim: FleetSim, why: str) -> Plan:
        if self._rng is None:
            self._rng = derived_rng(self.seed, "estimates")
        scenario = sim.scenario
        if not self._estimates:
            known: dict[WorkerTruth, WorkerEstimate] = {}
            for worker in sim.workers:
                kind = replace(worker.truth, name="")
                if kind not in known:
                    known[kind] = estimate_of(replace(kind, name="kind"), scenario.lengths)
                self._estimates[worker.index] = replace(known[kind], worker_id=PeerId(worker.truth.name))
        snapshot = FleetSnapshot(
            now_s=sim.clock.now(),
            learner=self._learner(sim.learner, scenario.estimate_noise),
            workers=tuple(self._worker(sim, worker) for worker in sim.workers),
            spent_usd=sim.usd_spent,
            steps_left=max(0, scenario.steps - sim.step),
        )
        self._previous = plan(snapshot, scenario.config, self._previous)
        return self._previous

    def _factor(self, noise: float) -> float:
        assert self._rng is not None
        return max(NOISE_LIMIT, self._rng.gauss(1.0, noise)) if noise else 1.0

    def _learner(self, learner: LearnerEstimate, noise: float) -> LearnerEstimate:
        if not noise:
            return learner
        return replace(
            learner,
            train_s=learner.train_s * self._factor(noise),
            delta_bytes=learner.delta_bytes * self._factor(noise),
        )

    def _worker(self, sim: FleetSim, worker: SimWorker) -> WorkerEstimate:
        estimate, noise = self._estimates[worker.index], sim.scenario.estimate_noise
        state = WorkerState.STANDBY
        if worker.is_lost:
            state = WorkerState.UNAVAILABLE
        elif worker.is_wanted:
            state = WorkerState.ACTIVE
        told = replace(
            estimate, price_usd_per_hour=worker.price, state=state, state_since_s=worker.state_since_s,
            is_relaying=sim.links.is_busy and worker.is_wanted,
        )  # fmt: skip
        if not noise:
            return told
        link = replace(
            told.link,
            uplink_bytes_per_s=told.link.uplink_bytes_per_s * self._factor(noise),
            downlink_bytes_per_s=told.link.downlink_bytes_per_s * self._factor(noise),
        )
        return replace(
            told,
            rollouts_per_s=told.rollouts_per_s * self._factor(noise),
            rollout_s_mean=told.rollout_s_mean * self._factor(noise),
            rollout_s_tail=told.rollout_s_tail * self._factor(noise),
            link=link,
        )
