"""Attention over packed rows on a CPU, part by part instead of by a mask: each prompt once, each completion over its prompt and
itself.

Computes the allowed pairs alone, each half of a causal part once, with no tensor of the size of a row squared. The parts of one
query are joined by the log-sum-exp of their scores, and the backward pass runs part by part with the joined one, as in Liu et al.,
Ring Attention, arXiv 2310.01889; a part is torch's own flash kernel (Dao, arXiv 2307.08691). Leaves to others: the layout and when
it pays (packing, trainer).

Shapes: H heads, G heads of keys and values, W positions of a row, D values of a head.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from echo2.learner.training.packing import UnitSpan

NAME = "echo2_units"
"""Under this name transformers finds the attention; with a mask that names no parts it is torch's."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@cache
def registered() -> str:
    """Makes it known to transformers; returns its name."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def parts_mask(spans: tuple[UnitSpan, ...], rows: int) -> Tensor:
    """What takes the place of a mask: transformers hands it on as it is."""
    mask = torch.zeros(rows, 1, 1, 1, dtype=torch.bool)
    mask.spans = spans  # type: ignore[attr-defined]
    return mask


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """transformers' attention function. query: (rows, H, W, D), key and value: (rows, G, W, D)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    spans = getattr(attention_mask, "spans", None)
    if spans is None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
        return whole
    scale = named.get("scaling") or query.shape[-1] ** -0.5
    width = value.shape[-1]
    if width < query.shape[-1]:  # latent attention: the kernel takes one width
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
    out: Tensor = _UnitAttention.apply(query, key, value, spans, float(scale))  # type: ignore[no-untyped-call]
    return out[..., :width].transpose(1, 2).contiguous(), None


class _UnitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: tuple[UnitSpan, ...], scale: float
    ) -> Tensor:
        out = torch.zeros(query.shape)  # padding attends to nothing
        sums = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32)
        groups = query.shape[1] // key.shape[1]
        for span in spans:
            at = slice(span.row, span.row + 1)
            for queries, keys, is_causal in span.parts():
                part, part_sums = _flash(
                    query[at, :, queries], _repeated(key[at, :, keys], groups), _repeated(value[at, :, keys], groups),
                    0.0, is_causal, attn_mask=None, scale=scale,
                )  # fmt: skip
                held = sums[at, :, queries]
                joined = torch.logaddexp(held, part_sums)
                out[at, :, queries] *= (held - joined).exp()[..., None]
                out[at, :, queries] += part * (part_sums - joined).exp()[..., None]
                sums[at, :, queries] = joined
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, sums = ctx.saved_tensors
        grad_out = grads[0]
        groups = query.shape[1] // key.shape[1]
        # Sums of many parts, so in float32.
        grad_query, grad_key, grad_value = torch.zeros(query.shape), torch.zeros(key.shape), torch.zeros(value.shape)
        for span in ctx.spans:
            at = slice(span.row, span.row + 1)
            for queries, keys, is_causal in span.parts():
                laid = sums[at, :, queries].transpose(1, 2).contiguous().transpose(1, 2)  # by position, then by head
                of_query, of_key, of_value = _flash_backward(
                    grad_out[at, :, queries].contiguous(), query[at, :, queries],
                    _repeated(key[at, :, keys], groups), _repeated(value[at, :, keys], groups),
                    out[at, :, queries], laid, 0.0, is_causal, attn_mask=None, scale=ctx.scale,
                )  # fmt: skip
                grad_query[at, :, queries] += of_query
                grad_key[at, :, keys] += _summed(of_key, groups)
                grad_value[at, :, keys] += _summed(of_value, groups)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _repeated(part_1GLD: Tensor, groups: int) -> Tensor:
    """Keys or values for each head of queries."""
    return part_1GLD if groups == 1 else part_1GLD.repeat_interleave(groups, 1)


def _summed(part_1HLD: Tensor, groups: int) -> Tensor:
    return part_1HLD if groups == 1 else part_1HLD.view(1, -1, groups, *part_1HLD.shape[2:]).sum(2)
