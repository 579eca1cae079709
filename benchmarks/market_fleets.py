"""Random fleets, as the simulated world has them and as perfect telemetry would tell them to the planner."""

from __future__ import annotations

import math
import random
from dataclasses import replace
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


def hard_world(rng: random.Random, machines: list[Machine], load: float, transfer: float) -> World:
    """As `random_world`, with groups of 8 to 64, lengths of three shapes, and rewards of 0 to 3 s by more or fewer processes."""
    group, batches = rng.choice([8, 16, 32, 64]), rng.choice([4, 8, 16])
    rate = sum(one.slots / one.mean_s for one in machines)
    train_s, up = group * batches / (rate * load), rng.choice([1e6, 5e6, 2e7])
    delta, reward_s = transfer * train_s * up * 0.8, rng.choice([0.0, 0.1, 0.3, 1.0, 3.0])
    processes = max(1, round(group * batches / train_s * reward_s * rng.uniform(0.7, 2.5)))
    return World(
        rng.randint(1, 8), group * batches, group, train_s, up, delta, delta * rng.choice([3.0, 10.0, 40.0]),
        rng.choice([0.0, 0.4, 0.8, 1.2]), rng.choice([4.0, 10.0]), shape=rng.choice(["log-normal", "two kinds", "rare"]),
        reward_s=reward_s, reward_processes=processes,
    )  # fmt: skip


def spot(rng: random.Random, machines: list[Machine]) -> list[Machine]:
    """Some of them are lost up to once in two hours, and replaced after minutes."""
    return [
        replace(one, losses_per_hour=rng.choice([0.0, 0.0, 0.1, 0.5]), join_s=rng.uniform(60.0, 600.0))
        for one in machines
    ]


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
            apply_s=one.apply_s, swap_s=one.swap_s, hazard_per_hour=one.losses_per_hour, join_s=one.join_s,
        )
        for index, one in enumerate(machines)
    )  # fmt: skip
    learner = LearnerEstimate(
        world.batch, world.train_s, LinkEstimate(world.up, 1e9), world.delta, world.whole, world.group,
        delta_growth=world.growth, lengths=digest(world) if world.shape != "log-normal" else (),
        reward_s=world.reward_s, reward_processes=world.reward_processes if world.reward_s else 0,
    )  # fmt: skip
    return FleetSnapshot(0.0, learner, workers)


def digest(world: World) -> tuple[float, ...]:
    """What the learner would report of lengths: the means of 64 equal shares of 1,024 rollouts."""
    rng = random.Random(9)
    lengths = sorted(world.length(rng) for _ in range(1024))
    return tuple(sum(lengths[start : start + 16]) / 16 for start in range(0, 1024, 16))


def wishes(world: World, **others: object) -> PlanConfig:
    """The bound and the way of downloading of this world."""
    download = DownloadMode.STALLED if world.is_stalled else DownloadMode.BACKGROUND
    return PlanConfig(world.bound, download=download, broadcast_efficiency=world.efficiency, **others)  # type: ignore[arg-type]
