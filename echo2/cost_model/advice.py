"""Where nothing is feasible: the smallest change of one number that would make it so, found by planning again.

Guarantees: each piece of advice was tried and gives a feasible plan. Leaves to others: whether it can be had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from echo2.base.ids import PeerId
from echo2.base.units import format_bytes
from echo2.cost_model.planner import feasible_plan
from echo2.cost_model.snapshot import STALENESS_BOUND_MAX, FleetSnapshot, PlanConfig

FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
WORKERS_ADVISED_MAX = 2000

Change = Callable[[FleetSnapshot, PlanConfig, float], tuple[FleetSnapshot, PlanConfig, str]]


@dataclass(frozen=True, slots=True)
class Advice:
    """One number, changed, and what the plan would then cost."""

    change: str
    usd_per_hour: float
    predicted_utilisation: float


def advise(snapshot: FleetSnapshot, config: PlanConfig) -> tuple[Advice, ...]:
    """The least factor of each lever that suffices alone, if any of `FACTORS` does."""
    found = (_least(snapshot, replace(config, exact_workers_max=0), change) for change in _LEVERS)
    return tuple(one for one in found if one is not None)


def _least(snapshot: FleetSnapshot, config: PlanConfig, change: Change) -> Advice | None:
    """Levers are monotone, so the factors are searched by halves."""
    low, high = 0, len(FACTORS)
    best: Advice | None = None
    while low < high:
        middle = (low + high) // 2
        changed, wishes, text = change(snapshot, config, FACTORS[middle])
        answer = feasible_plan(changed, wishes)
        if answer is not None:
            best, high = Advice(text, answer.usd_per_hour, answer.predicted_utilisation), middle
        else:
            low = middle + 1
    return best


def _uplink(snapshot: FleetSnapshot, config: PlanConfig, factor: float) -> tuple[FleetSnapshot, PlanConfig, str]:
    link = snapshot.learner.link
    faster = replace(link, uplink_bytes_per_s=link.uplink_bytes_per_s * factor)
    text = f"learner uplink {format_bytes(faster.uplink_bytes_per_s)}/s ({factor:g} times)"
    return replace(snapshot, learner=replace(snapshot.learner, link=faster)), config, text


def _bound(snapshot: FleetSnapshot, config: PlanConfig, factor: float) -> tuple[FleetSnapshot, PlanConfig, str]:
    bound = min(STALENESS_BOUND_MAX, max(config.staleness_bound + 1, round(config.staleness_bound * factor)))
    return snapshot, replace(config, staleness_bound=bound), f"S = {bound}"


def _tail(snapshot: FleetSnapshot, config: PlanConfig, factor: float) -> tuple[FleetSnapshot, PlanConfig, str]:
    workers = tuple(
        replace(
            one,
            rollout_s_tail=max(one.rollout_s_mean, one.rollout_s_tail / factor),
            rollout_s_max=one.rollout_s_max / factor,
        )
        for one in snapshot.workers
    )
    return replace(snapshot, workers=workers), config, f"the longest rollouts cut to 1/{factor:g}"


def _fleet(snapshot: FleetSnapshot, config: PlanConfig, factor: float) -> tuple[FleetSnapshot, PlanConfig, str]:
    extra = min(round(len(snapshot.workers) * (factor - 1)), WORKERS_ADVISED_MAX)
    known = len(snapshot.workers)
    more = tuple(
        replace(snapshot.workers[index % known], worker_id=PeerId(f"more-{index}"), is_pinned=False)
        for index in range(extra)
    )
    return replace(snapshot, workers=(*snapshot.workers, *more)), config, f"{extra} more workers like those known"


def _cap(snapshot: FleetSnapshot, config: PlanConfig, factor: float) -> tuple[FleetSnapshot, PlanConfig, str]:
    if not config.usd_per_hour_cap:
        return snapshot, config, ""
    cap = config.usd_per_hour_cap * factor
    return snapshot, replace(config, usd_per_hour_cap=cap), f"a cap of {cap:.2f} USD/h"


def _train(snapshot: FleetSnapshot, config: PlanConfig, factor: float) -> tuple[FleetSnapshot, PlanConfig, str]:
    learner = replace(snapshot.learner, train_s=snapshot.learner.train_s * factor)
    return replace(snapshot, learner=learner), config, f"a learner {factor:g} times slower (a smaller cluster)"


_LEVERS: tuple[Change, ...] = (_uplink, _bound, _tail, _fleet, _cap, _train)
