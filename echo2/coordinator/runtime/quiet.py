"""Keeps the integer solver's library from writing to standard output.

HiGHS occasionally prints a line whatever its options say. Guarantees: while any thread is inside `quiet_solver`, output to file
descriptor 1 goes to standard error, so nothing is lost; afterwards it goes to standard output again, in whatever order threads
leave.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
_kept = -1


@contextmanager
def quiet_solver() -> Iterator[None]:
    """Redirects the whole process's standard output to standard error inside the block."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _kept
    with _lock:
        if _inside == 0:
            sys.stdout.flush()
            try:
                _kept = os.dup(1)
                os.dup2(2, 1)
            except OSError:
                _kept = -1  # a daemon without standard output or error: nothing to redirect
        _inside += 1


def _leave() -> None:
    global _inside, _kept
    with _lock:
        _inside -= 1
        if _inside == 0 and _kept >= 0:
            sys.stdout.flush()
            os.dup2(_kept, 1)
            os.close(_kept)
            _kept = -1
