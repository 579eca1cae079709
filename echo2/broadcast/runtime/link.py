"""One connection at work: a writer that sends control frames before chunks, and a reader that hands frames on.

Waits for: frames to send, frames that arrive, the transport's back-pressure. Guarantees: control frames keep their
order and go first; at most CONTROL_FRAMES_MAX wait, beyond that the peer is too slow and the link ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from echo2.base.errors import LimitExceeded, Unreachable
from echo2.base.ids import RunId
from echo2.broadcast.events import SendChunk
from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.runtime.tls import PROTOCOL_VERSION
from echo2.broadcast.runtime.transport import Connection
from echo2.wire import broadcast as wire

CONTROL_FRAMES_MAX = 8192
HELLO_TIMEOUT_S = 10.0


async def hello_of(connection: Connection, run_id: RunId) -> bytes:
    """Says who we are; the peer's first frame. Unreachable when none comes."""
    peer = connection.peer.peer_id
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            await connection.send(wire.hello(PROTOCOL_VERSION, run_id))
            frame = await connection.receive()
    except TimeoutError:
        raise Unreachable(f"peer {peer}: no hello within {HELLO_TIMEOUT_S:.0f} s") from None
    if frame is None:
        raise Unreachable(f"peer {peer}: the connection ended before its hello")
    return frame


@dataclass(frozen=True, slots=True)
class LinkCalls:
    """What a link asks of its node."""

    frame: Callable[[ArtifactKey, int], bytes | None]
    sent: Callable[[SendChunk, int | None], None]  # bytes on the wire; None: the store no longer had it
    received: Callable[[bytes], None]


class PeerLink:
    def __init__(self, connection: Connection, calls: LinkCalls) -> None:
        self.connection = connection
        self.peer_id = connection.peer.peer_id
        self.sent_bytes = 0
        self.received_bytes = 0
        self._calls = calls
        self._control: deque[bytes] = deque()
        self._chunks: deque[SendChunk] = deque()
        self._changed = asyncio.Event()

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
        writer = asyncio.create_task(self._write())
        reader = asyncio.create_task(self._read())
        try:
            done, _ = await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, reader):
                task.cancel()
            for task in (writer, reader):
                with contextlib.suppress(asyncio.CancelledError, Unreachable, Exception):  # told below
                    await task
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Unreachable):
                raise error

    async def _read(self) -> None:
        while (frame := await self.connection.receive()) is not None:
            self.received_bytes += len(frame)
            self._calls.received(frame)

    async def _write(self) -> None:
        while True:
            if self._control:
                await self._send(self._control.popleft())
            elif self._chunks:
                action = self._chunks.popleft()
                frame = self._calls.frame(action.key, action.index)
                if frame is None:
                    self._calls.sent(action, None)
                    continue
                await self._send(wire.addressed(frame, action.route, action.is_answer))
                self._calls.sent(action, len(frame))
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _send(self, frame: bytes) -> None:
        await self.connection.send(frame)
        self.sent_bytes += len(frame)
