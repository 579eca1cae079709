"""Dials and accepts connections with a node's credentials; the same in production and in the simulator.

Guarantees: `peer` of a connection is proven by its certificate of the run, both ways; the port takes so many connections in all and
of an address (BULK; trust/ports watches it), of which each has HANDSHAKE_S to prove who it is and, of one address, the first
of too many gives way to the next; handshakes are paid for by the address they come from. `dial` takes DIAL_TIMEOUT_S at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from echo2.base.errors import EchoError, Unreachable
from echo2.base.ids import PeerId
from echo2.base.units import address_of
from echo2.broadcast.connection import Connection
from echo2.broadcast.reachability import LinkWay
from echo2.outside import here, monotonic
from echo2.outside.guard import FairShares, Refusals, Tasks
from echo2.outside.net import Dialled
from echo2.outside.streams import StreamCaller, StreamListener
from echo2.trust.identity import dns_name_of
from echo2.trust.ports import BULK, DOORS
from echo2.trust.tls import Credentials, server_credentials

DIAL_TIMEOUT_S = 6.0  # TCP retries a lost SYN after 1 and 3 s
HANDSHAKE_S = BULK.handshake_s
ACCEPT_PAUSE_S = 0.2  # until descriptors are free again
NEXT_ADDRESS_S = 0.25  # RFC 8305, 5: Connection Attempt Delay
_log = logging.getLogger("echo2.ports")

Accept = Callable[[Connection], Awaitable[None]]
"""Called with each accepted connection; the connection lives until it returns."""


class Transport:
    """`shares`: of peers and addresses, of the loop's time. `is_refused`: whether connections of a host are closed before their
    handshake."""

    def __init__(
        self,
        credentials: Credentials,
        shares: FairShares | None = None,
        is_refused: Callable[[str], bool] = lambda host: False,
    ) -> None:
        self._credentials, self._shown = credentials, server_credentials(credentials)
        self._shares, self._is_refused = shares or FairShares(), is_refused
        self.port = 0
        self._listener: StreamListener | None = None
        self._serving = Tasks()
        self._shaking: dict[asyncio.Task[None], str] = {}  # by task the host, in the order in which they came
        self._refusals = Refusals(_log)

    def listen(self, host: str, port: int) -> int:
        """Takes a port (0: any) and returns it; callers wait until `serve`. PortBusy where it is taken."""
        self._listener = here().net.listen_for_streams(host, port, self._shown, lambda bound: DOORS.watch(bound, BULK))
        self.port = self._listener.port
        return self.port

    def serve(self, accept: Accept) -> None:
        if self._listener is not None:
            self._serving.start(self._accept_all(self._listener, accept))

    async def _accept_all(self, listener: StreamListener, accept: Accept) -> None:
        while True:
            try:
                caller = await listener.accept()
            except OSError as error:  # no descriptor, or it was gone before it was accepted
                self._refusals.warn("port %d: a connection could not be accepted: %s", self.port, error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._serving) > BULK.connections:  # one of them accepts
                caller.close()
            else:
                self.take(caller, accept)

    def take(self, caller: StreamCaller, accept: Accept, way: LinkWay | None = None) -> None:
        """Serves somebody who came to the port or, as `way` says, through a byte pipe."""
        host = caller.host
        if self._is_refused(host):
            caller.close()
            return
        shaking = [task for task, other in self._shaking.items() if other == host]
        if len(shaking) >= BULK.strangers_per_host:
            shaking[0].cancel()
            del self._shaking[shaking[0]]
        task = self._serving.start(self._serve(caller, accept, way), caller.close)
        task.add_done_callback(lambda _: self._shaking.pop(task, None))
        self._shaking[task] = host

    async def _serve(self, caller: StreamCaller, accept: Accept, way: LinkWay | None) -> None:
        connection: Connection | None = None
        try:
            connection = await self.prove(caller, way)
            if (task := asyncio.current_task()) is not None:
                self._shaking.pop(task, None)
            await accept(connection)
        except ConnectionError as error:  # it left by itself, as one does that only asks whether the port is open
            _log.debug("port %d: a caller left: %s", self.port, error)
        except (OSError, EchoError) as error:  # a handshake that failed is an OSError
            self._refusals.warn("port %d: a caller was refused: %s", self.port, error)
        finally:
            if connection is not None:
                await connection.close()

    async def prove(self, caller: StreamCaller, way: LinkWay | None = None) -> Connection:
        """The caller's connection, once it has shown a certificate of the run; OSError or TrustError if it does not."""
        of_host = self._shares.of(f"address {caller.host}")
        connection = Connection(is_outgoing=False, share=of_host, way=way)
        try:
            if (pause_s := of_host.pause_s(0.0, monotonic())) > 0:
                await asyncio.sleep(pause_s)
            await caller.shake_hands(connection, self._shown, HANDSHAKE_S)
            connection.prove()
        except BaseException:
            await _give_up(connection)
            raise
        of_host.repay(connection.handshake_s)
        connection.share = self._shares.of(connection.peer.peer_id)
        connection.share.pause_s(connection.handshake_s, monotonic())
        return connection

    async def dial(self, address: str, peer_id: PeerId, way: LinkWay | None = None) -> Connection:
        """Unreachable unless exactly `peer_id` answers at host:port. Of a name's addresses the first that does."""
        where = f"peer {peer_id} at {address}"
        host, _, port = address.rpartition(":")
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise Unreachable(f"{where}: expected host:port")
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                hosts = await hosts_of(host, int(port))
                connection, _ = await first_of(hosts, lambda ip: self._dial(ip, int(port), peer_id, way))
        except TimeoutError:
            raise Unreachable(f"{where}: no answer within {DIAL_TIMEOUT_S:.0f} s") from None
        except (OSError, ValueError) as error:  # or an impossible name
            raise Unreachable(f"{where}: expected a known name, got: {error}") from None
        return connection

    async def _dial(self, host: str, port: int, peer_id: PeerId, way: LinkWay | None) -> Connection:
        """One numeric address. asyncio's own trying of several leaves one open that connects as it is cancelled."""
        connection = Connection(is_outgoing=True, share=self._shares.of(peer_id), way=way)
        credentials = self._credentials
        dialled = Dialled(dns_name_of(peer_id), credentials.authority_pem, credentials.key_and_certificate())
        try:
            await here().net.dial_stream(connection, host, port, dialled, HANDSHAKE_S)
            connection.prove(peer_id)
        except (OSError, EchoError) as error:
            await _give_up(connection)
            where = address_of(host, port)
            raise Unreachable(f"peer {peer_id} at {where}: refused, or it is another peer ({error})") from None
        return connection

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            DOORS.close(self.port)
            self.port, self._listener = 0, None
        await self._serving.end()


