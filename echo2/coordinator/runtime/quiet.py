"""Keeps the integer solver's library from writing to standard output.

HiGHS prints a line of its own on rare occasions, past every option. Guarantees: while any thread is inside `quiet_solver`,
what goes to file descriptor 1 goes to standard error; afterwards it is as before, in whatever order threads leave.
Leaves to others: nothing is lost, so nobody else need care.
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
    """Standard output goes to standard error meanwhile, for the whole process."""
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
                _kept = -1  # a daemon without standard output or error has nothing to keep clean
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
