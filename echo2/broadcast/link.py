"""A link at work: a writer that sends control frames before chunks, and a reader that hands frames on.

A link is one connection, or several: control frames go over the first, chunks over whichever is free, so they come in any order.
On a further connection an artifact's header goes before its first chunk: nothing there waits for what travels on another. A further
connection that ends makes the link thinner, no more; when the first ends, all do.

Waits for: frames to send, frames that arrive once the publisher is known, the transport's back-pressure; FINISH_S for a
connection that is given up.
Guarantees: control frames keep their order and go first; at most CONTROL_FRAMES_MAX wait, beyond that the peer is too slow and the
link ends. A chunk that a further connection did not take goes over another one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from echo2.base.errors import LimitExceeded, MalformedMessage, Unreachable, VersionMismatch
from echo2.base.ids import RunId
from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.connection import Connection
from echo2.broadcast.events import SendChunk
from echo2.outside.guard import FairShare, cancel_all
from echo2.outside.streams import Remote
from echo2.trust.tls import PROTOCOL_VERSION
from echo2.wire import broadcast as wire

if TYPE_CHECKING:
    from echo2.broadcast.exchange import Exchange

CONTROL_FRAMES_MAX = 8192  # minutes of acknowledgements at some tens a second
HELLO_TIMEOUT_S = 10.0  # a few round trips and a busy loop
FINISH_S = 10.0  # a few chunks at 1 Mbit/s
HEADERS_REMEMBERED_MAX = 256  # more than artifacts that a library holds (96)
ANSWERS_S = 2e-4
"""Of the loop's time that the receiver of a chunk may cost beyond its share, for asking and acknowledging."""


async def greet(connection: Connection, run_id: RunId, *, is_further: bool = False) -> bool:
    """Hellos both ways; whether the peer's says that the connection joins an existing link. Unreachable when none comes,
    VersionMismatch for another run or protocol."""
    peer = f"peer {connection.peer.peer_id}"
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            await connection.send(wire.hello(PROTOCOL_VERSION, run_id, is_further=is_further))
            frame = await connection.receive()
    except TimeoutError:
        raise Unreachable(f"{peer}: no hello within {HELLO_TIMEOUT_S:.0f} s") from None
    if frame is None:
        raise Unreachable(f"{peer}: the connection ended before its hello")
    message = wire.parse(frame, peer)
    if (kind := message.WhichOneof("kind")) != "hello":
        raise MalformedMessage(f"{peer}: expected a hello first, got {kind}")
    hello = message.hello
    if (hello.protocol_version, hello.run_id) != (PROTOCOL_VERSION, run_id):
        raise VersionMismatch(
            f"{peer}: expected protocol {PROTOCOL_VERSION} of run {run_id}, got protocol {hello.protocol_version} of run "
            f"{hello.run_id}"
        )
    return hello.is_further


