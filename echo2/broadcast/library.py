"""The artifacts that a node holds or knows of: verified chunks, on disk and the recent ones in memory.

Guarantees: nothing enters that was not verified; what is read back from disk is compared with what was verified before it is sent
or decoded; when the store is full, the least useful artifact goes first (route.dropped_to_fit). Leaves to others: the layout on
disk (store), what is fetched (catch_up).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field

from echo2.base.errors import (
    CorruptChunk,
    EchoError,
    IntegrityError,
    LimitExceeded,
    ProtocolError,
    ResourceError,
    VersionMismatch,
)
from echo2.base.ids import PeerId, RunId
from echo2.broadcast.artifact import (
    ArtifactId,
    ArtifactKey,
    BlockAssembler,
    Chunk,
    Header,
    Seal,
    bitmap_of,
    digest_of,
    expected_bytes,
    root_of,
    store_bytes_min,
)
from echo2.broadcast.events import ChunksKept, Event, HeaderSeen, SealSeen
from echo2.broadcast.route import ArtifactOffer, dropped_to_fit, joining_path
from echo2.broadcast.store import ChunkStore, LeftFile, chunk_of, signed_as
from echo2.wire import broadcast as wire

log = logging.getLogger("echo2.broadcast")
Frame = bytes | memoryview
"""A chunk's frame, identical on the wire and on disk."""


@dataclass(slots=True)
class Entry:
    """One artifact that this node holds or knows of."""

    header: Header
    seal: Seal | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    held_bytes: int = 0
    signatures: dict[int, bytes] = field(default_factory=dict)

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


ARTIFACTS_MAX = 96  # each keeps a file open
RECENT_BYTES_MAX = 16 << 20
"""Recently received chunks, so that relaying and decoding them reads no disk."""


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


@dataclass(frozen=True, slots=True)
class AvailableArtifact:
    """An artifact that this node holds or that a neighbour has announced."""

    artifact: ArtifactId
    key: ArtifactKey
    held_bytes: int
    total_bytes: int  # 0: not sealed yet
    is_complete: bool


