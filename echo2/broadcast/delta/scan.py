"""Finding changes and putting them back: the passes over whole blocks, compiled.

Guarantees: every index written is within the block. Leaves to others: the codes (bitstream.py).

Classes: the probability that a weight changes doubles with every octave that it is smaller, and both sides know the
old weights. An element's class is its old exponent, cut off at eight consecutive octaves. Eight byte-wide counters,
one a class, live in one machine word, so that counting costs a table look-up and an addition an element.
"""

from __future__ import annotations

import numpy as np

from echo2.broadcast.delta.bitstream import I64, U8, U32, U64, Int, unpack
from echo2.broadcast.delta.elements import Bits
from echo2.broadcast.delta.jit import compiled

CLASS_COUNT = 8
RING = 1024  # changes of a class that are unpacked at a time
PIECE = 1 << 15  # elements scanned at a time

_0 = np.uint64(0)
_1 = np.uint64(1)
_3 = np.uint64(3)
_127 = np.uint64(127)
_255 = np.uint64(255)
_GUARDS = np.uint64(0x8080808080808080)
_FOREVER = np.uint64(1 << 62)


def class_table(exponent_bits: int, base: int) -> U8:
    """Class of each exponent: 0 at `base` and below, one more an octave, cut off at the last class."""
    exponents = np.arange(1 << exponent_bits)
    return np.clip(exponents - base, 0, CLASS_COUNT - 1).astype(np.uint8)


