"""What sequences that have ended leave in the cache, for prompts that begin as they did: the next turn of a chat, a sibling.

Guarantees: each row is the cache of the tokens noted with it, under the live weights; the row that nothing used for longest goes
first. Leaves to others: blocks (blocks.py), when one must go (slots.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

KEPT_PER_SLOT = 4
KEPT_ROWS_MAX = 512
"""Each takes a look when a prompt comes; blocks bound what they hold."""
_GLANCE = 4


def kept_rows_for(slot_count: int) -> int:
    """How many ended sequences an engine with so many slots remembers: those of chats whose tools are at work meanwhile."""
    return min(KEPT_ROWS_MAX, KEPT_PER_SLOT * slot_count)


def common_count(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """With how many tokens both begin, `limit` at most."""
    high = min(len(one), len(other), limit)
    if one[: min(_GLANCE, high)] != other[: min(_GLANCE, high)]:
        high = min(_GLANCE, high)
    low = 0
    while low < high:  # the first `low` are the same
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class KeptSequences:
    """`rows`: their numbers in the table of blocks."""

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
        """The row that is theirs now; there must be one free."""
        row = self._free.pop()
        self._tokens[row] = tokens
        return row

    def drop(self, row: int) -> None:
        del self._tokens[row]
        self._free.append(row)

    def beginnings_of(self, tokens: tuple[int, ...]) -> list[int]:
        """Rows that hold nothing but a beginning of these tokens."""
        return [row for row, held in self._tokens.items() if tokens[: len(held)] == held]

    def longest(self, tokens: tuple[int, ...], limit: int) -> tuple[int, int]:
        """The row that begins as `tokens` do for longest, and for how long, `limit` at most; (-1, 0): none does."""
        best, most = -1, 0
        for row, held in self._tokens.items():
            if most < limit and held[most : most + 1] == tokens[most : most + 1]:
                count = common_count(held, tokens, limit)
                best, most = (row, count) if count > most else (best, most)
        return best, most

    def used(self, row: int) -> None:
        self._tokens.move_to_end(row)
