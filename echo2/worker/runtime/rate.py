"""Measures how fast this machine generates, once the first weights are live and before the first lease.

Guarantees: takes about `PROBE_S_MAX` at most from the first token on, and `FIRST_TOKEN_S_MAX` before it (vLLM warms up on its
first requests); the probe's tokens are dropped; requests that the engine refuses are not measured. Leaves to others: declaring
the rate (telemetry, heartbeats). Polls for tokens every `LOOK_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from echo2.base.errors import EngineError, LimitExceeded
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.outside import monotonic
from echo2.worker.engine import Engine, GenerateRequest, TokenChunk

PROBE_S_MAX = 1.0
FIRST_TOKEN_S_MAX = 20.0
LOOK_S = 0.02
PROMPT_TOKENS = 8
TOKENS_EACH = 12
_LEASE = "rate probe"


class RateProbe:
    """One measurement with all slots busy."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: set[str] = set()

    async def run(self) -> float:
        """Tokens per second, without the wait for the first ones; 0 if nothing could be measured."""
        engine = self._engine
        began, before = monotonic(), engine.stats().sampled_tokens
        try:
            for index in range(engine.slot_count):
                self._submit(f"{_LEASE}/{index}", index)
        except (EngineError, LimitExceeded):
            pass  # context or vocabulary too small for the probe: measure the requests that were accepted
        wanted = before + TOKENS_EACH * len(self._open)
        first_at, first = began, before  # when the first tokens were seen, and how many tokens there were then
        while self._open and (tokens := engine.stats().sampled_tokens) < wanted:
            if first == before and tokens > before:
                first_at, first = monotonic(), tokens
            until = began + FIRST_TOKEN_S_MAX if first == before else first_at + PROBE_S_MAX
            if monotonic() >= until:
                break
            await asyncio.sleep(LOOK_S)
        now, tokens = monotonic(), engine.stats().sampled_tokens
        for request_id in list(self._open):
            await engine.abort(request_id)
        if first > before and tokens > first:
            return (tokens - first) / (now - first_at)
        return (tokens - before) / max(now - began, 1e-9)  # all came at once

    def without_probe(self, chunks: Sequence[TokenChunk]) -> Sequence[TokenChunk]:
        """The chunks without the probe's."""
        if not self._open:
            return chunks
        others = []
        for chunk in chunks:
            if chunk.request_id not in self._open:
                others.append(chunk)
            elif chunk.finish_reason is not FinishReason.UNFINISHED:
                self._open.discard(chunk.request_id)
        return others

    def _submit(self, request_id: str, seed: int) -> None:
        sampling = SamplingParams(max_new_tokens=TOKENS_EACH, seed=seed)
        self._engine.submit(GenerateRequest(request_id, (0,) * PROMPT_TOKENS, (), sampling, _LEASE))
        self._open.add(request_id)
