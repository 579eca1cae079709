"""Plans where providers charge for traffic: what a worker sends depends on the period, so each is planned at its own prices.

A worker of a broadcast sends about one version a period to others (the weighted trees use all uplinks for N versions in all)
and its rollouts, which are small beside it. Guarantees: pure; without a charge the plan is `plan`'s own. Leaves to others: what
providers charge (offers).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from echo2.cost_model.effort import STEP, UTILISATION_LEAST
from echo2.cost_model.plan import Plan
from echo2.cost_model.planner import plan
from echo2.cost_model.snapshot import FleetSnapshot, LearnerEstimate, PlanConfig, WorkerEstimate
from echo2.cost_model.transfer import BroadcastPredictor

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
    if not _is_charged(snapshot):
        return plan(snapshot, config)
    plans = [plan(priced(snapshot, kappa), replace(config, fixed_kappa=kappa)) for kappa in config.kappas]
    return _told(min(plans, key=lambda one: _rank(one, config.target_utilisation)), snapshot)


def next_plan_with_egress(
    snapshot: FleetSnapshot, config: PlanConfig, previous: Plan | None, predictor: BroadcastPredictor
) -> Plan:
    """The plan of a run that goes on: traffic is priced at the period that is best with it, then planned as ever, with the same
    patience."""
    if not _is_charged(snapshot):
        return plan(snapshot, config, previous, predictor)
    best = plan_with_egress(snapshot, config)
    return _told(plan(priced(snapshot, best.kappa), config, previous, predictor), snapshot, best.kappa)


def egress_usd_per_hour(learner: LearnerEstimate, kappa: int, workers: Iterable[WorkerEstimate]) -> float:
    """What traffic of these workers costs."""
    return sent_gib_per_hour(learner, kappa) * sum(one.egress_usd_per_gib for one in workers)


def _is_charged(snapshot: FleetSnapshot) -> bool:
    return any(one.egress_usd_per_gib > 0 for one in snapshot.workers)


def _told(made: Plan, snapshot: FleetSnapshot, kappa: int = 0) -> Plan:
    """With the share of its price that is traffic, as it was priced: at `kappa`; 0: at its own period."""
    pool = set(made.pool)
    workers = (one for one in snapshot.workers if one.worker_id in pool)
    return replace(made, egress_usd_per_hour=egress_usd_per_hour(snapshot.learner, kappa or made.kappa, workers))


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
