"""Kernel steps on many elements at once, written in LLVM IR, which LLVM lowers to the target's own vectors.

Guarantees: the results equal those of the same loop over elements. The caller must ensure that enough elements follow the
index: otherwise a step reads or writes out of bounds. Leaves to others: the elements left over at an end.

Legend: lanes are adjacent elements; a word has one bit for each of `LANES` lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from echo2.weights.jit import Int

LANES = 64
GAPS = 16
"""Number of gaps that `add_gaps` handles."""
LISTED = 8
"""Number of places that `list_byte` writes."""


def _vector_at(context: Any, builder: Any, array_type: Any, array: Any, index: Any, count: int = LANES) -> Any:
    """A pointer to `count` elements from `index` on, as one vector; LLVM splits it into the target's vectors, whatever their
    size."""
    data = context.make_array(array_type)(context, builder, array).data
    kind = ir.VectorType(ir.IntType(array_type.dtype.bitwidth), count)
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def _load(builder: Any, place: Any) -> Any:
    load = builder.load(place)
    load.align = 1
    return load


def _load_lanes(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return _load(builder, _vector_at(context, builder, array_type, array, index))


def _same_in_all(builder: Any, number: Any, count: int) -> Any:
    """A vector with the same number in every lane."""
    kind = ir.VectorType(number.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    picked = ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), picked)


def _all_lanes(builder: Any, word: Any, lane_bits: int) -> Any:
    """A vector with the low `lane_bits` bits of a u64 in every lane."""
    return _same_in_all(builder, word if lane_bits == 64 else builder.trunc(word, ir.IntType(lane_bits)), LANES)


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
"""Writes three words, with bit i for element i of the 64 from `index` on: which changed, which of all went down, and which
changed by more than one. 64-bit elements count as down if the difference has its highest bit set."""


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
"""The sum of those of 64 numbers from `index` on that the first word marks, negated where the second word has a one."""


@intrinsic
def _move_marked(typing_context, live, index, changed, negative):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        width = signature.args[0].dtype.bitwidth
        before = _load_lanes(context, builder, signature.args[0], arguments[0], arguments[1])
        down, marked = _lanes_of(builder, arguments[3]), _lanes_of(builder, arguments[2])
        unit = builder.select(down, _constant_lanes(width, -1), _constant_lanes(width, 1))
        after = builder.add(before, builder.select(marked, unit, _constant_lanes(width, 0)))
        place = _vector_at(context, builder, signature.args[0], arguments[0], arguments[1])
        builder.store(after, place).align = 1
        border = builder.select(down, _constant_lanes(width, 0), _constant_lanes(width, -1))
        wrapped = builder.and_(marked, builder.icmp_unsigned("==", before, border))
        return builder.bitcast(wrapped, ir.IntType(64))

    return types.uint64(live, types.int64, types.uint64, types.uint64), generate


move_marked = cast(Callable[[npt.NDArray[np.unsignedinteger], Int, np.uint64, np.uint64], np.uint64], _move_marked)
"""Adds one to those of 64 elements from `index` on that the first word marks, or subtracts one where the second word has a
one. Returns a mask of those that wrapped around."""


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
"""Writes eight words: which of the 64 elements from `index` on have an exponent, (bits >> shift) & mask, of at most `base`,
of base + 1 to base + 6 each, and of at least base + 7. All 64 elements must exist."""


PLACES_OF_BYTE = np.array(
    [[*(i for i in range(8) if byte >> i & 1), *[0] * (8 - byte.bit_count())] for byte in range(256)], np.uint8
)


@intrinsic
def _list_byte(typing_context, table, byte, base, places, index):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        begin = builder.shl(arguments[1], ir.IntType(64)(3))
        found = _load(builder, _vector_at(context, builder, signature.args[0], arguments[0], begin, LISTED))
        base = _same_in_all(builder, builder.trunc(arguments[2], ir.IntType(32)), LISTED)
        out = builder.add(builder.zext(found, base.type), base)
        builder.store(
            out, _vector_at(context, builder, signature.args[3], arguments[3], arguments[4], LISTED)
        ).align = 1
        return context.get_dummy_value()

    return types.void(table, types.uint64, types.uint64, places, types.int64), generate


list_byte = cast(Callable[[npt.NDArray[np.uint8], np.uint64, np.uint64, npt.NDArray[np.uint32], Int], None], _list_byte)
"""Writes eight places from an index on: first the positions of a byte's ones, lowest first, each plus `base`. The table is
`PLACES_OF_BYTE`, flattened."""


def _running_sums(builder: Any, lanes: Any, count: int) -> Any:
    """The prefix sum over the lanes."""
    nothing = ir.Constant(lanes.type, [0] * count)
    step = 1
    while step < count:
        before = [count + i if i < step else i - step for i in range(count)]
        picked = ir.Constant(ir.VectorType(ir.IntType(32), count), before)
        lanes = builder.add(lanes, builder.shuffle_vector(lanes, nothing, picked))
        step *= 2
    return lanes


NOT_ALL_SHORT = np.uint64((1 << 64) - 1)


@intrinsic
def _add_gaps(typing_context, quotients, index, after, places):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        at = arguments[1]
        gaps = _load(builder, _vector_at(context, builder, signature.args[0], arguments[0], at, GAPS))
        is_long = builder.icmp_unsigned("==", gaps, ir.Constant(gaps.type, [255] * GAPS))
        wide = ir.VectorType(ir.IntType(32), GAPS)
        steps = builder.add(builder.zext(gaps, wide), ir.Constant(wide, [1] * GAPS))
        sums = _running_sums(builder, steps, GAPS)
        before = builder.sub(builder.trunc(arguments[2], ir.IntType(32)), ir.IntType(32)(1))
        out = builder.add(sums, _same_in_all(builder, before, GAPS))
        builder.store(out, _vector_at(context, builder, signature.args[3], arguments[3], at, GAPS)).align = 1
        total = builder.zext(builder.extract_element(sums, ir.IntType(32)(GAPS - 1)), ir.IntType(64))
        any_long = builder.icmp_unsigned("!=", builder.bitcast(is_long, ir.IntType(GAPS)), ir.IntType(GAPS)(0))
        return builder.select(any_long, ir.IntType(64)(int(NOT_ALL_SHORT)), builder.add(arguments[2], total))

    return types.uint64(quotients, types.int64, types.uint64, places), generate


add_gaps = cast(Callable[[npt.NDArray[np.uint8], Int, np.uint64, npt.NDArray[np.uint32]], np.uint64], _add_gaps)
"""Writes the places after 16 gaps (bytes from an index on), given that the last place before them was `after` - 1; returns the
next `after`. Returns `NOT_ALL_SHORT` if one of them is 255: then the written places are invalid."""
