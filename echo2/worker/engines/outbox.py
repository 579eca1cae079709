"""Passes tokens from an engine's thread to an asyncio loop.

Guarantees: keeps the order within a sequence, one version per chunk; waiting tokens of one sequence and version leave as one chunk;
`is_full` is set from `TOKENS_MAX` tokens on, and the producer checks it before the next step, so a slow consumer slows the engine
instead of filling memory. A sequence that has ended leaves at once and alone; growing ones leave every `linger_s`, so that tokens
of several steps travel together, but at once after a pause. The consumer wakes for these, for a failure, for the end and for a full
box; `on_taken` wakes the producer when a full box has been emptied.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from echo2.base.errors import EchoError, EngineError, LimitExceeded
from echo2.base.ids import Version
from echo2.base.rollout import NO_ROUTING, FinishReason, Routing
from echo2.worker.engines.engine import TokenChunk

TOKENS_MAX = 65_536  # some seconds of the fastest engine
SEQUENCES_MAX = 65_536  # far more than leases ever bring

LINGER_S = 0.25  # how often tokens of growing rollouts reach the leases; a rollout's end does so at once


class SampledToken(NamedTuple):
    """One token of one sequence; with `token_id` None only the notice that the sequence has ended."""

    request_id: str
    version: Version
    finish_reason: FinishReason
    token_id: int | None = None
    logprob: float = 0.0
    raw_logprob: float = 0.0
    routing: Routing = NO_ROUTING


class Outbox:
    """For one producer thread and one consumer task."""

    def __init__(self, linger_s: float = 0.0) -> None:
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._tokens: dict[str, list[SampledToken]] = {}  # that were not taken yet, by sequence
        self._open: set[str] = set()  # sequences whose last chunk was not taken yet
        self._ended: list[str] = []
        self._due = 0.0  # when growing sequences may leave, on the clock of the consumer's loop
        self._token_count = 0
        self._is_closed = False
        self._failure: EchoError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_taken: Callable[[], None] = lambda: None
        self._wake = asyncio.Event()
        self._is_waking = False
        self._is_urgent = False  # everything held should leave at once
        self._is_lingering = False

    def bind(self, loop: asyncio.AbstractEventLoop, on_taken: Callable[[], None]) -> None:
        """Sets the loop of the consumer, and the function to call when it has emptied a full box."""
        self._loop = loop
        self._on_taken = on_taken

    @property
    def is_full(self) -> bool:
        return self._token_count >= TOKENS_MAX

    def open(self, request_id: str) -> None:
        """A sequence begins; it is open until its last chunk has been taken. EngineError if it is open already, LimitExceeded
        if too many are."""
        if request_id in self._open:
            raise EngineError(f"request {request_id}: expected a new id, got one whose last chunk was not taken yet")
        if len(self._open) >= SEQUENCES_MAX:
            raise LimitExceeded(f"request {request_id}: the engine holds {SEQUENCES_MAX} requests already")
        self._open.add(request_id)

    def withdraw(self, request_id: str) -> None:
        """The sequence was opened, and the engine took none."""
        self._open.discard(request_id)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def put(self, tokens: list[SampledToken]) -> None:
        with self._lock:
            for token in tokens:
                self._tokens.setdefault(token.request_id, []).append(token)
                self._token_count += token.token_id is not None
                if token.finish_reason is not FinishReason.UNFINISHED:
                    self._ended.append(token.request_id)
            self._is_urgent = self._is_urgent or self.is_full
            self._notify()

    def close(self, failure: EchoError | None = None) -> None:
        """No more tokens will come. The held ones can still be taken; then `take` returns an empty list, or raises `failure`."""
        with self._lock:
            self._is_closed = True
            self._failure = self._failure or failure
            self._is_urgent = True
            self._notify()

    async def take(self) -> list[TokenChunk]:
        """Waits for chunks that may leave and returns them; an empty list once closed. EngineError after a failure."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                now, was_full = loop.time(), self.is_full
                chunks = self._leaving(now)
                if not chunks:
                    if self._is_closed:
                        break
                    self._wake.clear()
                    self._is_waking = False
                    self._is_lingering = now < self._due
            if chunks:
                if was_full:
                    self._on_taken()
                self._open -= {c.request_id for c in chunks if c.finish_reason is not FinishReason.UNFINISHED}
                return chunks
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._due if self._is_lingering else None):
                    await self._wake.wait()
        if self._failure is not None:
            raise EngineError(f"the engine stopped: {self._failure}") from self._failure
        return []

    def _leaving(self, now: float) -> list[TokenChunk]:
        leaving, self._ended = self._ended, []
        if self._tokens and (now >= self._due or self._is_urgent):
            leaving, self._due, self._is_urgent = list(self._tokens), now + self._linger_s, self._is_closed
        chunks = [chunk for name in leaving for chunk in _joined(name, self._tokens.pop(name, []))]
        self._token_count -= sum(len(chunk.token_ids) for chunk in chunks)
        return chunks

    def _notify(self) -> None:
        if self._loop is None or self._is_waking or (self._is_lingering and not self._is_urgent and not self._ended):
            return
        self._is_waking = True
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the consumer's loop is closed
            self._is_closed = True


def _joined(request_id: str, tokens: list[SampledToken]) -> list[TokenChunk]:
    chunks = []
    for version, run in itertools.groupby(tokens, key=attrgetter("version")):
        each = list(run)
        columns = list(zip(*(token for token in each if token.token_id is not None), strict=True))
        token_ids, logprobs, raw_logprobs, routings = columns[3:] or [()] * 4
        rows = b"".join(routing.tokens for routing in routings)
        prompt_rows = next((routing.prompt for routing in routings if routing.prompt), b"")
        routing, reason = Routing(prompt_rows, rows) if rows else NO_ROUTING, each[-1].finish_reason
        chunks.append(TokenChunk(request_id, token_ids, logprobs, raw_logprobs, version, reason, routing))
    return chunks
