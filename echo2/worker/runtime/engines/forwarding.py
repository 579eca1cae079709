"""The interface between the step loop and a model's forward pass, fused (forward) or by transformers' modules (general)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from echo2.worker.slots import Copy, Fill


class Forward(Protocol):
    """A model's forward pass over its cache. `decode` returns logits; `fill` computes keys and values only; `read` also returns the
    hidden states of one run, from which `logits` computes the logits of the tokens that follow."""

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
