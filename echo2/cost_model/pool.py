"""Which workers to rent: the cheapest set with enough rate, by an integer program and by the paper's greedy algorithm.

    minimise  sum price_i x_i    subject to    sum value_i x_i >= need,  sum burden_i x_i <= burden_room,
                                               sum price_i x_i <= price_cap,  per provider: sum x_i <= its limit

`burden` is the uplink that a worker needs from the swarm minus the uplink it contributes, for a given broadcast time.
Guarantees: deterministic; an answer satisfies every constraint; `exact` is within `MIP_GAP` of the lowest price. Leaves
to others: who is a candidate, and the relations that couple rate, staleness and broadcast (search).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo2.cost_model.columns import Flags, Floats

MIP_GAP = 1e-3
MIP_NODES_MAX = 5000  # limits nodes, not seconds, so that plans do not depend on the machine's speed
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class PoolProblem:
    """One row per worker of the snapshot. Workers marked `is_must` are rented at any price and are also candidates."""

    price: Floats
    value: Floats
    need: float
    burden: Floats
    burden_room: float
    price_cap: float
    is_candidate: Flags
    is_must: Flags
    provider: npt.NDArray[np.int64]
    provider_max: npt.NDArray[np.int64]

    def is_satisfied_by(self, chosen: Flags) -> bool:
        """Whether `chosen` meets every constraint, up to rounding."""
        scale = max(abs(self.burden_room), 1.0)
        within_limits = all(
            int(np.count_nonzero(chosen & (self.provider == index))) <= most
            for index, most in enumerate(self.provider_max.tolist())
        )
        return (
            within_limits
            and float(self.value[chosen].sum()) >= self.need * (1 - TOLERANCE)
            and float(self.burden[chosen].sum()) - self.burden_room <= TOLERANCE * scale
            and float(self.price[chosen].sum()) <= self.price_cap * (1 + TOLERANCE)
        )

    def relaxes(self, other: PoolProblem) -> bool:
        """Whether every solution of `other`, a problem over the same fleet and caps, also solves this one."""
        return (
            self.need <= other.need * (1 + TOLERANCE)
            and not bool((other.is_candidate & ~self.is_candidate).any())
            and (self.swarm_is_free or bool((self.burden <= other.burden + TOLERANCE).all()))
            and bool((self.value >= other.value * (1 - TOLERANCE)).all())
        )

    @property
    def swarm_is_free(self) -> bool:
        """Whether every candidate contributes at least as much uplink to the swarm as it needs."""
        return float(self.burden[self.is_candidate].max(initial=-1.0)) <= TOLERANCE * max(1.0, abs(self.burden_room))


def lower_bound_usd(problem: PoolProblem) -> float:
    """A lower bound on the price of any solution: buys the cheapest rate first and allows fractions of workers."""
    price, value = problem.price, problem.value
    start = float(price[problem.is_must].sum())
    need = problem.need - float(value[problem.is_must].sum())
    if need <= 0:
        return start
    index = np.flatnonzero(problem.is_candidate & ~problem.is_must & (value > 0))
    index = index[np.argsort(price[index] / value[index], kind="stable")]
    reached = np.cumsum(value[index])
    last = int(np.searchsorted(reached, need))
    if last == len(index):
        return float("inf") if need > (reached[-1] if len(index) else 0.0) * (1 + TOLERANCE) else start
    before = float(reached[last - 1]) if last else 0.0
    part = price[index[last]] * (need - before) / value[index[last]]
    return start + float(price[index[:last]].sum() + part)


def greedy(problem: PoolProblem) -> Flags | None:
    """Adds workers by price per rate, cheapest first, until the need is met, then removes spare ones, dearest first.

    Tries several limits on a worker's burden and returns the cheapest result; None if none satisfies the constraints.
    """
    best: Flags | None = None
    worst = float(problem.burden[problem.is_candidate].max(initial=0.0))
    for burden_most in (worst, worst / 2, 0.0) if worst > 0 else (worst,):
        chosen = _greedy_under(problem, burden_most)
        if chosen is not None and (best is None or problem.price[chosen].sum() < problem.price[best].sum()):
            best = chosen
    return best


def _greedy_under(problem: PoolProblem, burden_most: float) -> Flags | None:
    """Runs greedy over the candidates whose burden is at most `burden_most`."""
    price, value = problem.price, problem.value
    chosen = problem.is_must.copy()
    index = np.flatnonzero(problem.is_candidate & ~chosen & (value > 0) & (problem.burden <= burden_most))
    index = index[np.argsort(price[index] / value[index], kind="stable")]
    index = within_provider_limits(index, problem.provider, problem.provider_max.tolist(), problem.is_must)
    reached = float(value[chosen].sum()) + np.cumsum(value[index])
    count = 0 if problem.need <= float(value[chosen].sum()) else int(np.searchsorted(reached, problem.need)) + 1
    chosen[index[:count]] = True
    _delete_in_reverse(problem, chosen, index[:count])
    return chosen if problem.is_satisfied_by(chosen) else None


def within_provider_limits(
    index: npt.NDArray[np.int64], provider: npt.NDArray[np.int64], limits: Sequence[int], is_must: Flags
) -> npt.NDArray[np.int64]:
    """Drops the workers of `index` that exceed their provider's limit; `is_must` workers count towards it first."""
    keep = np.ones(len(index), dtype=np.bool_)
    for number, most in enumerate(limits):
        own = provider[index] == number
        room = most - int(np.count_nonzero(is_must & (provider == number)))
        keep &= ~own | (np.cumsum(own) <= room)
    return index[keep]


