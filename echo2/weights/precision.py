"""Precisions of a policy: bfloat16, float32, or nf4 (QLoRA: bfloat16, but an adapter's base has its linear layers in 4 bits).

Guarantees: learner and workers that round the same checkpoint get the same bits, on any device: each step is one float32
operation, a comparison or a rounding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "nf4": torch.bfloat16}
"""By name: the dtype of the policy's values."""
NF4_BLOCK = 64  # Values that share a scale: the largest of them by magnitude, in bfloat16. As in QLoRA.
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Dettmers et al. 2023 (QLoRA), appendix E: quantiles of a normal distribution.
_PIECE = 1 << 20
"""Values quantised at a time: they stay in a core's cache, which takes a core a third of the time (19 ns a value)."""
_BORDERS: list[float] = ((torch.tensor(_LEVELS[1:]) + torch.tensor(_LEVELS[:-1])) / 2).tolist()
"""Halfway, so that the nearest level is taken."""


def linear_layers(hf_model: Any) -> dict[str, nn.Linear]:
    """The linear layers of a causal LM but its head, by name: what an adapter is put on, and nf4 rounds. Not those that do more
    than multiply, as some routers."""
    head = hf_model.get_output_embeddings()
    linear = {n: m for n, m in hf_model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    return {name: layer for name, layer in linear.items() if type(layer).forward is nn.Linear.forward}


@torch.no_grad()
def round_parameters(hf_model: Any, precision: str, device: torch.device | None = None) -> None:
    """Rounds a model in place. `device`: where nf4 is computed, one layer at a time; None: where the model is."""
    for parameter in hf_model.parameters():
        parameter.copy_(parameter.to(PRECISIONS[precision]))
    if precision == "nf4":
        for layer in linear_layers(hf_model).values():
            layer.weight.copy_(dequantise(*quantise(layer.weight.to(device)), layer.weight.shape))


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """NF4 of a matrix of N values: codes (uint8, two values each) and scales (bfloat16, one a block), padded to whole blocks.
    Values that are NF4 already keep their bits."""
    flat = weight.detach().flatten()
    padded = F.pad(flat, (0, -len(flat) % NF4_BLOCK))
    pieces = [_quantised(piece) for piece in torch.split(padded, _PIECE)]
    return torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces])


def _quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    blocks = values.to(torch.float32).reshape(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1).to(torch.bfloat16)
    unit = (blocks / torch.where(scales > 0, scales, 1.0).to(torch.float32)[:, None]).flatten()
    codes = torch.zeros(len(unit), dtype=torch.uint8, device=unit.device)
    for border in _BORDERS:
        codes += unit > border
    return codes[::2] << 4 | codes[1::2], scales


def dequantise(codes: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:
    """The matrix of this shape, in bfloat16. Beside it, 6 bytes a value are taken."""
    values = F.embedding(codes.to(torch.int32), _pairs(codes.device)).reshape(-1, NF4_BLOCK)
    return values.mul_(scales.to(torch.float32)[:, None]).to(torch.bfloat16).flatten()[: shape.numel()].reshape(shape)


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """The two levels of each byte of codes."""
    levels = torch.tensor(_LEVELS)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1).to(device)
