"""The slots of the embedded engine: which sequence decodes where, the cache blocks that hold its keys and values, and what is kept
of ended sequences for prompts with the same prefix. Pure.

Guarantees: a block that two slots share is written by neither (they share only whole blocks of filled positions); the lowest free
block is handed out first, so memory that was never needed is never touched; every block is free or has as many holders as table
entries name it. Caches of older weights are never shared: a new sequence attends to keys and values of the live weights only.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from echo2.base.errors import EngineError
from echo2.base.rollout import FinishReason
from echo2.worker.engines.engine import GenerateRequest

BLOCK_TOKENS = 32
"""Positions in one block. Attention runs over whole blocks, so this fits its vectors; on average a sequence wastes half a block."""


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """`tables[slot, n]` is the block of the positions from n * BLOCK_TOKENS on; only the first `counts[slot]` entries of a row
    are valid; `holders[block]` entries name a block. The table is int32 of shape (slot_count + kept_rows, blocks per sequence).
    `cache_tokens` bounds all slots together; 0: enough for every slot at full length. The last `kept_rows` rows hold the caches
    of ended sequences, out of the same blocks."""

    __slots__ = ("_free", "_unused", "block_count", "counts", "holders", "slot_count", "tables")

    def __init__(self, slot_count: int, context_tokens: int, cache_tokens: int = 0, kept_rows: int = 0) -> None:
        each = blocks_for(context_tokens)
        self.slot_count = slot_count
        self.block_count = min(slot_count * each, blocks_for(cache_tokens)) if cache_tokens else slot_count * each
        if self.block_count < each:
            raise EngineError(f"cache: expected room for one sequence of {context_tokens} tokens, got {cache_tokens}")
        self.tables = np.zeros((slot_count + kept_rows, each), np.int32)
        self.counts = [0] * (slot_count + kept_rows)
        self.holders = [0] * self.block_count
        self._free: list[int] = []
        self._unused = 0  # blocks from this number on were never handed out

    @property
    def free_count(self) -> int:
        return len(self._free) + self.block_count - self._unused

    def free_without(self, rows: Iterable[int]) -> int:
        """Blocks that would be free if only these rows held any."""
        held = set[int]().union(*(self.tables[row, : self.counts[row]].tolist() for row in rows))
        return self.block_count - len(held)

    def missing(self, slot: int, tokens: int) -> int:
        return max(0, blocks_for(tokens) - self.counts[slot])

    def reserve(self, slot: int, tokens: int) -> bool:
        """Gives the slot blocks for `tokens` positions; if too few are free, changes nothing and returns False."""
        missing = self.missing(slot, tokens)
        if missing > self.free_count:
            return False
        for _ in range(missing):
            if self._free:
                self._hold(slot, heapq.heappop(self._free))
            else:
                self._unused += 1
                self._hold(slot, self._unused - 1)
        return True

    def share(self, source: int, target: int, tokens: int) -> int:
        """Makes `target`, which holds nothing, share the whole blocks within `source`'s first `tokens` positions. Returns the
        number of positions shared; the caller copies the rest."""
        assert self.counts[target] == 0, "blocks are shared with a slot that holds none"
        whole = tokens // BLOCK_TOKENS
        for number in range(whole):
            self._hold(target, int(self.tables[source, number]))
        return whole * BLOCK_TOKENS

    def hand_over(self, source: int, target: int) -> None:
        """Moves all blocks of `source` to `target`, which holds nothing."""
        assert self.counts[target] == 0, "blocks are handed to a row that holds none"
        count = self.counts[source]
        self.tables[target, :count] = self.tables[source, :count]
        self.counts[target], self.counts[source] = count, 0

    def keep(self, slot: int, tokens: int) -> None:
        """Gives back the slot's blocks beyond its first `tokens` positions."""
        needed = blocks_for(tokens)
        while self.counts[slot] > needed:
            self.counts[slot] -= 1
            block = int(self.tables[slot, self.counts[slot]])
            self.holders[block] -= 1
            if not self.holders[block]:
                heapq.heappush(self._free, block)

    def _hold(self, slot: int, block: int) -> None:
        self.tables[slot, self.counts[slot]] = block
        self.counts[slot] += 1
        self.holders[block] += 1


KEPT_PER_SLOT = 4  # chats that wait for their tools, and prompts of which siblings may still come
KEPT_ROWS_MAX = 512
"""Bounds the search, which looks at every row for each new prompt; the cache's blocks bound the memory."""
_GLANCE = 4  # most pairs of prompts differ at once


