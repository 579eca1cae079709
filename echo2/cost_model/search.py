"""Finds the cheapest pool for one publication period that satisfies all relations.

Relations (2) and (3) couple the pool's rate, its slowest member and the swarm's uplinks. Two thresholds decouple them:
`transfer_s`, a ceiling on the swarm's transfer time, and `batch_s`, a ceiling on R/mu_pool. Given both, each worker is
eligible or not on its own, and the remaining problem is linear (pool). The thresholds tried are the workers' own break
points, thinned to `BATCH_POINTS` and `TRANSFER_POINTS`. Guarantees: a returned pool satisfies every relation, recomputed
from the pool. Leaves to others: which period (planner), noise (activation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from echo2.cost_model.capacity import OperatingPoint, utilisation_background, utilisation_stalled
from echo2.cost_model.columns import Flags, FleetColumns, Floats, PeriodColumns
from echo2.cost_model.pool import MIP_GAP, TOLERANCE, PoolProblem, exact, greedy, lower_bound_usd
from echo2.cost_model.snapshot import DownloadMode, FleetSnapshot, PlanConfig

BATCH_POINTS = 16
TRANSFER_POINTS = 5
# In a small fleet, one worker more or less changes the transfer time a lot, hence finer steps.
SMALL_FLEET, TRANSFER_POINTS_SMALL = 40, 25
GREEDY_GAP_WANTED = 2e-3  # without the exact solver: a pool this close to the lower bound is good enough


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A period and a pool, with the numbers that the relations give for them."""

    chosen: Flags
    point: OperatingPoint
    usd_per_hour: float
    utilisation: float
    rollout_mean_s: float  # mean over the pool, weighted by rate
    rollout_tail_s: float  # likewise, for a group
    rollout_longest_s: float  # likewise; infinite if unknown
    greedy_gap: float = 0.0
    solver: str = ""
    is_refined: bool = False  # utilisation is from a rehearsal, not the closed form

    @property
    def kappa(self) -> int:
        return self.point.kappa

    @property
    def period_s(self) -> float:
        return self.point.kappa * self.point.train_s

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers that identify the pool up to exchange of identical machines."""
        point = self.point
        return (
            self.usd_per_hour, point.throughput, point.transfer_s, point.latency_s, point.rollout_s,
            self.rollout_mean_s, self.rollout_tail_s, self.rollout_longest_s,
        )  # fmt: skip

    def keeps_relations(self, rate_needed: float) -> bool:
        """Whether the rate, broadcast and staleness relations hold, up to rounding."""
        point, roof = self.point, 1 + TOLERANCE
        return (
            point.throughput >= rate_needed * (1 - TOLERANCE)
            and self.keeps_up
            and point.staleness_use_s <= point.staleness_budget_s * roof
        )

    @property
    def keeps_up(self) -> bool:
        """Whether each broadcast finishes before the next version is published; if not, versions queue and grow ever older.

        False for a pool that generates nothing.
        """
        return self.point.throughput > 0 and self.point.transfer_s <= self.period_s * (1 + TOLERANCE)

    @property
    def least_slack(self) -> float:
        """The smaller slack of broadcast and staleness, as a share of its limit."""
        point = self.point
        if point.staleness_budget_s <= 0:
            return -np.inf
        return min(1 - point.transfer_s / self.period_s, 1 - point.staleness_use_s / point.staleness_budget_s)


@dataclass(frozen=True, slots=True)
class Proven:
    """A linear problem already examined. No solution is cheaper than `usd_least`; `found`: the best one found, if any."""

    problem: PoolProblem
    usd_least: float
    found: Evaluation | None


@dataclass(frozen=True, slots=True)
class Search:
    """One planning problem with its columns.

    `proven` saves repeated work: a problem that is harder than a proven one cannot have a cheaper solution.
    """

    snapshot: FleetSnapshot
    config: PlanConfig
    columns: FleetColumns
    is_must: Flags
    rate_needed: float
    is_exact: bool
    proven: list[Proven] = field(default_factory=list)

    def evaluate(self, period: PeriodColumns, chosen: Flags) -> Evaluation:
        """Computes the relations' numbers for a pool, which may violate them."""
        columns, learner = self.columns, self.snapshot.learner
        rows = np.flatnonzero(chosen)
        if len(rows):
            uplinks = learner.link.uplink_bytes_per_s + float(columns.uplink[rows].sum())
            transfer = np.maximum(period.own_s[rows], period.swarm_s(len(rows), uplinks))
            live = transfer + columns.latency_s[rows]
            transfer_s, broadcast_s = float(transfer.max()), float(live.max())
            rollout_s = float((live + columns.tail_s[rows]).max()) - broadcast_s
            rates = period.rate(columns, transfer, self.config.download, rows)
            throughput = float(rates.sum())
            shares = columns.rate[rows] / columns.rate[rows].sum()
            mean_s, tail_s = float(shares @ columns.mean_s[rows]), float(shares @ columns.tail_s[rows])
            longest_s = float(shares @ columns.longest_s[rows])  # infinite if any worker's is unknown
        else:
            transfer_s = broadcast_s = rollout_s = throughput = mean_s = tail_s = longest_s = 0.0
        point = OperatingPoint(
            self.config.staleness_bound, period.kappa, learner.rollouts_per_step, learner.train_s, transfer_s,
            broadcast_s - transfer_s, rollout_s, throughput,
        )  # fmt: skip
        usd_per_hour = float(columns.price[chosen].sum())
        utilisation = self._utilisation(point, throughput, chosen)
        return Evaluation(chosen, point, usd_per_hour, utilisation, mean_s, tail_s, longest_s)

    def _utilisation(self, point: OperatingPoint, throughput: float, chosen: Flags) -> float:
        background = utilisation_background(point)
        if self.config.download is DownloadMode.BACKGROUND:
            return background
        full_rate = float(self.columns.rate[chosen].sum())
        return min(
            background,
            utilisation_stalled(
                point.rollouts_per_step, point.train_s, point.kappa, point.broadcast_s, max(full_rate, throughput)
            ),
        )

    def best(self, period: PeriodColumns, usd_ceiling: float = np.inf) -> Evaluation | None:
        """The cheapest pool that satisfies every relation; None if none is cheaper than `usd_ceiling`."""
        best = self._best_known(period)
        tolerance = MIP_GAP if self.is_exact else GREEDY_GAP_WANTED
        for problem in self._problems(period):
            roof = min(usd_ceiling, best.usd_per_hour if best else np.inf) * (1 - tolerance)
            if any(proof.usd_least >= roof and proof.problem.relaxes(problem) for proof in self.proven):
                continue
            least = lower_bound_usd(problem)
            found: Evaluation | None = None
            if least < roof and least <= problem.price_cap * (1 + TOLERANCE):
                found, least = self._solved(period, problem, least)
                if found is not None and (best is None or found.usd_per_hour < best.usd_per_hour):
                    best = found
            self.proven.append(Proven(problem, least, found))
        return best if best is not None and best.usd_per_hour < usd_ceiling else None

    def _best_known(self, period: PeriodColumns) -> Evaluation | None:
        """The cheapest pool found for another period that also satisfies the relations for this one."""
        known = (proof.found for proof in self.proven if proof.found is not None)
        for found in sorted(known, key=lambda one: one.usd_per_hour):
            again = self.evaluate(period, found.chosen)
            if again.keeps_relations(self.rate_needed):
                return replace(again, greedy_gap=found.greedy_gap, solver=found.solver)
        return None

    def _solved(self, period: PeriodColumns, problem: PoolProblem, least: float) -> tuple[Evaluation | None, float]:
        """Returns the greedy pool, or the integer program's if that may be cheaper, and a lower bound on the price."""
        quick = self._answer(period, greedy(problem))
        if not self.is_exact or (quick is not None and quick.usd_per_hour <= least * (1 + MIP_GAP)):
            return quick, least
        best = self._answer(period, exact(problem))
        if best is None:
            return quick, least
        if quick is None:
            return replace(best, solver="exact"), best.usd_per_hour * (1 - MIP_GAP)
        if quick.usd_per_hour < best.usd_per_hour:
            return replace(quick, solver="exact"), max(least, quick.usd_per_hour * (1 - MIP_GAP))
        gap = quick.usd_per_hour / best.usd_per_hour - 1 if best.usd_per_hour > 0 else 0.0
        return replace(best, solver="exact", greedy_gap=gap), max(least, best.usd_per_hour * (1 - MIP_GAP))

    def _answer(self, period: PeriodColumns, chosen: Flags | None) -> Evaluation | None:
        if chosen is None:
            return None
        found = self.evaluate(period, chosen)
        return found if found.keeps_relations(self.rate_needed) else None

    def _problems(self, period: PeriodColumns) -> Iterator[PoolProblem]:
        """One linear problem for each pair of thresholds worth trying."""
        columns, batch_most_s = self.columns, self.snapshot.learner.rollouts_per_step / self.rate_needed
        for transfer_ceiling_s in self._transfer_ceilings(period):
            transfer = np.maximum(period.own_s, transfer_ceiling_s)
            value = period.rate(columns, transfer, self.config.download)
            in_time = columns.is_available & (transfer <= period.period_s * (1 + TOLERANCE))
            batch_room = period.staleness_budget_s - transfer - columns.latency_s - columns.tail_s
            for batch_s in self._batch_ceilings(batch_room[in_time], batch_most_s):
                eligible = in_time & (batch_room >= batch_s * (1 - TOLERANCE))
                need = self.snapshot.learner.rollouts_per_step / batch_s
                if float(value[eligible].sum()) < need:
                    continue
                yield self._problem(period, transfer_ceiling_s, need, value, eligible)
                if bool(eligible[columns.is_available].all()):
                    break  # all workers are eligible already: a faster pool would admit no more

    def _problem(
        self, period: PeriodColumns, transfer_ceiling_s: float, need: float, value: Floats, eligible: Flags
    ) -> PoolProblem:
        columns, config = self.columns, self.config
        fair_uplink = period.artifact_bytes / (transfer_ceiling_s * period.efficiency)
        return PoolProblem(
            price=columns.price,
            value=value,
            need=need,
            burden=fair_uplink - columns.uplink,
            burden_room=self.snapshot.learner.link.uplink_bytes_per_s,
            price_cap=config.usd_per_hour_cap or np.inf,
            is_candidate=eligible,
            is_must=self.is_must,
            provider=columns.provider,
            provider_max=np.array([most for _, most in config.provider_workers_max], dtype=np.int64),
        )

    def _transfer_ceilings(self, period: PeriodColumns) -> list[float]:
        """Ceilings on the transfer time, from where the swarm limits no pool down to the seed's own time, the minimum."""
        columns = self.columns
        if not columns.is_available.any():
            return []
        uplink_least = float(columns.uplink[columns.is_available].min())
        free_s = period.artifact_bytes / (period.efficiency * uplink_least)
        most_s = min(max(free_s, period.seed_s), max(period.period_s, period.seed_s))
        if most_s <= period.seed_s * (1 + TOLERANCE):
            return [period.seed_s]
        points = TRANSFER_POINTS_SMALL if self.is_exact and len(columns) <= SMALL_FLEET else TRANSFER_POINTS
        return [float(one) for one in np.geomspace(most_s, period.seed_s, points)]

    def _batch_ceilings(self, batch_room: Floats, batch_most_s: float) -> list[float]:
        """Ceilings on R/mu: the one the needed rate implies, then the lower ones at which slower workers become eligible."""
        tighter = np.unique(batch_room[(batch_room > 0) & (batch_room < batch_most_s)])[::-1]
        if len(tighter) > BATCH_POINTS:
            tighter = tighter[np.linspace(0, len(tighter) - 1, BATCH_POINTS).round().astype(np.int64)]
        return [batch_most_s, *tighter.tolist()]
