"""Input and output of a scoring forward pass: a reading on the device, and the columns that the policy computes.

Guarantees: at most `rows_at_once` rows of logits exist at a time. Leaves to others: the weights (scoring).
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
from echo2.learner.audit import FLOOR_NATS, TokenScores

COLUMNS = len(fields(TokenScores))


@dataclass(frozen=True, slots=True)
class TokensToScore:
    """A reading on the device. `past`: the KV cache to continue and fill; None if no cache is needed."""

    token_ids_1L: Tensor
    target_T: Tensor
    numbers_T: Tensor
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
    splits = (torch.split(part, size) for part in (rows_TX, asked.target_T, asked.numbers_T))
    for rows, targets, numbers in zip(*splits, strict=True):
        parts.append(chunk_scores(logits_of(rows), targets, numbers, asked.sampling))
    return torch.stack([torch.cat(column).double().cpu() for column in zip(*parts, strict=True)])


# ---- columns

CHUNK_LOGITS = 1 << 25
"""Logits per chunk: their softmax and sorting take about ten times as many bytes."""
GREEDY_NATS = 1.0
"""How far below the likeliest token a greedy one may be: at another precision, an engine may pick a nearly equal one."""


def rows_at_once(vocabulary_size: int) -> int:
    """How many rows of logits to process at a time."""
    return max(1, CHUNK_LOGITS // vocabulary_size)


def chunk_scores(
    logits_CV: Tensor, targets_C: Tensor, numbers_C: Tensor, sampling: SamplingParams
) -> tuple[Tensor, ...]:
    """The columns of `TokenScores` for at most `rows_at_once` rows."""
    if sampling.temperature == 0:
        return _greedy_scores(logits_CV, targets_C)
    plain_CV = (logits_CV.float() / sampling.temperature).log_softmax(-1)
    drawn_CV = _filtered(plain_CV, sampling) if sampling.is_filtered else plain_CV
    drawn_C = drawn_CV.gather(-1, targets_C[:, None])[:, 0]
    trained_C = plain_CV.gather(-1, targets_C[:, None])[:, 0]
    if sampling.is_filtered and sampling.temperature != 1.0:  # a token at the filter's edge counts as kept
        passed_C = torch.where(drawn_CV.isinf(), -torch.inf, plain_CV).logsumexp(-1)
        trained_C = trained_C - passed_C
    probabilities_CV = drawn_CV.exp()
    expected_C = (probabilities_CV * drawn_CV.clamp(min=FLOOR_NATS)).sum(-1)
    sums_CV = probabilities_CV.cumsum(-1, dtype=torch.float64)
    sums_CV /= sums_CV[:, -1:].clone()
    picked_C1 = torch.searchsorted(sums_CV, numbers_C[:, None], right=True).clamp_(max=logits_CV.shape[-1] - 1)
    squares_CV = probabilities_CV.double().square().cumsum(-1)
    edges_C2 = torch.cat([picked_C1 - 1, picked_C1], -1)
    at_C2, is_inner_C2 = edges_C2.clamp(min=0), edges_C2 >= 0
    cumulative_C2 = torch.where(is_inner_C2, sums_CV.gather(-1, at_C2), 0.0)
    below_C2 = torch.where(is_inner_C2, squares_CV.gather(-1, at_C2), 0.0)
    spread_C2 = (
        (1.0 - cumulative_C2).square() * below_C2 + cumulative_C2.square() * (squares_CV[:, -1:] - below_C2)
    ).sqrt()
    picked_C = picked_C1[:, 0] == targets_C
    edges = (*cumulative_C2.unbind(-1), *spread_C2.unbind(-1))
    return trained_C, drawn_C.clamp(min=2 * FLOOR_NATS), expected_C, picked_C, *edges


def _greedy_scores(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, ...]:
    """Scores of greedy completions: the claimed number is the raw model's, and a token that is further below the
    likeliest than engines differ counts as impossible, and as one that no number picks."""
    plain_CV = logits_CV.float().log_softmax(-1)
    plain_C = plain_CV.gather(-1, targets_C[:, None])[:, 0]
    picked_C = plain_CV.amax(-1) - plain_C <= GREEDY_NATS
    drawn_C, no_C = torch.where(picked_C, 0.0, FLOOR_NATS), torch.zeros_like(plain_C)
    return plain_C, drawn_C, no_C, picked_C, no_C, no_C + 1.0, no_C, no_C


def _filtered(logprobs_CV: Tensor, sampling: SamplingParams) -> Tensor:
    """Applies top-k, then top-p, like the embedded engine: cut tokens get minus infinity, the rest is renormalised."""
    kept_CV = logprobs_CV
    if 0 < sampling.top_k < kept_CV.shape[-1]:
        threshold_C = torch.topk(kept_CV, sampling.top_k).values[:, -1:]
        kept_CV = kept_CV.masked_fill(kept_CV < threshold_C, -torch.inf)
    if sampling.top_p < 1.0:
        ordered_CV, order_CV = torch.sort(kept_CV, descending=True, stable=True)
        odds_CV = torch.softmax(ordered_CV, dim=-1, dtype=torch.float64)
        before_CV = odds_CV.cumsum(dim=-1) - odds_CV
        cut_CV = torch.zeros_like(kept_CV, dtype=torch.bool).scatter(-1, order_CV, before_CV >= sampling.top_p)
        kept_CV = kept_CV.masked_fill(cut_CV, -torch.inf)
    return kept_CV.log_softmax(-1)
