"""Hysteresis: when to leave a working pool alone.

A pool is chosen with `add_margin` more rate than needed, and is kept while it has the rate needed without the margin. A
shortage that only the estimates show (no member was lost, and it is within `NOISE_MARGINS` margins) is fixed once it has
lasted the dwell time; any other shortage at once. A pool is changed to save money only after the saving has exceeded
`drain_margin` for the dwell time, and by draining members if that is nearly as cheap as the best pool. Workers that
relay a broadcast, or that were activated less than the dwell time (or their join time) ago, stay regardless of the plan.
Guarantees: pure. Leaves to others: the search itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from echo2.cost_model.columns import Flags, PeriodColumns
from echo2.cost_model.effort import LARGE_FLEET
from echo2.cost_model.forecast import confirmed, refined
from echo2.cost_model.plan import Plan
from echo2.cost_model.search import Evaluation, Search
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig, WorkerEstimate, WorkerState

NOISE_MARGINS = 2.0


@dataclass(frozen=True, slots=True)
class StandingPlan:
    """The pool to use and why; since when a much cheaper pool has been known, and since when the pool has been slightly
    short of its terms (None: it is not)."""

    evaluation: Evaluation
    reason: str
    over_provisioned_since_s: float | None = None
    short_since_s: float | None = None


def is_held(worker: WorkerEstimate, now_s: float, config: PlanConfig) -> bool:
    """Whether an active worker must not be drained now."""
    dwell_s = max(config.hysteresis.dwell_s, worker.join_s)
    return worker.state is WorkerState.ACTIVE and (worker.is_relaying or now_s - worker.state_since_s < dwell_s)


def held_workers(snapshot: FleetSnapshot, config: PlanConfig) -> Flags:
    """Flags of the workers that stay in the pool regardless of the plan."""
    return np.array([is_held(worker, snapshot.now_s, config) for worker in snapshot.workers])


def settled(
    previous: Plan, search: Search, period: Callable[[int], PeriodColumns], fresh: Evaluation, is_feasible: bool
) -> StandingPlan:
    """Returns the previous pool if it still meets its terms, else that pool with additions, else `fresh`."""
    config, now_s = search.config, search.snapshot.now_s
    margins = config.hysteresis
    if previous.kappa not in config.kappas or not previous.pool:
        return StandingPlan(fresh, "a new pool: there was none")
    if not is_feasible:
        return _settled_effort(previous, search, period, fresh)
    stayed = search.evaluate(period(previous.kappa), _pool_rows(previous, search.snapshot))
    kept_rate = search.rate_needed / (1 + margins.add_margin)
    is_dear = stayed.usd_per_hour > fresh.usd_per_hour * (1 + margins.drain_margin) + 1e-9
    since_s = (previous.over_provisioned_since_s or now_s) if is_dear else None
    within_cap = not config.usd_per_hour_cap or stayed.usd_per_hour <= config.usd_per_hour_cap
    if _still_does(stayed, kept_rate, margins.add_margin) and within_cap:
        if since_s is None:
            return StandingPlan(stayed, "unchanged: the pool is still within the margins")
        if now_s - since_s < margins.dwell_s:
            return StandingPlan(stayed, "unchanged for now: a cheaper pool is known, but not for long enough", since_s)
        shrunk = _shrunk(search, period(previous.kappa), stayed)
        if shrunk is not None and shrunk.usd_per_hour <= fresh.usd_per_hour * (1 + margins.drain_margin) + 1e-9:
            return StandingPlan(shrunk, f"smaller: saves {_share(stayed, shrunk):.0%} of the price")
        return StandingPlan(fresh, f"changed: saves {_share(stayed, fresh):.0%} of the price")
    slip = NOISE_MARGINS * margins.add_margin
    if within_cap and _is_whole(previous, search.snapshot):
        short_since_s = previous.short_since_s or now_s
        is_little = _still_does(stayed, kept_rate / (1 + slip), margins.add_margin + slip)
        if is_little and now_s - short_since_s < margins.dwell_s:
            return StandingPlan(
                stayed, "unchanged for now: a little short, but not for long enough", since_s, short_since_s
            )
    mended = _mended(search, period(previous.kappa), stayed)
    if mended is not None and mended.usd_per_hour <= fresh.usd_per_hour * (1 + margins.drain_margin) + 1e-9:
        return StandingPlan(mended, "mended: the pool no longer met its terms")
    return StandingPlan(fresh, "changed: the pool no longer met its terms")


def _settled_effort(
    previous: Plan, search: Search, period: Callable[[int], PeriodColumns], fresh: Evaluation
) -> StandingPlan:
    """If no plan is feasible: keeps the pool unless the best effort is clearly better or clearly cheaper."""
    stayed = refined(search, search.evaluate(period(previous.kappa), _pool_rows(previous, search.snapshot)))
    if len(search.columns) <= LARGE_FLEET:  # so that both are judged by the same measure
        stayed = confirmed(search, stayed)
    margins = search.config.hysteresis
    is_better = fresh.utilisation > stayed.utilisation * (1 + margins.add_margin) + 1e-9
    is_cheaper = stayed.usd_per_hour > fresh.usd_per_hour * (1 + margins.drain_margin) + 1e-9
    falls_behind = fresh.keeps_up and not stayed.keeps_up
    if is_better or is_cheaper or falls_behind:
        return StandingPlan(fresh, "no pool keeps the learner busy; this one comes nearest")
    return StandingPlan(stayed, "unchanged: no pool keeps the learner busy, and none is clearly better")


def _still_does(stayed: Evaluation, rate_needed: float, margin: float) -> bool:
    point, roof = stayed.point, 1 + margin
    return (
        point.throughput >= rate_needed
        and point.transfer_s <= stayed.period_s * roof
        and point.staleness_use_s <= point.staleness_budget_s * roof
    )


def _shrunk(search: Search, period: PeriodColumns, stayed: Evaluation) -> Evaluation | None:
    """The cheapest subset of the pool that satisfies the relations. What other workers seem to save beyond it is mostly
    noise in their estimates."""
    columns = replace(search.columns, is_available=search.columns.is_available & stayed.chosen)
    own = Search(search.snapshot, search.config, columns, search.is_must, search.rate_needed, search.is_exact)
    return own.best(period)


def _is_whole(previous: Plan, snapshot: FleetSnapshot) -> bool:
    """Whether no member of the pool was lost."""
    return int(np.count_nonzero(_pool_rows(previous, snapshot))) == len(previous.pool)


def _mended(search: Search, period: PeriodColumns, stayed: Evaluation) -> Evaluation | None:
    """The pool plus the cheapest additions it needs; None if its present members themselves violate a relation."""
    keeping = Search(
        search.snapshot, search.config, search.columns, stayed.chosen | search.is_must, search.rate_needed,
        search.is_exact,
    )  # fmt: skip
    return keeping.best(period)


def _pool_rows(previous: Plan, snapshot: FleetSnapshot) -> Flags:
    pool = set(previous.pool)
    return np.array(
        [worker.worker_id in pool and worker.state is not WorkerState.UNAVAILABLE for worker in snapshot.workers]
    )


def _share(stayed: Evaluation, fresh: Evaluation) -> float:
    return 1 - fresh.usd_per_hour / stayed.usd_per_hour
