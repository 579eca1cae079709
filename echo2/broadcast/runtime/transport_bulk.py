"""Bulk connections: chunks over a plain socket with TLS 1.3, beside the gRPC stream of a link.

gRPC copies each byte some six times and wakes two threads for it; here the loop reads and writes a quarter of a MiB at a time.
Guarantees: those of the transport protocol; `peer` is proven by its certificate of the run, both ways; the port takes so many
connections in all and of an address (port_limits.BULK, watched by doors), of which each has HANDSHAKE_S to prove who it is and,
of one address, the first of too many gives way to the next; a frame that has begun goes on within STALLED_S; a peer whose machine
is gone ends its connections within GONE_S.
Leaves to others: which links have one (stripes), what travels on it (link), what frames mean (inbox).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from echo2.base.errors import EchoError, TrustError, Unreachable
from echo2.base.hosts import joined
from echo2.base.ids import PeerId
from echo2.broadcast.bulk_frames import FrameCutter, head_of
from echo2.broadcast.runtime.eyeballs import first_of, hosts_of
from echo2.broadcast.runtime.sealed import SHUTDOWN_S, accept_sealed, dial_sealed
from echo2.broadcast.runtime.sockets import Remote, as_ipv4
from echo2.broadcast.runtime.transport import Accept
from echo2.outside.families import listened, listening_socket
from echo2.outside.guard import Refusals
from echo2.outside.ready import accepted
from echo2.trust.identity import PeerIdentity, Role, dns_name_of
from echo2.trust.runtime.doors import DOORS
from echo2.trust.runtime.port_limits import BULK
from echo2.trust.runtime.sockets_tls import MutualTls, peer_shown
from echo2.trust.runtime.tls import Credentials
from echo2.wire.chunk_frames import FRAME_BYTES_MAX

DIAL_TIMEOUT_S = 6.0
HANDSHAKE_S = BULK.handshake_s
STALLED_S = 30.0
GONE_S = 18
UNSENT_BYTES_MAX = 256 << 10
"""Encrypted, in this process; what the kernel holds is sockets' to limit."""
WRITE_BYTES = 68 << 10
"""Encrypted at a time: what OpenSSL and asyncio then copy stays in the processor's cache, and their buffers stay small."""
UNREAD_BYTES_MAX = 1 << 20
"""Whole frames that wait to be taken; then the peer's bytes wait in its own machine."""
ACCEPT_PAUSE_S = 0.2
_log = logging.getLogger("echo2.ports")


