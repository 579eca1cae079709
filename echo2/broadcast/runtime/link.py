"""A link at work: a writer that sends control frames before chunks, and a reader that hands frames on.

A link is one connection, or several: control frames go over the first, chunks over whichever is free, so they come in any
order; where some are made for chunks, the first carries none, and acknowledgements go with them. On a further connection an
artifact's header goes before its first chunk: nothing there waits for what travels on another. A further connection that ends
makes the link thinner, no more; when the first ends, all do.

Waits for: frames to send, frames that arrive, the transport's back-pressure; FINISH_S for a connection that is given up.
Guarantees: control frames keep their order and go first; at most CONTROL_FRAMES_MAX wait, beyond that the peer is too
slow and the link ends. A chunk that a further connection did not take goes over another one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from echo2.base.errors import LimitExceeded, Unreachable
from echo2.base.ids import PeerId, RunId
from echo2.broadcast.events import SendChunk
from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.runtime.sockets import Remote
from echo2.broadcast.runtime.transport import Connection, TakesParts, Widenable
from echo2.outside import monotonic
from echo2.outside.guard import FairShares
from echo2.trust.runtime.tls import PROTOCOL_VERSION
from echo2.wire import broadcast as wire

CONTROL_FRAMES_MAX = 8192
HELLO_TIMEOUT_S = 10.0
FINISH_S = 10.0
HEADERS_REMEMBERED_MAX = 256


async def hello_of(connection: Connection, run_id: RunId, *, is_further: bool = False, bulk_port: int = 0) -> bytes:
    """Says who we are; the peer's first frame. Unreachable when none comes."""
    peer = connection.peer.peer_id
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            await connection.send(wire.hello(PROTOCOL_VERSION, run_id, is_further=is_further, bulk_port=bulk_port))
            frame = await connection.receive()
    except TimeoutError:
        raise Unreachable(f"peer {peer}: no hello within {HELLO_TIMEOUT_S:.0f} s") from None
    if frame is None:
        raise Unreachable(f"peer {peer}: the connection ended before its hello")
    return frame


@dataclass(frozen=True, slots=True)
class LinkCalls:
    """What a link asks of its node."""

    frame: Callable[[ArtifactKey, int], bytes | memoryview | None]
    header: Callable[[ArtifactKey], bytes | None]
    sent: Callable[[SendChunk, int | None], None]  # bytes on the wire; None: the store no longer had it
    received: Callable[[PeerId, bytes], bool]  # whether it brought what was missing
    widened: Callable[[PeerId], None]  # another number of connections is there now
    shares: FairShares = field(default_factory=FairShares)


