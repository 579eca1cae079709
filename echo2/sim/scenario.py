"""The constants of one simulated run, drawn from its seed: sizes and times.

Guarantees: a pure function of the seed. Leaves to others: faults (fault_plan), machines (world).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.rng import derived_rng
from echo2.worker.engines.engine import SwapMode


@dataclass(slots=True)
class Scenario:
    """The constants of one run."""

    seed: int
    staleness_bound: int = 3
    groups_per_step: int = 3
    rollouts_per_group: int = 4
    max_new_tokens: int = 96
    train_s: float = 3.0
    sync_s: float = 0.008
    checkpoint_every_steps: int = 3
    drops_equal_rewards: bool = False
    reward_fails: float = 0.01
    turns: int = 1  # most completions per prompt, one after another
    keyframe_chain_max: int = 16
    audit_share: float = 0.25
    chunk_scale: int = 1  # bytes on the wire per byte of a chunk
    offers_max: int = 0  # machines that the coordinator may rent
    swap_mode: SwapMode = SwapMode.RECOMPUTE_KV
    heartbeat_s: float = 2.0
    suspect_after_s: float = 6.0
    gone_after_s: float = 15.0
    lease_timeout_s: float = 25.0
    report_interval_s: float = 2.0
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
