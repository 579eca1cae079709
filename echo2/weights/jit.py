"""A typed wrapper of numba: kernels run without the GIL and are cached on disk, so that later processes start fast.

Kernels do no reference counting (`_nrt=False`): they allocate nothing, and counting on every access to a tuple of arrays
would make them ten times slower. Their cache has its own folder (kernel_cache).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding as llvm
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic

from echo2.weights.kernel_cache import kernel_folder

Int = int | np.int64
F = TypeVar("F", bound=Callable[..., object])


_CACHE_FOLDER = str(kernel_folder())


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
def _trailing_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], context.get_constant(types.boolean, False))

    return types.uint64(types.uint64), generate


trailing_zeros = cast(Callable[[np.uint64], np.uint64], _trailing_zeros)
"""The number of trailing zero bits of a word; 64 for zero."""


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
"""Prefetches the cache line of an element; harmless for any index."""


@intrinsic
def _count_ones(typing_context, word):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


count_ones = cast(Callable[[np.uint64], np.uint64], _count_ones)
"""The number of one bits of a word (popcount)."""


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
"""Moves a word's low bits to the positions of the mask's ones (pdep)."""
extract = cast(BitMove, _extract_at_once if HAS_BIT_MOVES else _extract_by_bits)
"""Collects the bits at the positions of the mask's ones at the low end (pext)."""
