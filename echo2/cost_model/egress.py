"""Plans if providers charge for traffic: what a worker sends depends on the period, so each period is planned at its own prices.

In a broadcast, a worker sends about one version per period to others (the weighted trees use all uplinks for N copies in total);
its rollouts are small in comparison. Guarantees: pure; without a charge the plan is that of `plan`. Leaves to others: the
providers' prices (offers).
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
    """GiB that one worker sends per hour: one version per period."""
    return learner.artifact_bytes(kappa) / GIB * 3600 / (kappa * learner.train_s)


def priced(snapshot: FleetSnapshot, kappa: int) -> FleetSnapshot:
    """The snapshot with each worker's traffic included in its price."""
    sent = sent_gib_per_hour(snapshot.learner, kappa)
    workers = (
        replace(one, price_usd_per_hour=one.price_usd_per_hour + sent * one.egress_usd_per_gib, egress_usd_per_gib=0.0)
        for one in snapshot.workers
    )
    return replace(snapshot, workers=tuple(workers))


def plan_with_egress(snapshot: FleetSnapshot, config: PlanConfig) -> Plan:
    """The best plan over all periods, in the order of every plan: feasible, nearest to the target, least USD/h."""
    if not _is_charged(snapshot):
        return plan(snapshot, config)
    plans = [plan(priced(snapshot, kappa), replace(config, fixed_kappa=kappa)) for kappa in config.kappas]
    return _told(min(plans, key=lambda one: _rank(one, config.target_utilisation)), snapshot)


def next_plan_with_egress(
    snapshot: FleetSnapshot, config: PlanConfig, previous: Plan | None, predictor: BroadcastPredictor
) -> Plan:
    """The next plan of a running run: prices traffic at the best period, then plans as usual, with the usual hysteresis."""
    if not _is_charged(snapshot):
        return plan(snapshot, config, previous, predictor)
    best = plan_with_egress(snapshot, config)
    return _told(plan(priced(snapshot, best.kappa), config, previous, predictor), snapshot, best.kappa)


def egress_usd_per_hour(learner: LearnerEstimate, kappa: int, workers: Iterable[WorkerEstimate]) -> float:
    """USD per hour for the traffic of these workers."""
    return sent_gib_per_hour(learner, kappa) * sum(one.egress_usd_per_gib for one in workers)


def _is_charged(snapshot: FleetSnapshot) -> bool:
    return any(one.egress_usd_per_gib > 0 for one in snapshot.workers)


def _told(made: Plan, snapshot: FleetSnapshot, kappa: int = 0) -> Plan:
    """The plan with `egress_usd_per_hour` filled in, priced at `kappa`; 0: at the plan's own period."""
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
