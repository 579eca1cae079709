"""Finding the changed elements again and putting them in place: the passes of the decoder, compiled.

Guarantees: every index written is within the block, whatever the streams hold; a stream that goes wrong is reported.
Leaves to others: the codes (bitstream.py, ranges.py), whether the result is right (its fingerprint).

Without classes the gaps alone say where the changes are. With them, elements of each class are counted, 64 at a time,
until the next change of that class is among them.
"""

from __future__ import annotations

import numpy as np

from echo2.broadcast.delta import ranges
from echo2.broadcast.delta.bitstream import I64, U8, U32, U64, Int, adapted, take_gap, take_larger, take_run
from echo2.broadcast.delta.elements import Bits
from echo2.broadcast.delta.fingerprint import ROW_MASK, ROW_SHIFT, row_coefficient
from echo2.broadcast.delta.jit import LANES, compiled, count_ones, inlined, octaves, prefetch, trailing_zeros
from echo2.broadcast.delta.scan import CLASS_COUNT, octaves_tail

_0 = np.uint64(0)
_1 = np.uint64(1)
_FOREVER = np.uint64(1 << 62)
PREFETCHED = 32  # changes between asking for a weight's cache line and using it


@compiled
def read_plain(words: U64, coders: tuple[U64, U64, U64], width: np.uint64, size: int, out: tuple[U32, Bits]) -> Int:
    """All changes of a block of `size` elements of class 1. Returns how many were found before anything was wrong.

    `coders` = readers, rice, larger magnitudes and changes. `out` = positions, steps.
    """
    readers, rice, counts = coders
    positions, moves = out
    data = words.view(np.uint8)
    position, end, mean, k = readers[1, 0], readers[1, 1], rice[1, 0], rice[1, 1]
    larger = np.int64(counts[0])
    run = np.int64(take_run(data, readers, rice)) if larger > 0 else np.int64(_FOREVER)
    at = np.int64(0)
    for done in range(positions.size):
        if position >= end:
            return done
        code, position = take_gap(data, position, k)
        position += _1
        mean, k = adapted(mean, k, code >> _1)
        at += np.int64(code >> _1)
        if at >= size:
            return done
        magnitude = _1
        if run <= 0:
            magnitude = take_larger(data, readers, width) if run == 0 else _0
            if magnitude == _0:
                return done
            larger -= 1
            run = np.int64(take_run(data, readers, rice)) if larger > 0 else np.int64(_FOREVER)
        else:
            run -= 1
        positions[done] = at
        moves[done] = _0 - magnitude if code & _1 else magnitude
        at += 1
    return positions.size if larger == 0 and position <= end else 0


@compiled
def begin_walk(words: U64, readers: U64, rice: U64, state: tuple[U64, U64, U64]) -> bool:
    """Reads each class's first gap. `state` = elements to pass before each class's next change, the sign of that
    change, changes of each class whose gap was not yet read."""
    data = words.view(np.uint8)
    for c in range(1, CLASS_COUNT):  # noqa: SIM110 - compiled code has no generators
        if not _next_gap(data, readers, rice, c, state):
            return False
    return True


@inlined
def _next_gap(data: U8, readers: U64, rice: U64, c: Int, state: tuple[U64, U64, U64]) -> bool:
    beyond, signs, waiting = state
    if waiting[c] == _0:
        beyond[c] = _FOREVER
        return True
    if readers[c, 0] >= readers[c, 1]:
        return False
    code, position = take_gap(data, readers[c, 0], rice[c, 1])
    gap = code >> _1
    rice[c, 0], rice[c, 1] = adapted(rice[c, 0], rice[c, 1], gap)
    readers[c, 0] = position + _1
    beyond[c] = gap
    signs[c] = code & _1
    waiting[c] -= _1
    return True


@inlined
def _select(word: np.uint64, rank: np.uint64) -> np.uint64:
    """The bit of `word` that has `rank` set bits below it, by halves; it has more than `rank` of them."""
    at = _0
    half = np.uint64(32)
    while half:
        below = count_ones((word >> at) & ((_1 << half) - _1))
        if below <= rank:
            rank -= below
            at += half
        half >>= _1
    return _1 << at


