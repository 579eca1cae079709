"""What a seed draws: the constants of its run, and its faults: which, when, on which machine, and for how long.

Guarantees: a pure function of the seed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from echo2.base.rng import derived_rng
from echo2.worker.engines.engine import SwapMode


@dataclass(slots=True)
class Scenario:
    """What differs between runs."""

    seed: int
    staleness_bound: int = 3
    groups_per_step: int = 3
    rollouts_per_group: int = 4
    train_s: float = 3.0
    sync_s: float = 0.008
    checkpoint_every_steps: int = 3
    drops_equal_rewards: bool = False
    turns: int = 1  # most completions per prompt, one after another
    keyframe_chain_max: int = 16
    audit_share: float = 0.25
    chunk_scale: int = 1  # bytes on the wire per byte of a chunk
    offers_max: int = 0  # machines that the coordinator may rent
    swap_mode: SwapMode = SwapMode.RECOMPUTE_KV
    plan_interval_s: float = 20.0

    @classmethod
    def of(cls, seed: int) -> Scenario:
        """The scenario of a seed."""
        rng = derived_rng(seed, "scene")
        return cls(
            seed,
            staleness_bound=rng.choice((1, 2, 3, 4, 6)),
            groups_per_step=rng.randint(2, 4),
            rollouts_per_group=rng.choice((2, 4)),
            train_s=rng.uniform(1.0, 4.0),
            sync_s=rng.choice((0.002, 0.02, 0.2)),
            checkpoint_every_steps=rng.randint(2, 5),
            drops_equal_rewards=rng.random() < 0.5,
            swap_mode=rng.choice(list(SwapMode)),
            turns=derived_rng(seed, "turns").choice((1, 1, 2, 3)),
            keyframe_chain_max=derived_rng(seed, "chains").choice((3, 16)),
            offers_max=derived_rng(seed, "cloud").choice((0, 0, 1, 3)),
            chunk_scale=derived_rng(seed, "scale").choice((1, 4_000, 10_000)),
        )


STORM_S = 90.0  # several leases, versions and plans
FIRST_FAULT_S = 8.0  # after the first leases
LONG_SHARE = 0.2  # share of seeds with a long outage of the learner in addition to their storm
CUT_OFF_AFTER_S = (2.0, 12.0)
LONG_OUTAGE_S = (135.0, 165.0)


class Fault(enum.Enum):
    KILL = "kill -9, restart with disk"
    LOSE_DISK = "worker restarts without its disk"
    POWER_CUT = "power cut, unsynced writes lost"
    FREEZE = "freeze (SIGSTOP)"
    PARTITION = "partition, both ways"
    ONE_WAY = "partition, one way"
    CUT = "connections cut"
    CLOG = "link clogged"
    LOSS = "packet loss"
    DISK_FULL = "disk full"
    BIT_ROT = "bit rot in a chunk store"
    SLOW = "slow worker"
    CLOCK_JUMP = "clock jump"
    DRIFT = "clock drift"
    PREEMPT_NOTICE = "preemption with notice"
    PREEMPT = "preemption without notice"
    SWAP_REFUSED = "engine refuses swaps"
    SWAP_WRONG = "swaps leave wrong bits"
    JOIN = "a worker joins"


# Kills and what looks like them come most; all else weighs 1.
WEIGHTS = {Fault.KILL: 6, Fault.FREEZE: 3, Fault.PARTITION: 3, Fault.CUT: 3, Fault.POWER_CUT: 3}


@dataclass(frozen=True, slots=True)
class PlannedFault:
    at_s: float
    fault: Fault
    whom: str
    for_s: float


def storm(seed: int, workers: int) -> list[PlannedFault]:
    """The faults of a seed, in order of time. If the worker `whom` is gone by then, the fault hits another."""
    rng = derived_rng(seed, "faults")
    kinds = rng.sample(list(Fault), rng.randint(3, len(Fault)))
    weights = [WEIGHTS.get(kind, 1) for kind in kinds]
    mean_gap_s = rng.choice((2.0, 5.0, 12.0))
    planned, at_s = [], FIRST_FAULT_S
    while at_s < STORM_S:
        fault = rng.choices(kinds, weights)[0]
        whom = rng.choice(("coordinator", "learner", *2 * [f"w{i}" for i in range(workers)]))
        planned.append(PlannedFault(at_s, fault, whom, rng.choice((0.5, 3.0, 8.0, 25.0)) * rng.uniform(0.5, 1.5)))
        at_s += rng.expovariate(1.0 / mean_gap_s)
    return planned


def long_outage(seed: int, workers: int) -> list[PlannedFault]:
    """In some seeds: the learner is killed while its link is clogged, in the middle of a broadcast, and stays away. Workers
    then hold parts of an artifact that no peer can complete. One worker loses its disk, and some of the learner's chunks may
    rot."""
    rng = derived_rng(seed, "long outage of the learner")
    if rng.random() >= LONG_SHARE:
        return []
    at_s = rng.uniform(FIRST_FAULT_S, STORM_S - 20.0)
    falls_at_s = at_s + rng.uniform(*CUT_OFF_AFTER_S)
    rot = [PlannedFault(falls_at_s - 0.1, Fault.BIT_ROT, "learner", 1.0) for _ in range(rng.choice((0, 0, 5)))]
    return [
        PlannedFault(at_s, Fault.CLOG, "learner", 30.0),
        PlannedFault(at_s, Fault.LOSE_DISK, f"w{rng.randrange(workers)}", rng.uniform(0.5, 3.0)),
        *rot,
        PlannedFault(falls_at_s, Fault.KILL, "learner", rng.uniform(*LONG_OUTAGE_S)),
    ]
