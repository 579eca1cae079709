"""Finding changes and putting them back: the passes over whole blocks, compiled.

Guarantees: every index written is within the block. Leaves to others: the codes (bitstream.py, ranges.py).

Classes: the probability that a weight changes doubles with every octave that it is smaller, and both sides know the
old weights. An element's class is its old exponent, cut off at eight consecutive octaves. Class 0, the smallest
weights, change so often that each of them is coded by a decision; in the others the gaps between changes are coded.
Eight byte-wide counters, one a class, live in one machine word, so that counting costs a table look-up and an addition
an element. The `fast` setting has class 1 alone.
"""

from __future__ import annotations

import numpy as np

from echo2.broadcast.delta import ranges
from echo2.broadcast.delta.bitstream import I64, U8, U16, U32, U64, Int, put_gap, unpack
from echo2.broadcast.delta.elements import Bits
from echo2.broadcast.delta.jit import compiled, load_word, trailing_zeros

CLASS_COUNT = 8
PLAIN_CLASS_COUNT = 2
RING = 1024  # gaps of a class that are unpacked at a time
PIECE = 1 << 15  # elements scanned at a time
SAMPLE = 1 << 15  # elements from which the classes are chosen
SPILL = 240  # elements counted before the byte-wide counters are emptied
OFTEN = 0.25  # elements that change more often than this are coded by a decision each

_0 = np.uint64(0)
_1 = np.uint64(1)
_3 = np.uint64(3)
_8 = np.uint64(8)
_127 = np.uint64(127)
_128 = np.uint64(128)
_255 = np.uint64(255)
_GUARDS = np.uint64(0x8080808080808080)
_FOREVER = np.uint64(1 << 62)
_PLAIN_TABLE = np.ones(1, np.uint8)


def class_table(exponent_bits: int, base: int) -> U8:
    """Class of each exponent: 0 at `base` and below, one more an octave, cut off at the last class."""
    exponents = np.arange(1 << exponent_bits)
    return np.clip(exponents - base, 0, CLASS_COUNT - 1).astype(np.uint8)


def plain_table() -> U8:
    """The table without exponents: everything is of class 1."""
    return _PLAIN_TABLE


