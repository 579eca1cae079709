"""Makes plans of the pool while the coordinator keeps serving: for a large fleet in a process of their own.

Python threads share one interpreter lock: while a plan for 2,000 workers was made in a thread, one lease in twenty waited ten times
as long as the others. Guarantees: the process computes one thing at a time, and ends when `close` is called or this process ends,
however it ends. If it dies (killed for its memory) or cannot be started (no descriptor, no memory), the work is done in a thread,
and the next work gets a new process. Nothing is written to standard output: HiGHS, the integer solver's library, prints a line now
and then whatever its options say, and inside `quiet_solver` output to file descriptor 1 goes to standard error.
The module imports little, so that the process starts fast.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from echo2.cost_model.plan import Plan
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig

# Below, few leases wait while a thread plans: for 0.2 s, or for 3 s if no pool reaches the target. The process takes a second to
# start and 100 MB.
FLEET_MIN = 100
NICENESS = 5  # leases go first where cores are scarce
_log = logging.getLogger("echo2.coordinator")
T = TypeVar("T")
_lock = threading.Lock()


@contextmanager
def quiet_solver() -> Iterator[None]:
    """Redirects the whole process's standard output to standard error inside the block; blocks of several threads run in turn."""
    with _lock, ExitStack() as restored:
        print(end="", flush=True)  # does nothing if there is none
        with suppress(OSError):  # a daemon without standard output or error has nothing to redirect
            stdout = os.dup(1)
            restored.callback(os.close, stdout)
            os.dup2(2, 1)
            restored.callback(os.dup2, stdout, 1)
            restored.callback(print, end="", flush=True)
        yield


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


class PlanProcess:
    """Owns the process, which is started when first needed. `work` must be a module's function with picklable arguments."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._lifeline: Connection | None = None
        self._is_closed = self._is_warned = False

    async def run(self, fleet: int, work: Callable[..., T], *args: Any) -> T:
        """Computes `work(*args)` and returns or raises its outcome. `fleet`: number of workers that it deals with."""
        if fleet >= FLEET_MIN:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._started(), work, *args)
            except (BrokenProcessPool, OSError) as error:
                if self._is_closed:
                    raise asyncio.CancelledError from None
                self._end()
                if not self._is_warned:
                    text = "the planner's process ended or could not be started (%s): plans are made beside leases, which wait"
                    _log.warning(text, error)
                self._is_warned = True
        return await asyncio.to_thread(work, *args)

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            if self._is_closed:
                raise asyncio.CancelledError
            context = multiprocessing.get_context("spawn")  # a fork would copy locks that this process's threads hold
            theirs, self._lifeline = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(1, context, _set_up, (theirs,))
        return self._pool

    def close(self) -> None:
        """Ends the process, even in the middle of its work."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        if self._pool is not None and self._lifeline is not None:
            self._lifeline.close()
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._lifeline = None


def _set_up(lifeline: Connection) -> None:
    """In the child: lower priority, no reaction to Ctrl-C, and an end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)  # readable at its end alone, which the kernel brings about where the parent was killed
    os._exit(0)
