"""Finding changes and coding them: the passes of the encoder over whole blocks, compiled.

Guarantees: what is found is every element that changed, in order. Leaves to others: the codes (bitstream.py, ranges.py),
the way back (walk.py).

Classes: the probability that a weight changes doubles with every octave that it is smaller, and both sides know the
old weights. An element's class is its old exponent, cut off at eight consecutive octaves. Class 0, the smallest
weights, change so often that each of them is coded by a decision; in the others the gaps between changes are coded.
Elements are compared 64 at a time: one word says which of them changed and eight say which are of which class, so that
an element that did not change costs a fraction of an instruction. The `fast` setting has class 1 alone.
"""

from __future__ import annotations

import numpy as np

from echo2.broadcast.delta import ranges
from echo2.broadcast.delta.bitstream import (
    I64,
    U8,
    U16,
    U32,
    U64,
    Int,
    adapted,
    gap_code,
    put_gap,
    put_larger,
    put_word,
)  # fmt: skip
from echo2.broadcast.delta.elements import Bits
from echo2.broadcast.delta.fingerprint import ROW_MASK, ROW_SHIFT, row_coefficient
from echo2.broadcast.delta.jit import LANES, compiled, count_ones, differing, inlined, octaves, trailing_zeros

CLASS_COUNT = 8
PLAIN_CLASS_COUNT = 2
PIECE = 1 << 15  # elements scanned at a time
SAMPLE = 1 << 15  # elements from which the classes are chosen
OFTEN = 0.25  # elements that change more often than this are coded by a decision each

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_7 = np.uint64(7)
_64 = np.uint64(64)
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


@inlined
def _differing_tail(old: Bits, new: Bits, start: int) -> np.uint64:
    """As `differing`, for fewer than 64 elements."""
    mask = _0
    for i in range(start, old.size):
        if old[i] != new[i]:
            mask |= _1 << np.uint64(i - start)
    return mask


@inlined
def class_of(exponent: np.uint64, base: np.uint64) -> np.int64:
    """The class of an exponent."""
    return np.int64(0) if exponent <= base else np.int64(min(exponent - base, _7))


@compiled
def octaves_tail(bits: Bits, start: int, shift: np.uint64, mask: np.uint64, base: np.uint64, masks: U64) -> None:
    """As `octaves`, for fewer than 64 elements."""
    for c in range(CLASS_COUNT):
        masks[c] = _0
    for i in range(start, bits.size):
        masks[class_of((np.uint64(bits[i]) >> shift) & mask, base)] |= _1 << np.uint64(i - start)


@compiled
def find_plain(
    old: Bits, new: Bits, base: int, since: I64, changes: tuple[U32, U32, U16, U64], print_at: tuple[int, np.uint64, U64]
) -> tuple[int, np.uint64]:  # fmt: skip
    """Changes of one piece, all of class 1. `since[1]`: elements since the last change.

    `changes` = positions in the block (`base` + index), gaps, contexts (left as they are: 0), steps mod 2^64.
    `print_at` = place of the piece in its tensor, the tensor's coefficients. Returns how many, and what they add to the
    fingerprint.
    """
    positions, gaps, _, steps = changes
    offset, seed, columns = print_at
    count = 0
    last = -since[1] - 1
    total, row_sum = _0, _0
    row: Int = -1
    for start in range(0, old.size, LANES):
        mask = differing(old, new, start) if start + LANES <= old.size else _differing_tail(old, new, start)
        while mask:
            i = start + np.int64(trailing_zeros(mask))
            mask &= mask - _1
            step = np.uint64(new[i]) - np.uint64(old[i])
            positions[count] = base + i
            gaps[count] = i - last - 1
            steps[count] = step
            element = offset + i
            if element >> ROW_SHIFT != row:
                total += row_sum * row_coefficient(seed, np.uint64(row))
                row, row_sum = element >> ROW_SHIFT, _0
            row_sum += columns[element & ROW_MASK] * step
            last = i
            count += 1
    since[1] = old.size - last - 1
    return count, total + row_sum * row_coefficient(seed, np.uint64(row))


