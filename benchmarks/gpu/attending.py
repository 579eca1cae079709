"""FlexAttention by blocks against a dense mask, on one row of units as the learner packs them."""

from __future__ import annotations

import torch

from benchmarks.gpu.setup import Row, Setup, not_measured
from echo2.learner.training.packing import UnitTree, block_mask, dense_mask

HEADS, HEAD_DIM = 16, 128
COMPLETIONS = 8


def units(width: int, unit_tokens: int) -> UnitTree:
    """One row of equal units: a prompt of a quarter, and eight completions that share the rest."""
    unit = torch.arange(width, dtype=torch.int32) // unit_tokens
    inside = torch.arange(width, dtype=torch.int32) % unit_tokens
    prompt = unit_tokens // 4
    each = max(1, (unit_tokens - prompt) // COMPLETIONS)
    part = torch.where(inside < prompt, 0, 1 + (inside - prompt) // each)
    return UnitTree(unit[None], part.to(torch.int32)[None])


def run(setup: Setup) -> list[Row]:
    width, unit_tokens = (256, 128) if setup.is_small else (16_384, 4096)
    tree = units(width, unit_tokens).to(setup.device)
    does_grad = setup.device.type != "cpu"
    tensors = [
        torch.randn(1, HEADS, width, HEAD_DIM, device=setup.device, dtype=setup.dtype, requires_grad=does_grad)
        for _ in range(3)
    ]
    rows = []
    masks_s = {
        "dense": setup.seconds(lambda: dense_mask(tree)),
        "blocks": setup.seconds(lambda: block_mask(tree)),
    }
    rows += [Row(f"mask of {width} tokens, {name}", 1e3 * s, "ms") for name, s in masks_s.items()]
    dense, blocks = dense_mask(tree)[:, None], block_mask(tree)
    held = float(blocks.to_dense().float().mean())
    rows.append(Row(f"blocks of {width} tokens that hold anything", held, "share"))
    attend = torch.nn.functional.scaled_dot_product_attention

    def pass_through(by: object) -> torch.Tensor:
        out: torch.Tensor = by(*tensors)  # type: ignore[operator]
        if does_grad:
            torch.autograd.grad(out.sum(), tensors)
        return out

    dense_s = setup.seconds(lambda: pass_through(lambda q, k, v: attend(q, k, v, attn_mask=dense)))
    what = "forward and backward" if does_grad else "forward"
    rows.append(Row(f"attention over {width} tokens, dense mask, {what}", 1e3 * dense_s, "ms"))
    flex_name = f"attention over {width} tokens, FlexAttention over dense mask, {what}"
    try:
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError:
        return [*rows, not_measured(flex_name, "x", "this torch has no FlexAttention")]
    compiled = flex_attention if setup.device.type == "cpu" else torch.compile(flex_attention)
    flex_s = setup.seconds(lambda: pass_through(lambda q, k, v: compiled(q, k, v, block_mask=blocks)))
    rows.append(Row(flex_name, flex_s / dense_s, "x", None if setup.is_small else 0.5))
    found, expected = compiled(*tensors, block_mask=blocks), attend(*tensors, attn_mask=dense)
    off = float((found - expected).detach().abs().max())
    rows.append(
        Row("attention, largest difference of the two", off, "", 1e-4 if setup.dtype == torch.float32 else 3e-2)
    )
    return rows
