"""The engine protocol: what the worker requires of an inference engine, and the check of a version before it touches a weight.

An implementation guarantees: every token carries the version whose weights sampled it; a swap takes effect between two decode steps
and is all or nothing; an aborted sequence returns all of its tokens. A version that passes the check has only known names, the
model's shapes, the dtypes published before, and ascending positions within each tensor; each name occurs once or, for a large
tensor of a delta, in several parts with ascending positions; a keyframe is complete.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from echo2.base.errors import EngineError
from echo2.base.ids import Version
from echo2.base.rollout import NO_ROUTING, FinishReason, Routing, SamplingParams
from echo2.base.staged import StagedVersion, TensorUpdate


class SwapMode(enum.Enum):
    """What happens to sequences in flight when new weights arrive. In every mode they keep their tokens."""

    KEEP_KV = "keep_kv"  # continue at once with the KV cache of the old weights (fast, slightly off)
    RECOMPUTE_KV = "recompute_kv"  # prefill prompt + tokens again under the new weights (exact)
    FINISH_FIRST = "finish_first"  # admit nothing new, let running sequences end, then swap


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence. `token_ids` already generated (a continuation) are prefilled after the prompt, not sampled again.
    `sampling.max_new_tokens` counts from the end of the prompt and includes `token_ids`. Sequences with the same `prefix_key`
    share their prompt. `sampling.seed` seeds the sequence's random stream."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    prefix_key: str


def refuse_bad_request(request: GenerateRequest, context_tokens: int, vocab_count: int) -> None:
    """Raises EngineError, naming the request, unless a model with that context and vocabulary can generate for it."""
    where = f"request {request.request_id}"
    tokens = (*request.prompt_token_ids, *request.token_ids)
    if not request.prompt_token_ids:
        raise EngineError(f"{where}: expected a prompt of at least one token, got none")
    longest = len(request.prompt_token_ids) + request.sampling.max_new_tokens
    if longest > context_tokens:  # it would end before the requested length
        raise EngineError(f"{where}: expected at most {context_tokens} tokens of context, got room for {longest} asked")
    if min(tokens) < 0 or max(tokens) >= vocab_count:
        raise EngineError(f"{where}: expected tokens from 0 to {vocab_count - 1}, got others")
    is_ended = bool(request.token_ids) and request.token_ids[-1] in request.sampling.stop_token_ids
    if is_ended or len(request.token_ids) >= request.sampling.max_new_tokens:
        raise EngineError(f"{where}: expected an unfinished completion, got one that has ended")


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one sequence since its last chunk, all of one version; the last chunk carries the `finish_reason`.
    `routing`, from an engine that records it: of these tokens and, with a completion's first token, of the prompt."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    version: Version
    finish_reason: FinishReason
    routing: Routing = NO_ROUTING


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine's start, in tokens and sequences; `running_*` and `waiting_*` are current counts.
    `prompt_tokens`: submitted in prompts; `shared_prompt_tokens`: how many of them were found in the cache; `prefilled_tokens`:
    all tokens prefilled, completions included. Each is 0 if the engine does not report it."""

    running_sequences: int = 0
    waiting_sequences: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    shared_prompt_tokens: int = 0
    prefilled_tokens: int = 0


class Engine(Protocol):
    """An inference engine on an asyncio loop. Every call may raise `EngineError`, which names the request or tensor."""

    @property
    def version(self) -> Version | None: ...

    @property
    def slot_count(self) -> int: ...

    @property
    def draws_by_seed(self) -> bool:
        """Whether the random number of each position (base/rng) determines its token: the first token, in the order of ids,
        whose cumulative probability is above that number. Learners check this."""
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
        """Makes a staged version live between two decode steps; returns the seconds that generation paused. A failure leaves
        the old version live and raises `EngineError`."""
        ...

    async def fingerprint(self, key: int) -> int:
        """Keyed fingerprint (echo2.weights) over the raw bits of the live weights under their Hugging Face names."""
        ...

    def stats(self) -> EngineStats: ...


BITS_DTYPES = {"bfloat16": np.dtype(np.uint16), "float32": np.dtype(np.uint32)}


@dataclass(slots=True)
class UpdateCheck:
    """Checks against the live tensors: their `shapes`, and their `dtypes` as published (empty before the first keyframe)."""

    model_type: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: dict[str, str] = field(default_factory=dict)

    def checked(self, staged: StagedVersion) -> Iterator[TensorUpdate]:
        """Yields the updates of a version, each after its check. EngineError names the first wrong update or, at the end, a missing
        tensor."""
        reached: dict[str, int] = {}  # the last position seen of each tensor
        for update in staged.updates():
            self._check(update, staged)
            first, last = _reach(update)
            if first <= reached.get(update.name, -1):
                raise EngineError(f"version {staged.version}: tensor {update.name} comes twice")
            reached[update.name] = last
            yield update
        missing = self.shapes.keys() - reached.keys()
        if staged.parent is None and missing:
            raise EngineError(
                f"version {staged.version}: a keyframe holds every tensor, got none for {min(missing)} "
                f"({len(missing)} missing of {len(self.shapes)})"
            )

    def applied(self, updates: Iterable[TensorUpdate]) -> None:
        self.dtypes.update((update.name, update.dtype) for update in updates)

    def _check(self, update: TensorUpdate, staged: StagedVersion) -> None:
        where = f"version {staged.version}, tensor {update.name}"
        shape = self.shapes.get(update.name)
        if shape is None:
            raise EngineError(f"{where}: expected a tensor of this {self.model_type} model, got an unknown name")
        if tuple(update.shape) != shape:
            raise EngineError(f"{where}: expected shape {shape}, got {tuple(update.shape)}")
        known = update.dtype if staged.parent is None else self.dtypes.get(update.name)
        if update.dtype not in BITS_DTYPES or update.dtype != known:
            expected = " or ".join(BITS_DTYPES) if known in (None, update.dtype) else known
            raise EngineError(f"{where}: expected dtype {expected}, got {update.dtype}")
        if update.bits.dtype != BITS_DTYPES[update.dtype] or update.bits.ndim != 1:
            raise EngineError(f"{where}: expected 1-D {BITS_DTYPES[update.dtype]} bits, got {update.bits.dtype}")
        _check_positions(update, int(np.prod(shape, dtype=np.int64)), staged.parent is None, where)


def _reach(update: TensorUpdate) -> tuple[int, int]:
    """First and last position that an update touches; 0 and 0 if it touches none."""
    if update.indices is None or not len(update.indices):
        return 0, max(0, math.prod(update.shape) - 1 if update.indices is None else 0)
    return int(update.indices[0]), int(update.indices[-1])


def _check_positions(update: TensorUpdate, element_count: int, is_keyframe: bool, where: str) -> None:
    indices = update.indices
    count = element_count if indices is None else len(indices)
    if len(update.bits) != count:
        raise EngineError(f"{where}: expected {count} values, got {len(update.bits)}")
    if indices is None:
        return
    if is_keyframe:
        raise EngineError(f"{where}: a keyframe holds whole tensors, got {count} positions")
    if indices.dtype != np.int64 or indices.ndim != 1:
        raise EngineError(f"{where}: expected 1-D int64 positions, got {indices.ndim}-D {indices.dtype}")
    if count and (indices[0] < 0 or indices[-1] >= element_count or bool(np.any(indices[1:] <= indices[:-1]))):
        raise EngineError(f"{where}: expected rising positions from 0 to {element_count - 1}, got others")
