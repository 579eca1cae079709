"""A matrix in int8 with one scale a row, and how it is made and read.

Guarantees: codes and scales depend on the values of their own row alone. Leaves to others: whose values they are
(rounded_weights.py), products (products.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from echo2.worker.runtime.engines.kernels import widen_rows

LEVELS = 127
BLOCK_ELEMENTS = 1 << 18
"""So many are worked on at a time, so that they stay in the processor's cache."""


def row_blocks(shape: torch.Size) -> Iterator[slice]:
    """The rows of a matrix, so many at a time as have BLOCK_ELEMENTS."""
    count = max(1, BLOCK_ELEMENTS // shape[1])
    for begin in range(0, shape[0], count):
        yield slice(begin, min(begin + count, shape[0]))


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix of which row r is `codes[r] * scales[r]`. Shapes: codes [R, C] of int8, scales [R]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, rows: slice) -> Rounded:
        return Rounded(self.codes[rows], self.scales[rows])

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The matrix in float32, some rows at a time; each block is valid until the next is asked for."""
        scratch: torch.Tensor | None = None
        for rows in row_blocks(self.shape):
            count = rows.stop - rows.start
            if scratch is None:  # no later block has more rows than the first
                scratch = torch.empty(count, self.shape[1])
            block = scratch[:count]
            widen_rows(self.codes[rows].numpy(), self.scales[rows].numpy(), block.numpy())
            yield rows, block


def rounded_rows(master_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of some rows. A row of zeros, or with something that is not finite in it, has codes of 0."""
    values = master_RC.float()
    scales = values.abs().amax(dim=1) / LEVELS
    is_usable = torch.isfinite(scales) & (scales > 0)
    steps = torch.round(values / torch.where(is_usable, scales, torch.inf)[:, None])
    return torch.where(is_usable[:, None], steps, 0.0).to(torch.int8), scales


Matrix = torch.Tensor | Rounded
