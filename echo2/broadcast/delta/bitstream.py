"""The entropy stage: adaptive Golomb-Rice codes in bit streams, compiled.

A changed element is coded as its gap (how many unchanged elements of its class precede it), the sign of its step,
and its magnitude. Magnitude 1 costs nothing by itself: the runs of ones between larger magnitudes are coded instead,
and each larger magnitude (less 2) after its run. Gaps of a rare event are geometrically distributed, for which
Golomb-Rice codes are within about one per cent of the entropy; the parameter follows a running mean, so a stretch of
weights that changes more or less than the rest costs little.

Guarantees: a reader never reads past the words that it was given and reports streams that end too early. Leaves to
others: which class an element belongs to (scan.py), the container (block.py).

Legend: `writers[stream]` = accumulator, bits in it, next word, words left in its page. `rice[state]` = 32 x running
mean, parameter k. `readers[class]` = gap bit position, its end, escape bit position, its end, ones before the next
escape, escapes left. Class c owns streams 2c (gaps and signs) and 2c + 1 (runs and magnitudes) and states 3c..3c+2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echo2.broadcast.delta.jit import compiled, inlined, trailing_zeros

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Int = int | np.int64

PAGE_WORDS = 512
GAP_BITS = np.uint64(32)
_PAGE = np.uint64(PAGE_WORDS)
_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_5 = np.uint64(5)
_6 = np.uint64(6)
_16 = np.uint64(16)
_63 = np.uint64(63)
_64 = np.uint64(64)
_133 = np.uint64(133)
_K_MAX = np.uint64(38)
_UNARY_MAX = np.uint64(24)
_VALUE_CAP = np.uint64(1 << 40)
_FOREVER = np.uint64(1 << 62)
_ONES24 = np.uint64((1 << 24) - 1)

RICE_START = (32 * 16, 3)  # a mean of 16; adapts within some thirty symbols


def new_rice_states(class_count: Int) -> U64:
    """Fresh running means for gaps, runs and magnitudes of each class."""
    states = np.empty((3 * class_count, 2), np.uint64)
    states[:] = RICE_START
    return states


@inlined
def _adapt(rice: U64, state: Int, value: np.uint64) -> None:
    """Moves the running mean; k changes where the mean crosses the point at which the next code is shorter."""
    mean = rice[state, 0]
    mean = mean - (mean >> _5) + min(value, _VALUE_CAP)
    k = rice[state, 1]
    while k < _K_MAX and mean > ((_133 << k) >> _1) - _16:
        k += _1
    while k > _0 and mean <= ((_133 << (k - _1)) >> _1) - _16:
        k -= _1
    rice[state, 0] = mean
    rice[state, 1] = k


@inlined
def _put(arena: U64, writers: U64, pages: U8, used: I64, stream: Int, value: np.uint64, count: np.uint64) -> bool:
    """Appends the low `count` (1 to 64) bits of `value`, whose other bits are 0. False: the arena is full."""
    filled = writers[stream, 1]
    word = writers[stream, 0] | (value << filled)
    filled += count
    if filled >= _64:
        if writers[stream, 3] == _0:
            page = used[0]
            if page >= pages.size:
                return False
            used[0] = page + 1
            pages[page] = stream
            writers[stream, 2] = np.uint64(page) * _PAGE
            writers[stream, 3] = _PAGE
        arena[writers[stream, 2]] = word
        writers[stream, 2] += _1
        writers[stream, 3] -= _1
        filled -= _64
        written = count - filled
        word = value >> written if written < _64 else _0
    writers[stream, 0] = word
    writers[stream, 1] = filled
    return True


@inlined
def _put_rice(
    arena: U64, writers: U64, pages: U8, used: I64, stream: Int, value: np.uint64, k: np.uint64, raw_bits: np.uint64
) -> bool:
    quotient = value >> k
    if quotient < _UNARY_MAX:
        word = ((_1 << quotient) - _1) | ((value & ((_1 << k) - _1)) << (quotient + _1))
        return _put(arena, writers, pages, used, stream, word, quotient + _1 + k)
    if not _put(arena, writers, pages, used, stream, _ONES24, _UNARY_MAX):
        return False
    return _put(arena, writers, pages, used, stream, value, raw_bits)


@compiled
def pack(
    gaps: U32, classes: U8, steps: U64, count: int, width: np.uint64, arena: U64, tables: tuple[U64, U64, U8, I64, U64]
) -> bool:
    """Appends `count` changes, in order of position, to the streams of their classes. False: the arena is full.

    `tables` = writers, rice, pages, used, counts; `counts[class]` = changes, escapes, ones since the last escape.
    """
    writers, rice, pages, used, counts = tables
    mask = (_1 << (width - _1)) + ((_1 << (width - _1)) - _1)
    half = _1 << (width - _1)
    for i in range(count):
        c = np.int64(classes[i])
        gap = np.uint64(gaps[i])
        step = steps[i] & mask
        sign = _1 if step >= half else _0
        size = (_0 - step) & mask if sign else step
        if not _put_rice(arena, writers, pages, used, 2 * c, gap, rice[3 * c, 1], GAP_BITS):
            return False
        if not _put(arena, writers, pages, used, 2 * c, sign, _1):
            return False
        _adapt(rice, 3 * c, gap)
        counts[c, 0] += _1
        if size == _1:
            counts[c, 2] += _1
            continue
        run = counts[c, 2]
        if not _put_rice(arena, writers, pages, used, 2 * c + 1, run, rice[3 * c + 1, 1], GAP_BITS):
            return False
        _adapt(rice, 3 * c + 1, run)
        rest = size - _2
        if not _put_rice(arena, writers, pages, used, 2 * c + 1, rest, rice[3 * c + 2, 1], width):
            return False
        _adapt(rice, 3 * c + 2, rest)
        counts[c, 1] += _1
        counts[c, 2] = _0
    return True


@compiled
def collect(arena: U64, writers: U64, pages: U8, used: int, out: U64, lengths: I64) -> Int:
    """Joins each stream's pages in `out` (zeroed), streams following one another byte by byte.

    Returns the bytes written and leaves each stream's byte length in `lengths`; -1 if `out` is too short.
    """
    source = arena.view(np.uint8)
    target = out.view(np.uint8)
    at: Int = 0
    for stream in range(writers.shape[0]):
        begin = at
        last = -1
        for page in range(used):
            if pages[page] == stream:
                last = page
        for page in range(used):
            if pages[page] != stream:
                continue
            words = np.int64(PAGE_WORDS)
            if page == last:
                words -= np.int64(writers[stream, 3])
            if at + words * 8 > target.size:
                return -1
            first = page * PAGE_WORDS * 8
            target[at : at + words * 8] = source[first : first + words * 8]
            at += words * 8
        rest = np.int64((writers[stream, 1] + np.uint64(7)) >> _3)
        if at + rest > target.size:
            return -1
        word = writers[stream, 0]
        for _ in range(rest):
            target[at] = np.uint8(word & np.uint64(255))
            word >>= np.uint64(8)
            at += 1
        lengths[stream] = at - begin
    return at


@inlined
def _peek(words: U64, position: np.uint64) -> np.uint64:
    index = position >> _6
    shift = position & _63
    word: np.uint64 = words[index] >> shift
    if shift:
        word |= words[index + _1] << (_64 - shift)
    return word


@inlined
def _low_bits(word: np.uint64, count: np.uint64) -> np.uint64:
    return word if count >= _64 else word & ((_1 << count) - _1)


@inlined
def _get_rice(words: U64, position: np.uint64, k: np.uint64, raw_bits: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The value at `position` and the position after it."""
    word = _peek(words, position)
    quotient = trailing_zeros(~word)
    if quotient < _UNARY_MAX:
        value = (quotient << k) | ((word >> (quotient + _1)) & ((_1 << k) - _1))
        return value, position + quotient + _1 + k
    return _low_bits(_peek(words, position + _UNARY_MAX), raw_bits), position + _UNARY_MAX + raw_bits