class Library:
    """`revision` rises when an artifact is added, sealed, completed or dropped; `chunks_stored` with each chunk."""

    def __init__(
        self, store: ChunkStore, run_id: RunId, lineage: str, recent_bytes_max: int = RECENT_BYTES_MAX
    ) -> None:
        self.store, self.run_id, self.lineage = store, run_id, lineage
        self.entries: dict[ArtifactKey, Entry] = {}
        self.recent = RecentChunks(recent_bytes_max)
        self.unsound_files = 0
        self.trouble = ""
        self.revision = self.chunks_stored = 0
        self._rotten: set[ArtifactKey] = set()

    # ---- from an earlier run

    def take_over(self, left: LeftFile) -> None:
        """Adds an artifact whose file was checked; raises if it is of another run or release."""
        header = left.header
        if header.run_id != self.run_id:
            raise ProtocolError(f"{left.path}: expected an artifact of run {self.run_id}, got one of {header.run_id}")
        if header.lineage != self.lineage:
            raise VersionMismatch(f"{left.path}: expected {self.lineage}, got {header.lineage!r} of another release")
        self.store.fit(header.full_snapshot_bytes)
        self.entries[header.key] = Entry(header, left.seal, left.digests, left.held_bytes, left.signatures)
        self.store.adopt(left)
        self.revision += 1

    # ---- taking in

    def add_header(self, header: Header) -> list[ArtifactKey]:
        """Enters a verified header; returns the artifacts dropped for it. DiskFull where it cannot be written."""
        dropped = [
            key for key, entry in self.entries.items()
            if entry.header.artifact == header.artifact and not entry.is_complete
            and entry.header.published_unix_s <= header.published_unix_s
        ]  # fmt: skip
        for key in dropped:
            self.drop(key)
        while len(self.entries) >= ARTIFACTS_MAX and (victims := self._victims(header.key, 1)):
            dropped += victims
        entry = Entry(header)
        self.store.fit(header.full_snapshot_bytes)
        self.store.create(header.key, wire.header_to_bytes(header))
        self.entries[header.key] = entry
        self.revision += 1
        return dropped

    def add_chunk(self, chunk: Chunk, digest: bytes, record: memoryview | None = None) -> list[ArtifactKey]:
        """Stores a verified chunk; returns the artifacts dropped to make room. DiskFull or LimitExceeded if there is none.

        `record`: the received frame, of which the payload is a view; None for a chunk made here."""
        entry = self.entries[chunk.key]
        frame = record if record is not None else memoryview(wire.chunk_to_bytes(chunk))
        chunk = Chunk(
            chunk.key, chunk.index, chunk.ends_block, frame[len(frame) - len(chunk.payload) :], chunk.signature
        )
        dropped: list[ArtifactKey] = []
        while True:
            try:
                self.store.put_chunk(chunk.key, chunk.index, frame)
                break
            except ResourceError:
                victims = self._victims(chunk.key, len(frame))
                if not victims:
                    raise
                dropped += victims
        entry.digests[chunk.index], entry.signatures[chunk.index] = digest, signed_as(chunk)
        entry.held_bytes += len(chunk.payload)
        self.recent.add(chunk, frame)
        self.chunks_stored += 1
        self._check_root(entry)
        return dropped

    def add_seal(self, key: ArtifactKey, seal: Seal) -> None:
        entry = self.entries[key]
        entry.seal = seal
        self.revision += 1
        self.store.put_seal(key, wire.seal_to_bytes(seal))
        self._check_root(entry)

    def _check_root(self, entry: Entry) -> None:
        if not entry.is_complete:
            return
        self.revision += 1
        assert entry.seal is not None
        root = root_of(entry.digests.get(index, b"") for index in range(entry.seal.chunk_count))
        if root != entry.seal.root_sha256 or entry.held_bytes != entry.seal.total_bytes:
            raise IntegrityError(
                f"{entry.header.artifact}: expected chunks with root {entry.seal.root_sha256.hex()[:16]} and "
                f"{entry.seal.total_bytes} bytes, got {root.hex()[:16]} and {entry.held_bytes}; the publisher sealed it wrongly"
            )

    def _victims(self, spared: ArtifactKey, room_bytes: int) -> list[ArtifactKey]:
        """Drops the least useful artifacts (route) until `room_bytes` are free; returns them.

        Never drops what a newcomer needs to reach the newest version, except that a keyframe at least as new replaces an
        older one. So it may free less than `room_bytes`, or nothing.
        """
        offers = [
            ArtifactOffer(key, entry.header.artifact, max(1, self.store.size_of(key)))
            for key, entry in self.entries.items()
            if key != spared
        ]
        if not offers:
            return []
        newest = max(offer.artifact.version for offer in offers)
        budget_bytes = max(0, sum(offer.size_bytes for offer in offers) - room_bytes)
        dropped = dropped_to_fit(offers, newest, {offer.artifact.version for offer in offers}, budget_bytes)
        free = dropped - joining_path(offers, newest)
        replacing = self.entries[spared].header.artifact if spared in self.entries else None
        if not free and replacing is not None and replacing.is_keyframe and replacing.version >= newest:
            free = dropped
        victims = [offer.key for offer in offers if offer in free]
        for key in victims:
            self.drop(key)
        return victims

    def shortage(self, keys: Iterable[ArtifactKey]) -> LimitExceeded | None:
        """The error to raise if a keyframe among these can never fit in the store; None if all fit."""
        for header in (self.entries[key].header for key in keys if key in self.entries):
            needed = store_bytes_min(header.full_snapshot_bytes)
            seal = self.entries[header.key].seal
            needed = min(needed, store_bytes_min(seal.total_bytes)) if seal is not None else needed
            if header.artifact.is_keyframe and self.store.bytes_max < needed:
                return LimitExceeded(
                    f"{header.artifact}: expected a store of at least {needed} bytes for a keyframe of this model, got "
                    f"{self.store.bytes_max}"
                )
        return None

    # ---- giving out

    def frame(self, key: ArtifactKey, index: int) -> Frame | None:
        """A chunk's frame to send; None if we lack it or the disk corrupted it, because a peer would ban us for sending that."""
        held = self._held(key, index)
        return held[1] if held is not None else None

    def chunk(self, key: ArtifactKey, index: int) -> Chunk:
        """A chunk for decoding; CorruptChunk if we lack it or the disk corrupted it."""
        if (held := self._held(key, index)) is not None:
            return held[0]
        whose = self.entries[key].header.artifact if key in self.entries else key.hex()
        raise CorruptChunk(f"chunk {index} of {whose}: expected it in {self.store.folder}, got none")

    def _held(self, key: ArtifactKey, index: int) -> tuple[Chunk, Frame] | None:
        """One of the recent chunks, or read from disk and verified."""
        entry = self.entries.get(key)
        if entry is None or (recent := self.recent.get(key, index)) is not None:
            return recent if entry is not None else None
        if (frame := self.store.chunk(key, index)) is None:
            return None
        try:
            chunk = chunk_of(frame, str(self.store.folder))
            verified = (key, index, entry.signatures[index], entry.digests[index])
            if (chunk.key, chunk.index, signed_as(chunk), digest_of(chunk.payload)) == verified:
                return chunk, frame
        except EchoError as error:
            log.debug("%s", error)
        self.trouble = f"chunk {index} of {entry.header.artifact} in {self.store.folder}: the disk changed it"
        log.error("%s; the chunk is not served", self.trouble)
        self._rotten.add(key)
        return None

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
            self.recent.drop(key)
            self.revision += 1
            self.store.drop(key)

    def empty(self, key: ArtifactKey) -> list[ArtifactKey]:
        """Drops an artifact's chunks but keeps its header and seal; returns other artifacts dropped for it."""
        entry = self.entries[key]
        self.drop(key)
        dropped = self.add_header(entry.header)
        if entry.seal is not None:
            self.add_seal(key, entry.seal)
        return dropped

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


PIECE_BYTES = 64 << 20  # read and verified in a thread at a time, about 0.1 s


async def restored(library: Library, me: PeerId, piece_bytes: int = PIECE_BYTES) -> AsyncIterator[Event]:
    """Takes over what an earlier run left on disk, verified piece by piece in threads, and yields its events. A corrupt file is
    removed and counted; an incomplete artifact of our own is dropped, because it is published again. May be cancelled between
    pieces."""
    for path in await asyncio.to_thread(library.store.left_files):
        try:
            left = await asyncio.to_thread(LeftFile, path)
            while await asyncio.to_thread(left.check_some, piece_bytes):
                pass
            library.take_over(left)
        except (EchoError, OSError) as error:
            log.warning("chunk file %s dropped: %s", path, error)
            await asyncio.to_thread(path.unlink, missing_ok=True)
            library.unsound_files += 1
            continue
        key = left.header.key
        if left.header.publisher == me and left.seal is None:
            library.drop(key)
            continue
        mean_bytes = left.held_bytes // max(1, len(left.digests))
        yield HeaderSeen(None, key, is_wanted=False)
        yield ChunksKept(key, bitmap_of(left.digests), dict.fromkeys(sorted(left.digests), mean_bytes))
        if left.seal is not None:
            yield SealSeen(None, key, left.seal.chunk_count)
