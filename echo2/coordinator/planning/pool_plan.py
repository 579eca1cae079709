"""Makes a plan of the pool. The module imports little, so that a process of its own starts fast.

Guarantees: nothing is written to standard output: HiGHS, the integer solver's library, occasionally prints a line whatever its
options say. While any thread is inside `quiet_solver`, output to file descriptor 1 goes to standard error, so nothing is lost.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from echo2.cost_model.plan import Plan
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig

_lock = threading.Lock()
_inside = 0
_kept = -1


@contextmanager
def quiet_solver() -> Iterator[None]:
    """Redirects the whole process's standard output to standard error inside the block."""
    global _inside, _kept
    with _lock:
        if _inside == 0:
            sys.stdout.flush()
            with suppress(OSError):  # a daemon without standard output or error has nothing to redirect
                _kept = os.dup(1)
                os.dup2(2, 1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _kept >= 0:
                sys.stdout.flush()
                os.dup2(_kept, 1)
                os.close(_kept)
                _kept = -1


def make_plan(snapshot: FleetSnapshot, config: PlanConfig, previous: Plan | None = None) -> Plan:
    """Makes the next plan. Loads the libraries on first use, because that takes longer than the daemon's start."""
    from echo2.cost_model.planner import plan

    with quiet_solver():
        return plan(snapshot, config, previous)


def feasible_plan(snapshot: FleetSnapshot, config: PlanConfig) -> Plan | None:
    """A plan that keeps the learner busy within the budget, None if there is none: spares the search for the best effort."""
    from echo2.cost_model.planner import plan_if_feasible

    with quiet_solver():
        return plan_if_feasible(snapshot, config)
