"""The learner's utilisation: the share of time that it trains.

Guarantees: utilisation is busy / (busy + waiting), both measured. Evaluations, checkpoints' snapshots and a process's wait
for its first batch (workers join, load, compile) count as neither. Leaves to others: reading clocks (runtime).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_STEPS = 50


@dataclass(slots=True)
class Utilisation:
    """Busy and waiting seconds of the last `WINDOW_STEPS` steps (`recent`) and of all steps since the process began."""

    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    busy_s: float = 0.0
    wait_s: float = 0.0

    def add(self, busy_s: float, wait_s: float) -> None:
        self.recent.append((busy_s, wait_s))
        self.busy_s += busy_s
        self.wait_s += wait_s

    @property
    def means_s(self) -> tuple[float, float]:
        """Mean seconds per step over the window: busy, and busy plus waiting."""
        count = max(1, len(self.recent))
        busy_s = sum(busy for busy, _ in self.recent) / count
        return busy_s, busy_s + sum(wait for _, wait in self.recent) / count

    @property
    def window(self) -> float:
        return _share(sum(busy for busy, _ in self.recent), sum(wait for _, wait in self.recent))

    @property
    def overall(self) -> float:
        return _share(self.busy_s, self.wait_s)


def _share(busy_s: float, wait_s: float) -> float:
    total_s = busy_s + wait_s
    return busy_s / total_s if total_s > 0 else 1.0
