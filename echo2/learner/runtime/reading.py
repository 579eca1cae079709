"""Input and output of a scoring forward pass: what ranks read, and the columns that the policy computes.

Guarantees: at most `rows_at_once` rows of logits exist at a time. Leaves to others: the weights (own_scoring).
Shapes: L tokens read, T tokens scored, H hidden size, V vocabulary, C columns of `TokenScores`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from echo2.base.rollout import SamplingParams
from echo2.scoring.columns import chunk_scores, rows_at_once
from echo2.scoring.request import TokenScores

COLUMNS = len(fields(TokenScores))


@dataclass(frozen=True, slots=True)
class Reading:
    """Scores the last `count` of `token_ids`; the very last token is only a target, not an input. `begin`: earlier tokens that are
    already in the KV cache. `keeps`: keep the cache, because a later reading may continue this one."""

    token_ids: tuple[int, ...]
    count: int
    sampling: SamplingParams
    begin: int = 0
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class TokensToScore:
    """A reading on the device. `past`: the KV cache to continue and fill; None if no cache is needed."""

    token_ids_1L: Tensor
    target_T: Tensor
    sampling: SamplingParams
    past: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for a transformers model."""
        is_kept = self.past is not None
        return {"input_ids": self.token_ids_1L, "use_cache": is_kept} | ({cache_name(): self.past} if is_kept else {})


@functools.cache
def cache_name() -> str:
    """Name of the KV cache in the arguments and outputs of transformers models: `past_key_values` until version 5.24."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def columns_of(
    asked: TokensToScore, rows_TX: Tensor, vocabulary_size: int, logits_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns columns_CT, float64 on the host. `rows_TX`: the last T rows of hidden states or logits, which `logits_of` turns into
    logits."""
    parts = []
    size = rows_at_once(vocabulary_size)
    for rows, targets in zip(torch.split(rows_TX, size), torch.split(asked.target_T, size), strict=True):
        parts.append(chunk_scores(logits_of(rows), targets, asked.sampling))
    return torch.stack([torch.cat(column).double().cpu() for column in zip(*parts, strict=True)])
