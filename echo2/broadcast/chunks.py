"""Blocks of the publisher <-> chunks of the broadcast, and sets of chunks as bitmaps.

Guarantees: whoever receives all chunks gets the very blocks that were published, in order. A block of any size is cut
into chunks of at most `chunk_bytes`; a chunk never spans two blocks, so a block can be decoded once its last chunk is
there. Leaves to others: sending (session).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from echo2.base.errors import LimitExceeded, MalformedMessage
from echo2.broadcast.manifest import CHUNK_BYTES_MAX, ArtifactKey, Chunk
from echo2.trust.identity import Identity

BLOCK_BYTES_MAX = 1 << 30


def cut(block: bytes, chunk_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """(payload, ends_block) of the chunks of one block; an empty block is one empty chunk."""
    assert 1 <= chunk_bytes <= CHUNK_BYTES_MAX, f"chunk_bytes {chunk_bytes}"
    if len(block) > BLOCK_BYTES_MAX:
        raise LimitExceeded(f"block: expected at most {BLOCK_BYTES_MAX} bytes, got {len(block)}")
    if not block:
        yield b"", True
        return
    view = memoryview(block)
    for start in range(0, len(block), chunk_bytes):
        yield bytes(view[start : start + chunk_bytes]), start + chunk_bytes >= len(block)


def signed_chunks(
    chunk_bytes: int, identity: Identity, key: ArtifactKey, first: int, block: bytes
) -> list[tuple[Chunk, bytes]]:
    """The chunks of one block, from index `first`, with their hashes."""
    made: list[tuple[Chunk, bytes]] = []
    for index, (payload, ends_block) in enumerate(cut(block, chunk_bytes), start=first):
        chunk = Chunk.make(key, index, ends_block, payload, identity)
        made.append((chunk, hashlib.sha256(payload).digest()))
    return made


class BlockAssembler:
    """Joins chunks, handed in in order, to blocks again."""

    __slots__ = ("_bytes", "_parts")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._bytes = 0

    def add(self, payload: bytes, ends_block: bool) -> bytes | None:
        """The block that this chunk completes; None when it completes none."""
        self._bytes += len(payload)
        if self._bytes > BLOCK_BYTES_MAX:
            raise MalformedMessage(f"block: expected at most {BLOCK_BYTES_MAX} bytes, got more from the publisher")
        self._parts.append(payload)
        if not ends_block:
            return None
        block = payload if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._bytes = [], 0
        return block

    @property
    def is_between_blocks(self) -> bool:
        return not self._parts


def bitmap_to_bytes(bitmap: int) -> bytes:
    """Little-endian bits: chunk 0 is the lowest bit of the first byte."""
    return bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")


def bitmap_from_bytes(data: bytes) -> int:
    return int.from_bytes(data, "little")


def indices_of(bitmap: int) -> Iterator[int]:
    """The chunks in a bitmap, rising."""
    while bitmap:
        lowest = bitmap & -bitmap
        yield lowest.bit_length() - 1
        bitmap ^= lowest


def all_of(count: int) -> int:
    """The bitmap of chunks 0..count-1."""
    return (1 << count) - 1
