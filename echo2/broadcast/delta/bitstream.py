"""Gap streams: adaptive Golomb-Rice codes in bit streams, compiled.

A changed element is coded as its gap (how many unchanged elements of its class precede it) and the sign of its step;
the step's magnitude goes to the range coder (ranges.py). Gaps of a rare event are geometrically distributed, for which
Golomb-Rice codes are within about one per cent of the entropy; the parameter follows a running mean, so a stretch of
weights that changes more or less than the rest costs little. Without exponent classes, magnitudes go to a second such
stream instead: as the run of magnitudes of one before each larger one, and that one in a gamma code.

Guarantees: a reader never reads past the words that it was given and reports streams that end too early. Leaves to
others: which class an element belongs to (scan.py), the container (block.py).

Legend: `writers[stream]` = accumulator, bits in it, next word, words left in its page. `rice[class]` = 32 x running
mean, parameter k. `readers[class]` = bit position, end. Class c owns stream c; stream 0 holds the range coder's bytes or,
without classes, the larger magnitudes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echo2.broadcast.delta.jit import compiled, inlined, load_word, trailing_zeros

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U16 = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Int = int | np.int64

PAGE_WORDS = 512
GAP_BITS = np.uint64(32)
_PAGE = np.uint64(PAGE_WORDS)
_0 = np.uint64(0)
_1 = np.uint64(1)
_3 = np.uint64(3)
_5 = np.uint64(5)
_7 = np.uint64(7)
_16 = np.uint64(16)
_32 = np.uint64(32)
_56 = np.uint64(56)
_64 = np.uint64(64)
_133 = np.uint64(133)
_K_MAX = np.uint64(30)
_UNARY_MAX = np.uint64(24)
_ONES24 = np.uint64((1 << 24) - 1)

RICE_START = (32 * 16, 3)  # a mean of 16; adapts within some thirty symbols


def new_rice_states(class_count: int) -> U64:
    """Fresh running means of each class's gaps."""
    states = np.empty((class_count, 2), np.uint64)
    states[:] = RICE_START
    return states


@inlined
def adapted(mean: np.uint64, k: np.uint64, value: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The running mean after `value`; k changes where the mean crosses the point at which the next code is shorter."""
    mean = mean - (mean >> _5) + value
    while k < _K_MAX and mean > ((_133 << k) >> _1) - _16:
        k += _1
    while k > _0 and mean <= ((_133 << (k - _1)) >> _1) - _16:
        k -= _1
    return mean, k


@inlined
def put_word(arena: U64, writers: U64, pages: U8, used: I64, stream: Int, word: np.uint64) -> bool:
    """Appends a full word to a stream's page, or to a new one. False: the arena is full."""
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
    return True


@inlined
def put(arena: U64, writers: U64, pages: U8, used: I64, stream: Int, value: np.uint64, count: np.uint64) -> bool:
    """Appends the low `count` (1 to 64) bits of `value`, whose other bits are 0. False: the arena is full."""
    filled = writers[stream, 1]
    word = writers[stream, 0] | (value << filled)
    filled += count
    if filled >= _64:
        if not put_word(arena, writers, pages, used, stream, word):
            return False
        filled -= _64
        written = count - filled
        word = value >> written if written < _64 else _0
    writers[stream, 0] = word
    writers[stream, 1] = filled
    return True


@inlined
def gap_code(gap: np.uint64, k: np.uint64) -> tuple[np.uint64, np.uint64]:
    """A gap's code and its length, at most 56 bits."""
    quotient = gap >> k
    if quotient < _UNARY_MAX:
        return ((_1 << quotient) - _1) | ((gap & ((_1 << k) - _1)) << (quotient + _1)), quotient + _1 + k
    return _ONES24 | (gap << _UNARY_MAX), _UNARY_MAX + GAP_BITS


@inlined
def put_gap(arena: U64, writers: U64, pages: U8, used: I64, c: Int, gap: np.uint64, sign: np.uint64, rice: U64) -> bool:
    """Appends a gap and a sign to the stream of class `c`. False: the arena is full."""
    code, size = gap_code(gap, rice[c, 1])
    rice[c, 0], rice[c, 1] = adapted(rice[c, 0], rice[c, 1], gap)
    return put(arena, writers, pages, used, c, code | (sign << size), size + _1)


@inlined
def put_larger(
    arena: U64, writers: U64, pages: U8, used: I64, rice: U64, run: np.uint64, magnitude: np.uint64
) -> bool:  # fmt: skip
    """Appends to stream 0 a magnitude of two or more and the run of ones before it. False: the arena is full."""
    code, size = gap_code(run, rice[0, 1])
    rice[0, 0], rice[0, 1] = adapted(rice[0, 0], rice[0, 1], run)
    if not put(arena, writers, pages, used, 0, code, size):
        return False
    below = _0
    while (magnitude - _1) >> (below + _1) > _0:
        below += _1
    if not put(arena, writers, pages, used, 0, (_1 << below) - _1, below + _1):
        return False
    if below == _0:
        return True
    return put(arena, writers, pages, used, 0, (magnitude - _1) - (_1 << below), below)


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
            for i in range(words * 8):
                target[at + i] = source[first + i]
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
def peek(data: U8, position: np.uint64) -> np.uint64:
    """The next bits of a stream, 57 of them or more; `data` goes on for eight bytes behind it."""
    return load_word(data, position >> _3) >> (position & _7)


@inlined
def take_gap(data: U8, position: np.uint64, k: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Twice the gap that is coded at `position`, plus the bit behind it; and the position of that bit."""
    word = peek(data, position)
    quotient = trailing_zeros(~word)
    if quotient < _UNARY_MAX:
        word >>= quotient + _1
        rest = word & ((_1 << k) - _1)
        return (((quotient << k) | rest) << _1) | ((word >> k) & _1), position + quotient + _1 + k
    word >>= _UNARY_MAX
    return ((word & ((_1 << GAP_BITS) - _1)) << _1) | ((word >> GAP_BITS) & _1), position + _UNARY_MAX + GAP_BITS


@inlined
def take_run(data: U8, readers: U64, rice: U64) -> Int:
    """The next run of stream 0; -1 if the stream ended before it."""
    if readers[0, 0] >= readers[0, 1]:
        return -1
    code, readers[0, 0] = take_gap(data, readers[0, 0], rice[0, 1])
    rice[0, 0], rice[0, 1] = adapted(rice[0, 0], rice[0, 1], code >> _1)
    return np.int64(code >> _1)


@inlined
def take_larger(data: U8, readers: U64, width: np.uint64) -> np.uint64:
    """The next magnitude of stream 0, two or more; 0 if the stream ended or it is wider than an element."""
    position = readers[0, 0]
    below = trailing_zeros(~peek(data, position))
    if position >= readers[0, 1] or below >= width or below > _56:
        below = _long_unary(data, position, readers[0, 1], width)
        if below >= width:
            return _0
    position += below + _1
    low = min(below, _32)
    rest = peek(data, position) & ((_1 << low) - _1)
    if below > _32:
        rest |= (peek(data, position + _32) & ((_1 << (below - _32)) - _1)) << _32
    readers[0, 0] = position + below
    return ((_1 << below) | rest) + _1 if readers[0, 0] <= readers[0, 1] else _0


@compiled
def _long_unary(data: U8, position: np.uint64, end: np.uint64, width: np.uint64) -> np.uint64:
    """How many ones stand before the next zero; `width` if these are too many or the stream ends."""
    count = _0
    while count < width and position + count < end:
        if peek(data, position + count) & _1 == _0:
            return count
        count += _1
    return width
