"""A model over two ranks, as small as can be."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Half(torch.nn.Module):
    """One of two ranks: half of q by rows, all of norm."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.q = torch.nn.Parameter(torch.zeros(3, 4))
        self.norm = torch.nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
            else:
                self.q.data.copy_(tensor.narrow(0, 3 * self.rank, 3))
