"""Connections between nodes: frames over a stream. The same on sockets, over a punched hole and in the simulator.

On the stream are four bytes that say how long a frame is, then the frame. A frame of one zero byte says that this side is still
there; it is for the connection alone. Guarantees: `peer` is authenticated; frames arrive whole and in order; `send` waits while
the other side does not read; after either side closes, `receive` returns None and `send` raises Unreachable. A frame that has
begun goes on within STALLED_S, and a peer that says nothing for SILENT_S is gone; both are looked at every STILL_HERE_S. Reads
whose records or frames are small for their number, and handshakes, take a fair share of the loop's time: of the peer once it is
proven, of its address before. Memory follows the bytes that have come, not those announced.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Callable

from echo2.base.errors import EchoError, MalformedMessage, Unreachable
from echo2.base.ids import PeerId
from echo2.base.units import LinkShape, address_of
from echo2.broadcast.pace import Pacer
from echo2.broadcast.reachability import LinkKind, LinkWay
from echo2.outside import monotonic, unix_now
from echo2.outside.guard import FairShare
from echo2.outside.streams import Remote, Stream
from echo2.outside.tls_streams import PLAIN_BYTES_MAX
from echo2.trust.identity import PeerIdentity, Role, certificate_of
from echo2.trust.ports import DOORS
from echo2.wire.broadcast import FRAME_BYTES_MAX

HEAD = struct.Struct(">I")
STILL_HERE = HEAD.pack(1) + b"\0"
STILL_HERE_S, SILENT_S = 8.0, 40.0  # NATs forget idle connections after minutes; five beats may be late
STALLED_S = 30.0  # 4 MiB at 1.1 Mbit/s
CLOSE_S = 2.0  # a few round trips for what was written
READ_BYTES = 256 << 10  # one chunk of the usual size
_ROOM_BYTES_MIN = 32 << 10  # two TLS records; a smaller read costs more than moving
UNSENT_BYTES_MAX = 32 << 10  # in this process: two of the smallest chunks; what the kernel holds, uplink.py limits
WRITE_BYTES = 4 * PLAIN_BYTES_MAX
"""Encrypted at a time: what OpenSSL and asyncio then copy stays in the processor's cache, and their buffers stay small."""
UNREAD_BYTES_MAX = 1 << 20  # whole frames that wait to be taken; then the peer's bytes wait in its own machine
FRAME_KEPT_BYTES = 96  # what a frame takes beside its bytes while it waits
RECORD_BYTES_MIN, FRAME_BYTES_MIN = 2048, 1024
"""Reads whose records or frames are smaller on average cost more than their bytes explain. Chunks are far above; acknowledgements
are not, but few."""


class EmulatedLink:
    """The link of one node, for experiments on one machine: what it sends passes `up`, what it receives comes `delay_s` after it
    arrived and passes `down`. All connections of the node share each direction, first come, first served."""

    def __init__(self, shape: LinkShape) -> None:
        self.up, self.down = Pacer(shape.uplink_bytes_per_s, 0.0), Pacer(shape.downlink_bytes_per_s, 0.0)
        self.delay_s = shape.rtt_s / 2
        self.unread_bytes_max = max(UNREAD_BYTES_MAX, int(2 * shape.downlink_bytes_per_s * shape.rtt_s))


async def _passed(direction: Pacer, size_bytes: int) -> None:
    now = asyncio.get_running_loop().time()
    direction.spend(size_bytes, now)
    await asyncio.sleep(direction.ready_at(now) - now)


