from __future__ import annotations

import torch

from echo2.broadcast.delta import warm_up
from echo2.broadcast.delta.bits import places_of_gaps
from echo2.broadcast.delta.classes import join_marks, sort_marks
from echo2.broadcast.delta.marks import move_marks, settle_marks, survey
from echo2.broadcast.delta.walk import move_places, settle_places


def test_warming_up_compiles_the_kernels() -> None:
    warm_up(torch.bfloat16)
    kernels = (survey, settle_marks, move_marks, settle_places, move_places, sort_marks, join_marks, places_of_gaps)
    for kernel in kernels:
        assert kernel.signatures  # type: ignore[attr-defined]
