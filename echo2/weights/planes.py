"""Codes whole elements losslessly: as byte planes, of which those that compress are entropy-coded.

Elements whose type has an 8-bit (or wider) exponent are rotated left by one bit, so that the exponent fills the
highest byte. That plane shrinks to about a third; the mantissa planes are noise and stay raw. Works on parts of
256Ki elements, so that temporaries stay small whatever the block size.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard

from echo2.base.errors import DeltaFormatError
from echo2.weights.bits import U8
from echo2.weights.elements import Bits, ElementType
from echo2.weights.jit import compiled

PART_ELEMENTS = 1 << 18
_PLANE = struct.Struct("<BI")
_RAW, _ZSTD = 0, 1
_SAMPLE_BYTES = 1 << 14
_ENTROPY_WORTH_CODING = 7.7
# Only the entropy stage helps here: matching noise only hurts, so hardly any matches are searched (a tiny hash table).
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=18, hash_log=6, min_match=7, strategy=zstandard.STRATEGY_FAST, write_content_size=1
)


@compiled
def _split(bits: Bits, rotate: bool, width: int, planes: U8) -> None:
    """`planes[j]` = byte j (from the lowest) of every element, rotated left by one if asked."""
    top = np.uint64(8 * width - 1)
    for i in range(bits.size):
        word = np.uint64(bits[i])
        if rotate:
            word = (word << np.uint64(1)) | (word >> top)
        for j in range(width):
            planes[j, i] = np.uint8((word >> np.uint64(8 * j)) & np.uint64(255))


@compiled
def _join(planes: U8, rotate: bool, width: int, bits: Bits) -> None:
    """The inverse of `_split`."""
    top = np.uint64(8 * width - 1)
    for i in range(bits.size):
        word = np.uint64(0)
        for j in range(width):
            word |= np.uint64(planes[j, i]) << np.uint64(8 * j)
        if rotate:
            word = (word >> np.uint64(1)) | ((word & np.uint64(1)) << top)
        bits[i] = word


def _is_rotated(element: ElementType) -> bool:
    return element.exponent_bits >= 8


def _entropy_bits(sample: U8) -> float:
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / sample.size
    return float(-(shares * np.log2(shares)).sum())


def encode_planes(bits: Bits, element: ElementType) -> bytes:
    """Encodes a run of elements."""
    out: list[bytes] = []
    for start in range(0, bits.size, PART_ELEMENTS):
        part = bits[start : start + PART_ELEMENTS]
        planes = np.empty((element.bytes, part.size), np.uint8)
        _split(part, _is_rotated(element), element.bytes, planes)
        for plane in planes:
            coding, data = _RAW, plane.tobytes()
            if _entropy_bits(plane[:_SAMPLE_BYTES]) < _ENTROPY_WORTH_CODING:
                shorter = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(data)
                if len(shorter) < len(data):
                    coding, data = _ZSTD, shorter
            out += [_PLANE.pack(coding, len(data)), data]
    return b"".join(out)


def _decode_plane(coding: int, data: memoryview, target: U8) -> None:
    size = target.size
    if coding == _RAW:
        if len(data) != size:
            raise DeltaFormatError(f"expected a raw plane of {size} bytes, got {len(data)}")
        target[:] = np.frombuffer(data, np.uint8)
        return
    if coding != _ZSTD:
        raise DeltaFormatError(f"expected plane coding 0 or 1, got {coding}")
    try:
        claimed = zstandard.get_frame_parameters(data).content_size
        if claimed != size:
            raise DeltaFormatError(f"expected a plane of {size} bytes, its frame claims {claimed}")
        plain = zstandard.ZstdDecompressor(max_window_size=1 << 20).decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise DeltaFormatError(f"plane: {error}") from None
    target[:] = np.frombuffer(plain, np.uint8)


def decode_planes(payload: memoryview, element: ElementType, bits: Bits) -> None:
    """Fills `bits` from a payload; DeltaFormatError unless the payload fills it exactly."""
    at = 0
    for start in range(0, bits.size, PART_ELEMENTS):
        part = bits[start : start + PART_ELEMENTS]
        planes = np.empty((element.bytes, part.size), np.uint8)
        for plane in planes:
            if at + _PLANE.size > len(payload):
                raise DeltaFormatError(f"expected a plane at byte {at}, the payload has {len(payload)}")
            coding, size = _PLANE.unpack_from(payload, at)
            at += _PLANE.size
            if at + size > len(payload):
                raise DeltaFormatError(f"expected {size} bytes of a plane, the payload has {len(payload) - at}")
            _decode_plane(coding, payload[at : at + size], plane)
            at += size
        _join(planes, _is_rotated(element), element.bytes, part)
    if at != len(payload):
        raise DeltaFormatError(f"expected {at} bytes of planes, got {len(payload)}")
