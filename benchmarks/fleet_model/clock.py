"""A virtual clock: runs events in order of time, ties in order of scheduling.

Guarantees: time never goes back; the same calls give the same order. Leaves to others: what the events do. `run` never
blocks: it ends if no event is left, the end time is reached, or a callback stops it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

EVENTS_MAX = 50_000_000


class VirtualClock:
    """A clock (`now`) and its queue of events."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._is_stopped = False

    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Calls `callback` at `when`, or now if `when` is in the past."""
        heapq.heappush(self._queue, (max(when, self._now), next(self._order), callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Calls `callback` in `delay_s` seconds."""
        self.at(self._now + delay_s, callback)

    def stop(self) -> None:
        """Ends `run` after the current event."""
        self._is_stopped = True

    def run(self, until_s: float) -> None:
        """Runs events up to `until_s`."""
        events = 0
        while self._queue and not self._is_stopped and self._queue[0][0] <= until_s:
            self._now, _, callback = heapq.heappop(self._queue)
            callback()
            events += 1
            assert events <= EVENTS_MAX, f"expected at most {EVENTS_MAX} events, now at {self._now} s"
        if not self._is_stopped:
            self._now = max(self._now, until_s)
