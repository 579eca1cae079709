"""Keeps the interpreter's own pauses short, because lease requests wait for them.

By default, Python's garbage collector walks all objects every few seconds: with 2,000 workers each walk stops the loop for a
third of a second. Here it examines at each tick only the objects made since the last one, and freezes the survivors. It walks
everything when the process has grown by a quarter since the last full walk, and otherwise so rarely that it takes less than a
two-thousandth of the time. A thread that computes (planning) releases the interpreter `SWITCH_S` after the loop wants it.

Guarantees: garbage in cycles grows the process by at most a quarter before it is found; on exit all settings are restored.
Leaves to others: when to tick (daemon).
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from echo2.outside import monotonic

SWITCH_S = 0.0005
WALK_SHARE_MAX = 1 / 2000
WALK_PAUSE_S_MIN = 60.0
GROWTH = 1.25


class Pauses(Protocol):
    """The daemon's view of `ShortPauses`."""

    def __enter__(self) -> Pauses: ...

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None: ...

    def tick(self) -> None: ...


def peak_kilobytes() -> int:
    """The process's peak memory in kilobytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class ShortPauses:
    """A context manager; its settings hold inside the block."""

    def __init__(self, clock: Callable[[], float] = monotonic, peak: Callable[[], int] = peak_kilobytes) -> None:
        self._clock, self._peak = clock, peak
        self._was_enabled, self._switch_s = True, 0.0
        self._walked_at = self._walk_s = 0.0
        self._peak_then = 0

    def __enter__(self) -> ShortPauses:
        self._was_enabled, self._switch_s = gc.isenabled(), sys.getswitchinterval()
        gc.disable()
        sys.setswitchinterval(SWITCH_S)
        self._walked_at, self._peak_then = self._clock(), self._peak()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        sys.setswitchinterval(self._switch_s)

    def tick(self) -> None:
        """Collects garbage; call it twice a second."""
        if self._is_due():
            gc.unfreeze()
            began = self._clock()
            gc.collect()
            self._walked_at = self._clock()
            self._walk_s, self._peak_then = self._walked_at - began, self._peak()
        else:
            gc.collect(1)
        gc.freeze()

    def _is_due(self) -> bool:
        rest_s = self._clock() - self._walked_at
        has_grown = self._peak() > GROWTH * self._peak_then
        return has_grown or rest_s >= max(WALK_PAUSE_S_MIN, self._walk_s / WALK_SHARE_MAX)
