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
from typing import TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import config, types
from numba.extending import intrinsic

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

    return types.uint64(array, types.int64), generate


load_word = cast(Callable[[npt.NDArray[np.unsignedinteger], int], np.uint64], _load_word)
"""The eight bytes from element `index` on, as one word; the array is contiguous and has them."""