@inlined
def _next_escape(words: U64, reader: U64, rice: U64, c: Int, at_start: bool, width: np.uint64) -> np.uint64:
    """The magnitude of the escape that is due (unless `at_start`), and the run before the next one."""
    size = _0
    if not at_start:
        rest, reader[2] = _get_rice(words, reader[2], rice[3 * c + 2, 1], width)
        _adapt(rice, 3 * c + 2, rest)
        size = rest + _2
        reader[5] -= _1
    if reader[5] > _0 and reader[2] < reader[3]:
        reader[4], reader[2] = _get_rice(words, reader[2], rice[3 * c + 1, 1], GAP_BITS)
        _adapt(rice, 3 * c + 1, reader[4])
    else:
        reader[4] = _FOREVER
    return size


@compiled
def start_class(words: U64, readers: U64, rice: U64, c: Int, width: np.uint64) -> None:
    """Reads the first run of ones of class `c`."""
    _next_escape(words, readers[c], rice, c, True, width)


@compiled
def unpack(words: U64, readers: U64, rice: U64, c: Int, width: np.uint64, gaps: U32, steps: U64, count: Int) -> bool:
    """The next `count` changes of class `c`. False: a stream ended before them."""
    reader = readers[c]
    mask = (_1 << (width - _1)) + ((_1 << (width - _1)) - _1)
    position = reader[0]
    end = reader[1]
    for i in range(count):
        if position >= end or reader[2] > reader[3]:
            return False
        gap, position = _get_rice(words, position, rice[3 * c, 1], GAP_BITS)
        _adapt(rice, 3 * c, gap)
        if position >= end:
            return False
        sign = _peek(words, position) & _1
        position += _1
        size = _1
        if reader[4] == _0:
            size = _next_escape(words, reader, rice, c, False, width)
        else:
            reader[4] -= _1
        gaps[i] = gap
        steps[i] = (_0 - size) & mask if sign else size & mask
    reader[0] = position
    return bool(reader[2] <= reader[3])
