"""What a node waits for, since when and on whom: for the log, the heartbeat and `echo-worker status`.

Guarantees: a wait is logged when it begins and again every `REMINDER_S`, so none is silent. Leaves to others: bounding
it (each waiter has its own limit or says that it waits for ever).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from echo2.base.clock import Clock

REMINDER_S = 30.0
_log = logging.getLogger("echo2.control")


@dataclass(slots=True)
class _Wait:
    text: str
    since: float
    told_at: float


@dataclass(slots=True)
class Waits:
    """Waits by waiter. The one that began first is the one that holds up the rest."""

    clock: Clock
    _waits: dict[str, _Wait] = field(default_factory=dict)

    def begin(self, waiter: str, text: str) -> None:
        """`waiter` waits for `text`; a change of the text alone keeps its beginning."""
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
        """What it has waited for longest and for how many seconds; ("", 0) when it waits for nothing."""
        return next(iter(self.by_age()), ("", 0.0))

    def by_age(self) -> list[tuple[str, float]]:
        """All that it waits for and for how many seconds, the longest first."""
        now = self.clock.now()
        return [(wait.text, now - wait.since) for wait in sorted(self._waits.values(), key=lambda wait: wait.since)]
