"""The changes of one block as marks: finding them, summing their fingerprint, applying them; compiled.

A change is a sign and a magnitude, |new - old| of the raw bits as numbers (for 64-bit elements the difference is read as signed).
Most magnitudes are one: 64 such elements are compared, summed or moved at once. The excess over one of the others is listed
apart. Guarantees: nothing is written outside a segment; a change that would leave its element's range is reported, and taking
changes back restores every bit, even then.

Legend: `cursor` = number of changes, and of larger ones, before the segment; both are advanced. `larger` = which of the changes
have a magnitude above one (their ranks, ascending), `excess` = these magnitudes minus one.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numba.cpython.unsafe.numbers import trailing_zeros

from echo2.weights.bits import I64, U8, U32, U64, Int, below, bit_at, bits_at, list_few, put, word_count
from echo2.weights.elements import Bits, Block
from echo2.weights.fingerprint import ROW_ELEMENTS, ROW_MASK, ROW_SHIFT, row_coefficient
from echo2.weights.jit import (
    LANES,
    compare,
    compiled,
    count_ones,
    deposit,
    extract,
    inlined,
    move_marked,
    octaves,
    prefetch,
    sum_marked,
)  # fmt: skip

_0 = np.uint64(0)
_1 = np.uint64(1)
_6 = np.uint64(6)
_63 = np.uint64(63)
_ROW = np.uint64(ROW_SHIFT)  # typed for the kernels
_COLUMN = np.uint64(ROW_MASK)  # as above
_LINE = 64  # bytes of a cache line
_LARGER_SHARE = 8  # nearly all changes are of one unit, or every step is sent

Found = tuple[U64, U64, U32, U32, Bits, U64, Bits]


def larger_max(block_elements: int) -> int:
    """How many changes of a block may be larger than one unit if they are to be listed."""
    return block_elements // _LARGER_SHARE + LANES


class Finds:
    """One thread's working memory for the changes of blocks of the given one's type, and of at most its size: two bits per
    element, room for `larger_max` larger changes, and for the last elements of a segment beside themselves."""

    def __init__(self, block: Block) -> None:
        self.size = size = block.element_count
        self.changed, self.signs = (np.empty(word_count(size), np.uint64) for _ in range(2))
        self.larger, self.places = (np.empty(larger_max(size), np.uint32) for _ in range(2))
        self.excess: Bits = np.empty(self.larger.size, block.element.bits_dtype)
        self._work = np.zeros(3, np.uint64)
        self._rest: Bits = np.zeros((2, LANES), block.element.bits_dtype)

    def fits(self, block: Block) -> bool:
        return self.size >= block.element_count and self.excess.dtype == block.element.bits_dtype

    def restart(self, block_elements: int) -> Found:
        """Resets the memory for another block, as `survey` takes it."""
        self.changed[0] = self.signs[0] = 0
        room = slice(larger_max(block_elements))
        return self.changed, self.signs, self.larger[room], self.places[room], self.excess[room], self._work, self._rest


@compiled
def survey(old: Bits, new: Bits, at: I64, finds: Found) -> None:
    """Finds which elements of a segment changed, which of these went down, which changed by more than one, and by how much
    more. `at` = number of elements, changes and larger changes so far; `finds` = changed, signs; ranks among the changes,
    places and excess of as many larger changes as there is room for; working memory. Ends early if there are more."""
    changed, signs, larger, places, excess, out, rest = finds
    bits, rank, index = at[0], at[1], at[2]
    for start in range(0, old.size, LANES):
        left = old.size - start
        if left >= LANES:
            compare(old, new, start, out)
        else:
            for i in range(LANES):
                rest[0, i] = rest[1, i] = old[min(start + i, old.size - 1)]
            for i in range(left):
                rest[1, i] = new[start + i]
            compare(rest[0], rest[1], 0, out)
        word, lanes = out[0], out[2]
        while lanes:
            bit = lanes & (_0 - lanes)
            lanes ^= bit
            if index >= excess.size:
                at[2] = index + 1
                return
            lane = np.int64(trailing_zeros(bit))
            larger[index] = rank + np.int64(count_ones(word & (bit - _1)))
            places[index] = bits + lane
            step = np.uint64(new[start + lane]) - np.uint64(old[start + lane])
            excess[index] = min(step, _0 - step) - _1
            index += 1
        # Signs are kept only for changed elements: `extract` closes the gaps between their bits.
        bits = put(changed, bits, word, min(left, LANES))
        rank = put(signs, rank, extract(out[1], word), np.int64(count_ones(word)))
    at[0], at[1], at[2] = bits, rank, index


@compiled
def places_of_larger(changed: U64, count: int, larger: U64, places: U32) -> None:
    """Lists the places of the larger changes among `count` elements. `larger` = marks among the changes; `places` must have room
    for `LANES` more than there are."""
    rank: Int = 0
    index: Int = 0
    for at in range(0, count, LANES):
        word = changed[at >> 6] & below(count - at)
        lanes = deposit(bits_at(larger, rank), word)
        index = list_few(lanes, np.uint64(at), places, index, 8)
        rank += np.int64(count_ones(word))


@compiled
def pick(places: U32, ranks: U32, out: U32) -> None:
    """The places of the given ranks, which must be below the number of places."""
    for i in range(ranks.size):
        out[i] = places[np.uint64(ranks[i])]


@compiled
def settle_larger(
    base: int, count: int, larger: tuple[U32, U32, Bits, U64], index: Int, print_at: tuple[int, np.uint64, U64]
) -> tuple[np.uint64, Int]:  # fmt: skip
    """The fingerprint term of the excess of a segment's larger changes, and the number of larger changes so far. `larger` =
    places in the block, ranks, excess, signs; `print_at` = the segment's start in its tensor, and the tensor's coefficients."""
    places, ranks, excess, signs = larger
    offset, seed, columns = print_at
    to_element = np.uint64(offset - base)  # modulo 2^64: adding it to a place of the segment gives an element's index
    i, stop = np.uint64(index), np.uint64(places.size)
    total, row_sum, row = _0, _0, _0
    while i < stop and np.int64(places[i]) < base + count:
        element = np.uint64(places[i]) + to_element
        # A row's coefficient multiplies the sum of its row: one multiplication per row with a change, not per
        # change.
        if element >> _ROW != row:
            total += row_sum * row_coefficient(seed, row)
            row, row_sum = element >> _ROW, _0
        number = columns[element & _COLUMN] * np.uint64(excess[i])
        # All ones or 0: (x ^ -1) + 1 negates without a branch, which random signs would mispredict half the time.
        down = _0 - bit_at(signs, np.uint64(ranks[i]))
        row_sum += (number ^ down) - down
        i += _1
    return total + row_sum * row_coefficient(seed, row), np.int64(i)


@compiled
def settle_marks(
    base: int, count: int, marks: tuple[U64, U64], rank: Int, print_at: tuple[int, np.uint64, U64]
) -> tuple[np.uint64, Int]:  # fmt: skip
    """The fingerprint term of a segment's changes, counting each as a change by one, and the number of changes so far. `marks` =
    changed, signs."""
    changed, signs = marks
    offset, seed, columns = print_at
    total = _0
    so_far = np.int64(rank)
    start: Int = 0
    while start < count:  # one row of the fingerprint at a time
        column = (offset + start) & ROW_MASK
        size = min(count - start, ROW_ELEMENTS - column)
        row_sum = _0
        for at in range(0, size, LANES):
            word = bits_at(changed, base + start + at) & below(size - at)
            down = deposit(bits_at(signs, so_far), word)
            row_sum += sum_marked(columns, column + at, word, down)
            so_far += np.int64(count_ones(word))
        total += row_sum * row_coefficient(seed, np.uint64((offset + start) >> ROW_SHIFT))
        start += size
    return total, so_far


@inlined
def move(live: Bits, i: Int, by: np.uint64, down: np.uint64) -> np.uint64:
    before = np.uint64(live[i])
    most = ~_0 >> np.uint64(64 - 8 * live.itemsize)
    live[i] = before - by if down else before + by
    return np.uint64(by > (before if down else most - before))


@inlined
def _move_lanes(live: Bits, start: Int, word: np.uint64, down: np.uint64) -> np.uint64:
    """Moves marked ones of the last elements (fewer than 64) by one. Returns how many wrapped around."""
    wrapped = _0
    while word:
        lane = trailing_zeros(word)
        word &= word - _1
        wrapped += move(live, start + np.int64(lane), _1, (down >> lane) & _1)
    return wrapped


@compiled
def move_marks(
    live: Bits, base: int, marks: tuple[U64, U64], larger: tuple[U32, U32, Bits, U64], cursor: I64, is_back: bool
) -> np.uint64:  # fmt: skip
    """Adds a segment's changes to its live bits, or subtracts them (`is_back`). Returns how many wrapped around. All are moved
    by one, 64 at a time; after each row of `ROW_ELEMENTS`, the larger ones of that row are moved by their excess. `larger` as
    in `settle_larger`."""
    changed, signs = marks
    places, ranks, excess, _ = larger
    rank, index = cursor[0], np.uint64(cursor[1])
    # Subtracting moves the other way in the same order: each element ends on its old bits whichever step comes first,
    # because sums wrap.
    flip = ~_0 if is_back else _0
    wrapped = _0
    for start in range(0, live.size, ROW_ELEMENTS):
        size = min(live.size - start, ROW_ELEMENTS)
        for at in range(start, start + size, LANES):
            word = bits_at(changed, base + at) & below(live.size - at)
            down = deposit(bits_at(signs, rank), word) ^ flip
            if at + LANES <= live.size:
                wrapped += count_ones(move_marked(live, at, word, down))
            else:
                wrapped += _move_lanes(live, at, word, down)
            rank += np.int64(count_ones(word))
        # After every row instead of at the end, because its elements are still in the cache.
        while index < places.size and np.int64(places[index]) < base + start + size:
            down = bit_at(signs, np.uint64(ranks[index])) ^ (flip & _1)
            wrapped += move(live, np.int64(places[index]) - base, np.uint64(excess[index]), down)
            index += _1
    cursor[0], cursor[1] = rank, np.int64(index)
    return wrapped


@compiled
def list_steps(marks: tuple[U64, U32, Bits], steps: I64) -> None:
    """Lists the step of every change, in 64-bit arithmetic. `marks` = signs, larger, excess."""
    signs, larger, excess = marks
    for rank in range(steps.size):
        steps[rank] = 1
    for i in range(larger.size):
        steps[larger[i]] += np.int64(excess[i])
    for rank in range(steps.size):
        if (signs[rank >> 6] >> np.uint64(rank & 63)) & _1:
            steps[rank] = -steps[rank]


@compiled
def mark_steps(steps: I64, signs: U64, larger: U64) -> Int:
    """The inverse, for nonzero steps: writes signs and larger marks (all 0 before). Returns the number of larger ones."""
    count = 0
    for rank in range(steps.size):
        bit = _1 << np.uint64(rank & 63)
        if steps[rank] < 0:
            signs[rank >> 6] |= bit
        if steps[rank] != 1 and steps[rank] != -1:
            larger[rank >> 6] |= bit
            count += 1
    return count


@inlined
def _first_from(values: U32, begin: Int, bound: Int) -> np.int64:
    """Binary search in ascending values: the first index from `begin` on with a value of at least `bound`."""
    low, high = np.int64(begin), np.int64(values.size)
    while low < high:
        middle = (low + high) >> 1
        if np.int64(values[middle]) < bound:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def settle_places(
    base: int, count: int, coded: tuple[U32, U64], rank: Int, print_at: tuple[int, np.uint64, U64], rows: U64
) -> tuple[np.uint64, Int]:  # fmt: skip
    """The fingerprint term of a segment's changes, counting each as a change by one, and the number of changes so far. The
    segment has `count` elements. `coded` = places, signs; `print_at` as in `marks.settle_larger`; `rows`: room for the
    coefficients of the segment's rows, because most rows have many changes."""
    places, signs = coded
    offset, seed, columns = print_at
    at, stop = np.int64(rank), _first_from(places, rank, base + count)
    for row in range(((offset & ROW_MASK) + count + ROW_MASK) >> ROW_SHIFT):
        rows[row] = row_coefficient(seed, np.uint64((offset >> ROW_SHIFT) + row))
    # Modulo 2^64: adding it to a place of the segment gives an element's index from the beginning of the first row on.
    to_element = np.uint64((offset & ROW_MASK) - base)
    total = _0
    while at < stop:  # one word of signs at a time: the sums are independent, so that the compiler can vectorise them
        down_from = signs[np.uint64(at) >> _6] >> (np.uint64(at) & _63)
        together = min(stop - at, 64 - (at & 63))
        part = places[at : at + together]
        for j in range(together):
            element = np.uint64(part[j]) + to_element
            number = columns[element & _COLUMN] * rows[element >> _ROW]
            down = _0 - ((down_from >> np.uint64(j)) & _1)
            total += (number ^ down) - down
        at += together
    return total, stop


