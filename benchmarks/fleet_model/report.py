"""Report of a fleet simulation: utilisation, price, drops, changes of the pool; predicted against simulated.

Guarantees: step time, utilisation and price are measured after the warm-up. Leaves to others: printing (cli).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.fleet_model.fleet import FleetSim
from benchmarks.fleet_model.planner import LivePlanner
from benchmarks.fleet_model.scenario import FleetScenario


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Results of one simulation. `saving`: share saved against the baseline, learner included; None without a baseline."""

    name: str
    steps: int
    step_s: float
    utilisation: float
    predicted_utilisation: float
    kappa: int
    pool: int
    usd_per_step: float
    pool_usd_per_hour: float
    dropped_share: float
    preemptions: int
    activations: int
    activations_per_worker_hour: float
    plans: int
    broadcast_s: float
    predicted_broadcast_s: float
    over_stale_tokens: int
    hours: float
    baseline_usd_per_step: float | None
    saving: float | None
    reason: str


def simulate(scenario: FleetScenario) -> FleetReport:
    """Simulates the scenario under the real planner."""
    sim = FleetSim(scenario, LivePlanner(scenario.seed))
    sim.run()
    return report_of(sim)


def report_of(sim: FleetSim) -> FleetReport:
    """The report of a finished simulation."""
    scenario, counters = sim.scenario, sim.counters
    starts, first = counters.step_started_s, scenario.warmup_steps
    made = len(starts) - 1 - first
    assert made >= 1, f"{scenario.name}: expected more than {first} steps, the learner made {len(starts) - 1}"
    span_s = starts[-1] - starts[first]
    step_s = span_s / made
    pool_usd = counters.usd_at_step[-1] - counters.usd_at_step[first]
    usd_per_step = pool_usd / made + sim.learner.price_usd_per_hour * step_s / 3600
    baseline = scenario.baseline.usd_per_step if scenario.baseline else None
    handled = counters.trained_rollouts + counters.dropped_rollouts
    return FleetReport(
        name=scenario.name,
        steps=made,
        step_s=step_s,
        utilisation=min(1.0, sim.learner.train_s / step_s),
        predicted_utilisation=statistics.fmean(one[3] for one in counters.plan_log),
        kappa=sim.plan.kappa,
        pool=len(sim.plan.pool),
        usd_per_step=usd_per_step,
        pool_usd_per_hour=pool_usd / span_s * 3600,
        dropped_share=counters.dropped_rollouts / handled if handled else 0.0,
        preemptions=counters.preemptions,
        activations=counters.activations,
        activations_per_worker_hour=counters.activations / max(sim.worker_hours, 1e-9),
        plans=counters.plans,
        broadcast_s=statistics.fmean(sim.links.broadcasts_s) if sim.links.broadcasts_s else 0.0,
        predicted_broadcast_s=sim.plan.broadcast_s,
        over_stale_tokens=sim.ledger.over_stale_tokens(),
        hours=starts[-1] / 3600,
        baseline_usd_per_step=baseline,
        saving=None if baseline is None else 1 - usd_per_step / baseline,
        reason=sim.plan.reason,
    )
