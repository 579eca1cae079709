"""A matrix in int8 with one scale per row: how it is made and read.

Guarantees: codes and scales depend only on the values of their own row. Leaves to others: which weights are rounded
(rounded_weights.py), products (products.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from echo2.worker.runtime.engines.kernels import widen_rows

LEVELS = 127
BLOCK_ELEMENTS = 1 << 18
"""Elements processed at a time, so that a block stays in the processor's cache."""


def row_blocks(shape: torch.Size) -> Iterator[slice]:
    """Slices of a matrix's rows, each of at most BLOCK_ELEMENTS elements but at least one row."""
    count = max(1, BLOCK_ELEMENTS // shape[1])
    for begin in range(0, shape[0], count):
        yield slice(begin, min(begin + count, shape[0]))


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix whose row r is `codes[r] * scales[r]`. `codes`: int8 [R, C]; `scales`: float32 [R]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, rows: slice) -> Rounded:
        return Rounded(self.codes[rows], self.scales[rows])

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The matrix in float32, some rows at a time; each block is valid until the next one is requested."""
        scratch: torch.Tensor | None = None
        for rows in row_blocks(self.shape):
            count = rows.stop - rows.start
            if scratch is None:  # no later block has more rows than the first
                scratch = torch.empty(count, self.shape[1])
            block = scratch[:count]
            widen_rows(self.codes[rows].numpy(), self.scales[rows].numpy(), block.numpy())
            yield rows, block


def rounded_rows(master_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8 [R, C]) and scales (float32 [R]) of some rows. A row that is all zeros or has a non-finite value gets codes 0."""
    values = master_RC.float()
    scales = values.abs().amax(dim=1) / LEVELS
    is_usable = torch.isfinite(scales) & (scales > 0)
    steps = torch.round(values / torch.where(is_usable, scales, torch.inf)[:, None])
    return torch.where(is_usable[:, None], steps, 0.0).to(torch.int8), scales


Matrix = torch.Tensor | Rounded
