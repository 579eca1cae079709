"""Typed door to numba: compiled without the interpreter lock, cached on disk so that later processes start fast.

Kernels count no references (`_nrt=False`): they allocate nothing, and counting on every access to a tuple of arrays
would make them ten times slower. A kernel's cache is named by a digest of all of this package's sources, because
numba itself would not notice that a function inlined from another file has changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding as llvm
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic

LANES = 64

Int = int | np.int64
F = TypeVar("F", bound=Callable[..., object])


def _cache_folder() -> str:
    """Beside the compiled Python files, or in the user's cache where the package is read-only."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(here.glob("*.py")):
        digest.update(source.read_bytes())
    home = here / "__pycache__" if os.access(here, os.W_OK) else Path.home() / ".cache" / "echo2"
    return str(home / f"kernels-{digest.hexdigest()[:16]}")


_CACHE_FOLDER = _cache_folder()


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
    """As `compiled`, for the small inner pieces: LLVM inlines them."""
    return _jit(function, True)


@intrinsic
def _trailing_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], context.get_constant(types.boolean, False))

    return types.uint64(types.uint64), generate


trailing_zeros = cast(Callable[[np.uint64], np.uint64], _trailing_zeros)
"""How many zero bits a word ends in; 64 for zero."""


@intrinsic
def _prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, word, word, word])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(call, [place, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


prefetch = cast(Callable[[npt.NDArray[np.unsignedinteger], Int], None], _prefetch)
"""Asks for the cache line of an element that will be needed soon; harmless wherever it points."""


@intrinsic
def _count_ones(typing_context, word):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


count_ones = cast(Callable[[np.uint64], np.uint64], _count_ones)
"""How many bits of a word are 1."""


def _load_lanes(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """`LANES` elements from `index` on as one vector; the target's own vectors, whatever their size, make it up."""
    lanes = ir.VectorType(ir.IntType(array_type.dtype.bitwidth), LANES)
    data = context.make_array(array_type)(context, builder, array).data
    load = builder.load(builder.bitcast(builder.gep(data, [index]), lanes.as_pointer()))
    load.align = 1
    return load


def _all_lanes(builder: Any, word: Any, lane_bits: int) -> Any:
    """A vector with the low bits of a u64 in every lane."""
    lanes = ir.VectorType(ir.IntType(lane_bits), LANES)
    narrow = word if lane_bits == 64 else builder.trunc(word, ir.IntType(lane_bits))
    first = builder.insert_element(ir.Constant(lanes, ir.Undefined), narrow, ir.IntType(32)(0))
    return builder.shuffle_vector(
        first, ir.Constant(lanes, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    )


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


BitMove = Callable[[np.uint64, np.uint64], np.uint64]
deposit = cast(BitMove, _deposit_at_once if HAS_BIT_MOVES else _deposit_by_bits)
"""The low bits of a word, one for each bit of the mask, moved to where the mask has its ones."""
extract = cast(BitMove, _extract_at_once if HAS_BIT_MOVES else _extract_by_bits)
"""The bits of a word where the mask has ones, moved together at the low end."""


def _constant_lanes(lane_bits: int, value: int) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(lane_bits), LANES), [value % (1 << lane_bits)] * LANES)


def _lanes_of(builder: Any, word: Any) -> Any:
    return builder.bitcast(word, ir.VectorType(ir.IntType(1), LANES))


@intrinsic
def _compare(typing_context, old, new, index, out):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        width = signature.args[0].dtype.bitwidth
        before = _load_lanes(context, builder, signature.args[0], arguments[0], arguments[2])
        after = _load_lanes(context, builder, signature.args[1], arguments[1], arguments[2])
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


compare = cast(
    Callable[[npt.NDArray[np.unsignedinteger], npt.NDArray[np.unsignedinteger], int, npt.NDArray[np.uint64]], None],
    _compare,
)
"""Into three words, bit i for element i of the 64 from `index` on: which changed, which of all went down, and which
changed by more than one. Elements of 64 bits went down where the difference has its highest bit."""


@intrinsic
def _sum_marked(typing_context, columns, index, changed, negative):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        numbers = _load_lanes(context, builder, signature.args[0], arguments[0], arguments[1])
        nothing = _constant_lanes(64, 0)
        negated = builder.sub(nothing, numbers)
        signed = builder.select(_lanes_of(builder, arguments[3]), negated, numbers)
        marked = builder.select(_lanes_of(builder, arguments[2]), signed, nothing)
        kind = ir.FunctionType(ir.IntType(64), [marked.type])
        add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.add.v{LANES}i64")
        return builder.call(add, [marked])

    return types.uint64(columns, types.int64, types.uint64, types.uint64), generate


sum_marked = cast(Callable[[npt.NDArray[np.uint64], Int, np.uint64, np.uint64], np.uint64], _sum_marked)
"""Of 64 numbers from `index` on, the sum of those marked in the first word, negated where the second one says so."""


@intrinsic
def _move_marked(typing_context, live, index, changed, negative):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        width = signature.args[0].dtype.bitwidth
        before = _load_lanes(context, builder, signature.args[0], arguments[0], arguments[1])
        down, marked = _lanes_of(builder, arguments[3]), _lanes_of(builder, arguments[2])
        unit = builder.select(down, _constant_lanes(width, -1), _constant_lanes(width, 1))
        after = builder.add(before, builder.select(marked, unit, _constant_lanes(width, 0)))
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), after.type.as_pointer())
        builder.store(after, place).align = 1
        border = builder.select(down, _constant_lanes(width, 0), _constant_lanes(width, -1))
        wrapped = builder.and_(marked, builder.icmp_unsigned("==", before, border))
        return builder.bitcast(wrapped, ir.IntType(64))

    return types.uint64(live, types.int64, types.uint64, types.uint64), generate


move_marked = cast(Callable[[npt.NDArray[np.unsignedinteger], Int, np.uint64, np.uint64], np.uint64], _move_marked)
"""Adds one to those of 64 elements from `index` on that the first word marks, or takes one where the second word says
so. Returns which of them passed the end of their range."""


@intrinsic
def _octaves(typing_context, bits, index, shift, mask, base, out):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array, at, shift_by, exponent_mask, lowest, masks = arguments
        width = signature.args[0].dtype.bitwidth
        lanes = _load_lanes(context, builder, signature.args[0], array, at)
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


octaves = cast(
    Callable[[npt.NDArray[np.unsignedinteger], Int, np.uint64, np.uint64, np.uint64, npt.NDArray[np.uint64]], None],
    _octaves,
)
"""Into eight words: which of the 64 elements from `index` on have an exponent, (bits >> shift) & mask, of `base` or
less, of base + 1 to base + 6, and of base + 7 or more. The elements are there."""
