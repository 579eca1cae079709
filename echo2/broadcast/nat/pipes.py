"""Byte pipes: what the first bytes at a relay's port say, how bytes are carried, the relay's side and the member's.

A byte pipe carries somebody's TLS to a member that cannot be dialled, and the relay never reads it: it needs no more than the name
that a TLS hello asks for in clear. The member is told a ticket, comes to the same port by itself, and shows it.
Guarantees: `opening_of` is total: an opening, None while more bytes are to come, MalformedMessage for anything else; no more than
OPENING_BYTES_MAX is looked at; a caller has OPENING_S to open and a member ANSWER_S to come; a pipe ends with its circuit's time.
Source: RFC 8446 4.1.2, RFC 6066 3, RFC 7301 3.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from echo2.base.errors import EchoError, LimitExceeded, MalformedMessage, Unreachable
from echo2.base.ids import PeerId
from echo2.base.units import address_of
from echo2.broadcast.connection import Connection
from echo2.broadcast.nat import relay_book
from echo2.broadcast.nat.relay_book import PIPES_OF_LEARNER, RelayBook
from echo2.broadcast.reachability import LinkKind, LinkWay
from echo2.broadcast.transport import Transport
from echo2.outside import here, monotonic
from echo2.outside.guard import Refusals, Tasks, cancel_all
from echo2.outside.net import accepted, readable, until_ready
from echo2.outside.streams import Remote, StreamCaller
from echo2.outside.tls_streams import SocketCaller, SocketListener, as_ipv4, keep_alive
from echo2.trust.identity import Role, dns_name_of
from echo2.trust.ports import DOORS, PIPES
from echo2.trust.tls import Credentials

OPENING_BYTES_MAX = 8 << 10  # a TLS hello with the largest key shares has 2 KiB
TICKET_BYTES = 16  # 128 bits cannot be guessed
_ANSWER = b"echo2 pipe\n"
_RECORD_HEAD = 5  # of TLS (RFC 8446, 5.1)
_HANDSHAKE, _CLIENT_HELLO = 22, 1  # types of record and message (RFC 8446, 5.1 and 4)
_SERVER_NAME, _PROTOCOLS = 0, 16  # extensions (RFC 6066, 3; RFC 7301, 3.1)


@dataclass(frozen=True, slots=True)
class TlsHello:
    """Of whoever wants to talk to `server_name`; `protocols` as it offers them (ALPN)."""

    server_name: str
    protocols: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PipeAnswer:
    """Of the member that was told of this ticket."""

    ticket: bytes

    def to_bytes(self) -> bytes:
        return _ANSWER + self.ticket


ANSWER_BYTES = len(_ANSWER) + TICKET_BYTES


def pipe_address(relay_address: str) -> str:
    """Where a relay's byte pipes are had: at the port after that of its libp2p. Empty where there is no such port."""
    host, _, port = relay_address.rpartition(":")
    return address_of(host, int(port) + 1) if host and port.isdigit() and 0 < int(port) < 65_535 else ""


def opening_of(data: bytes) -> TlsHello | PipeAnswer | None:
    """None: more has to come."""
    if not data:
        return None
    if data[0] == _HANDSHAKE:
        return _hello_of(data)
    if not _ANSWER.startswith(data[: len(_ANSWER)]):
        raise _malformed("a TLS hello, or a member's answer", data[:16].hex())
    return PipeAnswer(data[len(_ANSWER) : ANSWER_BYTES]) if len(data) >= ANSWER_BYTES else None


def _hello_of(data: bytes) -> TlsHello | None:
    if len(data) < _RECORD_HEAD:
        return None
    size = int.from_bytes(data[3:5])
    if size > OPENING_BYTES_MAX - _RECORD_HEAD:
        raise _malformed(f"a TLS hello of at most {OPENING_BYTES_MAX - _RECORD_HEAD} bytes", str(size))
    body = _Reader(data[_RECORD_HEAD : _RECORD_HEAD + size])
    if len(data) < _RECORD_HEAD + size:
        return None
    if body.number(1) != _CLIENT_HELLO:
        raise _malformed("a TLS hello", "another message of TLS")
    hello = body.part(3)
    hello.skip(2 + 32)  # version, random
    hello.part(1)  # session
    hello.part(2)  # cipher suites
    hello.part(1)  # compression
    name, protocols = "", tuple[str, ...]()
    extensions = hello.part(2)
    while extensions.left:
        kind, value = extensions.number(2), extensions.part(2)
        if kind == _SERVER_NAME:
            name = _name_of(value)
        elif kind == _PROTOCOLS:
            protocols = _protocols_of(value)
    return TlsHello(name, protocols)


