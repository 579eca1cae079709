"""Fused loops for one CPU thread: norms, rotary embedding with cache writes, attention over blocks of the cache.

Every loop computes in float32. The residual stream is float32; the other arrays are float32, or bf16 as uint16 patterns.
Guarantees: no allocation in proportion to the context, no Python between tokens, the GIL is released.
Shapes: T tokens of one step, D hidden, R rows of q, k and v together, Q rows of all query heads, H query heads, G key-value heads,
C context, E head dimension, S slots, N blocks per sequence. The cache is [blocks, layers, 2 (keys, values), G, BLOCK_TOKENS, E].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.extending import overload

_F = TypeVar("_F", bound=Callable[..., Any])
LANES = 32
"""Loops over positions run over multiples of this, so that they vectorise: a scalar remainder loop costs more than the padding."""


def _compiled(function: _F) -> _F:
    return cast(_F, numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz"})(function))


def _compiled_exactly(function: _F) -> _F:
    """Without reassociation, for code whose rounding matters."""
    return cast(_F, numba.njit(cache=True, nogil=True, fastmath={"contract", "nsz"})(function))


def _float(value: Any) -> Any:
    """The float32 of a value: itself, or a bf16 pattern widened."""


@overload(_float, strict=False)  # type: ignore[untyped-decorator]
def _float_by_type(value: Any) -> Any:
    if value == types.float32:
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


def _element(value: Any, like: Any) -> Any:
    """A float32 as an element of an array that holds `like`: itself, or the pattern of the nearest bf16, ties to even."""


@overload(_element, strict=False)  # type: ignore[untyped-decorator]
def _element_by_type(value: Any, like: Any) -> Any:
    if like == types.float32:
        return lambda value, like: value

    def rounded(value: Any, like: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return rounded


@_compiled
def rms_norm(x_TD: np.ndarray, weight_D: np.ndarray, epsilon: float, out_TD: np.ndarray) -> None:
    """`out = x / rms(x) * weight`."""
    count, width = x_TD.shape
    for token in range(count):
        total = np.float32(0.0)
        for i in range(width):
            total += x_TD[token, i] * x_TD[token, i]
        scale = np.float32(1.0 / np.sqrt(total / width + epsilon))
        for i in range(width):
            out_TD[token, i] = _element(x_TD[token, i] * scale * _float(weight_D[i]), out_TD[token, i])


@_compiled
def add_and_norm(
    x_TD: np.ndarray, delta_TD: np.ndarray, weight_D: np.ndarray, epsilon: float, out_TD: np.ndarray
) -> None:
    """`x += delta`, then `out = x / rms(x) * weight`."""
    count, width = x_TD.shape
    for token in range(count):
        total = np.float32(0.0)
        for i in range(width):
            value = x_TD[token, i] + _float(delta_TD[token, i])
            x_TD[token, i] = value
            total += value * value
        scale = np.float32(1.0 / np.sqrt(total / width + epsilon))
        for i in range(width):
            out_TD[token, i] = _element(x_TD[token, i] * scale * _float(weight_D[i]), out_TD[token, i])


@_compiled
def rotate_and_cache(
    qkv_TR: np.ndarray,
    norms: tuple[np.ndarray, np.ndarray, float],
    angles: tuple[np.ndarray, np.ndarray],
    places: tuple[np.ndarray, np.ndarray, np.ndarray],
    cache: np.ndarray,
    layer: int,
) -> None:
    """Normalises (if the model has such norms) and rotates q and k in place, and writes k and v to the cache. `norms`: weights
    of the q and k norms, of size 0 if there is none, and epsilon. `angles`: cos and sin, [C, E/2]. `places`: slot [T] and
    position [T] of each token, and the blocks of each slot [S, N]."""
    q_norm_E, k_norm_E, epsilon = norms
    cos_CE, sin_CE = angles
    slots_T, positions_T, blocks_SN = places
    kv_heads, block_tokens, width = cache.shape[3], cache.shape[4], cache.shape[5]
    half = width // 2
    heads = qkv_TR.shape[1] // width - 2 * kv_heads
    has_norm = k_norm_E.shape[0] == width
    head = np.empty(width, np.float32)
    for token in range(qkv_TR.shape[0]):
        slot, position = slots_T[token], positions_T[token]
        block, row_in_block = blocks_SN[slot, position // block_tokens], position % block_tokens
        cos, sin, row = cos_CE[position], sin_CE[position], qkv_TR[token]
        for h in range(heads + kv_heads):
            at = h * width
            for i in range(width):
                head[i] = _float(row[at + i])
            if has_norm:
                norm = q_norm_E if h < heads else k_norm_E
                total = np.float32(0.0)
                for i in range(width):
                    total += head[i] * head[i]
                scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + np.float32(epsilon))
                for i in range(width):
                    head[i] *= scale * _float(norm[i])
            for i in range(half):
                low, high = head[i] * cos[i] - head[half + i] * sin[i], head[half + i] * cos[i] + head[i] * sin[i]
                row[at + i], row[at + half + i] = _element(low, row[at]), _element(high, row[at])
        for g in range(kv_heads):
            at = (heads + g) * width
            key, value = cache[block, layer, 0, g, row_in_block], cache[block, layer, 1, g, row_in_block]
            for i in range(width):
                key[i] = row[at + i]
                value[i] = row[at + kv_heads * width + i]


@_compiled_exactly
def exp_in_place(x: np.ndarray, bits: np.ndarray, count: int) -> None:
    """float32 exp of values <= 0 to about 1 ulp, in a form that compilers vectorise. `bits` is int32 scratch."""
    scales = bits.view(np.float32)
    for i in range(count):
        value = max(x[i], np.float32(-87.0))
        whole = (value * np.float32(1.44269504) + np.float32(12582912.0)) - np.float32(12582912.0)
        rest = value - whole * np.float32(0.693359375)
        rest = rest - whole * np.float32(-2.12194440e-4)
        y = np.float32(1.9875691500e-4)
        y = y * rest + np.float32(1.3981999507e-3)
        y = y * rest + np.float32(8.3334519073e-3)
        y = y * rest + np.float32(4.1665795894e-2)
        y = y * rest + np.float32(1.6666665459e-1)
        y = y * rest + np.float32(5.0000001201e-1)
        x[i] = y * rest * rest + rest + np.float32(1.0)
        bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    for i in range(count):
        x[i] *= scales[i]


@_compiled
def _dot(a: np.ndarray, b: np.ndarray) -> np.float32:
    total = np.float32(0.0)
    for i in range(a.shape[0]):
        total += a[i] * _float(b[i])
    return total


@_compiled
def _score(query_E: np.ndarray, key_CE: np.ndarray, length: int, scaling: np.float32, scores_C: np.ndarray) -> None:
    """`scores = scaling * key . query`, four positions at a time, so that the query is read a quarter as often."""
    c = 0
    while c + 4 <= length:
        key0, key1, key2, key3 = key_CE[c], key_CE[c + 1], key_CE[c + 2], key_CE[c + 3]
        dot0 = dot1 = dot2 = dot3 = np.float32(0.0)
        for i in range(query_E.shape[0]):
            q = query_E[i]
            dot0 += q * _float(key0[i])
            dot1 += q * _float(key1[i])
            dot2 += q * _float(key2[i])
            dot3 += q * _float(key3[i])
        scores_C[c], scores_C[c + 1] = dot0 * scaling, dot1 * scaling
        scores_C[c + 2], scores_C[c + 3] = dot2 * scaling, dot3 * scaling
        c += 4
    while c < length:
        scores_C[c] = _dot(query_E, key_CE[c]) * scaling
        c += 1


@_compiled
def _mix(weights_C: np.ndarray, value_CE: np.ndarray, length: int, out_E: np.ndarray) -> None:
    """`out += sum of weight * value`, four positions at a time, so that `out` is read and written a quarter as often."""
    c = 0
    while c + 4 <= length:
        w0, w1, w2, w3 = weights_C[c], weights_C[c + 1], weights_C[c + 2], weights_C[c + 3]
        value0, value1, value2, value3 = value_CE[c], value_CE[c + 1], value_CE[c + 2], value_CE[c + 3]
        for i in range(out_E.shape[0]):
            out_E[i] += w0 * _float(value0[i]) + w1 * _float(value1[i])
            out_E[i] += w2 * _float(value2[i]) + w3 * _float(value3[i])
        c += 4
    while c < length:
        w0, value0 = weights_C[c], value_CE[c]
        for i in range(out_E.shape[0]):
            out_E[i] += w0 * _float(value0[i])
        c += 1


@_compiled
def attend(
    qkv_TR: np.ndarray,
    places: tuple[np.ndarray, np.ndarray, np.ndarray],
    cache: np.ndarray,
    layer: int,
    out_TQ: np.ndarray,
    scratch: tuple[np.ndarray, np.ndarray],
) -> None:
    """Each token attends to the positions of its slot from 0 to its own. `scratch`: float32 and int32 buffers of C elements rounded
    up to LANES."""
    slots_T, positions_T, blocks_SN = places
    scores, bits = scratch
    kv_heads, block_tokens, width = cache.shape[3], cache.shape[4], cache.shape[5]
    heads = out_TQ.shape[1] // width
    group = heads // kv_heads
    scaling = np.float32(1.0 / np.sqrt(np.float64(width)))
    query, out = np.empty(width, np.float32), np.empty(width, np.float32)
    for token in range(qkv_TR.shape[0]):
        slot, length = slots_T[token], positions_T[token] + 1
        padded = (length + LANES - 1) // LANES * LANES  # elements beyond the length are computed but not read
        for h in range(heads):
            g = h // group
            for i in range(width):
                query[i], out[i] = _float(qkv_TR[token, h * width + i]), np.float32(0.0)
            for begin in range(0, length, block_tokens):
                count = min(block_tokens, length - begin)
                key_CE = cache[blocks_SN[slot, begin // block_tokens], layer, 0, g]
                _score(query, key_CE, count, scaling, scores[begin : begin + count])
            top = np.float32(-np.inf)
            for c in range(length):
                top = max(top, scores[c])
            for c in range(padded):
                scores[c] -= top
            exp_in_place(scores, bits, padded)
            total = np.float32(0.0)
            for c in range(length):
                total += scores[c]
            for c in range(length):
                scores[c] /= total
            for begin in range(0, length, block_tokens):
                count = min(block_tokens, length - begin)
                value_CE = cache[blocks_SN[slot, begin // block_tokens], layer, 1, g]
                _mix(scores[begin : begin + count], value_CE, count, out)
            for i in range(width):
                out_TQ[token, h * width + i] = _element(out[i], out_TQ[token, h * width + i])
