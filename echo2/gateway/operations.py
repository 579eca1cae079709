"""Operations that a client asks for and comes back for: their results by id, and the order in which they run.

Guarantees: an operation that is asked for again, because an answer was lost, runs once; numbered operations run one at a time
in the order of their numbers, whatever the order in which they come; results are kept until RESULTS_MAX newer ones are, those
that were read until READ_MAX newer ones were. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

from echo2.gateway.episodes import CallRefused
from echo2.outside.guard import cancel_all

RESULTS_MAX = 16384  # a few rounds of the 2,000 samples that one sampling client has under way at most
READ_MAX = 64  # whose answer may be lost and asked for again: one of an SDK's connections each
AHEAD_MAX = 4096  # operations that may wait for an earlier number: chunks of 1,024 examples
RETRY_AFTER_S = 1.0  # an operation takes a step or so
MISSING_S = 360.0  # the SDK sends a request again for 300 s, and a body takes at most 60
_T = TypeVar("_T")


class Operations(Generic[_T]):
    """Operations by id, with their results once they have ended."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[_T]] = {}
        self._read: dict[str, None] = {}  # in the order in which they were

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    def begin(self, request_id: str, work: Callable[[], Coroutine[None, None, _T]]) -> None:
        """Begins the operation, unless one of this id was begun before. Raises CallRefused (429) if too many are under way."""
        if request_id in self._tasks:
            return
        if len(self._tasks) >= RESULTS_MAX:
            oldest = next((name for name, task in self._tasks.items() if task.done()), None)
            if oldest is None:
                text = f"expected at most {RESULTS_MAX} operations under way, come again when some have ended"
                raise CallRefused(429, "busy", text, RETRY_AFTER_S)
            del self._tasks[oldest]
        task = self._tasks[request_id] = asyncio.get_running_loop().create_task(work())
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody has to come for it

    async def result(self, request_id: str, within_s: float) -> _T | None:
        """Returns what the operation returned, or raises what it raised; None if it is still under way after `within_s`. Raises
        CallRefused (410) if there is none of this id, or it was cancelled."""
        task = self._tasks.get(request_id)
        if task is not None:
            await asyncio.wait({task}, timeout=within_s)
        if task is None or task.cancelled():
            raise CallRefused(
                410, "operation_gone", f"expected an operation since the last start, got {request_id!r:.80}"
            )
        if not task.done():
            return None
        self._read.setdefault(request_id)
        if len(self._read) > READ_MAX:
            oldest = next(iter(self._read))
            del self._read[oldest]
            self._tasks.pop(oldest, None)
        return task.result()

    def cancel(self, request_id: str) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    async def close(self) -> None:
        await cancel_all(set(self._tasks.values()))


class InOrder:
    """The turns of a client's operations, numbered from 1 on. `missing`: the number that was given up last; 0: none."""

    def __init__(self) -> None:
        self._next, self.missing = 1, 0
        self._waiting: dict[int, asyncio.Event] = {}

    def check(self, number: int) -> None:
        """Raises CallRefused for a number that cannot have its turn."""
        if not self._next <= number < self._next + AHEAD_MAX:
            text = f"seq_id: expected {self._next}, the next, or one of the {AHEAD_MAX} after it, got {number}"
            raise CallRefused(400, "invalid_request_error", text)

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Waits until all earlier numbers have had their turn, but MISSING_S at most for one that does not come: its request was
        refused unread, maybe. `check` has passed this one."""
        event = self._waiting[number] = asyncio.Event()
        while number > self._next:
            with suppress(TimeoutError):
                async with asyncio.timeout(MISSING_S):
                    await event.wait()
            if not event.is_set() and self._next not in self._waiting:
                self.missing, self._next = self._next, min(self._waiting)
                self._waiting[self._next].set()
        try:
            yield
        finally:
            del self._waiting[number]
            self._next = number + 1
            if (following := self._waiting.get(self._next)) is not None:
                following.set()