def _name_of(value: _Reader) -> str:
    names = value.part(2)
    while names.left:
        kind, name = names.number(1), names.part(2)
        if kind == 0:
            return name.text()
    return ""


def _protocols_of(value: _Reader) -> tuple[str, ...]:
    protocols, names = list[str](), value.part(2)
    while names.left:
        protocols.append(names.part(1).text())
    return tuple(protocols)


class _Reader:
    """Bytes from the front; MalformedMessage where they end too early."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def skip(self, count: int) -> bytes:
        if count > self.left:
            raise _malformed(f"{count} more bytes of a TLS hello", str(self.left))
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.skip(size))

    def part(self, head: int) -> _Reader:
        return _Reader(self.skip(self.number(head)))

    def text(self) -> str:
        return self.skip(self.left).decode("ascii", "replace")


def _malformed(expected: str, got: str) -> MalformedMessage:
    return MalformedMessage(f"a caller at the port for byte pipes: expected {expected}, got {got}")


PIPE_BYTES = 1 << 20  # the largest that an unprivileged process may ask for (pipe-max-size)
ENDING_S = 3.0  # TLS ends both directions at once: what it still says after one has ended is a few bytes
_COPY_BYTES = 256 << 10  # where splice is not offered: one read
_F_SETPIPE_SZ = 1031  # of fcntl.h; Linux alone
_splice = getattr(os, "splice", None)
_FLAGS = getattr(os, "SPLICE_F_MOVE", 0) | getattr(os, "SPLICE_F_NONBLOCK", 0)
Moved = Callable[[int], None]


async def carry(first: socket.socket, second: socket.socket, moved: Moved) -> None:
    """Returns once both directions have ended, ENDING_S after the first has, or when one fails. `moved` is told of each piece, in
    bytes. Raises what `moved` raises."""
    one_way = _spliced if _splice is not None else _copied
    ways = [asyncio.ensure_future(one_way(a, b, moved)) for a, b in ((first, second), (second, first))]
    try:
        ended, going = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if going and not any(way.exception() for way in ended):
            ended |= (await asyncio.wait(going, timeout=ENDING_S))[0]
        for way in ended:
            with contextlib.suppress(OSError):  # one side was cut off, which is how connections end
                way.result()
    finally:
        await cancel_all(ways)
        first.close()
        second.close()


async def _copied(source: socket.socket, target: socket.socket, moved: Moved) -> None:
    loop = asyncio.get_running_loop()
    while piece := await loop.sock_recv(source, _COPY_BYTES):
        moved(len(piece))
        await loop.sock_sendall(target, piece)
    _end(target)


async def _spliced(source: socket.socket, target: socket.socket, moved: Moved) -> None:
    assert _splice is not None
    loop, taking, giving = asyncio.get_running_loop(), source.fileno(), target.fileno()
    with _kernel_pipe() as (outlet, inlet):
        while True:
            try:
                waiting = _splice(taking, inlet, PIPE_BYTES, flags=_FLAGS)
            except BlockingIOError:
                await until_ready(loop.add_reader, loop.remove_reader, taking)
                continue
            if not waiting:
                break
            moved(waiting)
            while waiting:
                try:
                    waiting -= _splice(outlet, giving, waiting, flags=_FLAGS)
                except BlockingIOError:
                    await until_ready(loop.add_writer, loop.remove_writer, giving)
            await asyncio.sleep(0)  # a fast pair leaves the loop to others between two pieces
    _end(target)


def _end(target: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended as well
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def _kernel_pipe() -> Iterator[tuple[int, int]]:
    outlet, inlet = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a user has so much of this memory; the usual 64 KiB do, at more calls
            fcntl.fcntl(inlet, _F_SETPIPE_SZ, PIPE_BYTES)
        yield outlet, inlet
    finally:
        os.close(outlet)
        os.close(inlet)


OPENING_S, ANSWER_S = 8.0, 8.0  # of a hello and of a member that must answer: as a handshake
LOOK_S = 0.02  # of a socket that is full: a fraction of a round trip
CALLERS_PER_HOST = PIPES.strangers_per_host
ACCEPT_PAUSE_S = 0.2  # until descriptors are free again
_log = logging.getLogger("echo2.ports")
Key = TypeVar("Key", str, tuple[PeerId, str])


@dataclass(frozen=True, slots=True)
class _Place:
    peer_id: PeerId
    connection: Connection
    book: RelayBook


class PipeRelay:
    """Serves at one port. `is_barred` is asked once for each place and each pipe."""

    def __init__(self, credentials: Credentials, is_barred: Callable[[PeerId], bool] = lambda peer: False) -> None:
        self._transport, self._is_barred = Transport(credentials), is_barred
        self._own_name = dns_name_of(credentials.peer_id)
        self._books = {Role.LEARNER: RelayBook(PIPES_OF_LEARNER)}
        self._book = RelayBook(relay_book.PIPES)
        self._places: dict[str, _Place] = {}
        self._waiting: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._piped: Counter[tuple[PeerId, str]] = Counter()  # by member and the caller's address
        self._connected: Counter[str] = Counter()  # by address, callers and places
        self._openings: Counter[str] = Counter()  # of these, the ones that have no pipe and have not shown who they are
        self._tasks = Tasks()
        self._refusals = Refusals(_log)
        self._listener: SocketListener | None = None
        self.port = 0

    def holds(self, peer_id: PeerId) -> bool:
        return dns_name_of(peer_id) in self._places

    def listen(self, host: str, port: int) -> None:
        """PortBusy where the port is taken: members know which one it is, so no other will do."""
        self._listener = SocketListener(host, port)
        self.port = self._listener.port
        DOORS.watch(self.port, PIPES)
        self._tasks.start(self._accept_all(self._listener.socket))

    async def _accept_all(self, listener: socket.socket) -> None:
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
            self._tasks.start(self._serve(raw, host), raw.close)

    def _has_room_for(self, host: str) -> bool:
        is_within_share = self._openings[host] < CALLERS_PER_HOST and self._connected[host] < PIPES.per_host
        return is_within_share and len(self._tasks) < PIPES.connections

    async def _serve(self, raw: socket.socket, host: str) -> None:
        opening_ended = contextlib.ExitStack()
        opening_ended.callback(_uncount, self._openings, host)
        try:
            async with asyncio.timeout(OPENING_S):
                opening = await opening_at(raw)
            match opening:
                case PipeAnswer(ticket):
                    self._answered(ticket, raw)
                case TlsHello(server_name=name) if name == self._own_name:
                    connection = await self._transport.prove(SocketCaller(raw, host))
                    opening_ended.close()
                    await self._hold_place(connection)
                case TlsHello(server_name=name):
                    place, other = await self._called(name)
                    opening_ended.close()
                    await self._join(place, raw, other, host)
                case None:
                    pass  # it ended before it had said what it wants
        except (OSError, TimeoutError, EchoError) as error:
            self._refusals.warn(
                "pipe port %d: a caller from %s was refused: %s", self.port, host, str(error) or "too slow"
            )
        finally:
            opening_ended.close()
            _uncount(self._connected, host)

    # ---- members

    async def _hold_place(self, connection: Connection) -> None:
        peer, name = connection.peer, ""
        try:
            if self._is_barred(peer.peer_id):
                raise LimitExceeded(f"peer {peer.peer_id}: it is barred from this run")
            book = self._books.get(peer.role, self._book)
            book.reserve(peer.peer_id, monotonic())
            name = dns_name_of(peer.peer_id)
            if (first := self._places.get(name)) is not None:
                first.connection.stream.abort()  # a peer has one place: its newest connection
            self._places[name] = _Place(peer.peer_id, connection, book)
            _log.info("byte pipes: %s %s holds a place", peer.role.value, peer.peer_id)
            while not connection.ended.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(book.limits.reservation_s / 2):
                        if await connection.receive() is not None:
                            raise MalformedMessage(f"peer {peer.peer_id}: expected nothing from its place, got a frame")
                        return
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

    def _answered(self, ticket: bytes, raw: socket.socket) -> None:
        coming = self._waiting.get(ticket)
        if coming is None or coming.done():
            return
        raw.recv(len(PipeAnswer(ticket).to_bytes()))  # it was only looked at until now
        pipe = socket.socket(fileno=raw.detach())
        pipe.setblocking(False)
        coming.set_result(pipe)

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
            for end in (caller, member):
                keep_alive(end)
                host, port = end.getpeername()[:2]
                DOORS.release(f"ipv{6 if ':' in host else 4}:{address_of(host, port)}")
            try:
                async with asyncio.timeout(circuit.ends_at - monotonic()):  # also where nothing moves
                    await carry(caller, member, lambda count: place.book.move(circuit, count, monotonic()))
            except TimeoutError:
                raise place.book.too_old(circuit) from None

    async def close(self) -> None:
        await self._tasks.end()
        if self._listener is not None:
            self._listener.close()
        DOORS.close(self.port)
        self.port, self._listener = 0, None


def _uncount(counts: Counter[Key], key: Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


async def opening_at(raw: socket.socket) -> TlsHello | PipeAnswer | None:
    """What the other side begins with, left in the socket for whoever reads it. None where it ends before."""
    size = 0
    while True:
        await readable(raw)
        data = raw.recv(OPENING_BYTES_MAX, socket.MSG_PEEK)
        if not data:
            return None
        if (opening := opening_of(data)) is not None:
            return opening
        if len(data) in (size, OPENING_BYTES_MAX):
            await asyncio.sleep(LOOK_S)  # what was looked at stays readable
        size = len(data)


PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 60.0  # a relay restarts in seconds; a dead one costs a dial a minute
CALLS_MAX = PIPES_OF_LEARNER.circuits_max  # as the relay gives: all workers of a learner behind a NAT
_members_log = logging.getLogger("echo2.broadcast")
Dial = Callable[[str, PeerId], Coroutine[None, None, Connection]]


class PipeMember:
    """`dial` connects to a relay; `take` is handed a caller, and how it came.
    `grpc_at`: this node's own gRPC port, on this machine; None: callers that want it are hung up on."""

    def __init__(self, dial: Dial, take: Callable[[StreamCaller, LinkWay], None]) -> None:
        self._dial, self._take = dial, take
        self.grpc_at: Remote | None = None
        self._places: dict[tuple[PeerId, str], asyncio.Task[None]] = {}
        self._calls = Tasks()
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
        pause_s = PAUSE_S_MIN
        while True:
            try:
                connection, begun = await self._dial(address, relay), monotonic()
                await self._stay(relay, connection)
                if monotonic() - begun > ANSWER_S:  # it was not refused at once
                    pause_s = PAUSE_S_MIN
                error: object = "the connection ended"
            except EchoError as failed:
                error = failed
            if self._told.get(relay) != str(error):  # it is tried for ever, and said once
                self._told[relay] = str(error)
                _members_log.info("byte pipes of relay %s at %s: %s", relay, address, error)
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_S_MAX, 2 * pause_s)

    async def _stay(self, relay: PeerId, connection: Connection) -> None:
        (remote,) = connection.remotes
        self.held.add(relay)
        try:
            while (ticket := await connection.receive()) is not None:
                if len(ticket) != TICKET_BYTES:
                    raise Unreachable(f"relay {relay}: expected a ticket of {TICKET_BYTES} bytes, got {len(ticket)}")
                if len(self._calls) < CALLS_MAX:
                    self._calls.start(self._come(relay, remote, ticket))
        finally:
            self.held.discard(relay)
            await connection.close()

    async def _come(self, relay: PeerId, remote: Remote, ticket: bytes) -> None:
        """To the caller that the ticket is for."""
        loop = asyncio.get_running_loop()
        raw: socket.socket | None = _socket_to(remote[0])
        assert raw is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_connect(raw, remote)
                await loop.sock_sendall(raw, PipeAnswer(ticket).to_bytes())
                opening = await opening_at(raw)
            if not isinstance(opening, TlsHello):
                return
            if "h2" not in opening.protocols:
                way = LinkWay(LinkKind.RELAYED, f"we cannot be dialled; through a byte pipe of relay {relay}")
                self._take(SocketCaller(raw, remote[0]), way)
                raw = None
            elif self.grpc_at is not None:
                port = _socket_to(self.grpc_at[0])
                with contextlib.closing(port):
                    await asyncio.get_running_loop().sock_connect(port, self.grpc_at)
                    keep_alive(raw)
                    await carry(raw, port, lambda count: None)
        except (OSError, TimeoutError, EchoError) as error:
            _members_log.debug("byte pipes: a caller did not come through: %s", str(error) or "too slow")
        finally:
            if raw is not None:
                raw.close()

    async def close(self) -> None:
        await cancel_all(self._places.values())
        await self._calls.end()
        self._places.clear()


def _socket_to(host: str) -> socket.socket:
    raw = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    raw.setblocking(False)
    return raw