class _Further:
    """One more connection of a link. `headers`: of which artifacts went over it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.is_ending = False
        self.headers: set[ArtifactKey] = set()


class PeerLink:
    """`share`: of the loop's time, for this peer; `address`: where it was dialled, empty where it dialled us."""

    def __init__(self, connection: Connection, exchange: Exchange, share: FairShare, address: str = "") -> None:
        self.connection, self.address = connection, address
        self.peer_id = connection.peer.peer_id
        self.sent_bytes = 0
        self.received_bytes = 0
        self._exchange, self._share = exchange, share
        self._control: deque[bytes] = deque()
        self._chunks: deque[SendChunk] = deque()
        self._further: list[_Further] = []
        self._changed = asyncio.Event()
        self._closed = asyncio.Event()

    @property
    def remotes(self) -> frozenset[Remote]:
        return self.connection.remotes.union(*(further.connection.remotes for further in self._further))

    @property
    def width(self) -> int:
        return 1 + sum(not further.is_ending for further in self._further)

    async def close(self) -> None:
        self._closed.set()  # whoever dialled us is told by the end of what serves it
        connections = (*(further.connection for further in self._further), self.connection)
        await asyncio.gather(*(connection.close() for connection in connections))

    def send_control(self, frame: bytes) -> None:
        if len(self._control) >= CONTROL_FRAMES_MAX:
            raise LimitExceeded(f"peer {self.peer_id}: expected it to read, {CONTROL_FRAMES_MAX} messages wait for it")
        self._control.append(frame)
        self._changed.set()

    def send_chunk(self, action: SendChunk) -> None:
        self._chunks.append(action)
        self._changed.set()

    async def run(self) -> None:
        """Until the connection ends; errors of what the peer sent come out of here."""
        await self._until_one_ends(self._write(), self._read(self.connection))

    async def carry(self, connection: Connection) -> None:
        """Widens the link by a connection until that ends; errors of what the peer sent over it come out of here."""
        further = _Further(connection)
        self._further.append(further)
        self._changed.set()
        self._exchange.on_width(self)
        try:
            await self._until_one_ends(self._write_further(further), self._read(connection), further)
        finally:
            self._further.remove(further)
            self._exchange.on_width(self)

    async def _until_one_ends(
        self, writing: Coroutine[Any, Any, None], reading: Coroutine[Any, Any, None], further: _Further | None = None
    ) -> None:
        """Also until the link is closed. Of a further connection, what it has taken is given FINISH_S to go through."""
        tasks = [asyncio.ensure_future(work) for work in (writing, reading, self._closed.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if further is not None:
                self._end(further)
                if not self._closed.is_set():
                    await asyncio.wait(tasks[:2], timeout=FINISH_S)
        finally:
            ended = await cancel_all(tasks)
            if further is None:
                await self.close()
        for error in ended:
            if isinstance(error, Exception) and not isinstance(error, Unreachable):
                raise error

    def narrow(self) -> None:
        """Gives up the last of the further connections, once what it has taken is through."""
        taking = [further for further in self._further if not further.is_ending]
        if taking:
            self._end(taking[-1])

    def _end(self, further: _Further) -> None:
        if not further.is_ending:
            further.is_ending = True
            self._exchange.on_width(self)
        self._changed.set()

    # ---- frames

    async def _write(self) -> None:
        while True:
            if self._control:
                await self._send(self.connection, self._control.popleft())
            elif self._chunks:
                await self._send_chunk(self.connection, self._chunks.popleft())
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _write_further(self, further: _Further) -> None:
        while not further.is_ending:
            if not self._chunks:
                self._changed.clear()
                await self._changed.wait()
                continue
            action = self._chunks.popleft()
            try:
                if (
                    action.key not in further.headers
                    and (header := self._exchange.library.header_frame(action.key)) is not None
                ):
                    await self._send(further.connection, header)
                    further.headers = {action.key, *list(further.headers)[: HEADERS_REMEMBERED_MAX - 1]}
                await self._send_chunk(further.connection, action)
            except (Unreachable, asyncio.CancelledError):
                self._chunks.appendleft(action)
                self._changed.set()
                raise

    async def _send_chunk(self, connection: Connection, action: SendChunk) -> None:
        frame = self._exchange.library.frame(action.key, action.index)
        if frame is not None:
            await self._send(connection, wire.beside(action.route, action.is_answer), frame)
            self._share.repay(ANSWERS_S)
        self._exchange.on_sent(action, None if frame is None else len(frame))
        if self._further:
            await asyncio.sleep(0)  # the other connections take their share

    async def _send(self, connection: Connection, *parts: bytes | memoryview) -> None:
        await connection.send(*parts)
        self.sent_bytes += sum(map(len, parts))

    async def _read(self, connection: Connection) -> None:
        connection.share = self._share
        await self._exchange.wait_for_publisher(connection)
        await connection.receive_all(self._take)

    def _take(self, frame: bytes) -> bool:
        self.received_bytes += len(frame)
        return self._exchange.on_frame(self.peer_id, frame)
