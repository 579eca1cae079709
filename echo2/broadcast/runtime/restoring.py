"""Restores the artifacts that an earlier run left on disk: reads and verifies them in threads, piece by piece, without blocking.

Guarantees: nothing enters the library unverified; a corrupt file is removed and counted; the work can be cancelled between
pieces. Waits for: the disk. Leaves to others: the layout on disk (chunk_store), what is refetched (node).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import xxhash

from echo2.base.errors import EchoError, MalformedMessage
from echo2.base.ids import PeerId
from echo2.broadcast.chunks import bitmap_of
from echo2.broadcast.events import ChunksKept, Event, HeaderSeen, SealSeen
from echo2.broadcast.runtime.chunk_store import LeftRecords, read_records
from echo2.broadcast.runtime.library import Entry, Library
from echo2.wire import broadcast as wire

log = logging.getLogger("echo2.broadcast")
PIECE_BYTES = 64 << 20


class LeftFile:
    """One artifact's file. May be used from any thread, one call at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = LeftRecords()
        self._entry: Entry | None = None
        self._frames = read_records(path)

    def check_some(self, bytes_max: int) -> bool:
        """Verifies about `bytes_max` bytes; returns whether more may be left. EchoError if a record is corrupt."""
        checked = 0
        for offset, frame in self._frames:
            self._check(offset, frame)
            checked += len(frame)
            if checked >= bytes_max:
                return True
        return False

    def _check(self, offset: int, frame: bytes) -> None:
        message, entry = wire.parse(frame, str(self.path)), self._entry
        match message.WhichOneof("kind"):
            case "header" if entry is None:
                self._entry = Entry(wire.header_from(message.header))
                self._entry.header.verify()
                self.records.header = frame
            case "chunk" if entry is not None:
                chunk = wire.chunk_from(message.chunk)
                entry.digests[chunk.index] = chunk.verify(entry.header.publisher)
                entry.checks[chunk.index] = xxhash.xxh3_64_intdigest(frame)
                entry.held_bytes += len(chunk.payload)
                self.records.chunks[chunk.index] = (offset, len(frame))
            case "seal" if entry is not None:
                entry.seal = wire.seal_from(message.seal)
                entry.seal.verify(entry.header.publisher)
                self.records.seal = frame
            case kind:
                raise MalformedMessage(f"{self.path}: expected a header, then chunks and a seal, got {kind}")
        self.records.end = offset + len(frame)

    @property
    def entry(self) -> Entry:
        if self._entry is None:
            raise MalformedMessage(f"{self.path}: expected an artifact, got no header")
        return self._entry

    def kept(self) -> ChunksKept:
        entry = self.entry
        mean_bytes = entry.held_bytes // max(1, len(entry.digests))
        return ChunksKept(entry.header.key, bitmap_of(entry.digests), dict.fromkeys(sorted(entry.digests), mean_bytes))


async def restored(library: Library, me: PeerId, piece_bytes: int = PIECE_BYTES) -> AsyncIterator[Event]:
    """Yields the events of restored artifacts. An incomplete artifact of our own is dropped, because it is published again."""
    for path in await asyncio.to_thread(library.store.left_files):
        left = LeftFile(path)
        try:
            while await asyncio.to_thread(left.check_some, piece_bytes):
                pass
            library.take_over(path, left.entry, left.records)
            kept = await asyncio.to_thread(left.kept)
        except (EchoError, OSError) as error:
            log.warning("chunk file %s dropped: %s", path, error)
            await asyncio.to_thread(path.unlink, missing_ok=True)
            library.unsound_files += 1
            continue
        if left.entry.header.publisher == me and left.entry.seal is None:
            library.drop(kept.key)
            continue
        yield HeaderSeen(None, kept.key, is_wanted=False)
        yield kept
        if left.entry.seal is not None:
            yield SealSeen(None, kept.key, left.entry.seal.chunk_count)
