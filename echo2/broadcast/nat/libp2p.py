"""Connects asyncio and trio: a thread that runs trio, calls into it, and bounded pipes of frames.

Guarantees: no queue here is unbounded (a pipe holds at most its limit and one more frame; at most CALLS_MAX calls are
pending); a waiter on one side is woken by the other side, also when that side closes; cancelling the awaiting
asyncio task cancels the trio call; nothing outlives `stop`. Waits: a pipe's ends wait for room and for frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from echo2.base.errors import EchoError, LimitExceeded, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.connection import StreamConnection
from echo2.broadcast.nat.facts import HostFacts, HostOptions
from echo2.broadcast.nat.host import CLOSE_S, P2pHost
from echo2.broadcast.nat.relay import reset, write
from echo2.broadcast.reachability import LinkKind, LinkWay
from echo2.broadcast.transport import Accept
from echo2.outside.ending import cancel_all
from echo2.outside.streams import Remote, StreamReader
from echo2.trust.identity import PeerIdentity
from echo2.trust.tls import Credentials

CALLS_MAX = 256  # between the loops: more would mean that one hangs
STOP_S = 5.0  # streams are reset at once
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


PIPE_BYTES = 256 << 10  # one chunk of the usual size
READ_BYTES = 1 << 20  # a yamux window
START_S = 20.0  # loading libp2p takes seconds on a busy machine
_log = logging.getLogger("echo2.broadcast")


class P2pStream:
    """A `Stream` over libp2p, whose bytes cross to its thread by pipes. Its peer has proven who it is before."""

    certificate = b""
    remote: Remote = ("", 0)

    def __init__(self, reader: StreamReader, outward: Pipe, inward: Pipe) -> None:
        self._reader, self._outward, self._inward = reader, outward, inward
        self._unsent: list[bytes] = []
        self._unsent_bytes, self._high = 0, PIPE_BYTES
        self._is_paused = self._is_closing = False
        self._changed, self._may_read = asyncio.Event(), asyncio.Event()
        self._may_read.set()

    async def run(self) -> None:
        """Moves bytes both ways until either side ends it."""
        tasks = [asyncio.ensure_future(work) for work in (self._read(), self._write())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.abort()
            ended = await cancel_all(tasks)
            self._reader.connection_lost(next((e for e in ended if isinstance(e, EchoError)), None))

    async def _read(self) -> None:
        while (piece := await self._inward.take_in_asyncio()) is not None:
            rest = memoryview(piece)
            while rest and not self._is_closing:
                await self._may_read.wait()
                room = self._reader.get_buffer(-1)
                count = min(len(room), len(rest))
                room[:count] = rest[:count]
                rest = rest[count:]
                self._reader.buffer_updated(count)
            self._reader.worked(0.0, 1, len(piece))

    async def _write(self) -> None:
        while self._unsent or not self._is_closing:
            if not self._unsent:
                self._changed.clear()
                await self._changed.wait()
                continue
            pieces, self._unsent = b"".join(self._unsent), []
            await self._outward.put_from_asyncio(pieces)
            self._unsent_bytes -= len(pieces)
            if self._is_paused and self._unsent_bytes <= self._high:
                self._is_paused = False
                self._reader.resume_writing()

    def write(self, data: bytes | memoryview) -> None:
        if self._is_closing:
            return
        self._unsent.append(bytes(data))
        self._unsent_bytes += len(data)
        self._changed.set()
        if self._unsent_bytes > self._high and not self._is_paused:
            self._is_paused = True
            self._reader.pause_writing()

    def set_write_buffer_limits(self, high: int) -> None:
        self._high = high

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def is_reading(self) -> bool:
        return self._may_read.is_set()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        self._changed.set()
        self._may_read.set()

    def abort(self) -> None:
        self.close()
        self._unsent.clear()
        self._outward.close()
        self._inward.close()


class P2pSide:
    """`accept`: called with each connection over a hole, whoever opened it; None: there are none."""

    def __init__(
        self,
        credentials: Credentials,
        options: HostOptions,
        accept: Accept | None,
        changed: Callable[[HostFacts], None],
    ) -> None:
        self._accept, self._changed = accept, changed
        self._host = P2pHost(credentials, options, self)
        self._thread = TrioThread("libp2p")
        self._tasks: set[asyncio.Task[None]] = set()
        self._punching: set[PeerId] = set()
        self._is_closed = False
        self.facts = HostFacts()

    @property
    def port(self) -> int:
        return self._host.port

    # ---- life

    async def start(self) -> None:
        """Starts the thread; returns once libp2p listens."""
        await self._thread.start()
        started = asyncio.Event()
        run = functools.partial(self._host.run, lambda: self._thread.to_asyncio(started.set))
        running = self._spawn(self._thread.call(run))
        listening = asyncio.create_task(started.wait())
        await asyncio.wait({running, listening}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if not started.is_set():
            await self.close()
            if running.done():
                running.result()
            raise Unreachable(f"libp2p: expected it to listen within {START_S:.0f} s")

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._is_closed:
            _log.error("libp2p: %s: %s", type(error).__name__, error)

    async def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(Exception):  # it may be cut off before it finishes
            await asyncio.wait_for(self._thread.call(self._host.close), CLOSE_S + 1)
        await self._thread.stop()
        await cancel_all(self._tasks)

    # ---- called from asyncio

    def use_relay(self, peer: PeerId, address: str) -> None:
        """Keeps a reservation at the relay at host:port."""
        self._spawn(self._thread.call(functools.partial(_later, self._host.use_relay, peer, address)))

    def drop_relay(self, peer: PeerId) -> None:
        self._spawn(self._thread.call(functools.partial(_later, self._host.drop_relay, peer)))

    def punch(self, peer: PeerId, relay: PeerId) -> None:
        if peer not in self._punching:
            self._punching.add(peer)
            self._spawn(self._punch(peer, relay))

    async def _punch(self, peer: PeerId, relay: PeerId) -> None:
        try:
            await self._thread.call(functools.partial(self._host.punch, peer, relay))
        except Exception as error:  # libp2p raises many kinds; the link stays relayed
            _log.info("libp2p: no hole to %s: %s", peer, error or type(error).__name__)
        finally:
            self._punching.discard(peer)

    async def _serve(self, peer: PeerIdentity, is_outgoing: bool, outward: Pipe, inward: Pipe) -> None:
        way = LinkWay(LinkKind.HOLE_PUNCHED, "neither can be dialled; both opened their NAT at once")
        connection = StreamConnection(is_outgoing=is_outgoing, way=way)
        stream = P2pStream(connection, outward, inward)
        connection.connection_made(stream)
        connection.is_known(peer)
        running = asyncio.create_task(stream.run())
        try:
            if self._accept is not None and not self._is_closed:
                await self._accept(connection)
        finally:
            await connection.close()
            await asyncio.gather(running, return_exceptions=True)

    def _facts_are(self, facts: HostFacts) -> None:
        self.facts = facts
        self._changed(facts)

    # ---- called from trio

    def changed(self, facts: HostFacts) -> None:
        self._thread.to_asyncio(self._facts_are, facts)

    async def exchange(self, stream: Any, peer: PeerIdentity, is_outgoing: bool) -> None:
        """Moves bytes between the stream and the pipes until either ends."""
        outward, inward = self._thread.pipe(PIPE_BYTES), self._thread.pipe(PIPE_BYTES)
        self._thread.to_asyncio(lambda: self._spawn(self._serve(peer, is_outgoing, outward, inward)))
        try:
            async with trio.open_nursery() as nursery:
                for move in (_write(stream, outward), _read(stream, inward)):
                    nursery.start_soon(_until_the_first_ends, move, nursery.cancel_scope)
        finally:
            outward.close()
            inward.close()
            with trio.CancelScope(shield=True):
                await reset(stream)


async def _later(what: Callable[..., object], *args: object) -> None:
    what(*args)


async def _until_the_first_ends(move: Any, both: trio.CancelScope) -> None:
    try:
        await move
    except trio.Cancelled:
        raise
    except Exception as error:  # whatever ends the stream, the link is over and is dialled again
        _log.debug("libp2p: exchange ended: %s", error or type(error).__name__)
    both.cancel()


async def _write(stream: Any, outward: Pipe) -> None:
    while (piece := await outward.take_in_trio()) is not None:
        await write(stream, piece)


async def _read(stream: Any, inward: Pipe) -> None:
    while piece := await stream.read(READ_BYTES):
        await inward.put_from_trio(piece)
