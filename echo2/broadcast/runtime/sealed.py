"""TLS 1.3 over a connection of the event loop: the part of asyncio's that a bulk connection needs, with a say in when it is woken.

asyncio's own TLS is woken by every segment, asks OpenSSL each time for a record that is not complete, and allocates a buffer of
256 KiB. Here OpenSSL is given whole records, and the kernel is told how much is still to come of the frame that has begun.
Guarantees: nothing of a peer is passed on before its handshake is done; what was written before `close` goes out if the peer takes
it; the connection has ended SHUTDOWN_S after `close`, after the peer's farewell and after any failure, whatever the peer does.
Leaves to others: frames and their limits (transport_bulk), whom to trust (sockets_tls).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any, Protocol

from echo2.broadcast.tls_records import RecordCutter

BUFFER_BYTES = 128 << 10
WAKE_BYTES_MAX = 48 << 10
"""The kernel wakes the loop when so much has arrived, not for each segment."""
ROOM_BYTES = 192 << 10
"""A new connection's receive window is 64 KiB. Bytes that wait for the loop take room of it, and too little is left for what a
long path has under way. Asking once to be woken at so many bytes makes the kernel's buffer hold twice as many. It still grows by
itself afterwards; a size set with SO_RCVBUF would not."""
SHUTDOWN_S = 2.0


class SealedReader(Protocol):
    """Whose bytes these are."""

    def connection_made(self, transport: Any) -> None: ...
    def get_buffer(self, sizehint: int) -> memoryview: ...
    def buffer_updated(self, nbytes: int) -> None: ...
    @property
    def missing_bytes(self) -> int: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...


class Sealed(asyncio.BufferedProtocol):
    """A protocol towards the loop, a transport towards its reader, which is told of it once the handshake is done."""

    def __init__(self, reader: SealedReader, context: ssl.SSLContext, server_hostname: str | None) -> None:
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
        self._is_made = self._is_closing = self._is_lost = False
        self._error: Exception | None = None
        self._ending: asyncio.TimerHandle | None = None
        self.shaken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ---- what asyncio calls

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._raw = transport.get_extra_info("socket")
        for least in (ROOM_BYTES, 1):
            self._ask_to_wake_at(least)
        self._shake()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._records.room()

    def buffer_updated(self, nbytes: int) -> None:
        whole, count = self._records.took(nbytes)
        if self._is_closing:
            return
        if count:
            self._incoming.write(whole)
            if not self._is_made:
                self._shake()
            if self._is_made:
                self._read(count)
        if self._is_made:
            self._wake_at(self._records.still_to_come(self._reader.missing_bytes))

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

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except (ssl.SSLError, ssl.CertificateError) as error:
            self._fail(error)
            return
        self._flush()
        if self.shaken.done():  # whoever waited has given up
            self.abort()
            return
        self._is_made = True
        self._reader.connection_made(self)
        self.shaken.set_result(None)

    def _read(self, records: int) -> None:
        """What came in so many records. One that carries no data of the peer ends the last turn early."""
        try:
            while records > 0 and not self._is_closing:
                records = self._read_into(self._reader.get_buffer(-1), records)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.close()
        except ssl.SSLError as error:
            self._fail(error)
        if self._outgoing.pending:
            self._flush()

    def _read_into(self, room: memoryview, records: int) -> int:
        """Fills the rest of a frame, or reads one record of the next; how many records are left."""
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
        finally:
            if filled:
                self._reader.buffer_updated(filled)
        return records

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
        if self._is_closing:
            return
        written = 0
        try:
            while written < len(data):
                written += self._tls.write(memoryview(data)[written:] if written else data)
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

    def is_reading(self) -> bool:
        return bool(self._transport.is_reading())

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def get_extra_info(self, name: str) -> Any:
        return self._tls if name == "ssl_object" else self._transport.get_extra_info(name)

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


async def accept_sealed(reader: SealedReader, raw: socket.socket, context: ssl.SSLContext, within_s: float) -> None:
    """Shakes hands with who connected to us. OSError (ssl.SSLError) where that fails or takes longer."""
    made = Sealed(reader, context, None)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: made, raw)
    await _shaken(made, within_s)


async def dial_sealed(
    reader: SealedReader, host: str, port: int, context: ssl.SSLContext, server_hostname: str, within_s: float
) -> None:
    """Connects to a numeric address and shakes hands. OSError (ssl.SSLError) where that fails or takes longer."""
    made = Sealed(reader, context, server_hostname)
    await asyncio.get_running_loop().create_connection(lambda: made, host, port)
    await _shaken(made, within_s)


async def _shaken(made: Sealed, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await made.shaken
    except TimeoutError:
        made.abort()
        raise TimeoutError(f"expected a TLS handshake within {within_s:g} s") from None
    except BaseException:
        made.abort()
        raise
