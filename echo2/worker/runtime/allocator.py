"""What the C library keeps of memory that was freed.

A worker has a dozen threads, and glibc gives each an arena of its own, which keeps what was once used in it. Guarantees: on
another C library nothing is done. Leaves to others: what is allocated.
"""

from __future__ import annotations

import ctypes

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
ARENAS = 2


def limit_arenas() -> None:
    """Few arenas for all threads; only those count that are not there yet, so it comes first in a process."""
    _called("mallopt", _ARENA_MAX, ARENAS)


def give_back() -> None:
    """What is free goes back to the system: after work that took much for a moment."""
    _called("malloc_trim", 0)


def _called(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return
    function(*arguments)
