"""Computes from logits what the bets of an audit need per token: one function for learner and workers.

Guarantees: the columns of `TokenScores`, in float64 on the CPU, from logits on any device, a chunk of rows at a time. Leaves to
others: the forward pass.

Shapes: L tokens, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echo2.base.rollout import SamplingParams
from echo2.scoring.request import FLOOR_NATS, TokenScores

CHUNK_LOGITS = 1 << 25
"""Logits per chunk: their softmax and sorting take about ten times as many bytes."""
GREEDY_NATS = 1.0
"""How far below the likeliest token a greedy one may be: at another precision, an engine may pick a nearly equal one."""


def rows_at_once(vocabulary_size: int) -> int:
    """How many rows of logits to process at a time."""
    return max(1, CHUNK_LOGITS // vocabulary_size)


def scores_of(logits_LV: Tensor, targets_L: Tensor, sampling: SamplingParams) -> TokenScores:
    """Scores tokens; row l of the logits is the model's distribution for token `targets_L[l]`."""
    rows = rows_at_once(logits_LV.shape[-1])
    chunks = zip(torch.split(logits_LV, rows), torch.split(targets_L, rows), strict=True)
    return joined([chunk_scores(logits_CV, targets_C, sampling) for logits_CV, targets_C in chunks])


def joined(parts: list[tuple[Tensor, ...]]) -> TokenScores:
    """Joins the scores of consecutive chunks."""
    return TokenScores(*(torch.cat(column).double().cpu().numpy() for column in zip(*parts, strict=True)))


def chunk_scores(logits_CV: Tensor, targets_C: Tensor, sampling: SamplingParams) -> tuple[Tensor, ...]:
    """The columns of `TokenScores` for at most `rows_at_once` rows, to be passed to `joined`."""
    if sampling.temperature == 0:
        return _greedy_scores(logits_CV, targets_C, sampling)
    plain_CV = (logits_CV.float() / sampling.temperature).log_softmax(-1)
    drawn_CV = _filtered(plain_CV, sampling) if sampling.is_filtered else plain_CV
    probabilities_CV = drawn_CV.exp()
    drawn_C = drawn_CV.gather(-1, targets_C[:, None])[:, 0]
    trained_C = plain_CV.gather(-1, targets_C[:, None])[:, 0]
    if sampling.is_filtered and sampling.temperature != 1.0:  # a token at the filter's edge counts as kept
        passed_C = torch.where(drawn_CV.isinf(), -torch.inf, plain_CV).logsumexp(-1)
        trained_C = trained_C - passed_C
    stops = torch.tensor(sorted(sampling.stop_token_ids), dtype=torch.long, device=logits_CV.device)
    ids_V = torch.arange(logits_CV.shape[-1], device=logits_CV.device)
    below_C = torch.where(ids_V < targets_C[:, None], probabilities_CV, 0.0).sum(-1)
    return (
        trained_C,
        drawn_C.clamp(min=2 * FLOOR_NATS),
        (probabilities_CV * drawn_CV.clamp(min=FLOOR_NATS)).sum(-1),
        probabilities_CV[:, stops].sum(-1),
        torch.isin(targets_C, stops),
        below_C,
        probabilities_CV.square().sum(-1),
    )


def _greedy_scores(logits_CV: Tensor, targets_C: Tensor, sampling: SamplingParams) -> tuple[Tensor, ...]:
    """Scores of greedy completions: the claimed number is the raw model's, and a token that is further below the
    likeliest than engines differ counts as impossible."""
    plain_CV = logits_CV.float().log_softmax(-1)
    plain_C = plain_CV.gather(-1, targets_C[:, None])[:, 0]
    drawn_C = torch.where(plain_CV.amax(-1) - plain_C > GREEDY_NATS, FLOOR_NATS, 0.0)
    stopped_C = torch.isin(targets_C, torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=targets_C.device))
    nothing_C = torch.zeros_like(plain_C)
    return plain_C, drawn_C, nothing_C, stopped_C.float(), stopped_C, nothing_C, torch.ones_like(plain_C)


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
