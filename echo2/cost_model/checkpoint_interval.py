"""Steps between two checkpoints, from the cost of a checkpoint and the time to train a step again. Pure.

    n = sqrt(2 * C * M / (T * P)), at most REPLAY_S / T and STEPS_MAX, at least 1

C: seconds that a checkpoint blocks the learner; T: seconds to train a step again; P: seconds from one step to the next, including
waiting; M: seconds between two kills. Each second of the run then spends C / (n * P) on checkpoints and n * T / (2 * M) on
retraining; this n minimises the sum (Young 1974). docs/capacity-model.md has an example.
"""

from __future__ import annotations

import math

KILLED_EVERY_S = 86_400.0
"""Assumed time between two kills of a learner: a day. Four times as often would halve the interval."""
REPLAY_S = 900.0
"""Most seconds that a restart spends on retraining, because workers' deliveries wait for it."""
STEPS_MAX = 20
CHECKPOINT_BYTES_PER_S = 5e9
"""Prior of the copy rate from one GPU or CPU into unpinned host memory, until the first checkpoint is measured."""


def steps_between(checkpoint_s: float, train_s: float, step_s: float) -> int:
    """The interval in steps. All times in seconds: `train_s` of a step without waiting, `step_s` with it."""
    if train_s <= 0.0:
        return STEPS_MAX
    cheapest = math.sqrt(2.0 * checkpoint_s * KILLED_EVERY_S / (train_s * max(train_s, step_s)))
    return max(1, int(min(cheapest, REPLAY_S / train_s, STEPS_MAX)))
