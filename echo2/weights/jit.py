"""A typed wrapper of numba: kernels run without the GIL and are cached on disk, so that later processes start fast.

Kernels do no reference counting (`_nrt=False`): they allocate nothing, and counting on every access to a tuple of arrays
would make them ten times slower. Their cache has its own folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding as llvm, ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic

CODEC = Path(__file__).parent  # whose sources decide whether compiled kernels are current


def kernel_folder() -> Path:
    """The folder next to the compiled Python files, or in the user's cache if the package is read-only."""
    digest = hashlib.sha256(metadata.version("numba").encode())
    for source in sorted(CODEC.glob("*.py")):
        digest.update(source.read_bytes())
    home = CODEC / "__pycache__" if os.access(CODEC, os.W_OK) else Path.home() / ".cache" / "echo2"
    return home / f"kernels-{digest.hexdigest()[:16]}"


Int = int | np.int64
F = TypeVar("F", bound=Callable[..., object])


_CACHE_FOLDER = str(kernel_folder())  # read once: numba takes it at decoration


def _jit(function: F, inline: bool) -> F:
    before = config.CACHE_DIR
    config.CACHE_DIR = _CACHE_FOLDER  # read while the function is decorated
    try:
        options = {"nogil": True, "cache": True, "error_model": "numpy", "_nrt": False, "forceinline": inline}
        return cast(F, numba.njit(**options)(function))
    finally:
        config.CACHE_DIR = before


def compiled(function: F) -> F:
    """Compiles on first use, per argument types."""
    return _jit(function, False)


def inlined(function: F) -> F:
    """Like `compiled`, for small inner functions, which LLVM inlines."""
    return _jit(function, True)


@intrinsic
def prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Prefetches the cache line of an element; harmless for any index."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, word, word, word])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(call, [place, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def count_ones(typing_context, word):  # type: ignore[no-untyped-def]

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


# Pext and pdep; loops elsewhere.
HAS_BIT_MOVES = config.CPU_NAME is None and bool(llvm.get_host_cpu_features().get("bmi2"))


@intrinsic
def _deposit_at_once(typing_context, value, mask):  # type: ignore[no-untyped-def]
    return types.uint64(types.uint64, types.uint64), _bit_move("pdep")


@intrinsic
def _extract_at_once(typing_context, value, mask):  # type: ignore[no-untyped-def]
    return types.uint64(types.uint64, types.uint64), _bit_move("pext")


def _bit_move(name: str) -> Callable[..., Any]:
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word, word])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.bmi.{name}.64"), arguments)

    return generate


@inlined
def _deposit_by_bits(value: np.uint64, mask: np.uint64) -> np.uint64:
    out = np.uint64(0)
    while mask:
        rest = mask & (mask - np.uint64(1))
        if value & np.uint64(1):
            out |= mask ^ rest
        value >>= np.uint64(1)
        mask = rest
    return out


@inlined
def _extract_by_bits(value: np.uint64, mask: np.uint64) -> np.uint64:
    out = np.uint64(0)
    at = np.uint64(0)
    while mask:
        rest = mask & (mask - np.uint64(1))
        if value & (mask ^ rest):
            out |= np.uint64(1) << at
        at += np.uint64(1)
        mask = rest
    return out


deposit = _deposit_at_once if HAS_BIT_MOVES else _deposit_by_bits
"""Moves a word's low bits to the positions of the mask's ones (pdep)."""
extract = _extract_at_once if HAS_BIT_MOVES else _extract_by_bits
"""Collects the bits at the positions of the mask's ones at the low end (pext)."""


LANES = 64  # marks in a uint64
TOGETHER = 16  # places in the widest vector: those written at once


def _lanes(lane_bits: int, count: int = LANES) -> Any:
    return ir.VectorType(ir.IntType(lane_bits), count)


