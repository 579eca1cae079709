"""A bounded pool of contained processes, each owned by one thread that may kill it.

Guarantees: at most `process_count` processes, started when first needed; at most `queue_max` requests wait, and a sender whose
requests take long delays its own (fair_queue); every future ends. Waits: a thread for the next request (woken by `submit`,
`close` and by a request that ends) or for its process, with a deadline. Leaves to others: what requests mean.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from echo2.base.errors import LimitExceeded, TaskError
from echo2.contain.fair_queue import FairQueue
from echo2.contain.limits import Answer, Ending
from echo2.contain.runtime.sandbox import GRACE_S, Launch, Sandbox

Result = TypeVar("Result")
HELD = frozenset({Ending.CPU_USED_UP, Ending.OUTPUT_USED_UP, Ending.TIMED_OUT})


@dataclass(frozen=True, slots=True)
class _Request:
    body: Mapping[str, object]
    times: int
    begin: Callable[[], bool]
    finish: Callable[[Answer], None]
    cancel: Callable[[], bool]


class Pool:
    """`submit` from any thread."""

    def __init__(self, launch: Launch, process_count: int, queue_max: int):
        self._launch = launch
        self._process_count = process_count
        self._queue_max = queue_max
        self._queue: FairQueue[_Request] = FairQueue()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(
        self, body: Mapping[str, object], read: Callable[[Answer], Result], sender: str = "", times: int = 1
    ) -> Future[Result]:
        """Has `body` answered and the answer read by `read`. `LimitExceeded` when too much waits."""
        future: Future[Result] = Future()

        def finish(answer: Answer) -> None:
            try:
                future.set_result(read(answer))
            except BaseException as error:  # noqa: BLE001 - told to whoever waits for it
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
        """Cancels what waits, and waits for what runs, at most its time limit."""
        with self._changed:
            self._is_closed = True
            for request in self._queue.drain():
                request.cancel()
            self._changed.notify_all()
        limits = self._launch.limits
        for thread in self._threads:
            thread.join(limits.wall_s + limits.start_s + GRACE_S)

    def _work(self) -> None:
        sandbox = Sandbox(self._launch)
        try:
            while (taken := self._next()) is not None:
                sender, request = taken
                answer = Answer(Ending.DIED, note="cancelled")
                try:
                    if request.begin():
                        answer = sandbox.ask(request.body, request.times)
                        request.finish(answer)
                finally:
                    with self._changed:
                        self._queue.done(sender, answer.seconds, bool(sender) and answer.ending in HELD)
                        self._changed.notify_all()
        finally:
            sandbox.kill()

    def _next(self) -> tuple[str, _Request] | None:
        """Waits for a request; None when the pool is closed."""
        with self._changed:
            while not self._is_closed:
                taken = self._queue.pop()
                if taken is not None:
                    return taken
                self._changed.wait()
            return None
