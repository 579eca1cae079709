"""The artifacts that a node holds or knows of: verified chunks, on disk and the recent ones in memory.

Guarantees: nothing enters that was not verified; what is read back from disk is compared with what was verified before it is
sent or decoded; when the store is full, the least useful artifact goes first (route.dropped_to_fit).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from echo2.base.errors import CorruptChunk, EchoError, ProtocolError, ResourceError, VersionMismatch
from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.artifact import (
    LINEAGE,
    ArtifactId,
    ArtifactKey,
    BlockAssembler,
    Chunk,
    Header,
    Seal,
    bitmap_of,
    digest_of,
    root_of,
)
from echo2.broadcast.events import ChunksKept, Event, HeaderSeen, SealSeen
from echo2.broadcast.route import ArtifactOffer, dropped_to_fit, joining_path
from echo2.broadcast.store import ChunkStore, Entry, LeftFile, part_of, signed_as
from echo2.wire import broadcast as wire

T = TypeVar("T")
log = logging.getLogger("echo2.broadcast")
Frame = bytes | memoryview  # a chunk's frame, identical on the wire and on disk


ARTIFACTS_MAX = 96  # each keeps a file open
RECENT_BYTES_MAX = 16 << 20  # recently received chunks, so that relaying and decoding them reads no disk


class RecentChunks:
    """The latest verified chunks with their frames (payloads are views), so that they are not read back from disk."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.held_bytes = 0
        self._kept: dict[tuple[ArtifactKey, int], tuple[Chunk, Frame]] = {}

    def add(self, chunk: Chunk, frame: Frame) -> None:
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
    """`revision` rises when an artifact is added, sealed, completed or dropped. `published_unix_s`: of the newest publication that
    ever was here. `on_drop`: called with the key of each that was dropped, also to make room. `back_to`: the version to which a
    learner that was restored from an older backup has gone back, until somebody has followed it there."""

    def __init__(
        self, store: ChunkStore, run_id: RunId, on_drop: Callable[[ArtifactKey], None] = lambda key: None
    ) -> None:
        self._on_drop = on_drop
        self.store, self.run_id = store, run_id
        self.entries: dict[ArtifactKey, Entry] = {}
        self.recent = RecentChunks(RECENT_BYTES_MAX)
        self.unsound_files = 0
        self.revision, self.published_unix_s = 0, 0.0
        self.back_to: Version | None = None
        self._rotten: set[ArtifactKey] = set()

    # ---- from an earlier run

    def take_over(self, left: LeftFile) -> None:
        """Adds an artifact whose file was checked; raises if it is of another run or release."""
        header = left.header
        if header.run_id != self.run_id:
            raise ProtocolError(
                f"{left.entry.path}: expected an artifact of run {self.run_id}, got one of {header.run_id}"
            )
        if header.lineage != LINEAGE:
            raise VersionMismatch(f"{left.entry.path}: expected {LINEAGE}, got {header.lineage!r} of another release")
        self.store.fit(header.full_snapshot_bytes)
        self.store.adopt(left.entry)
        self._enter(left.entry)

    # ---- taking in

    def add_header(self, header: Header) -> None:
        """Enters a verified header; it replaces an unfinished older publication, and all older ones of later versions. DiskFull
        where it cannot be written."""
        for key, entry in list(self.entries.items()):
            age_s = header.published_unix_s - entry.header.published_unix_s
            is_undone = age_s > 0 and entry.artifact.version > header.artifact.version
            if is_undone or (age_s >= 0 and entry.artifact == header.artifact and not entry.is_complete):
                self.back_to = header.artifact.version if is_undone else self.back_to
                self.drop(key)
        while len(self.entries) >= ARTIFACTS_MAX and self._drop_victims(header.key, 1):
            pass
        self.store.fit(header.full_snapshot_bytes)
        self._enter(self._with_room(lambda: self.store.create(header), header.key))

    def _enter(self, entry: Entry) -> None:
        self.entries[entry.header.key] = entry
        self.revision += 1
        self.published_unix_s = max(self.published_unix_s, entry.header.published_unix_s)

    def add_chunk(self, chunk: Chunk, digest: bytes, record: memoryview | None = None) -> bool:
        """Stores a verified chunk; False if its artifact turned out to be sealed wrongly, and is dropped. DiskFull without
        room. `record`: the received frame, of which the payload is a view; None for a chunk made here."""
        entry = self.entries[chunk.key]
        if record is None:
            record = memoryview(wire.chunk_to_bytes(chunk))
            chunk = replace(chunk, payload=record[len(record) - len(chunk.payload) :])
        entry.add(chunk, digest, self._with_room(lambda: self.store.append(entry, record), chunk.key, len(record)))
        self.recent.add(chunk, record)
        return self._is_sound(entry)

    def add_seal(self, key: ArtifactKey, seal: Seal) -> bool:
        """Of a verified seal; False as `add_chunk`."""
        entry = self.entries[key]
        entry.seal = seal
        self.revision += 1
        self._with_room(lambda: self.store.append(entry, wire.seal_to_bytes(seal)), key)
        return self._is_sound(entry)

    def _is_sound(self, entry: Entry) -> bool:
        if entry.seal is None or not entry.is_complete:
            return True
        self.revision += 1
        root = root_of(entry.digests.get(index, b"") for index in range(entry.seal.chunk_count))
        if root == entry.seal.root_sha256:
            return True
        log.error(
            "%s: expected chunks with root %s, got %s; the publisher sealed it wrongly",
            entry.artifact, entry.seal.root_sha256.hex()[:16], root.hex()[:16],
        )  # fmt: skip
        self.drop(entry.header.key)
        return False

    def _with_room(self, write: Callable[[], T], spared: ArtifactKey, size_bytes: int = 1) -> T:
        """What `write` returns, once others were dropped for it. DiskFull where there is nothing to drop."""
        while True:
            try:
                return write()
            except ResourceError:
                if not self._drop_victims(spared, size_bytes):
                    raise

    def _drop_victims(self, spared: ArtifactKey, room_bytes: int) -> bool:
        """Drops the least useful artifacts (route) until `room_bytes` are free; False if there was none to drop. Never drops
        what a newcomer needs to reach the newest version, except that a keyframe at least as new replaces an older one. So it
        may free less than `room_bytes`, or nothing."""
        offers = [
            ArtifactOffer(key, entry.artifact, entry.file_bytes) for key, entry in self.entries.items() if key != spared
        ]
        if not offers:
            return False
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
        return bool(victims)

    # ---- giving out

    def frame(self, key: ArtifactKey, index: int) -> Frame | None:
        """A chunk's frame to send; None if we lack it or the disk corrupted it, because a peer would ban us for sending that."""
        held = self._held(key, index)
        return held[1] if held is not None else None

    def chunk(self, key: ArtifactKey, index: int) -> Chunk:
        """A chunk for decoding; CorruptChunk if we lack it or the disk corrupted it."""
        if (held := self._held(key, index)) is not None:
            return held[0]
        artifact = self.entries[key].artifact if key in self.entries else key.hex()
        raise CorruptChunk(f"chunk {index} of {artifact}: expected it in {self.store.folder}, got none")

    def _held(self, key: ArtifactKey, index: int) -> tuple[Chunk, Frame] | None:
        entry = self.entries.get(key)
        if entry is None or index not in entry.digests:
            return None
        if (recent := self.recent.get(key, index)) is not None:
            return recent
        try:
            frame = self.store.chunk(entry, index)
            part = part_of(frame, str(self.store.folder))
            verified = (key, index, entry.signatures[index], entry.digests[index])
            if isinstance(part, Chunk) and (part.key, part.index, signed_as(part), digest_of(part.payload)) == verified:
                return part, frame
        except (EchoError, OSError) as error:
            log.debug("%s", error)
        log.error(
            "chunk %d of %s in %s: the disk changed it; the chunk is not served",
            index, entry.artifact, self.store.folder,
        )  # fmt: skip
        self._rotten.add(key)
        return None

    def take_rotten(self) -> list[tuple[ArtifactKey, ArtifactId]]:
        """Sealed artifacts with a chunk found corrupted on disk since the last call."""
        self._rotten &= self.entries.keys()
        rotten = [key for key in self._rotten if self.entries[key].seal is not None]
        self._rotten.difference_update(rotten)
        return [(key, self.entries[key].artifact) for key in rotten]

    def header_frame(self, key: ArtifactKey) -> bytes | None:
        entry = self.entries.get(key)
        return wire.header_to_bytes(entry.header) if entry is not None else None

    def seal_frame(self, key: ArtifactKey) -> bytes | None:
        entry = self.entries.get(key)
        return wire.seal_to_bytes(entry.seal) if entry is not None and entry.seal is not None else None

    def drop(self, key: ArtifactKey) -> None:
        self._remove(key)
        self._on_drop(key)

    def _remove(self, key: ArtifactKey) -> None:
        if (entry := self.entries.pop(key, None)) is not None:
            self.recent.drop(key)
            self._rotten.discard(key)  # its chunks that are to come are others
            self.revision += 1
            self.store.drop(entry)

    def close(self) -> None:
        """Closes the files; they stay on disk."""
        for entry in self.entries.values():
            self.store.close(entry)

    def empty(self, key: ArtifactKey) -> None:
        """Drops an artifact's chunks but keeps its header and seal."""
        entry = self.entries[key]
        self._remove(key)
        self.add_header(entry.header)
        if entry.seal is not None:
            self.add_seal(key, entry.seal)

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
        key = self.find(artifact)
        entry = self.entries[key] if key is not None else None
        return entry.seal.fingerprint if entry is not None and entry.seal is not None else ""

    def find(self, artifact: ArtifactId) -> ArtifactKey | None:
        """The newest publication of an artifact; complete ones first."""
        keys = [key for key, entry in self.entries.items() if entry.artifact == artifact]
        rank = lambda key: (self.entries[key].is_complete, self.entries[key].header.published_unix_s)  # noqa: E731
        return max(keys, key=rank, default=None)


