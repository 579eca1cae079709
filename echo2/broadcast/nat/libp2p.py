"""libp2p in a thread of its own, for a node on asyncio: trio runs there, and each punched hole is a pair of sockets to it.

Guarantees: cancelling the awaiting asyncio task cancels the trio call; at most CALLS_MAX calls are pending; nothing outlives
`close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import trio

from echo2.base.errors import LimitExceeded, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.connection import Connection
from echo2.broadcast.nat.host import CLOSE_S, P2pHost
from echo2.broadcast.nat.reach import HostFacts, HostOptions
from echo2.broadcast.nat.relay import reset, write
from echo2.broadcast.reachability import LinkKind, LinkWay
from echo2.broadcast.transport import Accept
from echo2.outside.guard import Tasks
from echo2.trust.identity import PeerIdentity
from echo2.trust.tls import Credentials

CALLS_MAX = 256  # between the loops: more would mean that one hangs
STOP_S = 5.0  # streams are reset at once
START_S = 20.0  # loading libp2p takes seconds on a busy machine
ENDING_S = 2.0  # for the other side's farewell, once one direction of a hole has ended
READ_BYTES = 1 << 20  # a yamux window
HOLE = LinkWay(LinkKind.HOLE_PUNCHED, "neither can be dialled; both opened their NAT at once")
T = TypeVar("T")
_log = logging.getLogger("echo2.broadcast")


class TrioThread:
    """Runs trio in its own thread. Create and use it on one asyncio loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started, self._ended = asyncio.Event(), asyncio.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._calls = 0

    async def start(self) -> None:
        self._thread.start()
        await self._started.wait()

    async def stop(self) -> None:
        """Cancels everything in trio and waits for the thread, at most STOP_S; also amid its start."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._started.wait()
                if self._nursery is not None:
                    self._in_trio(self._nursery.cancel_scope.cancel)
                await self._ended.wait()

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        if self._calls >= CALLS_MAX:
            raise LimitExceeded(f"libp2p: expected at most {CALLS_MAX} calls under way, got one more")
        if self._nursery is None:
            raise Unreachable("libp2p: its thread has ended")
        result, scope = Future[T](), trio.CancelScope()
        self._calls += 1
        try:
            self._in_trio(self._nursery.start_soon, _perform, work, scope, result)
            return await asyncio.wrap_future(result)
        finally:
            self._calls -= 1
            self._in_trio(scope.cancel)

    def to_asyncio(self, callback: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    def _in_trio(self, callback: Callable[..., object], *args: object) -> None:
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(callback, *args)

    def _run(self) -> None:
        try:
            trio.run(self._main)
        finally:
            self._nursery = None
            for event in (self._started, self._ended):
                self.to_asyncio(event.set)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.to_asyncio(self._started.set)
            await trio.sleep_forever()


async def _perform(work: Callable[[], Awaitable[T]], scope: trio.CancelScope, result: Future[T]) -> None:
    """An exception goes to the caller instead of crashing trio's nursery."""
    error: Exception = Unreachable("libp2p: its thread has ended")
    with contextlib.suppress(InvalidStateError):  # the caller has given up
        try:
            with scope:
                result.set_result(await work())
        except InvalidStateError:
            raise
        except Exception as raised:
            error = raised
        finally:
            if not result.done():
                result.set_exception(error)


class HoleConnection(Connection, asyncio.BufferedProtocol):
    """Over a hole: libp2p encrypts what comes through it, and its peer has proven who it is before."""

    def connection_made(self, transport: Any) -> None:  # type: ignore[override]
        super().connection_made(transport, ("", 0), b"")

    def buffer_updated(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)
        self.worked(0.0, 1, nbytes)


