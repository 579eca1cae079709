"""Changes that are coded as gaps, summed up and put in place without going over to marks; compiled.

As the kernels of marks.py, for rare changes: time is that of the changes alone, whatever lies between them.

Guarantees: as marks.py. Leaves to others: checking that all gaps were used up.

Legend: `cursor` = changes before the segment, larger ones before it, the first place of the block that the next change
can be at, long gaps before it; all are moved on. `coded` = the gaps, then signs, larger, excess as in marks.py.
"""

from __future__ import annotations

import numpy as np

from echo2.broadcast.delta.bits import I64, LONG, U8, U32, U64, gap_at
from echo2.broadcast.delta.elements import Bits
from echo2.broadcast.delta.fingerprint import ROW_MASK, ROW_SHIFT, row_coefficient
from echo2.broadcast.delta.jit import compiled, prefetch
from echo2.broadcast.delta.marks import move, rank_of_larger

_0 = np.uint64(0)
_1 = np.uint64(1)
PLACES = 64  # changes whose cache lines are asked for together


@compiled
def settle_gaps(
    base: int, count: int, gaps: tuple[U8, U64, U32], shift: int, coded: tuple[U64, U32, Bits], cursor: I64,
    print_at: tuple[int, np.uint64, U64],
) -> np.uint64:  # fmt: skip
    """What the changes of a segment of `count` elements add to the fingerprint. `print_at` as in `settle_marks`."""
    signs, larger, excess = coded
    offset, seed, columns = print_at
    rank, found, free, longer = cursor[0], cursor[1], cursor[2], cursor[3]
    total, row_sum = _0, _0
    row = np.int64(-1)
    end = base + count
    upcoming = rank_of_larger(larger, found)
    size = gaps[0].size
    to_element = offset - base
    while rank < size:
        place = free + gap_at(gaps, shift, rank, longer)
        if place >= end:
            break
        longer += np.int64(gaps[0][rank] == LONG)
        free = place + 1
        element = np.int64(place + to_element)
        if element >> ROW_SHIFT != row:
            total += row_sum * row_coefficient(seed, np.uint64(row))
            row, row_sum = element >> ROW_SHIFT, _0
        number = columns[element & ROW_MASK]
        if rank == upcoming:
            number += number * np.uint64(excess[found])
            found += 1
            upcoming = rank_of_larger(larger, found)
        down = _0 - ((signs[rank >> 6] >> np.uint64(rank & 63)) & _1)
        row_sum += (number ^ down) - down
        rank += 1
    cursor[0], cursor[1], cursor[2], cursor[3] = rank, found, free, longer
    return total + row_sum * row_coefficient(seed, np.uint64(row))


@compiled
def move_gaps(
    live: Bits, base: int, gaps: tuple[U8, U64, U32], shift: int, coded: tuple[U64, U32, Bits], cursor: I64,
    is_back: bool, places: I64,
) -> np.uint64:  # fmt: skip
    """Adds a segment's changes to its live bits, or takes them back. Returns how many passed the end of their range.

    `places` is room for those of some changes: their cache lines are asked for before the first of them is needed.
    """
    signs, larger, excess = coded
    rank, found, free, longer = cursor[0], cursor[1], cursor[2], cursor[3]
    flip = _1 if is_back else _0
    wrapped = _0
    end = base + live.size
    upcoming = rank_of_larger(larger, found)
    size = gaps[0].size
    count = np.int64(-1)
    while count != 0:
        count = np.int64(0)
        while count < places.size and rank + count < size:
            place = free + gap_at(gaps, shift, rank + count, longer)
            if place >= end:
                break
            longer += np.int64(gaps[0][rank + count] == LONG)
            free = place + 1
            places[count] = place - base
            prefetch(live, np.int64(place - base))
            count += 1
        for i in range(count):
            by = _1
            if rank == upcoming:
                by += np.uint64(excess[found])
                found += 1
                upcoming = rank_of_larger(larger, found)
            wrapped += move(live, places[i], by, ((signs[rank >> 6] >> np.uint64(rank & 63)) & _1) ^ flip)
            rank += 1
    cursor[0], cursor[1], cursor[2], cursor[3] = rank, found, free, longer
    return wrapped
