"""Serves HTTP on a port that counts its connections: so many in all, so many of an address, each with a deadline for its request.

A stranger is a connection on which no request has shown a key yet; the application says when one has (`scope[KEY_SHOWN]()`).

Guarantees: `limits.connections` are open at a time, and `limits.strangers_per_host` strangers of one address, of which the longest
idle one gives way to a newcomer (the oldest one, if all are being answered), or, with `limits.crowd_s`, those that come beyond have
that long for their first request; a connection that has not sent a whole request head within `limits.head_s` ends, however slowly
it sends; one that takes no answer for `TAKE_S` ends; a host whose connections end one after another without a request, and of which
none has shown a key, is shut out for a while (ports). Waits for connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from echo2.outside.guard import cancel_all
from echo2.outside.net import accepted
from echo2.trust.ports import DOORS, HttpLimits

HANDSHAKE_S = 5.0  # a browser over a slow link
TAKE_S = 30.0  # a page that sleeps comes back sooner, or reconnects
NO_DESCRIPTOR_PAUSE_S = 0.2  # without a pause the loop would spin until one is free
OWN_MACHINE = ("127.0.0.1", "::1")
"""Never shut out: the operator's browser comes from there, mostly, whatever else runs beside it."""
KEY_SHOWN = "echo2.key_shown"
"""Under this name a request's scope has a function that the application calls once a key has been shown."""
_log = logging.getLogger("echo2.http")


class HttpConnection(H11Protocol):  # type: ignore[misc]  # untyped library
    """One connection. `keeper` is told once that it has shown a key, and once that it has ended."""

    def __init__(self, keeper: _Acceptor, head_s: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.is_stranger, self.has_asked = True, False
        self._keeper, self._head_s = keeper, head_s
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
        self._keeper.ended(self)

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self.has_asked = True
            self.scope.setdefault(KEY_SHOWN, self._shown)

    def give_way(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _shown(self) -> None:
        if self.is_stranger:
            self.is_stranger, self._head_s = False, self._keeper.limits.head_s
            self._keeper.shown(self)

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
    """`make(keeper, head_s)` makes the protocol of a connection."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[_Acceptor, float], HttpConnection],
        tls: ssl.SSLContext | None,
        limits: HttpLimits,
    ) -> None:
        self._listener, self._make, self._tls, self.limits = listener, make, tls, limits
        self._open: dict[HttpConnection, str] = {}  # oldest first, by address
        self._strangers: dict[str, dict[HttpConnection, None]] = {}
        self._shaking: dict[asyncio.Task[None], str] = {}
        self._connections_max = limits.connections

    async def run(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(self.limits.backlog)
        try:
            while True:
                try:
                    connection, host = await accepted(self._listener)
                except OSError as error:  # no descriptor, or it was gone before it was accepted
                    _log.warning("%s: a connection could not be accepted: %s", self.limits.name, error)
                    await asyncio.sleep(NO_DESCRIPTOR_PAUSE_S)
                    continue
                head_s = self._patience_s(host)
                if head_s is None:
                    connection.close()
                    continue
                task = asyncio.create_task(self._begin(connection, host, head_s))
                if self._tls is not None:
                    self._shaking[task] = host
                    task.add_done_callback(lambda done: self._shaking.pop(done, None))
                await asyncio.sleep(0)  # it begins before the next is accepted
        finally:
            for task in list(self._shaking):
                task.cancel()

    def _patience_s(self, host: str) -> float | None:
        """How long one more is waited for until it has asked something; None: it may not come. Makes room by ending the longest
        idle one."""
        limits, strangers = self.limits, self._strangers.get(host, {})
        shaking = [task for task, address in self._shaking.items() if address == host]
        if len(shaking) >= limits.handshakes_per_host:
            shaking[0].cancel()
        is_crowd = len(strangers) >= limits.strangers_per_host
        head_s = limits.crowd_s if is_crowd and limits.crowd_s else limits.head_s
        if is_crowd and not limits.crowd_s:  # answers that never end must not keep the next request out
            if not _ended_one_of(strangers):
                next(iter(strangers)).give_way()
            return head_s
        if is_crowd and len(strangers) >= self._connections_max // 2:
            return head_s if _ended_one_of(strangers) else None
        if len(self._open) + len(self._shaking) >= self._connections_max:
            every = itertools.chain(*self._strangers.values(), self._open)
            return head_s if _ended_one_of(every) else None
        return head_s

    def shown(self, connection: HttpConnection) -> None:
        """It is no stranger any more."""
        host = self._open.get(connection)
        strangers = self._strangers.get(host, {}) if host is not None else {}
        strangers.pop(connection, None)
        if host is not None and not strangers:
            self._strangers.pop(host, None)

    def ended(self, connection: HttpConnection) -> None:
        self.shown(connection)
        host = self._open.pop(connection, None)
        if host is None or connection.has_asked or host in OWN_MACHINE:
            return
        if all(other.is_stranger for other, address in self._open.items() if address == host):
            DOORS.brought_nothing(host)

    async def _begin(self, connection: socket.socket, host: str, head_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * TAKE_S))
        patience_s = HANDSHAKE_S if self._tls else None
        try:
            _, protocol = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(self, head_s), connection, ssl=self._tls, ssl_handshake_timeout=patience_s
            )
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            _log.debug("%s: %s: %r", self.limits.name, host, error)
            with contextlib.suppress(OSError):
                connection.close()
            return
        if not protocol.transport.is_closing():
            self._open[protocol] = host
            if protocol.is_stranger:
                self._strangers.setdefault(host, {})[protocol] = None


def _ended_one_of(connections: Iterable[HttpConnection]) -> bool:
    for connection in connections:
        if connection.is_idle:
            connection.give_way()
            return True
    return False


class HttpServer(uvicorn.Server):  # type: ignore[misc]
    """`serve(sockets=[listener])` serves on the one socket that it is given."""

    def __init__(self, config: uvicorn.Config, limits: HttpLimits) -> None:
        super().__init__(config)
        self._limits = limits
        self._accepting: asyncio.Task[None] | None = None
        self._port = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None, "it listens on a socket that it is given"
        await self.lifespan.startup()
        self.servers: list[asyncio.Server] = []
        self._port = sockets[0].getsockname()[1]
        DOORS.watch_http(self._port)
        state = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        make = functools.partial(HttpConnection, **state)
        self._accepting = asyncio.create_task(_Acceptor(sockets[0], make, self.config.ssl, self._limits).run())
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            await cancel_all((self._accepting,))
            DOORS.close(self._port)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business."""
        yield
