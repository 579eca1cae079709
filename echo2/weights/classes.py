"""Changes by exponent class: sorts a block's marks into eight runs, and merges them again; compiled.

An element's class is its OLD exponent, which both sides know, clipped to eight consecutive octaves. Each class's elements form
their own run of marks; likewise, each class's changes form a run that marks larger magnitudes. 64 elements are sorted at a time
by moving bits within words. Guarantees: a run has exactly as many marks as its class has elements (`count_classes`), so no
sender's claim can lead to an out-of-bounds access.

Legend: `octave` = shift and mask of the exponent, class base, eight words of working memory. `cursor` = number of changes, and of
larger ones, before the segment. `at[c]`, `ranks[c]` = bits and changes so far in class c's run.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numba.cpython.unsafe.numbers import trailing_zeros

from echo2.weights.bits import I64, U8, U32, U64, Int, below, bit_at, bits_at, put
from echo2.weights.elements import Bits
from echo2.weights.jit import LANES, compiled, count_ones, deposit, extract, inlined, octaves

CLASS_COUNT = 8  # octaves of weights that differ in how often they change; the rest share the last
_GROUPS, _GROUP = 512, 64  # of neighbouring elements, for the sample that determines the classes
_0 = np.uint64(0)
_1 = np.uint64(1)
_7 = np.uint64(7)
Octave = tuple[np.uint64, np.uint64, np.uint64, U64]
NO_OCTAVE: Octave = (_0, _0, _0, np.zeros(0, np.uint64))  # where there is a single class
Sample = TypeVar("Sample", Bits, torch.Tensor)


def sample_of(old: Sample) -> Sample:
    """A sample of evenly spread groups of neighbours; all elements if there are few."""
    # Groups rather than single elements: a whole cache line is fetched anyway.
    stride = old.shape[0] // _GROUPS
    return old if stride <= _GROUP else old[: _GROUPS * stride].reshape(_GROUPS, stride)[:, :_GROUP].reshape(-1)


def choose_class_base(sample: Bits, exponent_shift: int, exponent_bits: int) -> int:
    """The exponent at and below which elements are in class 0. The last class starts at the octave of the median, because
    large elements rarely change, and telling the small ones apart matters most."""
    mask = (1 << exponent_bits) - 1
    exponents = (sample >> sample.dtype.type(exponent_shift)) & sample.dtype.type(mask)
    counts = np.bincount(exponents.astype(np.int64), minlength=mask + 1)
    top = int(np.searchsorted(counts.cumsum(), 0.6 * exponents.size))
    return min(255, max(0, top - CLASS_COUNT + 1))


@inlined
def class_of(exponent: np.uint64, base: np.uint64) -> np.uint64:
    return min(max(exponent, base) - base, _7)


@inlined
def _masks_at(bits: Bits, start: Int, octave: Octave) -> None:
    """Writes one mask per class over the next 64 elements (or as many as are left)."""
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
    masks = octave[3]
    c0, c1, c2, c3, c4, c5, c6, c7 = _0, _0, _0, _0, _0, _0, _0, _0  # in registers
    for start in range(0, old.size, LANES):
        _masks_at(old, start, octave)
        c0 += count_ones(masks[0])
        c1 += count_ones(masks[1])
        c2 += count_ones(masks[2])
        c3 += count_ones(masks[3])
        c4 += count_ones(masks[4])
        c5 += count_ones(masks[5])
        c6 += count_ones(masks[6])
        c7 += count_ones(masks[7])
    for c, found in enumerate((c0, c1, c2, c3, c4, c5, c6, c7)):
        counts[c] += np.int64(found)


@compiled
def sort_marks(
    old: Bits, base: int, octave: Octave, marks: tuple[U64, U32], cursor: I64, at: I64, ranks: I64,
    out: tuple[U64, U8, U32],
) -> None:  # fmt: skip
    """Sorts a segment's changes into the classes' runs. `marks` = changed, larger.

    `out` = marks of all runs (all 0 before), and for each larger change its class and its rank among that class's changes.
    """
    changed, larger = marks
    words, larger_class, larger_rank = out
    shift, mask, lowest, work = octave
    rank, found = cursor[0], cursor[1]
    for start in range(0, old.size, LANES):
        _masks_at(old, start, octave)
        word = bits_at(changed, base + start) & below(old.size - start)
        # Most words of a block have no change; their runs are already 0 and only get longer.
        if word:
            following = rank + np.int64(count_ones(word))
            while found < larger.size and np.int64(larger[found]) < following:
                # The lane of the word's n-th change: `deposit` moves bit n to the n-th one of `word`.
                bit = deposit(_1 << np.uint64(np.int64(larger[found]) - rank), word)
                i = start + np.int64(trailing_zeros(bit))
                mine = class_of((np.uint64(old[i]) >> shift) & mask, lowest)
                larger_class[found] = mine
                larger_rank[found] = ranks[mine] + np.int64(count_ones(word & work[mine] & (bit - _1)))
                found += 1
            for c in range(CLASS_COUNT):
                part = extract(word, work[c])
                ranks[c] += np.int64(count_ones(part))
                at[c] = put(words, at[c], part, np.int64(count_ones(work[c])))
            rank = following
        else:
            for c in range(CLASS_COUNT):
                at[c] += np.int64(count_ones(work[c]))
    cursor[0], cursor[1] = rank, found


@compiled
def sort_steps(old: Bits, new: Bits, octave: Octave, at: I64, steps: Bits) -> None:
    """Sorts the steps of all elements of a segment by class, as numbers 0, -1, 1, -2, ... -> 0, 1, 2, 3, ...; `at` = the place of
    each class's next one. A single place: without classes."""
    shift, mask, lowest, _ = octave
    top = np.uint64(8 * old.itemsize - 1)
    if at.size == 1:
        run = steps[at[0] : at[0] + old.size]  # indices that begin at 0 let the compiler vectorise
        for i in range(old.size):
            step = np.uint64(new[i]) - np.uint64(old[i])
            run[i] = (step << _1) ^ (_0 - ((step >> top) & _1))
        at[0] += old.size
        return
    for i in range(old.size):
        before = np.uint64(old[i])
        step = np.uint64(new[i]) - before
        mine = class_of((before >> shift) & mask, lowest)
        place = np.uint64(at[mine])
        at[mine] = place + _1
        steps[place] = (step << _1) ^ (_0 - ((step >> top) & _1))