class _Further:
    """One more connection of a link. What it can do is looked up once: such a look costs more than a message."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.for_chunks = connection if isinstance(connection, TakesParts) else None
        self.is_ending = False
        self.told: set[ArtifactKey] = set()  # whose headers went over it


class PeerLink:
    """`address`: where the peer was dialled; empty where it dialled us. `bulk_port`: where it takes connections for chunks, at
    that address; 0: nowhere. `pipe`: where a relay's byte pipes to it are had instead, host:port. `bulk_next_try`: when that is
    tried again."""

    def __init__(self, connection: Connection, calls: LinkCalls, address: str = "") -> None:
        self.connection = connection
        self.address = address
        self.peer_id = connection.peer.peer_id
        self.sent_bytes = 0
        self.received_bytes = 0
        self._calls = calls
        self._control: deque[bytes] = deque()
        self._acks: deque[bytes] = deque()
        self._chunks: deque[SendChunk] = deque()
        self._further: list[_Further] = []
        self._changed = asyncio.Event()
        self._share = calls.shares.of(self.peer_id)
        self.bulk_port = 0
        self.pipe = ""
        self.bulk_next_try = float("-inf")
        self._closed = asyncio.Event()

    @property
    def remotes(self) -> frozenset[Remote]:
        """The other ends of its connections, where the kernel knows them."""
        connections = (self.connection, *(further.connection for further in self._further))
        return frozenset(remote for one in connections if isinstance(one, Widenable) for remote in one.remotes)

    @property
    def bulk_place(self) -> tuple[str, int]:
        """Host and port that are dialled for a bulk connection."""
        host, _, port = (self.pipe or self.address).rpartition(":")
        return host, int(port) if self.pipe else self.bulk_port

    @property
    def has_bulk(self) -> bool:
        """Whether a connection made for chunks is there: then none goes over the first, which has acknowledgements to carry."""
        return any(one.for_chunks is not None and not one.is_ending for one in self._further)

    @property
    def width(self) -> int:
        """The connections that take chunks."""
        return (not self.has_bulk) + sum(not further.is_ending for further in self._further)

    @property
    def connections(self) -> int:
        return 1 + len(self._further)

    async def close(self) -> None:
        self._closed.set()  # whoever dialled us is told by the end of what serves it
        for connection in (*(further.connection for further in self._further), self.connection):
            await connection.close()

    def send_control(self, frame: bytes) -> None:
        if len(self._control) >= CONTROL_FRAMES_MAX:
            raise LimitExceeded(f"peer {self.peer_id}: expected it to read, {CONTROL_FRAMES_MAX} messages wait for it")
        self._control.append(frame)
        self._changed.set()

    def send_ack(self, frame: bytes) -> None:
        """A control frame whose order does not matter: beside the chunks, where a connection is made for those."""
        if self.has_bulk and len(self._acks) < CONTROL_FRAMES_MAX:
            self._acks.append(frame)
            self._changed.set()
        else:
            self.send_control(frame)

    def send_chunk(self, action: SendChunk) -> None:
        self._chunks.append(action)
        self._changed.set()

    async def run(self) -> None:
        """Until the connection ends; errors of what the peer sent come out of here."""
        writer = asyncio.create_task(self._write())
        reader = asyncio.create_task(self._read(self.connection))
        closing = asyncio.create_task(self._wait_closed())
        try:
            done, _ = await asyncio.wait({writer, reader, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, reader, closing):
                task.cancel()
            for task in (writer, reader, closing):
                with contextlib.suppress(asyncio.CancelledError, Unreachable, Exception):  # told below
                    await task
            await self.close()
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Unreachable):
                raise error

    async def carry(self, connection: Connection) -> None:
        """Widens the link by a connection until that ends; errors of what the peer sent over it come out of here."""
        further = _Further(connection)
        self._further.append(further)
        self._changed.set()
        self._calls.widened(self.peer_id)
        writer = asyncio.create_task(self._write_chunks(further))
        reader = asyncio.create_task(self._read(connection))
        closing = asyncio.create_task(self._wait_closed())
        try:
            await asyncio.wait({writer, reader, closing}, return_when=asyncio.FIRST_COMPLETED)
            self._end(further)
            if not self._closed.is_set():
                await asyncio.wait({writer, reader}, timeout=FINISH_S)
        finally:
            self._further.remove(further)
            self._calls.widened(self.peer_id)
            for task in (writer, reader, closing):
                task.cancel()
            ended = await asyncio.gather(writer, reader, closing, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception) and not isinstance(error, Unreachable):
                raise error

    async def _wait_closed(self) -> None:
        await self._closed.wait()

    def narrow(self) -> None:
        """Gives up the last of the further connections, once what it has taken is through."""
        taking = [further for further in self._further if not further.is_ending]
        if taking:
            self._end(taking[-1])

    def _end(self, further: _Further) -> None:
        if not further.is_ending:
            further.is_ending = True
            if not self.has_bulk:
                self._control.extend(self._acks)
                self._acks.clear()
            self._calls.widened(self.peer_id)
        self._changed.set()

    async def _write_chunks(self, further: _Further) -> None:
        """Until the connection is to end."""
        takes_acks = further.for_chunks is not None
        while not further.is_ending:
            if self._acks and takes_acks:
                await self._send(self._acks.popleft(), further.connection)
                continue
            if not self._chunks:
                self._changed.clear()
                await self._changed.wait()
                continue
            action = self._chunks.popleft()
            try:
                await self._send_further(further, action)
            except (Unreachable, asyncio.CancelledError):
                self._chunks.appendleft(action)
                self._changed.set()
                raise
        if isinstance(further.connection, Widenable):
            await further.connection.finish()

    async def _send_further(self, further: _Further, action: SendChunk) -> None:
        frame, connection = self._calls.frame(action.key, action.index), further.connection
        if frame is not None:
            if action.key not in further.told and (header := self._calls.header(action.key)) is not None:
                await self._send(header, connection)
                further.told = {action.key, *list(further.told)[: HEADERS_REMEMBERED_MAX - 1]}
            if further.for_chunks is not None:
                parts = wire.beside(action.route, action.is_answer), frame
                await further.for_chunks.send_parts(parts)
                self.sent_bytes += sum(map(len, parts))
            else:
                await self._send(wire.addressed(frame, action.route, action.is_answer), connection)
        self._calls.sent(action, None if frame is None else len(frame))

    async def _read(self, connection: Connection) -> None:
        while (frame := await connection.receive()) is not None:
            self.received_bytes += len(frame)
            begun = monotonic()
            is_useful = self._calls.received(self.peer_id, frame)
            now = monotonic()
            if not is_useful and (pause_s := self._share.pause_s(now - begun, now)) > 0:
                await asyncio.sleep(pause_s)  # its transport fills meanwhile

    async def _write(self) -> None:
        while True:
            if self._control:
                await self._send(self._control.popleft(), self.connection)
            elif self._chunks and not self.has_bulk:
                action = self._chunks.popleft()
                frame = self._calls.frame(action.key, action.index)
                if frame is None:
                    self._calls.sent(action, None)
                    continue
                await self._send(wire.addressed(frame, action.route, action.is_answer), self.connection)
                self._calls.sent(action, len(frame))
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _send(self, frame: bytes, connection: Connection) -> None:
        await connection.send(frame)
        self.sent_bytes += len(frame)
