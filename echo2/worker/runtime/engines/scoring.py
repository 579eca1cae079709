"""Scores of given tokens by the embedded engine: its own forward, over a cache of one sequence beside that of generation.

Guarantees: the columns of `TokenScores` as the learner computes them, to the rounding of this engine's kernels; memory of one
sequence and of `rows_at_once` logits. Leaves to others: which weights are live meanwhile (past), when there is time for it
(loop).
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
"""Tokens of one forward pass."""


class ScoringPass:
    """Made when the first scoring is asked for; its cache's pages are those of the longest sequence so far."""

    def __init__(self, make_forward: Callable[[BlockPool], Forward], context_tokens: int) -> None:
        self._blocks = BlockPool(1, context_tokens)
        self._decoder = make_forward(self._blocks)
        self._vocab_count = self._decoder.vocab_count

    def scores(self, token_ids: tuple[int, ...], sampling: SamplingParams, stretch: Stretch) -> TokenScores:
        """Under the live weights. The last token is scored and not read."""
        parts = []
        self._blocks.reserve(0, stretch.stop)
        try:
            for begin in range(0, stretch.stop - 1, READ_TOKENS):
                run = token_ids[begin : min(begin + READ_TOKENS, stretch.stop - 1)]
                hidden_TD = self._decoder.read(Fill(0, begin, run))
                first = max(stretch.first - 1 - begin, 0)  # what comes behind the token at this place is asked for
                for rows_TD in torch.split(hidden_TD[first:], rows_at_once(self._vocab_count)):
                    if not len(rows_TD):
                        continue
                    targets = token_ids[begin + first + 1 : begin + first + 1 + len(rows_TD)]
                    parts.append(chunk_scores(self._decoder.logits(rows_TD), torch.tensor(targets), sampling))
                    first += len(rows_TD)
        finally:
            self._blocks.keep(0, 0)
        return joined(parts)