@compiled
def move_places(
    live: Bits, base: int, coded: tuple[U32, U64], larger: tuple[U32, U32, Bits, U64], cursor: I64, is_back: bool
) -> np.uint64:  # fmt: skip
    """Adds a segment's changes to its live bits, or subtracts them (`is_back`). Returns whether one wrapped around.
    `coded` = places, signs; `larger` as in `marks.settle_larger`."""
    places, signs = coded
    larger_places, ranks, excess, _ = larger
    at, stop = np.int64(cursor[0]), _first_from(places, cursor[0], base + live.size)
    flip = ~_0 if is_back else _0
    first, top = np.uint64(base), np.uint64(8 * live.itemsize - 1)
    is_rare = _LINE * (stop - at) < live.size * live.itemsize
    union = _0
    while at < stop:  # one word of signs at a time
        down_from = (signs[np.uint64(at) >> _6] ^ flip) >> (np.uint64(at) & _63)
        following = min(stop, (at | 63) + 1)
        if is_rare:  # otherwise the processor fetches all lines in time
            for place in places[following : min(stop, following + 64)]:
                prefetch(live, np.int64(place) - base)
        part = places[at:following]
        for j in range(part.size):
            i = np.uint64(part[j]) - first
            after = np.uint64(live[i]) + _1 - (((down_from >> np.uint64(j)) & _1) << _1)
            live[i] = after
            union |= after  # one that left its range has a bit above the element's
        at = following
    wrapped = union >> top >> _1
    index, found_stop = cursor[1], _first_from(larger_places, cursor[1], base + live.size)
    for k in range(index, found_stop):
        down = bit_at(signs, np.uint64(ranks[k])) ^ (flip & _1)
        wrapped |= move(live, np.int64(larger_places[k]) - base, np.uint64(excess[k]), down)
    cursor[0], cursor[1] = stop, found_stop
    return wrapped


