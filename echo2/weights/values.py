"""Magnitudes above one, compiled: one entropy-coded symbol each, plus plain bits.

With v = magnitude - 2 the symbol is v if v < 16; otherwise, with e = floor(log2 v), it is 16 + 2(e - 4) + the bit of v below
its leading one, and the other e - 1 bits are stored plain.

Guarantees: reading stays within the given bits, and returns magnitudes of the element's width. Leaves to others:
which elements they belong to.

Legend: `excess` = magnitude - 1, of the element's unsigned type.
"""

from __future__ import annotations

import numpy as np

from echo2.weights.bits import U8, U64, Int, bits_at, put
from echo2.weights.elements import Bits
from echo2.weights.jit import compiled, inlined

_0 = np.uint64(0)
_1 = np.uint64(1)
_PLAIN = np.uint64(16)


@inlined
def _leading(value: np.uint64) -> Int:
    """The index of the highest one bit of a word >= 16."""
    place, half = np.int64(0), np.int64(32)
    while half:
        if value >> np.uint64(half):
            value >>= np.uint64(half)
            place += half
        half >>= 1
    return place


@compiled
def count_plain_bits(excess: Bits) -> Int:
    """The number of plain bits that these magnitudes take."""
    bits = np.int64(0)
    for i in range(excess.size):
        value = np.uint64(excess[i]) - _1
        if value >= _PLAIN:
            bits += _leading(value) - 1
    return bits


@compiled
def write_values(excess: Bits, symbols: U8, words: U64) -> None:
    """Writes the symbols and the plain bits; `words` must have room for `count_plain_bits` bits."""
    at: Int = 0
    for i in range(excess.size):
        value = np.uint64(excess[i]) - _1
        if value < _PLAIN:
            symbols[i] = value
            continue
        leading = _leading(value)
        next_bit = (value >> np.uint64(leading - 1)) & _1
        symbols[i] = np.uint64(8 + 2 * leading) + next_bit
        at = put(words, at, value & ((_1 << np.uint64(leading - 1)) - _1), leading - 1)


@compiled
def read_values(symbols: U8, words: U64, bits: int, excess: Bits) -> bool:
    """The inverse of `write_values`. False if the `bits` plain bits do not match the symbols, or a magnitude is too
    wide."""
    width = 8 * excess.itemsize
    most = (~_0 >> np.uint64(64 - width)) - _1
    at = np.int64(0)
    for i in range(symbols.size):
        value = np.uint64(symbols[i])
        if value >= _PLAIN:
            leading = np.int64(value >> _1) - 4
            if leading >= width or at + leading - 1 > bits:
                return False
            low = bits_at(words, at) & ((_1 << np.uint64(leading - 1)) - _1)
            value = (((value & _1) | np.uint64(2)) << np.uint64(leading - 1)) | low
            at += leading - 1
        if value >= most:
            return False
        excess[i] = value + _1
    return bool((at + 7) >> 3 == (bits + 7) >> 3)