@compiled
def find_classes(
    old: Bits, new: Bits, base: int, since: I64, octave: tuple[np.uint64, np.uint64, np.uint64, U64],
    changes: tuple[U32, U32, U16, U64], print_at: tuple[int, np.uint64, U64],
) -> tuple[int, np.uint64]:  # fmt: skip
    """As `find_plain`, by exponent class; of class 0 every element is reported, changed or not.

    `since[c]`: elements of class c since its last change. Contexts are the old exponents. `octave` = shift and mask of
    the exponent, class base, eight words of working memory.
    """
    positions, gaps, contexts, steps = changes
    offset, seed, columns = print_at
    shift, emask, lowest, masks = octave
    count = 0
    total, row_sum = _0, _0
    row: Int = -1
    for start in range(0, old.size, LANES):
        if start + LANES <= old.size:
            events = differing(old, new, start)
            octaves(old, start, shift, emask, lowest, masks)
        else:
            events = _differing_tail(old, new, start)
            octaves_tail(old, start, shift, emask, lowest, masks)
        events |= masks[0]
        while events:
            lane = trailing_zeros(events)
            events &= events - _1
            i = start + np.int64(lane)
            step = np.uint64(new[i]) - np.uint64(old[i])
            exponent = (np.uint64(old[i]) >> shift) & emask
            c: Int = class_of(exponent, lowest)
            passed = np.int64(count_ones(masks[c] & ((_1 << lane) - _1)))
            positions[count] = base + i
            gaps[count] = since[c] + passed
            since[c] = -passed - 1
            contexts[count] = exponent
            steps[count] = step
            element = offset + i
            if element >> ROW_SHIFT != row:
                total += row_sum * row_coefficient(seed, np.uint64(row))
                row, row_sum = element >> ROW_SHIFT, _0
            row_sum += columns[element & ROW_MASK] * step
            count += 1
        for c in range(CLASS_COUNT):
            since[c] += np.int64(count_ones(masks[c]))
    return count, total + row_sum * row_coefficient(seed, np.uint64(row))


@compiled
def pack_plain(
    changes: tuple[U32, U32, U16, U64], count: int, width: np.uint64, arena: U64, tables: tuple[U64, U64, U8, I64, U64, U64]
) -> bool:  # fmt: skip
    """Codes `count` changes of class 1. False: the arena is full.

    `tables` = writers, rice, pages, used, magnitudes of one since the last larger one, larger magnitudes and changes
    (counted here).
    """
    _, gaps, _, steps = changes
    writers, rice, pages, used, ones, counts = tables
    half = _1 << (width - _1)
    mask = half + (half - _1)
    word, filled, mean, k = writers[1, 0], writers[1, 1], rice[1, 0], rice[1, 1]
    run = ones[0]
    for i in range(count):
        gap = np.uint64(gaps[i])
        step = steps[i] & mask
        sign = _1 if step >= half else _0
        code, size = gap_code(gap, k)
        mean, k = adapted(mean, k, gap)
        code |= sign << size
        size += _1
        word |= code << filled
        filled += size
        if filled >= _64:
            if not put_word(arena, writers, pages, used, 1, word):
                return False
            filled -= _64
            word = code >> (size - filled)
        magnitude = (_0 - step) & mask if sign else step
        if magnitude == _1:
            run += _1
            continue
        if not put_larger(arena, writers, pages, used, rice, run, magnitude):
            return False
        run = _0
        counts[0] += _1
    writers[1, 0], writers[1, 1], rice[1, 0], rice[1, 1] = word, filled, mean, k
    ones[0] = run
    counts[1] += np.uint64(count)
    return True


@compiled
def pack_classes(
    changes: tuple[U32, U32, U16, U64], count: int, lowest: np.uint64, width: np.uint64,
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
        c = class_of(context, lowest)
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
def code_plain(
    old: Bits, new: Bits, base: int, work: tuple[I64, tuple[U32, U32, U16, U64], U64, U8],
    tables: tuple[U64, U64, U8, I64, U64, U64], print_at: tuple[int, np.uint64, U64],
) -> np.uint64:  # fmt: skip
    """Finds and codes a segment's changes. Returns what they add to the fingerprint.

    `work` = elements since the last change by class, room for a piece's changes, the arena, whether that is full.
    """
    since, changes, arena, is_full = work
    offset, seed, columns = print_at
    width = np.uint64(8 * old.itemsize)
    piece = changes[0].size
    total = _0
    for at in range(0, old.size, piece):
        part = (offset + at, seed, columns)
        count, step = find_plain(old[at : at + piece], new[at : at + piece], base + at, since, changes, part)
        total += step
        if is_full[0] == 0 and not pack_plain(changes, count, width, arena, tables):
            is_full[0] = 1
    return total


@compiled
def code_classes(
    old: Bits, new: Bits, base: int, octave: tuple[np.uint64, np.uint64, np.uint64, U64],
    work: tuple[I64, tuple[U32, U32, U16, U64], U64, U8], tables: tuple[U64, U64, U8, I64, U64, U32, U64],
    print_at: tuple[int, np.uint64, U64],
) -> np.uint64:  # fmt: skip
    """As `code_plain`, by exponent class."""
    since, changes, arena, is_full = work
    offset, seed, columns = print_at
    width = np.uint64(8 * old.itemsize)
    piece = changes[0].size
    total = _0
    for at in range(0, old.size, piece):
        part = (offset + at, seed, columns)
        count, step = find_classes(old[at : at + piece], new[at : at + piece], base + at, since, octave, changes, part)
        total += step
        if is_full[0] == 0 and not pack_classes(changes, count, octave[2], width, arena, tables):
            is_full[0] = 1
    return total
