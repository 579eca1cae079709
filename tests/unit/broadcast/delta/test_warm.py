from __future__ import annotations

import torch

from echo2.broadcast.delta import warm_up
from echo2.broadcast.delta.scan import code_classes, code_plain
from echo2.broadcast.delta.walk import add, exchange, read_plain, settle, walk_classes


def test_warming_up_compiles_the_kernels() -> None:
    warm_up(torch.bfloat16)
    for kernel in (code_plain, code_classes, read_plain, walk_classes, settle, exchange, add):
        assert kernel.signatures  # type: ignore[attr-defined]
