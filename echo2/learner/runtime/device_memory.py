"""What the trainer does by its device's memory: pieces of logits, layers computed again, copies to the host, the optimiser.

Guarantees: none of it changes what is computed, but for the order of rounding. Leaves to others: when (model, trainer).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

LOGIT_BYTES_MIN = 64 << 20
"""Of logits at a time, on a CPU, and on a device that is nearly full."""
LOGIT_BYTES_MAX = 1 << 30
"""More makes no product faster."""
_FREE_SHARE = 16
"""Logits, their float32 copy, softmax and gradient lie beside each other; the rest of what is free is others'."""


def free_bytes(device: torch.device) -> int:
    """That a tensor on the device could take; 0 where it is not known."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def logit_bytes(free: int) -> int:
    """How many bytes of logits exist at a time, of so many that are free."""
    return max(LOGIT_BYTES_MIN, min(LOGIT_BYTES_MAX, free // _FREE_SHARE))


def host_copies(parts: Iterable[Tensor], dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
    """Copies in host memory. `pinned`: the device copies all of them by itself, one behind the other, while the next is
    ordered; they may be read once this returns."""
    if not pinned:
        return [part.to(device="cpu", dtype=dtype, copy=True) for part in parts]
    copies, device = [], None
    for part in parts:
        device = part.device
        room = torch.empty(part.shape, dtype=dtype, pin_memory=device.type == "cuda")
        copies.append(room.copy_(part, non_blocking=True))
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return copies


def adamw_of(masters: Iterable[Tensor], device: torch.device, **settings: Any) -> torch.optim.AdamW:
    """On a GPU one kernel for all tensors; on a CPU the plain one, whose bits runs were recorded with."""
    return torch.optim.AdamW(masters, fused=True if device.type == "cuda" else None, **settings)


class Chosen:
    """What layers that are computed again keep all the same: what attention gave, and every second matrix product."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}  # forward, and again

    def __call__(self, context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op not in _PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._products[context.is_recompute] += 1
        is_kept = self._products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    """For `torch.utils.checkpoint`: of one layer."""
    return create_selective_checkpoint_contexts(Chosen())  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
