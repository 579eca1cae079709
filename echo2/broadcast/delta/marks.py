"""The changes of one block, as marks: finding them, what they add to the fingerprint, putting them in place; compiled.

A change is a sign and a magnitude, |new - old| of the raw bits as numbers, so that no change wraps (where elements have
64 bits, sums modulo 2^64 wrap as the fingerprint does, and the difference is read as signed). Most magnitudes are one:
64 such elements are compared, summed up or moved at once. The others' excess over one stands in a list beside.

Guarantees: nothing is written outside a segment; a change that would leave its element's range is reported, and taking
changes back restores every bit, even then. Leaves to others: the code of it all (bitset.py, block.py).

Legend: `cursor` = changes before the segment, larger ones before it; both are moved on. `larger` = which of the changes
have a magnitude above one (their ranks, rising), and `excess` = these magnitudes less one.
"""

from __future__ import annotations

import numpy as np

from echo2.broadcast.delta.bits import I64, U32, U64, Int, below, bits_at, put, word_count
from echo2.broadcast.delta.elements import Bits
from echo2.broadcast.delta.fingerprint import ROW_ELEMENTS, ROW_MASK, ROW_SHIFT, row_coefficient
from echo2.broadcast.delta.jit import (
    LANES,
    compare,
    compiled,
    count_ones,
    deposit,
    extract,
    inlined,
    move_marked,
    sum_marked,
    trailing_zeros,
)  # fmt: skip

_0 = np.uint64(0)
_1 = np.uint64(1)
_LAST_WHOLE = ROW_ELEMENTS - LANES
_LARGER_SHARE = 8


