"""A forward pass that scores: what ranks are told to read, and what the policy makes of it.

Guarantees: at most `rows_at_once` rows of logits exist at a time. Leaves to others: whose weights (own_scoring).
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
    """The last `count` of `token_ids` are scored, the last one is not read. `begin`: tokens before these that are in the cache;
    `keeps`: a later reading may go on behind this one."""

    token_ids: tuple[int, ...]
    count: int
    sampling: SamplingParams
    begin: int = 0
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class TokensToScore:
    """A reading on the device. `past`: the cache to go on behind, and to fill; None: none is needed."""

    token_ids_1L: Tensor
    target_T: Tensor
    sampling: SamplingParams
    past: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a model of transformers."""
        is_kept = self.past is not None
        return {"input_ids": self.token_ids_1L, "use_cache": is_kept} | ({cache_name(): self.past} if is_kept else {})


@functools.cache
def cache_name() -> str:
    """What transformers' models call the KV cache that they take and return: `past_key_values` until version 5.24."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def columns_of(
    asked: TokensToScore, rows_TX: Tensor, vocabulary_size: int, logits_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """columns_CT in float64 on the host, from the last T rows of hidden states or logits."""
    parts = []
    size = rows_at_once(vocabulary_size)
    for rows, targets in zip(torch.split(rows_TX, size), torch.split(asked.target_T, size), strict=True):
        parts.append(chunk_scores(logits_of(rows), targets, asked.sampling))
    return torch.stack([torch.cat(column).double().cpu() for column in zip(*parts, strict=True)])
