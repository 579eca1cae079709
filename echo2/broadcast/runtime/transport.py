"""The transport protocol: authenticated, ordered, bidirectional streams of frames between two nodes.

Three real implementations pass one contract test: gRPC on mutual TLS (transport_grpc), libp2p circuits and punched holes
(p2p/transport) and memory (transport_memory).
Guarantees asked of all: `peer` is who it claims to be; frames arrive whole and in order; `send` waits while the other
side does not read; after either side closes, `receive` returns None and `send` raises Unreachable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from echo2.base.ids import PeerId
from echo2.broadcast.reachability import LinkKind, LinkWay
from echo2.broadcast.runtime.sockets import Remote
from echo2.trust.identity import PeerIdentity


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


@runtime_checkable
class Explained(Protocol):
    """A connection that knows more of how it came about than who dialled."""

    @property
    def way(self) -> LinkWay: ...


@runtime_checkable
class Widenable(Protocol):
    """A connection over a TCP connection of its own, beside which further ones can be opened."""

    @property
    def remotes(self) -> frozenset[Remote]:
        """The other end as the kernel's table of connections has it; several where a name stands for several."""
        ...

    async def finish(self) -> None:
        """Nothing more will be sent; what was, still arrives."""
        ...


@runtime_checkable
class TakesParts(Protocol):
    """A connection that is made for chunks: one that a link has takes them all, and the stream beside it none."""

    async def send_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """One frame, of these one after another. The last is the large one."""
        ...


@runtime_checkable
class Piped(Protocol):
    """A transport that knows relays with byte pipes (pipe_relay)."""

    @property
    def pipes(self) -> Mapping[PeerId, str]:
        """By relay, the address of its byte pipes."""
        ...

    @property
    def pipe_places(self) -> Mapping[PeerId, str]:
        """Those at which this node is to hold a place, because it cannot be dialled."""
        ...


def way_of(connection: Connection) -> LinkWay:
    """The kind of a link and why it is of that kind."""
    if isinstance(connection, Explained):
        return connection.way
    if connection.is_outgoing:
        return LinkWay(LinkKind.DIRECT, "we dialled it")
    return LinkWay(LinkKind.REVERSE, "it dialled us")


Accept = Callable[[Connection], Awaitable[None]]
"""Called with each connection that others dial; the connection lives until it returns."""


async def refuse_exchange(connection: Connection) -> None:
    """For a node that takes no part in the broadcast."""
    await connection.close()


class Transport(Protocol):
    async def dial(self, address: str, peer_id: PeerId) -> Connection:
        """A connection to exactly `peer_id` at `address`; Unreachable within the transport's stated time."""
        ...

    async def close(self) -> None: ...
