"""The clock protocol, the pace of callers, and what a node waits for and since when: for the log, the heartbeat and `echo-worker
status`. Core code never reads a clock: it gets `now` as an argument. Guarantees: a wait is logged when it begins and again every
`REMINDER_S`, so no wait is silent."""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from dataclasses import dataclass, field
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


REMINDER_S = 30.0  # often enough for a person who looks, rare enough for a log of days
_log = logging.getLogger("echo2.control")


@dataclass(slots=True)
class _Wait:
    text: str
    since: float
    told_at: float


NO_REQUESTS = "requests of trainers"  # what a serving learner waits for where nobody asks; the page tells it apart


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
