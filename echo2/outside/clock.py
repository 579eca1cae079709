"""The clock interface, and the machine's own clocks."""

from __future__ import annotations

import time
from typing import Protocol


class OutsideClock(Protocol):
    def unix_now(self) -> float: ...

    def monotonic(self) -> float: ...


class MachineClock:
    """The system's clocks."""

    __slots__ = ()

    def unix_now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()
