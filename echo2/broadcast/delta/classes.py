"""Changes by exponent class: sorting a block's marks into eight runs, and putting them together again; compiled.

The probability that a weight changes doubles with every octave that it is smaller, and both sides know the old weights.
An element's class is its old exponent, cut off at eight consecutive octaves; each class's elements form a run of marks
of its own, in which changes are nearly independent draws, and likewise its changes one of those with larger magnitudes.
64 elements are sorted at a time, by moving bits within words: time does not depend on how many changed.

Guarantees: runs are of exactly as many marks as the class has elements (`count_classes`), so no claim of a sender can
lead outside. Leaves to others: the code of the runs (bitset.py), what the marks mean (marks.py).

Legend: `octave` = shift and mask of the exponent, class base, eight words of working memory. `cursor` = changes before
the segment, larger ones before it. `runs[c]` = bits so far in class c's run, changes so far, larger ones so far.
"""

from __future__ import annotations

import numpy as np

from echo2.broadcast.delta.bits import I64, U32, U64, Int, below, bits_at, put
from echo2.broadcast.delta.elements import Bits
from echo2.broadcast.delta.jit import LANES, compiled, count_ones, deposit, extract, inlined, octaves, trailing_zeros

CLASS_COUNT = 8
SAMPLE = 1 << 15  # elements from which the classes are chosen
_0 = np.uint64(0)
_1 = np.uint64(1)
_7 = np.uint64(7)
Octave = tuple[np.uint64, np.uint64, np.uint64, U64]


def choose_class_base(old: Bits, exponent_shift: int, exponent_bits: int) -> int:
    """The exponent at and below which elements are of class 0, from a sample: the last class begins in the octave of the
    median, as changes are the rarer the larger elements are, and what matters is to tell the small ones."""
    return choose_class_base_of_sample(old[:: sample_stride(old.size)], exponent_shift, exponent_bits)


