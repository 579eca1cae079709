"""The network of a daemon: servers and channels in gRPC's shape, and plain byte streams (streams.py).

Every implementation guarantees: messages of a stream arrive whole and in order; `write` waits while the other side does not
read; a caller's certificate was checked against the authority before a servicer sees the call; a channel reaches exactly the
node that it names. Errors are gRPC's own. Two implementations: gRPC on TLS, and the simulator's.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from echo2.base.errors import PortBusy, TrustError, Unreachable
from echo2.base.units import address_of

if TYPE_CHECKING:
    from echo2.outside.streams import StreamListener, StreamReader

NetOptions = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Shown:
    """What a server presents: `pair` returns (key, certificate) in PEM, called for each handshake. `authority_pem`: callers
    must present a certificate that it issued; None: callers have no certificate yet."""

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

    async def dial_stream(self, reader: StreamReader, host: str, port: int, dialled: Dialled, within_s: float) -> None:
        """Connects to a numeric address and shakes hands; the reader has the stream then. OSError where that fails."""
        ...

    def listen_for_streams(self, host: str, port: int, shown: Shown, watch: Callable[[int], None]) -> StreamListener:
        """Listens (port 0: any). PortBusy if that is taken. `watch` is told the port where its connections are sockets of this
        process."""
        ...


EVERY_ADDRESS = "::"  # of both families


def listened(host: str) -> str:
    """The address to bind for a configured host, without brackets."""
    bare = host.strip("[]")
    has_both = socket.has_dualstack_ipv6()  # kernels without IPv6 are common in containers
    return "0.0.0.0" if bare == EVERY_ADDRESS and not has_both else bare


def listening_socket(host: str) -> socket.socket:
    """An unbound TCP socket of the host's family; of both families for `::`."""
    bare = listened(host)
    # With IPPROTO_TCP, since asyncio sets TCP_NODELAY only on such sockets: without it each HTTP answer waits 40 ms for an ACK.
    sock = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if ":" in bare:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return sock


async def readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await until_ready(loop.add_reader, loop.remove_reader, sock.fileno())


async def until_ready(
    add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], object], descriptor: int
) -> None:
    """Waits until a descriptor is ready. `add` and `remove`: the loop's methods for readers or writers."""
    ready = asyncio.get_running_loop().create_future()
    add(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(descriptor)


async def accepted(listener: socket.socket) -> tuple[socket.socket, str]:
    """The next connection and the host it comes from. OSError if it was closed already, or no descriptor is free.
    `loop.sock_accept` delivers its connection through a future: if the task is cancelled in the iteration in which one arrives,
    nothing closes it. Here, no await lies between accepting a connection and returning it."""
    while True:
        await readable(listener)
        try:
            sock, address = listener.accept()
        except (BlockingIOError, InterruptedError):
            continue
        sock.setblocking(False)
        return sock, str(address[0])


class GrpcNet:
    def server(self, options: NetOptions) -> grpc.aio.Server:
        return grpc.aio.server(options=list(options))

    def listen(self, server: grpc.aio.Server, host: str, port: int, shown: Shown) -> int:
        address = address_of(listened(host), port)
        check_free(host, port, address)
        try:
            bound = server.add_secure_port(address, _server_credentials(shown))
        except RuntimeError:
            bound = 0
        if bound == 0:
            raise PortBusy(f"expected to listen on {address}, but the address is taken or not this machine's")
        return bound

    def channel(self, address: str, dialled: Dialled, options: NetOptions) -> grpc.aio.Channel:
        key, certificate = dialled.pair or (None, None)
        credentials = grpc.ssl_channel_credentials(dialled.root_pem, key, certificate)
        name = ("grpc.ssl_target_name_override", dialled.server_name)
        return grpc.aio.secure_channel(address, credentials, [name, *options])

    def certificate_at(self, host: str, port: int, server_name: str, timeout_s: float) -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        try:
            with socket.create_connection((host, port), timeout=timeout_s) as raw:
                with context.wrap_socket(raw, server_hostname=server_name) as connection:
                    der = connection.getpeercert(binary_form=True)
        # The server is full at the moment, or its machine is going down.
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise Unreachable(
                f"coordinator at {host}:{port}: it closed the connection before it showed a certificate"
            ) from None
        except ssl.SSLError as error:
            raise TrustError(f"coordinator at {host}:{port}: expected TLS, got {error}") from None
        except (OSError, UnicodeError, OverflowError) as error:  # or an impossible name or port
            text = getattr(error, "strerror", None) or error
            raise Unreachable(
                f"coordinator at {host}:{port}: expected an answer within {timeout_s:.0f} s, got: {text}"
            ) from None
        if der is None:
            raise TrustError(f"coordinator at {host}:{port}: expected a certificate, got none")
        return der

    async def dial_stream(self, reader: StreamReader, host: str, port: int, dialled: Dialled, within_s: float) -> None:
        from echo2.outside.tls_streams import dial  # which needs this module

        await dial(reader, host, port, dialled, within_s)

    def listen_for_streams(self, host: str, port: int, shown: Shown, watch: Callable[[int], None]) -> StreamListener:
        from echo2.outside.tls_streams import SocketListener

        listener = SocketListener(host, port)
        watch(listener.port)
        return listener


def check_free(host: str, port: int, address: str) -> None:
    """PortBusy if the port is taken. gRPC's message does not tell a busy port from a foreign address; the system's does."""
    if port == 0:
        return
    with listening_socket(host) as probe:
        try:
            probe.bind((listened(host), port))
        except OSError as error:
            raise PortBusy(f"expected to listen on {address}: {error.strerror}") from None


def _server_credentials(shown: Shown) -> grpc.ServerCredentials:
    """TLS credentials; with an authority, mutual TLS that uses a renewed certificate from the next handshake on."""
    authority_pem = shown.authority_pem
    if authority_pem is None:
        return grpc.ssl_server_credentials([shown.pair()])
    pair = shown.pair()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([pair], authority_pem)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC on a thread of its own before each handshake; None: no change."""
        nonlocal pair
        newest = shown.pair()
        if newest == pair:
            return None
        pair = newest
        return configuration()

    fetch: Any = changed  # the stubs lack None, which means "no change"
    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=True)