def _delete_in_reverse(problem: PoolProblem, chosen: Flags, added: npt.NDArray[np.int64]) -> None:
    """Removes from `chosen`, dearest first, each worker of `added` that the constraints do not need."""
    surplus = float(problem.value[chosen].sum()) - problem.need
    room = problem.burden_room - float(problem.burden[chosen].sum())
    light = added[problem.value[added] <= surplus]
    for row in light[np.argsort(-problem.price[light], kind="stable")].tolist():
        value, burden = float(problem.value[row]), float(problem.burden[row])
        if value <= surplus and (room + burden >= 0 or burden >= 0):
            chosen[row] = False
            surplus -= value
            room += burden


def exact(problem: PoolProblem) -> Flags | None:
    """Solves the integer program with HiGHS; None if it is infeasible or no solution was found within the node limit."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # importing it takes longer than planning a small fleet

    free = np.flatnonzero(problem.is_candidate & ~problem.is_must)
    must = problem.is_must
    if not len(free):
        return must.copy() if problem.is_satisfied_by(must) else None
    burden_scale = max(float(np.abs(problem.burden[free]).max()), 1e-9)
    price_scale = max(float(problem.price[free].max()), 1e-9)
    rows = [problem.value[free] / problem.need, problem.burden[free] / burden_scale, problem.price[free] / price_scale]
    low = [1.0 - float(problem.value[must].sum()) / problem.need, -np.inf, -np.inf]
    high = [
        np.inf,
        (problem.burden_room - float(problem.burden[must].sum())) / burden_scale,
        (problem.price_cap - float(problem.price[must].sum())) / price_scale,
    ]
    for provider, most in enumerate(problem.provider_max.tolist()):
        rows.append((problem.provider[free] == provider).astype(np.float64))
        low.append(-np.inf)
        high.append(most - float(np.count_nonzero(must & (problem.provider == provider))))
    answer = milp(
        problem.price[free] / price_scale,
        constraints=LinearConstraint(np.vstack(rows), low, high),
        integrality=np.ones(len(free)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": MIP_GAP, "node_limit": MIP_NODES_MAX},
    )
    if answer.x is None:
        return None
    chosen = must.copy()
    chosen[free[np.asarray(answer.x) > 0.5]] = True
    return chosen if problem.is_satisfied_by(chosen) else None
