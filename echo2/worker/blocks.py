"""Which blocks of the cache hold the keys and values of which slot's positions.

Guarantees: a block that two slots share is written by neither (they share whole blocks of positions that are filled
already); blocks are handed out from the lowest number on, so that memory that was never needed is never touched; every
block is free or has as many holders as tables name it. Leaves to others: when to give back (worker/slots), the cache
itself.
"""

from __future__ import annotations

import heapq

import numpy as np

from echo2.base.errors import EngineError

BLOCK_TOKENS = 32
"""Attention runs over whole blocks, so they are as long as its vectors like; half of one a sequence is spare."""


def blocks_for(tokens: int) -> int:
    """How many blocks hold so many positions."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """`tables[slot, n]` is the block of positions n * BLOCK_TOKENS on; only the first `count(slot)` of a row mean anything.

    `cache_tokens` bounds all slots together; 0: every slot at its full length. Behind the slots' rows stand `kept_rows` more, which
    hold what ended sequences leave, of the same blocks.
    """

    __slots__ = ("_counts", "_free", "_holders", "_unused", "block_count", "slot_count", "tables")

    def __init__(self, slot_count: int, context_tokens: int, cache_tokens: int = 0, kept_rows: int = 0) -> None:
        each = blocks_for(context_tokens)
        self.slot_count = slot_count
        self.block_count = min(slot_count * each, blocks_for(cache_tokens)) if cache_tokens else slot_count * each
        if self.block_count < each:
            raise EngineError(
                f"cache: expected room for one sequence of {context_tokens} tokens, got {cache_tokens} tokens in all"
            )
        self.tables = np.zeros((slot_count + kept_rows, each), np.int32)
        self._counts = [0] * (slot_count + kept_rows)
        self._holders = [0] * self.block_count
        self._free: list[int] = []
        self._unused = 0  # blocks from here on were never handed out

    @property
    def free_count(self) -> int:
        return len(self._free) + self.block_count - self._unused

    @property
    def touched_count(self) -> int:
        """Blocks that were ever in use at once, which is what the memory is."""
        return self._unused

    def count(self, slot: int) -> int:
        return self._counts[slot]

    def missing(self, slot: int, tokens: int) -> int:
        """How many more blocks the slot needs for so many positions."""
        return max(0, blocks_for(tokens) - self._counts[slot])

    def reserve(self, slot: int, tokens: int) -> bool:
        """Has the slot hold so many positions; False, and nothing done, where too few blocks are free."""
        missing = self.missing(slot, tokens)
        if missing > self.free_count:
            return False
        for _ in range(missing):
            self._hold(slot, self._take())
        return True

    def share(self, source: int, target: int, tokens: int) -> int:
        """Has `target`, which holds nothing, hold the whole blocks of `source`'s first positions; returns how many those
        are. The rest is to be copied."""
        assert self._counts[target] == 0, "blocks are shared with a slot that holds none"
        whole = tokens // BLOCK_TOKENS
        for number in range(whole):
            self._hold(target, int(self.tables[source, number]))
        return whole * BLOCK_TOKENS

    def hand_over(self, source: int, target: int) -> None:
        """What `source` holds is held by `target`, which held nothing, from now on."""
        assert self._counts[target] == 0, "blocks are handed to a row that holds none"
        count = self._counts[source]
        self.tables[target, :count] = self.tables[source, :count]
        self._counts[target], self._counts[source] = count, 0

    def keep(self, slot: int, tokens: int) -> None:
        """Gives back what the slot holds beyond so many positions."""
        kept = blocks_for(tokens)
        while self._counts[slot] > kept:
            self._counts[slot] -= 1
            block = int(self.tables[slot, self._counts[slot]])
            self._holders[block] -= 1
            if not self._holders[block]:
                heapq.heappush(self._free, block)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def _take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._unused += 1
        return self._unused - 1

    def _hold(self, slot: int, block: int) -> None:
        self.tables[slot, self._counts[slot]] = block
        self._counts[slot] += 1
        self._holders[block] += 1
