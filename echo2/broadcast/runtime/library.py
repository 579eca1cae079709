"""The artifacts that a node holds: verified headers, chunks and seals, their bytes on disk, and which ones to keep.

Guarantees: nothing enters unverified; an artifact counts as complete only if its chunks hash to the seal's root;
disk and memory stay within their limits. When the disk is full, chunks of the newest artifacts stay in memory up to
`memory_bytes_max`, which is logged once. Leaves to others: fetching and decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from echo2.base.errors import (
    CorruptChunk,
    IntegrityError,
    LimitExceeded,
    ProtocolError,
    ResourceError,
    VersionMismatch,
)
from echo2.base.ids import RunId, Version
from echo2.broadcast.catch_up import UNKNOWN_LINK, ArtifactOffer, Way, plan_way
from echo2.broadcast.chunks import BlockAssembler
from echo2.broadcast.manifest import ArtifactId, ArtifactKey, Chunk, Header, Seal, digest_of, root_of
from echo2.broadcast.room import expected_bytes, store_bytes_min
from echo2.broadcast.runtime.chunk_store import ChunkStore, LeftRecords
from echo2.broadcast.runtime.progress import AvailableArtifact
from echo2.weights.policy import BaseCheckpoint, Edge, WorkerLink, dropped_to_fit, joining_path
from echo2.wire import broadcast as wire
from echo2.wire.chunk_frames import chunk_in

log = logging.getLogger("echo2.broadcast")
WAY_KEPT_CHUNKS = 32  # the way is recomputed after this many chunks, or when an artifact is added, completed or dropped
Frame = bytes | memoryview
"""A chunk's frame, identical on the wire and on disk."""


@dataclass(slots=True)
class Entry:
    """One artifact that this node holds or knows of."""

    header: Header
    seal: Seal | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    checks: dict[int, int] = field(
        default_factory=dict
    )  # xxh3 of the frames: a cheap check that the disk did not corrupt them
    held_bytes: int = 0
    memory: dict[int, Frame] = field(default_factory=dict)
    is_on_disk: bool = True

    @property
    def is_complete(self) -> bool:
        return self.seal is not None and len(self.digests) == self.seal.chunk_count

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Sort key, newest last; within a version, artifacts being fetched come after those only announced."""
        return self.header.artifact.version, self.header.is_pushed or bool(self.digests), self.header.published_unix_s

    @property
    def missing_bytes(self) -> float:
        if self.seal is not None:
            return max(0, self.seal.total_bytes - self.held_bytes)
        return max(1.0, expected_bytes(self.header.artifact, self.header.full_snapshot_bytes) - self.held_bytes)


@dataclass(frozen=True, slots=True)
class LibraryLimits:
    """`recent_bytes_max`: recently received chunks, so that relaying and decoding them reads no disk."""

    artifacts_max: int = 96
    memory_bytes_max: int = 256 << 20
    recent_bytes_max: int = 16 << 20


class RecentChunks:
    """The latest verified chunks with their frames (payloads are views), so that they are not read back from disk."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.held_bytes = 0
        self._kept: dict[tuple[ArtifactKey, int], tuple[Chunk, Frame]] = {}

    def add(self, chunk: Chunk, frame: Frame) -> None:
        if (old := self._kept.pop((chunk.key, chunk.index), None)) is not None:
            self.held_bytes -= len(old[1])
        self._kept[(chunk.key, chunk.index)] = chunk, frame
        self.held_bytes += len(frame)
        while self.held_bytes > self._bytes_max:
            self.held_bytes -= len(self._kept.pop(next(iter(self._kept)))[1])

    def get(self, key: ArtifactKey, index: int) -> tuple[Chunk, Frame] | None:
        return self._kept.get((key, index))

    def drop(self, key: ArtifactKey) -> None:
        for place in [place for place in self._kept if place[0] == key]:
            self.held_bytes -= len(self._kept.pop(place)[1])


