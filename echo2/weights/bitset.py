"""Entropy coding of marks: as gaps if they are rare, otherwise as bytes of the marks themselves.

Gaps of a rare event are geometrically distributed: their high parts, one byte each, get zstd's Huffman code; their
low bits are practically random and stay as they are. If more than one in six is marked, eight bits together are one
symbol. Both are within two per cent of the entropy of independent marks, at about a nanosecond per symbol.

Guarantees: reading returns what was written, or raises `DeltaFormatError`; allocations are bounded by the claimed size,
which the caller knows to be right. Leaves to others: what is marked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import zstandard

from echo2.base.errors import DeltaFormatError
from echo2.weights import bits, values
from echo2.weights.bits import U8, U32, U64
from echo2.weights.elements import Bits
from echo2.weights.lanes import LISTED

NONE, MARKS, GAPS = 0, 1, 2
GAP_SHARE = 1 / 6  # marks rarer than this are coded as gaps
_GAP_MEAN = 20.0  # mean of a gap's byte: k is chosen so that it is between this and twice as much
_SHIFT_MAX = 24
_HEAD = struct.Struct("<BBI")
_PLANE = struct.Struct("<BI")
_COUNT = struct.Struct("<I")
_RAW, _ZSTD = 0, 1
_ZSTD_BYTES_MIN = 48
_WINDOW_MAX = 1 << 20
_NOISE = (0.4, 0.6)  # with a share of marks between these, entropy coding gains nothing
# Only the entropy stage helps here: matching noise only hurts, so hardly any matches are searched (a tiny hash table).
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=18, hash_log=6, min_match=7, strategy=zstandard.STRATEGY_FAST, write_content_size=1
)


class Coder:
    """The entropy stage and its working memory. Make one per payload: creating it takes as long as coding some thousand
    symbols, and threads cannot share it."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(compression_params=_PARAMETERS)

    def shorter(self, data: bytes) -> bytes | None:
        """The zstd frame of `data` if it is shorter, else None."""
        coded: bytes = self._zstd.compress(data)
        return coded if len(coded) < len(data) else None


def _from_zstd(zstd: zstandard.ZstdDecompressor, data: bytes | memoryview, size: int, what: str) -> bytes:
    """Decompresses a frame that must contain exactly `size` bytes."""
    try:
        claimed = zstandard.get_frame_parameters(data).content_size
        if claimed != size:
            raise DeltaFormatError(f"expected {what} of {size} bytes, its frame claims {claimed}")
        plain: bytes = zstd.decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise DeltaFormatError(f"{what}: {error}") from None
    if len(plain) != size:
        raise DeltaFormatError(f"expected {what} of {size} bytes, got {len(plain)}")
    return plain