def choose_class_base(old: Bits, exponent_shift: int, exponent_bits: int) -> int:
    """The first class's exponent, so that about three per cent of a sample of `old` lie above the last class's."""
    stride = max(1, old.size // 4096)
    mask = (1 << exponent_bits) - 1
    exponents = (old[::stride].astype(np.uint64) >> np.uint64(exponent_shift)) & np.uint64(mask)
    rising = np.sort(exponents)
    top = int(rising[(rising.size * 97) // 100])
    return max(0, min(255, top - CLASS_COUNT + 1))


@compiled
def scan_plain(old: Bits, new: Bits, base: int, since: I64, out: tuple[U32, U32, U8, U64]) -> int:
    """Changes of one piece, one class. `since[0]`: elements since the last change. Returns how many.

    `out` = positions in the block (`base` + index), gaps, classes (left as they are: 0), steps mod 2^64.
    """
    positions, gaps, _, steps = out
    count = 0
    last = -since[0] - 1
    size = old.size
    start = 0
    while start < size:
        stop = min(start + 32, size)
        differs = False
        for i in range(start, stop):
            differs |= old[i] != new[i]
        if differs:
            for i in range(start, stop):
                if old[i] != new[i]:
                    positions[count] = base + i
                    gaps[count] = i - last - 1
                    steps[count] = np.uint64(new[i]) - np.uint64(old[i])
                    last = i
                    count += 1
        start = stop
    since[0] = size - last - 1
    return count


@compiled
def scan_classes(
    old: Bits, new: Bits, base: int, since: I64, table: U8, shift: np.uint64, out: tuple[U32, U32, U8, U64]
) -> int:
    """As `scan_plain`, by exponent class. `since[c]`: elements of class c since its last change."""
    positions, gaps, classes, steps = out
    emask = np.uint64(table.size - 1)
    ones = np.empty(table.size, np.uint64)
    for exponent in range(table.size):
        ones[exponent] = _1 << (np.uint64(table[exponent]) << _3)
    count = 0
    size = old.size
    start = 0
    while start < size:
        stop = min(start + 240, size)
        passed = _0
        for i in range(start, stop):
            e = (np.uint64(old[i]) >> shift) & emask
            if old[i] != new[i]:
                c = np.int64(table[e])
                before = np.int64((passed >> (np.uint64(c) << _3)) & _255)
                positions[count] = base + i
                gaps[count] = since[c] + before
                classes[count] = c
                steps[count] = np.uint64(new[i]) - np.uint64(old[i])
                count += 1
                since[c] = -before - 1
            passed += ones[e]
        for k in range(8):
            since[k] += np.int64(passed & _255)
            passed >>= np.uint64(8)
        start = stop
    return count


@compiled
def place_plain(gaps: U32, steps: U64, count: int, at: Int, size: int, positions: U32, moves: Bits) -> Int:
    """Positions from gaps, the first at `at` or later. Returns the place after the last, -1 if one is over `size`."""
    for i in range(count):
        position = at + np.int64(gaps[i])
        if position >= size:
            return -1
        positions[i] = position
        moves[i] = steps[i]
        at = position + 1
    return at


@compiled
def walk_classes(
    old: Bits,
    base: int,
    table: U8,
    shift_width: tuple[np.uint64, np.uint64],
    words: U64,
    coder: tuple[U64, U64],
    state: tuple[U64, U64, U64, I64, U32, U64],
    out: tuple[U32, Bits, I64],
) -> bool:
    """Finds the changed elements of one segment by counting its elements by class. False: a stream ended early.

    `state` = packed countdowns (1), what exceeds a countdown (a class), the changes not yet unpacked (a class), ring
    fill and place (class, 2), ring of gaps, ring of steps. `out` = positions, steps, how many so far (1).
    A countdown holds its guard bit and up to 127 elements to pass; it fires when it falls below the guard.
    """
    shift, width = shift_width
    readers, rice = coder
    packed, beyond, _, ring, _, ring_steps = state
    positions, moves, done = out
    emask = np.uint64(table.size - 1)
    ones = np.empty(table.size, np.uint64)
    for exponent in range(table.size):
        ones[exponent] = _1 << (np.uint64(table[exponent]) << _3)
    countdown = packed[0]
    count = done[0]
    for i in range(old.size):
        e = (np.uint64(old[i]) >> shift) & emask
        countdown -= ones[e]
        if (countdown & _GUARDS) == _GUARDS:
            continue
        c = np.int64(table[e])
        if beyond[c] > _0:
            beyond[c] -= _1
        else:
            positions[count] = base + i
            moves[count] = ring_steps[c, ring[c, 1]]
            count += 1
            ring[c, 1] += 1
            if not _next_gap(words, readers, rice, c, width, state):
                return False
        ahead = min(beyond[c], _127)
        beyond[c] -= ahead
        field = np.uint64(c) << _3
        countdown = (countdown & ~(_255 << field)) | ((ahead | np.uint64(128)) << field)
    packed[0] = countdown
    done[0] = count
    return True


@compiled
def _next_gap(
    words: U64,
    readers: U64,
    rice: U64,
    c: Int,
    width: np.uint64,
    state: tuple[U64, U64, U64, I64, U32, U64],
) -> bool:
    """Puts the gap before class `c`'s next change into `beyond[c]`, unpacking more changes as needed."""
    _, beyond, waiting, ring, ring_gaps, ring_steps = state
    if ring[c, 1] == ring[c, 0]:
        more = min(waiting[c], np.uint64(ring_gaps.shape[1]))
        if more == _0:
            beyond[c] = _FOREVER
            return True
        if not unpack(words, readers, rice, c, width, ring_gaps[c], ring_steps[c], np.int64(more)):
            return False
        waiting[c] -= more
        ring[c, 0] = np.int64(more)
        ring[c, 1] = 0
    beyond[c] = np.uint64(ring_gaps[c, ring[c, 1]])
    return True


@compiled
def begin_walk(
    words: U64,
    coder: tuple[U64, U64],
    width: np.uint64,
    state: tuple[U64, U64, U64, I64, U32, U64],
) -> bool:
    """Sets each class's first countdown."""
    packed, beyond, _, _, _, _ = state
    readers, rice = coder
    countdown = _0
    for c in range(8):
        if not _next_gap(words, readers, rice, c, width, state):
            return False
        ahead = min(beyond[c], _127)
        beyond[c] -= ahead
        countdown |= (ahead | np.uint64(128)) << (np.uint64(c) << _3)
    packed[0] = countdown
    return True


@compiled
def add_steps(old: Bits, base: int, positions: U32, moves: Bits) -> None:
    """Turns steps into new bits, in place: `moves[i] += old[positions[i] - base]`, modulo the element's width."""
    for i in range(positions.size):
        moves[i] += old[np.int64(positions[i]) - base]


@compiled
def exchange(live: Bits, base: int, positions: U32, bits: Bits) -> None:
    """Swaps `bits` with `live` at the positions: what was live ends up in `bits` (so a second call undoes it)."""
    for i in range(positions.size):
        at = np.int64(positions[i]) - base
        before = live[at]
        live[at] = bits[i]
        bits[i] = before
