"""Servers and channels in gRPC's shape: what the generated stubs and servicers need, and no more.

Every implementation guarantees: messages of a stream arrive whole and in order; `write` waits while the other side does not
read; a caller's certificate was checked against the authority before a servicer sees the call; a channel reaches exactly the
node that it names. Errors are gRPC's own. Two implementations: gRPC (grpc_net) and the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import grpc.aio

NetOptions = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Shown:
    """What a server presents: `pair` returns (key, certificate) in PEM, called for each handshake.

    `authority_pem`: callers must present a certificate that it issued; None: callers have no certificate yet.
    """

    pair: Callable[[], tuple[bytes, bytes]]
    authority_pem: bytes | None


@dataclass(frozen=True, slots=True)
class Dialled:
    """The peer of a channel: `server_name` in a certificate issued by (or equal to) `root_pem`. `pair`: the caller's."""

    server_name: str
    root_pem: bytes
    pair: tuple[bytes, bytes] | None = None


class Net(Protocol):
    def server(self, options: NetOptions) -> grpc.aio.Server: ...

    def listen(self, server: grpc.aio.Server, host: str, port: int, shown: Shown) -> int:
        """Listens (port 0: any); returns the port. PortBusy if it is taken or the address is not this machine's."""
        ...

    def channel(self, address: str, dialled: Dialled, options: NetOptions) -> grpc.aio.Channel: ...

    def certificate_at(self, host: str, port: int, server_name: str, timeout_s: float) -> bytes:
        """The certificate that a server shows, in DER, unverified. Blocks: call it in a thread. Unreachable, TrustError."""
        ...
