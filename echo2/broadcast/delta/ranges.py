"""The range coder: adaptive binary decisions, for magnitudes and for elements that change often; compiled.

A magnitude is coded as its bit length (one decision a bit, each with a probability of its own), the two bits below the
leading one likewise, and the rest as they are. An element of class 0 begins with the decision whether it changed. All
probabilities belong to a context: the exponent of the old weight in the `dense` setting, a single one in `fast`. They
start at one half, learn quickly at first and then slowly (rates 1/2 to 1/128).

Guarantees: decoding reads no byte past its stream and returns a magnitude of the element's width. Leaves to others:
streams and pages (bitstream.py).

Legend: `coder` while encoding = low, range, held byte, held bytes; while decoding = range, code, next byte, end.
`odds[context, node]` = probability of 0 (16 bits) << 8 | decisions seen. Nodes: 0..W-1 bit length, W.. the two bits.
"""

from __future__ import annotations

import numpy as np

from echo2.broadcast.delta.bitstream import I64, U8, U32, U64, put
from echo2.broadcast.delta.jit import compiled, inlined

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_8 = np.uint64(8)
_16 = np.uint64(16)
_24 = np.uint64(24)
_32 = np.uint64(32)
_255 = np.uint64(255)
_TOP = np.uint64(1 << 24)
_ONE = np.uint64(1 << 16)
_CARRY = np.uint64(1 << 32)
_LOW24 = np.uint64((1 << 24) - 1)
_LOW32 = np.uint64((1 << 32) - 1)
_PENDING = np.uint64(0xFF000000)
_START = np.uint32((1 << 15) << 8)
SEEN_MAX = 127
# Shift by which a probability moves after so many decisions: about 1 / (seen + 1.5), at the least 1/128.
_RATES = np.array([min(7, max(1, round(np.log2(seen + 1.5)))) for seen in range(SEEN_MAX + 1)], np.uint8)


def new_odds(context_count: int, width: int) -> U32:
    """Fresh probabilities: for each context a change decision (node 4W) and a magnitude's."""
    return np.full((context_count, 4 * width + 1), _START, np.uint32)


def new_encoder() -> U64:
    """A range encoder that has coded nothing."""
    return np.array([0, (1 << 32) - 1, 0, 1], np.uint64)


@inlined
def _learn(odds: U32, context: np.uint64, node: np.uint64, bit: np.uint64) -> None:
    state = np.uint64(odds[context, node])
    seen = state & _255
    chance = state >> _8
    rate = np.uint64(_RATES[seen])
    if bit:
        chance -= chance >> rate
    else:
        chance += (_ONE - chance) >> rate
    if seen < np.uint64(SEEN_MAX):
        seen += _1
    odds[context, node] = np.uint32((chance << _8) | seen)


@compiled
def _shift_low(arena: U64, writers: U64, pages: U8, used: I64, coder: U64) -> bool:
    """Moves the top byte out; it is held back while a carry may still change it."""
    low = coder[0]
    if low < _PENDING or low >= _CARRY:
        carry = low >> _32
        while coder[3] > _0:
            if not put(arena, writers, pages, used, 0, (coder[2] + carry) & _255, _8):
                return False
            coder[2] = _255
            coder[3] -= _1
        coder[2] = (low >> _24) & _255
    coder[3] += _1
    coder[0] = (low & _LOW24) << _8
    return True


@inlined
def put_bit(
    arena: U64,
    writers: U64,
    pages: U8,
    used: I64,
    coder: U64,
    odds: U32,
    at: tuple[np.uint64, np.uint64],
    bit: np.uint64,
) -> bool:
    """Codes one decision at `at` = (context, node). False: the arena is full."""
    context, node = at
    bound = (coder[1] >> _16) * (np.uint64(odds[context, node]) >> _8)
    if bit:
        coder[0] += bound
        coder[1] -= bound
    else:
        coder[1] = bound
    _learn(odds, context, node, bit)
    while coder[1] < _TOP:
        coder[1] <<= _8
        if not _shift_low(arena, writers, pages, used, coder):
            return False
    return True


@inlined
def _put_plain(arena: U64, writers: U64, pages: U8, used: I64, coder: U64, value: np.uint64, count: np.uint64) -> bool:
    """Codes `count` bits that are as likely 0 as 1, up to 16 at a time."""
    while count > _0:
        some = min(count, _16)
        count -= some
        coder[1] >>= some
        coder[0] += coder[1] * ((value >> count) & ((_1 << some) - _1))
        while coder[1] < _TOP:
            coder[1] <<= _8
            if not _shift_low(arena, writers, pages, used, coder):
                return False
    return True


@inlined
def _bit_length(value: np.uint64) -> np.uint64:
    length = _0
    while value > _0:
        value >>= _1
        length += _1
    return length


