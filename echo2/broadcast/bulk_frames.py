"""Frames of a bulk connection: four bytes that say how long, then so many bytes. No more is on the wire.

Guarantees: frames come out whole and in order, however the bytes were cut on their way; memory follows the bytes that have come,
not those that were announced: twice as many, and READ_BYTES. A frame beyond `frame_bytes_max` is MalformedMessage before anything
of it is kept. Leaves to others: what frames mean (wire), where bytes come from (runtime/transport_bulk).
"""

from __future__ import annotations

import struct

from echo2.base.errors import MalformedMessage

HEAD = struct.Struct(">I")
READ_BYTES = 256 << 10
_ROOM_BYTES_MIN = 32 << 10


def head_of(frame_bytes: int) -> bytes:
    """What goes before a frame."""
    return HEAD.pack(frame_bytes)


class FrameCutter:
    """Bytes are put where `room` says, and `took` gives the frames that they complete."""

    __slots__ = ("_begin", "_buffer", "_end", "_frame_bytes_max", "_whose")

    def __init__(self, frame_bytes_max: int, whose: str) -> None:
        self._frame_bytes_max, self._whose = frame_bytes_max, whose
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

    def took(self, count: int) -> list[bytes]:
        """So many bytes were put there; the frames that are whole now."""
        self._end += count
        frames: list[bytes] = []
        with memoryview(self._buffer) as view:
            while self.held_bytes >= HEAD.size:
                size = HEAD.unpack_from(self._buffer, self._begin)[0]
                if size > self._frame_bytes_max:
                    raise MalformedMessage(
                        f"{self._whose}: expected frames of at most {self._frame_bytes_max} bytes, got one of {size}"
                    )
                begin = self._begin + HEAD.size
                if self._end < begin + size:
                    break
                frames.append(bytes(view[begin : begin + size]))
                self._begin = begin + size
        return frames
