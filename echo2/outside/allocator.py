"""Limits the freed memory that the C library keeps.

A worker has a dozen threads, and glibc gives each an arena, which keeps the memory once used in it. A trainer on a CPU allocates
activations of megabytes between smaller, long-lived objects; glibc places them side by side, so freed memory between others
is not returned. Guarantees: does nothing with another C library.
"""

from __future__ import annotations

import ctypes

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
ARENAS = 2  # each thread's own arena keeps what it freed; two serve the few threads that allocate much
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
MAPPED_BYTES = 1 << 20  # chunks and tensors, not messages


def limit_arenas() -> None:
    """Limits the number of arenas for all threads. Call it first in a process: existing arenas stay."""
    _called("mallopt", _ARENA_MAX, ARENAS)


def map_large() -> None:
    """From now on, blocks of MAPPED_BYTES or more get their own pages, which are returned when freed. By default glibc raises that
    threshold up to 32 MiB by itself. In a training step of 135 M parameters the peak falls by 0.35 GB and 1 GB of free pages is
    returned; mapping new pages takes 5 % more processor time and no more wall clock (`benchmarks.bench_scale`)."""
    _called("mallopt", _MMAP_THRESHOLD, MAPPED_BYTES)


def give_back() -> None:
    """Returns free memory to the system; call it after work with a high peak."""
    _called("malloc_trim", 0)


def _called(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return
    function(*arguments)
