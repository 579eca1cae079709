"""Connections inside one process: the transport of tests and of the simulator's smallest scenarios."""

from __future__ import annotations

import asyncio

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.runtime.transport import Accept
from echo2.trust.identity import PeerIdentity, Role

QUEUE_FRAMES = 8


class _Pipe:
    """One direction of a connection, bounded to QUEUE_FRAMES frames."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_FRAMES)
        self.is_closed = False


class MemoryConnection:
    def __init__(self, peer: PeerIdentity, is_outgoing: bool, inward: _Pipe, outward: _Pipe) -> None:
        self.peer = peer
        self.is_outgoing = is_outgoing
        self._in = inward
        self._out = outward
        self.ended = asyncio.Event()

    async def send(self, frame: bytes) -> None:
        if self._out.is_closed:
            raise Unreachable(f"peer {self.peer.peer_id}: the connection ended")
        await self._out.frames.put(frame)
        if self._out.is_closed:
            raise Unreachable(f"peer {self.peer.peer_id}: the connection ended")

    async def receive(self) -> bytes | None:
        if self._in.is_closed and self._in.frames.empty():
            return None
        return await self._in.frames.get()

    async def close(self) -> None:
        self.ended.set()
        for pipe in (self._in, self._out):
            pipe.is_closed = True
            while pipe.frames.full():
                pipe.frames.get_nowait()
            pipe.frames.put_nowait(None)


class MemoryNetwork:
    """The listeners of one process, by address."""

    def __init__(self) -> None:
        self.listeners: dict[str, tuple[PeerIdentity, Accept]] = {}
        self.tasks: set[asyncio.Task[None]] = set()


class MemoryTransport:
    def __init__(self, network: MemoryNetwork, me: PeerId, role: Role = Role.WORKER) -> None:
        self._network = network
        self._me = PeerIdentity(me, role)
        self._addresses: list[str] = []

    def listen(self, address: str, accept: Accept) -> None:
        self._network.listeners[address] = (self._me, accept)
        self._addresses.append(address)

    async def dial(self, address: str, peer_id: PeerId) -> MemoryConnection:
        listener = self._network.listeners.get(address)
        if listener is None or listener[0].peer_id != peer_id:
            raise Unreachable(f"peer {peer_id} at {address}: refused, or it is another peer")
        there, back = _Pipe(), _Pipe()
        ours = MemoryConnection(listener[0], True, back, there)
        theirs = MemoryConnection(self._me, False, there, back)
        task = asyncio.create_task(self._serve(listener[1], theirs))
        self._network.tasks.add(task)
        task.add_done_callback(self._network.tasks.discard)
        return ours

    async def _serve(self, accept: Accept, connection: MemoryConnection) -> None:
        try:
            await accept(connection)
        finally:
            await connection.close()

    async def close(self) -> None:
        for address in self._addresses:
            self._network.listeners.pop(address, None)
