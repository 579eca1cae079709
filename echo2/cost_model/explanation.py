"""Turns an evaluation into a plan: its terms, the binding one, the cap, the reason, and a remedy for each violated term.

Guarantees: every number in a text is computed from the evaluation. Leaves to others: choosing the pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from echo2.base.ids import PeerId
from echo2.base.units import format_bytes
from echo2.cost_model.plan import Limit, Plan, Term
from echo2.cost_model.search import Evaluation
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig, WorkerState

IN_FLIGHT_HEADROOM = 1.1


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What a plan's texts are computed from, besides the evaluation."""

    snapshot: FleetSnapshot
    config: PlanConfig
    rate_needed: float
    is_feasible: bool


def in_flight_cap(evaluation: Evaluation, rollouts_per_group: int) -> int:
    """Cap on rollouts offered and not yet trained on: enough to hide the tail, few enough that none grows too old.

    By Little's law, R/T_train rollouts per second that each take L_roll need R*L_roll/T_train in flight, and up to R more
    wait for their batch. Beyond R*(S + 1), a rollout would be too stale by the time it is trained on.
    """
    point = evaluation.point
    batch = point.rollouts_per_step
    flow = batch * (1 + evaluation.rollout_tail_s / point.train_s) * IN_FLIGHT_HEADROOM
    cap = max(batch + rollouts_per_group, min(flow, batch * (point.staleness_bound + 1)))
    return math.ceil(cap / rollouts_per_group) * rollouts_per_group


def plan_of(facts: PlanFacts, found: Evaluation, over_provisioned_since_s: float | None, why: str) -> Plan:
    """Builds the plan for the evaluation `found`; `why` begins its reason."""
    snapshot = facts.snapshot
    learner, workers = snapshot.learner, snapshot.workers
    rows = np.flatnonzero(found.chosen).tolist()
    pool = sorted(workers[row].worker_id for row in rows)
    active = {worker.worker_id for worker in workers if worker.state is WorkerState.ACTIVE}
    terms = tuple(_terms(facts, found))
    binding = min(terms, key=lambda term: term.slack)
    useful_per_hour = found.utilisation * learner.trained_rollouts / learner.train_s * 3600
    usd = found.usd_per_hour + learner.price_usd_per_hour
    is_feasible = facts.is_feasible and binding.is_met
    return Plan(
        kappa=found.kappa,
        pool=tuple(pool),
        activate=tuple(worker_id for worker_id in pool if worker_id not in active),
        drain=tuple(sorted(active - set(pool))),
        in_flight_cap_rollouts=in_flight_cap(found, learner.rollouts_per_group),
        predicted_utilisation=found.utilisation * learner.training_share,
        broadcast_s=found.point.broadcast_s,
        transfer_s=found.point.transfer_s,
        throughput_rollouts_per_s=found.point.throughput,
        usd_per_hour=found.usd_per_hour,
        usd_per_useful_rollout=usd / useful_per_hour if useful_per_hour > 0 else math.inf,
        is_feasible=is_feasible,
        terms=terms,
        binding=binding.limit_kind,
        reason=_reason(found, binding, pool, is_feasible, why),
        solver=found.solver or "greedy",
        greedy_gap=found.greedy_gap,
        over_provisioned_since_s=over_provisioned_since_s,
    )


def _terms(facts: PlanFacts, found: Evaluation) -> list[Term]:
    terms = [_throughput(facts, found), _broadcast(facts, found), _staleness(facts, found)]
    config = facts.config
    if config.usd_per_hour_cap:
        terms.append(_ceiling(Limit.USD_PER_HOUR, "pool price", found.usd_per_hour, config.usd_per_hour_cap, "USD/h"))
    if config.usd_budget:
        snapshot, learner = facts.snapshot, facts.snapshot.learner
        hours = snapshot.steps_left * learner.train_s / max(found.utilisation, 1e-3) / 3600
        total = snapshot.spent_usd + hours * found.usd_per_hour
        terms.append(_ceiling(Limit.USD_BUDGET, "spent + steps left", total, config.usd_budget, "USD"))
    return terms


