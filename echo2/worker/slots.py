"""Which sequence sits in which KV slot, what of its cache is valid, and what to compute next.

Guarantees: a slot holds at most one sequence; a sequence is decoded only when the cache holds all of its tokens but
the last (the decode step feeds the last one and samples the next, so prefill never samples); a prompt that another
slot already holds under the same weights is copied, not computed; admission is first come, first served. Leaves to
others: the cache itself and all arithmetic (worker/runtime/engines).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2.base.errors import EngineError, LimitExceeded
from echo2.base.rollout import FinishReason
from echo2.worker.engine import GenerateRequest

WAITING_MAX = 65_536


@dataclass(slots=True)
class SlotSequence:
    """A sequence in a slot. `cached` positions of its `tokens` (prompt + completion) have valid keys and values."""

    request: GenerateRequest
    slot: int
    tokens: list[int]
    cached: int = 0
    sampled: int = 0

    @property
    def shareable(self) -> int:
        """Positions that siblings can copy: the prompt without its last token, which every one feeds itself."""
        return len(self.request.prompt_token_ids) - 1

    @property
    def completion_count(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def is_decodable(self) -> bool:
        return self.cached == len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Copy:
    """Keys and values of the first `count` positions are to be copied from slot `source` to slot `target`."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Keys and values of positions `start` to `start + len(token_ids)` of a slot are to be computed."""

    slot: int
    start: int
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Resident:
    """A prompt whose keys and values a slot holds, also after its sequence has left; None: nothing to share."""

    prefix_key: str
    prompt_token_ids: tuple[int, ...]
    epoch: int


