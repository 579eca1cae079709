"""Attention masks of packed rows, in the form that the device's attention needs.

A row holds units one after another; a unit is a prompt (part 0) and some of its completions (parts 1, 2, ...): a tree of depth
one. A token attends to itself and to earlier tokens of its unit that belong to the prompt or to its own part. A padding token
attends only to itself, so that no softmax row is empty; its result is not used.

The mask has two equivalent forms: a dense mask, which any attention takes and whose memory grows with the square of the row; and
the non-empty blocks of 128 by 128, for FlexAttention, which computes only those. Both are made on the device from two integers
per token. Leaves to others: the layout (learner/packing), the model.

Shapes: B rows, W positions per row, N blocks per row.

Sources. FlexAttention: Dong et al., arXiv 2412.05496.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Positions per side of a block: FlexAttention's own default."""


class Attention(enum.Enum):
    """Implementation of attention over packed rows."""

    DENSE = "dense"  # torch's scaled_dot_product_attention with a mask of W x W
    FLEX = "flex"  # torch's FlexAttention with a block mask; no gradient on a CPU


@dataclass(frozen=True, slots=True)
class UnitTree:
    """Unit and part of each position: `unit_BW` and `part_BW`, int32. Each padding position is its own unit."""

    unit_BW: Tensor
    part_BW: Tensor

    def to(self, device: torch.device) -> UnitTree:
        return UnitTree(self.unit_BW.to(device, non_blocking=True), self.part_BW.to(device, non_blocking=True))

    def visible(self, b: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether position `query` attends to position `key` in row `b`; the arguments are index tensors that broadcast."""
        part = self.part_BW[b, key]
        same_part = (part == 0) | (part == self.part_BW[b, query])
        return (self.unit_BW[b, key] == self.unit_BW[b, query]) & same_part & (key <= query)


def dense_mask(tree: UnitTree) -> Tensor:
    """Returns a bool mask of shape (B, W, W), True where attention is allowed."""
    unit_BW, part_BW = tree.unit_BW, tree.part_BW
    width = unit_BW.shape[1]
    same_unit = unit_BW[:, :, None] == unit_BW[:, None, :]
    visible_part = (part_BW[:, None, :] == 0) | (part_BW[:, :, None] == part_BW[:, None, :])
    causal = torch.ones(width, width, dtype=torch.bool, device=unit_BW.device).tril()
    return same_unit & visible_part & causal


def block_mask(tree: UnitTree) -> BlockMask:
    """Finds the blocks with any allowed pair, and those with only allowed pairs, for which FlexAttention evaluates no mask.

    Works through one band of 128 queries after another, so that no W x W tensor exists: 2 MiB for a row of 16,384.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows, width = tree.unit_BW.shape
    assert width % BLOCK == 0, "rows of whole blocks"
    blocks, device = width // BLOCK, tree.unit_BW.device
    any_BNN = torch.zeros(rows, blocks, blocks, dtype=torch.bool, device=device)
    all_BNN = torch.zeros_like(any_BNN)
    b, key = torch.arange(rows, device=device)[:, None, None], torch.arange(width, device=device)[None, None, :]
    for band in range(blocks):
        query = torch.arange(band * BLOCK, (band + 1) * BLOCK, device=device)[None, :, None]
        seen = tree.visible(b, query, key).view(rows, BLOCK, blocks, BLOCK)
        any_BNN[:, band] = seen.any(3).any(1)
        all_BNN[:, band] = seen.all(3).all(1)
    partial, full = _ordered(any_BNN & ~all_BNN), _ordered(all_BNN)

    def mask_mod(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return tree.visible(b, query, key)

    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(width, width))


def _ordered(held_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Number of blocks per band of queries, and their indices in ascending order, with a head dimension of 1."""
    numbers_BN = held_BNN.sum(-1, dtype=torch.int32)
    indices_BNN = torch.argsort(held_BNN.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return numbers_BN[:, None], indices_BNN[:, None]
