"""An asyncio loop whose time is virtual: if nothing is ready, the clock advances to the next timer.

Guarantees: the same calls give the same order, under any hash seed; work for threads runs on the loop itself, in the caller's
context, and takes as much virtual time as it `spend`s; callbacks of a frozen process are held back until it is thawed.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from echo2.outside import outside_of

T = TypeVar("T")
THREAD_S = 0.0002  # minimum time to hand a piece of work to a thread and back
HANDLES_AT_ONE_TIME_MAX = 500_000  # a loop that never lets time pass is an endless one


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks are iterated in the same order in every run."""

    def __init__(
        self, number: int, coro: Coroutine[Any, Any, Any], *, loop: asyncio.AbstractEventLoop, **options: Any
    ) -> None:
        self.number = number
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Lane:
    """The queue of a single-threaded executor."""

    def __init__(self) -> None:
        self.is_busy = False
        self.waiting: deque[Callable[[], None]] = deque()


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. It never polls the operating system, so real sockets opened on it are not served."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__()
        self._numbers = 0
        self._spent_s = 0.0
        self._lanes: dict[int, tuple[Executor, _Lane]] = {}
        self._at_this_time = 0
        self.set_task_factory(self._new_task)
        self.errors: list[str] = []
        self.set_exception_handler(
            lambda _, context: self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")
        )

    def time(self) -> float:
        return self._now_s

    # ---- tasks and threads

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        self._numbers += 1
        context: contextvars.Context | None = options.get("context")
        task = NumberedTask(self._numbers, coro, loop=loop, **options)
        owner: Any = outside_of(context if context is not None else contextvars.copy_context())
        if owner is not None:
            owner.began(task)
        return task

    def spend(self, seconds: float) -> None:
        """Adds virtual seconds to the thread work that is running now."""
        self._spent_s += seconds

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        lane = self._lane_of(executor)

        def begin() -> None:
            self._spent_s = 0.0
            try:
                result, error = func(*args), None
            except BaseException as raised:  # noqa: BLE001  (passed to the waiting caller, as for a real thread)
                result, error = None, raised
            self.call_later(THREAD_S + self._spent_s, end, result, error)

        def end(result: Any, error: BaseException | None) -> None:
            if lane is not None:
                lane.is_busy = False
                if lane.waiting:
                    lane.is_busy = True
                    lane.waiting.popleft()()
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        context = contextvars.copy_context()
        if lane is not None and lane.is_busy:
            lane.waiting.append(lambda: self.call_soon(begin, context=context))  # type: ignore[arg-type]
        else:
            if lane is not None:
                lane.is_busy = True
            self.call_soon(begin, context=context)
        return future

    def _lane_of(self, executor: Executor | None) -> _Lane | None:
        if executor is None or getattr(executor, "_max_workers", 0) != 1:
            return None
        return self._lanes.setdefault(id(executor), (executor, _Lane()))[1]

    # ---- time

    def _run_once(self) -> None:
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        while scheduled and scheduled[0].cancelled():
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
            heapq.heappop(scheduled)._scheduled = False  # type: ignore[attr-defined]
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not scheduled:
                raise RuntimeError("nothing is ready, and nothing ever will be")
            if scheduled[0].when() > self._now_s:
                self._now_s, self._at_this_time = scheduled[0].when(), 0
        while scheduled and scheduled[0].when() <= self._now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False  # type: ignore[attr-defined]
            ready.append(handle)
        self._at_this_time += len(ready)
        if self._at_this_time > HANDLES_AT_ONE_TIME_MAX:
            raise RuntimeError(f"time stands still at {self._now_s} s")
        for _ in range(len(ready)):
            run = ready.popleft()
            if run._cancelled:
                continue
            owner: Any = outside_of(run._context)  # type: ignore[attr-defined]
            if owner is not None and owner.is_frozen:
                owner.held.append(run)
            else:
                run._run()

    def release(self, handles: list[asyncio.Handle]) -> None:
        """Schedules the callbacks held back for a process that has been thawed."""
        self._ready.extend(handles)  # type: ignore[attr-defined]