@inlined
def _mark(
    data: U8, readers: U64, rice: U64, masks: U64, state: tuple[U64, U64, U64], marks: U64
) -> bool:  # fmt: skip
    """Into `marks`, of 64 elements: those that change, and of these the ones with sign 1. False: a stream is wrong."""
    beyond, signs, _ = state
    changed, negative = _0, _0
    for c in range(1, CLASS_COUNT):
        rest = masks[c]
        left = count_ones(rest)
        while beyond[c] < left:
            bit = _select(rest, beyond[c])
            changed |= bit
            if signs[c]:
                negative |= bit
            rest &= ~(bit | (bit - _1))
            left -= beyond[c] + _1
            if not _next_gap(data, readers, rice, c, state):
                return False
        beyond[c] -= left
    marks[0], marks[1] = changed, negative
    return True


@compiled
def walk_classes(
    old: Bits, base: int, octave: tuple[np.uint64, np.uint64, np.uint64, U64], width: np.uint64, words: U64,
    coders: tuple[U64, U64, U64, U32], state: tuple[U64, U64, U64], out: tuple[U32, Bits, I64],
) -> bool:  # fmt: skip
    """Finds the changed elements of one segment. False: a stream is wrong.

    `octave` = shift and mask of the exponent, class base, ten words of working memory. `out` = positions, steps, how
    many so far (1).
    """
    shift, emask, lowest, work = octave
    readers, rice, coder, odds = coders
    positions, moves, done = out
    masks, marks = work[:CLASS_COUNT], work[CLASS_COUNT:]
    data = words.view(np.uint8)
    change_node = width << np.uint64(2)
    count = done[0]
    for start in range(0, old.size, LANES):
        if start + LANES <= old.size:
            octaves(old, start, shift, emask, lowest, masks)
        else:
            octaves_tail(old, start, shift, emask, lowest, masks)
        if not _mark(data, readers, rice, masks, state, marks):
            return False
        events = marks[0] | masks[0]
        while events:
            lane = trailing_zeros(events)
            events &= events - _1
            i = start + np.int64(lane)
            exponent = (np.uint64(old[i]) >> shift) & emask
            if exponent <= lowest:
                if not ranges.get_bit(data, coder, odds, exponent, change_node):
                    continue
                sign = ranges.get_plain(data, coder, _1)
            else:
                sign = (marks[1] >> lane) & _1
            if count >= positions.size:
                return False
            magnitude = ranges.get_magnitude(data, coder, odds, exponent, width)
            positions[count] = base + i
            moves[count] = _0 - magnitude if sign else magnitude
            count += 1
    done[0] = count
    return True


@compiled
def settle(old: Bits, base: int, positions: U32, moves: Bits, print_at: tuple[int, np.uint64, U64]) -> np.uint64:
    """Turns steps into new bits, in place. Returns what these add to the fingerprint.

    `print_at` = place of the segment in its tensor, the tensor's coefficients.
    """
    offset, seed, columns = print_at
    mask = ~_0 >> np.uint64(64 - 8 * old.itemsize)
    total, row_sum = _0, _0
    row: Int = -1
    ahead = positions.size - PREFETCHED
    for i in range(positions.size):
        if i < ahead:
            prefetch(old, np.int64(positions[i + PREFETCHED]) - base)
        within = np.int64(positions[i]) - base
        before = np.uint64(old[within])
        after = (before + np.uint64(moves[i])) & mask
        moves[i] = after
        element = offset + within
        if element >> ROW_SHIFT != row:
            total += row_sum * row_coefficient(seed, np.uint64(row))
            row, row_sum = element >> ROW_SHIFT, _0
        row_sum += columns[element & ROW_MASK] * (after - before)
    return total + row_sum * row_coefficient(seed, np.uint64(row))


@compiled
def add(live: Bits, base: int, positions: U32, moves: Bits, is_back: bool) -> None:
    """Adds steps to the live bits, or takes them away again."""
    ahead = positions.size - PREFETCHED
    for i in range(positions.size):
        if i < ahead:
            prefetch(live, np.int64(positions[i + PREFETCHED]) - base)
        at = np.int64(positions[i]) - base
        step = np.uint64(moves[i])
        live[at] = np.uint64(live[at]) + (_0 - step if is_back else step)


@compiled
def exchange(live: Bits, base: int, positions: U32, bits: Bits) -> None:
    """Swaps `bits` with `live` at the positions: what was live ends up in `bits` (so a second call undoes it)."""
    ahead = positions.size - PREFETCHED
    for i in range(positions.size):
        if i < ahead:
            prefetch(live, np.int64(positions[i + PREFETCHED]) - base)
        at = np.int64(positions[i]) - base
        before = live[at]
        live[at] = bits[i]
        bits[i] = before
