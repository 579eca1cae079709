"""An emulated WAN link inside the transport, for experiments on one machine: uplink, downlink, delay. Off by default.

Guarantees: in any time span at most rate x span plus one message passes; messages keep their order; the backlog is
bounded in bytes. Leaves to others: real networks' loss and reordering (a network-namespace emulator does those).
"""

from __future__ import annotations

import asyncio
from collections import deque

from echo2.base.errors import Unreachable
from echo2.broadcast.link_shape import LinkShape
from echo2.broadcast.reachability import LinkWay
from echo2.broadcast.runtime.transport import Connection, way_of
from echo2.trust.identity import PeerIdentity

DELAYED_BYTES_MIN = 1 << 20


class Bucket:
    """One direction of a node's link; all its connections share it, first come, first served."""

    def __init__(self, rate_bytes_per_s: float) -> None:
        self._rate = rate_bytes_per_s
        self._free_at = 0.0
        self.passed_bytes = 0

    async def pass_through(self, size_bytes: int) -> None:
        """Waits until the last byte has passed."""
        self.passed_bytes += size_bytes
        if self._rate <= 0:
            return
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + size_bytes / self._rate
        await asyncio.sleep(self._free_at - loop.time())


class NodeShaper:
    """The link of one node."""

    def __init__(self, shape: LinkShape) -> None:
        self.shape = shape
        self.up = Bucket(shape.uplink_bytes_per_s)
        self.down = Bucket(shape.downlink_bytes_per_s)

    def wrap(self, connection: Connection) -> Connection:
        return connection if self.shape.is_off else ShapedConnection(connection, self)


class ShapedConnection:
    """A connection whose messages pass through the node's emulated link."""

    def __init__(self, inner: Connection, shaper: NodeShaper) -> None:
        self._inner = inner
        self._shaper = shaper
        self._delayed: deque[tuple[float, bytes]] = deque()
        self._delayed_bytes = 0
        rate = shaper.shape.uplink_bytes_per_s
        self._delayed_bytes_max = max(DELAYED_BYTES_MIN, int(2 * rate * shaper.shape.rtt_s))
        self._changed = asyncio.Event()
        self._error: Unreachable | None = None
        self._forwarding = asyncio.create_task(self._forward())

    @property
    def peer(self) -> PeerIdentity:
        return self._inner.peer

    @property
    def is_outgoing(self) -> bool:
        return self._inner.is_outgoing

    @property
    def way(self) -> LinkWay:
        return way_of(self._inner)

    async def send(self, frame: bytes) -> None:
        await self._shaper.up.pass_through(len(frame))
        while self._delayed_bytes > self._delayed_bytes_max and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        due = asyncio.get_running_loop().time() + self._shaper.shape.rtt_s / 2
        self._delayed.append((due, frame))
        self._delayed_bytes += len(frame)
        self._changed.set()

    async def _forward(self) -> None:
        """Waits for the next delayed message's time, then hands it to the real connection."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                while not self._delayed:
                    self._changed.clear()
                    await self._changed.wait()
                due, frame = self._delayed[0]
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                await self._inner.send(frame)
                self._delayed.popleft()
                self._delayed_bytes -= len(frame)
                self._changed.set()
        except Unreachable as error:
            self._error = error
            self._changed.set()

    async def receive(self) -> bytes | None:
        frame = await self._inner.receive()
        if frame is not None:
            await self._shaper.down.pass_through(len(frame))
        return frame

    async def close(self) -> None:
        self._forwarding.cancel()
        await self._inner.close()
