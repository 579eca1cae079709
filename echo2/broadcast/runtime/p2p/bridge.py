"""Connects asyncio and trio: a thread that runs trio, calls into it, and bounded pipes of frames.

Guarantees: no queue here is unbounded (a pipe holds at most its limit and one more frame; at most CALLS_MAX calls are
pending); a waiter on one side is woken by the other side, also when that side closes; cancelling the awaiting
asyncio task cancels the trio call; nothing outlives `stop`. Waits: a pipe's ends wait for room and for frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from echo2.base.errors import LimitExceeded, Unreachable

CALLS_MAX = 256
STOP_S = 5.0
T = TypeVar("T")


class TrioThread:
    """Runs trio in its own thread. Create and use it on one asyncio loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._calls = 0

    async def start(self) -> None:
        self._thread.start()
        await self._started

    async def stop(self) -> None:
        """Cancels everything in trio and waits for the thread, at most STOP_S."""
        nursery = self._nursery
        if nursery is not None:
            self._in_trio(nursery.cancel_scope.cancel)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), STOP_S)

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Runs `work()` in trio; returns its result or raises its exception."""
        if self._calls >= CALLS_MAX:
            raise LimitExceeded(f"libp2p: expected at most {CALLS_MAX} calls under way, got one more")
        result: asyncio.Future[T] = self._loop.create_future()
        scope = trio.CancelScope()
        self._calls += 1
        try:
            nursery = self._nursery
            if nursery is None:
                raise Unreachable("libp2p: its thread has ended")
            self._in_trio(nursery.start_soon, _perform, work, scope, _Answer(self._loop, result))
            return await result
        finally:
            self._calls -= 1
            if not result.done() or result.cancelled():
                self._in_trio(scope.cancel)

    def to_asyncio(self, callback: Callable[..., object], *args: object) -> None:
        """Called in trio: schedules a callback on the asyncio loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    def _in_trio(self, callback: Callable[..., object], *args: object) -> None:
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(callback, *args)

    def pipe(self, limit_bytes: int) -> Pipe:
        assert self._token is not None, "the thread has started"
        return Pipe(limit_bytes, self._in_trio, self.to_asyncio)

    def _run(self) -> None:
        try:
            trio.run(self._main)
        finally:
            self._nursery = None
            self.to_asyncio(self._ended.set)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.to_asyncio(self._started.set_result, None)
            await trio.sleep_forever()


class _Answer:
    """Delivers a call's result to its asyncio future."""

    def __init__(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[T]) -> None:
        self._loop = loop
        self._future: asyncio.Future[object] = future  # type: ignore[assignment]  # written, never read here

    def give(self, value: object, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set, value, error)

    def _set(self, value: object, error: BaseException | None) -> None:
        if self._future.done():
            return
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(value)


async def _perform(work: Callable[[], Awaitable[object]], scope: trio.CancelScope, answer: _Answer) -> None:
    value: object = None
    error: BaseException | None = Unreachable("libp2p: its thread has ended")
    try:
        with scope:
            value = await work()
            error = None
    except Exception as raised:  # delivered to the caller instead of crashing trio's nursery
        error = raised
    finally:
        answer.give(value, error)


class Pipe:
    """Frames in one direction between the two loops. Either end may close it; each end serves one task at a time."""

    def __init__(
        self,
        limit_bytes: int,
        in_trio: Callable[..., object],
        in_asyncio: Callable[..., object],
    ) -> None:
        self._limit = limit_bytes
        self._in_trio, self._in_asyncio = in_trio, in_asyncio
        self._lock = threading.Lock()
        self._frames: deque[bytes] = deque()
        self._held = 0
        self._is_closed = False
        self._for_trio = trio.Event()
        self._for_asyncio = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return self._held

    def close(self) -> None:
        """Closes it, from any thread. Frames inside can still be taken."""
        with self._lock:
            self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._in_trio(self._wake_trio)
        self._in_asyncio(self._for_asyncio.set)

    def _wake_trio(self) -> None:
        self._for_trio.set()

    def _put(self, frame: bytes) -> bool:
        with self._lock:
            if self._is_closed:
                raise Unreachable("the connection ended")
            if self._held >= self._limit:
                return False
            self._frames.append(frame)
            self._held += len(frame)
            return True

    def _take(self) -> tuple[bytes | None, bool]:
        """The next frame, if any, and whether the end was reached."""
        with self._lock:
            if not self._frames:
                return None, self._is_closed
            frame = self._frames.popleft()
            self._held -= len(frame)
            return frame, False

    async def put_from_asyncio(self, frame: bytes) -> None:
        while True:
            self._for_asyncio.clear()
            if self._put(frame):
                self._in_trio(self._wake_trio)
                return
            await self._for_asyncio.wait()

    async def take_in_asyncio(self) -> bytes | None:
        while True:
            self._for_asyncio.clear()
            frame, is_end = self._take()
            if frame is not None or is_end:
                self._in_trio(self._wake_trio)
                return frame
            await self._for_asyncio.wait()

    async def put_from_trio(self, frame: bytes) -> None:
        while True:
            self._for_trio = trio.Event()
            if self._put(frame):
                self._in_asyncio(self._for_asyncio.set)
                return
            await self._for_trio.wait()

    async def take_in_trio(self) -> bytes | None:
        while True:
            self._for_trio = trio.Event()
            frame, is_end = self._take()
            if frame is not None or is_end:
                self._in_asyncio(self._for_asyncio.set)
                return frame
            await self._for_trio.wait()
