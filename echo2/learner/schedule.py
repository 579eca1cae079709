"""The learning rate of a step, a pure function of the step."""

from __future__ import annotations

import math


def learning_rate(step: int, base: float, warmup_steps: int, total_steps: int, schedule: str) -> float:
    """Rises linearly over the warm-up, then stays at `base` (`constant`) or falls to 0 at `total_steps` (`linear`, `cosine`).
    `step` is counted from 0."""
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if schedule == "constant" or total_steps <= warmup_steps:
        return base
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return base * (1.0 - done) if schedule == "linear" else base * 0.5 * (1.0 + math.cos(math.pi * done))