def _vector_at(context: Any, builder: Any, array_type: Any, array: Any, index: Any, count: int) -> Any:
    """A pointer to `count` elements from `index` on, as one vector; LLVM splits it into the vectors of the target."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _lanes(array_type.dtype.bitwidth, count).as_pointer())


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any, count: int = LANES) -> Any:
    return builder.load(_vector_at(context, builder, array_type, array, index, count), align=1)


def _store(context: Any, builder: Any, array_type: Any, array: Any, index: Any, vector: Any) -> None:
    builder.store(vector, _vector_at(context, builder, array_type, array, index, vector.type.count), align=1)


def _all_lanes(builder: Any, word: Any, lane_bits: int, count: int = LANES) -> Any:
    """A vector with the low `lane_bits` bits of a u64 in every lane."""
    number = word if lane_bits == 64 else builder.trunc(word, ir.IntType(lane_bits))
    kind = _lanes(lane_bits, count)
    first = builder.insert_element(kind(ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, kind(ir.Undefined), _lanes(32, count)([0] * count))


def _constant_lanes(lane_bits: int, value: int, count: int = LANES) -> Any:
    return _lanes(lane_bits, count)([value % (1 << lane_bits)] * count)


def _lanes_of(builder: Any, word: Any) -> Any:
    return builder.bitcast(word, _lanes(1))


@intrinsic
def compare(typing_context, old, new, index, out):  # type: ignore[no-untyped-def]
    """Writes three words, with bit i for element i of the 64 from `index` on: which changed, which of all went down, and which
    changed by more than one. 64-bit elements count as down if the difference has its highest bit set."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        width = signature.args[0].dtype.bitwidth
        before = _load(context, builder, signature.args[0], arguments[0], arguments[2])
        after = _load(context, builder, signature.args[1], arguments[1], arguments[2])
        step = builder.sub(after, before)
        if width == 64:
            negative = builder.icmp_signed("<", step, _constant_lanes(64, 0))
        else:
            negative = builder.icmp_unsigned("<", after, before)
        unit = builder.select(negative, _constant_lanes(width, -1), _constant_lanes(width, 1))
        changed = builder.icmp_unsigned("!=", before, after)
        larger = builder.and_(changed, builder.icmp_unsigned("!=", step, unit))
        target = context.make_array(signature.args[3])(context, builder, arguments[3]).data
        for place, lanes in enumerate((changed, negative, larger)):
            builder.store(builder.bitcast(lanes, ir.IntType(64)), builder.gep(target, [ir.IntType(32)(place)]))
        return context.get_dummy_value()

    return types.void(old, new, types.int64, out), generate


@intrinsic
def sum_marked(typing_context, columns, index, changed, negative):  # type: ignore[no-untyped-def]
    """The sum of those of 64 numbers from `index` on that the first word marks, negated where the second word has a one."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        numbers = _load(context, builder, signature.args[0], arguments[0], arguments[1])
        nothing = _constant_lanes(64, 0)
        negated = builder.sub(nothing, numbers)
        signed = builder.select(_lanes_of(builder, arguments[3]), negated, numbers)
        marked = builder.select(_lanes_of(builder, arguments[2]), signed, nothing)
        kind = ir.FunctionType(ir.IntType(64), [marked.type])
        add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.add.v{LANES}i64")
        return builder.call(add, [marked])

    return types.uint64(columns, types.int64, types.uint64, types.uint64), generate


@intrinsic
def move_marked(typing_context, live, index, changed, negative):  # type: ignore[no-untyped-def]
    """Adds one to those of 64 elements from `index` on that the first word marks, or subtracts one where the second word has a
    one. Returns a mask of those that wrapped around."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        width = signature.args[0].dtype.bitwidth
        before = _load(context, builder, signature.args[0], arguments[0], arguments[1])
        down, marked = _lanes_of(builder, arguments[3]), _lanes_of(builder, arguments[2])
        unit = builder.select(down, _constant_lanes(width, -1), _constant_lanes(width, 1))
        after = builder.add(before, builder.select(marked, unit, _constant_lanes(width, 0)))
        _store(context, builder, signature.args[0], arguments[0], arguments[1], after)
        border = builder.select(down, _constant_lanes(width, 0), _constant_lanes(width, -1))
        wrapped = builder.and_(marked, builder.icmp_unsigned("==", before, border))
        return builder.bitcast(wrapped, ir.IntType(64))

    return types.uint64(live, types.int64, types.uint64, types.uint64), generate


