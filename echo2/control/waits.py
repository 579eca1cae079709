"""What a node is waiting for, and since when: for the log, the heartbeat and `echo-worker status`.

Guarantees: a wait is logged when it begins and again every `REMINDER_S`, so no wait is silent.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field

from echo2.base.clock import Clock

REMINDER_S = 30.0  # often enough for a person who looks, rare enough for a log of days
_log = logging.getLogger("echo2.control")


@dataclass(slots=True)
class _Wait:
    text: str
    since: float
    told_at: float


@dataclass(slots=True)
class Waits:
    """Current waits by waiter. The oldest one is what blocks the rest."""

    clock: Clock
    _waits: dict[str, _Wait] = field(default_factory=dict)

    def begin(self, waiter: str, text: str) -> None:
        """`waiter` waits for `text`; a changed text keeps the start time."""
        now = self.clock.now()
        known = self._waits.get(waiter)
        if known is None:
            self._waits[waiter] = _Wait(text, now, now)
            _log.info("waits for %s", text)
        elif known.text != text:
            self._waits[waiter] = _Wait(text, known.since, now)
            _log.info("waits for %s", text)
        elif now >= known.told_at + REMINDER_S:
            known.told_at = now
            _log.info("still waits, for %.0f s now, for %s", now - known.since, text)

    def end(self, waiter: str) -> None:
        known = self._waits.pop(waiter, None)
        if known is not None:
            _log.debug("waited %.1f s for %s", self.clock.now() - known.since, known.text)

    def longest(self) -> tuple[str, float]:
        """The oldest wait and its age in seconds; ("", 0) if there is none."""
        return next(iter(self.by_age()), ("", 0.0))

    def by_age(self) -> list[tuple[str, float]]:
        """All waits with their age in seconds, oldest first."""
        now = self.clock.now()
        return [(wait.text, now - wait.since) for wait in sorted(self._waits.values(), key=lambda wait: wait.since)]


FLOOR_SHARE = 0.25  # never at once: a full jitter alone would let some callers hammer


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
