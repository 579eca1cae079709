"""Artifacts on disk: one file each, with records appended as chunks arrive, so that chunks survive a restart.

Guarantees: only completely written records of a file are read (a torn tail is cut off); the store never exceeds `bytes_max`;
DiskFull names the folder. What is read back is verified: a disk is not trusted more than a peer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.base.errors import NO_ROOM, DiskFull, EchoError, FingerprintMismatch, MalformedMessage, StateError
from echo2.base.ids import Version
from echo2.broadcast.artifact import (
    LINEAGE,
    STORE_BYTES_FLOOR,
    ArtifactId,
    BlockAssembler,
    Chunk,
    Header,
    Seal,
    expected_bytes,
    store_bytes_for,
)
from echo2.broadcast.route import ArtifactOffer, WorkerLink, plan_catch_up
from echo2.outside import here
from echo2.wire import broadcast as wire

if TYPE_CHECKING:
    from echo2.weights import HostWeights

log = logging.getLogger("echo2.broadcast")
_LENGTH = struct.Struct(">I")
RECORD_BYTES_MAX = 8 << 20  # twice a chunk
SLOW_CLOSE_BYTES = 64 << 20  # closing a deleted file frees its pages, which takes about 0.1 s per GiB
Record = tuple[int, int]  # where a record lies in its file: offset and length of the frame


@dataclass(slots=True)
class Entry:
    """One artifact that this node holds or knows of, and its file; digests, signatures and records are by chunk."""

    header: Header
    path: Path
    seal: Seal | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    signatures: dict[int, bytes] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    held_bytes: int = 0  # of payloads
    file_bytes: int = 0
    handle: int = -1

    @property
    def artifact(self) -> ArtifactId:
        return self.header.artifact

    @property
    def total_bytes(self) -> int:
        """0: not sealed yet."""
        return self.seal.total_bytes if self.seal is not None else 0

    @property
    def is_complete(self) -> bool:
        return self.seal is not None and len(self.digests) == self.seal.chunk_count

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Sort key, newest last; within a version, artifacts being fetched come after those only announced."""
        return self.artifact.version, self.header.is_pushed or bool(self.digests), self.header.published_unix_s

    @property
    def missing_bytes(self) -> float:
        if self.seal is not None:
            return max(0, self.seal.total_bytes - self.held_bytes)
        return max(1.0, expected_bytes(self.artifact, self.header.full_snapshot_bytes) - self.held_bytes)

    def add(self, chunk: Chunk, digest: bytes, record: Record) -> None:
        self.digests[chunk.index], self.records[chunk.index] = digest, record
        self.signatures[chunk.index] = signed_as(chunk)
        self.held_bytes += len(chunk.payload)


