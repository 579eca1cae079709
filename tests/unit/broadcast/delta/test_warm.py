from __future__ import annotations

import torch

from echo2.broadcast.delta import warm_up
from echo2.broadcast.delta.scan import pack_classes, pack_plain
from echo2.broadcast.delta.walk import add, exchange, walk_classes


def test_warming_up_compiles_the_kernels() -> None:
    warm_up(torch.bfloat16)
    for kernel in (pack_classes, pack_plain, walk_classes, exchange, add):
        assert kernel.signatures  # type: ignore[attr-defined]
