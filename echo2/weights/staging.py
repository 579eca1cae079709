"""Storage for decoded versions before the swap: memory up to a share of the weights, then a spill that the caller provides.

Guarantees: bytes are read back unchanged, or `StateError`. Leaves to others: what a spill is (a file, in the worker).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import xxhash

from echo2.base.errors import StateError


class Spill(Protocol):
    """Storage outside of memory."""

    def put(self, data: bytes) -> int:
        """Stores bytes; returns their place."""
        ...

    def get(self, place: int, size: int) -> bytes:
        """Returns the bytes stored at a place."""
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """Stored bytes: in memory, or in a spill at a place, with their digest."""

    data: bytes | None
    spill: Spill | None = None
    place: int = 0
    size: int = 0
    digest: int = 0

    def read(self) -> bytes:
        """Returns the bytes; StateError if the spill has changed them."""
        if self.data is not None:
            return self.data
        assert self.spill is not None, "bytes are kept in memory or in a spill"
        data = self.spill.get(self.place, self.size)
        if len(data) != self.size or xxhash.xxh3_64_intdigest(data) != self.digest:
            raise StateError(f"staged bytes: expected the {self.size} that were kept, got {len(data)}, or others")
        return data


class Staging:
    """Stores bytes: up to `memory_bytes` in memory, the rest in the spill; without a spill, everything in memory."""

    def __init__(self, memory_bytes: int, spill: Spill | None) -> None:
        self._left = memory_bytes
        self._spill = spill

    def has_room(self, size: int) -> bool:
        """Whether this many bytes fit into the memory budget."""
        return size <= self._left

    @property
    def can_spill(self) -> bool:
        """Whether there is a spill."""
        return self._spill is not None

    def keep(self, data: bytes) -> Kept:
        """Stores bytes in memory or in the spill."""
        if not self.has_room(len(data)) and self._spill is not None:
            return Kept(None, self._spill, self._spill.put(data), len(data), xxhash.xxh3_64_intdigest(data))
        self._left -= len(data)
        return Kept(data)
