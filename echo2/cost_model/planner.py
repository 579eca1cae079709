"""The planner: chooses kappa and the pool together, at the lowest price, with reasons.

`plan(snapshot, config, previous)` is a pure function. Guarantees: a plan with `is_feasible` satisfies every relation of
`capacity` for the given estimates, and with up to `exact_workers_max` workers none is cheaper (within the solver's gap
and the thresholds tried); the same input gives the same plan. If nothing is feasible, the plan is the best effort and
says which term is violated and what would fix it. Leaves to others: acting on it (coordinator), the trees (broadcast),
measuring (calibration).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from echo2.cost_model.activation import StandingPlan, held_workers, settled
from echo2.cost_model.columns import FleetColumns, PeriodColumns
from echo2.cost_model.effort import Efforts
from echo2.cost_model.exhaustive import is_small, pools_in_order
from echo2.cost_model.explanation import PlanFacts, plan_of
from echo2.cost_model.forecast import refined
from echo2.cost_model.plan import Plan
from echo2.cost_model.pool import TOLERANCE
from echo2.cost_model.search import Evaluation, Search
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig
from echo2.cost_model.transfer import BroadcastPredictor, FluidBroadcast

PREDICTOR_ROUNDS = 3
UTILISATION_TOLERANCE = 0.005
# (factor on the needed rate, factor on the cheapest period's price up to which other periods are considered)
PASSES = ((1.0, 1.001), (1.0, np.inf), (1.08, np.inf), (1.16, np.inf), (1.3, np.inf), (1.5, np.inf))
REHEARSED_MAX = 3
REHEARSED_PERIODS, CLOSE = 2, 0.01
EVERY_POOL_CHECKS_MAX = 60
NEIGHBOURHOOD_WORKERS_MAX = 40
NEIGHBOURS_MAX = 30


CHEAPEST = "the cheapest pool that keeps the learner busy"
NEAREST = "no pool keeps the learner busy; this one comes nearest"


def plan(
    snapshot: FleetSnapshot,
    config: PlanConfig,
    previous: Plan | None = None,
    predictor: BroadcastPredictor | None = None,
) -> Plan:
    """The plan for `snapshot`. `previous`: the plan in force, for hysteresis. `predictor` replaces the fluid estimate of the
    broadcast."""
    planner = _Planner.of(snapshot, config, predictor)
    if config.usd_budget and snapshot.spent_usd >= config.usd_budget:
        kappa = previous.kappa if previous and previous.kappa in config.kappas else config.kappas[0]
        nobody = np.zeros(len(planner.search.columns), dtype=np.bool_)
        facts = PlanFacts(snapshot, config, planner.search.rate_needed, is_feasible=False)
        return plan_of(facts, planner.search.evaluate(planner.period(kappa), nobody), None, "the budget is spent")
    chosen, is_feasible = planner.chosen()
    standing = StandingPlan(chosen, CHEAPEST if is_feasible else NEAREST)
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
    made = plan_of(facts, refined(planner.search, final), standing.over_provisioned_since_s, standing.reason)
    return replace(made, short_since_s=standing.short_since_s)


def feasible_plan(snapshot: FleetSnapshot, config: PlanConfig) -> Plan | None:
    """The plan that satisfies every relation and reaches the target; None if there is none. Does not search for a best effort."""
    planner = _Planner.of(snapshot, config, None)
    found = planner.feasible([])
    if found is None:
        return None
    facts = PlanFacts(snapshot, config, planner.search.rate_needed, is_feasible=True)
    made = plan_of(facts, found, None, CHEAPEST)
    return made if made.is_feasible else None


def promised(snapshot: FleetSnapshot, config: PlanConfig) -> Evaluation:
    """Evaluates all workers of `snapshot` together under the best period: applies the relations to each period, then
    rehearses the best one, or the best two if they are close. Chooses no pool."""
    planner = _Planner.of(snapshot, config, None)
    everybody = planner.search.columns.is_available
    found = [planner.search.evaluate(planner.period(kappa), everybody) for kappa in config.kappas]
    first = sorted(found, key=lambda one: (-round(one.utilisation, 3), -round(one.least_slack, 6), one.kappa))
    close = [one for one in first if one.utilisation >= first[0].utilisation - CLOSE and first[0].utilisation < 1.0]
    rehearsed = [refined(planner.search, one) for one in (close or first[:1])[:REHEARSED_PERIODS]]
    return max(rehearsed, key=lambda one: (round(one.utilisation, 3), one.least_slack))


@dataclass(slots=True)
class _Planner:
    """One planning run. `efficiencies`: the broadcast's efficiency by period, lowered if the predictor expects less."""

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
        return cls(
            search, predictor, dict.fromkeys(range(1, max(1, config.staleness_bound) + 1), config.broadcast_efficiency)
        )

    def period(self, kappa: int) -> PeriodColumns:
        search = self.search
        return PeriodColumns.of(search.snapshot, search.config, search.columns, kappa, self.efficiencies[kappa])

    def chosen(self) -> tuple[Evaluation, bool]:
        """The cheapest pool that reaches the target, else the nearest to it; and whether the target is reached."""
        denied: list[Evaluation] = []
        found = self.feasible(denied)
        return (found, True) if found is not None else (Efforts(self.search, self.period).best(denied), False)

    def feasible(self, denied: list[Evaluation]) -> Evaluation | None:
        """The cheapest pool whose predicted utilisation reaches the target; None if there is none.

        The relations give each period's cheapest pool, and a rehearsal confirms or rejects it. If it rejects all of them,
        larger pools are tried. Adds the rejected ones to `denied`.
        """
        goal = self.search.config.target_utilisation - UTILISATION_TOLERANCE
        if is_small(self.search):
            first = self._chosen_of_every_pool(goal, denied)
            if first is not None or len(denied) < EVERY_POOL_CHECKS_MAX:
                return first
        for raised, dearer in PASSES:
            for found in self._candidates(raised, dearer)[:REHEARSED_MAX]:
                predicted = refined(self.search, found)
                if predicted.utilisation >= goal:
                    return self._trimmed(predicted, goal) if denied else predicted
                denied.append(predicted)
            if not denied:
                break
        return None

    def _chosen_of_every_pool(self, goal: float, denied: list[Evaluation]) -> Evaluation | None:
        """The cheapest of all pools that a rehearsal (and the predictor) confirms; None if `EVERY_POOL_CHECKS_MAX` different
        ones were rejected. Adds the rejected ones to `denied`."""
        for _ in range(PREDICTOR_ROUNDS if self.predictor is not None else 1):
            told: set[tuple[float, ...]] = set()
            for found in pools_in_order(self.search, self.period):
                sign = (found.kappa, *(round(one, 9) for one in found.numbers))
                if sign in told:
                    continue
                if len(told) == EVERY_POOL_CHECKS_MAX:
                    break
                told.add(sign)
                predicted = refined(self.search, found)
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
        """Adds `greedy_gap`: by how much the greedy pool for the same period would cost more."""
        by_greedy = replace(self.search, is_exact=False, proven=[]).best(self.period(found.kappa))
        gap = by_greedy.usd_per_hour / found.usd_per_hour - 1 if by_greedy and found.usd_per_hour > 0 else 0.0
        return replace(found, greedy_gap=max(0.0, gap))

    def _trimmed(self, found: Evaluation, goal: float) -> Evaluation:
        """A cheaper neighbour of a pool that was enlarged to pass the rehearsal; `found` itself if there is none.

        Tries, cheapest first, to drop one or two workers and add at most one; rehearses at most `NEIGHBOURS_MAX` pools.
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
                near = refined(search, replace(near, solver=found.solver))
                if near.utilisation >= goal:
                    return near
        return found

    def _candidates(self, raised: float, dearer: float) -> list[Evaluation]:
        """Each period's cheapest pool for `raised` times the needed rate, ordered by price, then slack, then shorter period.

        Leaves out periods whose pool costs more than `dearer` times the cheapest so far.
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
        return (round(found.usd_per_hour, 9), -round(found.least_slack, 9), found.kappa)

    def _best_at(self, search: Search, kappa: int, ceiling: float) -> Evaluation | None:
        """The best pool of one period. Searches again if the predictor expects a slower broadcast than assumed, up to
        `PREDICTOR_ROUNDS` times; then None."""
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
        """Ratio of the pool's predicted transfer time to the assumed one."""
        assert self.predictor is not None
        learner = self.search.snapshot.learner
        rows = np.flatnonzero(found.chosen).tolist()
        links = [self.search.snapshot.workers[row].link for row in rows]
        size = learner.artifact_bytes(found.kappa)
        latency_s = FluidBroadcast(1.0).latency_s(learner.link, links)
        predicted_s = self.predictor.predict(size, learner.link, links) - latency_s
        return predicted_s / found.point.transfer_s if found.point.transfer_s > 0 else 1.0
