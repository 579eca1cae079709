"""Cuts a set of tensors into blocks: a pure function of names, types, shapes, block size and shard count.

Elements of one type are laid end to end in the order of their tensors' names and cut every `block_elements`, so that a
hundred small tensors share one block and a large tensor has many. With shards, each shard's rows (dimension 0 in equal
parts, the last ones shorter or empty) are cut separately, so that a rank encodes its blocks without the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from echo2.base.errors import DeltaFormatError
from echo2.weights.elements import ElementType, TensorSpec

BLOCK_ELEMENTS = 1 << 22
BLOCK_ELEMENTS_MAX = 1 << 24
BLOCK_COUNT_MAX = 1 << 20
SHARDS_MAX = 1 << 14


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` elements of one tensor from its flat element `start` on; `base` is the first one's index in the block."""

    spec: TensorSpec
    start: int
    count: int
    base: int


@dataclass(frozen=True, slots=True)
class Block:
    """One independent block: segments of one element type."""

    index: int
    shard: int
    element: ElementType
    segments: tuple[Segment, ...]

    @property
    def element_count(self) -> int:
        last = self.segments[-1]
        return last.base + last.count

    @property
    def raw_bytes(self) -> int:
        return self.element_count * self.element.bytes

    def describe(self) -> str:
        """Names the block and its tensors for error messages."""
        first, last = self.segments[0], self.segments[-1]
        text = f"block {self.index} (tensor {first.spec.name} from element {first.start}"
        return text + (f" to tensor {last.spec.name})" if last is not first else ")")


def sorted_specs(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Canonical order: by element type, then by name."""
    return tuple(sorted(specs, key=lambda spec: (spec.element.code, spec.name)))


def shard_range(spec: TensorSpec, shard: int, shard_count: int) -> tuple[int, int]:
    """Flat elements [start, stop) of a tensor that a shard holds: rows of dimension 0, in equal parts."""
    if shard_count == 1 or not spec.shape:
        return (0, spec.element_count) if shard == 0 else (0, 0)
    rows = spec.shape[0]
    height = -(-rows // shard_count)
    width = spec.element_count // rows if rows else 0
    return min(shard * height, rows) * width, min((shard + 1) * height, rows) * width


def _shard_blocks(
    specs: tuple[TensorSpec, ...], block_elements: int, shard: int, shard_count: int
) -> Iterator[tuple[ElementType, tuple[Segment, ...]]]:
    segments: list[Segment] = []
    filled = 0
    for spec in specs:
        start, stop = shard_range(spec, shard, shard_count)
        if segments and segments[0].spec.element is not spec.element:
            yield segments[0].spec.element, tuple(segments)
            segments, filled = [], 0
        while start < stop:
            count = min(stop - start, block_elements - filled)
            segments.append(Segment(spec, start, count, filled))
            start += count
            filled += count
            if filled == block_elements:
                yield spec.element, tuple(segments)
                segments, filled = [], 0
    if segments:
        yield segments[0].spec.element, tuple(segments)


def blocks_of(specs: tuple[TensorSpec, ...], block_elements: int, shard_count: int = 1) -> tuple[Block, ...]:
    """All blocks of a set of tensors, in order. `specs` in canonical order."""
    if not 1 <= block_elements <= BLOCK_ELEMENTS_MAX:
        raise DeltaFormatError(f"elements a block: expected 1 to {BLOCK_ELEMENTS_MAX}, got {block_elements}")
    if not 1 <= shard_count <= SHARDS_MAX:
        raise DeltaFormatError(f"shards: expected 1 to {SHARDS_MAX}, got {shard_count}")
    total = sum(spec.element_count for spec in specs)
    if total // block_elements > BLOCK_COUNT_MAX:
        raise DeltaFormatError(
            f"{total} elements in blocks of {block_elements}: expected at most {BLOCK_COUNT_MAX} of them"
        )
    blocks: list[Block] = []
    for shard in range(shard_count):
        for element, segments in _shard_blocks(specs, block_elements, shard, shard_count):
            blocks.append(Block(len(blocks), shard, element, segments))
    return tuple(blocks)