def _ceiling(kind: Limit, formula: str, value: float, limit: float, unit: str) -> Term:
    slack = 1 - value / limit
    is_over = slack < 0 or (kind is Limit.USD_BUDGET and value >= limit)
    remedy = f"raise it to {value:.4g} {unit}, or take longer with a smaller pool" if is_over else ""
    return Term(kind, formula, value, limit, unit, slack, remedy)


def _throughput(facts: PlanFacts, found: Evaluation) -> Term:
    have, need = found.point.throughput, facts.config.target_utilisation * found.point.rollouts_per_step
    need /= found.point.train_s
    slack = have / need - 1
    remedy = f"add workers worth {need - have:.3g} rollouts/s" if slack < 0 else ""
    return Term(Limit.THROUGHPUT, "mu_pool >= target*R/T_train", have, need, "rollouts/s", slack, remedy)


def _broadcast(facts: PlanFacts, found: Evaluation) -> Term:
    point, learner = found.point, facts.snapshot.learner
    slack = 1 - point.transfer_s / found.period_s
    remedy = ""
    if slack < 0:
        size = learner.artifact_bytes(point.kappa)
        needed = size / (facts.config.broadcast_efficiency * found.period_s)
        remedy = (
            f"give the learner's uplink and each downlink {format_bytes(needed)}/s (a version is {format_bytes(size)}), or "
            "publish less often"
        )
    return Term(
        Limit.BROADCAST, "transfer <= kappa*T_train", point.transfer_s, found.period_s, "s", slack, remedy
    )  # fmt: skip


def _staleness(facts: PlanFacts, found: Evaluation) -> Term:
    point = found.point
    value, limit = point.staleness_use_s, point.staleness_budget_s
    slack = 1 - value / limit if limit > 0 else -math.inf
    remedy = _staleness_remedy(found) if slack < 0 else ""
    formula = "T_bcast + L_roll + R/mu_pool <= (S-kappa+1)*T_train"
    return Term(Limit.STALENESS, formula, value, limit, "s", slack, remedy)


def _staleness_remedy(found: Evaluation) -> str:
    """Each single number whose change would satisfy (3) on its own, with the value it needs."""
    point = found.point
    over_s = point.staleness_use_s - point.staleness_budget_s
    if math.isinf(over_s):
        return "add workers: none can generate"
    ways = [f"raise S to {point.staleness_bound + math.ceil(over_s / point.train_s - 1e-9)}"]
    if point.rollout_s > over_s:
        ways.append(f"shorten the longest rollouts to {point.rollout_s - over_s:.3g} s (now {point.rollout_s:.3g} s)")
    if point.transfer_s > over_s:
        factor = point.transfer_s / (point.transfer_s - over_s)
        ways.append(f"use links {factor:.2g} times as fast (a transfer takes {point.transfer_s:.3g} s)")
    batch_s = point.rollouts_per_step / point.throughput
    if batch_s > over_s:
        ways.append(f"use {batch_s / (batch_s - over_s):.2g} times the pool")
    sync = " (S = 0 is synchronous: the learner waits in every step)" if point.staleness_bound == 0 else ""
    return ", or ".join(ways) + sync


def _reason(found: Evaluation, binding: Term, pool: list[PeerId], is_feasible: bool, why: str) -> str:
    every = "step" if found.kappa == 1 else f"{found.kappa} steps"
    head = (
        f"{why}: {len(pool)} worker{'' if len(pool) == 1 else 's'} at {found.usd_per_hour:.2f} USD/h, publishing every {every}, "
        f"{found.utilisation:.1%} utilisation predicted"
    )
    kind, unit = binding.limit_kind.value, binding.unit
    if is_feasible:
        return f"{head}; closest to its limit: {kind} ({binding.slack:.1%} slack)"
    bound = "of at least" if binding.limit_kind is Limit.THROUGHPUT else "of at most"
    broken = f"{kind} is {binding.value:.4g} {bound} {binding.limit:.4g} {unit}"
    return f"{head}; {broken}" + (f"; to fix it, {binding.remedy}" if binding.remedy else "")