def sample_stride(size: int) -> int:
    """The distance between the elements of a sample."""
    return max(1, size // SAMPLE)


def choose_class_base_of_sample(old: Bits, exponent_shift: int, exponent_bits: int) -> int:
    """`choose_class_base` once the sample is drawn."""
    mask = (1 << exponent_bits) - 1
    exponents = ((old.astype(np.uint64) >> np.uint64(exponent_shift)) & np.uint64(mask)).astype(np.int64)
    counts = np.bincount(exponents, minlength=mask + 1)
    top = int(np.searchsorted(counts.cumsum(), 0.6 * exponents.size))
    return min(255, max(0, top - CLASS_COUNT + 1))


@inlined
def class_of(exponent: np.uint64, base: np.uint64) -> np.int64:
    """The class of an exponent."""
    return np.int64(0) if exponent <= base else np.int64(min(exponent - base, _7))


@inlined
def _masks_at(bits: Bits, start: Int, octave: Octave) -> None:
    """Which of the next elements, 64 or as many as are left, are of which class."""
    shift, mask, base, masks = octave
    if start + LANES <= bits.size:
        octaves(bits, start, shift, mask, base, masks)
        return
    for c in range(CLASS_COUNT):
        masks[c] = _0
    for i in range(start, bits.size):
        masks[class_of((np.uint64(bits[i]) >> shift) & mask, base)] |= _1 << np.uint64(i - start)


@compiled
def count_classes(old: Bits, octave: Octave, counts: I64) -> None:
    """Adds a segment's elements to the number of each class."""
    for start in range(0, old.size, LANES):
        _masks_at(old, start, octave)
        for c in range(CLASS_COUNT):
            counts[c] += np.int64(count_ones(octave[3][c]))


@compiled
def count_changes(
    old: Bits, base: int, octave: Octave, marks: tuple[U64, U32], cursor: I64, counts: I64
) -> None:  # fmt: skip
    """Adds a segment's elements, changes and larger changes to `counts[class]`. `marks` = changed, larger."""
    changed, larger = marks
    shift, mask, lowest, masks = octave
    rank, found = cursor[0], cursor[1]
    for start in range(0, old.size, LANES):
        _masks_at(old, start, octave)
        word = bits_at(changed, base + start) & below(old.size - start)
        for c in range(CLASS_COUNT):
            counts[c, 0] += np.int64(count_ones(masks[c]))
        if word:
            for c in range(CLASS_COUNT):
                counts[c, 1] += np.int64(count_ones(masks[c] & word))
        following = rank + np.int64(count_ones(word))
        while found < larger.size and np.int64(larger[found]) < following:
            bit = deposit(_1 << np.uint64(np.int64(larger[found]) - rank), word)
            lane = np.int64(trailing_zeros(bit))
            counts[class_of((np.uint64(old[start + lane]) >> shift) & mask, lowest), 2] += 1
            found += 1
        rank = following
    cursor[0], cursor[1] = rank, found


@compiled
def sort_marks(
    old: Bits, base: int, octave: Octave, marks: tuple[U64, U32, Bits], cursor: I64, runs: I64,
    out: tuple[U64, U32, Bits],
) -> None:  # fmt: skip
    """Sorts a segment's changes into the classes' runs. `marks` = changed, larger, excess.

    `out` = marks of all runs, ranks of larger changes within their class, their excess; `runs` says where each class
    writes in each of them. Ranks count from the class's first change: `runs[c, 3]` = changes so far.
    """
    changed, larger, excess = marks
    words, ranks, sorted_excess = out
    shift, mask, lowest, masks = octave
    rank, found = cursor[0], cursor[1]
    for start in range(0, old.size, LANES):
        _masks_at(old, start, octave)
        word = bits_at(changed, base + start) & below(old.size - start)
        following = rank + np.int64(count_ones(word))
        while found < larger.size and np.int64(larger[found]) < following:
            bit = deposit(_1 << np.uint64(np.int64(larger[found]) - rank), word)
            i = start + np.int64(trailing_zeros(bit))
            mine = class_of((np.uint64(old[i]) >> shift) & mask, lowest)
            at = runs[mine, 2]
            ranks[at] = runs[mine, 3] + np.int64(count_ones(word & masks[mine] & (bit - _1)))
            sorted_excess[at] = excess[found]
            runs[mine, 2] = at + 1
            found += 1
        for c in range(CLASS_COUNT):
            runs[c, 0] = put(words, runs[c, 0], extract(word, masks[c]), np.int64(count_ones(masks[c])))
        if word:
            for c in range(CLASS_COUNT):
                runs[c, 3] += np.int64(count_ones(word & masks[c]))
        rank = following
    cursor[0], cursor[1] = rank, found


@compiled
def join_marks(
    old: Bits, octave: Octave, runs: I64, coded: tuple[U64, U64, Bits], at: I64, out: tuple[U64, U32, Bits]
) -> None:  # fmt: skip
    """The reverse, for one segment. `coded` = marks of all runs, marks of their larger changes, excess by class.

    `runs[c]` = places in these three. `at` = bits, changes and larger ones so far; `out` = changed, larger, excess.
    """
    words, larger_words, sorted_excess = coded
    changed, larger, excess = out
    shift, mask, lowest, masks = octave
    bits, rank, found = at[0], at[1], at[2]
    any_larger = larger.size > 0
    for start in range(0, old.size, LANES):
        _masks_at(old, start, octave)
        word = _0
        for c in range(CLASS_COUNT):
            part = deposit(bits_at(words, runs[c, 0]), masks[c])
            runs[c, 0] += np.int64(count_ones(masks[c]))
            word |= part
            masks[c] = part
        lanes = _0
        if word and any_larger:
            for c in range(CLASS_COUNT):
                part = masks[c]
                lanes |= deposit(bits_at(larger_words, runs[c, 1]), part)
                runs[c, 1] += np.int64(count_ones(part))
        bits = put(changed, bits, word, min(LANES, old.size - start))
        while lanes:
            bit = lanes & (_0 - lanes)
            lanes ^= bit
            i = start + np.int64(trailing_zeros(bit))
            mine = class_of((np.uint64(old[i]) >> shift) & mask, lowest)
            larger[found] = rank + np.int64(count_ones(word & (bit - _1)))
            excess[found] = sorted_excess[runs[mine, 2]]
            runs[mine, 2] += 1
            found += 1
        rank += np.int64(count_ones(word))
    at[0], at[1], at[2] = bits, rank, found
