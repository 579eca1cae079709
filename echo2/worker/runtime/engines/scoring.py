"""Scores given tokens with the embedded engine's forward pass, over a separate cache for one sequence.

Guarantees: the columns of `TokenScores` as the learner computes them, to the rounding of this engine's kernels; uses memory for one
sequence and `rows_at_once` rows of logits. Leaves to others: which weights are live meanwhile (past), when to score (loop).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from echo2.base.rollout import SamplingParams
from echo2.scoring.columns import chunk_scores, joined, rows_at_once
from echo2.scoring.request import Stretch, TokenScores
from echo2.worker.blocks import BlockPool
from echo2.worker.runtime.engines.forwarding import Forward
from echo2.worker.slots import Fill

READ_TOKENS = 1_024
"""Most tokens in one forward pass."""


class ScoringPass:
    """Made for the first scoring request; its cache occupies memory for the longest sequence scored so far."""

    def __init__(self, make_forward: Callable[[BlockPool], Forward], context_tokens: int) -> None:
        self._blocks = BlockPool(1, context_tokens)
        self._decoder = make_forward(self._blocks)
        self._vocab_count = self._decoder.vocab_count

    def scores(self, token_ids: tuple[int, ...], sampling: SamplingParams, stretch: Stretch) -> TokenScores:
        """Scores a stretch under the live weights. The last token is scored but not fed."""
        parts = []
        self._blocks.reserve(0, stretch.stop)
        try:
            for begin in range(0, stretch.stop - 1, READ_TOKENS):
                run = token_ids[begin : min(begin + READ_TOKENS, stretch.stop - 1)]
                hidden_TD = self._decoder.read(Fill(0, begin, run))
                first = max(stretch.first - 1 - begin, 0)  # each row scores the token after it
                for rows_TD in torch.split(hidden_TD[first:], rows_at_once(self._vocab_count)):
                    if not len(rows_TD):
                        continue
                    targets = token_ids[begin + first + 1 : begin + first + 1 + len(rows_TD)]
                    parts.append(chunk_scores(self._decoder.logits(rows_TD), torch.tensor(targets), sampling))
                    first += len(rows_TD)
        finally:
            self._blocks.keep(0, 0)
        return joined(parts)
