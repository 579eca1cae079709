"""A keyed fingerprint of full weights: a multilinear sum modulo 2^64 over raw bits.

    sum over tensors ( header(key, name, type, shape) + sum over i of T[i mod 4096] * M[name, i div 4096] * bits[i] )

T (4096 odd numbers) and M (an odd number for each row of 4096 elements of each tensor) are pseudo-random functions of
the key. Guarantees: the order of tensors does not matter; fingerprints of shards add up; an update costs time
proportional to the number of changed elements; any single wrong element is always detected (odd coefficients are invertible), any
other difference with probability about 1 - 2^-48, if the other side could not know the key beforehand. With a fresh key
it proves that a worker holds the weights. It is not a cryptographic hash: bytes on the wire are signed elsewhere.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from echo2.base.rng import derived_seed
from echo2.weights.bits import U64
from echo2.weights.elements import (
    Bits,
    ElementType,
    TensorSpec,
    WeightSet,
    bits_of,
    element_type_of,
    flat_bits,
    untied,
)  # fmt: skip
from echo2.weights.jit import LANES, compiled, inlined

ROW_ELEMENTS = 4096  # the table of column numbers is 32 KiB: it stays in a core's first cache
ROW_SHIFT = 12  # log2(ROW_ELEMENTS)
ROW_MASK = ROW_ELEMENTS - 1  # element's place in its row
MODULUS = 1 << 64  # what uint64 computes in
_DEVICE_ROWS = 1024  # rows at a time on a device: 4M elements, 64 MB of products
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64, as base/rng
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)  # as above
_MIX2 = np.uint64(0x94D049BB133111EB)  # as above
_27 = np.uint64(27)
_30 = np.uint64(30)
_31 = np.uint64(31)
_1 = np.uint64(1)
_0 = np.uint64(0)


@lru_cache(maxsize=8)
def key_of_run(run_id: str) -> int:
    return derived_seed(0, "fingerprint", run_id)


@lru_cache(maxsize=8)
def column_coefficients(key: int) -> U64:
    """T: the 4096 odd coefficients within a row, then as many as are loaded at once, of any value. Drawing them takes as long as
    comparing 200 KiB of weights, so those of the latest keys are cached; do not write to them."""
    stream = hashlib.shake_256(b"echo2 fingerprint columns" + struct.pack("<Q", key % MODULUS))
    return np.frombuffer(stream.digest(8 * (ROW_ELEMENTS + LANES)), "<u8").astype(np.uint64) | _1


@lru_cache(maxsize=1 << 14)
def row_seed(key: int, name: str) -> int:
    digest = hashlib.sha256(b"echo2 fingerprint rows" + struct.pack("<Q", key % MODULUS) + name.encode()).digest()
    return int.from_bytes(digest[:8], "little")


def header_term(key: int, spec: TensorSpec) -> int:
    text = f"{spec.name}\0{spec.element.name}\0{','.join(map(str, spec.shape))}"
    digest = hashlib.sha256(b"echo2 fingerprint header" + struct.pack("<Q", key % MODULUS) + text.encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _mixed(seed: np.uint64, row: Any) -> Any:
    """M[row], of one row or an array of them: splitmix64, made odd."""
    z = seed + (row + _1) * _GOLDEN
    z = (z ^ (z >> _30)) * _MIX1
    z = (z ^ (z >> _27)) * _MIX2
    return (z ^ (z >> _31)) | _1


row_coefficient = inlined(_mixed)


@compiled
def _sum_bits(bits: Bits, offset: int, seed: np.uint64, columns: U64) -> np.uint64:
    total, at, size, first = _0, _0, np.uint64(bits.size), np.uint64(offset)
    while at < size:
        column = (first + at) & np.uint64(ROW_MASK)
        length = min(np.uint64(ROW_ELEMENTS) - column, size - at)
        # Indices that begin at 0 let the compiler vectorise: four times as fast.
        part, factors = bits[at : at + length], columns[column : column + length]
        row_sum = _0
        for i in range(part.size):
            row_sum += factors[i] * np.uint64(part[i])
        total += row_sum * row_coefficient(seed, (first + at) >> np.uint64(ROW_SHIFT))
        at += length
    return total


def sum_bits(name: str, bits: Bits, key: int, offset: int = 0) -> int:
    """The sum over part of a tensor (from flat element `offset` on), without its header term."""
    return int(_sum_bits(bits, offset, np.uint64(row_seed(key, name)), column_coefficients(key)))


def coefficients(name: str, key: int) -> tuple[np.uint64, U64]:
    """The coefficients that kernels need for a tensor: its seed of M, and T."""
    return np.uint64(row_seed(key, name)), column_coefficients(key)


def row_coefficients(key: int, name: str, rows: U64) -> U64:
    with np.errstate(over="ignore"):
        coefficients_of_rows: U64 = _mixed(np.uint64(row_seed(key, name)), rows)
    return coefficients_of_rows


def sum_steps(name: str, indices: U64, steps: U64, key: int) -> int:
    """What the fingerprint moves by when elements `indices` of a tensor move by `steps`, modulo 2^64. O(changed)."""
    columns = column_coefficients(key)[indices % np.uint64(ROW_ELEMENTS)]
    rows = row_coefficients(key, name, indices // np.uint64(ROW_ELEMENTS))
    with np.errstate(over="ignore"):
        return int((columns * rows * steps).sum(dtype=np.uint64))


def _sum_on_device(name: str, bits: torch.Tensor, element: ElementType, key: int, first_row: int = 0) -> int:
    """`sum_bits` in torch on the tensor's device, starting at `first_row`; int64 arithmetic wraps like uint64."""
    columns = torch.from_numpy(column_coefficients(key)[:ROW_ELEMENTS].view(np.int64)).to(bits.device)
    mask = (1 << (8 * element.bytes)) - 1 if element.bytes < 8 else -1
    total = 0
    step = _DEVICE_ROWS * ROW_ELEMENTS
    for start in range(0, bits.numel(), step):
        part = bits[start : start + step].to(torch.int64) & mask
        whole = part.numel() // ROW_ELEMENTS
        row = first_row + start // ROW_ELEMENTS
        rows = np.arange(row, row + whole + 1, dtype=np.uint64)
        scale = torch.from_numpy(row_coefficients(key, name, rows).view(np.int64)).to(bits.device)
        sums = (part[: whole * ROW_ELEMENTS].reshape(-1, ROW_ELEMENTS) * columns).sum(1)
        total += int((sums * scale[:whole]).sum())
        rest = part[whole * ROW_ELEMENTS :]
        total += int((rest * columns[: rest.numel()]).sum()) * int(scale[whole])
    return total % MODULUS


