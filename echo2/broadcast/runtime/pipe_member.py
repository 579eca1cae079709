"""The member's end of byte pipes: it holds places at relays, comes to callers, and hands their connections on.

A caller's first bytes say what it wants: gRPC (it offers `h2`) is carried on to this node's own gRPC port, anything else is a bulk
connection. Both begin with TLS that the caller and this node make with each other, as at an open port.
Guarantees: it dials none but the relays it was told of; CALLS_MAX callers are on their way at a time. Waits: for callers;
PAUSE_S_MAX at most between two attempts at a relay. Leaves to others: who the caller is (transport_bulk, gRPC).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping

from echo2.base.errors import EchoError, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.pipe_hello import TICKET_BYTES, PipeAnswer, TlsHello
from echo2.broadcast.runtime.pipe_relay import ANSWER_S, opening_at
from echo2.broadcast.runtime.sockets import Remote
from echo2.broadcast.runtime.splicing import carry
from echo2.broadcast.runtime.transport_bulk import BulkConnection, keep_alive

PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 60.0
STILL_HERE_S = 20.0
CALLS_MAX = 256
_STILL_HERE = b"here"
_log = logging.getLogger("echo2.broadcast")
Dial = Callable[[str, int, PeerId], Coroutine[None, None, BulkConnection]]


class PipeMember:
    """`dial` opens a TLS connection to a relay; `take` is handed a bulk connection that a caller began, and the relay's host.
    `grpc_at`: this node's own gRPC port, on this machine; None: callers that want it are hung up on."""

    def __init__(self, dial: Dial, take: Callable[[socket.socket, str], None]) -> None:
        self._dial, self._take = dial, take
        self.grpc_at: Remote | None = None
        self._places: dict[tuple[PeerId, str], asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._told: dict[PeerId, str] = {}
        self.held: set[PeerId] = set()

    def keep(self, wanted: Mapping[PeerId, str]) -> None:
        """Places at these relays, by the address of their byte pipes; given up elsewhere."""
        for key in set(self._places) - set(wanted.items()):
            self._places.pop(key).cancel()
        for peer, address in wanted.items():
            if address and (peer, address) not in self._places:
                self._places[peer, address] = asyncio.create_task(self._hold(peer, address))

    async def _hold(self, relay: PeerId, address: str) -> None:
        pause_s, (host, _, port) = PAUSE_S_MIN, address.rpartition(":")
        while True:
            try:
                connection = await self._dial(host, int(port), relay)
                pause_s = PAUSE_S_MIN
                await self._stay(relay, connection)
                error: object = "the connection ended"
            except EchoError as failed:
                error = failed
            if self._told.get(relay) != str(error):  # it is tried for ever, and said once
                self._told[relay] = str(error)
                _log.info("byte pipes of relay %s at %s: %s", relay, address, error)
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_S_MAX, 2 * pause_s)

    async def _stay(self, relay: PeerId, connection: BulkConnection) -> None:
        (remote,) = connection.remotes
        telling = asyncio.create_task(_say_still_here(connection))
        self.held.add(relay)
        try:
            while (ticket := await connection.receive()) is not None:
                if len(ticket) != TICKET_BYTES:
                    raise Unreachable(f"relay {relay}: expected a ticket of {TICKET_BYTES} bytes, got {len(ticket)}")
                if len(self._calls) < CALLS_MAX:
                    call = asyncio.create_task(self._come(remote, ticket))
                    self._calls.add(call)
                    call.add_done_callback(self._calls.discard)
        finally:
            self.held.discard(relay)
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            await connection.close()

    async def _come(self, relay: Remote, ticket: bytes) -> None:
        """To the caller that the ticket is for."""
        loop = asyncio.get_running_loop()
        raw: socket.socket | None = _socket_to(relay[0])
        assert raw is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_connect(raw, relay)
                await loop.sock_sendall(raw, PipeAnswer(ticket).to_bytes())
                opening = await opening_at(raw)
            if not isinstance(opening, TlsHello):
                return
            if "h2" not in opening.protocols:
                self._take(raw, relay[0])
                raw = None
            elif self.grpc_at is not None:
                await self._carry_on(raw, self.grpc_at)
        except (OSError, TimeoutError, EchoError) as error:
            _log.debug("byte pipes: a caller did not come through: %s", error or "too slow")
        finally:
            if raw is not None:
                raw.close()

    async def _carry_on(self, raw: socket.socket, own: Remote) -> None:
        port = _socket_to(own[0])
        with contextlib.closing(port):
            await asyncio.get_running_loop().sock_connect(port, own)
            keep_alive(raw)
            await carry(raw, port, lambda count: None)

    async def close(self) -> None:
        tasks = [*self._places.values(), *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._places.clear()


async def _say_still_here(connection: BulkConnection) -> None:
    with contextlib.suppress(Unreachable):  # whoever waits for tickets sees it end
        while True:
            await asyncio.sleep(STILL_HERE_S)
            await connection.send(_STILL_HERE)


def _socket_to(host: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    return made
