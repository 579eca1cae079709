"""Backoff between attempts: exponential, jittered, bounded. The caller does the waiting.

Full jitter (uniform between a floor and the growing ceiling) keeps a fleet that lost its coordinator at the same moment
from reconnecting at the same moment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FLOOR_SHARE = 0.25


def ceiling_s(failures: int, first_s: float, longest_s: float) -> float:
    """The longest pause after this many failures in a row, before jitter; doubles with each failure."""
    return min(longest_s, first_s * 2.0 ** min(failures, 30))


@dataclass(slots=True)
class Backoff:
    """`first_s` doubles with each failure up to `longest_s`; `succeeded` starts over."""

    rng: random.Random
    first_s: float = 0.2
    longest_s: float = 15.0
    failures: int = 0

    def next_pause_s(self) -> float:
        """Counts a failure; returns the seconds to wait before the next attempt."""
        pause_s = ceiling_s(self.failures, self.first_s, self.longest_s)
        self.failures += 1
        return self.rng.uniform(FLOOR_SHARE * pause_s, pause_s)

    def succeeded(self) -> None:
        self.failures = 0
