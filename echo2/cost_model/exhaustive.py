"""Every pool of a small fleet under every period, cheapest first.

In a fleet of a dozen machines, one more or less changes every term, so the thresholds of `search` may miss the only pool
that works. Here all subsets are evaluated at once and none is missed. Guarantees: yields every pool that satisfies the
relations, the price cap and the providers' limits, in order of USD/h; another machine only adds pools.
Leaves to others: rehearsing the pools (planner), the arithmetic of one pool (search).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from echo2.cost_model.columns import Flags, Floats, PeriodColumns
from echo2.cost_model.pool import TOLERANCE
from echo2.cost_model.search import Evaluation, Search

SLACK = 1 + 10 * TOLERANCE  # the sieve is slightly wider than the relations, which are checked afterwards


def is_small(search: Search) -> bool:
    """Whether few enough workers are free to choose that all subsets can be evaluated."""
    free = search.columns.is_available & ~search.is_must
    return int(np.count_nonzero(free)) <= search.config.exhaustive_workers_max


def pools_in_order(search: Search, period: Callable[[int], PeriodColumns]) -> Iterator[Evaluation]:
    """Yields the pools that satisfy every relation: cheapest first, then larger slack, then shorter period."""
    every = EveryPool.of(search)
    sieved = [every.sieved(period(kappa)) for kappa in search.config.kappas]
    rows, costs, slacks = (np.concatenate(parts) for parts in zip(*sieved, strict=True))
    kappas = np.repeat(list(search.config.kappas), [len(part[0]) for part in sieved])
    for index in np.lexsort((kappas, -np.round(slacks, 9), np.round(costs, 9))).tolist():
        found = search.evaluate(period(int(kappas[index])), every.pools[int(rows[index])])
        if found.keeps_relations(search.rate_needed):
            yield replace(found, solver="exact")


@dataclass(frozen=True, slots=True)
class EveryPool:
    """All subsets within the price cap and the providers' limits. Row i of `pools` is one subset; `price[i]`: its USD/h."""

    search: Search
    pools: Flags
    price: Floats

    @classmethod
    def of(cls, search: Search) -> EveryPool:
        columns, config = search.columns, search.config
        free = np.flatnonzero(columns.is_available & ~search.is_must)
        pools = np.repeat(search.is_must[None, :], 1 << len(free), axis=0)
        pools[:, free] = (np.arange(1 << len(free))[:, None] >> np.arange(len(free))) & 1 == 1
        for provider, (_, most) in enumerate(config.provider_workers_max):
            pools = pools[np.count_nonzero(pools & (columns.provider == provider), axis=1) <= most]
        price = pools @ columns.price
        if config.usd_per_hour_cap:
            is_within = price <= config.usd_per_hour_cap * (1 + TOLERANCE)
            pools, price = pools[is_within], price[is_within]
        return cls(search, pools, price)

    def sieved(self, period: PeriodColumns) -> tuple[Floats, Floats, Floats]:
        """The pools that satisfy the relations for this period, as three arrays: row, USD/h, least slack."""
        columns, learner, need = self.search.columns, self.search.snapshot.learner, self.search.rate_needed
        rows = np.flatnonzero(self.pools @ columns.rate * SLACK >= need)
        pools = self.pools[rows]
        count = np.count_nonzero(pools, axis=1)
        uplinks = learner.link.uplink_bytes_per_s + pools @ columns.uplink
        swarm_s = count * period.artifact_bytes / (uplinks * period.efficiency)
        transfer_s = np.maximum(period.own_s[None, :], swarm_s[:, None])
        rate = period.rate(columns, transfer_s, self.search.config.download)
        throughput = np.where(pools, rate, 0.0).sum(axis=1)
        longest_s = np.where(pools, transfer_s, 0.0).max(axis=1, initial=0.0)
        late_s = np.where(pools, transfer_s + columns.latency_s + columns.tail_s, 0.0).max(axis=1, initial=0.0)
        use_s = late_s + learner.rollouts_per_step / np.maximum(throughput, 1e-12)
        slack = 1 - np.maximum(longest_s / period.period_s, use_s / period.staleness_budget_s)
        keeps = (throughput * SLACK >= need) & (slack >= 1 - SLACK)
        return rows[keeps].astype(np.float64), self.price[rows][keeps], slack[keeps]
