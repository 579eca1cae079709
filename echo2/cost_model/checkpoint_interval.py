"""Steps between two checkpoints: a function of what a checkpoint costs and of how long a step takes to train again. Pure.

    n = sqrt(2 * C * M / (T * P)), at most REPLAY_S / T and STEPS_MAX, at least 1

C: seconds that a checkpoint keeps the learner; T: seconds of training a step again; P: seconds from one step to the next, waiting
included; M: seconds between two kills. A second of the run then pays C / (n * P) for checkpoints and n * T / (2 * M) for steps that
are trained again; their sum is smallest (Young 1974). docs/capacity-model.md has an example.
"""

from __future__ import annotations

import math

KILLED_EVERY_S = 86_400.0
"""An assumption: a learner is killed once a day. Four times as often would halve the interval."""
REPLAY_S = 900.0
"""A restart trains again for so long at most: workers' deliveries wait for it."""
STEPS_MAX = 20
CHECKPOINT_BYTES_PER_S = 5e9
"""Of one GPU or CPU, into host memory that is not pinned: before the first one is measured."""


def steps_between(checkpoint_s: float, train_s: float, step_s: float) -> int:
    """`train_s` of a step without waiting, `step_s` with it."""
    if train_s <= 0.0:
        return STEPS_MAX
    cheapest = math.sqrt(2.0 * checkpoint_s * KILLED_EVERY_S / (train_s * max(train_s, step_s)))
    return max(1, int(min(cheapest, REPLAY_S / train_s, STEPS_MAX)))
