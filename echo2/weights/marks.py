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

from echo2.weights.bits import I64, U32, U64, Int, below, bit_at, bits_at, list_few, put, word_count
from echo2.weights.elements import Bits
from echo2.weights.fingerprint import ROW_ELEMENTS, ROW_MASK, ROW_SHIFT, row_coefficient
from echo2.weights.jit import compiled, count_ones, deposit, extract, inlined, trailing_zeros
from echo2.weights.lanes import LANES, LISTED, compare, move_marked, sum_marked

_0 = np.uint64(0)
_1 = np.uint64(1)
_ROW = np.uint64(ROW_SHIFT)
_COLUMN = np.uint64(ROW_MASK)
_LAST_WHOLE = ROW_ELEMENTS - LANES
_LARGER_SHARE = 8


Found = tuple[U64, U64, U32, U32, Bits, U64]


class Finds:
    """Working memory of one thread for the changes of blocks of up to so many elements of a type: two bits an element,
    and the larger changes of one in `_LARGER_SHARE` of them (where there are more, a second pass finds them)."""

    def __init__(self, size: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.size = size
        self.changed, self.signs = (np.empty(word_count(size), np.uint64) for _ in range(2))
        self.larger, self.places = (np.empty(size // _LARGER_SHARE + LANES, np.uint32) for _ in range(2))
        self.excess: Bits = np.empty(self.larger.size, dtype)
        self._work = np.zeros(4, np.uint64)

    def restart(self, room: tuple[U32, U32, Bits] | None = None) -> Found:
        """The memory, as `survey` takes it, for another block; with other room for its larger changes, if given."""
        self.changed[0] = self.signs[0] = 0
        return self.changed, self.signs, *(room or (self.larger, self.places, self.excess)), self._work


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
        # Below 64 bits a sign can be told from the numbers themselves; of 64 bits only the wrapped difference is known.
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
def survey(old: Bits, new: Bits, at: I64, finds: Found) -> None:
    """Which elements of a segment changed, which of these went down, which by more than one, and by how much more.

    `at` = elements, changes and larger ones so far; `finds` = changed, signs, and of the larger ones as many as there is
    room for: ranks among the changes, places, excess; working memory.
    """
    changed, signs, larger, places, excess, out = finds
    bits, rank, found = at[0], at[1], at[2]
    for start in range(0, old.size, LANES):
        left = old.size - start
        if left >= LANES:
            compare(old, new, start, out)
        else:
            compare_tail(old, new, start, out)
        word, lanes = out[0], out[2]
        while lanes:
            bit = lanes & (_0 - lanes)
            lanes ^= bit
            # Counted beyond the room as well: the caller makes that much and asks again.
            if found < excess.size:
                lane = np.int64(trailing_zeros(bit))
                larger[found] = rank + np.int64(count_ones(word & (bit - _1)))
                places[found] = bits + lane
                excess[found] = _excess_of(old, new, start + lane)
            found += 1
        # Signs are kept for changed elements alone: `extract` closes the gaps between their bits.
        bits = put(changed, bits, word, min(left, LANES))
        rank = put(signs, rank, extract(out[1], word), np.int64(count_ones(word)))
    at[0], at[1], at[2] = bits, rank, found


@compiled
def places_of_larger(changed: U64, count: int, larger: U64, places: U32) -> None:
    """Where the larger changes are among `count` elements. `larger` = marks among the changes; `places` has room for
    `LISTED` more than there are."""
    rank: Int = 0
    found: Int = 0
    for at in range(0, count, LANES):
        word = changed[at >> 6] & below(count - at)
        lanes = deposit(bits_at(larger, rank), word)
        found = list_few(lanes, np.uint64(at), places, found, LISTED)
        rank += np.int64(count_ones(word))


@compiled
def pick(places: U32, ranks: U32, out: U32) -> None:
    """The places of these ranks, which are below their number."""
    for i in range(ranks.size):
        out[i] = places[np.uint64(ranks[i])]


@compiled
def settle_larger(
    base: int, count: int, larger: tuple[U32, U32, Bits, U64], found: Int, print_at: tuple[int, np.uint64, U64]
) -> tuple[np.uint64, Int]:  # fmt: skip
    """What the larger ones of a segment's changes add to the fingerprint beyond one, and how many there are so far.
    `larger` = places in the block, ranks, excess, signs; `print_at` = place of the segment in its tensor, the tensor's
    coefficients."""
    places, ranks, excess, signs = larger
    offset, seed, columns = print_at
    to_element = np.uint64(offset - base)  # modulo 2^64: adding it to a place of the segment gives an element's index
    i, stop = np.uint64(found), np.uint64(places.size)
    total, row_sum, row = _0, _0, _0
    while i < stop and np.int64(places[i]) < base + count:
        element = np.uint64(places[i]) + to_element
        # A row's coefficient multiplies the sum of its row: one multiplication for each row that has a change, not for each
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


@inlined
def _sum_lanes(word: np.uint64, down: np.uint64, column: Int, columns: U64) -> np.uint64:
    """What changes by one add, at the end of a row."""
    total = _0
    while word:
        lane = trailing_zeros(word)
        word &= word - _1
        number = columns[column + np.int64(lane)]
        total += _0 - number if (down >> lane) & _1 else number
    return total


@compiled
def settle_marks(
    base: int, count: int, marks: tuple[U64, U64], rank: Int, print_at: tuple[int, np.uint64, U64]
) -> tuple[np.uint64, Int]:  # fmt: skip
    """What a segment's changes add to the fingerprint if all are by one, and how many changes there are so far. `marks` =
    changed, signs."""
    changed, signs = marks
    offset, seed, columns = print_at
    total = _0
    so_far = np.int64(rank)
    start: Int = 0
    while start < count:  # row by row of the fingerprint
        column = (offset + start) & ROW_MASK
        size = min(count - start, ROW_ELEMENTS - column)
        row_sum = _0
        for at in range(0, size, LANES):
            word = bits_at(changed, base + start + at) & below(size - at)
            down = deposit(bits_at(signs, so_far), word)
            # The table of coefficients has one row: 64 of them cannot be loaded from where fewer are left.
            if column + at <= _LAST_WHOLE:
                row_sum += sum_marked(columns, column + at, word, down)
            else:
                row_sum += _sum_lanes(word, down, column + at, columns)
            so_far += np.int64(count_ones(word))
        total += row_sum * row_coefficient(seed, np.uint64((offset + start) >> ROW_SHIFT))
        start += size
    return total, so_far


@inlined
def move(live: Bits, i: Int, by: np.uint64, down: np.uint64) -> np.uint64:
    """Moves one element; 1 if it passed the end of its range."""
    before = np.uint64(live[i])
    most = ~_0 >> np.uint64(64 - 8 * live.itemsize)
    live[i] = before - by if down else before + by
    return np.uint64(by > (before if down else most - before))


@inlined
def _move_lanes(live: Bits, start: Int, word: np.uint64, down: np.uint64) -> np.uint64:
    """Moves those of the last elements, fewer than 64, by one. Returns how many passed the end of their range."""
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
    """Adds a segment's changes to its live bits, or takes them back. Returns how many passed the end of their range.

    All are moved by one, 64 at a time; the larger ones among `ROW_ELEMENTS` once more, while these are at hand.
    `larger` as in `settle_larger`.
    """
    changed, signs = marks
    places, ranks, excess, _ = larger
    rank, found = cursor[0], np.uint64(cursor[1])
    # Taking back is moving the other way, in the same order: each element ends on its old bits whichever step comes first,
    # since sums wrap.
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
        # After every row and not at the end: its elements are still in the cache.
        while found < places.size and np.int64(places[found]) < base + start + size:
            down = bit_at(signs, np.uint64(ranks[found])) ^ (flip & _1)
            wrapped += move(live, np.int64(places[found]) - base, np.uint64(excess[found]), down)
            found += _1
    cursor[0], cursor[1] = rank, np.int64(found)
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
