"""Serves the page on the coordinator's own event loop.

Guarantees: a busy port raises an error that names it before anything else of the page starts; off loopback the page is served
over TLS with the run's certificate and requires the access token. Waits for requests until it is stopped. Leaves signals to the
process.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from pathlib import Path

import uvicorn

from echo2.base.errors import PortBusy
from echo2.base.hosts import joined
from echo2.coordinator.runtime.commands import Commands
from echo2.coordinator.runtime.web.app import Web
from echo2.coordinator.runtime.web.guard import WebGuard, is_loopback
from echo2.outside.families import listened, listening_socket
from echo2.trust.runtime.http_port import HttpServer
from echo2.trust.runtime.port_limits import PAGE
from echo2.trust.runtime.tls import Credentials, read_secret, write_secret

STOP_GRACE_S = 1


def listening(host: str, port: int) -> socket.socket:
    """A bound socket; PortBusy names the address if it is taken."""
    listener = listening_socket(host)
    try:
        listener.bind((listened(host), port))
    except OSError as error:
        listener.close()
        raise PortBusy(
            f"expected the dashboard to listen on {joined(host, port)}: {error.strerror}; choose another with "
            "--coordinator.dashboard_port"
        ) from None
    return listener


class OpenedPage:
    """The page's port, bound before anything of the page runs. `page` makes the server for it."""

    def __init__(self, host: str, port: int) -> None:
        self._listener, self._host = listening(host, port), host
        self.port = int(self._listener.getsockname()[1])

    def page(self, commands: Commands, folder: Path, keys: Credentials) -> Dashboard:
        return Dashboard(commands, self._listener, self._host, folder, keys)

    def close(self) -> None:
        self._listener.close()


class Dashboard:
    """The page's server. `address`: the page's address. `url`: the same with the access token (off loopback), so it must not be
    logged or shown. `token_file`: file with that token; None: no token is required."""

    def __init__(self, commands: Commands, listener: socket.socket, host: str, folder: Path, keys: Credentials) -> None:
        self._stopping = asyncio.Event()
        self._listener = listener
        port = listener.getsockname()[1]
        is_open = is_loopback(host)
        self.token_file = None if is_open else folder / "links" / "dashboard.token"
        token = _access_token(self.token_file) if self.token_file is not None else ""
        shown = host if is_open else commands.hub.options.link_host
        scheme = "http" if is_open else "https"
        self.address = f"{scheme}://{shown}:{port}/"
        self.url = self.address + (f"?token={token}" if token else "")
        csrf = secrets.token_urlsafe(24)
        hosts = frozenset({"localhost", "127.0.0.1", "::1", host.strip("[]").lower()})
        app = WebGuard(Web(commands, csrf, self._stopping).application(), token, hosts, csrf)
        tls: dict[str, str] = {} if is_open else _tls_files(folder / "coordinator", keys)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off",
            timeout_graceful_shutdown=STOP_GRACE_S, server_header=False, ws="none", **tls,
        )  # fmt: skip
        self._server = HttpServer(config, PAGE)

    async def run(self) -> None:
        """Serves until `stop`."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        self._stopping.set()
        self._server.should_exit = True


def _access_token(path: Path) -> str:
    if not path.exists():
        write_secret(path, secrets.token_urlsafe(32).encode())
    return read_secret(path).decode().strip()


def _tls_files(folder: Path, keys: Credentials) -> dict[str, str]:
    """Writes key and certificate to files, because uvicorn reads them from there."""
    key_path, certificate_path = folder / "dashboard.key", folder / "dashboard.pem"
    write_secret(key_path, keys.tls_key_pem)
    write_secret(certificate_path, keys.certificate.pem)
    return {"ssl_keyfile": str(key_path), "ssl_certfile": str(certificate_path)}
