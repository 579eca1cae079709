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
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic

LANES = 64

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
def _load_word(typing_context, array, index):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.gep(data, [arguments[1]])
        load = builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()))
        load.align = 1
        return load

    return types.uint64(array, types.uint64), generate


load_word = cast(Callable[[npt.NDArray[np.unsignedinteger], np.uint64], np.uint64], _load_word)
"""The eight bytes from element `index` on, as one word; the array is contiguous and has them."""


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


prefetch = cast(Callable[[npt.NDArray[np.unsignedinteger], np.int64], None], _prefetch)
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


@intrinsic
def _differing(typing_context, old, new, index):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        before = _load_lanes(context, builder, signature.args[0], arguments[0], arguments[2])
        after = _load_lanes(context, builder, signature.args[1], arguments[1], arguments[2])
        return builder.bitcast(builder.icmp_unsigned("!=", before, after), ir.IntType(64))

    return types.uint64(old, new, types.int64), generate


differing = cast(
    Callable[[npt.NDArray[np.unsignedinteger], npt.NDArray[np.unsignedinteger], int], np.uint64], _differing
)
"""Which of the 64 elements from `index` on differ: bit i for element i. Both arrays are contiguous and have them."""


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
    Callable[[npt.NDArray[np.unsignedinteger], int, np.uint64, np.uint64, np.uint64, npt.NDArray[np.uint64]], None],
    _octaves,
)
"""Into eight words: which of the 64 elements from `index` on have an exponent, (bits >> shift) & mask, of `base` or
less, of base + 1 to base + 6, and of base + 7 or more. The elements are there."""
