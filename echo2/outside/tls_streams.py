"""Streams of TLS 1.3 over sockets of the event loop: the part of asyncio's TLS that is needed, with a say in when it is woken.

asyncio's own TLS is woken by every segment, asks OpenSSL each time for a record that is not complete, and allocates a buffer of
256 KiB. Here OpenSSL is given whole records, and the kernel is told how much is still to come of the message that has begun.
Guarantees: those of streams.py; the connection has ended SHUTDOWN_S after `close`, after the peer's farewell and after any
failure, whatever the peer does, and within GONE_S of the end of its machine; a handshake has at most HANDSHAKE_RECORDS_MAX
records, and the connection ends after EMPTY_RECORDS_MAX more that bring no data (new keys, tickets, empty ones).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from echo2.base.errors import MalformedMessage, PortBusy
from echo2.base.units import address_of
from echo2.outside import monotonic
from echo2.outside.net import Dialled, Shown, accepted, listened, listening_socket
from echo2.outside.streams import StreamReader

BUFFER_BYTES = 128 << 10  # eight full TLS records
WAKE_BYTES_MAX = 72 << 10  # the kernel wakes the loop when so much has arrived, not for each segment: a chunk of 64 KiB
ROOM_BYTES = 192 << 10
"""A new connection's receive window is 64 KiB. Bytes that wait for the loop take room of it, and too little is left for what a
long path has under way. Asking once to be woken at so many bytes makes the kernel's buffer hold twice as many. It still grows by
itself afterwards; a size set with SO_RCVBUF would not."""
SHUTDOWN_S = 2.0  # a peer that hangs must not hold up an end
GONE_S = 18  # shorter than a lease, longer than the pauses of a busy machine; three probes of 3 s after 9 s
HANDSHAKE_RECORDS_MAX = 64  # an honest one has about ten
EMPTY_RECORDS_MAX = 16
"""Two tickets follow OpenSSL's handshake; keys are renewed after 2**24 records, which no connection of ours reaches soon."""

HEAD_BYTES = 5  # RFC 8446, 5.1
TAG_BYTES = 17
"""One byte that names the content, and the tag, 16 bytes in every cipher suite of TLS 1.3 that OpenSSL offers by itself."""
PLAIN_BYTES_MAX = 16 << 10  # RFC 8446, 5.1
RECORD_BYTES_MAX = HEAD_BYTES + PLAIN_BYTES_MAX + 256  # RFC 8446, 5.2
RECORDS_AT_ONCE = 16
"""Two reads' worth of full records. OpenSSL handles whatever precedes data in one go: of 27 bytes each, a buffer has thousands."""