class Reader:
    """Reads a payload from beginning to end. What is read is also appended to `plain`, if given: an equivalent payload
    that needs no entropy decoding."""

    def __init__(self, payload: memoryview, plain: list[bytes | memoryview] | None = None) -> None:
        self._payload = payload
        self._at = 0
        self._zstd = zstandard.ZstdDecompressor(max_window_size=_WINDOW_MAX)
        self._plain = plain

    def take(self, size: int, what: str) -> memoryview:
        """The next `size` bytes."""
        part = self._next(size, what)
        if self._plain is not None:
            self._plain.append(part)
        return part

    def _next(self, size: int, what: str) -> memoryview:
        if size > len(self._payload) - self._at:
            raise DeltaFormatError(f"expected {size} bytes of {what}, got {len(self._payload) - self._at}")
        self._at += size
        return self._payload[self._at - size : self._at]

    def fields(self, layout: struct.Struct, what: str) -> tuple[int, ...]:
        """The next numbers, as `layout` packs them."""
        return layout.unpack(self.take(layout.size, what))

    def words(self, size: int, what: str) -> U64:
        """The next `size` bytes as a run of bits."""
        out = np.zeros(-(-size // 8) + 2, np.uint64)
        out.view(np.uint8)[:size] = np.frombuffer(self.take(size, what), np.uint8)
        return out

    def plane(self, size: int, what: str) -> U8:
        """The next plane, whose decoded size is known."""
        coding, length = _PLANE.unpack(self._next(_PLANE.size, what))
        data: bytes | memoryview = self._next(length, what)
        if coding == _ZSTD:
            data = _from_zstd(self._zstd, data, size, what)
        elif coding != _RAW or length != size:
            raise DeltaFormatError(f"expected {what} of {size} bytes, raw or from zstd, got {length} (coding {coding})")
        if self._plain is not None:
            self._plain += [_PLANE.pack(_RAW, size), data]
        return np.frombuffer(data, np.uint8)

    def end(self) -> None:
        """DeltaFormatError if bytes are left."""
        if self._at != len(self._payload):
            raise DeltaFormatError(f"expected {self._at} bytes, got {len(self._payload)}")


def plane_parts(plane: U8, coder: Coder | None) -> list[bytes]:
    """A plane's head and bytes; raw if there is no coder or raw is shorter."""
    data = plane.tobytes()
    shorter = None if coder is None or len(data) < _ZSTD_BYTES_MIN else coder.shorter(data)
    if shorter is None:
        return [_PLANE.pack(_RAW, len(data)), data]
    return [_PLANE.pack(_ZSTD, len(shorter)), shorter]


@dataclass(frozen=True, slots=True)
class BitSet:
    """Marks among `size` bits: their places, strictly ascending, or all bits; neither if there are no marks."""

    size: int
    marked: int
    places: U32 | None = None
    words: U64 | None = None

    @classmethod
    def of_marks(cls, words: U64, size: int, marked: int) -> BitSet:
        """A set from a run of bits, stored in the form in which it will be coded."""
        if not marked or marked > GAP_SHARE * size:
            return cls(size, marked, words=words if marked else None)
        return cls(size, marked, listed(words, size, marked))

    @classmethod
    def of_places(cls, places: U32, size: int) -> BitSet:
        """A set from ascending places, stored in the form in which it will be coded."""
        if places.size and places.size <= GAP_SHARE * size:
            return cls(size, places.size, places)
        if not places.size:
            return cls(size, 0)
        return cls(size, places.size, words=cls(size, places.size, places).marks())

    def marks(self) -> U64:
        """The marks as a run of bits."""
        if self.words is not None:
            return self.words
        out = np.zeros(bits.word_count(self.size), np.uint64)
        self.copy_to(out)
        return out

    def copy_to(self, words: U64) -> None:
        """Writes the marks into a run of bits, all 0 before."""
        if self.words is not None:
            words[:] = self.words
        elif self.places is not None:
            bits.marks_of_places(self.places, words)

    def listed(self) -> U32:
        """The marked positions."""
        if self.words is not None:
            return listed(self.words, self.size, self.marked)
        return np.empty(0, np.uint32) if self.places is None else self.places

    def parts(self, coder: Coder | None) -> list[bytes]:
        """Encodes the set for `read_bit_set`; without a coder, without entropy coding."""
        if self.words is not None:
            share = self.marked / self.size
            plane = self.words.view(np.uint8)[: -(-self.size // 8)]
            is_noise = _NOISE[0] < share < _NOISE[1]
            return [_HEAD.pack(MARKS, 0, self.marked), *plane_parts(plane, None if is_noise else coder)]
        if self.places is None:
            return [_HEAD.pack(NONE, 0, 0)]
        shift, out = _room(self.size, self.marked)
        longer = int(bits.gaps_of_places(self.places, shift, out))
        quotients, low, long = out
        return [
            _HEAD.pack(GAPS, shift, self.marked),
            _COUNT.pack(longer),
            *plane_parts(quotients, coder),
            low.view(np.uint8)[: -(-self.marked * shift // 8)].tobytes(),
            long[:longer].tobytes(),
        ]


def listed(words: U64, size: int, marked: int) -> U32:
    """The places of the `marked` marks among the first `size` bits."""
    out = np.empty(marked + LISTED, np.uint32)
    bits.places_of_marks(words, size, out)
    return out[:marked]


def _room(size: int, marked: int) -> tuple[int, tuple[U8, U64, U32]]:
    """The shift k for `marked` marks, and room for their gaps."""
    shift = min(_SHIFT_MAX, max(0, int(np.log2(max(1.0, (size / marked - 1) / _GAP_MEAN)))))
    long_max = min(marked, size // (bits.LONG << shift) + 1)
    low = np.zeros(bits.word_count(marked * shift), np.uint64)
    return shift, (np.empty(marked, np.uint8), low, np.empty(long_max, np.uint32))


def read_bit_set(reader: Reader, size: int, what: str) -> BitSet:
    """Reads the next set of marks among `size` bits."""
    form, shift, marked = reader.fields(_HEAD, what)
    if marked > size or (form == NONE) != (marked == 0):
        raise DeltaFormatError(f"expected at most {size} {what}, it claims {marked}")
    if form == NONE:
        return BitSet(size, 0)
    if form == MARKS and shift == 0:
        words = np.zeros(bits.word_count(size), np.uint64)
        byte_count = -(-size // 8)
        words.view(np.uint8)[:byte_count] = reader.plane(byte_count, what)
        if bits.count_marks(words, size) != marked or bits.count_marks(words, 8 * byte_count) != marked:
            raise DeltaFormatError(f"expected {marked} {what} of {size}, got others")
        return BitSet(size, marked, words=words)
    if form != GAPS or shift > _SHIFT_MAX:
        raise DeltaFormatError(f"expected {what} as marks or gaps, got form {form}, shift {shift}")
    (longer,) = reader.fields(_COUNT, what)
    if longer > marked:
        raise DeltaFormatError(f"expected at most {marked} long gaps, it claims {longer}")
    quotients = reader.plane(marked, what)
    low = reader.words(-(-marked * shift // 8), what)
    long = np.frombuffer(reader.take(4 * longer, what), "<u4").astype(np.uint32)
    places = np.empty(marked, np.uint32)
    if not bits.places_of_gaps((quotients, low, long), shift, size, places):
        raise DeltaFormatError(
            f"expected {marked} {what} at gaps within {size} places, {longer} of them long; got others"
        )
    return BitSet(size, marked, places)


def value_parts(excess: Bits, coder: Coder | None) -> list[bytes]:
    """Encodes magnitudes above one for `read_values`."""
    symbols = np.empty(excess.size, np.uint8)
    count = int(values.count_plain_bits(excess))
    words = np.zeros(bits.word_count(count), np.uint64)
    values.write_values(excess, symbols, words)
    size = -(-count // 8)
    return [*plane_parts(symbols, coder), _COUNT.pack(size), words.view(np.uint8)[:size].tobytes()]


def read_values(reader: Reader, count: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
    """Reads the magnitudes minus one of `count` larger changes."""
    out = np.empty(count, dtype)
    symbols = reader.plane(count, "magnitudes")
    (size,) = reader.fields(_COUNT, "magnitudes")
    words = reader.words(size, "magnitudes")
    if not values.read_values(symbols, words, 8 * size, out):
        raise DeltaFormatError(f"expected {count} magnitudes of {out.itemsize} bytes in {size} bytes")
    return out
