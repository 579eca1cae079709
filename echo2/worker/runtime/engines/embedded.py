"""The embedded engine: PyTorch on one CPU thread, for machines without vLLM. Implements `worker.engine.Engine`.

Guarantees: those of the protocol; weights arrive by `swap` only, so nothing is generated before the first version.
The asyncio side refuses bad requests at once; everything else happens in the thread of `StepLoop`. Leaves to others:
tokenisation, leases, which version to load.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from echo2.base.errors import ConfigError, EngineError, LimitExceeded
from echo2.base.ids import Version
from echo2.base.rollout import FinishReason
from echo2.base.staged import StagedVersion
from echo2.scoring.request import ScoreRequest, Stretch, TokenScores
from echo2.worker.engine import (
    EngineStats,
    GenerateRequest,
    SwapMode,
    TokenChunk,
    refuse_bad_request,
    refuse_bad_scoring,
)
from echo2.worker.runtime.engines.adapter import Adapter
from echo2.worker.runtime.engines.loop import LiveSwap, StepLoop
from echo2.worker.runtime.engines.outbox import Outbox
from echo2.worker.runtime.engines.rounded_weights import RoundedWeights
from echo2.worker.runtime.engines.shape import read_shape
from echo2.worker.runtime.engines.weights import LiveWeights, Weights
from echo2.worker.slots import WAITING_MAX

STOP_TIMEOUT_S = 9.0


class EmbeddedEngine:
    """Continuous batching over a cache in blocks. `context_tokens` 0 takes the model's; `slowdown` 2 halves the speed.

    `cache_tokens`: what the cache holds of all sequences together; 0: every one at its full length. Its tokens leave through
    `outbox`. `is_rounded`: it generates by int8 weights and keeps bf16 masters, which is what is published and proven.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, object],
        *,
        slot_count: int = 32,
        context_tokens: int = 0,
        cache_tokens: int = 0,
        slowdown: float = 1.0,
        outbox: Outbox | None = None,
        adapter: Adapter | None = None,
        is_rounded: bool = False,
    ) -> None:
        shape = read_shape(config)
        context = context_tokens or shape.context_tokens
        if not 2 <= context <= shape.context_tokens:
            raise ConfigError(f"context_tokens: expected 2 to the model's {shape.context_tokens}, got {context}")
        if slowdown < 1.0:
            raise ConfigError(f"slowdown: expected 1 or more, got {slowdown}")
        self._shape = shape
        self._context_tokens = context
        self._slot_count = slot_count
        self._outbox = outbox or Outbox()
        if is_rounded and adapter is not None:
            raise ConfigError("quantisation: int8 is for whole weights, but the learner publishes an adapter alone")
        self._weights: Weights = RoundedWeights(shape) if is_rounded else LiveWeights(shape, adapter)
        self._loop = StepLoop(self._weights, slot_count, context, self._outbox, slowdown, cache_tokens)
        self._scores = adapter is None  # of an adapter, what is merged from it would have to be undone
        self._thread: threading.Thread | None = None
        self._ids_in_use: set[str] = set()
        self._swap_order = asyncio.Lock()

    @property
    def version(self) -> Version | None:
        return self._loop.version

    @property
    def slot_count(self) -> int:
        return self._slot_count

    @property
    def draws_by_seed(self) -> bool:
        return True

    async def start(self) -> None:
        if self._thread is not None:
            raise EngineError("the embedded engine was started before; make a new one")
        self._outbox.bind(asyncio.get_running_loop(), self._loop.notify)
        self._thread = threading.Thread(target=self._loop.run, name="echo2-engine", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(self._loop.call(lambda: None))

    async def stop(self) -> None:
        self._loop.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
            if self._thread.is_alive():
                raise EngineError(f"the step loop did not end within {STOP_TIMEOUT_S} s")
        self._outbox.close()

    def submit(self, request: GenerateRequest) -> None:
        self._check(request)
        self._loop.call(lambda: self._loop.submit(request))
        self._ids_in_use.add(request.request_id)

    async def next_chunks(self) -> Sequence[TokenChunk]:
        chunks = await self._outbox.take()
        for chunk in chunks:
            if chunk.finish_reason is not FinishReason.UNFINISHED:
                self._ids_in_use.discard(chunk.request_id)
        return chunks

    async def abort(self, request_id: str) -> None:
        if request_id in self._ids_in_use:
            await asyncio.wrap_future(self._loop.call(lambda: self._loop.abort(request_id)))

    async def swap(self, staged: StagedVersion, mode: SwapMode) -> float:
        async with self._swap_order:
            scatters = await asyncio.to_thread(self._weights.checked, staged)
            return await asyncio.wrap_future(self._loop.swap(LiveSwap(staged.version, staged.parent, scatters, mode)))

    @property
    def scorable(self) -> frozenset[Version]:
        return self._loop.scorable if self._scores else frozenset()

    async def score(self, request: ScoreRequest) -> tuple[TokenScores, ...]:
        refuse_bad_scoring(request, self._context_tokens, self._shape.vocab_count)
        # One stretch at a time, so that decode steps come between.
        return tuple([await self._score(request, stretch) for stretch in request.stretches])

    async def _score(self, request: ScoreRequest, stretch: Stretch) -> TokenScores:
        return await asyncio.wrap_future(self._loop.call(lambda: self._loop.score(request, stretch)))

    async def fingerprint(self, key: int) -> int:
        return await asyncio.wrap_future(self._loop.call(lambda: self._weights.fingerprint(key)))

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def _check(self, request: GenerateRequest) -> None:
        whose = f"request {request.request_id}"
        if request.request_id in self._ids_in_use:
            raise EngineError(f"{whose}: expected a new id, got one whose last chunk was not taken yet")
        if len(self._ids_in_use) >= WAITING_MAX:
            raise LimitExceeded(f"{whose}: the engine holds {WAITING_MAX} requests already")
        refuse_bad_request(request, self._context_tokens, self._shape.vocab_count)
