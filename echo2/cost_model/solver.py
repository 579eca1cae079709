"""Finds the cheapest pool that reaches the target, or the one that comes nearest: one integer program, confirmed by rehearsal.

    minimise  sum price_k x_k    subject to    sum value_k x_k >= need,   sum burden_k x_k <= room,
                                               sum price_k x_k <= cap,       0 <= x_k <= count_k whole

x_k machines of kind k. Relations (2) and (3) couple the pool's rate, its slowest member and the swarm's uplinks; two thresholds
decouple them: a ceiling on the swarm's transfer time and one on R/mu_pool. Given both, each kind is eligible or not on its own.
`burden` is the uplink that a machine needs from the swarm less what it contributes. With rate and price exchanged, the same program
says how near to the target a pool can come. Every size of fleet takes the same way: of many kinds, those whose price per rate
decides nothing are fixed first, with a lower bound on the price. Deterministic; a returned pool was rehearsed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from echo2.cost_model.plan import UTILISATION_TOLERANCE
from echo2.cost_model.rehearsal import TAKES, confirmed, rehearsed
from echo2.cost_model.relations import TOLERANCE, Counts, Evaluation, Flags, FleetModel, Floats

MIP_GAP = 1e-3  # a tenth of a percent of the price: below what prices are known to
MIP_NODES_MAX = 500  # limits nodes, not seconds, so that plans do not depend on the machine's speed
CORE_KINDS = 50
"""Kinds that the integer program decides; with more, the others' places follow from the price of rate, within `MIP_GAP` or
nearly."""
PENALTIES_TRIED = 24  # for the swarm's share: a factor of 4^24, or a bisection to a ten-millionth
BATCH_POINTS, TRANSFER_POINTS, TRANSFER_POINTS_SMALL, SMALL_FLEET = 8, 5, 12, 40
"""Thresholds tried. In a small fleet, one machine more or less changes the transfer time a lot, hence finer steps."""
UTILISATION_LEAST = 1e-4  # keeps ratios of utilisations finite
STEP = UTILISATION_TOLERANCE
"""Best efforts this near to one another count as equal, and the cheaper is taken: a rehearsal is no more accurate."""
QUEUE_SHARE = 0.97
"""Share of the utilisation that counts if versions wait for the links: they go out late, and some pushes are wasted."""
# 80 take one to two seconds; 6 take 0.1 s, half of what the plan of a large fleet may take.
REHEARSALS_MAX, REHEARSALS_LARGE_MAX, FIRST_LOOKS, FINALISTS = 80, 6, 24, 5
REHEARSED_MACHINES = 16_000  # machines times rehearsals of a search for the cheapest pool, between these two
COMPOSITIONS_MAX = 4096
"""Up to so many pools, up to exchange of equal machines, are tried in the order of their price instead of by the program."""
EVALUATIONS_MAX = 2048
"""Up to so many pools and periods are compared by the relations where none reaches the target: 0.3 ms each."""
RAISE = (
    0.6  # share of a shortage by which more rate is asked for: with all of it the next pool was up to a tenth too dear
)
VAIN_MAX = 3
"""Rejections in a row of one period that more rate did not help by `STEP`: what it lacks is then something else."""
CHANCE = 0.02
"""A single rehearsal may be off by so much: a pool that misses the target by less is rehearsed again before it is rejected."""
BEST_PACES, WORTH_A_LOOK = 24, 0.6
"""Best efforts that are rehearsed: the best by the relations, and those that the relations see not too far below them."""
SPARES = (1.1, 1.5, 1.8, 2.2, 2.6)
"""Rates tried below the most, over the rate that was of use there: lengths that vary want some to spare, and a tight S more."""
SHARES = (1.0, 0.99, 0.95, 0.88)
"""Shares of the most rate at which the cheapest pool is rehearsed as well: the relations are stricter than a rehearsal."""


@dataclass(frozen=True, slots=True)
class PoolProgram:
    """One integer program over the kinds. `burden_room`: what the learner and the workers that are in any case contribute."""

    price: Floats
    value: Floats
    need: float
    burden: Floats
    burden_room: float
    price_cap: float
    count: Counts
    answer: Counts | None = None

    def relaxes(self, other: PoolProgram) -> bool:
        """Whether every solution of `other`, over the same kinds and caps, also solves this one, for no more."""
        return (
            self.need <= other.need * (1 + TOLERANCE)
            and not bool((other.count > self.count).any())
            and (self.swarm_is_free or bool((self.burden <= other.burden + TOLERANCE).all()))
            and bool((self.value >= other.value * (1 - TOLERANCE)).all())
            and bool((self.price <= other.price * (1 + TOLERANCE)).all())
        )

    def admits(self, other: PoolProgram) -> bool:
        """Whether the answer to `other` also solves this one, for no more. If `other` relaxes this one, it is this one's best
        answer too, and nothing is left to solve."""
        counts = other.answer
        return (
            counts is not None
            and not bool((counts > self.count).any())
            and float(self.value @ counts) >= self.need * (1 - TOLERANCE)
            and (self.swarm_is_free or float(self.burden @ counts) <= self.burden_room)
            and float(self.price @ counts) <= min(self.price_cap, float(other.price @ counts)) * (1 + TOLERANCE)
        )

    @property
    def swarm_is_free(self) -> bool:
        """Whether every machine contributes at least as much uplink to the swarm as it needs."""
        return float(self.burden[self.count > 0].max(initial=-1.0)) <= TOLERANCE * max(1.0, abs(self.burden_room))

    def ordered(self, penalty: float) -> tuple[Counts, Floats]:
        """Kinds by price per rate, `penalty` per byte/s of burden included, and the rate that they sum up to."""
        kinds = np.flatnonzero((self.count > 0) & (self.value > 0))
        costs = self.price[kinds] + penalty * self.burden[kinds]
        kinds = kinds[np.argsort(costs / self.value[kinds], kind="stable")]
        return kinds, np.cumsum(self.value[kinds] * self.count[kinds])

    def relaxed(self, penalty: float) -> tuple[float, float, int, Counts]:
        """The program with fractions of machines and the burden priced: a lower bound on the price, the burden over the room, the
        place of the last kind taken, and the kinds in order."""
        kinds, rising = self.ordered(penalty)
        costs = self.price[kinds] + penalty * self.burden[kinds]
        last = int(np.searchsorted(rising, self.need * (1 - TOLERANCE)))
        if last == len(kinds):
            return math.inf, math.inf, last, kinds
        before = float(rising[last - 1]) if last else 0.0
        part = (self.need - before) / float(self.value[kinds[last]])
        amount = np.append(self.count[kinds[:last]].astype(np.float64), part)
        used = kinds[: last + 1]
        over = float(amount @ self.burden[used]) - self.burden_room
        bound = float(amount @ costs[: last + 1]) - penalty * self.burden_room
        return bound, over, last, kinds

    def solve(self, roof: float) -> tuple[Counts | None, float]:
        """Machines of each kind at the least price, None if there is no solution below `roof`; and a lower bound on the price."""
        if self.need <= 0:
            return np.zeros_like(self.count), 0.0
        bound, over, last, kinds = self.relaxed(0.0)
        roof = min(roof, self.price_cap * (1 + TOLERANCE))
        if not bound < roof:
            return None, bound
        if over > 0 and len(kinds) > CORE_KINDS:  # the swarm's share in the price decides which are fixed
            low, high = 0.0, float(self.price.max()) / max(float(np.abs(self.burden).max()), 1e-9)
            trials = PENALTIES_TRIED
            while trials and self.relaxed(high)[1] > 0:
                low, high, trials = high, high * 4, trials - 1
            penalty = high
            for _ in range(trials):
                usd, over, _, _ = self.relaxed(penalty)
                bound = max(bound, usd) if math.isfinite(usd) else bound
                low, high = (penalty, high) if over > 0 else (low, penalty)
                if high - low < 1e-3 * high:
                    break
                penalty = (low + high) / 2
            _, _, last, kinds = self.relaxed(high)
            if not bound < roof:
                return None, bound
        first = max(0, last - CORE_KINDS // 2) if len(kinds) > CORE_KINDS else 0
        fixed = self._all_of(kinds[:first])
        fixed_usd = float(self.price @ fixed)
        gap = min(0.5, MIP_GAP * bound / max(bound - fixed_usd, 1e-9)) if bound > 0 else MIP_GAP
        counts = self._integers(fixed, kinds[first : first + CORE_KINDS], gap)
        if counts is None:
            return None, bound
        if len(kinds) <= CORE_KINDS:  # then the program was solved whole
            bound = max(bound, float(self.price @ counts) * (1 - MIP_GAP))
        is_dear = fixed_usd + float(self.price @ counts) > self.price_cap * (1 + TOLERANCE)
        return (None if is_dear else fixed + counts), bound

    def most(self) -> Counts | None:
        """Machines of each kind with the most rate that the cap and the swarm allow, at the least price of equals."""
        kinds, _ = self.ordered(0.0)
        spent = np.cumsum(self.price[kinds] * self.count[kinds])
        if self.swarm_is_free and (not len(kinds) or spent[-1] <= self.price_cap):
            return self.count.copy()
        first = max(0, int(np.searchsorted(spent, self.price_cap)) - CORE_KINDS // 2) if len(kinds) > CORE_KINDS else 0
        fixed = self._all_of(kinds[:first])
        core = kinds[first : first + CORE_KINDS]
        rates = self.value * self.count
        gap = MIP_GAP * (1 + float(rates[kinds[:first]].sum()) / max(0.5 * float(rates[core].sum()), 1e-12))
        counts = self._integers(fixed, core, min(0.1, 5 * gap if first else gap), True)
        return None if counts is None else fixed + counts

    def _all_of(self, kinds: Counts) -> Counts:
        every = np.zeros_like(self.count)
        every[kinds] = self.count[kinds]
        return every

    def _integers(self, fixed: Counts, core: Counts, gap: float, is_most: bool = False) -> Counts | None:
        """The integer program over `core` within `gap` of its optimum, beside the machines that are fixed already: the least price
        for the need, or the most rate for the cap."""
        # Importing it takes longer than planning a small fleet.
        from scipy.optimize import Bounds, LinearConstraint, milp

        if not len(core):
            return None
        price_scale, value_scale = max(float(self.price[core].max()), 1e-9), max(float(self.value[core].max()), 1e-12)
        price, value = self.price[core] / price_scale, self.value[core] / value_scale
        rows, low, high = [], [], []

        def limit(row: Floats, least: float, most: float) -> None:
            rows.append(row)
            low.append(least)
            high.append(most)

        if not is_most:
            limit(value, (self.need - float(self.value @ fixed)) / value_scale, np.inf)
        elif math.isfinite(self.price_cap):
            limit(price, -np.inf, (self.price_cap * (1 + TOLERANCE) - float(self.price @ fixed)) / price_scale)
        if not self.swarm_is_free:
            scale = max(float(np.abs(self.burden[core]).max()), 1e-9)
            limit(self.burden[core] / scale, -np.inf, (self.burden_room - float(self.burden @ fixed)) / scale)
        if not rows:
            return self._all_of(core)
        answer = milp(
            1e-6 * price - value if is_most else price,
            constraints=LinearConstraint(np.vstack(rows), low, high),
            integrality=np.ones(len(core)),
            bounds=Bounds(0, self.count[core]),
            options={"mip_rel_gap": gap, "node_limit": MIP_NODES_MAX},
        )
        if answer.x is None:
            return None
        counts = np.zeros_like(self.count)
        counts[core] = np.round(np.asarray(answer.x)).astype(np.int64)
        return counts


@dataclass
class Solver:
    """One planning problem. `is_must`: workers that are in the pool at any price."""

    fleet: FleetModel
    is_must: Flags
    _proven: list[tuple[PoolProgram, float]] = field(default_factory=list)
    _by_price: dict[int, Iterator[Evaluation]] = field(default_factory=dict)

    # ---- the cheapest pool

    def cheapest(self, goal: float) -> tuple[Evaluation | None, list[Evaluation]]:
        """The cheapest pool that keeps the relations and whose rehearsal reaches `goal`, and those whose rehearsal did not.
        Takes each period's cheapest pool, cheapest first. A small fleet has its next pool by price tried after a rejection; a
        large one, or one with many rejections, is asked for more rate, under periods up to twice as long or short as well: what
        the relations overlook there is much the same."""
        rejected: list[Evaluation] = []
        learner = self.fleet.snapshot.learner
        if learner.rewards_per_s * learner.train_s < goal * learner.rollouts_per_step:
            return None, rejected  # no pool gets more rewards than that
        needs = dict.fromkeys(self.fleet.config.kappas, self.fleet.rate_needed)
        waiting: list[Evaluation] = []
        best, vain = dict.fromkeys(needs, 0.0), dict.fromkeys(needs, 0)
        ceiling = math.inf
        for kappa in needs:
            if (pool := self.best_at(kappa, needs[kappa], ceiling)) is not None:
                waiting.append(pool)
                ceiling = min(ceiling, pool.usd_per_hour * 1.5 + TOLERANCE)
        most = max(REHEARSALS_LARGE_MAX, min(REHEARSALS_MAX // 2, REHEARSED_MACHINES // len(self.fleet)))
        while waiting and len(rejected) < most:
            pool = min(waiting, key=lambda pool: (round(pool.usd_per_hour, 9), -round(pool.least_slack, 9), pool.kappa))
            waiting.remove(pool)
            if pool.point.throughput >= needs[pool.kappa] * (1 - TOLERANCE):  # no later rejection says otherwise
                trial = rehearsed(self.fleet, pool)
                if trial.utilisation >= goal - CHANCE:
                    trial = confirmed(self.fleet, trial)
                if trial.utilisation >= goal:
                    return trial, rejected
                rejected.append(trial)
                if self._compositions is None or len(rejected) >= most * 3 // 4:
                    short = goal / max(trial.utilisation, 0.5) - 1
                    more = max(needs[pool.kappa], pool.point.throughput) * (1 + max(1e-4, RAISE * short))
                    alike = (kappa for kappa in needs if pool.kappa / 2 <= kappa <= 2 * pool.kappa)
                    needs |= {kappa: max(needs[kappa], more) for kappa in alike}
                    vain[pool.kappa] = 0 if trial.utilisation > best[pool.kappa] + STEP else vain[pool.kappa] + 1
                    best[pool.kappa] = max(best[pool.kappa], trial.utilisation)
            if vain[pool.kappa] >= VAIN_MAX:
                continue
            if (again := self.best_at(pool.kappa, needs[pool.kappa])) is not None:
                waiting.append(again)
        return None, rejected

    def best_at(self, kappa: int, need: float, roof: float = math.inf) -> Evaluation | None:
        """The cheapest pool below `roof` USD/h that keeps the relations under one period."""
        if self._compositions is not None:
            pools = self._by_price.setdefault(kappa, self._in_order(kappa))
            return next((pool for pool in pools if pool.keeps_relations(need)), None)
        best: Evaluation | None = None
        for program in self._programs(kappa, need):
            least = min(roof, best.usd_per_hour if best else math.inf) * (1 - MIP_GAP)
            if any(bound >= least * (1 - TOLERANCE) and known.relaxes(program) for known, bound in self._proven):
                continue
            solved = (known.answer for known, _ in self._proven if program.admits(known) and known.relaxes(program))
            if (counts := next(solved, None)) is None:
                fixed_usd = float(self.fleet.period(kappa).price[self.is_must].sum())
                counts, bound = program.solve(least - fixed_usd)
                self._proven.append((replace(program, answer=counts), bound + fixed_usd))
            if counts is None:
                continue
            candidate = self.fleet.evaluate(kappa, self._pool(counts))
            if candidate.keeps_relations(need) and (best is None or candidate.usd_per_hour < best.usd_per_hour):
                best = candidate
        return best if best is not None and best.usd_per_hour < roof else None

    # ---- small fleets

    @cached_property
    def _compositions(self) -> Counts | None:
        """Every number of machines of each kind; None if too many."""
        _, most, _ = self._members
        if 1 << len(most) > COMPOSITIONS_MAX or (size := math.prod((most + 1).tolist())) > COMPOSITIONS_MAX:
            return None
        return np.indices(tuple((most + 1).tolist())).reshape(len(most), size).T  # one row of nobody if all are pinned

    def _affordable(self, kappa: int) -> Counts:
        """The compositions within the cap, the cheapest first."""
        price, rows, grid = self.fleet.period(kappa).price, self._members[0], self._compositions
        assert grid is not None, "asked for small fleets alone"
        usd = grid @ price[rows] + float(price[self.is_must].sum())
        order = np.argsort(usd, kind="stable")
        return np.asarray(grid[order[usd[order] <= self.fleet.usd_per_hour_most]])

    def _in_order(self, kappa: int) -> Iterator[Evaluation]:
        """The pools that may keep the relations, the cheapest first. A bound for all at once leaves few to evaluate."""
        fleet, period, rows, compositions = (
            self.fleet,
            self.fleet.period(kappa),
            self._members[0],
            self._affordable(kappa),
        )
        learner, must, everyone = fleet.snapshot.learner, self.is_must, fleet.is_available | self.is_must
        rate = compositions @ fleet.rate[rows] + float(fleet.rate[must].sum())
        uplink = compositions @ fleet.uplink[rows] + float(fleet.uplink[must].sum()) + learner.link.uplink_bytes_per_s
        count = compositions.sum(axis=1) + np.count_nonzero(must)
        common_s = np.maximum(period.seed_s, count * period.artifact_bytes / (uplink * period.efficiency))
        least_s = float((fleet.latency_s + fleet.group_s)[everyone].min(initial=math.inf))
        use_s = common_s + least_s + learner.rollouts_per_step / np.maximum(rate, 1e-12)
        budget_s = (fleet.config.staleness_bound - kappa + 1) * learner.train_s
        may = (rate >= fleet.rate_needed * (1 - TOLERANCE)) & (common_s <= period.period_s * (1 + TOLERANCE))
        for counts in compositions[may & (use_s <= budget_s * (1 + TOLERANCE))]:
            yield fleet.evaluate(kappa, self._pool(counts))

    # ---- the kinds

    @cached_property
    def _members(self) -> tuple[Counts, Counts, Counts]:
        """First row of each kind, machines free to choose of each, and all free rows by kind."""
        fleet = self.fleet
        free = np.flatnonzero(fleet.is_available & ~self.is_must)
        kinds = fleet.kind[free]
        rows = free[np.argsort(kinds, kind="stable")]
        _, first, counts = np.unique(fleet.kind[rows], return_index=True, return_counts=True)
        return rows[first] if len(rows) else rows, counts.astype(np.int64), rows

    def _pool(self, counts: Counts) -> Flags:
        _, most, rows = self._members
        starts = np.concatenate(([0], np.cumsum(most)[:-1])) if len(most) else most
        chosen = self.is_must.copy()
        place = np.arange(len(rows)) - np.repeat(starts, most)
        chosen[rows[place < np.repeat(counts, most)]] = True
        return chosen

    # ---- the programs

    def _programs(self, kappa: int, need: float) -> Iterator[PoolProgram]:
        """One program for each pair of thresholds worth trying."""
        fleet, period = self.fleet, self.fleet.period(kappa)
        if not self._members[0].size and not self.is_must.any():
            return
        batch, steps = fleet.snapshot.learner.rollouts_per_step, fleet.config.staleness_bound - kappa + 1
        train_s = fleet.snapshot.learner.train_s
        for ceiling_s in self._transfer_ceilings(kappa, 1.0):
            transfer_s = np.maximum(period.own_s, ceiling_s)
            value = fleet.working_rate(transfer_s, period.period_s)
            in_time = fleet.is_available & (transfer_s <= kappa * train_s * (1 + TOLERANCE))
            batch_room_s = steps * train_s - transfer_s - fleet.latency_s - fleet.group_s
            for batch_s in self._batch_ceilings(batch_room_s[in_time], batch / need):
                eligible = in_time & (batch_room_s >= batch_s * (1 - TOLERANCE))
                if float(value[eligible].sum()) < batch / batch_s * (1 - TOLERANCE):
                    continue
                yield self._program(kappa, ceiling_s, batch / batch_s, value, eligible)
                if bool(eligible[fleet.is_available].all()):
                    break  # all workers are eligible already: a faster pool would admit no more

    def _program(self, kappa: int, ceiling_s: float, need: float, value: Floats, eligible: Flags) -> PoolProgram:
        fleet, config, must = self.fleet, self.fleet.config, self.is_must
        period = fleet.period(kappa)
        rows, counts, _ = self._members
        burden = period.artifact_bytes / (ceiling_s * period.efficiency) - fleet.uplink
        return PoolProgram(
            price=period.price[rows],
            value=value[rows],
            need=need - float(value[must & eligible].sum()),
            burden=burden[rows],
            burden_room=fleet.snapshot.learner.link.uplink_bytes_per_s - float(burden[must].sum()),
            price_cap=config.usd_per_hour_cap - float(period.price[must].sum()),
            count=np.where(eligible[rows], counts, 0),
        )

    def _transfer_ceilings(self, kappa: int, pace: float) -> list[float]:
        """Ceilings on the transfer time, from where the swarm limits no pool down to the seed's own time, the minimum."""
        fleet, period = self.fleet, self.fleet.period(kappa)
        if not fleet.is_available.any():
            return []
        uplink_least = float(fleet.uplink[fleet.is_available].min())
        free_s = period.artifact_bytes / (period.efficiency * uplink_least)
        most_s = min(max(free_s, period.seed_s), max(period.period_s / pace, period.seed_s))
        if most_s <= period.seed_s * (1 + TOLERANCE):
            return [period.seed_s]
        points = TRANSFER_POINTS_SMALL if len(fleet) <= SMALL_FLEET else TRANSFER_POINTS
        return [float(ceiling) for ceiling in np.geomspace(most_s, period.seed_s, points)]

    def _batch_ceilings(self, batch_room_s: Floats, batch_most_s: float) -> list[float]:
        """Ceilings on R/mu: the one the needed rate implies, then the lower ones at which slower workers become eligible."""
        tighter = np.unique(batch_room_s[(batch_room_s > 0) & (batch_room_s < batch_most_s)])[::-1]
        if len(tighter) > BATCH_POINTS:
            tighter = tighter[np.linspace(0, len(tighter) - 1, BATCH_POINTS).round().astype(np.int64)]
        return [batch_most_s, *tighter.tolist()]

    # ---- the best effort

    def nearest(self, known: list[Evaluation]) -> Evaluation:
        """If no pool reaches the target: of those that come within `STEP` of the nearest, the one whose versions wait the shortest
        for the links, then the cheapest. `known`: pools that were rehearsed already."""
        tried = {self._sign(pool): pool for pool in known}
        is_large = len(self.fleet) > SMALL_FLEET
        most = REHEARSALS_LARGE_MAX // 2 if is_large else REHEARSALS_MAX
        best: tuple[float, Evaluation, PoolProgram | None] | None = None
        for candidate, program in self._candidates():
            if len(tried) - len(known) >= (most if is_large else FIRST_LOOKS):
                break
            if self._sign(candidate) not in tried:
                tried[self._sign(candidate)] = trial = rehearsed(self.fleet, candidate)
                if best is None or self._counted(trial) > best[0]:
                    best = self._counted(trial), trial, program
        if is_large and best is not None and best[2] is not None:
            for pool in self._thinner(best[1], best[2]):
                tried[self._sign(pool)] = pool
                if self._counted(pool) >= best[0] * (1 - STEP):
                    break  # the next are dearer
        if not is_large:
            self._climb(tried, most + len(known))
        preferred = self._preferred(tried.values())
        if is_large:  # so many rollouts that chance averages out, and few pools to be lucky among
            is_busy = preferred[0].utilisation >= self.fleet.config.target_utilisation - UTILISATION_TOLERANCE
            return confirmed(self.fleet, preferred[0]) if is_busy else preferred[0]
        nearest = sorted(tried.values(), key=self._counted)[-FINALISTS:]  # a first rehearsal may have been unlucky
        finalists = {id(pool): pool for pool in (*preferred[:FINALISTS], *nearest)}
        return self._preferred([rehearsed(self.fleet, pool, TAKES) for pool in finalists.values()])[0]

    def _climb(self, tried: dict[tuple[float, ...], Evaluation], most: int) -> None:
        """Rehearses what is one machine or one step of the period away from the best so far, then from the next best, until `most`
        are tried: the relations see which worker holds a version back, and not what the others then are worth."""
        visited = set[tuple[float, ...]]()
        while left := [sign for sign in tried if sign not in visited]:
            best = max(left, key=lambda sign: self._counted(tried[sign]))
            visited.add(best)
            for pool in self._beside(tried[best]):
                if len(tried) >= most:
                    return
                if self._sign(pool) not in tried:
                    tried[self._sign(pool)] = rehearsed(self.fleet, pool)

    def _beside(self, start: Evaluation) -> Iterator[Evaluation]:
        """The pools with one machine more, less or another, and the periods one step longer and shorter."""
        fleet, chosen = self.fleet, start.chosen
        outside, inside = fleet.is_available & ~chosen, chosen & ~self.is_must
        comes = [-1, *np.flatnonzero(outside)[np.unique(fleet.kind[outside], return_index=True)[1]].tolist()]
        goes = [-1, *np.flatnonzero(inside)[np.unique(fleet.kind[inside], return_index=True)[1]].tolist()]
        at = (kappas := fleet.config.kappas).index(start.kappa)
        for kappa in (*kappas[max(0, at - 1) : at], *kappas[at + 1 : at + 2]):
            if float(fleet.period(kappa).price[chosen].sum()) <= fleet.usd_per_hour_most:
                yield fleet.evaluate(kappa, chosen)
        for new, old in sorted(itertools.product(comes, goes), key=lambda pair: min(pair) >= 0):
            pool = chosen.copy()
            pool[[row for row in (new, old) if row >= 0]] ^= True
            if pool.any() and float(fleet.period(start.kappa).price[pool].sum()) <= fleet.usd_per_hour_most:
                yield fleet.evaluate(start.kappa, pool)

    def _thinner(self, pool: Evaluation, program: PoolProgram) -> Iterator[Evaluation]:
        """Cheaper pools of the same workers: with the rate that the learner was seen to use, and some to spare. The relations alone
        are too strict to say how much of it is of use."""
        learner = self.fleet.snapshot.learner
        used = pool.utilisation * learner.rollouts_per_step / learner.train_s
        for spare in SPARES:
            if used * spare < pool.point.throughput:
                counts, _ = replace(program, need=used * spare + program.need).solve(math.inf)
                if counts is not None:
                    yield rehearsed(self.fleet, self.fleet.evaluate(pool.kappa, self._pool(counts)))

    def _counted(self, pool: Evaluation) -> float:
        """The utilisation that counts: below nothing for an empty pool, and nothing beyond the target."""
        if not pool.chosen.any():
            return -1.0
        reached = pool.utilisation * (1.0 if pool.keeps_up else QUEUE_SHARE)
        return max(UTILISATION_LEAST, min(reached, self.fleet.config.target_utilisation))

    def _preferred(self, pools: Iterable[Evaluation]) -> list[Evaluation]:
        """Those that come within `STEP` of the one that reaches most, the best first."""
        pools = list(pools)
        best = max(self._counted(pool) for pool in pools)
        least = best - STEP * abs(best)  # an empty pool counts -1

        def rank(pool: Evaluation) -> tuple[float, ...]:
            queue = max(1.0, round(pool.point.transfer_s / pool.period_s, 2))
            return queue, round(pool.usd_per_hour, 9), -round(pool.least_slack, 6), pool.kappa

        return sorted((pool for pool in pools if self._counted(pool) >= least), key=rank)

    def _sign(self, pool: Evaluation) -> tuple[float, ...]:
        """Identifies a pool under a period up to exchange of equal machines."""
        return (pool.kappa, *np.sort(self.fleet.kind[np.flatnonzero(pool.chosen)]).tolist())

    def _candidates(self) -> Iterator[tuple[Evaluation, PoolProgram | None]]:
        """Pools worth a rehearsal, by the pace that the relations allow: every pool of a small fleet; else, of the workers that
        deliver a group within each of some times, those with the most rate, and the cheapest with nearly as much."""
        fleet, kappas = self.fleet, self.fleet.config.kappas
        if self._compositions is not None and len(self._compositions) * len(kappas) <= EVALUATIONS_MAX:
            pools = [
                fleet.evaluate(kappa, self._pool(counts)) for kappa in kappas for counts in self._affordable(kappa)
            ]
            by_pace = sorted(pools, key=lambda pool: (-round(pool.utilisation, 4), pool.usd_per_hour, pool.kappa))
            # The relations are too strict for long periods: half of the looks go to the pools with the most rate.
            by_rate = sorted(pools, key=lambda pool: -min(fleet.rate_needed, float(fleet.rate[pool.chosen].sum())))
            yield from ((pool, None) for pair in zip(by_pace, by_rate, strict=True) for pool in pair)
            yield fleet.evaluate(kappas[0], self.is_must), None
            return
        batch, train_s = fleet.snapshot.learner.rollouts_per_step, fleet.snapshot.learner.train_s
        is_large = len(fleet) > SMALL_FLEET
        candidates: list[tuple[Evaluation, PoolProgram]] = []
        known: set[tuple[int, bytes, float]] = set()
        busy = min(1.0, float(fleet.rate[fleet.is_available].sum()) * train_s / batch)
        for kappa in kappas:
            period = fleet.period(kappa)
            ceilings_s = self._transfer_ceilings(kappa, max(busy, UTILISATION_LEAST) if is_large else UTILISATION_LEAST)
            for ceiling_s in ceilings_s if not is_large else ceilings_s[::2]:
                transfer_s = np.maximum(period.own_s, ceiling_s)
                value = fleet.working_rate(transfer_s, period.period_s / max(busy, UTILISATION_LEAST))
                lasts_s = transfer_s + fleet.latency_s + fleet.group_s
                times_s = np.unique(lasts_s[fleet.is_available])[::-1]
                points = min(len(times_s), 2 if is_large else BATCH_POINTS)
                for time_s in times_s[np.linspace(0, len(times_s) - 1, points).round().astype(np.int64)].tolist():
                    program = self._program(kappa, ceiling_s, 0.0, value, fleet.is_available & (lasts_s <= time_s))
                    key = (kappa, program.count.tobytes(), 0.0 if program.swarm_is_free else ceiling_s)
                    if key in known:
                        continue
                    known.add(key)
                    counts = program.most()
                    if counts is not None:
                        candidates.append((fleet.evaluate(kappa, self._pool(counts)), program))
        candidates.sort(key=lambda entry: (-round(entry[0].utilisation, 4), entry[0].usd_per_hour, entry[0].kappa))
        for share in SHARES:
            for most, program in candidates[:BEST_PACES]:
                if most.utilisation < WORTH_A_LOOK * candidates[0][0].utilisation:
                    continue
                if share == 1.0:
                    yield most, program
                    continue
                need = share * min(most.point.throughput, batch / max(most.point.pace_s, train_s))
                counts, _ = replace(program, need=need + program.need).solve(math.inf)
                if counts is not None:
                    yield fleet.evaluate(most.kappa, self._pool(counts)), program
        yield fleet.evaluate(kappas[0], self.is_must), None
