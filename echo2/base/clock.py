"""The clock protocol. Core code never reads a clock: it gets `now` as an argument. Runtimes and the simulator own one."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back; its zero is arbitrary."""