class BulkConnection:
    """One connection, either end (the reader of a sealed one). `peer` is known once the handshake is done."""

    def __init__(self, *, is_outgoing: bool) -> None:
        self.is_outgoing = is_outgoing
        self._loop = asyncio.get_running_loop()
        self.remotes: frozenset[Remote] = frozenset()
        self.ended = asyncio.Event()
        self.peer = PeerIdentity(PeerId(""), Role.WORKER)
        self._told = ""
        self._transport: Any = None
        self._cutter = FrameCutter(FRAME_BYTES_MAX, "a bulk connection")
        self._frames: deque[bytes] = deque()
        self._unread_bytes = 0
        self._came = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._stalling: asyncio.TimerHandle | None = None
        self._went_on_at = 0.0
        self._error: EchoError | None = None

    # ---- what its sealed transport calls

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        host, port = transport.get_extra_info("peername")[:2]
        self.remotes = frozenset({(as_ipv4(host), port)})
        self._told = told_of(host, port)
        keep_alive(transport.get_extra_info("socket"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._cutter.room()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            frames = self._cutter.took(nbytes)
        except EchoError as error:
            self._error = error
            self._transport.abort()
            return
        for frame in frames:
            self._frames.append(frame)
            self._unread_bytes += len(frame)
        if frames:
            self._came.set()
        if self._unread_bytes > UNREAD_BYTES_MAX:
            self._transport.pause_reading()
        self._expect_more()

    @property
    def missing_bytes(self) -> int:
        return self._cutter.missing_bytes

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stalling is not None:
            self._stalling.cancel()
        self.ended.set()
        self._came.set()
        self._may_write.set()

    def _expect_more(self) -> None:
        """A frame that has begun goes on within STALLED_S. Between frames a connection may be silent: its link tells whether the
        peer is there. One timer looks again, since arming one per read would cost as much as the read."""
        self._went_on_at = self._loop.time()
        if self._stalling is None and self._is_amid_frame():
            self._stalling = self._loop.call_later(STALLED_S, self._look_at_progress)

    def _is_amid_frame(self) -> bool:
        return bool(self._cutter.held_bytes) and self._unread_bytes <= UNREAD_BYTES_MAX

    def _look_at_progress(self) -> None:
        self._stalling = None
        if not self._is_amid_frame():
            return
        if self._loop.time() - self._went_on_at >= STALLED_S:
            self._transport.abort()
        else:
            self._stalling = self._loop.call_at(self._went_on_at + STALLED_S, self._look_at_progress)

    # ---- what a link calls

    def prove(self, expected: PeerId | None = None) -> None:
        """Reads who is there. TrustError where it is another than expected."""
        shown = self._transport.get_extra_info("ssl_object")
        self.peer = peer_shown(shown, f"bulk connection of {self._told}", expected)
        if not self.is_outgoing:
            DOORS.know(self._told, self.peer.peer_id, is_trusted=self.peer.role is not Role.WORKER)

    async def send(self, frame: bytes) -> None:
        await self.send_parts((frame,))

    async def send_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """Sends one frame of several parts; of the last, no more than WRITE_BYTES are copied before encryption. Larger frames are
        written in pieces: only one task may send such frames, and a connection whose send was cancelled must be closed."""
        if not self._is_open():
            raise Unreachable(f"peer {self.peer.peer_id}: the bulk connection ended")
        *small, large = parts
        before, whole = b"".join((head_of(sum(map(len, parts))), *small)), memoryview(large)
        for begin in range(0, max(1, len(whole)), WRITE_BYTES):
            piece = whole[begin : begin + WRITE_BYTES]
            self._transport.write(b"".join((before, piece)) if before else piece)
            before = b""
            if not self._may_write.is_set():
                await self._may_write.wait()
            if not self._is_open():
                raise Unreachable(f"peer {self.peer.peer_id}: the bulk connection ended")

    async def receive(self) -> bytes | None:
        while not self._frames:
            if self._error is not None:
                raise self._error
            if not self._is_open():
                return None
            self._came.clear()
            await self._came.wait()
        frame = self._frames.popleft()
        was_full = self._unread_bytes > UNREAD_BYTES_MAX
        self._unread_bytes -= len(frame)
        if was_full and self._unread_bytes <= UNREAD_BYTES_MAX:
            self._transport.resume_reading()
            self._expect_more()
        if not self.is_outgoing:
            DOORS.took(self._told, len(frame))
        return frame

    async def finish(self) -> None:
        """What was written still goes out; closing waits for that."""

    async def close(self) -> None:
        """Once what was written is out, within SHUTDOWN_S."""
        self._transport.close()
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await self.ended.wait()
        except TimeoutError:
            self._transport.abort()

    def abort(self) -> None:
        """At once; what was written may be lost."""
        self._transport.abort()

    def _is_open(self) -> bool:
        return not (self.ended.is_set() or self._transport.is_closing())


def told_of(host: str, port: int) -> str:
    """The other end of a connection, as gRPC names it and doors know it."""
    return f"ipv{6 if ':' in host else 4}:{joined(host, port)}"


def keep_alive(raw: Any) -> None:
    """So that the kernel ends what leads nowhere; a link's own keepalive goes over another connection."""
    options = {"TCP_KEEPIDLE": GONE_S // 2, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * GONE_S}
    with contextlib.suppress(OSError):  # it has just ended
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if (option := getattr(socket, name, None)) is not None:
                raw.setsockopt(socket.IPPROTO_TCP, option, value)


class BulkTransport:
    """Dials and listens with the node's credentials."""

    def __init__(self, credentials: Credentials) -> None:
        self._tls = MutualTls(credentials)
        self.port = 0
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._shaking: dict[asyncio.Task[None], str] = {}  # by task the host, in the order in which they came
        self._refusals = Refusals(_log)

    def listen(self, host: str, port: int, accept: Accept) -> None:
        """At `port`, or any where that is taken. OSError where this machine has no such address."""
        listener = listener_at(host, port, is_any_else=True)
        self.port = int(listener.getsockname()[1])
        DOORS.watch(self.port, BULK)
        self._accepting = asyncio.create_task(self._accept_all(listener, accept))

    async def _accept_all(self, listener: socket.socket, accept: Accept) -> None:
        with listener:
            while True:
                try:
                    raw, host = await accepted(listener)
                except OSError as error:  # no descriptor, or it was gone before it was accepted
                    self._refusals.warn("bulk port %d: a connection could not be accepted: %s", self.port, error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                if len(self._serving) >= BULK.connections:
                    raw.close()
                    continue
                self.take(raw, as_ipv4(host), accept)

    def take(self, raw: socket.socket, host: str, accept: Accept) -> None:
        """Serves a connection from `host`: one that came to the port, or through a byte pipe."""
        shaking = [task for task, whose in self._shaking.items() if whose == host]
        if len(shaking) >= BULK.strangers_per_host:
            shaking[0].cancel()
            del self._shaking[shaking[0]]
        task = asyncio.create_task(self._serve(raw, accept))
        self._serving.add(task)
        self._shaking[task] = host
        task.add_done_callback(functools.partial(self._served, raw))

    def _served(self, raw: socket.socket, task: asyncio.Task[None]) -> None:
        """Also of a connection that gave way before its task began."""
        raw.close()
        self._serving.discard(task)
        self._shaking.pop(task, None)

    async def _serve(self, raw: socket.socket, accept: Accept) -> None:
        connection = BulkConnection(is_outgoing=False)
        try:
            await accept_sealed(connection, raw, self._tls.listening, HANDSHAKE_S)
            connection.prove()
            if (task := asyncio.current_task()) is not None:
                self._shaking.pop(task, None)
            await accept(connection)
        except (OSError, EchoError) as error:  # a handshake that failed is an OSError
            self._refusals.warn("bulk port %d: a caller was refused: %s", self.port, error)
        finally:
            if connection.remotes:
                await connection.close()

    async def dial(self, host: str, port: int, peer_id: PeerId) -> BulkConnection:
        """Unreachable within DIAL_TIMEOUT_S unless exactly `peer_id` answers there. Of a name's addresses the first that does."""
        where = f"peer {peer_id}: bulk port at {joined(host, port)}"
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                hosts = await hosts_of(host, port)
                connection, _ = await first_of(hosts, lambda one: self._dial(one, port, peer_id, where))
        except TimeoutError:
            raise Unreachable(f"{where}: no answer within {DIAL_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise Unreachable(f"{where}: expected a known name, got: {error}") from None
        return connection

    async def _dial(self, host: str, port: int, peer_id: PeerId, where: str) -> BulkConnection:
        """One numeric address. asyncio's own trying of several leaves one open that connects as it is cancelled."""
        connection = BulkConnection(is_outgoing=True)
        try:
            await dial_sealed(connection, host, port, self._tls.dialling, dns_name_of(peer_id), HANDSHAKE_S)
            connection.prove(peer_id)
        except (OSError, TrustError) as error:
            if connection.remotes:
                await connection.close()
            raise Unreachable(f"{where}: refused, or it is another peer ({error})") from None
        return connection

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
            DOORS.close(self.port)
            self.port, self._accepting = 0, None
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)


def listener_at(host: str, port: int, *, is_any_else: bool = False) -> socket.socket:
    """Listens. OSError where it cannot; `is_any_else`: where the port is taken any will do, peers are told which one it is. On the
    addresses of both families for `::`."""
    for wanted in (port, 0) if is_any_else else (port,):
        made = listening_socket(host)
        try:
            made.bind((listened(host), wanted))
            made.listen(128)
        except OSError:
            made.close()
            if wanted == 0 or not is_any_else:
                raise
        else:
            made.setblocking(False)
            return made
    raise AssertionError("port 0 was bound or raised")
