"""The engine protocol: what the worker asks of an inference engine. Two real engines fit it, embedded and vLLM.

Guarantees asked of an implementation: every token carries the version whose weights sampled it; a swap takes effect
between two decode steps and is all or nothing; an aborted sequence gives back all of its tokens. Leaves to others:
which version to stage (broadcast/), what to generate (leases), when to swap (worker/swap).
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
    """What happens to the sequences in flight when new weights arrive. All of them keep their tokens."""

    KEEP_KV = "keep_kv"  # go on at once; the KV cache stays that of the old weights (fast, slightly off)
    RECOMPUTE_KV = "recompute_kv"  # prefill prompt + tokens again under the new weights (exact)
    FINISH_FIRST = "finish_first"  # admit nothing new, let running sequences end, then swap


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence. `token_ids` already generated (a continuation) are prefilled after the prompt, not sampled again.

    `sampling.max_new_tokens` counts from the prompt's end, the tokens handed in included. Sequences of one
    `prefix_key` share their prompt. `sampling.seed` is the seed of its random stream.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    prefix_key: str


def refuse_bad_request(request: GenerateRequest, context_tokens: int, vocab_count: int) -> None:
    """Raises EngineError, naming the request, unless a model with that context and vocabulary can go on with it."""
    whose = f"request {request.request_id}"
    tokens = (*request.prompt_token_ids, *request.token_ids)
    if not request.prompt_token_ids:
        raise EngineError(f"{whose}: expected a prompt of at least one token, got none")
    longest = len(request.prompt_token_ids) + request.sampling.max_new_tokens
    if longest > context_tokens:  # it would end before the length that it was asked for
        raise EngineError(f"{whose}: expected at most {context_tokens} tokens of context, got room for {longest} asked")
    if min(tokens) < 0 or max(tokens) >= vocab_count:
        raise EngineError(f"{whose}: expected tokens from 0 to {vocab_count - 1}, got others")
    is_ended = bool(request.token_ids) and request.token_ids[-1] in request.sampling.stop_token_ids
    if is_ended or len(request.token_ids) >= request.sampling.max_new_tokens:
        raise EngineError(f"{whose}: expected an unfinished completion, got one that has ended")


def refuse_bad_scoring(request: ScoreRequest, context_tokens: int, vocab_count: int) -> None:
    """Raises EngineError, naming the request, unless a model with that context and vocabulary can read it."""
    whose = f"scoring {request.request_id}"
    if len(request.token_ids) > context_tokens:
        raise EngineError(f"{whose}: expected at most {context_tokens} tokens, got {len(request.token_ids)}")
    if min(request.token_ids) < 0 or max(request.token_ids) >= vocab_count:
        raise EngineError(f"{whose}: expected tokens from 0 to {vocab_count - 1}, got others")


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one sequence since the last chunk, all of one version; `finish_reason` on the last. `routing` of an engine
    that records it: of the tokens, and of the prompt with a completion's first token."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    version: Version
    finish_reason: FinishReason
    routing: Routing = NO_ROUTING


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine's start; seconds, tokens and sequences. Of prompts: `prompt_tokens` that came, how many of them
    stood in the cache (`shared_prompt_tokens`), and `prefilled_tokens` of all kinds; 0 where an engine does not tell."""

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
    """An inference engine on an asyncio loop. Errors of any call: `EngineError`, naming the request or tensor."""

    @property
    def version(self) -> Version | None:
        """The version of the live weights; None before the first swap."""
        ...

    @property
    def slot_count(self) -> int:
        """How many sequences can decode at the same time."""
        ...

    @property
    def draws_by_seed(self) -> bool:
        """Whether each token is the one that the number of its place (base/noise) picks: the first whose cumulative
        probability, in the order of ids, is above it. Learners test it."""
        ...

    @property
    def scorable(self) -> frozenset[Version]:
        """Versions under which it scores tokens now: the live one, and those before it that it keeps; none: it does not score."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Ends the engine; running sequences are dropped. Never hangs for more than 10 s."""
        ...

    def submit(self, request: GenerateRequest) -> None:
        """Queues one sequence. Refuses an id in use, a prompt over the context, a token outside the vocabulary."""
        ...

    async def next_chunks(self) -> Sequence[TokenChunk]:
        """Waits for new tokens of any sequence, in the order sampled. Wakes on tokens; empty list once stopped."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stops one sequence: its last chunk (reason ABORTED) follows on `next_chunks`. Unknown ids are ignored."""
        ...

    async def swap(self, staged: StagedVersion, mode: SwapMode) -> float:
        """Puts a staged version live at a step boundary; returns the seconds that generation paused.

        A failure leaves the old version live and raises `EngineError`.
        """
        ...

    async def score(self, request: ScoreRequest) -> tuple[TokenScores, ...]:
        """The scores of each stretch, computed from the tokens alone. Generation may stand still meanwhile, and loses nothing.

        A version that is not kept any more raises `EngineError`.
        """
        ...

    async def fingerprint(self, key: int) -> int:
        """Keyed fingerprint (weights) of the live weights as HF-named raw bits."""
        ...

    def stats(self) -> EngineStats: ...