@intrinsic
def octaves(typing_context, bits, index, shift, mask, base, out):  # type: ignore[no-untyped-def]
    """Writes eight words: which of the 64 elements from `index` on have an exponent, (bits >> shift) & mask, of at most `base`,
    of base + 1 to base + 6 each, and of at least base + 7. All 64 elements must exist."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array, at, shift_by, exponent_mask, lowest, masks = arguments
        width = signature.args[0].dtype.bitwidth
        lanes = _load(context, builder, signature.args[0], array, at)
        shifted = builder.lshr(lanes, _all_lanes(builder, shift_by, width))
        exponents = builder.and_(shifted, _all_lanes(builder, exponent_mask, width))
        target = context.make_array(signature.args[5])(context, builder, masks).data
        for octave in range(8):
            bound = _all_lanes(builder, builder.add(lowest, ir.IntType(64)(octave)), width)
            relation = "<=" if octave == 0 else ">=" if octave == 7 else "=="
            inside = builder.icmp_unsigned(relation, exponents, bound)
            builder.store(builder.bitcast(inside, ir.IntType(64)), builder.gep(target, [ir.IntType(32)(octave)]))
        return context.get_dummy_value()

    return types.void(bits, types.int64, types.uint64, types.uint64, types.uint64, out), generate


# Vpcompressb; loops elsewhere.
HAS_BYTE_MOVES = config.CPU_NAME is None and bool(llvm.get_host_cpu_features().get("avx512vbmi2"))


@intrinsic
def list_lanes(typing_context, word, base, places, index):  # type: ignore[no-untyped-def]
    """Writes the places of a word's marks, each plus `base`, from `index` on. `places` must have room for `LANES`, and the CPU
    byte moves."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        marks, first, array, at = arguments
        kind = _lanes(8)
        call = ir.FunctionType(kind, [kind, kind, _lanes(1)])
        compress = cgutils.get_or_insert_function(builder.module, call, "llvm.x86.avx512.mask.compress.v64i8")
        nothing, bases = _constant_lanes(8, 0), _all_lanes(builder, first, 32, TOGETHER)
        packed = builder.call(compress, [kind(list(range(LANES))), nothing, _lanes_of(builder, marks)])

        def write(begin: int) -> None:
            picked = _lanes(32, TOGETHER)(list(range(begin, begin + TOGETHER)))
            found = builder.add(builder.zext(builder.shuffle_vector(packed, nothing, picked), bases.type), bases)
            _store(context, builder, signature.args[2], array, builder.add(at, at.type(begin)), found)

        write(0)
        with builder.if_then(builder.icmp_unsigned(">", builder.ctpop(marks), marks.type(TOGETHER)), likely=False):
            for begin in range(TOGETHER, LANES, TOGETHER):
                write(begin)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, places, types.int64), generate


@intrinsic
def place_gaps(typing_context, quotients, index, low, shift, after, places):  # type: ignore[no-untyped-def]
    """Writes the places of `TOGETHER` marks from `index` on, from the byte of each gap, the low bits of all of them (`shift` each,
    at most 4) and the place after the mark before. Returns the place after the last one; `after` if a byte is 255."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array, at, low, shift, start, target = arguments
        kind, one = _lanes(32, TOGETHER), _constant_lanes(32, 1, TOGETHER)
        load = _load(context, builder, signature.args[0], array, at, TOGETHER)
        is_long = builder.icmp_unsigned("==", load, _constant_lanes(8, 255, TOGETHER))
        shifts = _all_lanes(builder, shift, 32, TOGETHER)
        each = builder.mul(_lanes(64, TOGETHER)(list(range(TOGETHER))), _all_lanes(builder, shift, 64, TOGETHER))
        lows = builder.trunc(builder.lshr(_all_lanes(builder, low, 64, TOGETHER), each), kind)
        rest = builder.and_(lows, builder.sub(builder.shl(one, shifts), one))
        sums = builder.add(builder.or_(builder.shl(builder.zext(load, kind), shifts), rest), one)
        for apart in (1, 2, 4, 8):  # sums of 2, 4, 8 and 16 gaps; the first lanes get zeros
            moved = kind([TOGETHER + i - apart if i >= apart else 0 for i in range(TOGETHER)])
            sums = builder.add(sums, builder.shuffle_vector(_constant_lanes(32, 0, TOGETHER), sums, moved))
        before = _all_lanes(builder, builder.sub(start, start.type(1)), 32, TOGETHER)
        _store(context, builder, signature.args[5], target, at, builder.add(sums, before))
        last = builder.zext(builder.extract_element(sums, ir.IntType(32)(TOGETHER - 1)), start.type)
        any_long = builder.icmp_unsigned("!=", builder.bitcast(is_long, ir.IntType(TOGETHER)), ir.IntType(TOGETHER)(0))
        return builder.select(any_long, start, builder.add(start, last))

    word = types.uint64
    return word(quotients, types.int64, word, word, word, places), generate