class Finds:
    """Working memory of one thread for the changes of blocks of up to so many elements of a type: two bits an element,
    and the larger changes of one in `_LARGER_SHARE` of them (where there are more, a second pass finds them)."""

    def __init__(self, size: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.size = size
        self.changed, self.signs = (np.empty(word_count(size), np.uint64) for _ in range(2))
        self.larger: U32 = np.empty(size // _LARGER_SHARE + LANES, np.uint32)
        self.excess: Bits = np.empty(self.larger.size, dtype)
        self._work = np.zeros(4, np.uint64)

    def restart(self, larger: U32 | None = None, excess: Bits | None = None) -> tuple[U64, U64, U32, Bits, U64]:
        """The memory, as `survey` takes it, for another block; with other room for its larger changes, if given."""
        self.changed[0] = self.signs[0] = 0
        room = self.larger if larger is None else larger, self.excess if excess is None else excess
        return self.changed, self.signs, *room, self._work


@inlined
def compare_tail(old: Bits, new: Bits, start: Int, out: U64) -> None:
    """As `jit.compare`, for fewer than 64 elements."""
    width = 8 * old.itemsize
    half = _1 << np.uint64(width - 1)
    out[0] = out[1] = out[2] = _0
    for i in range(start, old.size):
        bit = _1 << np.uint64(i - start)
        before, after = np.uint64(old[i]), np.uint64(new[i])
        if before == after:
            continue
        out[0] |= bit
        down = after - before >= half if width == 64 else after < before
        if down:
            out[1] |= bit
        magnitude = before - after if down else after - before
        if magnitude != _1:
            out[2] |= bit


@inlined
def _excess_of(old: Bits, new: Bits, i: Int) -> np.uint64:
    step = np.uint64(new[i]) - np.uint64(old[i])
    return min(step, _0 - step) - _1


@compiled
def survey(old: Bits, new: Bits, at: I64, finds: tuple[U64, U64, U32, Bits, U64]) -> None:
    """Which elements of a segment changed, which of these went down, which by more than one, and by how much more.

    `at` = elements, changes and larger ones so far; `finds` = these, of the last two as many as there is room for, and
    three words of working memory.
    """
    changed, signs, larger, excess, out = finds
    bits, rank, found = at[0], at[1], at[2]
    for start in range(0, old.size, LANES):
        left = old.size - start
        if left >= LANES:
            compare(old, new, start, out)
        else:
            compare_tail(old, new, start, out)
        word, lanes = out[0], out[2]
        bits = put(changed, bits, word, min(left, LANES))
        while lanes:
            bit = lanes & (_0 - lanes)
            lanes ^= bit
            if found < excess.size:
                larger[found] = rank + np.int64(count_ones(word & (bit - _1)))
                excess[found] = _excess_of(old, new, start + np.int64(trailing_zeros(bit)))
            found += 1
        rank = put(signs, rank, extract(out[1], word), np.int64(count_ones(word)))
    at[0], at[1], at[2] = bits, rank, found


@inlined
def rank_of_larger(larger: U32, found: Int) -> Int:
    """Which change the next larger one is; after the last, one that never comes."""
    return np.int64(larger[found]) if found < larger.size else np.int64(1 << 40)


@inlined
def _sum_word(word: np.uint64, down: np.uint64, element: Int, seed: np.uint64, columns: U64) -> np.uint64:
    """What up to 64 changes by one add, where these elements lie in two rows."""
    total = _0
    while word:
        lane = trailing_zeros(word)
        word &= word - _1
        place = element + np.int64(lane)
        number = columns[place & ROW_MASK] * row_coefficient(seed, np.uint64(place >> ROW_SHIFT))
        total += _0 - number if (down >> lane) & _1 else number
    return total


@compiled
def settle_marks(
    base: int, count: int, marks: tuple[U64, U64, U32, Bits], cursor: I64, print_at: tuple[int, np.uint64, U64]
) -> np.uint64:  # fmt: skip
    """What a segment's changes add to the fingerprint. `marks` = changed, signs, larger, excess; `print_at` = place of
    the segment in its tensor, the tensor's coefficients."""
    changed, signs, larger, excess = marks
    offset, seed, columns = print_at
    rank, found = cursor[0], cursor[1]
    total, row_sum = _0, _0
    row = np.int64(-1)
    upcoming = rank_of_larger(larger, found)
    for start in range(0, count, LANES):
        word = bits_at(changed, base + start) & below(count - start)
        if not word:
            continue
        down = deposit(bits_at(signs, rank), word)
        element = np.int64(offset + start)
        if element >> ROW_SHIFT != row:
            total += row_sum * row_coefficient(seed, np.uint64(row))
            row, row_sum = element >> ROW_SHIFT, _0
        column = element & ROW_MASK
        if column <= _LAST_WHOLE:
            row_sum += sum_marked(columns, column, word, down)
        else:
            total += _sum_word(word, down, element, seed, columns)
        following = rank + np.int64(count_ones(word))
        while upcoming < following:
            lane = trailing_zeros(deposit(_1 << np.uint64(upcoming - rank), word))
            place = element + np.int64(lane)
            number = columns[place & ROW_MASK] * np.uint64(excess[found])
            if (down >> lane) & _1:
                number = _0 - number
            if place >> ROW_SHIFT == row:
                row_sum += number
            else:
                total += number * row_coefficient(seed, np.uint64(place >> ROW_SHIFT))
            found += 1
            upcoming = rank_of_larger(larger, found)
        rank = following
    cursor[0], cursor[1] = rank, found
    return total + row_sum * row_coefficient(seed, np.uint64(row))


@inlined
def move(live: Bits, i: Int, by: np.uint64, down: np.uint64) -> np.uint64:
    """Moves one element; 1 if it passed the end of its range."""
    before = np.uint64(live[i])
    most = ~_0 >> np.uint64(64 - 8 * live.itemsize)
    live[i] = before - by if down else before + by
    return np.uint64(by > (before if down else most - before))


@compiled
def move_marks(
    live: Bits, base: int, marks: tuple[U64, U64, U32, Bits], cursor: I64, is_back: bool
) -> np.uint64:  # fmt: skip
    """Adds a segment's changes to its live bits, or takes them back. Returns how many passed the end of their range."""
    changed, signs, larger, excess = marks
    rank, found = cursor[0], cursor[1]
    flip = ~_0 if is_back else _0
    wrapped = _0
    upcoming = rank_of_larger(larger, found)
    for start in range(0, live.size, LANES):
        word = bits_at(changed, base + start) & below(live.size - start)
        if not word:
            continue
        down = deposit(bits_at(signs, rank), word) ^ flip
        if start + LANES <= live.size:
            wrapped += count_ones(move_marked(live, start, word, down))
        else:
            rest = word
            while rest:
                lane = trailing_zeros(rest)
                rest &= rest - _1
                wrapped += move(live, start + np.int64(lane), _1, (down >> lane) & _1)
        following = rank + np.int64(count_ones(word))
        while upcoming < following:
            lane = trailing_zeros(deposit(_1 << np.uint64(upcoming - rank), word))
            wrapped += move(live, start + np.int64(lane), np.uint64(excess[found]), (down >> lane) & _1)
            found += 1
            upcoming = rank_of_larger(larger, found)
        rank = following
    cursor[0], cursor[1] = rank, found
    return wrapped


@compiled
def list_steps(marks: tuple[U64, U32, Bits], steps: I64) -> None:
    """The step of every change, in 64-bit arithmetic. `marks` = signs, larger, excess."""
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
    """The reverse, for steps that are not 0: signs, and which are larger (both all 0 before). Returns how many are."""
    count = 0
    for rank in range(steps.size):
        bit = _1 << np.uint64(rank & 63)
        if steps[rank] < 0:
            signs[rank >> 6] |= bit
        if steps[rank] != 1 and steps[rank] != -1:
            larger[rank >> 6] |= bit
            count += 1
    return count