PIECE_BYTES = 64 << 20  # read and verified in a thread at a time, about 0.1 s


async def restored(library: Library, me: PeerId) -> AsyncIterator[Event]:
    """Takes over what an earlier run left on disk, verified piece by piece in threads, and yields its events. A corrupt file is
    removed and counted; an incomplete artifact of our own is dropped, because it is published again. May be cancelled between
    pieces."""
    for path in await asyncio.to_thread(library.store.left_files):
        try:
            left = await asyncio.to_thread(LeftFile, path)
            while await asyncio.to_thread(left.check_some, PIECE_BYTES):
                pass
            library.take_over(left)
        except (EchoError, OSError) as error:
            log.warning("chunk file %s dropped: %s", path, error)
            await asyncio.to_thread(path.unlink, missing_ok=True)
            library.unsound_files += 1
            continue
        key, entry = left.header.key, left.entry
        if left.header.publisher == me and entry.seal is None:
            library.drop(key)
            continue
        mean_bytes = entry.held_bytes // max(1, len(entry.digests))
        yield HeaderSeen(None, key, is_wanted=False)
        yield ChunksKept(key, bitmap_of(entry.digests), dict.fromkeys(sorted(entry.digests), mean_bytes))
        if entry.seal is not None:
            yield SealSeen(None, key, entry.seal.chunk_count)
