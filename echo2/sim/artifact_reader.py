"""What a simulated node holds of an artifact, and its handing out in the order in which artifacts apply.

As broadcast/runtime/reader.py: each block once, in order; an artifact that is abandoned half-way is said to be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from echo2.base.errors import CorruptChunk
from echo2.base.ids import Version
from echo2.broadcast.catch_up import Offer
from echo2.broadcast.chunks import BlockAssembler
from echo2.broadcast.manifest import ArtifactId, ArtifactKey, Chunk, Header, Seal


@dataclass(slots=True)
class Entry:
    header: Header
    seal: Seal | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    memory: dict[int, Chunk] = field(default_factory=dict)
    held_bytes: int = 0

    @property
    def is_complete(self) -> bool:
        return self.seal is not None and len(self.digests) == self.seal.chunk_count

    @property
    def missing_bytes(self) -> float:
        if self.seal is not None:
            return max(0, self.seal.total_bytes - self.held_bytes)
        share = 1.0 if self.header.artifact.is_keyframe else 0.05
        return max(1.0, self.header.full_snapshot_bytes * share - self.held_bytes)

    def offer(self, key: ArtifactKey) -> Offer:
        header = self.header
        return Offer(
            key, header.artifact, self.missing_bytes, header.full_snapshot_bytes, header.is_pushed, bool(self.digests)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Begun:
    artifact: ArtifactId


@dataclass(frozen=True, slots=True)
class Block:
    payload: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    artifact: ArtifactId
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Abandoned:
    artifact: ArtifactId


Step = Begun | Block | Sealed | Abandoned


class Holder(Protocol):
    """The node whose artifacts are read."""

    entries: dict[ArtifactKey, Entry]

    def path(self, start: Version | None) -> list[ArtifactKey]: ...

    def chunk(self, key: ArtifactKey, index: int) -> Chunk | None: ...


class Reader:
    """Hands artifacts out in the order in which they apply; `version`: the newest that was handed out whole."""

    def __init__(self, node: Holder) -> None:
        self._node = node
        self.version: Version | None = None
        self._current: tuple[ArtifactKey, ArtifactId] | None = None
        self._next_index = 0
        self._assembler = BlockAssembler()
        self._was_restarted = False

    @property
    def artifact(self) -> ArtifactId | None:
        """The one that is being handed out."""
        return self._current[1] if self._current is not None else None

    def restart_from(self, version: Version | None) -> None:
        self.version = version
        self._was_restarted = self._current is not None

    def next(self) -> Step | None:
        if self._was_restarted:
            return self._abandon()
        path = self._node.path(self.version)
        if self._current is None:
            return self._begin(path[0]) if path else None
        key, artifact = self._current
        entry = self._node.entries.get(key)
        if entry is None or (key not in path and not entry.is_complete):
            return self._abandon()
        while self._next_index in entry.digests:
            chunk = self._node.chunk(key, self._next_index)
            if chunk is None:
                raise CorruptChunk(f"chunk {self._next_index} of {artifact}: the disk changed it")
            self._next_index += 1
            block = self._assembler.add(chunk.payload, chunk.ends_block)
            if block is not None:
                return Block(block)
        if entry.seal is None or self._next_index < entry.seal.chunk_count:
            return None
        self._current, self.version = None, artifact.version
        return Sealed(artifact, entry.seal.fingerprint)

    def _begin(self, key: ArtifactKey) -> Begun:
        artifact = self._node.entries[key].header.artifact
        self._current, self._next_index, self._assembler = (key, artifact), 0, BlockAssembler()
        return Begun(artifact)

    def _abandon(self) -> Abandoned:
        assert self._current is not None, "something is under way"
        artifact = self._current[1]
        self._current, self._was_restarted = None, False
        return Abandoned(artifact)
