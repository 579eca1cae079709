"""Runs long computations while the coordinator keeps serving: for a large fleet in a process of their own.

    run --fleet of FLEET_MIN or more--> child process, started when first needed --answer--> caller
     |                                   '-- it died: warned of once, and computed here
     '--smaller--> a thread of this process

Python threads share one interpreter lock: while a plan for 2,000 workers was made in a thread, one lease in twenty waited ten
times as long as the others.

Guarantees: the child computes one thing at a time; it ends with this process, however this one ends, because its stdin closes.
Leaves to others: what is computed. It must be a module's function with picklable arguments and results.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

FLEET_MIN = 100
"""Fewest workers for which the child process is used. Below, a plan takes a few milliseconds, and the process would take a second
to start and 100 MB."""
NICENESS = 5
_log = logging.getLogger("echo2.coordinator")
T = TypeVar("T")


class Aside:
    """Owns the child process. `close` kills it, even in the middle of its work."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._is_closed = self._is_warned = False

    async def run(self, fleet: int, work: Callable[..., T], *told: Any) -> T:
        """Computes `work(*told)` and returns or raises its outcome. `fleet`: number of workers that it deals with."""
        if fleet < FLEET_MIN:
            return await asyncio.to_thread(work, *told)
        return await asyncio.to_thread(self._asked, work, *told)

    def close(self) -> None:
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # a thread that waits for its answer gets EOF, and cleans up itself
            if self._turn.acquire(blocking=False):
                _end(process)
                self._turn.release()

    def _asked(self, work: Callable[..., T], *told: Any) -> T:
        with self._turn:
            try:
                is_done, answer = self._answer((work, told))
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                return self._here(error, work, *told)
        if is_done:
            found: T = answer
            return found
        raise answer

    def _answer(self, question: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[bool, Any]:
        if self._process is None:
            child = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(question, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()
        is_done, answer = pickle.load(self._process.stdout)
        return is_done, answer

    def _here(self, error: Exception, work: Callable[..., T], *told: Any) -> T:
        """Computes in this process, because the child died (such as killed for its memory) or could not be started."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)
        if self._is_closed:
            raise asyncio.CancelledError
        if not self._is_warned:
            self._is_warned = True
            code = "" if process is None else f" with code {process.returncode}"
            _log.warning(
                "the planner's process ended%s (%s): this plan is made beside leases, which wait longer", code, error
            )
        return work(*told)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def main() -> None:
    """Main loop of the child: answers one question after another until its stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator handles a terminal's Ctrl-C
    os.nice(NICENESS)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # keeps what libraries print out of the answers
        with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
            while True:
                answer(sys.stdin.buffer, answers)


def answer(questions: BinaryIO, answers: BinaryIO) -> None:
    """Reads one question, computes it and writes the answer. EOFError if there are no more questions."""
    work, told = pickle.load(questions)
    try:
        said: tuple[bool, Any] = True, work(*told)
    except Exception as error:  # noqa: BLE001
        said = False, error
    answers.write(_pickled(said))
    answers.flush()


def _pickled(said: tuple[bool, Any]) -> bytes:
    try:
        data = pickle.dumps(said, pickle.HIGHEST_PROTOCOL)
        pickle.loads(data)  # some exceptions can be pickled but not unpickled
        return data
    except Exception:  # noqa: BLE001
        return pickle.dumps((False, RuntimeError(repr(said[1]))), pickle.HIGHEST_PROTOCOL)
