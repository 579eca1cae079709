"""The run's speed, waits included, and the line that the terminal shows for each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from echo2.base.units import format_seconds

STEPS_TIMED = 20


@dataclass(slots=True)
class StepPace:
    """Call `made` after each step. `steps`: step number and time in seconds of the newest steps."""

    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=STEPS_TIMED))

    def made(self, step: int, now: float) -> None:
        self.steps.append((step, now))

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the newest steps; None before the second step."""
        if len(self.steps) < 2:
            return None
        (first, began), (last, ended) = self.steps[0], self.steps[-1]
        return (ended - began) / (last - first)


def step_line(row: Mapping[str, object], steps: int, pace: StepPace) -> str:
    """`step 12/200  reward 0.413  8,200 tokens/s  2.1 s a step (10 % waiting)  6.6 min left`."""
    step, each = _number(row, "step"), pace.seconds_per_step
    busy, wait = _number(row, "step_s"), _number(row, "phase/wait_s")
    took = each if each is not None else busy + wait
    parts = [
        f"step {step:.0f}/{steps}",
        f"reward {_number(row, 'reward/mean'):.3f}",
        f"{_number(row, 'tokens') / took if took > 0 else 0.0:,.0f} tokens/s",
        f"{format_seconds(took)} a step ({wait / (busy + wait) if busy + wait > 0 else 0.0:.0%} waiting)",
    ]
    if each is not None and step < steps:
        parts.append(f"{format_seconds((steps - step) * each)} left")
    return "  ".join(parts)


def _number(row: Mapping[str, object], name: str) -> float:
    value = row.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
