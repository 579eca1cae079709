"""Live values that follow from published ones without being equal to them bit for bit.

Guarantees: the same published values always give the same live bits, so that keeping the former on the host proves the
latter. Leaves to others: keeping them (weight_map.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Derived(Protocol):
    """Something live that follows from one published tensor."""

    def put(self, published: torch.Tensor, positions: torch.Tensor | None) -> None:
        """Writes what follows from the whole tensor, of which the flat `positions` (None: all) have changed."""
        ...

    def follows(self, published: torch.Tensor) -> bool:
        """Whether what is live is, bit for bit, what `put` would write."""
        ...


@dataclass(frozen=True, slots=True)
class Scaled:
    """A strided part (offset and strides) of a published tensor, times a number, in the dtype of the live view."""

    offset: int
    strides: tuple[int, ...]
    live: torch.Tensor
    factor: float

    def put(self, published: torch.Tensor, positions: torch.Tensor | None) -> None:
        self.live.copy_(self._values(published))

    def follows(self, published: torch.Tensor) -> bool:
        return bool(torch.equal(_bits(self.live.cpu()), _bits(self._values(published))))

    def _values(self, published: torch.Tensor) -> torch.Tensor:
        part = published.as_strided(self.live.shape, self.strides, self.offset)
        return (part.float() * self.factor).to(self.live.dtype)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Bits, so that what is not a number is equal to itself."""
    return values.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[values.element_size()])
