"""Hysteresis: when to leave a working pool alone.

A pool is chosen with `add_margin` more rate than needed, and stays while it has what is needed without the margin. A
shortage that estimates alone tell of (nobody was lost, and it is within `NOISE_MARGINS` margins) is mended when it has
lasted the dwell time, any other at once. A pool is changed for the money only after the saving has exceeded
`drain_margin` for the dwell time, by letting members go where that is nearly as cheap as the best pool. Workers that
relay a broadcast, or were activated less than the dwell (or their join) time ago, stay whatever the plan says.
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
    """What is to be done, since when a much cheaper pool has been known, and since when the pool has been a little
    short of its terms (None: it has not)."""

    evaluation: Evaluation
    reason: str
    over_provisioned_since_s: float | None = None
    short_since_s: float | None = None


def is_held(worker: WorkerEstimate, now_s: float, config: PlanConfig) -> bool:
    """Whether an active worker must not be drained now."""
    dwell_s = max(config.hysteresis.dwell_s, worker.join_s)
    return worker.state is WorkerState.ACTIVE and (worker.is_relaying or now_s - worker.state_since_s < dwell_s)


def held_workers(snapshot: FleetSnapshot, config: PlanConfig) -> Flags:
    """Rows of the workers that stay in the pool whatever the plan says."""
    return np.array([is_held(worker, snapshot.now_s, config) for worker in snapshot.workers])


def settled(
    previous: Plan, search: Search, period: Callable[[int], PeriodColumns], fresh: Evaluation, is_feasible: bool
) -> StandingPlan:
    """The previous pool if it still does, else the previous pool mended, else `fresh`."""
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
    """Without a feasible plan: keep the pool unless the best effort is clearly better or clearly cheaper."""
    stayed = refined(search, search.evaluate(period(previous.kappa), _pool_rows(previous, search.snapshot)))
    if len(search.columns) <= LARGE_FLEET:  # by the measure that the fresh one was chosen by
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
    """The cheapest part of the pool that does: what others seem to save beyond it is mostly luck of their estimates."""
    columns = replace(search.columns, is_available=search.columns.is_available & stayed.chosen)
    own = Search(search.snapshot, search.config, columns, search.is_must, search.rate_needed, search.is_exact)
    return own.best(period)


def _is_whole(previous: Plan, snapshot: FleetSnapshot) -> bool:
    """Whether nobody of the pool was lost."""
    return int(np.count_nonzero(_pool_rows(previous, snapshot))) == len(previous.pool)


def _mended(search: Search, period: PeriodColumns, stayed: Evaluation) -> Evaluation | None:
    """The pool plus what it lacks; None when its members themselves break a relation."""
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