class Library:
    def __init__(
        self,
        store: ChunkStore,
        run_id: RunId,
        limits: LibraryLimits,
        lineage: str,
        link: Callable[[], WorkerLink] = lambda: UNKNOWN_LINK,
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.limits = limits
        self.lineage = lineage
        self.entries: dict[ArtifactKey, Entry] = {}
        self._link = link
        self.stalled: frozenset[ArtifactKey] = frozenset()
        self.base: BaseCheckpoint | None = None
        self.unsound_files = 0
        self.trouble = ""
        self._rotten: set[ArtifactKey] = set()
        self._memory_bytes = 0
        self.recent = RecentChunks(limits.recent_bytes_max)
        self._last_way: tuple[Version | None, Way | None] | None = None
        self._chunks_since_way = 0
        self.chunks_taken = 0

    # ---- from an earlier run

    def take_over(self, path: Path, entry: Entry, records: LeftRecords) -> None:
        """Adds an artifact whose file was read and verified (restoring); raises if it is of another run or release."""
        if entry.header.run_id != self.run_id:
            raise ProtocolError(f"{path}: expected an artifact of run {self.run_id}, got one of {entry.header.run_id}")
        if entry.header.lineage != self.lineage:
            raise VersionMismatch(f"{path}: expected {self.lineage}, got {entry.header.lineage!r} of another release")
        key = entry.header.key
        self.store.fit(entry.header.full_snapshot_bytes)
        self.entries[key] = entry
        self.store.adopt(key, path, records)

    # ---- taking in

    def add_header(self, header: Header) -> list[ArtifactKey]:
        """Enters a verified header; returns the artifacts dropped for it."""
        dropped = [
            key for key, entry in self.entries.items()
            if entry.header.artifact == header.artifact and not entry.is_complete
            and entry.header.published_unix_s <= header.published_unix_s
        ]  # fmt: skip
        for key in dropped:
            self.drop(key)
        while len(self.entries) >= self.limits.artifacts_max and (victims := self._victims(header.key, 1)):
            dropped += victims
        entry = Entry(header)
        self.store.fit(header.full_snapshot_bytes)
        self.entries[header.key] = entry
        self._last_way = None
        try:
            self.store.create(header.key, wire.header_to_bytes(header))
        except ResourceError as error:
            entry.is_on_disk = False
            self._in_trouble(error)
        return dropped

    def add_chunk(self, chunk: Chunk, digest: bytes, record: memoryview | None = None) -> list[ArtifactKey]:
        """Stores a verified chunk; returns the artifacts dropped to make room. ResourceError if there is no room.

        `record`: the received frame, of which the payload is a view; None for a chunk made here."""
        entry = self.entries[chunk.key]
        frame = record if record is not None else memoryview(wire.chunk_to_bytes(chunk))
        chunk = Chunk(
            chunk.key, chunk.index, chunk.ends_block, frame[len(frame) - len(chunk.payload) :], chunk.signature
        )
        dropped: list[ArtifactKey] = []
        while entry.is_on_disk:
            try:
                self.store.put_chunk(chunk.key, chunk.index, frame)
                break
            except ResourceError as error:
                victims = self._victims(chunk.key, len(frame))
                if not victims:
                    dropped += self._keep_in_memory(entry, chunk.index, frame, error)
                    break
                dropped += victims
        else:
            dropped += self._keep_in_memory(entry, chunk.index, frame, LimitExceeded("no file for this artifact"))
        entry.digests[chunk.index] = digest
        entry.checks[chunk.index] = xxhash.xxh3_64_intdigest(frame)
        entry.held_bytes += len(chunk.payload)
        self.recent.add(chunk, frame)
        self._chunks_since_way += 1
        self.chunks_taken += 1
        self._check_root(entry)
        return dropped

    def add_seal(self, key: ArtifactKey, seal: Seal) -> None:
        entry = self.entries[key]
        entry.seal = seal
        self._last_way = None
        try:
            if entry.is_on_disk:
                self.store.put_seal(key, wire.seal_to_bytes(seal))
        except ResourceError as error:
            self._in_trouble(error)
        self._check_root(entry)

    def _check_root(self, entry: Entry) -> None:
        if not entry.is_complete:
            return
        self._last_way = None
        assert entry.seal is not None
        root = root_of(entry.digests.get(index, b"") for index in range(entry.seal.chunk_count))
        if root != entry.seal.root_sha256 or entry.held_bytes != entry.seal.total_bytes:
            raise IntegrityError(
                f"{entry.header.artifact}: expected chunks with root {entry.seal.root_sha256.hex()[:16]} and "
                f"{entry.seal.total_bytes} bytes, got {root.hex()[:16]} and {entry.held_bytes}; the publisher sealed it wrongly"
            )

    def _keep_in_memory(self, entry: Entry, index: int, frame: Frame, error: ResourceError) -> list[ArtifactKey]:
        over_bytes = self._memory_bytes + len(frame) - self.limits.memory_bytes_max
        victims = self._victims(entry.header.key, over_bytes, in_memory=True) if over_bytes > 0 else []
        if self._memory_bytes + len(frame) > self.limits.memory_bytes_max:
            raise error
        self._in_trouble(error)
        entry.memory[index] = frame
        self._memory_bytes += len(frame)
        return victims

    def _in_trouble(self, error: ResourceError) -> None:
        if not self.trouble:
            log.error("chunks are kept in memory, up to %d bytes: %s", self.limits.memory_bytes_max, error)
        self.trouble = str(error)

    def _victims(self, spared: ArtifactKey, room_bytes: int, *, in_memory: bool = False) -> list[ArtifactKey]:
        """Drops the least useful artifacts (weights/policy) until `room_bytes` are free, on disk or in memory; returns them.

        Never drops what a newcomer needs to reach the newest version, except that a keyframe at least as new replaces an
        older one. So it may free less than `room_bytes`, or nothing.
        """
        sizes = {
            key: sum(map(len, entry.memory.values())) if in_memory else max(1, self.store.size_of(key))
            for key, entry in self.entries.items()
        }
        of_edge = {
            Edge(entry.header.artifact.parent, entry.header.artifact.version, sizes[key]): key
            for key, entry in self.entries.items() if key != spared and sizes[key]
        }  # fmt: skip
        if not of_edge:
            return []
        edges, newest = list(of_edge), max(edge.target for edge in of_edge)
        budget = max(0, sum(edge.encoded_bytes for edge in edges) - room_bytes)
        dropped = dropped_to_fit(edges, newest, [edge.target for edge in edges], budget)
        free = dropped - joining_path(edges, newest)
        replacing = self.entries[spared].header.artifact if spared in self.entries else None
        if not free and replacing is not None and replacing.is_keyframe and replacing.version >= newest:
            free = dropped
        victims = [key for edge, key in of_edge.items() if edge in free]
        for key in victims:
            self.drop(key)
        return victims

    def shortage(self, keys: Iterable[ArtifactKey]) -> LimitExceeded | None:
        """The error to raise if a keyframe among these can never fit on disk and in memory; None if all fit."""
        room = self.store.bytes_max + self.limits.memory_bytes_max
        for header in (self.entries[key].header for key in keys if key in self.entries):
            needed = store_bytes_min(header.full_snapshot_bytes)
            seal = self.entries[header.key].seal
            needed = min(needed, store_bytes_min(seal.total_bytes)) if seal is not None else needed
            if header.artifact.is_keyframe and room < needed:
                return LimitExceeded(
                    f"{header.artifact}: expected store_bytes of at least {needed} for a keyframe of this model, got "
                    f"{self.store.bytes_max}; 0 sizes the store by the model"
                )
        return None

    # ---- giving out

    def frame(self, key: ArtifactKey, index: int) -> Frame | None:
        """A chunk's frame to send; None if we lack it or the disk corrupted it, because a peer would ban us for sending that."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        if (recent := self.recent.get(key, index)) is not None:
            return recent[1]
        stored = entry.memory.get(index) or self.store.chunk(key, index)
        if stored is not None and xxhash.xxh3_64_intdigest(stored) != entry.checks.get(index):
            self.trouble = f"chunk {index} of {entry.header.artifact} in {self.store.folder}: the disk changed it"
            log.error("%s; the chunk is not served", self.trouble)
            self._rotten.add(key)
            return None
        return stored

    def chunk(self, key: ArtifactKey, index: int) -> Chunk:
        """A chunk for decoding, read from disk unless recent; CorruptChunk if the disk corrupted it."""
        if (recent := self.recent.get(key, index)) is not None:
            return recent[0]
        entry, frame = self.entries.get(key), self.frame(key, index)
        if entry is None or frame is None:
            whose = entry.header.artifact if entry is not None else key.hex()
            raise CorruptChunk(f"chunk {index} of {whose}: expected it in {self.store.folder}, got none")
        try:
            chunk = _chunk_of(bytes(frame), str(self.store.folder))
        except ProtocolError as error:
            raise CorruptChunk(f"chunk {index} of {entry.header.artifact} in {self.store.folder}: {error}") from None
        digest = digest_of(chunk.payload)
        if (chunk.key, chunk.index, digest) != (key, index, entry.digests[index]):
            raise CorruptChunk(
                f"chunk {index} of {entry.header.artifact} in {self.store.folder}: expected blake3 "
                f"{entry.digests[index].hex()[:16]}, got {digest.hex()[:16]}"
            )
        return chunk

    def take_rotten(self) -> list[tuple[ArtifactKey, ArtifactId]]:
        """Sealed artifacts with a chunk found corrupted on disk since the last call."""
        self._rotten &= self.entries.keys()
        rotten = [key for key in self._rotten if self.entries[key].seal is not None]
        self._rotten.difference_update(rotten)
        return [(key, self.entries[key].header.artifact) for key in rotten]

    def header_frame(self, key: ArtifactKey) -> bytes | None:
        entry = self.entries.get(key)
        return wire.header_to_bytes(entry.header) if entry is not None else None

    def seal_frame(self, key: ArtifactKey) -> bytes | None:
        entry = self.entries.get(key)
        return wire.seal_to_bytes(entry.seal) if entry is not None and entry.seal is not None else None

    def drop(self, key: ArtifactKey) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self._memory_bytes -= sum(map(len, entry.memory.values()))
            self.recent.drop(key)
            self._last_way = None
            self.store.drop(key)

    def empty(self, key: ArtifactKey) -> list[ArtifactKey]:
        """Drops an artifact's chunks but keeps its header and seal; returns other artifacts dropped for it."""
        entry = self.entries[key]
        self.drop(key)
        dropped = self.add_header(entry.header)
        if entry.seal is not None:
            self.add_seal(key, entry.seal)
        return dropped

    def offers(self) -> list[ArtifactOffer]:
        return [
            ArtifactOffer(
                key, entry.header.artifact, entry.missing_bytes, entry.header.full_snapshot_bytes,
                entry.header.is_pushed, bool(entry.digests),
            )
            for key, entry in self.entries.items()
        ]  # fmt: skip

    def way(self, start: Version | None) -> Way | None:
        """The way that is expected to reach the newest reachable version first over this node's link."""
        return plan_way(self.offers(), start, self._link(), self.stalled, self.base)

    def set_stalled(self, keys: frozenset[ArtifactKey]) -> None:
        """Sets the stalled artifacts, which ways avoid if possible."""
        self.stalled, self._last_way = keys, None

    def set_base(self, base: BaseCheckpoint | None) -> None:
        """Sets the version that the node got elsewhere (a base checkpoint)."""
        self.base, self._last_way = base, None

    def path(self, start: Version | None) -> tuple[ArtifactKey, ...]:
        """The way's artifacts, computed at most WAY_KEPT_CHUNKS chunks ago."""
        known = self._last_way
        if known is None or known[0] != start or self._chunks_since_way >= WAY_KEPT_CHUNKS:
            self._last_way = known = (start, self.way(start))
            self._chunks_since_way = 0
        return known[1].keys if known[1] is not None else ()

    def waits_for(self, start: Version | None) -> str:
        """Describes the first incomplete artifact on the way; empty if none."""
        path = [self.entries[key] for key in self.path(start)]
        missing = [entry for entry in path if not entry.is_complete]
        return f"chunks of {missing[0].header.artifact} ({len(missing[0].digests)} held)" if missing else ""

    def blocks_of(self, artifact: ArtifactId) -> Iterator[bytes] | None:
        """A lazy iterator over the blocks of a complete artifact; None if it is not complete here."""
        key = self.find(artifact)
        return self._blocks(key) if key is not None and self.entries[key].is_complete else None

    def _blocks(self, key: ArtifactKey) -> Iterator[bytes]:
        """Runs on any thread; CorruptChunk if the artifact is dropped meanwhile."""
        assembler, index = BlockAssembler(), 0
        while True:
            entry = self.entries.get(key)
            if entry is None or entry.seal is None:
                raise CorruptChunk(f"artifact {key.hex()}: expected it in {self.store.folder}, it was dropped")
            if index == entry.seal.chunk_count:
                return
            chunk = self.chunk(key, index)
            block = assembler.add(chunk.payload, chunk.ends_block)
            index += 1
            if block is not None:
                yield block

    def fingerprint_of(self, artifact: ArtifactId) -> str:
        """The fingerprint signed by the publisher, in hex; empty before the seal has arrived."""
        key = self.find(artifact)
        entry = self.entries[key] if key is not None else None
        return entry.seal.fingerprint if entry is not None and entry.seal is not None else ""

    def available(self) -> list[AvailableArtifact]:
        """All artifacts held or announced, oldest version first."""
        artifacts = [
            AvailableArtifact(
                entry.header.artifact, key, entry.held_bytes, entry.seal.total_bytes if entry.seal else 0,
                entry.is_complete,
            )
            for key, entry in self.entries.items()
        ]  # fmt: skip
        return sorted(artifacts, key=lambda available: (available.artifact.version, available.held_bytes))

    def find(self, artifact: ArtifactId) -> ArtifactKey | None:
        """The newest publication of an artifact; complete ones first."""
        keys = [key for key, entry in self.entries.items() if entry.header.artifact == artifact]
        rank = lambda key: (self.entries[key].is_complete, self.entries[key].header.published_unix_s)  # noqa: E731
        return max(keys, key=rank, default=None)


def _chunk_of(frame: bytes, whose: str) -> Chunk:
    parsed = chunk_in(frame, whose)
    return parsed.chunk if parsed is not None else wire.chunk_from(wire.parse(frame, whose).chunk)
