"""A bounded pool of contained processes, local or remote, each owned by one thread that may kill it.

Guarantees: at most `process_count` processes, started on first use; at most `queue_max` requests are queued, and a sender whose
requests take long delays only its own (fair_queue); every future completes. Waits: a thread for the next request (woken by
`submit`, `close` or a finished request) or for its process, with a deadline. Leaves to others: what requests mean.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from echo2.base.errors import LimitExceeded, TaskError
from echo2.contain.fair_queue import FairQueue
from echo2.contain.limits import Answer, Ending, Limits
from echo2.contain.runtime.sandbox import GRACE_S

Result = TypeVar("Result")
LOSSES_MAX = 2
"""How often a request may lose its machine before it is given up: it may be what takes them down."""
HELD = frozenset({Ending.CPU_USED_UP, Ending.OUTPUT_USED_UP, Ending.TIMED_OUT})


@dataclass(frozen=True, slots=True)
class _Request:
    body: Mapping[str, object]
    times: int
    begin: Callable[[], bool]
    finish: Callable[[Answer], None]
    cancel: Callable[[], bool]
    losses: int = 0


class RunnerLost(Exception):
    """A runner's machine disappeared during a request; another one may answer it."""


class Runner(Protocol):
    """One process that answers requests, one at a time: `sandbox.Sandbox`, or an equivalent on another machine."""

    def prepare(self, is_wanted: Callable[[], bool]) -> bool:
        """Waits until it can take a request; False once `is_wanted` returns False."""
        ...

    def ask(self, body: Mapping[str, object], times: int = 1) -> Answer:
        """Answers a request, which may take the time of `times` runs. Raises only RunnerLost."""
        ...

    def kill(self) -> None: ...


class Pool:
    """Call `submit` from any thread. `make` creates each process's runner; `limits`: of one run."""

    def __init__(self, make: Callable[[], Runner], limits: Limits, process_count: int, queue_max: int):
        self._make, self._limits = make, limits
        self._process_count = process_count
        self._queue_max = queue_max
        self._queue: FairQueue[_Request] = FairQueue()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(
        self, body: Mapping[str, object], read: Callable[[Answer], Result], sender: str = "", times: int = 1
    ) -> Future[Result]:
        """Queues `body`; the future gets what `read` makes of the answer. LimitExceeded if the queue is full."""
        future: Future[Result] = Future()

        def finish(answer: Answer) -> None:
            try:
                future.set_result(read(answer))
            except BaseException as error:  # noqa: BLE001 - passed to the future's waiter
                future.set_exception(error)

        request = _Request(body, times, future.set_running_or_notify_cancel, finish, future.cancel)
        with self._changed:
            if self._is_closed:
                raise TaskError("pool of contained processes: expected an open one, it is closed")
            if len(self._queue) >= self._queue_max:
                raise LimitExceeded(f"pool of contained processes: expected at most {self._queue_max} requests waiting")
            self._queue.push(sender, request)
            if len(self._threads) < self._process_count:
                thread = threading.Thread(target=self._work, name=f"contained-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """Cancels queued requests and waits for running ones, at most their time limit."""
        with self._changed:
            self._is_closed = True
            for request in self._queue.drain():
                request.cancel()
            self._changed.notify_all()
        limits = self._limits
        for thread in self._threads:
            thread.join(limits.wall_s + limits.start_s + GRACE_S)

    def _work(self) -> None:
        runner = self._make()
        try:
            while runner.prepare(lambda: not self._is_closed) and (taken := self._next()) is not None:
                sender, request = taken
                answer = Answer(Ending.DIED, note="cancelled")
                try:
                    if request.begin():
                        answer = runner.ask(request.body, request.times)
                        request.finish(answer)
                except RunnerLost as lost:
                    self._again(sender, request, str(lost))
                finally:
                    with self._changed:
                        self._queue.done(sender, answer.seconds, bool(sender) and answer.ending in HELD)
                        self._changed.notify_all()
        finally:
            runner.kill()

    def _again(self, sender: str, request: _Request, note: str) -> None:
        with self._changed:
            is_given_up = self._is_closed or request.losses >= LOSSES_MAX
            if not is_given_up:
                self._queue.push(sender, replace(request, begin=lambda: True, losses=request.losses + 1))
        if is_given_up:
            request.finish(Answer(Ending.FAULT, note=note))

    def _next(self) -> tuple[str, _Request] | None:
        """Waits for a request; None once the pool is closed."""
        with self._changed:
            while not self._is_closed:
                taken = self._queue.pop()
                if taken is not None:
                    return taken
                self._changed.wait()
            return None
