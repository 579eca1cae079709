"""Words of bits: appending, reading anywhere, and going over from marks to places and gaps; compiled.

A mark is a bit of a run of them, place its number. The gap before a marked place is how many unmarked ones there are
since the last. A gap is coded as a byte, gap >> k, and k plain bits; a byte of 255 says that the gap stands among the
long ones instead.

Guarantees: no kernel writes or reads outside its arrays for places that are below the size given; what gaps lead beyond
it is reported. Leaves to others: entropy coding (bitset.py), what the marks mean (marks.py, classes.py).

Legend: a run of n bits is kept in n // 64 + 2 words, so that any 64 bits from a place of the run on can be loaded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echo2.broadcast.delta.jit import compiled, count_ones, inlined, trailing_zeros

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Int = int | np.int64

LONG = 255  # the byte of a gap that stands among the long ones
_0 = np.uint64(0)
_1 = np.uint64(1)
_63 = np.uint64(63)


def word_count(bits: int) -> int:
    """Words that a run of so many bits is kept in."""
    return bits // 64 + 2


@inlined
def put(words: U64, at: Int, value: np.uint64, count: Int) -> Int:
    """Writes the low `count` bits of `value`, whose others are 0, behind the `at` bits that are there. Returns how many
    are there then. The first word of a run is 0 at first."""
    word, shift = at >> 6, np.uint64(at & 63)
    words[word] |= value << shift
    words[word + 1] = (value >> _1) >> (_63 - shift)
    return at + count


@inlined
def bits_at(words: U64, at: Int) -> np.uint64:
    """The 64 bits from bit `at` on."""
    word, shift = at >> 6, np.uint64(at & 63)
    found: np.uint64 = (words[word] >> shift) | ((words[word + 1] << _1) << (_63 - shift))
    return found


@inlined
def below(count: Int) -> np.uint64:
    """A word whose low `count` bits, at most 64, are 1."""
    return ~_0 if count >= 64 else (_1 << np.uint64(count)) - _1


@compiled
def count_marks(words: U64, count: int) -> Int:
    """How many of the first `count` bits are 1."""
    total = _0
    for at in range(0, count, 64):
        total += count_ones(words[at >> 6] & below(count - at))
    return np.int64(total)


@compiled
def gaps_of_marks(words: U64, count: int, k: int, out: tuple[U8, U64, U32]) -> Int:
    """The gaps of the marks among the first `count` bits, in code. `out` = bytes, plain bits, long ones, of which it
    returns the number."""
    quotients, low, long = out
    shift = np.uint64(k)
    mask = (_1 << shift) - _1
    found, longer = 0, 0
    bits: Int = 0
    last = np.int64(-1)
    for at in range(0, count, 64):
        marks = words[at >> 6] & below(count - at)
        while marks:
            place = at + np.int64(trailing_zeros(marks))
            marks &= marks - _1
            gap = np.uint64(place - last - 1)
            last = place
            quotient = gap >> shift
            if quotient >= np.uint64(LONG):
                long[longer] = gap
                longer += 1
                quotient = np.uint64(LONG)
            quotients[found] = quotient
            found += 1
            if k:
                bits = put(low, bits, gap & mask, k)
    return longer


@compiled
def gaps_of_places(places: U32, k: int, out: tuple[U8, U64, U32]) -> Int:
    """As `gaps_of_marks`, of places that are known."""
    quotients, low, long = out
    shift = np.uint64(k)
    mask = (_1 << shift) - _1
    longer = 0
    bits: Int = 0
    last = np.int64(-1)
    for i in range(places.size):
        place = np.int64(places[i])
        gap = np.uint64(place - last - 1)
        last = place
        quotient = gap >> shift
        if quotient >= np.uint64(LONG):
            long[longer] = gap
            longer += 1
            quotient = np.uint64(LONG)
        quotients[i] = quotient
        if k:
            bits = put(low, bits, gap & mask, k)
    return longer


@inlined
def gap_at(gaps: tuple[U8, U64, U32], k: Int, i: Int, longer: Int) -> Int:
    """Gap `i`, of which `longer` before it were long."""
    quotients, low, long = gaps
    quotient = np.int64(quotients[i])
    if quotient == LONG:
        return np.int64(long[longer]) if longer < long.size else np.int64(1 << 40)
    if k == 0:
        return quotient
    rest = bits_at(low, i * k) & ((_1 << np.uint64(k)) - _1)
    return (quotient << k) | np.int64(rest)


@compiled
def marks_of_gaps(gaps: tuple[U8, U64, U32], k: int, count: int, words: U64) -> bool:
    """Sets the marks that the gaps stand for in `words`, all 0. False: one is not below `count`, or long ones are left
    over."""
    at, longer = np.int64(0), np.int64(0)
    for i in range(gaps[0].size):
        at += gap_at(gaps, k, i, longer)
        longer += np.int64(gaps[0][i] == LONG)
        if at >= count:
            return False
        words[at >> 6] |= _1 << np.uint64(at & 63)
        at += 1
    return bool(longer == gaps[2].size)


@compiled
def places_of_gaps(gaps: tuple[U8, U64, U32], k: int, count: int, places: U32) -> bool:
    """As `marks_of_gaps`, to the places themselves."""
    at, longer = np.int64(0), np.int64(0)
    for i in range(gaps[0].size):
        at += gap_at(gaps, k, i, longer)
        longer += np.int64(gaps[0][i] == LONG)
        if at >= count:
            return False
        places[i] = at
        at += 1
    return bool(longer == gaps[2].size)


@compiled
def places_of_marks(words: U64, count: int, places: U32) -> Int:
    """The places of the marks among the first `count` bits. Returns how many there are."""
    found = 0
    for at in range(0, count, 64):
        marks = words[at >> 6] & below(count - at)
        while marks:
            places[found] = at + np.int64(trailing_zeros(marks))
            marks &= marks - _1
            found += 1
    return found


@compiled
def marks_of_places(places: U32, words: U64) -> None:
    """Sets marks in `words`, all 0."""
    for i in range(places.size):
        at = np.int64(places[i])
        words[at >> 6] |= _1 << np.uint64(at & 63)
