"""Unix time that never goes back: the system's at the start, then the monotonic clock. Deadlines outlive the process,
so they are kept in unix time; within a process a step of the system's clock must not end leases."""

from __future__ import annotations

import time


class SteadyUnixClock:
    """`Clock` in unix seconds."""

    __slots__ = ("_offset_s",)

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset_s
