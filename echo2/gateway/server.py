"""The gateway's port: opened only if agents are configured; on loopback by default; any other address needs TLS."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from echo2.base.errors import ConfigError, PortBusy
from echo2.trust.http_port import HttpServer
from echo2.trust.ports import GATEWAY, HttpLimits

STOP_GRACE_S = 1  # streams never end by themselves; a learner that stops must not wait for them


class GatewayPort:
    """Binds `host:port` (port 0: any free port) on construction, so that `url` is known before `run` serves."""

    def __init__(self, listen: str, certificate: str = "", limits: HttpLimits = GATEWAY) -> None:
        host, _, port = (listen or "127.0.0.1:0").rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdigit():
            raise ConfigError(f"agent.listen: expected HOST:PORT, got {listen!r}")
        if host not in ("127.0.0.1", "::1", "localhost") and not certificate:
            raise ConfigError(
                f"agent.listen: expected agent.tls, a PEM file with certificate and key, for {host}, as keys of episodes "
                "would travel in clear text"
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With IPPROTO_TCP, since asyncio sets TCP_NODELAY only on such sockets: without it each answer waits 40 ms for an ACK.
        self._listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((host, int(port)))
        except OSError as error:
            self._listener.close()
            raise PortBusy(f"agent.listen: expected to listen on {host}:{port}: {error.strerror}") from None
        self._listener.listen(limits.backlog)  # connections that arrive before `run` wait here
        self._limits = limits
        self._tls = {"ssl_certfile": certificate} if certificate else {}
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if certificate else 'http'}://{shown}:{self._listener.getsockname()[1]}"
        self._server: HttpServer | None = None

    async def run(self, app: ASGIApp) -> None:
        """Serves until `stop` or cancellation."""
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none",
            timeout_graceful_shutdown=STOP_GRACE_S, timeout_keep_alive=75, server_header=False, **self._tls,
        )  # fmt: skip
        self._server = HttpServer(config, self._limits)
        await self._server.serve(sockets=[self._listener])

    async def stop(self, serving: asyncio.Task[None] | None) -> None:
        if self._server is not None:
            self._server.should_exit = True
        if serving is not None:
            await asyncio.gather(serving, return_exceptions=True)
        self._listener.close()