@dataclass(slots=True)
class SlotTable:
    """The book of slots of one engine. Weights have an epoch: caches of an older one are never shared."""

    slot_count: int
    context_tokens: int
    epoch: int = 0
    is_holding: bool = False
    """Admit nothing (a swap waits for running sequences to end)."""
    waiting: deque[GenerateRequest] = field(default_factory=deque)
    running: dict[int, SlotSequence] = field(default_factory=dict)
    _slot_of: dict[str, int] = field(default_factory=dict)
    _waiting_ids: set[str] = field(default_factory=set)
    _free: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _residents: dict[int, _Resident] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.slot_count < 1 or self.context_tokens < 2:
            raise EngineError(
                f"slots: expected at least 1 slot of at least 2 tokens, got {self.slot_count} of {self.context_tokens}"
            )
        self._free.update((slot, None) for slot in range(self.slot_count))

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request; it must already have been checked against the model."""
        if request.request_id in self._waiting_ids or request.request_id in self._slot_of:
            raise EngineError(f"request {request.request_id}: expected a new id, got one in use")
        if len(self.waiting) >= WAITING_MAX:
            raise LimitExceeded(f"request {request.request_id}: {WAITING_MAX} requests wait already")
        self.waiting.append(request)
        self._waiting_ids.add(request.request_id)

    def admit(self) -> list[SlotSequence]:
        """Seats waiting requests, in the longest free slot first, so that recent prompts stay to be shared."""
        seated = []
        while self.waiting and self._free and not self.is_holding:
            request = self.waiting.popleft()
            self._waiting_ids.discard(request.request_id)
            slot, _ = self._free.popitem(last=False)
            self._residents.pop(slot, None)
            sequence = SlotSequence(request, slot, [*request.prompt_token_ids, *request.token_ids])
            self.running[slot] = sequence
            self._slot_of[request.request_id] = slot
            seated.append(sequence)
        return seated

    def next_copies(self) -> list[Copy]:
        """Prompts to copy from slots that hold them. The caller must carry them out before it asks for fills."""
        copies = []
        for sequence in self.running.values():
            source = None if sequence.cached or not sequence.shareable else self._holder(sequence)
            if source is not None:
                copies.append(Copy(source, sequence.slot, sequence.shareable))
                self._cache(sequence, sequence.shareable)
        return copies

    def next_fills(self, budget_tokens: int) -> list[Fill]:
        """What to prefill now, at most `budget_tokens`. One sequence of a prefix leads; the others wait to copy it."""
        fills: list[Fill] = []
        leading: set[tuple[str, tuple[int, ...]]] = set()
        for sequence in self.running.values():
            if budget_tokens <= 0:
                break
            if sequence.is_decodable:
                continue
            if sequence.cached < sequence.shareable:
                prefix = (sequence.request.prefix_key, sequence.request.prompt_token_ids)
                if prefix in leading:
                    continue
                leading.add(prefix)
            stop = min(len(sequence.tokens) - 1, sequence.cached + budget_tokens)
            fills.append(Fill(sequence.slot, sequence.cached, tuple(sequence.tokens[sequence.cached : stop])))
            budget_tokens -= stop - sequence.cached
        return fills

    def filled(self, fills: Sequence[Fill]) -> None:
        """The caller has computed these."""
        for fill in fills:
            sequence = self.running[fill.slot]
            assert sequence.cached == fill.start, "a fill continues the valid part of the cache"
            self._cache(sequence, fill.start + len(fill.token_ids))

    def decodable(self) -> list[SlotSequence]:
        """The sequences that the next decode step can extend."""
        return [sequence for sequence in self.running.values() if sequence.is_decodable]

    def extend(self, sequence: SlotSequence, token_id: int) -> FinishReason:
        """A decode step fed the last token and sampled `token_id`. Says whether the sequence ends with it."""
        self._cache(sequence, len(sequence.tokens))
        sequence.tokens.append(token_id)
        sequence.sampled += 1
        sampling = sequence.request.sampling
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._left(sequence) <= 0 else FinishReason.UNFINISHED

    def is_ending_within(self, step_count: int) -> bool:
        """Whether a sequence reaches its budget or the context's end in so many decode steps; stop tokens apart."""
        return any(self._left(sequence) <= step_count for sequence in self.running.values())

    def release(self, sequence: SlotSequence) -> None:
        """Frees the slot of a sequence that has ended."""
        del self.running[sequence.slot]
        del self._slot_of[sequence.request.request_id]
        self._free[sequence.slot] = None

    def find(self, request_id: str) -> SlotSequence | GenerateRequest | None:
        """Where a request is: in a slot, in the queue, or nowhere."""
        if request_id in self._slot_of:
            return self.running[self._slot_of[request_id]]
        if request_id in self._waiting_ids:
            return next(request for request in self.waiting if request.request_id == request_id)
        return None

    def forget_waiting(self, request: GenerateRequest) -> None:
        """Takes a request out of the queue."""
        self.waiting.remove(request)
        self._waiting_ids.discard(request.request_id)

    def weights_changed(self, *, keep_kv: bool) -> None:
        """New weights are live. Kept caches belong to older weights: they serve their own sequences only."""
        self.epoch += 1
        self._residents.clear()
        for sequence in self.running.values():
            if not (keep_kv and sequence.sampled and sequence.is_decodable):
                sequence.cached = 0

    def _left(self, sequence: SlotSequence) -> int:
        """Tokens until the sequence ends by its length."""
        budget = sequence.request.sampling.max_new_tokens - sequence.completion_count
        return min(budget, self.context_tokens - len(sequence.tokens))

    def _cache(self, sequence: SlotSequence, count: int) -> None:
        becomes_shareable = sequence.cached < sequence.shareable <= count
        sequence.cached = count
        if becomes_shareable:
            request = sequence.request
            self._residents[sequence.slot] = _Resident(request.prefix_key, request.prompt_token_ids, self.epoch)

    def _holder(self, sequence: SlotSequence) -> int | None:
        request = sequence.request
        for slot, resident in self._residents.items():
            if (
                resident.prefix_key == request.prefix_key
                and resident.prompt_token_ids == request.prompt_token_ids
                and resident.epoch == self.epoch
                and slot != sequence.slot
            ):
                return slot
        return None
