"""Runs of bits in words: appending, random access, and conversion from marks to places and gaps; compiled.

A mark is a one bit of a run; its place is its index. The gap before a marked place is the number of unmarked places
since the previous mark. A gap is coded as a byte, gap >> k, and k plain bits; a byte of 255 means that the gap is stored
in the list of long gaps instead.

Guarantees: no kernel reads or writes out of bounds for places below the given size; gaps that lead beyond
it are reported. Leaves to others: entropy coding (bitset.py), what the marks mean (marks.py, classes.py).

Legend: a run of n bits is stored in n // 64 + 2 words, so that 64 bits can be loaded from any place in the run.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echo2.weights.jit import compiled, count_ones, inlined, trailing_zeros
from echo2.weights.lanes import GAPS, LISTED, NOT_ALL_SHORT, PLACES_OF_BYTE, add_gaps, list_byte

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Int = int | np.int64

LONG = 255  # the byte of a gap that is stored in the list of long gaps
_PLACES = PLACES_OF_BYTE.ravel()
_0 = np.uint64(0)
_1 = np.uint64(1)
_6 = np.uint64(6)
_63 = np.uint64(63)
_LONG = np.uint64(LONG)


def word_count(bits: int) -> int:
    """Number of words in which a run of `bits` bits is stored."""
    return bits // 64 + 2


@inlined
def put(words: U64, at: Int, value: np.uint64, count: Int) -> Int:
    """Appends the low `count` bits of `value`, whose other bits are 0, to a run of `at` bits; returns the new length. The first
    word of a run must be 0 initially."""
    word, shift = np.uint64(at) >> _6, np.uint64(at) & _63
    words[word] |= value << shift
    # Two shifts, because a shift by 64 (shift = 0) is undefined on the processor. The next word is assigned, not or-ed:
    # so only a run's first word has to be 0 beforehand.
    words[word + _1] = (value >> _1) >> (_63 - shift)
    return at + count


@inlined
def bits_at(words: U64, at: Int) -> np.uint64:
    """The 64 bits from bit `at` on."""
    word, shift = np.uint64(at) >> _6, np.uint64(at) & _63
    # Two shifts for the same reason as in `put`; the second load is why a run has a spare word.
    found: np.uint64 = (words[word] >> shift) | ((words[word + _1] << _1) << (_63 - shift))
    return found


@inlined
def bit_at(words: U64, at: np.uint64) -> np.uint64:
    """Bit `at`."""
    bit: np.uint64 = (words[at >> _6] >> (at & _63)) & _1
    return bit


@inlined
def below(count: Int) -> np.uint64:
    """A word whose low `count` bits are 1; all 64 from 64 on."""
    return ~_0 if count >= 64 else (_1 << np.uint64(count)) - _1


@compiled
def count_marks(words: U64, count: int) -> Int:
    """The number of ones among the first `count` bits."""
    total = _0
    for at in range(0, count, 64):
        total += count_ones(words[at >> 6] & below(count - at))
    return np.int64(total)


@compiled
def gaps_of_places(places: U32, k: int, out: tuple[U8, U64, U32]) -> Int:
    """Codes the gaps of marks (at least one). `out` = bytes, plain bits, long gaps; returns the number of long
    gaps."""
    quotients, low, long = out
    shift = np.uint64(k)
    first = min(np.uint64(places[0]) >> shift, _LONG)
    quotients[0] = first
    # This pass only counts the long gaps: without a branch the compiler can vectorise it, and blocks with a long
    # gap are rare.
    longer = np.int64(first == _LONG)
    for i in range(1, places.size):
        quotient = min((np.uint64(places[i]) - np.uint64(places[i - 1]) - _1) >> shift, _LONG)
        quotients[i] = quotient
        longer += np.int64(quotient == _LONG)
    if longer:
        _list_long(places, quotients, long)
    if k:
        _low_bits(places, k, low)
    return longer


@inlined
def _gap_before(places: U32, i: Int) -> np.uint64:
    return np.uint64(places[i]) - np.uint64(places[i - 1]) - _1 if i else np.uint64(places[0])


@inlined
def _list_long(places: U32, quotients: U8, long: U32) -> None:
    found = 0
    for i in range(places.size):
        if quotients[i] == LONG:
            long[found] = _gap_before(places, i)
            found += 1


@inlined
def _low_bits(places: U32, k: int, low: U64) -> None:
    """Writes the low k bits of every gap, as many at a time as fit into a word."""
    shift = np.uint64(k)
    mask = (_1 << shift) - _1
    # Gathered in a register first, because each `put` waits for the word that the previous one wrote.
    together = 64 // k
    bits: Int = 0
    for start in range(0, places.size, together):
        end = min(start + together, places.size)
        word, at = _0, _0
        for i in range(start, end):
            word |= (_gap_before(places, i) & mask) << at
            at += shift
        bits = put(low, bits, word, (end - start) * k)


@compiled
def places_of_gaps(gaps: tuple[U8, U64, U32], k: int, count: int, places: U32) -> bool:
    """The inverse. False if a place is not below `count`, or the number of long gaps does not match the bytes."""
    quotients, low, long = gaps
    shift = np.uint64(k)
    mask = (_1 << shift) - _1
    after = _0
    longer = np.int64(0)
    i: Int = 0
    while i < quotients.size:
        end = min(i + GAPS, quotients.size)
        # Sixteen at once if there are no plain bits; if one of them turns out to be long, they are read again one by one.
        if k == 0 and end - i == GAPS:
            following = add_gaps(quotients, i, after, places)
            if following != NOT_ALL_SHORT:
                after = following
                i = end
                continue
        while i < end:
            gap = np.uint64(quotients[i])
            if gap == _LONG:
                if longer == long.size:
                    return False
                gap = np.uint64(long[longer])
                longer += 1
            elif k:
                gap = (gap << shift) | (bits_at(low, i * k) & mask)
            after += gap
            places[i] = after
            after += _1
            i += 1
    # Places ascend, and 2^24 gaps of 32 bits do not overflow: if the last one is in range, all are.
    return bool(after <= np.uint64(count) and longer == long.size)


@inlined
def list_few(word: np.uint64, base: np.uint64, places: U32, found: Int, usual: int) -> Int:
    """Like `list_word`, but faster for words with at most `usual` marks (`usual` <= `LISTED`)."""
    # The first loop always runs its full count: a branch on the number of marks would be mispredicted at every other word,
    # which costs more than writing places that the next word overwrites.
    following = found + np.int64(count_ones(word))
    for i in range(usual):
        places[found + i] = base + trailing_zeros(word)
        word &= word - _1
    found += usual
    while word:
        places[found] = base + trailing_zeros(word)
        word &= word - _1
        found += 1
    return following


@inlined
def list_word(word: np.uint64, base: np.uint64, places: U32, found: Int) -> Int:
    """Writes the places of a word's marks, each plus `base`, from index `found` on. Returns the index after them;
    `places` must have room for `LISTED` more. The time does not depend on the number of marks."""
    for byte in range(8):
        part = (word >> np.uint64(8 * byte)) & np.uint64(255)
        list_byte(_PLACES, part, base + np.uint64(8 * byte), places, found)
        found += np.int64(count_ones(part))
    return found


@compiled
def places_of_marks(words: U64, count: int, places: U32) -> Int:
    """Lists the places of the marks among the first `count` bits; returns their number. `places` must have room for `LISTED`
    more."""
    found: Int = 0
    marked = places.size - LISTED
    # With up to 64 / 24 = 2.7 marks per word on average, four are rarely exceeded; with up to 64 / 12 = 5.3, eight.
    if marked * 24 < count:
        for at in range(0, count, 64):
            found = list_few(words[at >> 6] & below(count - at), np.uint64(at), places, found, 4)
    elif marked * 12 < count:
        for at in range(0, count, 64):
            found = list_few(words[at >> 6] & below(count - at), np.uint64(at), places, found, 8)
    else:
        for at in range(0, count, 64):
            found = list_word(words[at >> 6] & below(count - at), np.uint64(at), places, found)
    return found


@compiled
def marks_of_places(places: U32, words: U64) -> None:
    """Sets the marks at `places` in `words`, all 0 before."""
    for i in range(places.size):
        at = np.uint64(places[i])
        words[at >> _6] |= _1 << (at & _63)