def common_count(first: Sequence[int], other: Sequence[int], limit: int) -> int:
    high = min(len(first), len(other), limit)
    if first[: min(_GLANCE, high)] != other[: min(_GLANCE, high)]:
        high = min(_GLANCE, high)
    low = 0
    while low < high:  # invariant: the first `low` are equal
        middle = (low + high + 1) // 2
        if first[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class KeptSequences:
    """Ended sequences by row, in order of last use. `rows`: the row numbers that it may use in the block table."""

    def __init__(self, rows: range) -> None:
        self._free = list(reversed(rows))
        self._tokens: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    @property
    def has_row(self) -> bool:
        return bool(self._free)

    @property
    def oldest(self) -> int | None:
        return next(iter(self._tokens), None)

    def add(self, tokens: tuple[int, ...]) -> int:
        """Assigns a row to `tokens` and returns it; one must be free."""
        row = self._free.pop()
        self._tokens[row] = tokens
        return row

    def drop(self, row: int) -> None:
        del self._tokens[row]
        self._free.append(row)

    def beginnings_of(self, tokens: tuple[int, ...]) -> list[int]:
        """Rows whose tokens are a prefix of `tokens`, or equal to it."""
        return [row for row, held in self._tokens.items() if tokens[: len(held)] == held]

    def longest(self, tokens: tuple[int, ...], limit: int) -> tuple[int, int]:
        """The row with the longest common prefix with `tokens`, and that length, at most `limit`; (-1, 0) if there is none."""
        best, most = -1, 0
        for row, held in self._tokens.items():
            if most < limit and held[most : most + 1] == tokens[most : most + 1]:
                count = common_count(held, tokens, limit)
                best, most = (row, count) if count > most else (best, most)
        return best, most

    def used(self, row: int) -> None:
        self._tokens.move_to_end(row)


@dataclass(slots=True)
class SlotSequence:
    """A sequence in a slot. The first `cached` of its `tokens` (prompt + completion) have valid keys and values; the first
    position was computed by the weights of `epoch`."""

    request: GenerateRequest
    slot: int
    tokens: list[int]
    cached: int = 0
    sampled: int = 0
    epoch: int = 0

    @property
    def shareable(self) -> int:
        """Number of prompt positions that can be shared: all but the last, which every sequence feeds itself."""
        return len(self.request.prompt_token_ids) - 1

    @property
    def completion_count(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def is_decodable(self) -> bool:
        return self.cached == len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `count` rows of block `source` to block `target`."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Compute keys and values for positions `start` to `start + len(token_ids)` (exclusive) of a slot."""

    slot: int
    start: int
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class SlotTable:
    """The slots of one engine. Each change of weights starts a new epoch; caches of an older epoch are never shared."""

    slot_count: int
    context_tokens: int
    cache_tokens: int = 0  # cache size for all slots together, in tokens; 0: enough for every slot at full length
    epoch: int = 0
    is_holding: bool = False  # if set, admits nothing (a swap is waiting for running sequences to end)
    waiting: OrderedDict[str, GenerateRequest] = field(default_factory=OrderedDict)
    running: dict[int, SlotSequence] = field(default_factory=dict)
    prompt_tokens: int = 0  # shareable ones of admitted sequences
    shared_prompt_tokens: int = 0
    prefilled_tokens: int = 0
    _slot_of: dict[str, int] = field(default_factory=dict)
    _free: deque[int] = field(default_factory=deque)
    _kept: KeptSequences = field(init=False)
    blocks: BlockPool = field(init=False)

    def __post_init__(self) -> None:
        if self.slot_count < 1 or self.context_tokens < 2:
            raise EngineError(
                f"slots: expected at least 1 slot of at least 2 tokens, got {self.slot_count} of {self.context_tokens}"
            )
        self._free.extend(range(self.slot_count))
        kept_rows = min(KEPT_ROWS_MAX, KEPT_PER_SLOT * self.slot_count)
        self._kept = KeptSequences(range(self.slot_count, self.slot_count + kept_rows))
        self.blocks = BlockPool(self.slot_count, self.context_tokens, self.cache_tokens, kept_rows)

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request; the caller has already checked it against the model. EngineError if its id is in use."""
        if request.request_id in self.waiting or request.request_id in self._slot_of:
            raise EngineError(f"request {request.request_id}: expected a new id, got one in use")
        self.waiting[request.request_id] = request

    def admit(self) -> list[SlotSequence]:
        """Moves waiting requests into free slots, in order, while the cache has room; returns the new sequences."""
        seated = []
        while self.waiting and self._free and not self.is_holding:
            if not self._has_room_for(next(iter(self.waiting.values()))):
                break
            _, request = self.waiting.popitem(last=False)
            slot = self._free.popleft()
            sequence = SlotSequence(request, slot, [*request.prompt_token_ids, *request.token_ids])
            self.running[slot] = sequence
            self._slot_of[request.request_id] = slot
            self.prompt_tokens += sequence.shareable
            seated.append(sequence)
        return seated

    def next_copies(self) -> list[Copy]:
        """Shares cached prompt prefixes with new sequences; returns the partial blocks to copy for that. The caller must make the
        copies before it asks for fills."""
        copies: list[Copy] = []
        just_shared: set[int] = set()  # not yet sources: their rows are valid only once the copies are made
        for sequence in self.running.values():
            if sequence.cached >= sequence.shareable:
                continue
            source, count = self._holder(sequence, just_shared)
            if count > sequence.cached:
                copies += self._share(source, sequence, count)
                just_shared.add(sequence.slot)
        return copies

    def _share(self, source: int, sequence: SlotSequence, count: int) -> list[Copy]:
        """Both hold the whole blocks; the rest of the `count` positions is copied if a block for it is free."""
        slot, blocks, before = sequence.slot, self.blocks, sequence.cached
        blocks.keep(slot, 0)
        shared = blocks.share(source, slot, count)
        copies = []
        if shared < count and blocks.reserve(slot, count):
            last = blocks.counts[slot] - 1
            copies.append(Copy(int(blocks.tables[source, last]), int(blocks.tables[slot, last]), count - shared))
            shared = count
        sequence.epoch, sequence.cached = self.epoch, shared
        self.shared_prompt_tokens += max(0, shared - before)
        return copies

    def next_fills(self, budget_tokens: int) -> list[Fill]:
        """What to prefill now, at most `budget_tokens`. One sequence per prompt computes it; the others wait and share it."""
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
            if fills and len(sequence.tokens) - 1 - sequence.cached > budget_tokens:
                continue  # a prompt in two pieces costs more than one that waits: the second attends through a mask
            stop = min(len(sequence.tokens) - 1, sequence.cached + budget_tokens)
            if not self._make_room(sequence, stop):
                continue
            fills.append(Fill(sequence.slot, sequence.cached, tuple(sequence.tokens[sequence.cached : stop])))
            budget_tokens -= stop - sequence.cached
        return fills

    def filled(self, fills: Sequence[Fill]) -> None:
        for fill in fills:
            sequence = self.running[fill.slot]
            assert sequence.cached == fill.start, "a fill continues the valid part of the cache"
            if not fill.start:
                sequence.epoch = self.epoch
            sequence.cached = fill.start + len(fill.token_ids)
            self.prefilled_tokens += len(fill.token_ids)

    def decodable(self) -> list[SlotSequence]:
        """The sequences that the next decode step can extend; a cache position is reserved for each."""
        ready = [sequence for sequence in self.running.values() if sequence.is_decodable]
        reserved = [sequence for sequence in ready if self._make_room(sequence, len(sequence.tokens))]
        return [sequence for sequence in reserved if self.running.get(sequence.slot) is sequence]

    def extend(self, sequence: SlotSequence, token_id: int) -> FinishReason:
        """Records that a decode step fed the last token and sampled `token_id`; returns whether and why the sequence ends there."""
        if not sequence.cached:
            sequence.epoch = self.epoch
        sequence.cached = len(sequence.tokens)
        sequence.tokens.append(token_id)
        sequence.sampled += 1
        sampling = sequence.request.sampling
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._left(sequence) <= 0 else FinishReason.UNFINISHED

    def is_ending_within(self, step_count: int) -> bool:
        """Whether a sequence reaches its token budget or the end of the context within `step_count` decode steps (stop tokens are
        not considered)."""
        return any(self._left(sequence) <= step_count for sequence in self.running.values())

    def release(self, sequence: SlotSequence) -> None:
        """Frees the slot of a sequence that has ended. Its cache is kept for sharing as long as there is room."""
        slot, cached = sequence.slot, tuple(sequence.tokens[: sequence.cached])
        self._leave(sequence)
        if cached and sequence.epoch == self.epoch:
            for row in self._kept.beginnings_of(cached):
                self._drop_kept(row)
            if not self._kept.has_row:
                self._drop_oldest_kept()
            self.blocks.keep(slot, len(cached))
            self.blocks.hand_over(slot, self._kept.add(cached))
        self.blocks.keep(slot, 0)

    def _leave(self, sequence: SlotSequence) -> None:
        del self.running[sequence.slot]
        del self._slot_of[sequence.request.request_id]
        self._free.append(sequence.slot)

    def abort(self, request_id: str) -> bool:
        if request_id in self._slot_of:
            self.release(self.running[self._slot_of[request_id]])
            return True
        return self.waiting.pop(request_id, None) is not None

    def weights_changed(self, *, keep_kv: bool) -> None:
        """Records that new weights are live, and drops the caches kept from ended sequences. A cache of older weights serves at
        most its own sequence. So a new sequence never attends to keys and values of older weights. With `keep_kv`, sequences
        that are decoding keep their cache; all others are recomputed."""
        self.epoch += 1
        while self._drop_oldest_kept():
            pass
        for sequence in self.running.values():
            if not (keep_kv and sequence.sampled and sequence.is_decodable):
                sequence.cached = 0
                self.blocks.keep(sequence.slot, 0)  # gives up this slot's hold only: sharers keep the blocks

    def _left(self, sequence: SlotSequence) -> int:
        budget = sequence.request.sampling.max_new_tokens - sequence.completion_count
        return min(budget, self.context_tokens - len(sequence.tokens))

    def _has_room_for(self, request: GenerateRequest) -> bool:
        """Whether blocks suffice for the request's tokens and for what running sequences still lack. Drops kept caches, oldest
        first, until they suffice; the row that the request would share goes last. If dropping all would not do, drops none."""
        prompt = request.prompt_token_ids
        row, shared = self._kept.longest(prompt, len(prompt) - 1)
        if row >= 0:
            self._kept.used(row)
        needed = blocks_for(min(len(prompt) + len(request.token_ids) + 1, self.context_tokens)) - shared // BLOCK_TOKENS
        needed += sum(self.blocks.missing(slot, len(other.tokens)) for slot, other in self.running.items())
        if self.blocks.free_count < needed:
            sharing = [*self.running, row] if row >= 0 else self.running
            has_room = self.blocks.free_without(sharing) >= needed
            if not has_room and self.blocks.free_without(self.running) < needed + shared // BLOCK_TOKENS:
                return False
        while self.blocks.free_count < needed:
            if self._kept.oldest == row:
                needed += shared // BLOCK_TOKENS
            if not self._drop_oldest_kept():
                return False
        return True

    def _make_room(self, sequence: SlotSequence, tokens: int) -> bool:
        """Reserves blocks for `tokens` positions, dropping kept caches and then preempting the youngest sequences if needed.
        False if the sequence was itself preempted."""
        if self.running.get(sequence.slot) is not sequence:
            return False
        while not self.blocks.reserve(sequence.slot, tokens):
            if not self._drop_oldest_kept():
                youngest = next(reversed(self.running.values()))
                # Preempts a running sequence: it returns to the head of the queue with the tokens it has sampled.
                self._leave(youngest)
                self.blocks.keep(youngest.slot, 0)
                done = tuple(youngest.tokens[len(youngest.request.prompt_token_ids) :])
                self.waiting[youngest.request.request_id] = replace(youngest.request, token_ids=done)
                self.waiting.move_to_end(youngest.request.request_id, last=False)
                if youngest is sequence:
                    return False
        return True

    def _drop_oldest_kept(self) -> bool:
        row = self._kept.oldest
        if row is None:
            return False
        self._drop_kept(row)
        return True

    def _drop_kept(self, row: int) -> None:
        self._kept.drop(row)
        self.blocks.keep(row, 0)

    def _holder(self, sequence: SlotSequence, just_shared: set[int]) -> tuple[int, int]:
        """The slot or kept row that has the longest prefix of the prompt in the cache, and that prefix's length in tokens."""
        limit, prompt = sequence.shareable, sequence.tokens[: sequence.shareable]
        best, most = self._kept.longest(sequence.request.prompt_token_ids, limit)
        for slot, other in self.running.items():
            if most >= limit:
                break
            if other.epoch == self.epoch and other.cached >= other.shareable and slot not in just_shared:
                count = common_count(other.tokens, prompt, min(limit, other.cached))
                best, most = (slot, count) if count > most else (best, most)
        if best >= self.slot_count:
            self._kept.used(best)
        return best, most
