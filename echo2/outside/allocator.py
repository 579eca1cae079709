"""What the C library keeps of memory that was freed.

A worker has a dozen threads, and glibc gives each an arena of its own, which keeps what was once used in it. A trainer on a CPU
allocates activations of megabytes between smaller things that stay; glibc puts them side by side, and what is freed between others
is not given back. Guarantees: on another C library nothing is done. Leaves to others: what is allocated.
"""

from __future__ import annotations

import ctypes

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
ARENAS = 2
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
MAPPED_BYTES = 1 << 20


def limit_arenas() -> None:
    """Few arenas for all threads; only those count that are not there yet, so it comes first in a process."""
    _called("mallopt", _ARENA_MAX, ARENAS)


def map_large() -> None:
    """Blocks of MAPPED_BYTES or more get pages of their own from now on, which go back when they are freed. glibc would raise that
    size to 32 MiB as it goes. Of a training step of 135 M parameters the peak falls by 0.35 GB and 1 GB of free pages is given
    back; new pages take 5 % more processor time and no more wall clock (`benchmarks.bench_scale`)."""
    _called("mallopt", _MMAP_THRESHOLD, MAPPED_BYTES)


def give_back() -> None:
    """What is free goes back to the system: after work that took much for a moment."""
    _called("malloc_trim", 0)


def _called(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return
    function(*arguments)
