"""Frames records in a journal segment, and tells torn writes from damage.

Guarantees: a record is returned only if its checksum matches. A write torn by a kill or a power cut is distinguished from damage:
it left fewer bytes than the record's header promises, or zeros where the disk had not stored the last sectors yet. Everything else
is damage, even in the last record, which may have been acknowledged. Leaves to others: files (journal), the meaning of records
(learner/history).

Framing in `.records`: length, CRC-32 of the payload, CRC-32 of those two fields (little-endian, 32 bits each), payload. The second
CRC prevents a flipped bit in a length from looking like a torn end. `.log` segments of older releases lack it; they are still read
and appended to, and in them only a break without complete records after it counts as torn.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RECORD_BYTES_MAX = 256 << 20
SUFFIX, OLD_SUFFIX = ".records", ".log"
_SECTOR_BYTES = 512
_LOOKED_THROUGH_BYTES = 16 << 20
"""Bytes searched for complete records after damage; in `.records` the count only informs the operator."""
_PAIR = struct.Struct("<II")
_TRIPLE = struct.Struct("<III")


@dataclass(frozen=True, slots=True)
class Break:
    """The first position without a complete record. `whole_after`: readable records found after it, within the searched bytes."""

    position: int
    is_torn: bool
    whole_after: int = 0


class Framing:
    """Framing of one segment, chosen by its file suffix."""

    def __init__(self, path: Path) -> None:
        self._is_checked = path.suffix == SUFFIX
        self.header_bytes = _TRIPLE.size if self._is_checked else _PAIR.size

    def framed(self, payload: bytes) -> bytes:
        pair = _PAIR.pack(len(payload), zlib.crc32(payload))
        return pair + (struct.pack("<I", zlib.crc32(pair)) if self._is_checked else b"") + payload

    def payloads(self, data: bytes) -> Iterator[bytes | Break]:
        """Yields the records' payloads in order, and a `Break` last if there is one."""
        position = 0
        while position < len(data):
            payload = self._record_at(data, position)
            if payload is None:
                yield self._break_at(data, position)
                return
            yield payload
            position += self.header_bytes + len(payload)

    def _end_at(self, data: bytes, position: int) -> int | None:
        """End of the record at `position` according to its header; None if there is no valid header."""
        if position + self.header_bytes > len(data):
            return None
        size = int(_PAIR.unpack_from(data, position)[0])
        if not 0 < size <= RECORD_BYTES_MAX:  # a size of 0 would accept a run of zeros as records
            return None
        if self._is_checked:
            pair = data[position : position + _PAIR.size]
            if zlib.crc32(pair) != _TRIPLE.unpack_from(data, position)[2]:
                return None
        return position + self.header_bytes + size

    def _record_at(self, data: bytes, position: int) -> bytes | None:
        end = self._end_at(data, position)
        if end is None or end > len(data):
            return None
        payload = data[position + self.header_bytes : end]
        return payload if zlib.crc32(payload) == _PAIR.unpack_from(data, position)[1] else None

    def _break_at(self, data: bytes, position: int) -> Break:
        end = self._end_at(data, position)
        reach = end if end is not None else position + self.header_bytes
        if position + self.header_bytes > len(data) or _ends_in_lost_sectors(data, position, reach):
            return Break(position, is_torn=True)
        if self._is_checked and end is not None and end > len(data):
            return Break(position, is_torn=True)
        whole_after = self._whole_after(data, end if self._is_checked and end is not None else position + 1)
        is_short = not self._is_checked and (end is None or end > len(data))
        return Break(position, is_short and not whole_after, whole_after)

    def _whole_after(self, data: bytes, start: int) -> int:
        """Number of consecutive readable records in the first run of them from `start` on."""
        for begin in range(start, min(len(data) - self.header_bytes, start + _LOOKED_THROUGH_BYTES) + 1):
            count, position = 0, begin
            while (payload := self._record_at(data, position)) is not None:
                position += self.header_bytes + len(payload)
                count += 1
            if count:
                return count
        return 0


def _ends_in_lost_sectors(data: bytes, position: int, reach: int) -> bool:
    """Whether the file grew by a record of which the disk stored nothing, or nothing from some sector before `reach` on."""
    stored = len(data.rstrip(b"\0"))
    lost_from = -(-stored // _SECTOR_BYTES) * _SECTOR_BYTES
    return stored <= position or lost_from < min(reach, len(data))
