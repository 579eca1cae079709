"""Runs of bits in words, and their entropy coding: as gaps if marks are rare, otherwise as bytes of the marks themselves.

A mark is a one bit of a run; its place is its index. A gap, the number of unmarked places since the previous mark, is coded as a
byte, gap >> k, and k plain bits; a byte of 255 means that the gap is in the list of long gaps. Gaps of a rare event are
geometrically distributed: their bytes get zstd's Huffman code, their low bits are practically random. Both forms are within two
per cent of the entropy of independent marks, at about a nanosecond per symbol. Guarantees: no kernel reads or writes out of
bounds for places below the given size; reading returns what was written, or raises `DeltaFormatError`; allocations are bounded by
the claimed size, which the caller knows to be right. A run of n bits is stored in n // 64 + 2 words, so that 64 can be loaded
from any place.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard
from numba.cpython.unsafe.numbers import leading_zeros, trailing_zeros

from echo2.base.errors import DeltaFormatError
from echo2.weights.elements import Bits
from echo2.weights.jit import (
    HAS_BYTE_MOVES,
    LANES,
    TOGETHER,
    compiled,
    count_ones,
    inlined,
    list_lanes,
    place_gaps,
)

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Int = int | np.int64

LONG = 255  # the byte of a gap that is stored in the list of long gaps
_0 = np.uint64(0)
_1 = np.uint64(1)
_6 = np.uint64(6)
_63 = np.uint64(63)
_LONG = np.uint64(LONG)  # typed for the kernels


def word_count(bits: int) -> int:
    """Number of words in which a run of `bits` bits is stored."""
    return bits // 64 + 2


@inlined
def put(words: U64, at: Int, value: np.uint64, count: Int) -> Int:
    """Appends the low `count` bits of `value`, whose other bits are 0, to a run of `at` bits; returns the new length. The first
    word of a run must be 0 initially."""
    word, shift = np.uint64(at) >> _6, np.uint64(at) & _63
    words[word] |= value << shift
    # Two shifts, because a shift by 64 (shift = 0) is undefined on the processor. The next word is assigned, not or-ed:
    # so only a run's first word has to be 0 beforehand.
    words[word + _1] = (value >> _1) >> (_63 - shift)
    return at + count


@inlined
def bits_at(words: U64, at: Int) -> np.uint64:
    word, shift = np.uint64(at) >> _6, np.uint64(at) & _63
    # Two shifts for the same reason as in `put`; the second load is why a run has a spare word.
    bits: np.uint64 = (words[word] >> shift) | ((words[word + _1] << _1) << (_63 - shift))
    return bits


@inlined
def bit_at(words: U64, at: np.uint64) -> np.uint64:
    bit: np.uint64 = (words[at >> _6] >> (at & _63)) & _1
    return bit


@inlined
def below(count: Int) -> np.uint64:
    """A word whose low `count` bits are 1; all 64 from 64 on."""
    return ~_0 if count >= 64 else (_1 << np.uint64(count)) - _1


@compiled
def count_marks(words: U64, count: int) -> Int:
    """The number of ones among the first `count` bits."""
    total = _0
    for at in range(0, count, 64):
        total += count_ones(words[at >> 6] & below(count - at))
    return np.int64(total)


@compiled
def gaps_of_places(places: U32, k: int, out: tuple[U8, U64, U32]) -> Int:
    """Codes the gaps of marks (at least one). `out` = bytes, plain bits, long gaps; returns the number of long gaps."""
    quotients, low, long = out
    shift = np.uint64(k)
    first = min(np.uint64(places[0]) >> shift, _LONG)
    quotients[0] = first
    # This pass only counts the long gaps: without a branch the compiler can vectorise it, and blocks with a long
    # gap are rare.
    longer = np.int64(first == _LONG)
    for i in range(1, places.size):
        quotient = min((np.uint64(places[i]) - np.uint64(places[i - 1]) - _1) >> shift, _LONG)
        quotients[i] = quotient
        longer += np.int64(quotient == _LONG)
    if longer:
        _list_long(places, quotients, long)
    if k:
        _low_bits(places, k, low)
    return longer


@inlined
def _gap_before(places: U32, i: Int) -> np.uint64:
    return np.uint64(places[i]) - np.uint64(places[i - 1]) - _1 if i else np.uint64(places[0])


@inlined
def _list_long(places: U32, quotients: U8, long: U32) -> None:
    index = 0
    for i in range(places.size):
        if quotients[i] == LONG:
            long[index] = _gap_before(places, i)
            index += 1


@inlined
def _low_bits(places: U32, k: int, low: U64) -> None:
    """Writes the low k bits of every gap, as many at a time as fit into a word."""
    shift = np.uint64(k)
    mask = (_1 << shift) - _1
    # Gathered in a register first, because each `put` waits for the word that the previous one wrote.
    together = 64 // k
    bits: Int = 0
    for start in range(0, places.size, together):
        end = min(start + together, places.size)
        word, at = _0, _0
        for i in range(start, end):
            word |= (_gap_before(places, i) & mask) << at
            at += shift
        bits = put(low, bits, word, (end - start) * k)


@compiled
def places_of_gaps(gaps: tuple[U8, U64, U32], k: int, count: int, places: U32) -> bool:
    """The inverse. False if a place is not below `count`, or the number of long gaps does not match the bytes."""
    quotients, low, long = gaps
    shift = np.uint64(k)
    mask = (_1 << shift) - _1
    after = _0
    longer = np.int64(0)
    for start in range(0, quotients.size, TOGETHER):
        if k * TOGETHER <= 64 and start + TOGETHER <= quotients.size:
            following = place_gaps(quotients, start, bits_at(low, start * k), shift, after, places)
            if following != after:
                after = following
                continue
        for i in range(start, min(start + TOGETHER, quotients.size)):
            gap = np.uint64(quotients[i])
            if gap == _LONG:
                if longer == long.size:
                    return False
                gap = np.uint64(long[longer])
                longer += 1
            elif k:
                gap = (gap << shift) | (bits_at(low, i * k) & mask)
            after += gap
            places[i] = after
            after += _1
    # Places ascend, and 2^24 gaps of 32 bits do not overflow: if the last one is in range, all are.
    return bool(after <= np.uint64(count) and longer == long.size)


@inlined
def _list_at_once(word: np.uint64, base: np.uint64, places: U32, index: Int, usual: int) -> Int:
    list_lanes(word, base, places, index)
    return index + np.int64(count_ones(word))


@inlined
def _list_by_bits(word: np.uint64, base: np.uint64, places: U32, index: Int, usual: int) -> Int:
    # The first loop always runs its full count: a branch on the number of marks would be mispredicted at every other word,
    # which costs more than writing places that the next word overwrites.
    following = index + np.int64(count_ones(word))
    for i in range(usual):
        places[index + i] = base + trailing_zeros(word)
        word &= word - _1
    index += usual
    while word:
        places[index] = base + trailing_zeros(word)
        word &= word - _1
        index += 1
    return following


list_few = _list_at_once if HAS_BYTE_MOVES else _list_by_bits
"""Writes the places of a word's marks, each plus `base`, from `index` on. Returns the index after; `places` must have room for
`LANES` more. Fastest for words with at most `usual` marks."""


@compiled
def places_of_marks(words: U64, count: int, places: U32) -> Int:
    """Lists the places of the marks among the first `count` bits; returns their number. `places` must have room for `LANES`
    more."""
    index: Int = 0
    marked = places.size - LANES
    # With up to 64 / 24 = 2.7 marks a word on average, four are rarely exceeded; with up to 64 / 12 = 5.3, eight; with 64 / 6, 14.
    if marked * 24 < count:
        for at in range(0, count, 64):
            index = list_few(words[at >> 6] & below(count - at), np.uint64(at), places, index, 4)
    elif marked * 12 < count:
        for at in range(0, count, 64):
            index = list_few(words[at >> 6] & below(count - at), np.uint64(at), places, index, 8)
    else:
        for at in range(0, count, 64):
            index = list_few(words[at >> 6] & below(count - at), np.uint64(at), places, index, 14)
    return index


@compiled
def marks_of_places(places: U32, words: U64) -> None:
    """Sets the marks at `places` in `words`, all 0 before."""
    for i in range(places.size):
        at = np.uint64(places[i])
        words[at >> _6] |= _1 << (at & _63)


_PLAIN = np.uint64(16)  # magnitudes below it are symbols of their own (docs/delta-format.md)


@inlined
def _leading(value: np.uint64) -> Int:
    return np.int64(63) - np.int64(leading_zeros(value))


@compiled
def count_plain_bits(excess: Bits) -> Int:
    bits = np.int64(0)
    for i in range(excess.size):
        value = np.uint64(excess[i]) - _1
        if value >= _PLAIN:
            bits += _leading(value) - 1
    return bits


@compiled
def put_values(excess: Bits, symbols: U8, words: U64) -> None:
    """Writes the symbols and the plain bits; `words` must have room for `count_plain_bits` bits."""
    at: Int = 0
    for i in range(excess.size):
        value = np.uint64(excess[i]) - _1
        if value < _PLAIN:
            symbols[i] = value
            continue
        leading = _leading(value)
        next_bit = (value >> np.uint64(leading - 1)) & _1
        symbols[i] = np.uint64(8 + 2 * leading) + next_bit
        at = put(words, at, value & ((_1 << np.uint64(leading - 1)) - _1), leading - 1)


@compiled
def take_values(symbols: U8, words: U64, bits: int, excess: Bits) -> bool:
    """The inverse of `put_values`. False if the `bits` plain bits do not match the symbols, or a magnitude is too wide."""
    width = 8 * excess.itemsize
    most = (~_0 >> np.uint64(64 - width)) - _1
    at = np.int64(0)
    for i in range(symbols.size):
        value = np.uint64(symbols[i])
        if value >= _PLAIN:
            leading = np.int64(value >> _1) - 4
            if leading >= width or at + leading - 1 > bits:
                return False
            low = bits_at(words, at) & ((_1 << np.uint64(leading - 1)) - _1)
            value = (((value & _1) | np.uint64(2)) << np.uint64(leading - 1)) | low
            at += leading - 1
        if value >= most:
            return False
        excess[i] = value + _1
    return bool((at + 7) >> 3 == (bits + 7) >> 3)


NO_MARKS, AS_MARKS, AS_GAPS = 0, 1, 2  # the form of a set in a payload
GAP_SHARE = 1 / 6  # marks rarer than this are coded as gaps
_GAP_MEAN = 20.0  # mean of a gap's byte: k is chosen so that it is between this and twice as much
_SHIFT_MAX = 24  # a block has 2^24 elements, so no gap is longer
_HEAD = struct.Struct("<BBI")  # form, shift, number of marked places
_PLANE = struct.Struct("<BI")  # coding, length
COUNT = struct.Struct("<I")  # u32
_RAW, _ZSTD, _PAIRS = 0, 1, 2  # docs/delta-format.md: codings of a plane
PAIRED = 16
"""Values of which two go into a byte. In a plane of few values zstd finds short matches everywhere, which cost more than they save:
pairs take a third of the time and up to a sixth fewer bytes."""
_ZSTD_BYTES_MIN = 48  # below it a zstd frame's header outweighs what it saves
_WINDOW_MAX = 1 << 20  # what a decoder allocates for a hostile frame at most
_NOISE = (0.4, 0.6)  # with a share of marks between these, entropy coding gains nothing
# Only the entropy stage helps here: matching noise only hurts, so hardly any matches are searched (a tiny hash table).
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=18, hash_log=6, min_match=7, strategy=zstandard.STRATEGY_FAST, write_content_size=1
)


@compiled
def _pair(plane: U8, values: U8, index_of: U8, pairs: U8) -> bool:
    """Writes a plane as indices into its values, two to a byte. False if it has more than `PAIRED` values."""
    known = 0
    for i in range(pairs.size):
        byte = 0
        for at in range(2 * i, min(2 * i + 2, plane.size)):
            value = plane[np.uint64(at)]
            if index_of[value] == PAIRED:
                if known == PAIRED:
                    return False
                index_of[value], values[known] = known, value
                known += 1
            byte |= index_of[value] << (4 * (at & 1))
        pairs[i] = byte
    return True


def pair_parts(plane: U8, coder: Coder) -> list[bytes]:
    """Like `plane_parts`, for a plane that has few values."""
    values, index_of = np.zeros(PAIRED, np.uint8), np.full(256, PAIRED, np.uint8)
    pairs = np.empty(-(-plane.size // 2), np.uint8)
    if not _pair(plane, values, index_of, pairs):
        return plane_parts(plane, coder)
    inner = plane_parts(pairs, coder)
    return [_PLANE.pack(_PAIRS, PAIRED + sum(map(len, inner))), values.tobytes(), *inner]


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
        return layout.unpack(self.take(layout.size, what))

    def words(self, size: int, what: str) -> U64:
        return as_words(np.frombuffer(self.take(size, what), np.uint8))

    def plane(self, size: int, what: str, *, may_be_pairs: bool = True) -> U8:
        """The next plane, whose decoded size is known. `may_be_pairs`: False for pairs themselves."""
        coding, length = _PLANE.unpack(self._next(_PLANE.size, what))
        data: bytes | memoryview = self._next(length, what)
        if coding == _PAIRS and length >= PAIRED and may_be_pairs:
            inner = Reader(memoryview(data)[PAIRED:])
            pairs = inner.plane(-(-size // 2), what, may_be_pairs=False)
            values = np.frombuffer(data, np.uint8, PAIRED)
            inner.end()
            data = values[np.stack([pairs & 15, pairs >> 4], 1).reshape(-1)[:size]].tobytes()
        elif coding == _ZSTD:
            data = _from_zstd(self._zstd, data, size, what)
        elif coding != _RAW or length != size:
            raise DeltaFormatError(f"expected {what} of {size} bytes, raw or from zstd, got {length} (coding {coding})")
        if self._plain is not None:
            self._plain += [_PLANE.pack(_RAW, size), data]
        return np.frombuffer(data, np.uint8)

    def end(self) -> None:
        if self._at != len(self._payload):
            raise DeltaFormatError(f"expected {self._at} bytes, got {len(self._payload)}")


def plane_parts(plane: U8, coder: Coder | None) -> list[bytes]:
    """A plane's head and bytes; raw if there is no coder or raw is shorter."""
    data = plane.tobytes()
    shorter = None if coder is None or len(data) < _ZSTD_BYTES_MIN else coder.shorter(data)
    if shorter is None:
        return [_PLANE.pack(_RAW, len(data)), data]
    return [_PLANE.pack(_ZSTD, len(shorter)), shorter]


