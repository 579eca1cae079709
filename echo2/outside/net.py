"""Servers and channels in gRPC's shape: what the generated stubs and servicers need, and no more.

Guarantees asked of all: messages of a stream arrive whole and in order; `write` waits while the other side does not
read; a caller's certificate was checked against the authority before a servicer sees the call; a channel reaches the very
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
    """What a server shows: `pair` gives (key, certificate) in PEM, asked anew for each handshake.

    `authority_pem`: callers must show a certificate that it issued; None: callers have none yet.
    """

    pair: Callable[[], tuple[bytes, bytes]]
    authority_pem: bytes | None


@dataclass(frozen=True, slots=True)
class Dialled:
    """Whom a channel reaches: `server_name` in a certificate issued by (or being) `root_pem`. `pair`: what the caller shows."""

    server_name: str
    root_pem: bytes
    pair: tuple[bytes, bytes] | None = None


class Net(Protocol):
    def server(self, options: NetOptions) -> grpc.aio.Server: ...

    def listen(self, server: grpc.aio.Server, host: str, port: int, shown: Shown) -> int:
        """Port 0: any. Returns the port; PortBusy for one that is taken or an address that is not this machine's."""
        ...

    def channel(self, address: str, dialled: Dialled, options: NetOptions) -> grpc.aio.Channel: ...

    def certificate_at(self, host: str, port: int, server_name: str, timeout_s: float) -> bytes:
        """What a server shows, in DER, not yet believed. Blocks: call it in a thread. Unreachable, TrustError."""
        ...
