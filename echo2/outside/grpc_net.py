"""`Net` over the real network: gRPC on TLS."""

from __future__ import annotations

import socket
import ssl
from typing import Any

import grpc
import grpc.aio

from echo2.base.errors import PortBusy, TrustError, Unreachable
from echo2.base.hosts import joined
from echo2.outside.families import listened, listening_socket
from echo2.outside.guard import HandlerGuard
from echo2.outside.net import Dialled, NetOptions, Shown


class GrpcNet:
    def server(self, options: NetOptions) -> grpc.aio.Server:
        return grpc.aio.server(interceptors=[HandlerGuard()], options=list(options))

    def listen(self, server: grpc.aio.Server, host: str, port: int, shown: Shown) -> int:
        address = joined(listened(host), port)
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
                    shown = connection.getpeercert(binary_form=True)
        except ssl.SSLEOFError:  # the server is full at the moment, or its machine is going down
            raise Unreachable(
                f"coordinator at {host}:{port}: it closed the connection before it showed a certificate"
            ) from None
        except ssl.SSLError as error:
            raise TrustError(f"coordinator at {host}:{port}: expected TLS, got {error}") from None
        except OSError as error:
            raise Unreachable(
                f"coordinator at {host}:{port}: expected an answer within {timeout_s:.0f} s, got: {error}"
            ) from None
        if shown is None:
            raise TrustError(f"coordinator at {host}:{port}: expected a certificate, got none")
        return shown


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
