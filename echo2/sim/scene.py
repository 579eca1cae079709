"""The constants of one simulated run, drawn from its seed: sizes, times, and which sabotage it suffers.

Guarantees: a pure function of seed and sabotage. Leaves to others: faults (faults), machines (cluster).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.base.rng import derived_rng
from echo2.sim.lengths import Lengths
from echo2.sim.tiny_model import Sampler
from echo2.worker.engine import SwapMode


class Sabotage(enum.Enum):
    """A defect put in on purpose; the checkers must find it."""

    NONE = "none"
    BOUND_OFF_BY_ONE = "the learner takes tokens one step too old"
    LEDGER_FORGETS = "a restarted learner does not know what was trained"
    ADMITTED_LOST = "admitted rollouts are not written to the journal"
    NO_FINGERPRINT_CHECK = "a worker believes every swap"
    TORN_COMMIT = "a commit leaves a part of the old version behind"
    TORN_JOURNAL = "a torn journal ends the next start"
    NO_REDIAL = "a lost learner is not dialled again"
    HELLO_GAP = "what the learner says between its hello and the stream's opening is lost"
    SILENT_WAIT = "a worker without a lease says nothing"
    BELIEVES_PROGRESS = "the coordinator does not listen to what of a group has reached the learner"
    SHUNS_THE_HONEST = "a worker is shunned for what has not reached the learner within a second"
    STALLED_FOR_GOOD = "what has stopped coming counts as stalled for ever"
    LATE_UNSERVED = "workers that the plan serves last are given nothing"
    STALLED_UNASKED = "what has stopped coming is asked for no more where it is the only way"


@dataclass(slots=True)
class Scene:
    """`address_of`: on which machine an identity is found; the cluster sets it."""

    seed: int
    sabotage: Sabotage = Sabotage.NONE
    staleness_bound: int = 3
    groups_per_step: int = 3
    rollouts_per_group: int = 4
    max_new_tokens: int = 96
    train_s: float = 3.0
    fsync_s: float = 0.008
    encode_s: float = 0.1
    checkpoint_every_steps: int = 3
    checkpoint_s: float = 0.5
    drops_equal_rewards: bool = False
    reward_fails: float = 0.01
    turns: int = 1  # completions that a prompt may want, one after another
    keyframe_chain_max: int = 16
    swap_mode: SwapMode = SwapMode.RECOMPUTE_KV
    heartbeat_s: float = 2.0
    suspect_after_s: float = 6.0
    gone_after_s: float = 15.0
    lease_timeout_s: float = 25.0
    report_interval_s: float = 2.0
    plan_interval_s: float = 20.0
    sampler: Sampler = field(init=False)
    address_of: Callable[[PeerId], str | None] = lambda peer: None

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.seed, Lengths(median_tokens=20.0, sigma=0.9, max_tokens=400))

    @classmethod
    def of(cls, seed: int, sabotage: Sabotage = Sabotage.NONE) -> Scene:
        """The scene of a seed."""
        rng = derived_rng(seed, "scene")
        return cls(
            seed,
            sabotage,
            staleness_bound=rng.choice((1, 2, 3, 4, 6)),
            groups_per_step=rng.randint(2, 4),
            rollouts_per_group=rng.choice((2, 4)),
            train_s=rng.uniform(1.0, 4.0),
            fsync_s=rng.choice((0.002, 0.02, 0.2)),
            checkpoint_every_steps=rng.randint(2, 5),
            checkpoint_s=rng.uniform(0.1, 3.0),
            drops_equal_rewards=rng.random() < 0.5,
            swap_mode=rng.choice(list(SwapMode)),
            turns=derived_rng(seed, "turns").choice((1, 1, 2, 3)),
            keyframe_chain_max=derived_rng(seed, "chains").choice((3, 16)),
        )

    @property
    def learner_bound(self) -> int:
        """The bound that the learner keeps; the sabotaged one keeps another than it should."""
        return self.staleness_bound + (self.sabotage is Sabotage.BOUND_OFF_BY_ONE)

    def sees_wrong_weights(self, is_equal: bool) -> bool:
        """What a worker makes of comparing the engine's fingerprint with the host's."""
        return True if self.sabotage is Sabotage.NO_FINGERPRINT_CHECK else is_equal