class FrameCutter:
    """Bytes are put where `room` says, and `take` gives the frames that they complete, however they were cut on their way."""

    __slots__ = ("_begin", "_buffer", "_end", "_frame_bytes_max", "_owner")

    def __init__(self, frame_bytes_max: int, owner: str) -> None:
        self._frame_bytes_max, self._owner = frame_bytes_max, owner
        self._buffer = bytearray(READ_BYTES)
        self._begin = self._end = 0

    @property
    def held_bytes(self) -> int:
        """Of a frame that is not whole yet."""
        return self._end - self._begin

    @property
    def missing_bytes(self) -> int:
        """Of the frame that has begun; 0 where none has, or where its length is not known yet."""
        if self.held_bytes < HEAD.size:
            return 0
        size: int = HEAD.unpack_from(self._buffer, self._begin)[0]
        return size + HEAD.size - self.held_bytes

    def room(self) -> memoryview:
        """Where the next bytes go; never empty. Of a frame that has begun, no further than its end: so it is never moved."""
        if self._begin == self._end:
            self._begin = self._end = 0
        left = self.missing_bytes or READ_BYTES
        if len(self._buffer) - self._end < min(left, _ROOM_BYTES_MIN):
            self._make_room()
        return memoryview(self._buffer)[self._end : self._end + left]

    def _make_room(self) -> None:
        """To the front of the buffer; or of a larger one, never of the same one resized: the caller may hold a view of it."""
        held = memoryview(self._buffer)[self._begin : self._end]
        if self._begin < _ROOM_BYTES_MIN:
            self._buffer = bytearray(2 * len(self._buffer))
        memoryview(self._buffer)[: len(held)] = held
        self._begin, self._end = 0, len(held)

    def take(self, count: int) -> list[bytes]:
        """So many bytes were put there; the frames that are whole now. An empty frame, or one beyond the limit, is MalformedMessage
        before anything of it is kept."""
        self._end += count
        frames: list[bytes] = []
        with memoryview(self._buffer) as view:
            while self.held_bytes >= HEAD.size:
                size = HEAD.unpack_from(self._buffer, self._begin)[0]
                if not 0 < size <= self._frame_bytes_max:
                    raise MalformedMessage(
                        f"{self._owner}: expected frames of 1 to {self._frame_bytes_max} bytes, got one of {size}"
                    )
                begin = self._begin + HEAD.size
                if self._end < begin + size:
                    break
                frames.append(bytes(view[begin : begin + size]))
                self._begin = begin + size
        return frames


