"""Which sequence sits in which KV slot, what of its cache is valid, and what to compute next.

Guarantees: a slot holds at most one sequence; a sequence is decoded only when the cache holds all of its tokens but
the last (the decode step feeds the last one and samples the next, so prefill never samples); a prompt that another
slot already holds under the same weights is shared, not computed; admission is first come, first served. Where blocks of
the cache run out, prompts whose sequences have left go first, then the youngest sequence waits and is computed again
later; the oldest always gets on. Leaves to others: the cache itself and all arithmetic (worker/runtime/engines).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from echo2.base.errors import EngineError, LimitExceeded
from echo2.base.rollout import FinishReason
from echo2.worker.blocks import BlockPool, blocks_for
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
    """The first `count` rows of block `source` are to be copied to block `target`."""

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
    cache_tokens: int = 0
    """Of all slots together; 0: every one at its full length."""
    epoch: int = 0
    is_holding: bool = False
    """Admit nothing (a swap waits for running sequences to end)."""
    waiting: deque[GenerateRequest] = field(default_factory=deque)
    running: dict[int, SlotSequence] = field(default_factory=dict)
    _slot_of: dict[str, int] = field(default_factory=dict)
    _waiting_ids: set[str] = field(default_factory=set)
    _free: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _residents: dict[int, _Resident] = field(default_factory=dict)
    blocks: BlockPool = field(init=False)

    def __post_init__(self) -> None:
        if self.slot_count < 1 or self.context_tokens < 2:
            raise EngineError(
                f"slots: expected at least 1 slot of at least 2 tokens, got {self.slot_count} of {self.context_tokens}"
            )
        self._free.update((slot, None) for slot in range(self.slot_count))
        self.blocks = BlockPool(self.slot_count, self.context_tokens, self.cache_tokens)

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
        while self.waiting and self._free and not self.is_holding and self._has_room_for(self.waiting[0]):
            request = self.waiting.popleft()
            self._waiting_ids.discard(request.request_id)
            slot, _ = self._free.popitem(last=False)
            self._forget_resident(slot)
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
                copies += self._share(source, sequence)
        return copies

    def _share(self, source: int, sequence: SlotSequence) -> list[Copy]:
        """Whole blocks are held by both; what is left of the prompt is copied, if a block for it is free."""
        slot, count, blocks = sequence.slot, sequence.shareable, self.blocks
        blocks.keep(slot, 0)
        shared = blocks.share(source, slot, count)
        copies = []
        if shared < count and blocks.reserve(slot, count):
            last = blocks.count(slot) - 1
            copies.append(Copy(int(blocks.tables[source, last]), int(blocks.tables[slot, last]), count - shared))
            shared = count
        self._cache(sequence, shared)
        return copies

    def next_fills(self, budget_tokens: int) -> list[Fill]:
        """What to prefill now, at most `budget_tokens`. One sequence of a prefix leads; the others wait to copy it."""
        fills: list[Fill] = []
        leading: set[tuple[str, tuple[int, ...]]] = set()
        for sequence in list(self.running.values()):
            if budget_tokens <= 0:
                break
            if sequence.is_decodable or sequence.slot not in self.running:
                continue
            if sequence.cached < sequence.shareable:
                prefix = (sequence.request.prefix_key, sequence.request.prompt_token_ids)
                if prefix in leading:
                    continue
                leading.add(prefix)
            stop = min(len(sequence.tokens) - 1, sequence.cached + budget_tokens)
            if not self._make_room(sequence, stop):
                continue
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
        """The sequences that the next decode step can extend, with a place for what it caches."""
        ready = [sequence for sequence in self.running.values() if sequence.is_decodable]
        reserved = [sequence for sequence in ready if self._make_room(sequence, len(sequence.tokens))]
        return [sequence for sequence in reserved if self.running.get(sequence.slot) is sequence]

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
        """Frees the slot of a sequence that has ended. Its prompt stays to be shared, as long as there is room."""
        del self.running[sequence.slot]
        del self._slot_of[sequence.request.request_id]
        self._free[sequence.slot] = None
        is_resident = sequence.slot in self._residents
        self.blocks.keep(sequence.slot, sequence.shareable if is_resident else 0)

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
        for slot in self._free:
            self.blocks.keep(slot, 0)
        for sequence in self.running.values():
            if not (keep_kv and sequence.sampled and sequence.is_decodable):
                sequence.cached = 0
                self.blocks.keep(sequence.slot, 0)  # others may go on with what they share

    def _left(self, sequence: SlotSequence) -> int:
        """Tokens until the sequence ends by its length."""
        budget = sequence.request.sampling.max_new_tokens - sequence.completion_count
        return min(budget, self.context_tokens - len(sequence.tokens))

    def _has_room_for(self, request: GenerateRequest) -> bool:
        """Room for all that the request has and that those seated still lack, counting prompts that may be forgotten."""
        needed = blocks_for(min(len(request.prompt_token_ids) + len(request.token_ids) + 1, self.context_tokens))
        needed += sum(self.blocks.missing(slot, len(other.tokens)) for slot, other in self.running.items())
        while self.blocks.free_count < needed:
            if not self._forget_oldest_resident():
                return False
        return True

    def _make_room(self, sequence: SlotSequence, tokens: int) -> bool:
        """Has the sequence hold so many positions; False where it must wait for that itself."""
        if self.running.get(sequence.slot) is not sequence:
            return False
        while not self.blocks.reserve(sequence.slot, tokens):
            if not self._forget_oldest_resident():
                youngest = next(reversed(self.running.values()))
                self._put_back(youngest)
                if youngest is sequence:
                    return False
        return True

    def _put_back(self, sequence: SlotSequence) -> None:
        """To the head of the queue, with what it has sampled."""
        self._residents.pop(sequence.slot, None)
        self.release(sequence)
        done = tuple(sequence.tokens[len(sequence.request.prompt_token_ids) :])
        request = replace(sequence.request, token_ids=done)
        self.waiting.appendleft(request)
        self._waiting_ids.add(request.request_id)

    def _forget_oldest_resident(self) -> bool:
        """Frees the blocks of the prompt that has waited longest without a sequence; False where there is none."""
        slot = next((slot for slot in self._free if self.blocks.count(slot)), None)
        if slot is None:
            return False
        self._forget_resident(slot)
        return True

    def _forget_resident(self, slot: int) -> None:
        self._residents.pop(slot, None)
        self.blocks.keep(slot, 0)

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
