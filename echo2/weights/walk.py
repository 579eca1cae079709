"""Changes listed by place, summed and applied one by one; compiled.

Like the kernels of marks.py, for rare changes: the time depends only on the number of changes, not on the elements between.

Guarantees: as in marks.py. Leaves to others: checking that all changes were used up.

Legend: as in marks.py. Places are positions in the block, strictly ascending.
"""

from __future__ import annotations

import numpy as np

from echo2.weights.bits import I64, U32, U64, Int, bit_at
from echo2.weights.elements import Bits
from echo2.weights.fingerprint import ROW_MASK, ROW_SHIFT, row_coefficient
from echo2.weights.jit import compiled, inlined, prefetch
from echo2.weights.marks import move

_0 = np.uint64(0)
_1 = np.uint64(1)
_6 = np.uint64(6)
_63 = np.uint64(63)
_SHIFT = np.uint64(ROW_SHIFT)
_MASK = np.uint64(ROW_MASK)
_AHEAD = 48  # how many changes ahead cache lines are prefetched


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
    base: int, count: int, coded: tuple[U32, U64], rank: Int, print_at: tuple[int, np.uint64, U64]
) -> tuple[np.uint64, Int]:  # fmt: skip
    """The fingerprint term of a segment's changes, counting each as a change by one, and the number of changes so far. The
    segment has `count` elements. `coded` = places, signs; `print_at` as in `marks.settle_larger`."""
    places, signs = coded
    offset, seed, columns = print_at
    at, stop = np.int64(rank), _first_from(places, rank, base + count)
    to_element = np.uint64(offset - base)  # modulo 2^64: adding it to a place of the segment gives an element's index
    total = _0
    while at < stop:  # one word of signs at a time: the sums are independent, so that the compiler can vectorise them
        down_from = signs[np.uint64(at) >> _6] >> (np.uint64(at) & _63)
        together = min(stop - at, 64 - (at & 63))
        mine = places[at : at + together]
        for j in range(together):
            element = np.uint64(mine[j]) + to_element
            number = columns[element & _MASK] * row_coefficient(seed, element >> _SHIFT)
            down = _0 - ((down_from >> np.uint64(j)) & _1)
            total += (number ^ down) - down
        at += together
    return total, stop


@compiled
def move_places(
    live: Bits, base: int, coded: tuple[U32, U64], larger: tuple[U32, U32, Bits, U64], cursor: I64, is_back: bool
) -> np.uint64:  # fmt: skip
    """Adds a segment's changes to its live bits, or subtracts them (`is_back`). Returns how many wrapped around.
    `coded` = places, signs; `larger` as in `marks.settle_larger`."""
    places, signs = coded
    larger_places, ranks, excess, _ = larger
    at, stop = np.uint64(cursor[0]), np.uint64(_first_from(places, cursor[0], base + live.size))
    flip = _1 if is_back else _0
    most = ~_0 >> np.uint64(64 - 8 * live.itemsize)
    first = np.uint64(base)
    last = np.uint64(max(places.size - 1, 0))
    wrapped = _0
    while at < stop:
        prefetch(live, np.int64(places[min(at + np.uint64(_AHEAD), last)]) - base)
        i = np.uint64(places[at]) - first
        before = np.uint64(live[i])
        down = bit_at(signs, at) ^ flip
        live[i] = before + _1 - (down << _1)
        wrapped += np.uint64((before + (down ^ _1)) & most == _0)
        at += _1
    found, found_stop = cursor[1], _first_from(larger_places, cursor[1], base + live.size)
    for k in range(found, found_stop):
        down = bit_at(signs, np.uint64(ranks[k])) ^ flip
        wrapped += move(live, np.int64(larger_places[k]) - base, np.uint64(excess[k]), down)
    cursor[0], cursor[1] = np.int64(stop), found_stop
    return wrapped
