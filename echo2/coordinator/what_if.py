"""Changes some numbers in the present snapshot and config, to ask what the planner would say then. Pure.

Guarantees: with nothing changed the result is the present snapshot and config, so the answer is the planner's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echo2.base.errors import ConfigError
from echo2.base.ids import PeerId
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig, WorkerEstimate, WorkerState

FLEET_MAX = 2000


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The changes; 0 leaves a number as it is. `uplink_factor` scales the learner's uplink. `fleet_size` sets the number of
    workers: a smaller fleet keeps those that are cheapest per rollout, a larger one adds copies of them."""

    staleness_bound: int = 0
    uplink_factor: float = 0.0
    fleet_size: int = 0
    target_utilisation: float = 0.0
    usd_per_hour_cap: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.staleness_bound <= 64 and 0 <= self.fleet_size <= FLEET_MAX):
            raise ConfigError(f"what if: expected S of 0 (as it is) to 64 and a fleet of 1 to {FLEET_MAX}, got {self}")
        if not (0 <= self.uplink_factor <= 1e4 and 0 <= self.target_utilisation <= 1 and self.usd_per_hour_cap >= 0):
            raise ConfigError(f"what if: expected an uplink factor up to 10000 and a target up to 1, got {self}")


def changed_config(config: PlanConfig, what_if: WhatIf) -> PlanConfig:
    bound = what_if.staleness_bound or config.staleness_bound
    return replace(
        config,
        staleness_bound=bound,
        fixed_kappa=min(config.fixed_kappa, bound),
        target_utilisation=what_if.target_utilisation or config.target_utilisation,
        usd_per_hour_cap=what_if.usd_per_hour_cap or config.usd_per_hour_cap,
    )


def changed_snapshot(snapshot: FleetSnapshot, what_if: WhatIf) -> FleetSnapshot:
    learner, workers = snapshot.learner, snapshot.workers
    if what_if.uplink_factor:
        uplink = learner.link.uplink_bytes_per_s * what_if.uplink_factor
        learner = replace(learner, link=replace(learner.link, uplink_bytes_per_s=uplink))
    if what_if.fleet_size:
        workers = _fleet_of(workers, what_if.fleet_size)
    return replace(snapshot, learner=learner, workers=workers)


def _fleet_of(workers: tuple[WorkerEstimate, ...], size: int) -> tuple[WorkerEstimate, ...]:
    usable = [worker for worker in workers if worker.state is not WorkerState.UNAVAILABLE] or list(workers)
    best = sorted(usable, key=lambda worker: (worker.price_usd_per_hour / worker.rollouts_per_s, worker.worker_id))
    fleet = best[:size]
    for index in range(size - len(fleet)):
        like = best[index % len(best)]
        copy_id = PeerId(f"{like.worker_id}+{index // len(best) + 1}")
        fleet.append(replace(like, worker_id=copy_id, state=WorkerState.STANDBY, is_pinned=False))
    return tuple(fleet)