def as_words(data: U8) -> U64:
    out = np.zeros(-(-data.size // 8) + 2, np.uint64)
    out.view(np.uint8)[: data.size] = data
    return out


def is_even(marked: int, size: int) -> bool:
    return _NOISE[0] < marked / size < _NOISE[1]


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
        if self.words is not None:
            return self.words
        out = np.zeros(word_count(self.size), np.uint64)
        self.copy_to(out)
        return out

    def copy_to(self, words: U64) -> None:
        """Writes the marks into a run of bits, all 0 before."""
        if self.words is not None:
            words[:] = self.words
        elif self.places is not None:
            marks_of_places(self.places, words)

    def listed(self) -> U32:
        if self.words is not None:
            return listed(self.words, self.size, self.marked)
        return np.empty(0, np.uint32) if self.places is None else self.places

    def parts(self, coder: Coder | None) -> list[bytes]:
        """Encodes the set for `read_bit_set`; without a coder, without entropy coding."""
        if self.words is not None:
            plane = self.words.view(np.uint8)[: -(-self.size // 8)]
            is_noise = is_even(self.marked, self.size)
            return [_HEAD.pack(AS_MARKS, 0, self.marked), *plane_parts(plane, None if is_noise else coder)]
        if self.places is None:
            return [_HEAD.pack(NO_MARKS, 0, 0)]
        shift, out = _room(self.size, self.marked)
        longer = int(gaps_of_places(self.places, shift, out))
        quotients, low, long = out
        return [
            _HEAD.pack(AS_GAPS, shift, self.marked),
            COUNT.pack(longer),
            *plane_parts(quotients, coder),
            low.view(np.uint8)[: -(-self.marked * shift // 8)].tobytes(),
            long[:longer].tobytes(),
        ]


def listed(words: U64, size: int, marked: int) -> U32:
    out = np.empty(marked + LANES, np.uint32)
    places_of_marks(words, size, out)
    return out[:marked]


def _room(size: int, marked: int) -> tuple[int, tuple[U8, U64, U32]]:
    shift = min(_SHIFT_MAX, max(0, int(np.log2(max(1.0, (size / marked - 1) / _GAP_MEAN)))))
    long_max = min(marked, size // (LONG << shift) + 1)
    low = np.zeros(word_count(marked * shift), np.uint64)
    return shift, (np.empty(marked, np.uint8), low, np.empty(long_max, np.uint32))


def read_bit_set(reader: Reader, size: int, what: str) -> BitSet:
    """Reads the next set of marks among `size` bits."""
    form, shift, marked = reader.fields(_HEAD, what)
    if marked > size or (form == NO_MARKS) != (marked == 0):
        raise DeltaFormatError(f"expected at most {size} {what}, it claims {marked}")
    if form == NO_MARKS:
        return BitSet(size, 0)
    if form == AS_MARKS and shift == 0:
        words = np.zeros(word_count(size), np.uint64)
        byte_count = -(-size // 8)
        words.view(np.uint8)[:byte_count] = reader.plane(byte_count, what)
        if count_marks(words, size) != marked or count_marks(words, 8 * byte_count) != marked:
            raise DeltaFormatError(f"expected {marked} {what} of {size}, got others")
        return BitSet(size, marked, words=words)
    if form != AS_GAPS or shift > _SHIFT_MAX:
        raise DeltaFormatError(f"expected {what} as marks or gaps, got form {form}, shift {shift}")
    (longer,) = reader.fields(COUNT, what)
    if longer > marked:
        raise DeltaFormatError(f"expected at most {marked} long gaps, it claims {longer}")
    quotients = reader.plane(marked, what)
    low = reader.words(-(-marked * shift // 8), what)
    long = np.frombuffer(reader.take(4 * longer, what), "<u4").astype(np.uint32)
    places = np.empty(marked, np.uint32)
    if not places_of_gaps((quotients, low, long), shift, size, places):
        raise DeltaFormatError(
            f"expected {marked} {what} at gaps within {size} places, {longer} of them long; got others"
        )
    return BitSet(size, marked, places)


def value_parts(excess: Bits, coder: Coder | None) -> list[bytes]:
    """Encodes magnitudes above one for `read_values`."""
    symbols = np.empty(excess.size, np.uint8)
    count = int(count_plain_bits(excess))
    words = np.zeros(word_count(count), np.uint64)
    put_values(excess, symbols, words)
    size = -(-count // 8)
    return [*plane_parts(symbols, coder), COUNT.pack(size), words.view(np.uint8)[:size].tobytes()]


def read_values(reader: Reader, count: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
    """Reads the magnitudes minus one of `count` larger changes."""
    out = np.empty(count, dtype)
    symbols = reader.plane(count, "magnitudes")
    (size,) = reader.fields(COUNT, "magnitudes")
    words = reader.words(size, "magnitudes")
    if not take_values(symbols, words, 8 * size, out):
        raise DeltaFormatError(f"expected {count} magnitudes of {out.itemsize} bytes in {size} bytes")
    return out
