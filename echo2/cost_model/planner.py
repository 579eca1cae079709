"""The planner: chooses kappa and the pool together, at the lowest price, with reasons, and leaves a working pool alone.

`plan(snapshot, config, previous)` is a pure function. A plan with `is_feasible` keeps every relation for the given estimates, its
rehearsal reaches the target, and the budget pays for all steps that are left. If nothing is feasible, the plan is the best effort
and says which term is violated and what would fix it; if the budget cannot pay for it, the fastest pool that finishes within it.

A pool is chosen with `add_margin` more rate than needed, and is kept while it has the rate needed without the margin and its
rehearsal reaches the target. A small shortage that only the estimates show is fixed once it has lasted `SHORT_STEPS` steps, at
most the dwell time; any other at once. A pool is changed to save money only after the saving has exceeded `DRAIN_MARGIN` for
the dwell time, and by draining members if that is nearly as cheap. Workers that relay a broadcast, or that were activated less
than the dwell time (or their join time) ago, stay as far as the cap allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from echo2.cost_model.plan import UTILISATION_TOLERANCE, Plan, plan_of, usd_to_finish
from echo2.cost_model.rehearsal import confirmed, rehearsed
from echo2.cost_model.relations import Evaluation, Flags, FleetModel
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig, WorkerEstimate, WorkerState, is_spent
from echo2.cost_model.solver import Solver

NOISE_MARGINS = 2.0  # two margins of shortage are still measurement noise
SHORT_STEPS = 1.5  # so the plans of two steps have seen the shortage, and not one odd measurement alone
DRAIN_MARGIN = 0.15  # a smaller saving is not worth the motion
SLOWER = tuple(0.7**times for times in range(1, 9))
"""Of its pace, those tried where the budget does not pay for a busy learner: a slower run with the cheapest machines costs less in
all. One after another, since the machine that is the cheapest an hour need not be the cheapest a step; few, since a budget that
nothing meets has them all solved for each plan."""
CHEAPEST = "the cheapest pool that keeps the learner busy"  # begins the reason
BARELY = "this pool keeps the learner busy, and none has the usual rate to spare"  # likewise
NEAREST = "no pool keeps the learner busy; this one comes nearest"  # likewise


def plan(snapshot: FleetSnapshot, config: PlanConfig, previous: Plan | None = None) -> Plan:
    """The plan for `snapshot`. `previous`: the plan in force, for hysteresis."""
    fleet = FleetModel.of(snapshot, config)
    if is_spent(snapshot.spent_usd, config.usd_budget):
        kappa = previous.kappa if previous and config.allows(previous.kappa) else config.kappas[0]
        nobody = fleet.evaluate(kappa, np.zeros(len(fleet), dtype=np.bool_))
        return plan_of(snapshot, config, rehearsed(fleet, nobody), "the budget is spent", is_bound_by_budget=True)
    solver = Solver(fleet, fleet.is_must)
    fresh, rejected = solver.cheapest(_goal(config))
    is_busy, why = fresh is not None, CHEAPEST
    if fresh is None:
        fresh = solver.nearest(rejected)
        is_busy = _keeps_busy(fleet, fresh)
        why = (CHEAPEST if fresh.keeps_relations(fleet.rate_needed) else BARELY) if is_busy else NEAREST
    choice, is_affordable = _PoolChoice(fresh, why), _affords(fleet, fresh)
    if not is_affordable:
        choice = _within_budget(fleet, fresh)
    elif previous is not None:
        choice = _keep(previous, fleet, choice, is_busy)
    final = choice.evaluation
    if previous is not None:
        price = fleet.period(final.kappa).price
        held = np.array([_is_held(worker, snapshot.now_s, config) for worker in snapshot.workers]) & ~final.chosen
        rows = np.flatnonzero(held)[np.argsort(price[held], kind="stable")]
        stays = rows[np.cumsum(price[rows]) <= fleet.usd_per_hour_most - final.usd_per_hour]
        if stays.size:  # the others go: the cap is harder than the dwell
            chosen = final.chosen.copy()
            chosen[stays] = True
            final = fleet.evaluate(final.kappa, chosen)
    if not final.is_rehearsed:
        final = confirmed(fleet, final)
    since_s = choice.over_provisioned_since_s, choice.short_since_s
    return plan_of(snapshot, config, final, choice.reason, *since_s, is_bound_by_budget=not is_affordable)


def plan_if_feasible(snapshot: FleetSnapshot, config: PlanConfig) -> Plan | None:
    """As `plan` without a previous one, but None instead of a best effort, which takes longer to find."""
    fleet = FleetModel.of(snapshot, config)
    solver = Solver(fleet, fleet.is_must)
    pool, rejected = solver.cheapest(_goal(config))
    if pool is None and rejected:  # the relations can be kept, and the search among the pools that do has ended
        pool = solver.nearest(rejected)
    if pool is None or not _affords(fleet, pool):
        return None
    best = plan_of(snapshot, config, pool, CHEAPEST)
    return best if best.is_feasible else None


def _goal(config: PlanConfig) -> float:
    return config.target_utilisation - UTILISATION_TOLERANCE


def _keeps_busy(fleet: FleetModel, pool: Evaluation) -> bool:
    """Whether a rehearsed pool keeps the learner busy, if without the margin."""
    kept_rate = fleet.rate_needed / (1 + fleet.config.add_margin)
    return pool.keeps_relations(kept_rate) and pool.utilisation >= _goal(fleet.config)


@dataclass(frozen=True, slots=True)
class _PoolChoice:
    """The pool to use and why; since when a much cheaper pool has been known, and since when the pool has been slightly
    short of its terms (None: it is not)."""

    evaluation: Evaluation
    reason: str
    over_provisioned_since_s: float | None = None
    short_since_s: float | None = None


# ---- the budget


def _affords(fleet: FleetModel, pool: Evaluation) -> bool:
    """Whether the rest of the budget pays for the steps left with this pool."""
    snapshot, budget = fleet.snapshot, fleet.config.usd_budget
    return snapshot.spent_usd + usd_to_finish(snapshot, pool) <= budget


def _within_budget(fleet: FleetModel, busy: Evaluation) -> _PoolChoice:
    """The fastest pool with which the budget pays for all steps; if there is none, the one with the cheapest step, and what would
    finish."""
    snapshot, config = fleet.snapshot, fleet.config
    least, fastest = busy, None
    for share in SLOWER:
        # S bounds steps, so a learner that is slower by so much keeps its relations with as much slower a pool.
        learner = replace(snapshot.learner, train_s=snapshot.learner.train_s / share)
        slower = FleetModel.of(replace(snapshot, learner=learner), config)
        cheapest, rejected = Solver(slower, slower.is_must).cheapest(_goal(config))
        found = [*rejected, *([cheapest] if cheapest is not None else ())]
        pools = [rehearsed(fleet, fleet.evaluate(pool.kappa, pool.chosen)) for pool in found]
        least = min([least, *pools], key=lambda pool: usd_to_finish(snapshot, pool))
        if paid := [pool for pool in pools if _affords(fleet, pool)]:
            fastest = max(paid, key=lambda pool: pool.utilisation)
            break
    if fastest is not None:
        total_usd = snapshot.spent_usd + usd_to_finish(snapshot, fastest)
        why = f"the budget does not pay for a busy learner; this pool finishes for {total_usd:.2f} USD"
        return _PoolChoice(fastest, why)
    usd, left = usd_to_finish(snapshot, least), config.usd_budget - snapshot.spent_usd
    steps = int(snapshot.steps_left * left / usd) if usd > 0 else 0
    return _PoolChoice(
        least,
        f"the budget cannot finish the run: the cheapest way costs {usd:.2f} USD more and {left:.2f} are left, which train {steps} "
        f"of {snapshot.steps_left} steps; a budget of {snapshot.spent_usd + usd:.2f} USD would finish",
    )


# ---- hysteresis


def _is_held(worker: WorkerEstimate, now_s: float, config: PlanConfig) -> bool:
    """Whether an active worker must not be drained now."""
    dwell_s = max(config.dwell_s, worker.join_s)
    return worker.state is WorkerState.ACTIVE and (worker.is_relaying or now_s - worker.state_since_s < dwell_s)


def _keep(previous: Plan, fleet: FleetModel, choice: _PoolChoice, is_busy: bool) -> _PoolChoice:
    """The previous pool if it still meets its terms, else that pool with additions, else the fresh one."""
    config, now_s, fresh = fleet.config, fleet.snapshot.now_s, choice.evaluation
    if not config.allows(previous.kappa) or not previous.pool:
        return replace(choice, reason="a new pool: there was none")
    pool = set(previous.pool)
    members = np.array([worker.worker_id in pool for worker in fleet.snapshot.workers]) & fleet.is_available
    stayed = confirmed(fleet, fleet.evaluate(previous.kappa, members))
    within_cap = stayed.usd_per_hour <= config.usd_per_hour_cap
    is_dear = stayed.usd_per_hour > fresh.usd_per_hour * (1 + DRAIN_MARGIN) + 1e-9
    if not is_busy:
        is_better = fresh.utilisation > stayed.utilisation * (1 + config.add_margin) + 1e-9
        if is_better or is_dear or not within_cap or (fresh.keeps_up and not stayed.keeps_up):
            return choice
        return _PoolChoice(stayed, "unchanged: no pool keeps the learner busy, and none is clearly better")
    kept_rate = fleet.rate_needed / (1 + config.add_margin)
    since_s = (previous.over_provisioned_since_s or now_s) if is_dear else None
    if _keeps_busy(fleet, stayed) and within_cap:
        if since_s is None:
            return _PoolChoice(stayed, "unchanged: the pool is still within the margins")
        if now_s - since_s < config.dwell_s:
            return _PoolChoice(stayed, "unchanged for now: a cheaper pool is known, but not for long enough", since_s)
        # Only these workers to choose from: what others seem to save beyond them is mostly noise in their estimates.
        shrunk = _no_dearer(replace(fleet, is_available=members), fleet.is_must, fresh)
        change, best = ("smaller", shrunk) if shrunk is not None else ("changed", fresh)
        return _PoolChoice(best, f"{change}: saves {1 - best.usd_per_hour / stayed.usd_per_hour:.0%} of the price")
    if within_cap and int(np.count_nonzero(members)) == len(previous.pool):
        slip, short_since_s = NOISE_MARGINS * config.add_margin, previous.short_since_s or now_s
        is_little = stayed.keeps_relations(kept_rate / (1 + slip), config.add_margin + slip)
        lasting_s = min(config.dwell_s, SHORT_STEPS * fleet.snapshot.learner.train_s)
        if is_little and now_s - short_since_s < lasting_s:
            reason = "unchanged for now: a little short, but not for long enough"
            return _PoolChoice(stayed, reason, since_s, short_since_s)
    mended = _no_dearer(fleet, members | fleet.is_must, fresh)
    if mended is not None:
        return _PoolChoice(mended, "mended: the pool no longer met its terms")
    return _PoolChoice(fresh, "changed: the pool no longer met its terms")


def _no_dearer(fleet: FleetModel, is_must: Flags, fresh: Evaluation) -> Evaluation | None:
    """The cheapest pool of `fleet` with those that must stay, unless it is clearly dearer than a fresh one."""
    pool, _ = Solver(fleet, is_must).cheapest(_goal(fleet.config))
    return pool if pool is not None and pool.usd_per_hour <= fresh.usd_per_hour * (1 + DRAIN_MARGIN) + 1e-9 else None
