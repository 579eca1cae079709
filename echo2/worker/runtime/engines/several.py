"""Combines several engines into one: one per GPU, or per group of GPUs.

Implements `worker.engine.Engine`. Guarantees: a group (one `prefix_key`) stays on one engine while any of its sequences run there,
so prefixes are shared; a new group goes to the engine with the fewest sequences per slot; every token carries the version of the
engine that sampled it. A swap that fails on some engines raises, and the next one, of whole tensors, brings all engines to the same
version again; until then the fingerprint is -1, which no weights have. Leaves to others: the engines themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from echo2.base.errors import ConfigError, EngineError
from echo2.base.ids import Version
from echo2.base.rollout import FinishReason
from echo2.base.staged import StagedVersion
from echo2.scoring.request import ScoreRequest, TokenScores
from echo2.worker.engine import Engine, EngineStats, GenerateRequest, SwapMode, TokenChunk

NO_FINGERPRINT = -1


class SeveralEngines:
    """Starts the engines one after another: starting one may change the process's environment."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ConfigError("engines: expected at least one, got none")
        self._engines = tuple(engines)
        self._home: dict[str, int] = {}  # request id to engine number
        self._groups: dict[str, tuple[int, set[str]]] = {}  # prefix key to engine number and request ids
        self._group_of: dict[str, str] = {}
        self._held = [0] * len(engines)
        self._reading: dict[asyncio.Task[Sequence[TokenChunk]], int] = {}

    @property
    def version(self) -> Version | None:
        versions = {engine.version for engine in self._engines}
        return versions.pop() if len(versions) == 1 else None

    @property
    def slot_count(self) -> int:
        return sum(engine.slot_count for engine in self._engines)

    @property
    def draws_by_seed(self) -> bool:
        return all(engine.draws_by_seed for engine in self._engines)

    @property
    def scorable(self) -> frozenset[Version]:
        return frozenset.intersection(*(engine.scorable for engine in self._engines))

    async def start(self) -> None:
        for engine in self._engines:
            await engine.start()

    async def stop(self) -> None:
        ends = await asyncio.gather(*(engine.stop() for engine in self._engines), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    def submit(self, request: GenerateRequest) -> None:
        if request.request_id in self._home:
            raise EngineError(f"request {request.request_id}: expected a new id, got one in use")
        at, members = self._groups.get(request.prefix_key) or (self._idlest(), set())
        self._engines[at].submit(request)
        members.add(request.request_id)
        self._groups[request.prefix_key] = (at, members)
        self._group_of[request.request_id] = request.prefix_key
        self._home[request.request_id] = at
        self._held[at] += 1

    async def next_chunks(self) -> Sequence[TokenChunk]:
        for at, engine in enumerate(self._engines):
            if at not in self._reading.values():
                self._reading[asyncio.ensure_future(engine.next_chunks())] = at
        done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
        chunks: list[TokenChunk] = []
        for task in done:
            del self._reading[task]
            chunks += task.result()
        for chunk in chunks:
            if chunk.finish_reason is not FinishReason.UNFINISHED:
                self._forget(chunk.request_id)
        return chunks

    async def abort(self, request_id: str) -> None:
        at = self._home.get(request_id)
        if at is not None:
            await self._engines[at].abort(request_id)

    async def swap(self, staged: StagedVersion, mode: SwapMode) -> float:
        swaps = (engine.swap(staged, mode) for engine in self._engines)
        found = await asyncio.gather(*swaps, return_exceptions=True)
        errors = [(at, result) for at, result in enumerate(found) if isinstance(result, BaseException)]
        for at, error in errors:
            if not isinstance(error, EngineError):
                raise error
            raise EngineError(f"engine {at} of {len(self._engines)}: {error}") from error
        return max(result for result in found if isinstance(result, float))

    async def score(self, request: ScoreRequest) -> tuple[TokenScores, ...]:
        return await self._engines[self._idlest()].score(request)

    async def fingerprint(self, key: int) -> int:
        found = await asyncio.gather(*(engine.fingerprint(key) for engine in self._engines))
        return found[0] if len(set(found)) == 1 else NO_FINGERPRINT

    def stats(self) -> EngineStats:
        """Sums over the engines; for swaps, the maxima."""
        each = [engine.stats() for engine in self._engines]
        return EngineStats(
            running_sequences=sum(stats.running_sequences for stats in each),
            waiting_sequences=sum(stats.waiting_sequences for stats in each),
            sampled_tokens=sum(stats.sampled_tokens for stats in each),
            decode_s=sum(stats.decode_s for stats in each),
            prefill_s=sum(stats.prefill_s for stats in each),
            swap_s=max(stats.swap_s for stats in each),
            swap_count=max(stats.swap_count for stats in each),
            prompt_tokens=sum(stats.prompt_tokens for stats in each),
            shared_prompt_tokens=sum(stats.shared_prompt_tokens for stats in each),
            prefilled_tokens=sum(stats.prefilled_tokens for stats in each),
        )

    def _idlest(self) -> int:
        return min(range(len(self._engines)), key=lambda at: self._held[at] / self._engines[at].slot_count)

    def _forget(self, request_id: str) -> None:
        self._held[self._home.pop(request_id)] -= 1
        prefix_key = self._group_of.pop(request_id)
        _, members = self._groups[prefix_key]
        members.discard(request_id)
        if not members:
            del self._groups[prefix_key]
