"""Gap streams: adaptive Golomb-Rice codes in bit streams, compiled.

A changed element is coded as its gap (how many unchanged elements of its class precede it) and the sign of its step;
the step's magnitude goes to the range coder (ranges.py). Gaps of a rare event are geometrically distributed, for which
Golomb-Rice codes are within about one per cent of the entropy; the parameter follows a running mean, so a stretch of
weights that changes more or less than the rest costs little.

Guarantees: a reader never reads past the words that it was given and reports streams that end too early. Leaves to
others: which class an element belongs to (scan.py), the container (block.py).

Legend: `writers[stream]` = accumulator, bits in it, next word, words left in its page. `rice[class]` = 32 x running
mean, parameter k. `readers[class]` = bit position, end. Class c owns stream c; class 0 is coded by the range coder
alone, whose bytes are stream 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echo2.broadcast.delta.jit import compiled, inlined, trailing_zeros

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
_6 = np.uint64(6)
_16 = np.uint64(16)
_63 = np.uint64(63)
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
def _adapted(mean: np.uint64, k: np.uint64, value: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The running mean after `value`; k changes where the mean crosses the point at which the next code is shorter."""
    mean = mean - (mean >> _5) + value
    while k < _K_MAX and mean > ((_133 << k) >> _1) - _16:
        k += _1
    while k > _0 and mean <= ((_133 << (k - _1)) >> _1) - _16:
        k -= _1
    return mean, k


@inlined
def put(arena: U64, writers: U64, pages: U8, used: I64, stream: Int, value: np.uint64, count: np.uint64) -> bool:
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
def put_gap(arena: U64, writers: U64, pages: U8, used: I64, c: Int, gap: np.uint64, sign: np.uint64, rice: U64) -> bool:
    """Appends a gap and a sign to the stream of class `c`. False: the arena is full."""
    k = rice[c, 1]
    quotient = gap >> k
    if quotient < _UNARY_MAX:
        word = ((_1 << quotient) - _1) | ((gap & ((_1 << k) - _1)) << (quotient + _1))
        size = quotient + _1 + k
    else:
        if not put(arena, writers, pages, used, c, _ONES24, _UNARY_MAX):
            return False
        word, size = gap, GAP_BITS
    rice[c, 0], rice[c, 1] = _adapted(rice[c, 0], k, gap)
    return put(arena, writers, pages, used, c, word | (sign << size), size + _1)


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
def _peek(words: U64, position: np.uint64) -> np.uint64:
    index = position >> _6
    shift = position & _63
    word: np.uint64 = words[index] >> shift
    if shift:
        word |= words[index + _1] << (_64 - shift)
    return word


@compiled
def unpack(words: U64, readers: U64, rice: U64, c: Int, signed_gaps: U64, count: Int) -> bool:
    """The next `count` gaps of class `c`, each as 2 x gap + sign. False: the stream ended before them.

    A code may end behind its stream's end only in a damaged payload; `words` has three spare words for that.
    """
    position = readers[c, 0]
    end = readers[c, 1]
    mean = rice[c, 0]
    k = rice[c, 1]
    for i in range(count):
        if position >= end:
            return False
        word = _peek(words, position)
        quotient = trailing_zeros(~word)
        if quotient < _UNARY_MAX:
            word >>= quotient + _1
            gap = (quotient << k) | (word & ((_1 << k) - _1))
            sign = (word >> k) & _1
            position += quotient + _1 + k + _1
        else:
            word = _peek(words, position + _UNARY_MAX)
            gap = word & ((_1 << GAP_BITS) - _1)
            sign = (word >> GAP_BITS) & _1
            position += _UNARY_MAX + GAP_BITS + _1
        mean, k = _adapted(mean, k, gap)
        signed_gaps[i] = (gap << _1) | sign
    readers[c, 0] = position
    rice[c, 0] = mean
    rice[c, 1] = k
    return bool(position <= end)