@compiled
def _put_longer(
    arena: U64, writers: U64, pages: U8, used: I64, coder: U64, odds: U32, context_width: tuple[np.uint64, np.uint64],
    size: np.uint64,
) -> bool:  # fmt: skip
    """The rest of a magnitude of two or more, after the decision that its length is above 1."""
    context, width = context_width
    length = _bit_length(size)
    for shorter in range(_1, length):
        more = np.uint64(shorter) + _1
        if more < width and not put_bit(
            arena, writers, pages, used, coder, odds, (context, np.uint64(shorter)), _1 if more < length else _0
        ):
            return False
    below = length - _1
    node = width + _3 * below
    first = (size >> (below - _1)) & _1
    if not put_bit(arena, writers, pages, used, coder, odds, (context, node), first):
        return False
    if below == _1:
        return True
    second = (size >> (below - _2)) & _1
    if not put_bit(arena, writers, pages, used, coder, odds, (context, node + _1 + first), second):
        return False
    rest = below - _2
    return _put_plain(arena, writers, pages, used, coder, size & ((_1 << rest) - _1), rest)


@inlined
def put_magnitude(
    arena: U64, writers: U64, pages: U8, used: I64, coder: U64, odds: U32, context_width: tuple[np.uint64, np.uint64],
    size: np.uint64,
) -> bool:  # fmt: skip
    """Codes a magnitude from 1 to 2^(W-1). False: the arena is full."""
    context, _ = context_width
    more = _1 if size > _1 else _0
    if not put_bit(arena, writers, pages, used, coder, odds, (context, _0), more):
        return False
    if not more:
        return True
    return _put_longer(arena, writers, pages, used, coder, odds, context_width, size)


@inlined
def put_sign(arena: U64, writers: U64, pages: U8, used: I64, coder: U64, sign: np.uint64) -> bool:
    """Codes one bit that is as likely 0 as 1."""
    return _put_plain(arena, writers, pages, used, coder, sign, _1)


@compiled
def finish_encoder(arena: U64, writers: U64, pages: U8, used: I64, coder: U64) -> bool:
    """Moves out what is held."""
    for _ in range(5):  # noqa: SIM110 - compiled code has no generators
        if not _shift_low(arena, writers, pages, used, coder):
            return False
    return True


@inlined
def _next_byte(data: U8, coder: U64) -> np.uint64:
    """The next byte; zeros behind the end (a damaged payload then decodes to something that is refused later)."""
    at = coder[2]
    coder[2] = at + _1
    return np.uint64(data[at]) if at < coder[3] else _0


@compiled
def start_decoder(data: U8, coder: U64) -> None:
    """`coder[2]` and `coder[3]` hold the stream's begin and end."""
    coder[0] = _LOW32
    coder[1] = _0
    for _ in range(5):
        coder[1] = ((coder[1] << _8) | _next_byte(data, coder)) & _LOW32


@inlined
def get_bit(data: U8, coder: U64, odds: U32, context: np.uint64, node: np.uint64) -> np.uint64:
    """Decodes one decision."""
    bound = (coder[0] >> _16) * (np.uint64(odds[context, node]) >> _8)
    if coder[1] < bound:
        coder[0] = bound
        bit = _0
    else:
        coder[0] -= bound
        coder[1] -= bound
        bit = _1
    _learn(odds, context, node, bit)
    while coder[0] < _TOP:
        coder[0] <<= _8
        coder[1] = ((coder[1] << _8) | _next_byte(data, coder)) & _LOW32
    return bit


@inlined
def get_plain(data: U8, coder: U64, count: np.uint64) -> np.uint64:
    """Decodes `count` bits coded as they are."""
    value = _0
    while count > _0:
        some = min(count, _16)
        count -= some
        coder[0] >>= some
        part = min(coder[1] // coder[0], (_1 << some) - _1)
        coder[1] -= part * coder[0]
        value = (value << some) | part
        while coder[0] < _TOP:
            coder[0] <<= _8
            coder[1] = ((coder[1] << _8) | _next_byte(data, coder)) & _LOW32
    return value


@compiled
def _get_longer(data: U8, coder: U64, odds: U32, context: np.uint64, width: np.uint64) -> np.uint64:
    below = _1
    while below + _1 < width and get_bit(data, coder, odds, context, below):
        below += _1
    node = width + _3 * below
    first = get_bit(data, coder, odds, context, node)
    value = _2 | first
    if below == _1:
        return value
    value = (value << _1) | get_bit(data, coder, odds, context, node + _1 + first)
    rest = below - _2
    return (value << rest) | get_plain(data, coder, rest)


@inlined
def get_magnitude(data: U8, coder: U64, odds: U32, context: np.uint64, width: np.uint64) -> np.uint64:
    """Decodes a magnitude, at least 1 and below 2^W."""
    if not get_bit(data, coder, odds, context, _0):
        return _1
    return _get_longer(data, coder, odds, context, width)
