"""A relay's port for byte pipes: whoever dials it with TLS for a member that cannot be dialled gets a pipe to that member.

    caller --TLS hello for M--> waits --M is told a ticket--> M dials us and shows it --> both are spliced until one ends
    member --TLS hello for us, its certificate--> holds a place: knows of callers as long as this connection lives

TLS goes end to end: to the relay a pipe is bytes that it cannot read, and a caller is whoever M lets in, as at an open port of M's.
Guarantees: places only for members of the run that are not barred, one a member, its newest; pipes within the ledger (relay_book),
charged to the member that is called; an opening within OPENING_S, an answer within ANSWER_S, a certificate within HANDSHAKE_S;
CALLERS_PER_HOST of an address that wait for any of these, half of all connections (port_limits.PIPES, watched by doors until they
are pipes), half of a member's pipes.
Leaves to others: who M is (TLS at both ends), what goes through.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

from echo2.base.errors import EchoError, LimitExceeded
from echo2.base.ids import PeerId
from echo2.broadcast import relay_book
from echo2.broadcast.pipe_hello import OPENING_BYTES_MAX, TICKET_BYTES, PipeAnswer, TlsHello, opening_of
from echo2.broadcast.relay_book import PIPES_OF_LEARNER, RelayBook
from echo2.broadcast.runtime.sealed import accept_sealed
from echo2.broadcast.runtime.sockets import as_ipv4
from echo2.broadcast.runtime.splicing import carry
from echo2.broadcast.runtime.transport_bulk import (
    HANDSHAKE_S,
    BulkConnection,
    keep_alive,
    listener_at,
    told_of,
)
from echo2.outside import here, monotonic
from echo2.outside.guard import Refusals
from echo2.outside.ready import accepted, readable
from echo2.trust.identity import Role, dns_name_of
from echo2.trust.runtime.doors import DOORS
from echo2.trust.runtime.port_limits import PIPES
from echo2.trust.runtime.sockets_tls import MutualTls
from echo2.trust.runtime.tls import Credentials

OPENING_S, ANSWER_S = 8.0, 8.0
LOOK_S = 0.02
CALLERS_PER_HOST = PIPES.strangers_per_host
ACCEPT_PAUSE_S = 0.2
_log = logging.getLogger("echo2.ports")
Key = TypeVar("Key", str, tuple[PeerId, str])


@dataclass(frozen=True, slots=True)
class _Place:
    peer_id: PeerId
    connection: BulkConnection
    book: RelayBook


class PipeRelay:
    """Serves at one port. `is_barred` is asked once for each place and each pipe."""

    def __init__(self, credentials: Credentials, is_barred: Callable[[PeerId], bool] = lambda peer: False) -> None:
        self._tls, self._is_barred = MutualTls(credentials), is_barred
        self._own_name = dns_name_of(credentials.peer_id)
        self._books = {Role.LEARNER: RelayBook(PIPES_OF_LEARNER)}
        self._book = RelayBook(relay_book.PIPES)
        self._places: dict[str, _Place] = {}
        self._waiting: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._piped: Counter[tuple[PeerId, str]] = Counter()  # by member and the caller's address
        self._connected: Counter[str] = Counter()  # by address, callers and places
        self._openings: Counter[str] = Counter()  # of these, the ones that have no pipe and have not shown who they are
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals = Refusals(_log)
        self.port = 0

    @property
    def moved_bytes(self) -> int:
        return self._book.moved_bytes + sum(book.moved_bytes for book in self._books.values())

    def holds(self, peer_id: PeerId) -> bool:
        """Whether that member can be called here."""
        return dns_name_of(peer_id) in self._places

    def listen(self, host: str, port: int) -> None:
        """OSError where the port is taken: members know which one it is, so no other will do."""
        listener = listener_at(host, port)
        self.port = int(listener.getsockname()[1])
        DOORS.watch(self.port, PIPES)
        self._spawn(self._accept_all(listener))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_all(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    raw, host = await accepted(listener)
                except OSError as error:  # no descriptor, or it was gone before it was accepted
                    self._refusals.warn("pipe port %d: a connection could not be accepted: %s", self.port, error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                host = as_ipv4(host)
                if not self._has_room_for(host):
                    self._refusals.warn("pipe port %d: no room for one more of %s", self.port, host)
                    raw.close()
                    continue
                self._openings[host] += 1
                self._connected[host] += 1
                self._spawn(self._serve(raw, host))

    def _has_room_for(self, host: str) -> bool:
        is_within_share = self._openings[host] < CALLERS_PER_HOST and self._connected[host] < PIPES.per_host
        return is_within_share and len(self._tasks) < PIPES.connections

    async def _serve(self, raw: socket.socket, host: str) -> None:
        is_counted, is_ours = True, True
        try:
            async with asyncio.timeout(OPENING_S):
                opening = await opening_at(raw)
            match opening:
                case PipeAnswer(ticket):
                    is_ours = not self._answered(ticket, raw)
                case TlsHello(server_name=name) if name == self._own_name:
                    connection = await self._proven(raw)
                    is_counted = _uncount(self._openings, host)
                    await self._hold_place(connection)
                case TlsHello(server_name=name):
                    place, other = await self._called(name)
                    is_counted = _uncount(self._openings, host)
                    await self._join(place, raw, other, host)
                case None:
                    pass  # it ended before it had said what it wants
        except (OSError, TimeoutError, EchoError) as error:
            self._refusals.warn("pipe port %d: a caller from %s was refused: %s", self.port, host, error or "too slow")
        finally:
            if is_counted:
                _uncount(self._openings, host)
            _uncount(self._connected, host)
            if is_ours:
                raw.close()

    # ---- members

    async def _proven(self, raw: socket.socket) -> BulkConnection:
        """Whoever it is has shown a certificate of the run; else OSError or TrustError."""
        connection = BulkConnection(is_outgoing=False)
        try:
            await accept_sealed(connection, raw, self._tls.listening, HANDSHAKE_S)
            connection.prove()
        except BaseException:
            if connection.remotes:
                await connection.close()
            raise
        return connection

    async def _hold_place(self, connection: BulkConnection) -> None:
        peer, name = connection.peer, ""
        try:
            if self._is_barred(peer.peer_id):
                raise LimitExceeded(f"peer {peer.peer_id}: it is barred from this run")
            book = self._books.get(peer.role, self._book)
            book.reserve(peer.peer_id, monotonic())
            name = dns_name_of(peer.peer_id)
            if (first := self._places.get(name)) is not None:
                first.connection.abort()  # a peer has one place: its newest connection
            self._places[name] = _Place(peer.peer_id, connection, book)
            _log.info("byte pipes: %s %s holds a place", peer.role.value, peer.peer_id)
            while await _heard(connection, book.limits.reservation_s):
                book.reserve(peer.peer_id, monotonic())
        finally:
            if (held := self._places.get(name)) is not None and held.connection is connection:
                del self._places[name]
            await connection.close()

    async def _called(self, name: str) -> tuple[_Place, socket.socket]:
        """The member's own connection to us, once it has come. LimitExceeded where there is none."""
        place = self._places.get(name)
        if place is None or self._is_barred(place.peer_id):
            raise LimitExceeded("whom it asks for holds no place here")
        ticket = here().rng.randbytes(TICKET_BYTES)
        coming: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = coming
        try:
            async with asyncio.timeout(ANSWER_S):
                await place.connection.send(ticket)
                return place, await coming
        except BaseException:
            if coming.done() and not coming.cancelled():
                coming.result().close()  # it came as we gave up
            raise
        finally:
            del self._waiting[ticket]

    def _answered(self, ticket: bytes, raw: socket.socket) -> bool:
        """Whether somebody waits for this ticket; then the socket is theirs."""
        coming = self._waiting.get(ticket)
        if coming is None or coming.done():
            return False
        raw.recv(len(PipeAnswer(ticket).to_bytes()))  # it was only looked at until now
        coming.set_result(raw)
        return True

    async def _join(self, place: _Place, caller: socket.socket, member: socket.socket, host: str) -> None:
        key, most = (place.peer_id, host), max(1, place.book.limits.circuits_per_member_max // 2)
        with contextlib.ExitStack() as held:
            held.callback(member.close)
            circuit = place.book.open(place.peer_id, place.peer_id, monotonic())
            held.callback(place.book.close, circuit)
            if self._piped[key] >= most:
                raise LimitExceeded(f"peer {place.peer_id} has {most} pipes of that address, the most allowed")
            self._piped[key] += 1
            held.callback(_uncount, self._piped, key)
            for one in (caller, member):
                keep_alive(one)
                DOORS.release(told_of(*one.getpeername()[:2]))
            try:
                async with asyncio.timeout(circuit.ends_at - monotonic()):  # also where nothing moves
                    await carry(caller, member, lambda count: place.book.move(circuit, count, monotonic()))
            except TimeoutError:
                raise place.book.too_old(circuit) from None

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        DOORS.close(self.port)
        self.port = 0


def _uncount(counts: Counter[Key], key: Key) -> bool:
    """One fewer. False: it is not counted any more."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
    return False


async def _heard(connection: BulkConnection, within_s: float) -> bool:
    """Whether the member says that it is still here, as it does now and then. TimeoutError where it stays silent."""
    async with asyncio.timeout(within_s):
        return await connection.receive() is not None


async def opening_at(raw: socket.socket) -> TlsHello | PipeAnswer | None:
    """What the other side begins with, left in the socket for whoever reads it. None where it ends before."""
    seen = 0
    while True:
        await readable(raw)
        data = raw.recv(OPENING_BYTES_MAX, socket.MSG_PEEK)
        if not data:
            return None
        if (opening := opening_of(data)) is not None:
            return opening
        if len(data) in (seen, OPENING_BYTES_MAX):
            await asyncio.sleep(LOOK_S)  # what was looked at stays readable
        seen = len(data)