class P2pSide:
    """`accept`: called with each connection over a hole, whoever opened it; None: there are none."""

    _running: asyncio.Task[None]

    def __init__(
        self,
        credentials: Credentials,
        options: HostOptions,
        accept: Accept | None,
        changed: Callable[[HostFacts], None],
    ) -> None:
        self._accept, self._changed = accept, changed
        self._thread = TrioThread("libp2p")
        self._host = P2pHost(
            credentials, options, lambda facts: self._thread.to_asyncio(self._on_facts, facts), self._carry
        )
        self._tasks = Tasks(self._failed)
        self._punching: set[PeerId] = set()
        self._is_open = False
        self.facts = HostFacts()

    @property
    def port(self) -> int:
        return self._host.port

    # ---- life

    async def start(self) -> None:
        """Starts the thread; returns once libp2p listens. Where it fails, or is cancelled, everything is closed."""
        listens = asyncio.Event()
        run = functools.partial(self._host.run, lambda: self._thread.to_asyncio(listens.set))
        try:
            await self._thread.start()
            self._running = self._tasks.start(self._thread.call(run), listens.set)
            async with asyncio.timeout(START_S):
                await listens.wait()
            if self._running.done():
                self._running.result()
            self._is_open = True
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise Unreachable(f"libp2p: expected it to listen within {START_S:.0f} s") from None
            raise

    async def wait_ended(self) -> None:
        await asyncio.wait([self._running])

    def _failed(self, error: BaseException) -> None:
        if self._is_open:
            _log.error("libp2p: %s: %s", type(error).__name__, error)

    async def close(self) -> None:
        self._is_open = False
        with contextlib.suppress(Exception):  # it may be cut off before it finishes
            async with asyncio.timeout(CLOSE_S + 1):
                await self._thread.call(self._host.close)
        await self._thread.stop()
        await self._tasks.end()

    def _on_facts(self, facts: HostFacts) -> None:
        self.facts = facts
        self._changed(facts)

    # ---- relays and holes

    def keep_relays(self, wanted: Mapping[PeerId, str]) -> None:
        self._tasks.start(self._thread.call(functools.partial(self._host.keep_relays, dict(wanted))))

    def punch(self, peer: PeerId, relay: PeerId) -> None:
        if peer not in self._punching:
            self._punching.add(peer)
            self._tasks.start(self._punch(peer, relay))

    async def _punch(self, peer: PeerId, relay: PeerId) -> None:
        try:
            await self._thread.call(functools.partial(self._host.punch, peer, relay))
        except Exception as error:  # libp2p raises many kinds; the link stays relayed
            _log.info("libp2p: no hole to %s: %s", peer, str(error) or type(error).__name__)
        finally:
            self._punching.discard(peer)

    def _begin(self, raw: socket.socket, peer: PeerIdentity, is_outgoing: bool) -> None:
        """A hole is there; `raw` leads through it. Closed even if the task is cancelled before it begins."""
        self._tasks.start(self._serve(raw, peer, is_outgoing), raw.close)

    async def _serve(self, raw: socket.socket, peer: PeerIdentity, is_outgoing: bool) -> None:
        if self._accept is None or not self._is_open:
            return
        connection = HoleConnection(is_outgoing=is_outgoing, way=HOLE)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, raw)
        connection.is_known(peer)
        try:
            await self._accept(connection)
        finally:
            await connection.close()

    async def _carry(self, stream: Any, peer: PeerIdentity, is_outgoing: bool) -> None:
        """Called in trio: moves bytes between a stream through a hole and a socket of this node until both have ended."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, READ_BYTES)
        self._thread.to_asyncio(self._begin, theirs, peer, is_outgoing)
        try:
            async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as local, trio.open_nursery() as nursery:
                for move in (_to_hole(stream, local), _from_hole(stream, local)):
                    nursery.start_soon(_moved, move, nursery.cancel_scope)
        finally:
            with trio.CancelScope(shield=True):
                await reset(stream)


async def _moved(move: Coroutine[Any, Any, None], both: trio.CancelScope) -> None:
    try:
        await move
    except trio.Cancelled:
        raise
    except Exception as error:  # whatever ends the stream, the link is over and is dialled again
        _log.debug("libp2p: a hole ended: %s", str(error) or type(error).__name__)
        both.cancel()
    both.deadline = min(both.deadline, trio.current_time() + ENDING_S)


async def _to_hole(stream: Any, local: trio.SocketStream) -> None:
    while piece := await local.receive_some(READ_BYTES):
        await write(stream, piece)
    await stream.close_write()


async def _from_hole(stream: Any, local: trio.SocketStream) -> None:
    while piece := await stream.read(READ_BYTES):
        await local.send_all(piece)
    await local.send_eof()
