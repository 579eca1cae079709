"""Streams of frames to peers that cannot be dialled, for asyncio: libp2p in its own thread behind bounded pipes.

Guarantees: those of the transport protocol (broadcast/runtime/transport.py); a vanished peer is noticed within
3 KEEPALIVE_S; a connection buffers at most PIPE_BYTES and one frame per direction here, and one yamux window in libp2p. Waits:
`dial` at most DIAL_TIMEOUT_S, of which libp2p waits up to 5 s for a hole to open. Leaves to others: everything that
speaks libp2p (host).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import trio

from echo2.base.errors import EchoError, MalformedMessage, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.reachability import LinkWay, relay_of
from echo2.broadcast.runtime.p2p.bridge import Pipe, TrioThread
from echo2.broadcast.runtime.p2p.host import CLOSE_S, P2pHost
from echo2.broadcast.runtime.p2p.host_facts import HostFacts, HostOptions
from echo2.broadcast.runtime.p2p.relay import reset
from echo2.broadcast.runtime.p2p.yamux import write
from echo2.broadcast.runtime.transport import Accept
from echo2.trust.identity import PeerIdentity
from echo2.trust.runtime.tls import MESSAGE_BYTES_MAX, Credentials

PIPE_BYTES = 256 << 10
READ_BYTES = 1 << 20
KEEPALIVE_S = 8.0
DIAL_TIMEOUT_S = 30.0
STILL_HERE = b"\xff\xff\xff\xff"  # keepalive, sent instead of a frame's length
START_S = 20.0
_log = logging.getLogger("echo2.broadcast")


class P2pConnection:
    """One exchange with a peer. `way` is evaluated on each access, because a hole punch may succeed later."""

    def __init__(
        self, peer: PeerIdentity, is_outgoing: bool, way: Callable[[], LinkWay], outward: Pipe, inward: Pipe
    ) -> None:
        self.peer = peer
        self.is_outgoing = is_outgoing
        self._way = way
        self._outward, self._inward = outward, inward

    @property
    def way(self) -> LinkWay:
        return self._way()

    async def send(self, frame: bytes) -> None:
        try:
            await self._outward.put_from_asyncio(frame)
        except Unreachable:
            raise Unreachable(f"peer {self.peer.peer_id}: the connection ended") from None

    async def receive(self) -> bytes | None:
        return await self._inward.take_in_asyncio()

    async def close(self) -> None:
        self._outward.close()
        self._inward.close()


class P2pTransport:
    """`accept`: called with connections that peers open, and with our own links when they move to a punched hole."""

    def __init__(
        self, credentials: Credentials, options: HostOptions, accept: Accept, changed: Callable[[HostFacts], None]
    ) -> None:
        self._accept = accept
        self._changed = changed
        self._host = P2pHost(credentials, options, self)
        self._thread = TrioThread("libp2p")
        self._dialled: dict[PeerId, asyncio.Future[P2pConnection]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
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
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- called from asyncio

    def use_relay(self, peer: PeerId, address: str) -> None:
        """Keeps a reservation at the relay at host:port."""
        self._spawn(self._thread.call(functools.partial(_later, self._host.use_relay, peer, address)))

    def drop_relay(self, peer: PeerId) -> None:
        self._spawn(self._thread.call(functools.partial(_later, self._host.drop_relay, peer)))

    async def dial(self, address: str, peer_id: PeerId) -> P2pConnection:
        """Dials a peer through a relay. `address`: reachability.circuit_address of the relay."""
        relay = relay_of(address)
        if relay is None:
            raise Unreachable(f"peer {peer_id}: expected the address of a circuit, got {address!r}")
        if peer_id in self._dialled:
            raise Unreachable(f"peer {peer_id}: it is being dialled already")
        found: asyncio.Future[P2pConnection] = asyncio.get_running_loop().create_future()
        self._dialled[peer_id] = found
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await self._thread.call(functools.partial(self._host.open_exchange, peer_id, relay))
                return await found
        except (TimeoutError, trio.TooSlowError):
            raise Unreachable(f"peer {peer_id} through {relay}: no answer in time") from None
        except EchoError:
            raise
        except Exception as error:  # libp2p raises many kinds of exceptions
            raise Unreachable(f"peer {peer_id} through {relay}: {error or type(error).__name__}") from None
        finally:
            del self._dialled[peer_id]

    def _arrived(self, connection: P2pConnection) -> None:
        waiting = self._dialled.get(connection.peer.peer_id)
        if connection.is_outgoing and waiting is not None and not waiting.done():
            waiting.set_result(connection)
        elif self._is_closed:
            self._spawn(connection.close())
        else:
            self._spawn(self._serve(connection))

    async def _serve(self, connection: P2pConnection) -> None:
        try:
            await self._accept(connection)
        finally:
            await connection.close()

    def _facts_are(self, facts: HostFacts) -> None:
        self.facts = facts
        self._changed(facts)

    # ---- called from trio

    def changed(self, facts: HostFacts) -> None:
        self._thread.to_asyncio(self._facts_are, facts)

    async def exchange(self, stream: Any, peer: PeerIdentity, way: Callable[[], LinkWay], is_outgoing: bool) -> None:
        """Moves frames between the stream and the pipes until either ends."""
        outward, inward = self._thread.pipe(PIPE_BYTES), self._thread.pipe(PIPE_BYTES)
        self._thread.to_asyncio(self._arrived, P2pConnection(peer, is_outgoing, way, outward, inward))
        try:
            async with trio.open_nursery() as nursery:
                for move in (_write(stream, outward), _read(stream, inward, peer.peer_id)):
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
    """Sends frames, and keepalives while there is nothing to send."""
    while True:
        with trio.move_on_after(KEEPALIVE_S) as patience:
            frame = await outward.take_in_trio()
        if patience.cancelled_caught:
            await stream.write(STILL_HERE)
        elif frame is None:
            return
        else:
            await write(stream, len(frame).to_bytes(4, "big") + frame)


async def _read(stream: Any, inward: Pipe, peer: PeerId) -> None:
    held = bytearray()

    async def more(wanted: int) -> bool:
        while len(held) < wanted:
            with trio.fail_after(3 * KEEPALIVE_S):
                piece = await stream.read(READ_BYTES)
            if not piece:
                return False
            held.extend(piece)
        return True

    while await more(4):
        head = bytes(held[:4])
        size = 0 if head == STILL_HERE else int.from_bytes(head, "big")
        if size > MESSAGE_BYTES_MAX:
            raise MalformedMessage(f"peer {peer}: expected frames of at most {MESSAGE_BYTES_MAX} bytes, got {size}")
        if not await more(4 + size):
            return
        frame = bytes(held[4 : 4 + size])
        del held[: 4 + size]
        if head != STILL_HERE:
            await inward.put_from_trio(frame)