async def _give_up(connection: Connection) -> None:
    if connection.is_made:
        await connection.close()


async def hosts_of(name: str, port: int) -> list[str]:
    """Resolves a name to numeric hosts, IPv6 and IPv4 alternating. OSError if it cannot be resolved."""
    bare = name.strip("[]")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(bare.partition("%")[0])
        return [bare]
    infos = await asyncio.get_running_loop().getaddrinfo(bare, port, type=socket.SOCK_STREAM)
    hosts = list(dict.fromkeys(str(place[0]) for *_, place in infos))
    six = [host for host in hosts if ipaddress.ip_address(host.partition("%")[0]).version == 6]
    pairs = itertools.zip_longest(six, [host for host in hosts if host not in six])
    return [host for pair in pairs for host in pair if host is not None]


async def first_of(addresses: Sequence[str], dial: Callable[[str], Awaitable[Connection]]) -> tuple[Connection, str]:
    """The connection to the first address that answers, and that address (Happy Eyeballs, RFC 8305): tried in the given order,
    NEXT_ADDRESS_S apart or as soon as the one before has failed; others are closed. Raises the last error if all fail."""
    trying: dict[asyncio.Future[Connection], str] = {}
    left, error = list(addresses), None
    try:
        while left or trying:
            if left:
                address = left.pop(0)
                trying[asyncio.ensure_future(dial(address))] = address
            pause_s = NEXT_ADDRESS_S if left else None
            done, _ = await asyncio.wait(trying, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            for attempt in sorted(done, key=list(trying).index):
                address = trying.pop(attempt)
                if not isinstance(attempt.exception(), EchoError):
                    return attempt.result(), address
                error = attempt.exception()
    finally:
        _give_up_all(trying)
    assert error is not None, "no address was given"
    raise error


def _give_up_all(trying: Iterable[asyncio.Future[Connection]]) -> None:
    """Cancels pending dials without waiting, because the caller may itself be cancelled."""
    for attempt in trying:
        if attempt.done():
            _close_late(attempt)
        else:
            attempt.add_done_callback(_close_late)
            attempt.cancel()


def _close_late(attempt: asyncio.Future[Any]) -> None:
    """Closes a connection that was established just as it was cancelled."""
    if not attempt.cancelled() and attempt.exception() is None:
        _closing.start(attempt.result().close())


_closing = Tasks()
