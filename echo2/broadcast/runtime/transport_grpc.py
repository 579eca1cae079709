"""Chunks over gRPC on mutual TLS: one bidirectional `Exchange` stream per pair of nodes, opened by either of them.

Guarantees: see transport.py. Frames are passed as bytes: a chunk is encoded once, no matter how many peers it goes to.
Waits: `dial` at most DIAL_TIMEOUT_S; a vanished peer is noticed by keepalive within 20 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from echo2.base.errors import TrustError, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.runtime.sockets import Remote, as_ipv4
from echo2.broadcast.runtime.transport import Accept
from echo2.trust.identity import PeerIdentity, Role
from echo2.trust.runtime.doors import DOORS, remote_of
from echo2.trust.runtime.gate import GatedServer
from echo2.trust.runtime.tls import Credentials, open_channel, peer_of

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
_NO_ITERATOR: Any = None  # we read and write the call ourselves
SERVICE = "echo2.v1.Broadcast"
METHOD = f"/{SERVICE}/Exchange"
DIAL_TIMEOUT_S = 6.0
# A pool of its own: bulk chunks must not share a TCP connection with control or rollouts to the same address.
_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (("grpc.use_local_subchannel_pool", 1),)


def _as_is(frame: bytes) -> bytes:
    return frame


class _DialledConnection:
    """Our end of a stream that we opened."""

    is_outgoing = True

    def __init__(
        self, peer: PeerIdentity, remotes: frozenset[Remote], channel: grpc.aio.Channel, call: Any
    ) -> None:  # fmt: skip
        self.peer = peer
        self.remotes = remotes
        self._channel = channel
        self._call = call

    async def send(self, frame: bytes) -> None:
        try:
            await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._call.done():
                raise
            raise Unreachable(f"peer {self.peer.peer_id}: the connection ended") from None

    async def receive(self) -> bytes | None:
        try:
            frame = await self._call.read()
        except grpc.aio.AioRpcError:
            return None
        except asyncio.CancelledError:
            if self._call.done():
                return None
            raise
        return None if frame is _EOF else frame

    async def finish(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has ended
            await self._call.done_writing()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close(None)


class _AcceptedConnection:
    """Our end of a stream that the peer opened."""

    is_outgoing = False

    def __init__(self, peer: PeerIdentity, context: Any) -> None:
        self.peer = peer
        self.remotes = frozenset({remote_of(context.peer())})
        self._context = context
        self.closed = asyncio.Event()

    async def send(self, frame: bytes) -> None:
        if self.closed.is_set() or self._context.done():
            raise Unreachable(f"peer {self.peer.peer_id}: the connection ended")
        try:
            await self._context.write(frame)
        except (grpc.aio.BaseError, asyncio.InvalidStateError):
            raise Unreachable(f"peer {self.peer.peer_id}: the connection ended") from None

    async def receive(self) -> bytes | None:
        if self.closed.is_set():
            return None
        try:
            frame = await self._context.read()
        except grpc.aio.BaseError:
            return None
        if frame is _EOF:
            return None
        DOORS.took(self._context.peer(), len(frame))
        return bytes(frame)

    async def finish(self) -> None:
        """Nothing to do: the stream ends cleanly when its handler returns."""

    async def close(self) -> None:
        self.closed.set()


class GrpcTransport:
    """Dials with the node's credentials; accepts on a server that the caller owns."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._accept: Accept | None = None

    def add_to_server(self, server: GatedServer, accept: Accept) -> None:
        """Registers the Broadcast service; the server must use `tls.server_credentials`."""
        self._accept = accept
        handler = grpc.stream_stream_rpc_method_handler(self._exchange)
        server.add_frames(SERVICE, {"Exchange": handler})

    async def _exchange(self, _: AsyncIterator[bytes], context: Any) -> None:
        try:
            peer = peer_of(context)
        except TrustError as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        if self._accept is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not started")
        assert self._accept is not None
        connection = _AcceptedConnection(peer, context)
        try:
            await self._accept(connection)
        finally:
            connection.closed.set()

    async def dial(self, address: str, peer_id: PeerId) -> _DialledConnection:
        channel = open_channel(address, peer_id, self._credentials, _CHANNEL_OPTIONS)
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await _ready(channel, address, peer_id)
                call = channel.stream_stream(METHOD, _as_is, _as_is)(_NO_ITERATOR)
                remotes = await _remotes_at(address)
        except TimeoutError:
            await channel.close(None)
            raise Unreachable(f"peer {peer_id} at {address}: no answer within {DIAL_TIMEOUT_S:.0f} s") from None
        except BaseException:
            await channel.close(None)
            raise
        return _DialledConnection(PeerIdentity(peer_id, Role.WORKER), remotes, channel, call)

    async def close(self) -> None:
        self._accept = None


async def _remotes_at(address: str) -> frozenset[Remote]:
    """The addresses that the host resolves to; empty if it cannot be resolved."""
    host, _, port = address.rpartition(":")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return frozenset()
    return frozenset((as_ipv4(str(info[0])), int(info[1])) for *_, info in infos)


async def _ready(channel: grpc.aio.Channel, address: str, peer_id: PeerId) -> None:
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise Unreachable(f"peer {peer_id} at {address}: refused, or it is another peer")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
