"""What the step loop asks of a model's arithmetic, fused (forward) or of transformers' modules (general)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from echo2.worker.slots import Copy, Fill


class Forward(Protocol):
    """A model's arithmetic over its cache: `decode` samples nothing, `fill` computes keys and values only, `read` hidden states
    of one run, too, of which `logits` are those of the next tokens."""

    def warm_up(self) -> None: ...

    def decode(self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor: ...

    def fill(self, fills: Sequence[Fill]) -> None: ...

    @property
    def vocab_count(self) -> int: ...

    def read(self, run: Fill) -> torch.Tensor: ...

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor: ...

    def copy(self, copies: Sequence[Copy]) -> None: ...

    @property
    def tells_routing(self) -> bool:
        """Whether it records which experts computed each cached position."""
        ...

    def routing(self, slot: int, first: int, count: int) -> bytes:
        """Packed rows (base/routing) of cached positions of a slot."""
        ...