class RecordCutter:
    """Bytes are put where `room` says; `take` gives the records that they complete, as they came."""

    __slots__ = ("_begin", "_buffer", "_end", "_view")

    def __init__(self, buffer_bytes: int) -> None:
        assert buffer_bytes >= 2 * RECORD_BYTES_MAX
        self._buffer = bytearray(buffer_bytes)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0

    def room(self) -> memoryview:
        """Where the next bytes go: at least as many as one record has."""
        held = self._end - self._begin
        if self._begin and (not held or len(self._buffer) - self._end < RECORD_BYTES_MAX):
            self._view[:held] = bytes(self._view[self._begin : self._end])
            self._begin, self._end = 0, held
        return self._view[self._end :]

    def take(self, count: int) -> tuple[memoryview, int]:
        """So many bytes were put there. The records that are whole now, a view until `room` is called again, and how many they are,
        RECORDS_AT_ONCE at most: call it again with 0 for the others, until there are none. A record that is longer than any may be
        comes out as far as it is there: OpenSSL refuses it by its head."""
        self._end += count
        buffer, begin, end, number = self._buffer, self._begin, self._end, 0
        while end - begin >= HEAD_BYTES and number < RECORDS_AT_ONCE:
            size = HEAD_BYTES + (buffer[begin + 3] << 8 | buffer[begin + 4])
            if size > RECORD_BYTES_MAX:
                size = end - begin
            elif begin + size > end:
                break
            begin += size
            number += 1
        whole = self._view[self._begin : begin]
        self._begin = begin
        return whole, number

    def still_to_come(self, missing_bytes: int) -> int:
        """Bytes that the socket has to bring before a frame is whole that misses so many, at least; the rest of a record if
        that is more; 0: not known. A sender may send more records than are needed, never fewer."""
        held, rest = self._end - self._begin, 0
        if held:
            if held < HEAD_BYTES:
                return 0
            body = self._buffer[self._begin + 3] << 8 | self._buffer[self._begin + 4]
            rest = HEAD_BYTES + body - held
            missing_bytes -= body - TAG_BYTES
        if missing_bytes <= 0:
            return rest
        records = -(-missing_bytes // PLAIN_BYTES_MAX)
        return rest + missing_bytes + records * (HEAD_BYTES + TAG_BYTES)


class TlsStream(asyncio.BufferedProtocol):
    """A protocol towards the loop, a transport towards its reader, which is told of it once the handshake is done."""

    def __init__(self, reader: StreamReader, context: ssl.SSLContext, server_hostname: str | None) -> None:
        """`server_hostname`: None where we listen."""
        self._reader = reader
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self._records = RecordCutter(BUFFER_BYTES)
        self._transport: Any = None
        self._raw: Any = None
        self._wakes_at = 1
        self._handshake_records = self._empty_records = 0
        self._is_made = self._is_closing = self._is_lost = False
        self._error: Exception | None = None
        self._ending: asyncio.TimerHandle | None = None
        self.shaken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.shaken.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have given up

    # ---- what asyncio calls

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._raw = transport.get_extra_info("socket")
        keep_alive(self._raw)
        for least in (ROOM_BYTES, 1):
            self._ask_to_wake_at(least)
        self._shake()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._records.room()

    def buffer_updated(self, nbytes: int) -> None:
        begun, records = monotonic(), 0
        whole, count = self._records.take(nbytes)
        while count and not self._is_closing:
            self._take(whole, count)
            records += count
            whole, count = self._records.take(0) if count == RECORDS_AT_ONCE else (whole, 0)
        if self._is_closing:
            return
        if self._is_made:
            self._wake_at(self._records.still_to_come(self._reader.missing_bytes))
        self._reader.worked(monotonic() - begun, records, nbytes)

    def _take(self, whole: memoryview, count: int) -> None:
        self._incoming.write(whole)
        if self._is_made:
            self._read(count)
            return
        self._handshake_records += count
        if self._handshake_records > HANDSHAKE_RECORDS_MAX:
            self._fail(MalformedMessage(f"expected a handshake of up to {HANDSHAKE_RECORDS_MAX} records, got more"))
            return
        if self._shake():
            self._read(count, is_data=False)

    def eof_received(self) -> None:
        """The loop closes the connection; what had come has been read."""

    def pause_writing(self) -> None:
        self._reader.pause_writing()

    def resume_writing(self) -> None:
        self._reader.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = self._is_lost = True
        if self._ending is not None:
            self._ending.cancel()
        if not self.shaken.done():
            self.shaken.set_exception(self._error or exc or ConnectionResetError("it ended during the handshake"))
        if self._is_made:
            self._reader.connection_lost(self._error or exc)

    # ---- inside

    def _shake(self) -> bool:
        """Whether it is done now."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except (ssl.SSLError, ssl.CertificateError) as error:
            self._fail(error)
            return False
        self._flush()
        if self.shaken.done():  # whoever waited has given up
            self.abort()
            return False
        self._is_made = True
        host, port = self._transport.get_extra_info("peername")[:2]
        self._reader.connection_made(self, (as_ipv4(host), port), self._tls.getpeercert(binary_form=True) or b"")
        self.shaken.set_result(None)
        return True

    def _read(self, records: int, *, is_data: bool = True) -> None:
        """What came in so many records. Those that carry no data of the peer end the last turn early, and are left over; `is_data`:
        the handshake had none of them."""
        left = 0
        try:
            while records > 0 and not self._is_closing:
                records, left = self._read_into(self._reader.get_buffer(-1), records)
        except ssl.SSLError as error:
            self._fail(error)
        if self._outgoing.pending:
            self._flush()
        self._empty_records += left if is_data else 0
        if self._empty_records > EMPTY_RECORDS_MAX and not self._is_closing:
            self._fail(MalformedMessage(f"expected data, got more than {EMPTY_RECORDS_MAX} records without any"))

    def _read_into(self, room: memoryview, records: int) -> tuple[int, int]:
        """Fills the rest of a frame, or reads one record of the next; how many records are left, and how many had nothing."""
        filled, size, is_begun = 0, len(room), self._reader.missing_bytes > 0
        try:
            while records > 0:
                count = int(self._tls.read(size - filled, room[filled:]))  # with a buffer it tells how many bytes
                if not count:
                    self.close()
                    break
                filled += count
                if filled < size or not self._tls.pending():
                    records -= 1
                if filled == size or not is_begun:
                    break
        except ssl.SSLWantReadError:
            return 0, records
        finally:
            if filled:
                self._reader.buffer_updated(filled)
        return records, 0

    def _wake_at(self, wanted_bytes: int) -> None:
        """Segments of a wide-area link arrive one by one, and each would cost a turn of the loop."""
        wakes_at = max(1, min(WAKE_BYTES_MAX, wanted_bytes))
        if wakes_at != self._wakes_at:
            self._wakes_at = wakes_at
            self._ask_to_wake_at(wakes_at)

    def _ask_to_wake_at(self, least_bytes: int) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least_bytes)

    def _flush(self) -> None:
        if data := self._outgoing.read():
            self._transport.write(data)

    def _fail(self, error: Exception) -> None:
        """The peer is told why, in TLS's words."""
        self._error = error
        self._flush()
        self._is_closing = True
        self._transport.close()
        self._end_soon()

    def _end_soon(self) -> None:
        if self._ending is None and not self._is_lost:
            self._ending = asyncio.get_running_loop().call_later(SHUTDOWN_S, self._transport.abort)

    # ---- what its reader calls

    def write(self, data: bytes | memoryview) -> None:
        self.writelines((data,))

    def writelines(self, parts: Iterable[bytes | memoryview]) -> None:
        """Each part begins a record."""
        if self._is_closing:
            return
        try:
            for part in parts:
                written = 0
                while written < len(part):
                    written += self._tls.write(memoryview(part)[written:] if written else part)
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._transport.write(self._outgoing.read())

    def set_write_buffer_limits(self, high: int) -> None:
        self._transport.set_write_buffer_limits(high=high)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """What was written goes out; what comes is thrown away, until the peer closes too or `abort` is called."""
        if self._is_closing:
            return
        self._is_closing = True
        with contextlib.suppress(ssl.SSLError):  # it wants the peer's own farewell
            self._tls.unwrap()
        self._flush()
        self._end_soon()
        if self._transport.is_closing():
            return
        with contextlib.suppress(OSError):
            self._transport.write_eof()
        self._wake_at(1)
        self._transport.resume_reading()

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()


def keep_alive(raw: Any) -> None:
    """So that the kernel ends what leads nowhere."""
    options = {"TCP_KEEPIDLE": GONE_S // 2, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * GONE_S}
    with contextlib.suppress(OSError):  # it has just ended
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if (option := getattr(socket, name, None)) is not None:
                raw.setsockopt(socket.IPPROTO_TCP, option, value)


async def dial(reader: StreamReader, host: str, port: int, dialled: Dialled, within_s: float) -> None:
    """`Net.dial_stream`."""
    assert dialled.pair is not None, "streams are authenticated both ways"
    context = tls_context(dialled.pair, dialled.root_pem, ssl.PROTOCOL_TLS_CLIENT)
    stream = TlsStream(reader, context, dialled.server_name)
    await asyncio.get_running_loop().create_connection(lambda: stream, host, port)
    await _shaken(stream, within_s)


async def _shaken(stream: TlsStream, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await stream.shaken
    except TimeoutError:
        stream.abort()
        raise TimeoutError(f"expected a TLS handshake within {within_s:g} s") from None
    except BaseException:
        stream.abort()
        raise


class SocketCaller:
    """A `StreamCaller` on a socket that the system, or a relay's byte pipe, connected to us."""

    def __init__(self, raw: socket.socket, host: str) -> None:
        self._raw, self.host = raw, as_ipv4(host)

    async def shake_hands(self, reader: StreamReader, shown: Shown, within_s: float) -> None:
        assert shown.authority_pem is not None, "streams are authenticated both ways"
        stream = TlsStream(reader, tls_context(shown.pair(), shown.authority_pem, ssl.PROTOCOL_TLS_SERVER), None)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: stream, self._raw)
        await _shaken(stream, within_s)

    def close(self) -> None:
        self._raw.close()


class SocketListener:
    """Listens for streams, on the addresses of both families for `::`. PortBusy where it cannot."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = listening_socket(host)
        try:
            self.socket.bind((listened(host), port))
            self.socket.listen(128)
        except OSError as error:
            self.socket.close()
            raise PortBusy(f"expected to listen on {address_of(listened(host), port)}: {error.strerror}") from None
        self.socket.setblocking(False)
        self.port = int(self.socket.getsockname()[1])

    async def accept(self) -> SocketCaller:
        return SocketCaller(*await accepted(self.socket))

    def close(self) -> None:
        self.socket.close()


@functools.lru_cache(maxsize=16)
def tls_context(pair: tuple[bytes, bytes], authority_pem: bytes, protocol: int) -> ssl.SSLContext:
    """Mutual TLS 1.3 with this key and certificate, and peers whose certificate the authority issued."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority_pem.decode())
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a resumed session would not show a renewed certificate
    _with_file(b"\n".join(pair), context.load_cert_chain)
    return context


def _with_file(data: bytes, use: Callable[[str], object]) -> None:
    """Passes `data` to `use` as a file path, because `ssl` reads keys only from files; in memory if the system can."""
    memory_file = getattr(os, "memfd_create", None)
    if memory_file is not None:
        handle = memory_file("echo2-tls")
        try:
            os.write(handle, data)
            use(f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)
        return
    with tempfile.TemporaryDirectory(prefix="echo2-tls-") as folder:  # of mode 0700
        path = Path(folder) / "pair.pem"
        path.write_bytes(data)
        use(str(path))


def as_ipv4(host: str) -> str:
    """Strips the prefix of IPv4-mapped IPv6 addresses, which dual-stack sockets report."""
    return host.removeprefix("::ffff:")