class Connection:
    """One connection, either end; the reader of its stream. `is_outgoing`: we dialled. `peer` is known once `prove` was called.
    `share`: of its peer or, until that is known, of its address. `way`: how it came about. `remotes`: the other end as the kernel
    names it; empty where no further connection can be opened beside this one."""

    def __init__(self, *, is_outgoing: bool, share: FairShare | None = None, way: LinkWay | None = None) -> None:
        self.is_outgoing = is_outgoing
        self.share = share or FairShare()
        self.way = way or (
            LinkWay(LinkKind.DIRECT, "we dialled it") if is_outgoing else LinkWay(LinkKind.REVERSE, "it dialled us")
        )
        self.handshake_s = 0.0
        self._loop = asyncio.get_running_loop()
        self.remotes: frozenset[Remote] = frozenset()
        self.ended = asyncio.Event()
        self.peer = PeerIdentity(PeerId(""), Role.WORKER)
        self.door = ""  # the other end, as doors know it
        self.certificate = b""
        self._stream: Stream | None = None
        self._cutter = FrameCutter(FRAME_BYTES_MAX, "a connection of the broadcast")
        self._frames: deque[bytes] = deque()
        self._taken: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._unread_bytes = self._new_frames = 0
        self._handled_s = 0.0
        self._pausing: asyncio.TimerHandle | None = None
        self._came = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._beating: asyncio.TimerHandle | None = None
        self._went_on_at = self._said_at = 0.0
        self._error: EchoError | None = None
        self._is_proven = self._is_sending = False
        self._unread_bytes_max = UNREAD_BYTES_MAX
        self._emulated: EmulatedLink | None = None
        self._arrived: deque[float] = deque()  # of the frames that wait, over an emulated link

    def emulate(self, link: EmulatedLink) -> None:
        """What is sent and received from now on passes that link."""
        self._emulated, self._unread_bytes_max, self.remotes = link, link.unread_bytes_max, frozenset()
        self._arrived.extend([self._loop.time()] * len(self._frames))

    @property
    def is_made(self) -> bool:
        return self._stream is not None

    @property
    def stream(self) -> Stream:
        assert self._stream is not None, "its handshake is done"
        return self._stream

    # ---- what its stream calls

    def connection_made(self, stream: Stream, remote: Remote, certificate: bytes) -> None:
        self._stream, self.certificate = stream, certificate
        stream.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        host, port = remote
        self.remotes = frozenset({remote}) if port else frozenset()
        self.door = f"ipv{6 if ':' in host else 4}:{address_of(host, port)}"
        self._went_on_at = self._said_at = self._loop.time()
        self._beating = self._loop.call_later(STILL_HERE_S, self._beat)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._cutter.room()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            frames = self._cutter.take(nbytes)
        except EchoError as error:
            self._error = error
            self.stream.abort()
            return
        self._new_frames += len(frames)
        for frame in frames:
            if frame != b"\0":
                self._frames.append(frame)
                self._unread_bytes += len(frame) + FRAME_KEPT_BYTES
                if self._emulated is not None:
                    self._arrived.append(self._loop.time())
        if self._take is not None:
            self._hand_out(self._take)
        elif self._frames:
            self._came.set()
        if self._unread_bytes > self._unread_bytes_max:
            self.stream.pause_reading()
        self._went_on_at = self._loop.time()

    def worked(self, seconds: float, records: int, nbytes: int) -> None:
        """A read of so many bytes took so long. A peer beyond its share is read more slowly."""
        frames, self._new_frames = self._new_frames, 0
        seconds, self._handled_s = max(0.0, seconds - self._handled_s), 0.0
        if self._is_proven and max(records * RECORD_BYTES_MIN, frames * FRAME_BYTES_MIN) <= nbytes:
            return
        if not self._is_proven:
            self.handshake_s += seconds
        self._pause(self.share.pause_s(seconds, monotonic()))

    def _pause(self, pause_s: float) -> None:
        if pause_s > 0 and self._pausing is None and self._stream is not None:
            self._stream.pause_reading()
            self._pausing = self._loop.call_later(pause_s, self._go_on)

    def _go_on(self) -> None:
        self._pausing = None
        self._went_on_at = self._loop.time()
        if self._take is not None:
            self._hand_out(self._take)
            self._handled_s = 0.0  # no read took it
        if self._pausing is None and self._unread_bytes <= self._unread_bytes_max:
            self.stream.resume_reading()

    @property
    def missing_bytes(self) -> int:
        return self._cutter.missing_bytes

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, EchoError):
            self._error = exc
        for timer in (self._pausing, self._beating):
            if timer is not None:
                timer.cancel()
        self.ended.set()
        self._came.set()
        self._may_write.set()
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(None)

    # ---- silence

    def _beat(self) -> None:
        """Says that this side is still there, where it has nothing else to say; ends the connection of a peer that does not, or
        whose frame does not go on."""
        now = self._loop.time()
        self._beating = self._loop.call_at(now + STILL_HERE_S, self._beat)
        is_read = self._pausing is None and self._unread_bytes <= self._unread_bytes_max
        if is_read and now - self._went_on_at >= (STALLED_S if self._cutter.held_bytes else SILENT_S):
            self.stream.abort()
        elif not self._is_sending and now - self._said_at >= STILL_HERE_S and self._is_open():
            self.stream.write(STILL_HERE)
            self._said_at = now

    # ---- what a link calls

    def prove(self, expected: PeerId | None = None) -> None:
        """Reads who is there from its certificate. TrustError where it is another than expected."""
        certificate = certificate_of(self.certificate)
        certificate.check_time(unix_now())
        if expected is not None:
            certificate.check_peer(expected)
        self.peer, self._is_proven = certificate.whose, True
        if not self.is_outgoing:
            DOORS.know(self.door, self.peer.peer_id, is_trusted=self.peer.role is not Role.WORKER)

    def is_known(self, peer: PeerIdentity) -> None:
        """Whoever brought the stream has proven who is there."""
        self.peer, self._is_proven = peer, True

    async def send(self, *parts: bytes | memoryview) -> None:
        """What is more than full TLS records goes first: the other end knows from the first segment how much is to come.
        Large frames are written in pieces: a connection whose send was cancelled must be closed, and only one task sends frames
        beyond WRITE_BYTES."""
        stream, (*small, large) = self.stream, parts
        self._is_sending = True
        if self._emulated is not None:
            await _passed(self._emulated.up, sum(map(len, parts)))
        whole, before = memoryview(large), len(large) % PLAIN_BYTES_MAX
        first: tuple[bytes, ...] = (b"".join((HEAD.pack(sum(map(len, parts))), *small, whole[:before])),)
        for begin in range(before, max(before + 1, len(whole)), WRITE_BYTES):
            if not self._is_open():
                raise Unreachable(f"peer {self.peer.peer_id}: the connection ended")
            stream.writelines((*first, whole[begin : begin + WRITE_BYTES]))
            first = ()
            if not self._may_write.is_set():
                await self._may_write.wait()
        self._said_at, self._is_sending = self._loop.time(), False
        if not self._is_open():
            raise Unreachable(f"peer {self.peer.peer_id}: the connection ended")

    async def receive(self) -> bytes | None:
        while not self._frames:
            if self._error is not None:
                raise self._error
            if not self._is_open():
                return None
            self._came.clear()
            await self._came.wait()
        if self._emulated is not None:
            await asyncio.sleep(self._arrived[0] + self._emulated.delay_s - self._loop.time())
            await _passed(self._emulated.down, len(self._frames[0]))
            self._arrived.popleft()
        was_full = self._unread_bytes > self._unread_bytes_max
        frame = self._next()
        if was_full and self._unread_bytes <= self._unread_bytes_max and self._pausing is None:
            self.stream.resume_reading()
            self._went_on_at = self._loop.time()
        return frame

    def _next(self) -> bytes:
        frame = self._frames.popleft()
        self._unread_bytes -= len(frame) + FRAME_KEPT_BYTES
        if not self.is_outgoing:
            DOORS.took(self.door, len(frame))
        return frame

    async def receive_all(self, take: Callable[[bytes], bool]) -> None:
        """Calls `take` with each frame as soon as it is whole, until the connection ends; what it raises comes out of here. It says
        whether the frame was useful; the time that others took is of the peer's share."""
        if self._emulated is not None:
            while (frame := await self.receive()) is not None:
                await asyncio.sleep(self._handled(take, frame))
            return
        self._taken, self._take = self._loop.create_future(), take
        try:
            if self._pausing is None:
                self._go_on()
            if self.ended.is_set() and not self._taken.done():
                self._taken.set_result(None)
            await self._taken
        finally:
            self._take = None
        if self._error is not None:
            raise self._error

    def _hand_out(self, take: Callable[[bytes], bool]) -> None:
        """All that came, as far as the peer's share goes."""
        assert self._taken is not None, "`receive_all` waits"
        while self._frames and self._pausing is None and not self._taken.done():
            try:
                self._pause(self._handled(take, self._next()))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the frames
                if not self._taken.done():
                    self._taken.set_exception(error)
                self.stream.pause_reading()

    def _handled(self, take: Callable[[bytes], bool], frame: bytes) -> float:
        """For how long the peer is not to be read."""
        begun = monotonic()
        is_useful = take(frame)
        now = monotonic()
        self._handled_s += now - begun
        return 0.0 if is_useful else self.share.pause_s(now - begun, now)

    async def close(self) -> None:
        """Once what was written is out, within CLOSE_S; at once where this is cancelled."""
        self.stream.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self.ended.wait()
        finally:
            self.stream.abort()

    def _is_open(self) -> bool:
        return not (self.ended.is_set() or self.stream.is_closing())
