"""The transport protocol: authenticated, ordered, bidirectional streams of frames between two nodes.

Two real implementations pass one contract test: gRPC on mutual TLS (transport_grpc) and memory (transport_memory).
Guarantees asked of both: `peer` is who it claims to be; frames arrive whole and in order; `send` waits while the other
side does not read; after either side closes, `receive` returns None and `send` raises Unreachable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from echo2.base.ids import PeerId
from echo2.broadcast.identity import PeerIdentity


class Connection(Protocol):
    """One stream of frames each way."""

    @property
    def peer(self) -> PeerIdentity: ...

    @property
    def is_outgoing(self) -> bool:
        """Whether we dialled."""
        ...

    async def send(self, frame: bytes) -> None: ...

    async def receive(self) -> bytes | None: ...

    async def close(self) -> None: ...


Accept = Callable[[Connection], Awaitable[None]]
"""Called with each connection that others dial; the connection lives until it returns."""


class Transport(Protocol):
    async def dial(self, address: str, peer_id: PeerId) -> Connection:
        """A connection to exactly `peer_id` at `address`; Unreachable within the transport's stated time."""
        ...

    async def close(self) -> None: ...
