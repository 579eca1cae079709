"""Element types and raw bits: every tensor is a flat array of unsigned integers of its element's width.

Guarantees: the bits are exact (including NaN payloads, negative zero and denormals) and no value is ever converted.
Leaves to others: what the bits mean; only the position of the exponent field is known here, because the probability
that a weight changes depends on the exponent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from echo2.base.errors import DeltaFormatError

WeightSet: TypeAlias = Mapping[str, torch.Tensor]
Bits: TypeAlias = npt.NDArray[np.unsignedinteger]

TENSOR_COUNT_MAX = 1 << 20
NAME_BYTES_MAX = 1 << 10
DIMENSIONS_MAX = 16
ELEMENTS_MAX = 1 << 48


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
_TORCH_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

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
TYPE_BY_CODE = {element.code: element for element in ELEMENT_TYPES}
_TYPE_BY_TORCH = {element.torch_dtype: element for element in ELEMENT_TYPES}


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


def tensor_of(bits: Bits, element: ElementType, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor with these raw bits; shares their memory."""
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[element.bytes]
    return torch.from_numpy(bits.view(signed)).view(element.torch_dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape of one tensor."""

    name: str
    element: ElementType
    shape: tuple[int, ...]

    @property
    def element_count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def untied(weights: WeightSet) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Distinct tensors by name, and the other names of tied ones (alias -> kept name).

    Of names that share one storage, the last in code-point order is kept, whatever the mapping's order
    (`model.embed_tokens.weight` rather than `lm_head.weight`).
    """
    kept: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(weights, reverse=True):
        tensor = weights[name]
        if tensor.numel() == 0:
            continue
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if where in kept:
            aliases[name] = kept[where]
        else:
            kept[where] = name
    return {name: weights[name] for name in sorted(weights) if name not in aliases}, aliases
