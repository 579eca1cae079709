"""The parts of an artifact: a signed header, signed chunks, and a signed seal that ends it.

Guarantees: the publisher signs every part on its own, so a chunk can be verified and forwarded before the next
one exists. Two publications of the same version have different keys.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NewType

from blake3 import blake3

from echo2.base.errors import BadSignature, CorruptChunk, LimitExceeded, MalformedMessage
from echo2.base.ids import PeerId, RunId, Version
from echo2.base.staged import FORMAT_VERSION
from echo2.trust.identity import Identity, verify_signature

ArtifactKey = NewType("ArtifactKey", bytes)  # 16 bytes that name one publication: the hash of its header

KEY_BYTES = 16  # of a SHA-256: no two publications of a run collide
CHUNK_BYTES_MAX = 4 << 20  # a frame must fit in memory many times over: 48 links with two each
CHUNKS_MAX = 1 << 20  # 4 TiB in the largest chunks; a have-map of 128 KiB
VERSION_MAX = (1 << 53) - 1  # exact in JSON and in float64
_HEADER_DOMAIN = b"echo2/artifact-header/1"
_CHUNK_DOMAIN = b"echo2/artifact-chunk/1"
_SEAL_DOMAIN = b"echo2/artifact-seal/1"


@dataclass(frozen=True, slots=True, order=True)
class ArtifactId:
    """The `version` that an artifact produces, and the `parent` version it starts from (delta) or None (keyframe)."""

    version: Version
    parent: Version | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.version <= VERSION_MAX:
            raise MalformedMessage(f"artifact: expected a version in 0..{VERSION_MAX}, got {self.version}")
        if self.parent is not None and not 0 <= self.parent < self.version:
            raise MalformedMessage(f"artifact: expected a parent below version {self.version}, got {self.parent}")

    @property
    def is_keyframe(self) -> bool:
        return self.parent is None

    def __str__(self) -> str:
        return f"keyframe {self.version}" if self.parent is None else f"delta {self.parent}->{self.version}"


def _text(value: str, characters_max: int, what: str) -> bytes:
    if len(value) > characters_max:
        raise MalformedMessage(f"artifact {what}: expected at most {characters_max} characters, got {len(value)}")
    data = value.encode()
    return struct.pack(">H", len(data)) + data


@dataclass(frozen=True, slots=True)
class Header:
    """Announces an artifact. `is_pushed`: the plan's trees push it to everyone; otherwise only peers that request it get it."""

    artifact: ArtifactId
    run_id: RunId
    lineage: str
    published_unix_s: float
    full_snapshot_bytes: int
    is_pushed: bool
    publisher: PeerId
    signature: bytes = b""

    def __post_init__(self) -> None:
        if not math.isfinite(self.published_unix_s) or not 0 <= self.full_snapshot_bytes <= 1 << 60:
            raise MalformedMessage(f"header of {self.artifact}: time or size out of range")

    def body(self) -> bytes:
        """The bytes that are signed."""
        parent = -1 if self.artifact.parent is None else self.artifact.parent
        numbers = struct.pack(
            ">qqdq?", self.artifact.version, parent, self.published_unix_s, self.full_snapshot_bytes, self.is_pushed
        )
        texts = _text(self.run_id, 128, "run id") + _text(self.lineage, 128, "lineage")
        return _HEADER_DOMAIN + numbers + texts + _text(self.publisher, 64, "publisher")

    @property
    def key(self) -> ArtifactKey:
        return ArtifactKey(hashlib.sha256(self.body()).digest()[:KEY_BYTES])

    def signed(self, identity: Identity) -> Header:
        assert identity.peer_id == self.publisher
        return replace(self, signature=identity.sign(self.body()))

    def verify(self) -> None:
        """Raises BadSignature unless the publisher named in it signed it."""
        _verified(self.publisher, self.body(), self.signature, f"header of {self.artifact}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part `index` of an artifact. `ends_block`: it is the last chunk of one of the publisher's blocks. The payload may be a
    view of the received frame: copying it would cost more than hashing it."""

    key: ArtifactKey
    index: int
    ends_block: bool
    payload: bytes | memoryview
    signature: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.index < CHUNKS_MAX:
            raise MalformedMessage(f"chunk: expected an index in 0..{CHUNKS_MAX - 1}, got {self.index}")
        if len(self.payload) > CHUNK_BYTES_MAX:
            raise MalformedMessage(
                f"chunk {self.index}: expected at most {CHUNK_BYTES_MAX} bytes, got {len(self.payload)}"
            )

    @classmethod
    def signed(
        cls, key: ArtifactKey, index: int, ends_block: bool, payload: bytes | memoryview, identity: Identity
    ) -> tuple[Chunk, bytes]:
        """A signed chunk, and its payload's digest."""
        digest = digest_of(payload)
        signature = identity.sign(_chunk_body(key, index, ends_block, digest))
        return cls(key, index, ends_block, payload, signature), digest

    def verify(self, publisher: PeerId) -> bytes:
        """Returns the payload's digest; CorruptChunk unless the publisher signed exactly this payload at this index."""
        digest = digest_of(self.payload)
        try:
            verify_signature(publisher, _chunk_body(self.key, self.index, self.ends_block, digest), self.signature)
        except BadSignature:
            raise CorruptChunk(
                f"chunk {self.index} of artifact {self.key.hex()}: expected bytes signed by {publisher}, "
                f"got blake3 {digest.hex()[:16]}, which it did not sign"
            ) from None
        return digest


def digest_of(payload: bytes | memoryview) -> bytes:
    """32 bytes that stand for a chunk's payload where it is signed, kept and compared: BLAKE3, five times as fast as SHA-256 even
    where the processor has instructions for that."""
    return blake3(payload).digest()


def _chunk_body(key: ArtifactKey, index: int, ends_block: bool, digest: bytes) -> bytes:
    return _CHUNK_DOMAIN + key + struct.pack(">I?", index, ends_block) + digest


@dataclass(frozen=True, slots=True)
class Seal:
    """Ends an artifact: the chunk count, the hash over the chunks' hashes, and the weights' fingerprint."""

    key: ArtifactKey
    chunk_count: int
    total_bytes: int
    root_sha256: bytes
    fingerprint: str
    signature: bytes = b""

    def __post_init__(self) -> None:
        if not 0 <= self.chunk_count <= CHUNKS_MAX or not 0 <= self.total_bytes <= 1 << 60:
            raise MalformedMessage(
                f"seal: expected at most {CHUNKS_MAX} chunks, got {self.chunk_count} of {self.total_bytes} bytes"
            )

    def body(self) -> bytes:
        numbers = struct.pack(">Iq", self.chunk_count, self.total_bytes)
        return _SEAL_DOMAIN + self.key + numbers + self.root_sha256 + _text(self.fingerprint, 256, "fingerprint")

    def signed(self, identity: Identity) -> Seal:
        return replace(self, signature=identity.sign(self.body()))

    def verify(self, publisher: PeerId) -> None:
        _verified(publisher, self.body(), self.signature, f"seal of artifact {self.key.hex()}")


def root_of(chunk_digests: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"".join(chunk_digests)).digest()


def _verified(publisher: PeerId, body: bytes, signature: bytes, what: str) -> None:
    try:
        verify_signature(publisher, body, signature)
    except BadSignature:
        raise BadSignature(f"{what}: expected the signature of {publisher}, got one that does not verify") from None


BLOCK_BYTES_MAX = 1 << 30  # the encoder makes blocks of some tens of MiB


def signed_chunks(
    chunk_bytes: int, identity: Identity, key: ArtifactKey, first: int, block: bytes
) -> list[tuple[Chunk, bytes]]:
    """The chunks of one block, from index `first`, with their hashes. Payloads are views; an empty block is one empty chunk."""
    assert 1 <= chunk_bytes <= CHUNK_BYTES_MAX, f"chunk_bytes {chunk_bytes}"
    if len(block) > BLOCK_BYTES_MAX:
        raise LimitExceeded(f"block: expected at most {BLOCK_BYTES_MAX} bytes, got {len(block)}")
    view, ends = memoryview(block), range(chunk_bytes, max(1, len(block)) + chunk_bytes, chunk_bytes)
    return [
        Chunk.signed(key, index, end >= len(block), view[end - chunk_bytes : end], identity)
        for index, end in enumerate(ends, start=first)
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
    return (1 << count) - 1


FRAME_SHARE = 1 / 64  # signatures, hashes and lengths, for chunks of at least 16 KiB
KEYFRAMES_KEPT = 2.0
"""In sizes of the weights. Keyframes take 0.6 to 0.7 of it, so this holds two, and the deltas of their chain."""
LINEAGE = f"delta {FORMAT_VERSION}"  # the format of published artifacts; those of another release are rejected
STORE_BYTES_FLOOR = 64 << 20  # of a model too small to matter: a few versions
UNSEALED_DELTA_SHARE = 0.05  # of a snapshot


def expected_bytes(artifact: ArtifactId, weights_bytes: int) -> float:
    """Estimated size of an artifact that is not sealed yet."""
    return weights_bytes * (1.0 if artifact.is_keyframe else UNSEALED_DELTA_SHARE)


def store_bytes_min(weights_bytes: int) -> int:
    """The smallest useful store: with less, a keyframe could be refetched forever without ever being complete."""
    return int(weights_bytes * (1 + FRAME_SHARE))


def store_bytes_for(weights_bytes: int) -> int:
    return max(STORE_BYTES_FLOOR, int(KEYFRAMES_KEPT * store_bytes_min(weights_bytes)))
