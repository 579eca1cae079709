"""What depends on the device's memory: pieces of logits, recomputed layers, copies to the host, the optimiser.

Guarantees: none of it changes results, except for the order of rounding. Leaves to others: when to use it (model, trainer).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

LOGIT_BYTES_MIN = 64 << 20
"""Bytes of logits at a time on a CPU, and on a GPU that is nearly full."""
LOGIT_BYTES_MAX = 1 << 30
"""Most bytes of logits at a time; larger pieces make the matrix product no faster."""
_FREE_SHARE = 16
"""Logits get 1/16 of free memory: their float32 copy, softmax and gradient exist at the same time, and other tensors need the
rest."""


def free_bytes(device: torch.device) -> int:
    """Bytes that a tensor on the device could still take; 0 if unknown."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def logit_bytes(free: int) -> int:
    """Bytes of logits to compute at a time, given `free` bytes of memory."""
    return max(LOGIT_BYTES_MIN, min(LOGIT_BYTES_MAX, free // _FREE_SHARE))


def host_copies(parts: Iterable[Tensor], dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
    """Copies tensors to host memory in `dtype`. `pinned`: a GPU copies asynchronously into pinned memory, one tensor after another,
    while the next is queued; all copies are complete on return."""
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
    """Makes AdamW: fused on a GPU; on a CPU the plain one, because recorded runs depend on its exact bits."""
    return torch.optim.AdamW(masters, fused=True if device.type == "cuda" else None, **settings)


class Chosen:
    """Checkpoint policy for recomputed layers: keeps attention outputs and every second matrix product."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}  # by pass: forward, recomputation

    def __call__(self, context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op not in _PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._products[context.is_recompute] += 1
        is_kept = self._products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    """Contexts of one layer, for `torch.utils.checkpoint`."""
    return create_selective_checkpoint_contexts(Chosen())  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
