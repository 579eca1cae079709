"""Live values that are computed from published ones and differ from them in their bits.

Guarantees: the same published values always give the same live bits, so the published bits kept on the host prove the live ones.
Leaves to others: keeping the published bits (weight_map.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Derived(Protocol):
    """A live value computed from one published tensor."""

    def put(self, published: torch.Tensor, positions: torch.Tensor | None) -> None:
        """Computes and writes the live value; `published` is the whole tensor, changed at the flat `positions` (None: all)."""
        ...

    def follows(self, published: torch.Tensor) -> bool:
        """Whether the live value equals, bit for bit, what `put` would write."""
        ...


@dataclass(frozen=True, slots=True)
class Scaled:
    """A strided part (offset and strides) of a published tensor times `factor`, in the dtype of the live view."""

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
    """The bits as integers, so that NaNs compare equal."""
    return values.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[values.element_size()])
