"""Draws tokens and their log-probabilities from logits.

Guarantees: a token depends only on its own logits, sampling parameters and random number, never on the rest of the batch; filters
apply in the order temperature, top-k, top-p; ties at the cutoff are kept by top-k and cut in token order by top-p. Leaves to
others: when to stop.

Shapes: T sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from echo2.base.rollout import SamplingParams

ELEMENTS_MAX = 1 << 19
"""Most logits processed at a time; bounds the memory of intermediate results."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Per sequence: the token, its log-probability under the sampling distribution and under the raw model."""

    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]


def draw(logits_TV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> SampledTokens:
    """Draws one token per row. `uniforms`: one random number in [0, 1) per row."""
    drawn, step = SampledTokens([], [], []), max(1, ELEMENTS_MAX // logits_TV.shape[1])
    for begin in range(0, len(logits_TV), step):
        rows = slice(begin, begin + step)
        part = _drawn(logits_TV[rows], params[rows], uniforms[rows])
        drawn.token_ids.extend(part.token_ids)
        drawn.logprobs.extend(part.logprobs)
        drawn.raw_logprobs.extend(part.raw_logprobs)
    return drawn


def _drawn(logits_TV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> SampledTokens:
    raw_TV = torch.log_softmax(logits_TV, dim=-1)
    sampling_TV = _sampling_logprobs(logits_TV, raw_TV, params)
    cumulative_TV = sampling_TV.exp().cumsum(dim=-1, dtype=torch.float64)
    targets = torch.tensor(uniforms, dtype=torch.float64)[:, None] * cumulative_TV[:, -1:]
    chosen = torch.searchsorted(cumulative_TV, targets, right=True).clamp_(max=logits_TV.shape[-1] - 1)
    greedy = [row for row, p in enumerate(params) if p.temperature == 0.0]
    if greedy:
        chosen[greedy] = logits_TV[greedy].argmax(dim=-1, keepdim=True)
    logprobs = sampling_TV.gather(1, chosen)
    if greedy:
        logprobs[greedy] = 0.0
    raw = raw_TV.gather(1, chosen)
    return SampledTokens(
        chosen[:, 0].tolist(), logprobs[:, 0].clamp_(max=0.0).tolist(), raw[:, 0].clamp_(max=0.0).tolist()
    )


def _sampling_logprobs(logits: torch.Tensor, raw: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probabilities after temperature and filters; greedy rows are left raw."""
    is_plain = [p.temperature in (0.0, 1.0) and (p.temperature == 0.0 or _is_unfiltered(p)) for p in params]
    if all(is_plain):
        return raw
    out = raw.clone()
    rows = [row for row, plain in enumerate(is_plain) if not plain]
    temperatures = torch.tensor([params[row].temperature for row in rows])
    out[rows] = torch.log_softmax(logits[rows] / temperatures[:, None], dim=-1)
    for row in rows:
        if not _is_unfiltered(params[row]):
            out[row] = torch.log_softmax(_filtered(out[row], params[row]), dim=-1)
    return out


def _is_unfiltered(params: SamplingParams) -> bool:
    return params.top_p >= 1.0 and params.top_k == 0


def _filtered(logprobs_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """`logprobs_V` with filtered-out tokens set to minus infinity. The likeliest token always stays."""
    kept = logprobs_V
    if 0 < params.top_k < len(kept):
        threshold = torch.topk(kept, params.top_k).values[-1]
        kept = kept.masked_fill(kept < threshold, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = torch.sort(kept, descending=True, stable=True)
        probs = torch.softmax(ordered, dim=-1, dtype=torch.float64)
        before = probs.cumsum(dim=-1) - probs
        kept = kept.masked_fill(
            torch.zeros_like(kept, dtype=torch.bool).scatter(0, order, before >= params.top_p), -torch.inf
        )
    return kept
