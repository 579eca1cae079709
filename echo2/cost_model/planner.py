"""The planner: kappa and the pool together, for the least money, with reasons.

`plan(snapshot, config, previous)` is a pure function. Guarantees: a plan that says `is_feasible` keeps every relation
of `capacity` for the estimates given, and up to `exact_workers_max` workers none is cheaper (within the solver's gap
and the thresholds tried); the same input gives the same plan. When nothing is feasible the plan is the best effort
and says which term is broken and what would mend it. Leaves to others: acting on it (coordinator), the trees
(broadcast), measuring (calibration).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from echo2.cost_model.activation import Standing, held_workers, settled
from echo2.cost_model.columns import FleetColumns, PeriodColumns
from echo2.cost_model.exhaustive import is_small, pools_in_order
from echo2.cost_model.explanation import PlanFacts, in_flight_cap, plan_of
from echo2.cost_model.fluid import FluidInputs, log_normal_quantiles, longest_of, predict
from echo2.cost_model.plan import Plan
from echo2.cost_model.pool import TOLERANCE, within_provider_limits
from echo2.cost_model.search import Evaluation, Search
from echo2.cost_model.snapshot import DownloadMode, FleetSnapshot, PlanConfig
from echo2.cost_model.transfer import BroadcastPredictor, FluidBroadcast

PREDICTOR_ROUNDS = 3
UTILISATION_TOLERANCE = 0.005
# How much more rate than needed is asked for, and how much dearer than the cheapest period others may be.
PASSES = ((1.0, 1.001), (1.0, np.inf), (1.08, np.inf), (1.16, np.inf), (1.3, np.inf), (1.5, np.inf))
FLUID_CHECKS_MAX = 3
EVERY_POOL_CHECKS_MAX = 60
EFFORTS_MAX = 1
NEIGHBOURHOOD_WORKERS_MAX = 40
NEIGHBOURS_MAX = 30
EFFORT_SHARE = 0.9
NEARLY_UP = 1.1


def plan(
    snapshot: FleetSnapshot,
    config: PlanConfig,
    previous: Plan | None = None,
    predictor: BroadcastPredictor | None = None,
) -> Plan:
    """The plan for `snapshot`; `previous` damps it, `predictor` replaces the fluid estimate of the broadcast."""
    planner = _Planner.of(snapshot, config, predictor)
    if config.usd_budget and snapshot.spent_usd >= config.usd_budget:
        kappa = previous.kappa if previous and previous.kappa in config.kappas else config.kappas[0]
        nobody = np.zeros(len(planner.search.columns), dtype=np.bool_)
        facts = PlanFacts(snapshot, config, planner.search.rate_needed, is_feasible=False)
        return plan_of(facts, planner.search.evaluate(planner.period(kappa), nobody), None, "the budget is spent")
    chosen, is_feasible = planner.chosen()
    standing = Standing(chosen, f"cheapest of {config.kappas[0]}..{config.kappas[-1]} steps a version")
    if previous is not None:
        standing = settled(previous, planner.search, planner.period, chosen, is_feasible)
    final = standing.evaluation
    held = held_workers(snapshot, config) & ~final.chosen if previous is not None else None
    if held is not None and held.any():
        final = replace(
            planner.search.evaluate(planner.period(final.kappa), final.chosen | held),
            solver=final.solver, greedy_gap=final.greedy_gap,
        )  # fmt: skip
    facts = PlanFacts(snapshot, config, planner.search.rate_needed, is_feasible)
    made = plan_of(facts, refined(snapshot, config, final), standing.over_provisioned_since_s, standing.reason)
    return replace(made, short_since_s=standing.short_since_s)


def refined(snapshot: FleetSnapshot, config: PlanConfig, found: Evaluation) -> Evaluation:
    """`found` with its utilisation predicted by the fluid, which knows the lengths' distribution and the cap.

    Where the relations hold even for the longest rollout the fluid could only say the same as the closed form.
    """
    point = found.point
    if found.is_refined or point.throughput <= 0 or config.download is DownloadMode.STALLED:
        return found
    longest_s = longest_of(found.rollout_tail_s, found.rollout_longest_s)
    worst_s = point.staleness_use_s + max(0.0, longest_s - point.rollout_s)
    if found.utilisation >= 1.0 and worst_s <= point.staleness_budget_s and found.least_slack >= 0:
        return replace(found, is_refined=True)
    inputs = FluidInputs(
        point=point,
        rollout_s=log_normal_quantiles(found.rollout_mean_s, found.rollout_tail_s, found.rollout_longest_s),
        rollouts_per_group=snapshot.learner.rollouts_per_group,
        slots=point.throughput * found.rollout_mean_s,
        in_flight_cap=in_flight_cap(found, snapshot.learner.rollouts_per_group),
    )
    return replace(found, utilisation=float(predict(inputs).utilisation), is_refined=True)


def _keeping_up(found: list[Evaluation]) -> list[Evaluation]:
    """Those whose broadcast keeps up with the publications, where there are any: what the relations promise else is
    true of the first version only. Where there are none, those that come nearest to it; nobody at all only where there
    is nobody."""
    at_work = [one for one in found if one.point.throughput > 0] or found
    nearest = min(one.point.transfer_s / one.period_s for one in at_work)
    return [one for one in at_work if one.keeps_up] or [
        one for one in at_work if one.point.transfer_s <= NEARLY_UP * nearest * one.period_s
    ]


@dataclass(slots=True)
class _Planner:
    """Periods with the broadcast's efficiency as the predictor has it."""

    search: Search
    predictor: BroadcastPredictor | None
    efficiencies: dict[int, float]

    @classmethod
    def of(cls, snapshot: FleetSnapshot, config: PlanConfig, predictor: BroadcastPredictor | None) -> _Planner:
        columns = FleetColumns.of(snapshot, config)
        rate_needed = (
            config.target_utilisation * (1 + config.hysteresis.add_margin)
            * snapshot.learner.rollouts_per_step / snapshot.learner.train_s
        )  # fmt: skip
        is_exact = int(np.count_nonzero(columns.is_available)) <= config.exact_workers_max
        search = Search(snapshot, config, columns, columns.is_pinned, rate_needed, is_exact)
        return cls(search, predictor, dict.fromkeys(range(1, config.staleness_bound + 1), config.broadcast_efficiency))

    def period(self, kappa: int) -> PeriodColumns:
        search = self.search
        return PeriodColumns.of(search.snapshot, search.config, search.columns, kappa, self.efficiencies[kappa])

    def chosen(self) -> tuple[Evaluation, bool]:
        """Least cost per useful rollout whose predicted utilisation reaches the target, and whether there is one.

        The relations find each period's cheapest pool; the fluid then has the last word on what they promise. Where
        it denies all of them, larger pools are tried; else the best effort is the cheapest rollout among what keeps the
        learner nearly as busy as can be.
        """
        goal = self.search.config.target_utilisation - UTILISATION_TOLERANCE
        denied: list[Evaluation] = []
        has_weighed_all = False
        if is_small(self.search):
            first = self._chosen_of_every_pool(goal, denied)
            if first is not None:
                return first, True
            has_weighed_all = len(denied) < EVERY_POOL_CHECKS_MAX
        for raised, dearer in PASSES if not has_weighed_all else ():
            for found in self._candidates(raised, dearer)[:FLUID_CHECKS_MAX]:
                predicted = refined(self.search.snapshot, self.search.config, found)
                if predicted.utilisation >= goal:
                    return (self._trimmed(predicted, goal) if denied else predicted), True
                denied.append(predicted)
            if not denied:
                break
        efforts = [refined(self.search.snapshot, self.search.config, one) for one in self.best_efforts()]
        known = _keeping_up([*denied, *efforts])
        busiest = max(one.utilisation for one in known)
        nearly = [one for one in known if one.utilisation >= EFFORT_SHARE * busiest]
        return min(nearly, key=lambda one: (round(self.usd_per_useful_rollout(one), 9), -one.utilisation)), False

    def _chosen_of_every_pool(self, goal: float, denied: list[Evaluation]) -> Evaluation | None:
        """The first of all pools, cheapest first, that the fluid (and the predictor) does not deny; None if it denies
        `EVERY_POOL_CHECKS_MAX` that differ. Those denied are added to `denied`."""
        for _ in range(PREDICTOR_ROUNDS if self.predictor is not None else 1):
            told: set[tuple[float, ...]] = set()
            for found in pools_in_order(self.search, self.period):
                sign = (found.kappa, *(round(one, 9) for one in found.numbers))
                if sign in told:
                    continue
                if len(told) == EVERY_POOL_CHECKS_MAX:
                    break
                told.add(sign)
                predicted = refined(self.search.snapshot, self.search.config, found)
                if predicted.utilisation < goal:
                    denied.append(predicted)
                    continue
                ratio = self._slower_by(found) if self.predictor is not None else 1.0
                if ratio <= 1 + 1e-3:
                    return self._beside_greedy(predicted)
                self.efficiencies[found.kappa] /= ratio
                break
            else:
                break
        return None

    def _beside_greedy(self, found: Evaluation) -> Evaluation:
        """With how much dearer the greedy's pool for the same period would be."""
        by_greedy = replace(self.search, is_exact=False, proven=[]).best(self.period(found.kappa))
        gap = by_greedy.usd_per_hour / found.usd_per_hour - 1 if by_greedy and found.usd_per_hour > 0 else 0.0
        return replace(found, greedy_gap=max(0.0, gap))

    def _trimmed(self, found: Evaluation, goal: float) -> Evaluation:
        """A cheaper neighbour of a pool that was made larger for the fluid's sake: one worker fewer, or others.

        Tries, cheapest first, to drop one or two workers and take in at most one; at most `NEIGHBOURS_MAX` by the fluid.
        """
        search, price = self.search, self.search.columns.price
        inside = np.flatnonzero(found.chosen & ~search.is_must).tolist()
        outside = np.flatnonzero(search.columns.is_available & ~found.chosen).tolist()
        if len(inside) + len(outside) > NEIGHBOURHOOD_WORKERS_MAX:
            return found
        moves = [
            (float(price[list(into)].sum() - price[list(out)].sum()), out, into)
            for count in (1, 2)
            for out in combinations(inside, count)
            for into in [(), *((one,) for one in outside)]
        ]
        tried = 0
        for saved, out, into in sorted(moves):
            if saved >= 0 or tried == NEIGHBOURS_MAX:
                break
            chosen = found.chosen.copy()
            chosen[list(out)], chosen[list(into)] = False, True
            near = search.evaluate(self.period(found.kappa), chosen)
            if near.keeps_relations(search.rate_needed):
                tried += 1
                near = refined(search.snapshot, search.config, replace(near, solver=found.solver))
                if near.utilisation >= goal:
                    return near
        return found

    def _candidates(self, raised: float, dearer: float) -> list[Evaluation]:
        """Each period's cheapest pool for `raised` times the rate, best first: cost, then slack, then more versions.

        Periods whose pool costs more than `dearer` times the cheapest so far are left out.
        """
        found: list[Evaluation] = []
        search = replace(self.search, rate_needed=self.search.rate_needed * raised, proven=[])
        ceiling = np.inf
        for kappa in self.search.config.kappas:
            best = self._best_at(search, kappa, ceiling)
            if best is not None:
                found.append(best)
                ceiling = min(ceiling, best.usd_per_hour * dearer + TOLERANCE)
        return sorted(found, key=self._rank)

    def _rank(self, found: Evaluation) -> tuple[float, float, int]:
        return (round(self.usd_per_useful_rollout(found), 9), -round(found.least_slack, 9), found.kappa)

    def usd_per_useful_rollout(self, found: Evaluation) -> float:
        learner = self.search.snapshot.learner
        per_hour = found.utilisation * learner.rollouts_per_step / learner.train_s * 3600
        return (found.usd_per_hour + learner.price_usd_per_hour) / per_hour if per_hour > 0 else np.inf

    def _best_at(self, search: Search, kappa: int, ceiling: float) -> Evaluation | None:
        """The best pool of one period; searched again while the predictor finds its broadcast slower than assumed."""
        for _ in range(PREDICTOR_ROUNDS):
            found = search.best(self.period(kappa), ceiling)
            if found is None or self.predictor is None:
                return found
            ratio = self._slower_by(found)
            if ratio <= 1 + 1e-3:
                return found
            self.efficiencies[kappa] /= ratio
        return None

    def _slower_by(self, found: Evaluation) -> float:
        """Predicted transfer time of the pool over the one assumed."""
        assert self.predictor is not None
        learner = self.search.snapshot.learner
        rows = np.flatnonzero(found.chosen).tolist()
        links = [self.search.snapshot.workers[row].link for row in rows]
        size = learner.artifact_bytes(found.kappa)
        latency_s = FluidBroadcast(1.0).latency_s(learner.link, links)
        predicted_s = self.predictor.predict(size, learner.link, links) - latency_s
        return predicted_s / found.point.transfer_s if found.point.transfer_s > 0 else 1.0

    def best_efforts(self) -> list[Evaluation]:
        """Nothing keeps the relations: pools that keep the learner nearly as busy as can be, cheapest rollouts first."""
        found = _keeping_up([self.search.evaluate(self.period(kappa), chosen) for kappa, chosen in self._efforts()])
        busiest = max(one.utilisation for one in found)
        nearly = [one for one in found if one.utilisation >= EFFORT_SHARE * busiest]
        return sorted(nearly, key=lambda one: (round(self.usd_per_useful_rollout(one), 9), one.kappa))[:EFFORTS_MAX]

    def _efforts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Pools to consider for each period: nobody but the pinned, and best-rate prefixes, dear and cheap links."""
        columns, config = self.search.columns, self.search.config
        cap = (config.usd_per_hour_cap or np.inf) - float(columns.price[columns.is_pinned].sum())
        order = np.argsort(columns.price / columns.rate, kind="stable")
        order = order[(columns.is_available & ~columns.is_pinned)[order]]
        limits = [most for _, most in config.provider_workers_max]
        order = within_provider_limits(order, columns.provider, limits, columns.is_pinned)
        for kappa in config.kappas:
            period = self.period(kappa)
            yield kappa, columns.is_pinned.copy()
            if not len(order):
                continue
            late = (period.own_s + columns.latency_s + columns.tail_s)[order]
            for latest_s in np.quantile(late, (1.0, 0.75, 0.5, 0.25)).tolist():
                rows = order[late <= latest_s]
                rate, usd = np.cumsum(columns.rate[rows]), np.cumsum(columns.price[rows])
                for need in (self.search.rate_needed, 2 * self.search.rate_needed, np.inf):
                    count = min(int(np.searchsorted(rate, need)) + 1, int(np.searchsorted(usd, cap, side="right")))
                    chosen = columns.is_pinned.copy()
                    chosen[rows[:count]] = True
                    yield kappa, chosen