def choose_class_base(old: Bits, new: Bits, exponent_shift: int, exponent_bits: int) -> int:
    """The exponent at and below which elements are of class 0, from a sample.

    High enough that at most about three per cent of the elements lie above the last class's octave, and that no class
    but 0 changes more often than `OFTEN`.
    """
    stride = max(1, old.size // SAMPLE)
    return choose_class_base_of_sample(old[::stride], new[::stride], exponent_shift, exponent_bits)


def choose_class_base_of_sample(old: Bits, new: Bits, exponent_shift: int, exponent_bits: int) -> int:
    """`choose_class_base` once the sample is drawn."""
    mask = (1 << exponent_bits) - 1
    exponents = ((old.astype(np.uint64) >> np.uint64(exponent_shift)) & np.uint64(mask)).astype(np.int64)
    counts = np.bincount(exponents, minlength=mask + 1)
    changed = np.bincount(exponents[old != new], minlength=mask + 1)
    top = int(np.searchsorted(counts.cumsum(), 0.97 * exponents.size))
    often = np.flatnonzero((changed > OFTEN * counts) & (counts >= 16))
    highest_often = int(often[-1]) if often.size else 0
    return min(255, max(0, top - CLASS_COUNT + 1, highest_often))


@compiled
def scan_plain(old: Bits, new: Bits, base: int, since: I64, out: tuple[U32, U32, U16, U64]) -> int:
    """Changes of one piece, all of class 1. `since[1]`: elements since the last change. Returns how many.

    `out` = positions in the block (`base` + index), gaps, contexts (left as they are: 0), steps mod 2^64.
    """
    positions, gaps, _, steps = out
    lanes = 8 // old.itemsize
    lane_shift = trailing_zeros(np.uint64(8 * old.itemsize))
    lane_mask = ~_0 >> np.uint64(64 - 8 * old.itemsize)
    count = 0
    last = -since[1] - 1
    size = old.size
    whole = size - size % lanes
    for start in range(0, whole, lanes):
        differs = load_word(old, start) ^ load_word(new, start)
        while differs:
            lane = trailing_zeros(differs) >> lane_shift
            differs &= ~(lane_mask << (lane << lane_shift))
            i = start + np.int64(lane)
            positions[count] = base + i
            gaps[count] = i - last - 1
            steps[count] = np.uint64(new[i]) - np.uint64(old[i])
            last = i
            count += 1
    for j in range(whole, size):
        if old[j] != new[j]:
            positions[count] = base + j
            gaps[count] = j - last - 1
            steps[count] = np.uint64(new[j]) - np.uint64(old[j])
            last = np.int64(j)
            count += 1
    since[1] = size - last - 1
    return count


def class_counters(table: U8) -> U64:
    """What an element of each exponent adds to the packed counters: one in its class's byte."""
    return np.uint64(1) << (table.astype(np.uint64) << np.uint64(3))


@compiled
def scan_classes(
    old: Bits,
    new: Bits,
    base: int,
    since: I64,
    tables: tuple[U8, U64],
    shift: np.uint64,
    out: tuple[U32, U32, U16, U64],
) -> int:
    """As `scan_plain`, by exponent class; of class 0 every element is reported, changed or not.

    `since[c]`: elements of class c since its last change. Contexts are the old exponents. `tables` = class_table and
    class_counters of it.
    """
    positions, gaps, contexts, steps = out
    table, ones = tables
    emask = np.uint64(table.size - 1)
    count = 0
    for start in range(0, old.size, SPILL):
        before = old[start : start + SPILL]
        after = new[start : start + SPILL]
        passed = _0
        for i in range(before.size):
            e = (np.uint64(before[i]) >> shift) & emask
            one = ones[e]
            if before[i] != after[i] or one == _1:
                c = np.int64(table[e])
                field = np.int64((passed >> (np.uint64(c) << _3)) & _255)
                positions[count] = base + start + i
                gaps[count] = since[c] + field
                contexts[count] = e
                steps[count] = np.uint64(after[i]) - np.uint64(before[i])
                count += 1
                since[c] = -field - 1
            passed += one
        for k in range(CLASS_COUNT):
            since[k] += np.int64(passed & _255)
            passed >>= _8
    return count


@compiled
def pack(
    changes: tuple[U32, U32, U16, U64], count: int, table: U8, width: np.uint64,
    arena: U64, tables: tuple[U64, U64, U8, I64, U64, U32, U64],
) -> bool:  # fmt: skip
    """Codes `count` elements that a scan reported. False: the arena is full.

    `tables` = writers, rice, pages, used, range coder, odds, changes by class (counted here).
    """
    _, gaps, contexts, steps = changes
    writers, rice, pages, used, coder, odds, counts = tables
    half = _1 << (width - _1)
    mask = half + (half - _1)
    change_node = width << np.uint64(2)
    for i in range(count):
        context = np.uint64(contexts[i])
        c = np.int64(table[context])
        step = steps[i] & mask
        sign = _1 if step >= half else _0
        if c:
            if not put_gap(arena, writers, pages, used, c, np.uint64(gaps[i]), sign, rice):
                return False
        else:
            changed = _1 if step else _0
            if not ranges.put_bit(arena, writers, pages, used, coder, odds, (context, change_node), changed):
                return False
            if not changed:
                continue
            if not ranges.put_sign(arena, writers, pages, used, coder, sign):
                return False
        counts[c] += _1
        size = (_0 - step) & mask if sign else step
        if not ranges.put_magnitude(arena, writers, pages, used, coder, odds, (context, width), size):
            return False
    return True


@compiled
def read_plain(
    words: U64, coders: tuple[U64, U64, U64, U32], width: np.uint64, size: int, ring: U64, out: tuple[U32, Bits]
) -> Int:
    """All changes of a block of `size` elements of class 1. Returns how many were found before anything was wrong.

    `coders` = readers, rice, range coder, odds. `out` = positions, steps.
    """
    readers, rice, coder, odds = coders
    positions, moves = out
    data = words.view(np.uint8)
    at = np.int64(0)
    done = 0
    while done < positions.size:
        count = min(ring.size, positions.size - done)
        if not unpack(words, readers, rice, 1, ring, count):
            return done
        for i in range(count):
            at += np.int64(ring[i] >> _1)
            if at >= size:
                return done
            positions[done] = at
            magnitude = ranges.get_magnitude(data, coder, odds, _0, width)
            moves[done] = _0 - magnitude if ring[i] & _1 else magnitude
            at += 1
            done += 1
    return done


@compiled
def walk_classes(
    old: Bits, base: int, tables: tuple[U8, U64], shift_width: tuple[np.uint64, np.uint64],
    words: U64, coders: tuple[U64, U64, U64, U32], state: tuple[U64, U64, U64, I64, U64], out: tuple[U32, Bits, I64],
) -> bool:  # fmt: skip
    """Finds the changed elements of one segment by counting its elements by class. False: a stream is wrong.

    `state` = packed countdowns (1), what exceeds a countdown (a class), the changes not yet unpacked (a class), ring
    fill and place (class, 2), ring of gaps and signs. `out` = positions, steps, how many so far (1).
    A countdown holds its guard bit and up to 127 elements to pass; it fires when it falls below the guard. That of
    class 0 has nothing to pass and fires at each of its elements.
    """
    table, ones = tables
    shift, width = shift_width
    readers, rice, coder, odds = coders
    packed, beyond, _, ring, ring_gaps = state
    positions, moves, done = out
    data = words.view(np.uint8)
    emask = np.uint64(table.size - 1)
    change_node = width << np.uint64(2)
    countdown = packed[0]
    count = done[0]
    for i in range(old.size):
        e = (np.uint64(old[i]) >> shift) & emask
        countdown -= ones[e]
        if (countdown & _GUARDS) == _GUARDS:
            continue
        c = np.int64(table[e])
        if c:
            changed = beyond[c] == _0
            sign = ring_gaps[c, ring[c, 1]] & _1
            if not changed:
                beyond[c] -= _1
            else:
                ring[c, 1] += 1
                if not _next_gap(words, readers, rice, c, state):
                    return False
            ahead = min(beyond[c], _127)
            beyond[c] -= ahead
            field = np.uint64(c) << _3
            countdown = (countdown & ~(_255 << field)) | ((ahead | _128) << field)
            if not changed:
                continue
        else:
            countdown += _1
            if not ranges.get_bit(data, coder, odds, e, change_node):
                continue
            sign = ranges.get_plain(data, coder, _1)
        if count >= positions.size:
            return False
        magnitude = ranges.get_magnitude(data, coder, odds, e, width)
        positions[count] = base + i
        moves[count] = _0 - magnitude if sign else magnitude
        count += 1
    packed[0] = countdown
    done[0] = count
    return True


@compiled
def _next_gap(words: U64, readers: U64, rice: U64, c: Int, state: tuple[U64, U64, U64, I64, U64]) -> bool:
    """Puts the gap before class `c`'s next change into `beyond[c]`, unpacking more gaps as needed."""
    _, beyond, waiting, ring, ring_gaps = state
    if ring[c, 1] == ring[c, 0]:
        more = min(waiting[c], np.uint64(ring_gaps.shape[1]))
        ring[c, 1] = 0
        if more == _0:
            beyond[c] = _FOREVER
            return True
        if not unpack(words, readers, rice, c, ring_gaps[c], np.int64(more)):
            return False
        waiting[c] -= more
        ring[c, 0] = np.int64(more)
    beyond[c] = ring_gaps[c, ring[c, 1]] >> _1
    return True


@compiled
def begin_walk(words: U64, readers: U64, rice: U64, state: tuple[U64, U64, U64, I64, U64]) -> bool:
    """Sets each class's first countdown."""
    packed, beyond, _, _, _ = state
    countdown = _128
    for c in range(1, 8):
        if not _next_gap(words, readers, rice, c, state):
            return False
        ahead = min(beyond[c], _127)
        beyond[c] -= ahead
        countdown |= (ahead | _128) << (np.uint64(c) << _3)
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
