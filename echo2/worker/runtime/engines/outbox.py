"""Tokens on their way from an engine's thread to an asyncio loop.

Guarantees: order per sequence, one version per chunk; tokens of one sequence that wait together leave as one chunk;
`is_full` from `tokens_max` tokens on, which the producer heeds before it steps again, so a slow consumer slows the
engine instead of filling memory. Leaves to others: who consumes. The consumer is woken by a sequence's end at once, by
tokens `linger_s` after the first of them (those of several steps then travel together), by a failure or the end; the
producer, when tokens were taken, by `on_taken`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from echo2.base.errors import EchoError, EngineError
from echo2.base.ids import Version
from echo2.base.rollout import FinishReason
from echo2.worker.engine import TokenChunk

TOKENS_MAX = 65_536


@dataclass(slots=True)
class _OpenChunk:
    version: Version
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.UNFINISHED


class SampledToken(NamedTuple):
    """One token of one sequence, or (`token_id` None) only the word that the sequence has ended."""

    request_id: str
    version: Version
    finish_reason: FinishReason
    token_id: int | None = None
    logprob: float = 0.0
    raw_logprob: float = 0.0


class Outbox:
    """One producer thread, one consumer task."""

    def __init__(self, tokens_max: int = TOKENS_MAX, linger_s: float = 0.0) -> None:
        self._tokens_max = tokens_max
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._chunks: dict[str, list[_OpenChunk]] = {}
        self._token_count = 0
        self._is_closed = False
        self._failure: EchoError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_taken: Callable[[], None] = lambda: None
        self._wake = asyncio.Event()
        self._is_waking = False
        self._is_urgent = False  # what is held should not linger
        self._is_lingering = False

    def bind(self, loop: asyncio.AbstractEventLoop, on_taken: Callable[[], None]) -> None:
        """Names the loop that consumes, and what to call when it has made room."""
        self._loop = loop
        self._on_taken = on_taken

    @property
    def is_full(self) -> bool:
        return self._token_count >= self._tokens_max

    def put(self, tokens: list[SampledToken]) -> None:
        """Called by the engine's thread."""
        with self._lock:
            self._add(tokens)
            self._is_urgent = self._is_urgent or self.is_full
            self._notify()

    def close(self, failure: EchoError | None = None) -> None:
        """No more tokens will come. What is held can still be taken; then `take` gives nothing, or raises `failure`."""
        with self._lock:
            self._is_closed = True
            self._failure = self._failure or failure
            self._is_urgent = True
            self._notify()

    async def take(self) -> list[TokenChunk]:
        """Everything held, once there is something; empty when closed."""
        has_lingered = self._linger_s == 0.0
        while True:
            with self._lock:
                if self._chunks and (has_lingered or self._is_urgent):
                    break
                if self._is_closed:
                    if self._failure is not None:
                        raise EngineError(f"the engine stopped: {self._failure}") from self._failure
                    return []
                self._wake.clear()
                self._is_waking = False
                self._is_lingering = bool(self._chunks)
                limit_s = self._linger_s if self._is_lingering else None
            try:
                async with asyncio.timeout(limit_s):
                    await self._wake.wait()
            except TimeoutError:
                has_lingered = True
        return self._take_all()

    def _take_all(self) -> list[TokenChunk]:
        with self._lock:
            was_full = self.is_full
            chunks = self._drain()
        if was_full:
            self._on_taken()
        return chunks

    def _add(self, tokens: list[SampledToken]) -> None:
        chunks = self._chunks
        for request_id, version, finish_reason, token_id, logprob, raw_logprob in tokens:
            held = chunks.get(request_id)
            if held is None:
                held = chunks[request_id] = [_OpenChunk(version)]
            elif held[-1].version != version:
                held.append(_OpenChunk(version))
            chunk = held[-1]
            if token_id is not None:
                chunk.token_ids.append(token_id)
                chunk.logprobs.append(logprob)
                chunk.raw_logprobs.append(raw_logprob)
                self._token_count += 1
            if finish_reason is not FinishReason.UNFINISHED:
                chunk.finish_reason = finish_reason
                self._is_urgent = True

    def _drain(self) -> list[TokenChunk]:
        chunks = [
            TokenChunk(
                request_id=request_id,
                token_ids=tuple(chunk.token_ids),
                logprobs=tuple(chunk.logprobs),
                raw_logprobs=tuple(chunk.raw_logprobs),
                version=chunk.version,
                finish_reason=chunk.finish_reason,
            )
            for request_id, held in self._chunks.items()
            for chunk in held
        ]
        self._chunks.clear()
        self._token_count = 0
        self._is_urgent = self._is_closed
        return chunks

    def _notify(self) -> None:
        if self._loop is None or self._is_waking or (self._is_lingering and not self._is_urgent):
            return
        self._is_waking = True
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the loop is closed: nobody is left to wake
            self._is_closed = True
