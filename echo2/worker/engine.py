"""The engine protocol: what the worker requires of an inference engine. Implemented by the embedded engine and by vLLM.

An implementation guarantees: every token carries the version whose weights sampled it; a swap takes effect between two decode
steps and is all or nothing; an aborted sequence returns all of its tokens. Leaves to others: which version to stage
(broadcast/), what to generate (leases), when to swap (worker/swap).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2.base.errors import EngineError
from echo2.base.ids import Version
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.base.routing import NO_ROUTING, Routing
from echo2.base.staged import StagedVersion
from echo2.scoring.request import ScoreRequest, TokenScores


class SwapMode(enum.Enum):
    """What happens to sequences in flight when new weights arrive. In every mode they keep their tokens."""

    KEEP_KV = "keep_kv"  # continue at once with the KV cache of the old weights (fast, slightly off)
    RECOMPUTE_KV = "recompute_kv"  # prefill prompt + tokens again under the new weights (exact)
    FINISH_FIRST = "finish_first"  # admit nothing new, let running sequences end, then swap


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence. `token_ids` already generated (a continuation) are prefilled after the prompt, not sampled again.

    `sampling.max_new_tokens` counts from the end of the prompt and includes `token_ids`. Sequences with the same `prefix_key`
    share their prompt. `sampling.seed` seeds the sequence's random stream.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    prefix_key: str


def refuse_bad_request(request: GenerateRequest, context_tokens: int, vocab_count: int) -> None:
    """Raises EngineError, naming the request, unless a model with that context and vocabulary can generate for it."""
    whose = f"request {request.request_id}"
    tokens = (*request.prompt_token_ids, *request.token_ids)
    if not request.prompt_token_ids:
        raise EngineError(f"{whose}: expected a prompt of at least one token, got none")
    longest = len(request.prompt_token_ids) + request.sampling.max_new_tokens
    if longest > context_tokens:  # it would end before the requested length
        raise EngineError(f"{whose}: expected at most {context_tokens} tokens of context, got room for {longest} asked")
    if min(tokens) < 0 or max(tokens) >= vocab_count:
        raise EngineError(f"{whose}: expected tokens from 0 to {vocab_count - 1}, got others")
    is_ended = bool(request.token_ids) and request.token_ids[-1] in request.sampling.stop_token_ids
    if is_ended or len(request.token_ids) >= request.sampling.max_new_tokens:
        raise EngineError(f"{whose}: expected an unfinished completion, got one that has ended")


def refuse_bad_scoring(request: ScoreRequest, context_tokens: int, vocab_count: int) -> None:
    """Raises EngineError, naming the request, unless a model with that context and vocabulary can score it."""
    whose = f"scoring {request.request_id}"
    if len(request.token_ids) > context_tokens:
        raise EngineError(f"{whose}: expected at most {context_tokens} tokens, got {len(request.token_ids)}")
    if min(request.token_ids) < 0 or max(request.token_ids) >= vocab_count:
        raise EngineError(f"{whose}: expected tokens from 0 to {vocab_count - 1}, got others")


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one sequence since its last chunk, all of one version; the last chunk carries the `finish_reason`.

    `routing`, from an engine that records it: of these tokens and, with a completion's first token, of the prompt.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    version: Version
    finish_reason: FinishReason
    routing: Routing = NO_ROUTING


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine's start, in seconds, tokens and sequences; `running_*` and `waiting_*` are current counts.

    `prompt_tokens`: submitted in prompts; `shared_prompt_tokens`: how many of them were found in the cache; `prefilled_tokens`:
    all tokens prefilled, completions included. Each is 0 if the engine does not report it.
    """

    running_sequences: int
    waiting_sequences: int
    sampled_tokens: int
    decode_s: float
    prefill_s: float
    swap_s: float
    swap_count: int
    prompt_tokens: int = 0
    shared_prompt_tokens: int = 0
    prefilled_tokens: int = 0


class Engine(Protocol):
    """An inference engine on an asyncio loop. Every call may raise `EngineError`, which names the request or tensor."""

    @property
    def version(self) -> Version | None:
        """The version of the live weights; None before the first swap."""
        ...

    @property
    def slot_count(self) -> int:
        """Number of sequences that can decode at the same time."""
        ...

    @property
    def draws_by_seed(self) -> bool:
        """Whether the random number of each position (base/noise) determines its token: the first token, in the order of ids,
        whose cumulative probability is above that number. Learners check this."""
        ...

    @property
    def scorable(self) -> frozenset[Version]:
        """Versions under which it can score tokens now: the live one and the earlier ones it keeps; empty: it does not score."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Stops the engine and drops running sequences. Returns within 10 s."""
        ...

    def submit(self, request: GenerateRequest) -> None:
        """Queues one sequence. Refuses an id in use, a length over the context, a token outside the vocabulary."""
        ...

    async def next_chunks(self) -> Sequence[TokenChunk]:
        """Waits for new tokens of any sequence and returns them in the order sampled; an empty list once stopped."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stops one sequence: `next_chunks` then returns its last chunk (reason ABORTED). Ignores unknown ids."""
        ...

    async def swap(self, staged: StagedVersion, mode: SwapMode) -> float:
        """Makes a staged version live between two decode steps; returns the seconds that generation paused.

        A failure leaves the old version live and raises `EngineError`.
        """
        ...

    async def score(self, request: ScoreRequest) -> tuple[TokenScores, ...]:
        """The scores of each stretch, computed from the tokens alone. Generation may pause meanwhile and loses nothing.

        Raises `EngineError` if it no longer keeps a requested version.
        """
        ...

    async def fingerprint(self, key: int) -> int:
        """Keyed fingerprint (echo2.weights) over the raw bits of the live weights under their Hugging Face names."""
        ...

    def stats(self) -> EngineStats: ...
