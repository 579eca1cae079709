"""The transport protocol: authenticated, ordered, bidirectional streams of frames between two nodes.

Three real implementations pass one contract test: gRPC on mutual TLS (transport_grpc), libp2p circuits and punched holes
(p2p/transport) and memory (transport_memory).
Every implementation guarantees: `peer` is authenticated; frames arrive whole and in order; `send` waits while the other
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
    """A connection that knows how it was established, not only who dialled."""

    @property
    def way(self) -> LinkWay: ...


@runtime_checkable
class Widenable(Protocol):
    """A connection over its own TCP connection, beside which further ones can be opened."""

    @property
    def remotes(self) -> frozenset[Remote]:
        """The remote end as the kernel reports it; several if a name resolves to several addresses."""
        ...

    async def finish(self) -> None:
        """Ends the sending direction; frames already sent still arrive."""
        ...


@runtime_checkable
class TakesParts(Protocol):
    """A bulk connection, made for chunks: if a link has one, all its chunks go there and none over the stream beside it."""

    async def send_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """Sends one frame, the concatenation of the parts. The last part is the large one."""
        ...


@runtime_checkable
class Piped(Protocol):
    """A transport that knows relays with byte pipes (pipe_relay)."""

    @property
    def pipes(self) -> Mapping[PeerId, str]:
        """Maps each relay to the address of its byte pipes."""
        ...

    @property
    def pipe_places(self) -> Mapping[PeerId, str]:
        """The relays at which this node must hold a place, because it cannot be dialled."""
        ...


def way_of(connection: Connection) -> LinkWay:
    """The kind of a link, and the reason for it."""
    if isinstance(connection, Explained):
        return connection.way
    if connection.is_outgoing:
        return LinkWay(LinkKind.DIRECT, "we dialled it")
    return LinkWay(LinkKind.REVERSE, "it dialled us")


Accept = Callable[[Connection], Awaitable[None]]
"""Called with each accepted connection; the connection lives until it returns."""


async def refuse_exchange(connection: Connection) -> None:
    """Closes the connection: for a node that takes no part in the broadcast."""
    await connection.close()


class Transport(Protocol):
    async def dial(self, address: str, peer_id: PeerId) -> Connection:
        """Connects to exactly `peer_id` at `address`; Unreachable within the transport's stated time."""
        ...

    async def close(self) -> None: ...
