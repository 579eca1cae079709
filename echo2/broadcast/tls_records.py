"""TLS 1.3 records as they come from a socket: which of them are whole, and how much is still to come.

Guarantees: whole records come out in order, however the bytes were cut on their way; `still_to_come` never tells more than a sender
must send. Leaves to others: what is in a record (OpenSSL), frames (bulk_frames), sockets (runtime/sealed).
"""

from __future__ import annotations

HEAD_BYTES = 5
TAG_BYTES = 17
"""One byte that names the content, and the tag, 16 bytes in every cipher suite of TLS 1.3 that OpenSSL offers by itself."""
PLAIN_BYTES_MAX = 16 << 10
RECORD_BYTES_MAX = HEAD_BYTES + PLAIN_BYTES_MAX + 256
"""RFC 8446, 5.2."""


class RecordCutter:
    """Bytes are put where `room` says; `took` gives the records that they complete, as they came."""

    __slots__ = ("_begin", "_buffer", "_end", "_view")

    def __init__(self, buffer_bytes: int) -> None:
        assert buffer_bytes >= 2 * RECORD_BYTES_MAX
        self._buffer = bytearray(buffer_bytes)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0

    @property
    def held_bytes(self) -> int:
        """Of a record that is not whole."""
        return self._end - self._begin

    def room(self) -> memoryview:
        """Where the next bytes go: at least as many as one record has."""
        held = self._end - self._begin
        if self._begin and (not held or len(self._buffer) - self._end < RECORD_BYTES_MAX):
            self._view[:held] = bytes(self._view[self._begin : self._end])
            self._begin, self._end = 0, held
        return self._view[self._end :]

    def took(self, count: int) -> tuple[memoryview, int]:
        """So many bytes were put there. The records that are whole now, a view until `room` is called again, and how many they
        are. A record that is longer than any may be comes out as far as it is there: OpenSSL refuses it by its head."""
        self._end += count
        buffer, begin, end, number = self._buffer, self._begin, self._end, 0
        while end - begin >= HEAD_BYTES:
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
