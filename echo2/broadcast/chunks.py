"""Cuts the publisher's blocks into chunks and joins them again; handles sets of chunks as bitmaps.

Guarantees: a node that receives all chunks gets exactly the published blocks, in order. A block of any size is cut
into chunks of at most `chunk_bytes`; a chunk never spans two blocks, so a block can be decoded once its last chunk has
arrived. Leaves to others: sending (session).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator

from echo2.base.errors import LimitExceeded, MalformedMessage
from echo2.broadcast.manifest import CHUNK_BYTES_MAX, ArtifactKey, Chunk
from echo2.trust.identity import Identity

BLOCK_BYTES_MAX = 1 << 30


def cut(block: bytes, chunk_bytes: int) -> Iterator[tuple[memoryview, bool]]:
    """(payload, ends_block) of the chunks of one block, as views of it; an empty block is one empty chunk."""
    assert 1 <= chunk_bytes <= CHUNK_BYTES_MAX, f"chunk_bytes {chunk_bytes}"
    if len(block) > BLOCK_BYTES_MAX:
        raise LimitExceeded(f"block: expected at most {BLOCK_BYTES_MAX} bytes, got {len(block)}")
    view = memoryview(block)
    for start in range(0, max(1, len(block)), chunk_bytes):
        yield view[start : start + chunk_bytes], start + chunk_bytes >= len(block)


def signed_chunks(
    chunk_bytes: int, identity: Identity, key: ArtifactKey, first: int, block: bytes
) -> list[tuple[Chunk, bytes]]:
    """The chunks of one block, from index `first`, with their hashes."""
    return [
        Chunk.signed(key, index, ends_block, payload, identity)
        for index, (payload, ends_block) in enumerate(cut(block, chunk_bytes), start=first)
    ]


class BlockAssembler:
    """Joins chunks, added in order, back into blocks."""

    __slots__ = ("_bytes", "_parts")

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        self._bytes = 0

    def add(self, payload: bytes | memoryview, ends_block: bool) -> bytes | None:
        """The block that this chunk completes; None when it completes none."""
        self._bytes += len(payload)
        if self._bytes > BLOCK_BYTES_MAX:
            raise MalformedMessage(f"block: expected at most {BLOCK_BYTES_MAX} bytes, got more from the publisher")
        self._parts.append(payload)
        if not ends_block:
            return None
        block = bytes(payload) if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._bytes = [], 0
        return block


def bitmap_to_bytes(bitmap: int) -> bytes:
    """Little-endian bits: chunk 0 is the lowest bit of the first byte."""
    return bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")


def bitmap_from_bytes(data: bytes) -> int:
    return int.from_bytes(data, "little")


def indices_of(bitmap: int) -> Iterator[int]:
    """The chunks in a bitmap, ascending. Linear in its length, so a peer's bitmap cannot make it slow."""
    data = bitmap_to_bytes(bitmap)
    count = -(-len(data) // 8)
    for at, word in enumerate(struct.unpack(f"<{count}Q", data.ljust(8 * count, b"\0"))):
        rest = word
        while rest:
            lowest = rest & -rest
            yield 64 * at + lowest.bit_length() - 1
            rest ^= lowest


def bitmap_of(indices: Iterable[int]) -> int:
    """The bitmap of these chunks, in any order."""
    chosen = set(indices)
    data = bytearray(max(chosen, default=-1) // 8 + 1)
    for index in chosen:
        data[index >> 3] |= 1 << (index & 7)
    return int.from_bytes(data, "little")


def those_in(bitmap: int, indices: Collection[int]) -> list[int]:
    """The given chunks that are in a bitmap, in the given order. Converts the bitmap only once."""
    data = bitmap_to_bytes(bitmap & all_of(max(indices, default=-1) + 1))
    return [index for index in indices if index >> 3 < len(data) and data[index >> 3] >> (index & 7) & 1]


def all_of(count: int) -> int:
    """The bitmap of chunks 0..count-1."""
    return (1 << count) - 1
