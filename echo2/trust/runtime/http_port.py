"""Serves HTTP on a port that counts its connections: so many in all, so many of an address, each with a deadline for its request.

Guarantees: `limits.connections` are open at a time, and `limits.per_host` of one address, of which the longest idle one gives way
to a newcomer; a connection that has not sent a whole request head within `limits.head_s` ends, however slowly it sends; one that
takes no answer for `TAKE_S` ends. Waits for connections. Leaves to others: requests (uvicorn), bodies and who asks (the
application).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from echo2.outside.ready import accepted
from echo2.trust.runtime.port_limits import HttpLimits

HANDSHAKE_S = 5.0
TAKE_S = 30.0
NO_DESCRIPTOR_PAUSE_S = 0.2
_log = logging.getLogger("echo2.http")


class HttpConnection(H11Protocol):  # type: ignore[misc]  # untyped library
    """One connection. `ended` is called once, at its end."""

    def __init__(self, ended: Callable[[HttpConnection], None], head_s: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._ended, self._head_s = ended, head_s
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:
            self._expect_nothing()
        elif self._deadline is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)
        self._ended(self)

    def give_way(self) -> None:
        """Ends at once."""
        if self.transport is not None:
            self.transport.abort()

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(self._head_s, self._is_late)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._deadline = None
        if self.is_idle:
            self.give_way()


class _Acceptor:
    """`make(ended)` makes the protocol of a connection."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[Callable[[HttpConnection], None]], HttpConnection],
        tls: ssl.SSLContext | None,
        limits: HttpLimits,
    ) -> None:
        self._listener, self._make, self._tls, self._limits = listener, make, tls, limits
        self._open: dict[HttpConnection, str] = {}  # oldest first
        self._shaking: dict[asyncio.Task[None], str] = {}
        self._connections_max = limits.connections

    async def run(self) -> None:
        """Until cancelled."""
        self._listener.setblocking(False)
        self._listener.listen(self._limits.backlog)
        try:
            while True:
                try:
                    connection, host = await accepted(self._listener)
                except OSError as error:  # no descriptor, or it was gone before it was accepted
                    _log.warning("%s: a connection could not be accepted: %s", self._limits.name, error)
                    await asyncio.sleep(NO_DESCRIPTOR_PAUSE_S)
                    continue
                if not self._has_room_for(host):
                    connection.close()
                    continue
                task = asyncio.create_task(self._begin(connection, host))
                if self._tls is not None:
                    self._shaking[task] = host
                    task.add_done_callback(lambda done: self._shaking.pop(done, None))
                await asyncio.sleep(0)  # it begins before the next is accepted
        finally:
            for task in list(self._shaking):
                task.cancel()

    def _has_room_for(self, host: str) -> bool:
        """Whether one more may come; makes room by ending the longest idle one."""
        shaking = [task for task, whose in self._shaking.items() if whose == host]
        if len(shaking) >= self._limits.handshakes_per_host:
            shaking[0].cancel()
        own = [one for one, whose in self._open.items() if whose == host]
        if len(own) >= self._limits.per_host:
            return _ended_one_of(own)
        if len(self._open) + len(self._shaking) >= self._connections_max:
            return _ended_one_of(list(self._open))
        return True

    def _ended(self, connection: HttpConnection) -> None:
        self._open.pop(connection, None)

    async def _begin(self, connection: socket.socket, host: str) -> None:
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * TAKE_S))

        def protocol() -> HttpConnection:
            return self._make(self._ended)

        try:
            _, made = await asyncio.get_running_loop().connect_accepted_socket(
                protocol, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S if self._tls else None
            )
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            _log.debug("%s: %s: %r", self._limits.name, host, error)
            with contextlib.suppress(OSError):
                connection.close()
            return
        if not made.transport.is_closing():
            self._open[made] = host


def _ended_one_of(connections: list[HttpConnection]) -> bool:
    for one in connections:
        if one.is_idle:
            one.give_way()
            return True
    return False


class HttpServer(uvicorn.Server):  # type: ignore[misc]
    """`serve(sockets=[listener])` serves on the one socket that it is given."""

    def __init__(self, config: uvicorn.Config, limits: HttpLimits) -> None:
        super().__init__(config)
        self._limits = limits
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None, "it listens on a socket that it is given"
        await self.lifespan.startup()
        self.servers: list[asyncio.Server] = []
        self._accepting = asyncio.create_task(
            _Acceptor(sockets[0], self._protocol, self.config.ssl, self._limits).run()
        )
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    def _protocol(self, ended: Callable[[HttpConnection], None]) -> HttpConnection:
        return HttpConnection(
            ended,
            self._limits.head_s,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business."""
        yield