class ChunkStore:
    """The files of artifacts. The limit `bytes_max` follows the size of the weights (`fit`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_max = STORE_BYTES_FLOOR
        self.used_bytes = 0
        self._closing: list[threading.Thread] = []
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def fit(self, weights_bytes: int) -> None:
        """Raises the limit to fit weights of this size."""
        self.bytes_max = max(self.bytes_max, store_bytes_for(weights_bytes))

    def left_files(self) -> list[Path]:
        """Files that an earlier run left, oldest first."""
        return sorted(self.folder.glob("*.artifact"), key=lambda path: (path.stat().st_mtime, path.name))

    def adopt(self, entry: Entry) -> None:
        """Continues a file whose chunks were all checked."""
        entry.handle = os.open(entry.path, os.O_RDWR)
        if os.fstat(entry.handle).st_size > entry.file_bytes:  # else it keeps its time: files are restored oldest first
            os.ftruncate(entry.handle, entry.file_bytes)
        self.used_bytes += entry.file_bytes

    def create(self, header: Header) -> Entry:
        """Creates an artifact's file; truncates an existing one of that name."""
        entry = Entry(header, self.folder / f"{header.key.hex()}.artifact")
        try:
            entry.handle = os.open(entry.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise _disk_error(error, self.folder) from None
        try:
            self.append(entry, wire.header_to_bytes(header))
        except DiskFull:
            self.drop(entry)
            raise
        return entry

    def append(self, entry: Entry, frame: bytes | memoryview) -> Record:
        size = _LENGTH.size + len(frame)
        if self.used_bytes + size > self.bytes_max:
            raise DiskFull(f"{self.folder}: expected at most {self.bytes_max} bytes of chunks, got more")
        while True:
            try:
                written = here().files.write_at(entry.handle, [_LENGTH.pack(len(frame)), frame], entry.file_bytes)
            except OSError as error:
                if error.errno not in NO_ROOM or not self._closing:
                    raise _disk_error(error, self.folder) from None
                written = 0
            if written == size:
                break
            if not self._closing:
                raise DiskFull(f"{self.folder}: expected room for {size} bytes, wrote {written}")
            self._closing.pop().join()  # what was dropped has its room until then
        record = entry.file_bytes + _LENGTH.size, len(frame)
        entry.file_bytes += size
        self.used_bytes += size
        return record

    def chunk(self, entry: Entry, index: int) -> bytes:
        """The frame of a chunk, as far as it is there. OSError where it cannot be read."""
        offset, length = entry.records.get(index, (0, 0))
        return os.pread(entry.handle, length, offset)

    def close(self, entry: Entry) -> None:
        """The file stays on disk."""
        os.close(entry.handle)
        entry.handle = -1
        entry.records.clear()

    def drop(self, entry: Entry) -> None:
        if entry.handle < 0:  # closed: the next run takes it over
            return
        with contextlib.suppress(OSError):
            entry.path.unlink(missing_ok=True)
        if entry.file_bytes < SLOW_CLOSE_BYTES:
            self.close(entry)
        else:
            self._closing = [thread for thread in self._closing if thread.is_alive()]
            self._closing.append(threading.Thread(target=os.close, args=(entry.handle,), name="chunks closed"))
            self._closing[-1].start()
        self.used_bytes -= entry.file_bytes


class LeftFile:
    """An artifact's file from an earlier run; EchoError where it is not sound. May be used from any thread, one call at a time.
    `entry`: with the chunks checked so far, and the seal if it is the last record."""

    def __init__(self, path: Path) -> None:
        self._all = _records_of(path)
        frames = [_read(path, record) for record in {self._all[0], self._all[-1]}] if self._all else []
        parts = {(part := wire.parse(frame, str(path))).WhichOneof("kind"): part for frame in frames}
        if "header" not in parts:
            raise MalformedMessage(f"{path}: expected an artifact, got no header")
        self.header = wire.header_from(parts["header"].header)
        self.header.verify()
        self.entry = Entry(self.header, path, file_bytes=sum(self._all[-1]))
        self._unchecked = self.chunks()
        if "seal" in parts:
            self._take_seal(wire.seal_from(parts["seal"].seal))

    def _take_seal(self, seal: Seal) -> None:
        seal.verify(self.header.publisher)
        if seal.key != self.header.key:
            raise MalformedMessage(f"{self.entry.path}: expected the seal of {self.header.artifact}, got another's")
        self.entry.seal = seal

    def chunks(self) -> Iterator[tuple[Chunk, bytes, Record]]:
        """Verified chunks in the file's order, with their digests."""
        path = self.entry.path
        with path.open("rb") as file:
            for record in self._all[1:]:
                offset, length = record
                file.seek(offset)
                part = part_of(file.read(length), str(path))
                if isinstance(part, Seal):
                    self._take_seal(part)
                    continue
                if part.key != self.header.key:
                    raise MalformedMessage(f"{path}: expected chunks of {self.header.artifact}, got another's")
                yield part, part.verify(self.header.publisher), record

    def check_some(self, bytes_max: int) -> bool:
        """Checks about `bytes_max` bytes of chunks; returns whether more may be left."""
        checked = 0
        for chunk, digest, record in self._unchecked:
            self.entry.add(chunk, digest, record)
            checked += record[1]
            if checked >= bytes_max:
                return True
        return False

    def blocks(self) -> Iterator[bytes]:
        """The blocks of a complete artifact in order."""
        assembler = BlockAssembler()
        for expected, (chunk, _, _) in enumerate(self.chunks()):
            if chunk.index != expected:
                raise StateError(
                    f"{self.entry.path}: expected chunk {expected} of {self.header.artifact}, got {chunk.index}"
                )
            block = assembler.add(chunk.payload, chunk.ends_block)
            if block is not None:
                yield block


def _records_of(path: Path) -> list[Record]:
    """All completely written records, without reading them."""
    size, offset, records = path.stat().st_size, 0, list[Record]()
    with path.open("rb") as file:
        while len(prefix := file.read(_LENGTH.size)) == _LENGTH.size:
            length = _LENGTH.unpack(prefix)[0]
            offset += _LENGTH.size
            if length > RECORD_BYTES_MAX or offset + length > size:
                break
            records.append((offset, length))
            offset += length
            file.seek(offset)
    return records


def _read(path: Path, record: Record) -> bytes:
    with path.open("rb") as file:
        file.seek(record[0])
        return file.read(record[1])


def part_of(frame: bytes, source: str) -> Chunk | Seal:
    """The chunk or seal in a record; MalformedMessage if it is neither."""
    if (incoming := wire.chunk_in(frame, source)) is not None:
        return incoming.chunk
    message = wire.parse(frame, source)
    if (kind := message.WhichOneof("kind")) != "seal":
        raise MalformedMessage(f"{source}: expected chunks and a seal, got another {kind}")
    return wire.seal_from(message.seal)


def signed_as(chunk: Chunk) -> bytes:
    """Its signature, and the one thing beside key, index and payload that is signed."""
    return chunk.signature + (b"\1" if chunk.ends_block else b"\0")


def _disk_error(error: OSError, folder: Path) -> DiskFull:
    what = "no space left" if error.errno in NO_ROOM else (error.strerror or str(error))
    return DiskFull(f"{folder}: expected to keep chunks there, got: {what}")


_DISK = WorkerLink(1e9, 1e-4)  # bytes/s and seconds of a plain SSD


class LeftVersions:
    """The complete artifacts in the chunk store at `folder`, which is of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: list[LeftFile] | None = None

    @property
    def artifacts(self) -> list[LeftFile]:
        if self._found is None:
            paths = sorted(self._folder.glob("*.artifact"))
            self._found = [left for path in paths if (left := self._read(path)) is not None]
        return self._found

    def _read(self, path: Path) -> LeftFile | None:
        try:
            left = LeftFile(path)
        except (EchoError, OSError) as error:
            log.debug("chunk file %s holds no whole artifact: %s", path, error)
            return None
        return left if left.header.lineage == LINEAGE and left.entry.seal is not None else None

    def fingerprint_of(self, version: Version) -> str:
        """The version's published fingerprint in hex; empty if no complete artifact of it is left."""
        seals = (left.entry.seal for left in self.artifacts if left.header.artifact.version == version)
        return next((seal.fingerprint for seal in seals if seal is not None), "")

    def bring(self, host: HostWeights, version: Version, fingerprint: str) -> list[ArtifactId]:
        """Brings `host` from the version that it holds to `version`; returns the artifacts it applied."""
        path = self._path(host.version, version) if host.version != version else []
        applied = [self._apply(left, host) for left in path]
        if (actual := f"{host.fingerprint():016x}") != fingerprint:
            raise FingerprintMismatch(
                f"version {version} from {self._folder}: expected fingerprint {fingerprint}, got {actual}"
            )
        return applied

    def _path(self, start: Version | None, version: Version) -> list[LeftFile]:
        by_key = {left.header.key: left for left in self.artifacts}
        offers = [
            ArtifactOffer(key, left.header.artifact, left.entry.file_bytes, left.header.full_snapshot_bytes)
            for key, left in by_key.items()
        ]
        path = plan_catch_up(start, version, offers, _DISK)
        if path is None:
            held = ", ".join(str(left.header.artifact) for left in self.artifacts) or "nothing whole"
            raise StateError(
                f"{self._folder}: expected artifacts that lead from version {start} to the published {version}, found {held}"
            )
        return [by_key[key] for key in path.keys]

    def _apply(self, left: LeftFile, host: HostWeights) -> ArtifactId:
        from echo2.weights import ContainerDecoder  # torch, which most nodes that keep chunks do without

        decoder = ContainerDecoder(host)
        for block in left.blocks():
            decoder.feed(block)
        host.commit(decoder.finish())
        return left.header.artifact
