"""The planner: chooses kappa and the pool together, at the lowest price, with reasons, and leaves a working pool alone.

`plan(snapshot, config, previous)` is a pure function. A plan with `is_feasible` keeps every relation for the given estimates, its
rehearsal reaches the target, and the budget pays for all steps that are left. If nothing is feasible, the plan is the best effort
and says which term is violated and what would fix it; if the budget cannot pay for it, the fastest pool that finishes within it.

A pool is chosen with `add_margin` more rate than needed, and is kept while it has the rate needed without the margin and its
rehearsal reaches the target. A small shortage that only the estimates show is fixed once it has lasted `SHORT_STEPS` steps, at
most the dwell time; any other at once. A pool is changed to save money only after the saving has exceeded `DRAIN_MARGIN` for
the dwell time, and by draining members if that is nearly as cheap. A pool that the budget kept small grows once it has paid for
more, with the margin to spare, for as long as a small shortage lasts. Workers that relay a broadcast, or that were activated less
than the dwell time (or their join time) ago, stay as far as the cap allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from echo2.cost_model.plan import UTILISATION_TOLERANCE, Limit, Plan, plan_of, usd_to_finish
from echo2.cost_model.rehearsal import confirmed, rehearsal_of, rehearse, rehearsed
from echo2.cost_model.relations import Evaluation, Flags, FleetModel
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig, WorkerEstimate, WorkerState, is_spent
from echo2.cost_model.solver import Solver

NOISE_MARGINS = 2.0  # two margins of shortage are still measurement noise
SHORT_STEPS = 1.5  # so the plans of two steps have seen the shortage, and not one odd measurement alone
DRAIN_MARGIN = 0.15  # a smaller saving is not worth the motion
SLOWER = tuple(0.85**times for times in range(1, 19))
"""Of the pace that can be reached, those tried where the budget does not pay for a busy learner: a slower run with the cheapest
machines costs less in all. Not by bisection, since the machine that is the cheapest an hour need not be the cheapest a step."""
USD_SHARE = 0.99  # of the cheapest way known: a pace that can save no more than the rest is not solved for it
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
    was_small = previous is not None and previous.binding is Limit.USD_BUDGET and not previous.is_feasible
    spare = 1 + config.add_margin if was_small else 1.0
    choice, is_small = _PoolChoice(fresh, why), not _affords(fleet, fresh, spare)
    if is_small:
        choice = _within_budget(fleet, fresh, spare)
    kept = _keep_small(previous, fleet, choice, is_small) if previous is not None and was_small else None
    if kept is not None:
        choice, is_small = kept, True
    elif previous is not None and not is_small:
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
    return plan_of(
        snapshot, config, final, choice.reason, *since_s, is_bound_by_budget=is_small,
        could_use_more=is_small or _keeps_busy(fleet, final) or _could_use_more(fleet, final),
    )  # fmt: skip


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


def _affords(fleet: FleetModel, pool: Evaluation, spare: float = 1.0) -> bool:
    """Whether the rest of the budget pays for the steps left with this pool, were they dearer by so much."""
    snapshot, budget = fleet.snapshot, fleet.config.usd_budget
    return snapshot.spent_usd + usd_to_finish(snapshot, pool) * spare <= budget


def _usd_least(fleet: FleetModel, share: float) -> float:
    """At least so much cost the steps left with a pool that makes `share` of the rate needed, or more: with fractions of machines,
    those that must stay, then the cheapest by rate. Infinite if there are not so many."""
    snapshot, learner = fleet.snapshot, fleet.snapshot.learner
    price, rows = fleet.period(fleet.config.kappas[-1]).price, np.flatnonzero(fleet.is_available)
    rows = rows[np.lexsort((price[rows] / fleet.rate[rows], ~fleet.is_must[rows]))]
    count = np.count_nonzero(fleet.is_must)
    rates, prices = np.cumsum(fleet.rate[rows]), np.cumsum(price[rows])
    need = max(share * fleet.rate_needed, float(rates[count - 1]) if count else 0.0)
    if need > rates[-1]:
        return math.inf
    least = float(np.interp(need, np.append(0.0, rates), np.append(0.0, prices)))
    usd_per_rollout = float(np.append((prices / rates)[rates > need], least / need).min())
    return (usd_per_rollout * snapshot.steps_left * learner.rollouts_per_step + least * learner.start_s) / 3600


def _within_budget(fleet: FleetModel, busy: Evaluation, spare: float) -> _PoolChoice:
    """The fastest pool with which the budget pays for all steps, with so much to spare if it can; if there is none, the one with
    the cheapest step, and what would finish."""
    snapshot, config = fleet.snapshot, fleet.config
    least, fastest, left = busy, None, config.usd_budget - snapshot.spent_usd
    paces = [busy.utilisation * slower for slower in SLOWER]
    usd_least = {share: _usd_least(fleet, share) for share in paces if share > 0}
    # Of those that may be paid the fastest first, then the others by price.
    for share in sorted(usd_least, key=lambda share: max(usd_least[share], left / spare)):
        if usd_least[share] > max(left / spare, USD_SHARE * usd_to_finish(snapshot, least)):
            break
        # S bounds steps, so a learner that is slower by so much keeps its relations with as much slower a pool.
        learner = replace(snapshot.learner, train_s=snapshot.learner.train_s / share)
        slower = FleetModel.of(replace(snapshot, learner=learner), config)
        cheapest, rejected = Solver(slower, slower.is_must).cheapest(_goal(config))
        found = [*rejected, *([cheapest] if cheapest is not None else ())]
        pools = [rehearsed(fleet, fleet.evaluate(pool.kappa, pool.chosen)) for pool in found]
        least = min([least, *pools], key=lambda pool: usd_to_finish(snapshot, pool))
        if paid := [pool for pool in pools if _affords(fleet, pool, spare)]:
            fastest = max(paid, key=lambda pool: pool.utilisation)
            break
    if fastest is None and _affords(fleet, least):
        fastest = least
    if fastest is not None:
        total_usd = snapshot.spent_usd + usd_to_finish(snapshot, fastest)
        why = f"the budget does not pay for a busy learner; this pool finishes for {total_usd:.2f} USD"
        return _PoolChoice(fastest, why)
    usd = usd_to_finish(snapshot, least)
    steps = int(snapshot.steps_left * left / usd) if usd > 0 else 0
    return _PoolChoice(
        least,
        f"the budget cannot finish the run: the cheapest way costs {usd:.2f} USD more and {left:.2f} are left, which train {steps} "
        f"of {snapshot.steps_left} steps; a budget of {snapshot.spent_usd + usd:.2f} USD would finish",
    )


# ---- hysteresis


def _could_use_more(fleet: FleetModel, pool: Evaluation) -> bool:
    """Whether twice as many machines, like the pool's or like those of it that deliver first, would keep the learner busy, or make
    it clearly busier."""
    enough = min(_goal(fleet.config), pool.utilisation * (1 + fleet.config.add_margin))
    rows, of_each = np.flatnonzero(pool.chosen), 2
    _, transfer_s = fleet.links_s(pool.kappa, rows)
    rows = rows[np.argsort(transfer_s + fleet.latency_s[rows] + fleet.group_s[rows], kind="stable")]
    while rows.size:
        first = replace(pool, chosen=np.isin(np.arange(len(fleet)), rows))
        if rehearse(rehearsal_of(fleet, first, of_each)) > enough:
            return True
        rows, of_each = rows[: rows.size // 2], 2 * of_each
    return not pool.chosen.any()


def _keep_small(previous: Plan, fleet: FleetModel, choice: _PoolChoice, is_small: bool) -> _PoolChoice | None:
    """The pool that the budget kept small, while it pays for that and for no clearly faster one with some to spare, or has not for
    as long as a little shortage lasts: at its edge, or with a price that changes, plans would go back and forth."""
    stayed, margin, now_s = _stayed(previous, fleet), fleet.config.add_margin, fleet.snapshot.now_s
    if stayed is None or not _affords(fleet, stayed) or stayed.usd_per_hour > fleet.usd_per_hour_most:
        return None
    if is_small and choice.evaluation.utilisation <= stayed.utilisation * (1 + margin):
        return _PoolChoice(stayed, "unchanged: the budget pays for it, and for no clearly faster pool")
    since_s = previous.short_since_s or now_s
    if now_s - since_s >= _lasting_s(fleet) or np.count_nonzero(stayed.chosen) < len(previous.pool):
        return None
    reason = "unchanged for now: the budget pays for a faster pool, but not for long enough"
    return _PoolChoice(stayed, reason, short_since_s=since_s)


def _lasting_s(fleet: FleetModel) -> float:
    """For so long a small difference is taken for chance."""
    return min(fleet.config.dwell_s, SHORT_STEPS * fleet.snapshot.learner.train_s)


def _is_held(worker: WorkerEstimate, now_s: float, config: PlanConfig) -> bool:
    """Whether an active worker must not be drained now."""
    dwell_s = max(config.dwell_s, worker.join_s)
    return worker.state is WorkerState.ACTIVE and (worker.is_relaying or now_s - worker.state_since_s < dwell_s)


def _stayed(previous: Plan, fleet: FleetModel) -> Evaluation | None:
    """The previous pool, of whom is there, as it is now; None if there was none."""
    if not fleet.config.allows(previous.kappa) or not previous.pool:
        return None
    pool = set(previous.pool)
    members = np.array([worker.worker_id in pool for worker in fleet.snapshot.workers]) & fleet.is_available
    return confirmed(fleet, fleet.evaluate(previous.kappa, members))


def _keep(previous: Plan, fleet: FleetModel, choice: _PoolChoice, is_busy: bool) -> _PoolChoice:
    """The previous pool if it still meets its terms, else that pool with additions, else the fresh one."""
    config, now_s, fresh = fleet.config, fleet.snapshot.now_s, choice.evaluation
    stayed = _stayed(previous, fleet)
    if stayed is None:
        return replace(choice, reason="a new pool: there was none")
    members = stayed.chosen
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
        if is_little and now_s - short_since_s < _lasting_s(fleet):
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