# ---- changes by exponent class: a block's marks are sorted into eight runs, and merged again
#
# An element's class is its OLD exponent, which both sides know, clipped to eight consecutive octaves. Each class's elements form
# their own run of marks; likewise, each class's changes form a run that marks larger magnitudes. 64 elements are sorted at a time
# by moving bits within words. Guarantees: a run has exactly as many marks as its class has elements (`count_classes`), so no
# sender's claim can lead to an out-of-bounds access. Legend: `octave` = shift and mask of the exponent, class base, eight words
# of working memory; `at[c]`, `ranks[c]` = bits and changes so far in class c's run.

CLASS_COUNT = 8  # octaves of weights that differ in how often they change; the rest share the last
_GROUPS, _GROUP = 512, 64  # of neighbouring elements, for the sample that determines the classes
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
    for c, marked in enumerate((c0, c1, c2, c3, c4, c5, c6, c7)):
        counts[c] += np.int64(marked)


@compiled
def sort_marks(
    old: Bits, base: int, octave: Octave, marks: tuple[U64, U32], cursor: I64, at: I64, ranks: I64,
    out: tuple[U64, U8, U32],
) -> None:  # fmt: skip
    """Sorts a segment's changes into the classes' runs. `marks` = changed, larger. `out` = marks of all runs (all 0 before),
    and for each larger change its class and its rank among that class's changes."""
    changed, larger = marks
    words, larger_class, larger_rank = out
    shift, mask, lowest, work = octave
    rank, index = cursor[0], cursor[1]
    for start in range(0, old.size, LANES):
        _masks_at(old, start, octave)
        word = bits_at(changed, base + start) & below(old.size - start)
        # Most words of a block have no change; their runs are already 0 and only get longer.
        if word:
            following = rank + np.int64(count_ones(word))
            while index < larger.size and np.int64(larger[index]) < following:
                # The lane of the word's n-th change: `deposit` moves bit n to the n-th one of `word`.
                bit = deposit(_1 << np.uint64(np.int64(larger[index]) - rank), word)
                i = start + np.int64(trailing_zeros(bit))
                kind = class_of((np.uint64(old[i]) >> shift) & mask, lowest)
                larger_class[index] = kind
                larger_rank[index] = ranks[kind] + np.int64(count_ones(word & work[kind] & (bit - _1)))
                index += 1
            for c in range(CLASS_COUNT):
                part = extract(word, work[c])
                ranks[c] += np.int64(count_ones(part))
                at[c] = put(words, at[c], part, np.int64(count_ones(work[c])))
            rank = following
        else:
            for c in range(CLASS_COUNT):
                at[c] += np.int64(count_ones(work[c]))
    cursor[0], cursor[1] = rank, index


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
        kind = class_of((before >> shift) & mask, lowest)
        place = np.uint64(at[kind])
        at[kind] = place + _1
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
        kind = class_of((before >> shift) & mask, lowest)
        place = np.uint64(at[kind])
        at[kind] = place + _1
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
    these by class; `runs` = the position of each class in each of them. `so_far` = number of elements, changes and larger
    changes; `out` = changed, larger, excess."""
    words, larger_words, sorted_excess = coded
    at, larger_at, listed = runs
    changed, larger, excess = out
    shift, mask, lowest, work = octave
    bits, rank, index = so_far[0], so_far[1], so_far[2]
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
            kind = class_of((np.uint64(old[start + np.int64(trailing_zeros(bit))]) >> shift) & mask, lowest)
            larger[index] = rank + np.int64(count_ones(word & (bit - _1)))
            excess[index] = sorted_excess[listed[kind]]
            listed[kind] += 1
            index += 1
        rank += np.int64(count_ones(word))
    so_far[0], so_far[1], so_far[2] = bits, rank, index
