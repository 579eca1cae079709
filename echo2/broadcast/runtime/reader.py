"""Hands artifacts out in the order in which they apply, block by block, as far as they have arrived.

Guarantees: each block once, in order; an artifact's parent is handed out completely before it; an artifact that is
abandoned half-way is reported as dropped. Never waits: `next` returns None if there is nothing new.
"""

from __future__ import annotations

from echo2.base.ids import Version
from echo2.broadcast.chunks import BlockAssembler
from echo2.broadcast.manifest import ArtifactId, ArtifactKey
from echo2.broadcast.runtime.library import Entry, Library
from echo2.broadcast.runtime.progress import ArtifactBegun, ArtifactDropped, ArtifactSealed, BlockArrived, Progress


class ArtifactReader:
    """One consumer's position. `version`: the newest version that was handed out completely."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.version: Version | None = None
        self._current: tuple[ArtifactKey, ArtifactId] | None = None
        self._next_index = 0
        self._assembler = BlockAssembler()
        self._was_restarted = False

    @property
    def artifact(self) -> ArtifactId | None:
        """The artifact being handed out, if any."""
        return self._current[1] if self._current is not None else None

    def restart_from(self, version: Version | None) -> None:
        """The consumer's weights are now at `version`; an artifact being handed out is dropped."""
        self.version = version
        self._was_restarted = self._current is not None

    def next(self) -> Progress | None:
        if self._was_restarted:
            return self._drop("the consumer switched to another version")
        path = self._library.path(self.version)
        if self._current is None:
            return self._begin(path[0]) if path else None
        key, artifact = self._current
        entry = self._library.entries.get(key)
        if entry is None:
            return self._drop("it was replaced or dropped")
        if key not in path and not entry.is_complete:
            return self._drop("another way to a newer version is faster")
        block = self._next_block(key, entry)
        if block is not None:
            return BlockArrived(artifact, block)
        if entry.seal is None or self._next_index < entry.seal.chunk_count:
            return None
        self._current, self.version = None, artifact.version
        return ArtifactSealed(artifact, entry.seal.fingerprint, entry.seal.total_bytes)

    def _begin(self, key: ArtifactKey) -> ArtifactBegun:
        header = self._library.entries[key].header
        self._current, self._next_index, self._assembler = (key, header.artifact), 0, BlockAssembler()
        return ArtifactBegun(header)

    def _next_block(self, key: ArtifactKey, entry: Entry) -> bytes | None:
        while self._next_index in entry.digests:
            chunk = self._library.chunk(key, self._next_index)
            self._next_index += 1
            block = self._assembler.add(chunk.payload, chunk.ends_block)
            if block is not None:
                return block
        return None

    def _drop(self, reason: str) -> Progress | None:
        assert self._current is not None
        artifact = self._current[1]
        self._current, self._was_restarted = None, False
        return ArtifactDropped(artifact, reason)
