"""Remembers the caches of ended sequences, for prompts with the same prefix: the next turn of a chat, or a sibling.

Guarantees: each row is the cache of the tokens recorded for it, under the live weights; the least recently used row goes first.
Leaves to others: blocks (blocks.py), when to drop a row (slots.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

KEPT_PER_SLOT = 4
KEPT_ROWS_MAX = 512
"""Bounds the search, which looks at every row for each new prompt; the cache's blocks bound the memory."""
_GLANCE = 4


def kept_rows_for(slot_count: int) -> int:
    """How many ended sequences an engine with `slot_count` slots remembers, such as chats that wait for their tools."""
    return min(KEPT_ROWS_MAX, KEPT_PER_SLOT * slot_count)


def common_count(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`."""
    high = min(len(one), len(other), limit)
    if one[: min(_GLANCE, high)] != other[: min(_GLANCE, high)]:
        high = min(_GLANCE, high)
    low = 0
    while low < high:  # invariant: the first `low` are equal
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class KeptSequences:
    """Ended sequences by row, in order of last use. `rows`: the row numbers that it may use in the block table."""

    def __init__(self, rows: range) -> None:
        self._free = list(reversed(rows))
        self._tokens: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

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
