"""Accepts the page's connections itself: so many in all, so many of an address, each with a deadline for what it asks.

Guarantees: `CONNECTIONS_MAX` connections are open at a time, and `PER_HOST_MAX` of one address, of which the longest idle one
gives way to a newcomer; a connection that has not sent a whole request head within `HEAD_S` ends, however slowly it sends;
one that takes no answer for `TAKE_S` ends. Waits for connections. Leaves to others: requests (uvicorn), bodies (guard).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from echo2.outside.ready import accepted
from echo2.trust.runtime.port_limits import PAGE_CONNECTIONS_MAX, PAGE_SHARE, connections_within

PER_HOST_MAX = 48
HANDSHAKES_MAX = 16
HANDSHAKE_S = 5.0
HEAD_S = 8.0
TAKE_S = 30.0
NO_DESCRIPTOR_PAUSE_S = 0.2
_log = logging.getLogger("echo2.coordinator")


class PageConnection(H11Protocol):  # type: ignore[misc]  # untyped library
    """One connection. `ended` is called once, at its end."""

    def __init__(self, ended: Callable[[PageConnection], None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._ended = ended
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
        self._deadline = self.loop.call_later(HEAD_S, self._is_late)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._deadline = None
        if self.is_idle:
            self.give_way()


class Acceptor:
    """`make(ended)` makes the protocol of a connection."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[Callable[[PageConnection], None]], PageConnection],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener, self._make, self._tls = listener, make, tls
        self._open: dict[PageConnection, str] = {}  # oldest first
        self._shaking: dict[asyncio.Task[None], str] = {}
        self._connections_max = connections_within(PAGE_SHARE, PAGE_CONNECTIONS_MAX)

    async def run(self) -> None:
        """Until cancelled."""
        self._listener.setblocking(False)
        self._listener.listen(128)
        try:
            while True:
                try:
                    connection, host = await accepted(self._listener)
                except OSError as error:  # no descriptor, or it was gone before it was accepted
                    _log.warning("dashboard: a connection could not be accepted: %s", error)
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
        if len(shaking) >= HANDSHAKES_MAX:
            shaking[0].cancel()
        own = [one for one, whose in self._open.items() if whose == host]
        if len(own) >= PER_HOST_MAX:
            return _ended_one_of(own)
        if len(self._open) + len(self._shaking) >= self._connections_max:
            return _ended_one_of(list(self._open))
        return True

    def _ended(self, connection: PageConnection) -> None:
        self._open.pop(connection, None)

    async def _begin(self, connection: socket.socket, host: str) -> None:
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * TAKE_S))

        def protocol() -> PageConnection:
            return self._make(self._ended)

        try:
            _, made = await asyncio.get_running_loop().connect_accepted_socket(
                protocol, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S if self._tls else None
            )
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            _log.debug("dashboard: %s: %r", host, error)
            with contextlib.suppress(OSError):
                connection.close()
            return
        if not made.transport.is_closing():
            self._open[made] = host


def _ended_one_of(connections: list[PageConnection]) -> bool:
    for one in connections:
        if one.is_idle:
            one.give_way()
            return True
    return False
