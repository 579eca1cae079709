"""Maps each slot's positions to the cache blocks that hold their keys and values.

Guarantees: a block that two slots share is written by neither (they share only whole blocks of filled positions); the lowest free
block is handed out first, so memory that was never needed is never touched; every block is free or has as many holders as table
entries name it. Leaves to others: when to give blocks back (worker/slots), the cache itself.
"""

from __future__ import annotations

import heapq

import numpy as np

from echo2.base.errors import EngineError

BLOCK_TOKENS = 32
"""Positions in one block. Attention runs over whole blocks, so this fits its vectors; on average a sequence wastes half a block."""


def blocks_for(tokens: int) -> int:
    """Number of blocks needed for `tokens` positions."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """`tables[slot, n]` is the block of the positions from n * BLOCK_TOKENS on; only the first `count(slot)` entries of a row are
    valid. The table is int32 of shape (slot_count + kept_rows, blocks per sequence).

    `cache_tokens` bounds all slots together; 0: enough for every slot at full length. The last `kept_rows` rows hold the caches of
    ended sequences, out of the same blocks.
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
        self._unused = 0  # blocks from this number on were never handed out

    @property
    def free_count(self) -> int:
        return len(self._free) + self.block_count - self._unused

    @property
    def touched_count(self) -> int:
        """Most blocks ever in use at once: the memory actually touched."""
        return self._unused

    def count(self, slot: int) -> int:
        return self._counts[slot]

    def missing(self, slot: int, tokens: int) -> int:
        """How many more blocks the slot needs for `tokens` positions."""
        return max(0, blocks_for(tokens) - self._counts[slot])

    def reserve(self, slot: int, tokens: int) -> bool:
        """Gives the slot blocks for `tokens` positions; if too few are free, changes nothing and returns False."""
        missing = self.missing(slot, tokens)
        if missing > self.free_count:
            return False
        for _ in range(missing):
            self._hold(slot, self._take())
        return True

    def share(self, source: int, target: int, tokens: int) -> int:
        """Makes `target`, which holds nothing, share the whole blocks within `source`'s first `tokens` positions.

        Returns the number of positions shared; the caller copies the rest.
        """
        assert self._counts[target] == 0, "blocks are shared with a slot that holds none"
        whole = tokens // BLOCK_TOKENS
        for number in range(whole):
            self._hold(target, int(self.tables[source, number]))
        return whole * BLOCK_TOKENS

    def hand_over(self, source: int, target: int) -> None:
        """Moves all blocks of `source` to `target`, which holds nothing."""
        assert self._counts[target] == 0, "blocks are handed to a row that holds none"
        count = self._counts[source]
        self.tables[target, :count] = self.tables[source, :count]
        self._counts[target], self._counts[source] = count, 0

    def keep(self, slot: int, tokens: int) -> None:
        """Gives back the slot's blocks beyond its first `tokens` positions."""
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
