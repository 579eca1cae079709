"""Element types and raw bits: every tensor is a flat array of unsigned integers of its element's width.

Guarantees: the bits are exact (including NaN payloads, negative zero and denormals) and no value is ever converted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from echo2.base.errors import DeltaFormatError

WeightSet: TypeAlias = Mapping[str, torch.Tensor]
Bits: TypeAlias = npt.NDArray[np.unsignedinteger]


def published_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a whole model publishes: its parameters, and the numbers that it keeps beside them and in its files (a router's
    correction bias), which no step changes."""
    state = model.state_dict(keep_vars=True)
    buffers = {n: b for n, b in model.named_buffers() if n in state and b.is_floating_point()}
    return {**dict(model.named_parameters()), **buffers}


CHECKPOINT: dict[str, Any] = {
    "allow_patterns": ["*.safetensors", "*.json"],
    "ignore_patterns": ["*/*", "consolidated*"],
}
"""The files of a model's repository that are fetched. Others hold the same weights once more, for their makers' own programs."""
TENSOR_COUNT_MAX = 1 << 20  # a hundred times a large mixture of experts
NAME_BYTES_MAX = 1 << 10  # names of modules nest some ten levels
DIMENSIONS_MAX = 16  # torch allows 64, weights have at most 5
ELEMENTS_MAX = 1 << 48  # beyond any model; products still fit into int64


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type. `exponent_bits` 0: no exponent field (integers), all elements are in one class."""

    code: int
    name: str
    torch_dtype: torch.dtype
    bytes: int
    exponent_shift: int
    exponent_bits: int

    @property
    def bits_dtype(self) -> np.dtype[np.unsignedinteger]:
        return _UNSIGNED[self.bytes]


_UNSIGNED: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64),
}  # fmt: skip
# By width: bit patterns as torch can index them.
_TORCH_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Code, name, width and exponent field, as in docs/delta-format.md.
ELEMENT_TYPES = (
    ElementType(1, "bfloat16", torch.bfloat16, 2, 7, 8),
    ElementType(2, "float16", torch.float16, 2, 10, 5),
    ElementType(3, "float32", torch.float32, 4, 23, 8),
    ElementType(4, "float64", torch.float64, 8, 52, 11),
    ElementType(5, "float8_e4m3fn", torch.float8_e4m3fn, 1, 3, 4),
    ElementType(6, "float8_e5m2", torch.float8_e5m2, 1, 2, 5),
    ElementType(7, "int8", torch.int8, 1, 0, 0),
    ElementType(8, "uint8", torch.uint8, 1, 0, 0),
    ElementType(9, "int16", torch.int16, 2, 0, 0),
    ElementType(10, "int32", torch.int32, 4, 0, 0),
    ElementType(11, "int64", torch.int64, 8, 0, 0),
    ElementType(12, "bool", torch.bool, 1, 0, 0),
)
TYPE_BY_CODE = {element.code: element for element in ELEMENT_TYPES}  # ELEMENT_TYPES by their code
_TYPE_BY_TORCH = {element.torch_dtype: element for element in ELEMENT_TYPES}  # ELEMENT_TYPES by torch's type


def element_type_of(name: str, tensor: torch.Tensor) -> ElementType:
    """The element type of a tensor; DeltaFormatError names the tensor if the format has no such type."""
    element = _TYPE_BY_TORCH.get(tensor.dtype)
    if element is None:
        known = ", ".join(element.name for element in ELEMENT_TYPES)
        raise DeltaFormatError(f"tensor {name}: expected one of {known}, got {tensor.dtype}")
    return element


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's raw bits as a flat integer tensor on its own device; a view if the tensor is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_TORCH_SIGNED[flat.element_size()])


def bits_of(tensor: torch.Tensor) -> Bits:
    """The raw bits of a CPU tensor, flat; a view (no copy) if the tensor is contiguous."""
    array: npt.NDArray[np.signedinteger] = flat_bits(tensor).numpy()
    return array.view(_UNSIGNED[tensor.element_size()])


def flat_tensor(bits: Bits) -> torch.Tensor:
    """The integer tensor of raw bits, as `flat_bits` makes it; shares their memory."""
    return torch.from_numpy(bits.view({1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[bits.itemsize]))


def tensor_of(bits: Bits, element: ElementType, shape: tuple[int, ...]) -> torch.Tensor:
    return flat_tensor(bits).view(element.torch_dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    element: ElementType
    shape: tuple[int, ...]

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)


def untied(weights: WeightSet) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Distinct tensors by name, and the other names of tied ones (alias -> kept name). Of names that share one storage, the
    last in code-point order is kept, whatever the mapping's order (`model.embed_tokens.weight` rather than `lm_head.weight`)."""
    names: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(weights, reverse=True):
        tensor = weights[name]
        if tensor.numel() == 0:
            continue
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if where in names:
            aliases[name] = names[where]
        else:
            names[where] = name
    return {name: weights[name] for name in sorted(weights) if name not in aliases}, aliases


BLOCK_ELEMENTS = 1 << 22  # 8 MiB of bf16: enough blocks to spread over threads and to pipeline, few enough heads
BLOCK_ELEMENTS_MAX = 1 << 24  # what a decoder stages for one block at most: 128 MiB
BLOCK_COUNT_MAX = 1 << 20  # of BLOCK_ELEMENTS each: 4 * 10^12 elements
SHARDS_MAX = 1 << 14  # ranks of the largest clusters


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` elements of one tensor from its flat element `start` on; `base` is the first one's index in the block."""

    spec: TensorSpec
    start: int
    count: int
    base: int


@dataclass(frozen=True, slots=True)
class Block:
    index: int
    shard: int
    element: ElementType
    segments: tuple[Segment, ...]

    @property
    def element_count(self) -> int:
        last = self.segments[-1]
        return last.base + last.count

    def describe(self) -> str:
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
