"""Random fleets, as the simulated world has them and as perfect telemetry would tell them to the planner."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

from benchmarks.market_world import Machine, World
from echo2.base.ids import PeerId
from echo2.cost_model.snapshot import (
    DownloadMode,
    FleetSnapshot,
    LearnerEstimate,
    LinkEstimate,
    PlanConfig,
    WorkerEstimate,
)


def random_world(rng: random.Random, machines: list[Machine], load: float, transfer: float) -> World:
    """A learner that asks `load` times what `machines` give, with a version that takes `transfer` steps of its uplink."""
    group = rng.choice([2, 4, 8, 16])
    batch = group * rng.choice([4, 6, 8, 12, 16])
    rate = sum(one.slots / one.mean_s for one in machines)
    train_s = batch / (rate * load) if load > 0 else 1.0
    up = rng.choice([1e6, 5e6, 2e7])
    delta = transfer * train_s * up * 0.8
    return World(
        rng.randint(1, 6), batch, group, train_s, up, delta, delta * rng.choice([3.0, 10.0, 40.0]),
        rng.choice([0.0, 0.4, 0.8, 1.0]), rng.choice([2.0, 4.0, 10.0]), is_stalled=rng.random() < 0.2,
    )  # fmt: skip


def random_machines(rng: random.Random, count: int) -> list[Machine]:
    """Unequal in slots, speed, price and links."""
    found = []
    for _ in range(count):
        slots, mean_s = rng.choice([2, 4, 8, 16, 24]), rng.uniform(20.0, 60.0)
        price = slots / mean_s * rng.uniform(0.5, 2.0)
        up, down = rng.choice([5e5, 2e6, 1e7, 5e7]), rng.choice([2e6, 1e7, 5e7, 2e8])
        found.append(Machine(slots, mean_s, price, up, down, rng.uniform(0.0, 3.0), rng.choice([0.0, 0.0, 1.0])))
    return found


def told(world: World, machines: list[Machine]) -> FleetSnapshot:
    """The snapshot that perfect telemetry of this world makes."""
    scale = 1 / world.mean_length()
    tail = scale * min(world.cut, math.exp(world.sigma * NormalDist().inv_cdf(0.95)))
    longest = scale * (world.cut if world.sigma > 0 else min(1.0, world.cut))
    workers = tuple(
        WorkerEstimate(
            PeerId(f"w{index:04d}"), one.slots / one.mean_s, one.usd_per_hour, LinkEstimate(one.up, one.down),
            one.mean_s, max(tail, 1.0) * one.mean_s, rollout_s_max=max(longest, tail, 1.0) * one.mean_s,
            apply_s=one.apply_s, swap_s=one.swap_s,
        )
        for index, one in enumerate(machines)
    )  # fmt: skip
    learner = LearnerEstimate(
        world.batch, world.train_s, LinkEstimate(world.up, 1e9), world.delta, world.whole, world.group,
        delta_growth=world.growth,
    )  # fmt: skip
    return FleetSnapshot(0.0, learner, workers)


def wishes(world: World, **others: object) -> PlanConfig:
    """The bound and the way of downloading of this world."""
    download = DownloadMode.STALLED if world.is_stalled else DownloadMode.BACKGROUND
    return PlanConfig(world.bound, download=download, broadcast_efficiency=world.efficiency, **others)  # type: ignore[arg-type]
