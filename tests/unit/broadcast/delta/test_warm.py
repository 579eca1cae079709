from __future__ import annotations

import torch

from echo2.broadcast.delta import warm_up
from echo2.broadcast.delta.scan import pack, walk_classes


def test_warming_up_compiles_the_kernels() -> None:
    warm_up(torch.bfloat16)
    assert pack.signatures  # type: ignore[attr-defined]
    assert walk_classes.signatures  # type: ignore[attr-defined]
