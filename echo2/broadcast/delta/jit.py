"""Typed door to numba: compiled without the interpreter lock, cached on disk so that later processes start fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compiles on first use, per argument types."""
    return cast(F, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def inlined(function: F) -> F:
    """As `compiled`, for the small inner pieces: LLVM inlines them."""
    return cast(F, numba.njit(nogil=True, cache=True, error_model="numpy", forceinline=True)(function))


@intrinsic
def _trailing_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], context.get_constant(types.boolean, False))

    return types.uint64(types.uint64), generate


trailing_zeros = cast(Callable[[np.uint64], np.uint64], _trailing_zeros)
"""How many zero bits a word ends in; 64 for zero."""
