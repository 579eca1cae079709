"""The clock protocol. Core code never reads a clock: it is handed `now`. Runtimes and the simulator own one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back; its zero means nothing."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()