def fingerprint_part(name: str, part: torch.Tensor, element: ElementType, key: int, offset: int) -> int:
    """`sum_bits` of flat bits that start at a tensor's element `offset`, on host or device."""
    if part.device.type == "cpu":
        return sum_bits(name, bits_of(part), key, offset)
    head = min(-offset % ROW_ELEMENTS, part.numel())  # the device sums whole rows
    before = sum_bits(name, bits_of(part[:head].cpu()), key, offset)
    return before + _sum_on_device(name, part[head:], element, key, (offset + head) // ROW_ELEMENTS)


def fingerprint_tensor(name: str, tensor: torch.Tensor, key: int) -> int:
    """One tensor's part of the sum, header term included; computed on the tensor's own device."""
    element = element_type_of(name, tensor)
    term = header_term(key, TensorSpec(name, element, tuple(tensor.shape)))
    return (term + fingerprint_part(name, flat_bits(tensor), element, key, 0)) % MODULUS


def whole_fingerprint(specs: Iterable[TensorSpec], key: int, sections: Iterable[int] = ()) -> int:
    """The fingerprint of a set from the sums of its parts."""
    return (sum(header_term(key, spec) for spec in specs) + sum(sections)) % MODULUS


def fingerprint(weights: WeightSet, key: int) -> int:
    """The fingerprint of a set of named tensors, on CPU or device. Tied tensors count once (see `untied`)."""
    distinct, _ = untied(weights)
    return sum(fingerprint_tensor(name, tensor, key) for name, tensor in distinct.items()) % MODULUS
