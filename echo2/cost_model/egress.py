"""Plans where providers charge for traffic: what a worker sends depends on the period, so each is planned at its own prices.

A worker of a broadcast sends about one version a period to others (the weighted trees use all uplinks for N versions in all)
and its rollouts, which are small beside it. Guarantees: pure; without a charge the plan is `plan`'s own. Leaves to others: what
providers charge (offers).
"""

from __future__ import annotations

import math
from dataclasses import replace

from echo2.cost_model.effort import STEP, UTILISATION_LEAST
from echo2.cost_model.plan import Plan
from echo2.cost_model.planner import plan
from echo2.cost_model.snapshot import FleetSnapshot, LearnerEstimate, PlanConfig

GIB = float(1 << 30)


def sent_gib_per_hour(learner: LearnerEstimate, kappa: int) -> float:
    """Of one worker: a version a period."""
    return learner.artifact_bytes(kappa) / GIB * 3600 / (kappa * learner.train_s)


def priced(snapshot: FleetSnapshot, kappa: int) -> FleetSnapshot:
    """With each worker's traffic in its price."""
    sent = sent_gib_per_hour(snapshot.learner, kappa)
    workers = (
        replace(one, price_usd_per_hour=one.price_usd_per_hour + sent * one.egress_usd_per_gib, egress_usd_per_gib=0.0)
        for one in snapshot.workers
    )
    return replace(snapshot, workers=tuple(workers))


def plan_with_egress(snapshot: FleetSnapshot, config: PlanConfig) -> Plan:
    """The best plan of all periods, by the order of every plan: feasible, near the target, least USD/h."""
    if not any(one.egress_usd_per_gib > 0 for one in snapshot.workers):
        return plan(snapshot, config)
    plans = [plan(priced(snapshot, kappa), replace(config, fixed_kappa=kappa)) for kappa in config.kappas]
    return min(plans, key=lambda one: _rank(one, config.target_utilisation))


def _rank(one: Plan, target: float) -> tuple[bool, int, float, float, int]:
    short = math.log(target / max(one.predicted_utilisation, UTILISATION_LEAST)) / STEP
    slack = min((term.slack for term in one.terms), default=0.0)
    return (
        not one.is_feasible,
        0 if one.is_feasible else max(0, math.ceil(short - 0.5)),
        one.usd_per_hour,
        -slack,
        one.kappa,
    )