@compiled
def add_steps(old: Bits, octave: Octave, at: I64, steps: Bits, new: Bits) -> None:
    """The inverse, for one segment: writes the old elements plus their steps."""
    shift, mask, lowest, _ = octave
    if at.size == 1:
        run = steps[at[0] : at[0] + old.size]
        for i in range(old.size):
            step = np.uint64(run[i])
            new[i] = np.uint64(old[i]) + ((step >> _1) ^ (_0 - (step & _1)))
        at[0] += old.size
        return
    for i in range(old.size):
        before = np.uint64(old[i])
        mine = class_of((before >> shift) & mask, lowest)
        place = np.uint64(at[mine])
        at[mine] = place + _1
        step = np.uint64(steps[place])
        new[i] = before + ((step >> _1) ^ (_0 - (step & _1)))


@compiled
def gather_steps(steps: Bits, moved: U8, values: Bits) -> None:
    """Lists the steps that are not 0, and marks their places. `values` must have room for one more."""
    count = np.uint64(0)
    for i in range(moved.size):
        byte = _0
        for at in range(8 * i, min(8 * i + 8, steps.size)):
            is_moved = np.uint64(steps[np.uint64(at)] != 0)
            values[count] = steps[np.uint64(at)]
            byte |= is_moved << np.uint64(at & 7)
            count += is_moved
        moved[i] = byte


@compiled
def spread_steps(moved: U64, values: Bits, steps: Bits) -> None:
    """The inverse; `values` has one more, of any value."""
    count = np.uint64(0)
    for i in range(steps.size):
        is_moved = bit_at(moved, np.uint64(i))
        steps[i] = np.uint64(values[count]) * is_moved
        count += is_moved


@compiled
def split_larger(marks: tuple[U8, U32, Bits], at: I64, out: tuple[U32, Bits]) -> None:
    """Sorts larger changes by class. `marks` = class, rank and excess of each; `at` = index of each class's first one."""
    larger_class, larger_rank, excess = marks
    ranks, sorted_excess = out
    for i in range(larger_class.size):
        place = at[larger_class[i]]
        ranks[place] = larger_rank[i]
        sorted_excess[place] = excess[i]
        at[larger_class[i]] = place + 1


@compiled
def join_marks(
    old: Bits, octave: Octave, runs: tuple[I64, I64, I64], coded: tuple[U64, U64, Bits], so_far: I64,
    out: tuple[U64, U32, Bits],
) -> None:  # fmt: skip
    """The inverse of the above, for one segment. `coded` = marks of all runs, marks of their larger changes, and the excess of
    these by class; `runs` = the position of each class in each of them.

    `so_far` = number of elements, changes and larger changes; `out` = changed, larger, excess.
    """
    words, larger_words, sorted_excess = coded
    at, larger_at, listed = runs
    changed, larger, excess = out
    shift, mask, lowest, work = octave
    bits, rank, found = so_far[0], so_far[1], so_far[2]
    any_larger = larger.size > 0
    for start in range(0, old.size, LANES):
        _masks_at(old, start, octave)
        word = _0
        for c in range(CLASS_COUNT):
            part = deposit(bits_at(words, at[c]), work[c])
            at[c] += np.int64(count_ones(work[c]))
            # From here on `work` holds which lanes of a class changed, because larger changes are counted among these.
            work[c] = part
            word |= part
        bits = put(changed, bits, word, min(LANES, old.size - start))
        if not word:
            continue
        lanes = _0
        if any_larger:
            for c in range(CLASS_COUNT):
                lanes |= deposit(bits_at(larger_words, larger_at[c]), work[c])
                larger_at[c] += np.int64(count_ones(work[c]))
        while lanes:
            bit = lanes & (_0 - lanes)
            lanes ^= bit
            mine = class_of((np.uint64(old[start + np.int64(trailing_zeros(bit))]) >> shift) & mask, lowest)
            larger[found] = rank + np.int64(count_ones(word & (bit - _1)))
            excess[found] = sorted_excess[listed[mine]]
            listed[mine] += 1
            found += 1
        rank += np.int64(count_ones(word))
    so_far[0], so_far[1], so_far[2] = bits, rank, found
