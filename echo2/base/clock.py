"""The clock protocol, and the pace of callers. Core code never reads a clock: it gets `now` as an argument. Runtimes and the
simulator own one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

CALLERS_MAX = 20_000  # as many as a fleet has workers (coordinator/hub): a megabyte or two


class Clock(Protocol):
    """Monotonic time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back; its zero is arbitrary."""


class Pace:
    """Limits each caller's rate: `burst` at once, then `per_s` a second; with `wait_max_s`, calls beyond that queue. The
    CALLERS_MAX most recent callers are remembered."""

    def __init__(self, per_s: float, burst: int, wait_max_s: float = 0.0) -> None:
        self._per_s, self._burst, self._wait_max_s = per_s, float(burst), wait_max_s
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str, now: float) -> float:
        """Seconds that the next call must wait; above `wait_max_s`, it is to be refused, and uses up no turn."""
        level, at = self._levels.pop(caller, (self._burst, now))
        level = min(self._burst, level + max(0.0, now - at) * self._per_s)
        wait_s = max(0.0, 1.0 - level) / self._per_s
        self._levels[caller] = (level - 1.0 if wait_s <= self._wait_max_s else level, max(at, now))
        while len(self._levels) > CALLERS_MAX:
            self._levels.popitem(last=False)
        return wait_s
