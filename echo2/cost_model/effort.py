"""Finds the period and pool nearest to the target if none satisfies the relations and reaches it.

Guarantees: the objective is that of every plan: first as near to the target utilisation as possible, in steps of 1 %; then,
if versions wait for the links, the shortest wait; then the least USD/h. Pools respect the price cap (apart from pinned
workers) and the providers' limits. Bounded work: at most `REHEARSALS_MAX` rehearsals. How it searches: in a fleet of four or
five it rehearses every pool under every period. In a small fleet it ranks all pools by the relations; in a larger one,
prefixes of several orders. It rehearses the most promising, then climbs from the best few over their neighbours: one worker
more, fewer or exchanged, or the next period. Leaves to others: pools that satisfy the relations (search, exhaustive).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from echo2.cost_model.columns import Flags, Floats, PeriodColumns
from echo2.cost_model.exhaustive import EveryPool, is_small
from echo2.cost_model.forecast import confirmed, refined
from echo2.cost_model.pool import TOLERANCE, within_provider_limits
from echo2.cost_model.search import Evaluation, Search
from echo2.cost_model.snapshot import STALENESS_BOUND_MAX, DownloadMode

STEP = 0.01
"""Relative step in which utilisations are compared: a rehearsal is hardly more accurate."""
QUEUE_SHARE = 0.97
"""Share of the utilisation that counts if versions wait for the links: they go out late, and some pushes are wasted."""
UTILISATION_LEAST = 1e-4
REHEARSALS_MAX = 200
STARTS = 6
FINALISTS = 6
REHEARSALS_LARGE_MAX = 6
LARGE_FLEET, HUGE_FLEET = 64, 500
PICKS_PER_KAPPA = 4
HALVINGS = 12
GROWTH_MOST = 0.95
PASSED_OVER_MAX = 50  # times that workers too expensive for the rest of the cap are skipped


def steps_short(target: float, found: Evaluation) -> int:
    """How many steps of utilisation `found` stays below the target: the first part of the objective."""
    promised = found.utilisation * (1.0 if found.keeps_up else QUEUE_SHARE)
    return max(0, math.ceil(math.log(target / max(promised, UTILISATION_LEAST)) / STEP - 0.5))


@dataclass(slots=True)
class Efforts:
    """One search for the best effort.

    tried: rehearsed evaluations by period and pool, where pools of identical machines count as one.
    """

    search: Search
    period: Callable[[int], PeriodColumns]
    tried: dict[tuple[float, ...], Evaluation] = field(default_factory=dict)
    rehearsals: int = 0

    def best(self, known: list[Evaluation]) -> Evaluation:
        """The best of `known` (already rehearsed), the candidates and their neighbours."""
        for found in known:
            self.tried[self._sign(found)] = found
        is_large = len(self.search.columns) > LARGE_FLEET
        most = REHEARSALS_LARGE_MAX if is_large else REHEARSALS_MAX
        for found in self._everything() if self._is_tiny else self._candidates(most // 3 + 2):
            self._rehearsed(found)
        for begin in sorted(self.tried.values(), key=self._rank)[: 0 if is_large else STARTS]:
            self._climb(begin, most)
        finalists = sorted(self.tried.values(), key=self._rank)[: 1 if is_large else FINALISTS]
        return min((confirmed(self.search, one) for one in finalists), key=self._rank) if not is_large else finalists[0]

    def _climb(self, best: Evaluation, most: int) -> None:
        """Moves to the best neighbour until none is better or `most` rehearsals are spent."""
        while self.rehearsals < most:
            near = [self._rehearsed(one) for one in self._neighbours(best, most - self.rehearsals)]
            better = min(near, key=self._rank, default=best)
            if self._rank(better) >= self._rank(best):
                return
            best = better

    def _rank(self, found: Evaluation) -> tuple[float, ...]:
        """The objective, most important part first. An empty pool comes last."""
        short = steps_short(self.search.config.target_utilisation, found)
        is_idle = not found.chosen.any()
        queue = max(1.0, round(found.point.transfer_s / found.period_s, 2))
        return (is_idle, short, queue, round(found.usd_per_hour, 9), -round(found.least_slack, 6), found.kappa)

    def _sign(self, found: Evaluation) -> tuple[float, ...]:
        return (found.kappa, *(round(one, 9) for one in found.numbers))

    def _rehearsed(self, found: Evaluation) -> Evaluation:
        sign = self._sign(found)
        if sign not in self.tried:
            self.rehearsals += 1
            self.tried[sign] = refined(self.search, found)
        return self.tried[sign]

    # ---- candidates

    @property
    def _is_tiny(self) -> bool:
        """Whether every pool under every period can be rehearsed."""
        free = int(np.count_nonzero(self.search.columns.is_available & ~self.search.is_must))
        return is_small(self.search) and len(self.search.config.kappas) << free <= REHEARSALS_MAX

    def _everything(self) -> Iterator[Evaluation]:
        pools = EveryPool.of(self.search).pools
        for kappa in self.search.config.kappas:
            for pool in pools if len(pools) else self.search.is_must[None, :]:
                yield self.search.evaluate(self.period(kappa), pool)

    def _candidates(self, most: int) -> list[Evaluation]:
        """Up to `most` candidates by the closed form: each period's best, then the best of the rest. Adds the best pool that
        contains each worker, in fleets of up to `LARGE_FLEET`."""
        pools = EveryPool.of(self.search).pools if is_small(self.search) else np.array(list(self._prefixes()))
        if not len(pools):
            pools = self.search.is_must[None, :]
        picked: list[tuple[float, float, int, int]] = []
        with_worker: dict[int, tuple[float, int, int]] = {}  # best pool with a worker: utilisation, kappa, row
        for kappa in self.search.config.kappas:
            promised, price = self._promised(pools, self.period(kappa))
            order = np.lexsort((price, -np.round(promised, 2)))
            lavish = np.lexsort((price, -promised))
            rows = dict.fromkeys([int(row) for pair in zip(order, lavish, strict=True) for row in pair][: 4 * most])
            picked += [(float(promised[row]), float(price[row]), kappa, row) for row in rows]
            for worker in range(len(self.search.columns)) if len(self.search.columns) <= LARGE_FLEET else ():
                row = int(np.argmax(np.where(pools[:, worker], promised, -1.0)))
                best = (float(promised[row]), kappa, row)
                with_worker[worker] = max(with_worker.get(worker, best), best)
        found = self._spread(pools, picked, most)
        return found + [self.search.evaluate(self.period(kappa), pools[row]) for _, kappa, row in with_worker.values()]

    def _spread(self, pools: Flags, picked: list[tuple[float, float, int, int]], most: int) -> list[Evaluation]:
        """Picks up to `most`, best first: one per period, then `PICKS_PER_KAPPA` per period, then any. Pools of identical
        machines count once."""
        found: dict[tuple[float, ...], Evaluation] = {}
        of_kappa: dict[int, int] = {}
        thrifty = sorted(picked, key=lambda one: (-round(one[0], 2), one[1], one[2]))
        lavish = sorted(picked, key=lambda one: (-one[0], one[1], one[2]))
        by_promise = [one for pair in zip(thrifty, lavish, strict=True) for one in pair]
        for limit in (1, PICKS_PER_KAPPA, most):
            for _, _, kappa, row in by_promise:
                if len(found) >= most:
                    return list(found.values())
                if of_kappa.get(kappa, 0) < limit:
                    made = self.search.evaluate(self.period(kappa), pools[row])
                    if self._sign(made) not in found:
                        found[self._sign(made)] = made
                        of_kappa[kappa] = of_kappa.get(kappa, 0) + 1
        return list(found.values())

    def _promised(self, pools: Flags, period: PeriodColumns) -> tuple[Floats, Floats]:
        """Utilisation of each pool by the relations at a slower pace, with the pool's average group, and its price.

        At tau seconds per step the links carry a version every j = max(kappa, X(j)/tau) steps, X(j) being its transfer time.
        (2) and (3) then hold if R/rate <= tau and X(j) + latency + L_roll + R/rate <= (S - j + 1)*tau. Bisection finds the
        least such tau, and U = T_train/tau.
        """
        columns, learner, config = self.search.columns, self.search.snapshot.learner, self.search.config
        is_stalled = config.download is DownloadMode.STALLED
        count = np.maximum(np.count_nonzero(pools, axis=1), 1)
        uplinks = learner.link.uplink_bytes_per_s + pools @ columns.uplink
        per_byte = count / (uplinks * period.efficiency)
        own_s = np.where(pools, period.own_s, 0.0).max(axis=1, initial=0.0)
        one_s = np.maximum(own_s / period.artifact_bytes, per_byte) * learner.artifact_bytes(1)
        rate = pools @ columns.rate
        safe = np.maximum(rate, 1e-12)
        wait_s = pools @ (columns.rate * columns.tail_s) / safe + pools @ columns.latency_s / count
        batch_s = learner.rollouts_per_step / safe
        swap_s = pools @ (columns.rate * columns.swap_s) / safe
        growth = min(learner.delta_growth, GROWTH_MOST)
        whole = learner.artifact_bytes(STALENESS_BOUND_MAX) / learner.artifact_bytes(1)
        low, high = np.zeros(len(pools)), np.full(len(pools), math.log(1 / UTILISATION_LEAST))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            tau = learner.train_s * np.exp(middle)
            spans = np.minimum((one_s / tau) ** (1 / (1 - growth)), whole * one_s / tau)
            spans = np.maximum(spans, period.kappa)
            transfer_s = one_s * np.minimum(spans**growth, whole)
            made_s = batch_s + (swap_s + transfer_s * is_stalled) / spans
            is_slow = (made_s > tau) | (transfer_s + wait_s + made_s > (config.staleness_bound - spans + 1) * tau)
            low, high = np.where(is_slow, middle, low), np.where(is_slow, high, middle)
        return np.where(rate > 0, np.exp(-high), 0.0), pools @ columns.price

    def _prefixes(self) -> Iterator[Flags]:
        """Pools of a larger fleet: the first workers by price per rate, by rate or by uplink, among all workers and among
        those with the shortest delay."""
        columns = self.search.columns
        free = columns.is_available & ~self.search.is_must
        period = self.period(self.search.config.kappas[-1])
        late_s = period.own_s + columns.latency_s + columns.tail_s
        need = self.search.rate_needed
        is_huge = len(columns) > HUGE_FLEET
        keys = (columns.price / columns.rate, -columns.rate, -columns.uplink)[: 2 if is_huge else 3]
        quantiles = (1.0, 0.6, 0.3) if is_huge else (1.0, 0.8, 0.6, 0.4, 0.2)
        yield self.search.is_must.copy()
        for latest_s in np.unique(np.quantile(late_s[free], quantiles)) if free.any() else ():
            rows = np.flatnonzero(free & (late_s <= latest_s))
            for key in keys:
                order = self._affordable(rows[np.argsort(key[rows], kind="stable")])
                reached = np.cumsum(columns.rate[order])
                if not len(order):
                    continue
                shares = need * np.array([0.5, 0.75, 0.9, 1.0, 1.2, 1.6, 2.5])
                counts = {min(len(order), int(at) + 1) for at in np.searchsorted(reached, shares)} | {len(order)}
                for count in sorted(counts):
                    chosen = self.search.is_must.copy()
                    chosen[order[:count]] = True
                    yield chosen

    def _affordable(self, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Drops from `order` the workers that would exceed the price cap or their provider's limit at their turn."""
        search, columns = self.search, self.search.columns
        limits = [most for _, most in search.config.provider_workers_max]
        order = within_provider_limits(order, columns.provider, limits, search.is_must)
        if not search.config.usd_per_hour_cap:
            return order
        room = search.config.usd_per_hour_cap * (1 + TOLERANCE) - float(columns.price[search.is_must].sum())
        kept: list[npt.NDArray[np.int64]] = []
        for _ in range(PASSED_OVER_MAX):
            order = order[columns.price[order] <= room]
            fits = order[: int(np.searchsorted(np.cumsum(columns.price[order]), room, side="right"))]
            if not len(fits):
                break
            kept.append(fits)
            order, room = order[len(fits) :], room - float(columns.price[fits].sum())
        return np.concatenate(kept) if kept else order[:0]

    # ---- neighbours

    def _neighbours(self, found: Evaluation, most: int) -> list[Evaluation]:
        """Untried neighbours, at most `most`, best utilisation first: the adjacent periods; one worker fewer, more or
        exchanged."""
        search, made = self.search, []
        for kappa in (found.kappa - 1, found.kappa + 1):
            if kappa in search.config.kappas:
                made.append(search.evaluate(self.period(kappa), found.chosen))
        for row in np.flatnonzero(search.columns.is_available & ~search.is_must).tolist():
            made += [search.evaluate(self.period(found.kappa), chosen) for chosen in self._changed(found.chosen, row)]
        fresh = {self._sign(one): one for one in made if self._sign(one) not in self.tried}
        return sorted(fresh.values(), key=lambda one: -one.utilisation)[:most]

    def _changed(self, pool: Flags, row: int) -> list[Flags]:
        """`pool` with worker `row` added or removed. If adding it breaks a limit: every allowed exchange with another worker."""
        chosen = pool.copy()
        chosen[row] = not chosen[row]
        if not chosen.any():
            return []
        if self._is_allowed(chosen):
            return [chosen]
        found = []
        for other in np.flatnonzero(pool & ~self.search.is_must).tolist():
            swapped = chosen.copy()
            swapped[other] = False
            if self._is_allowed(swapped):
                found.append(swapped)
        return found

    def _is_allowed(self, chosen: Flags) -> bool:
        search, columns = self.search, self.search.columns
        cap = search.config.usd_per_hour_cap
        return (not cap or float(columns.price[chosen].sum()) <= cap * (1 + TOLERANCE)) and all(
            np.count_nonzero(chosen & (columns.provider == number)) <= most
            for number, (_, most) in enumerate(search.config.provider_workers_max)
        )
