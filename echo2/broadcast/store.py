"""Artifacts on disk: one file each, with records appended as chunks arrive, so that chunks survive a restart.

Guarantees: only completely written records of a file are read (a torn tail is cut off); the store never exceeds `bytes_max`;
DiskFull names the folder. What is read back is verified: a disk is not trusted more than a peer. Leaves to others: which artifacts
to drop (library).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.base.errors import DiskFull, EchoError, FingerprintMismatch, MalformedMessage, StateError
from echo2.base.ids import RunId, Version
from echo2.base.staged import FORMAT_VERSION
from echo2.broadcast.artifact import (
    STORE_BYTES_FLOOR,
    ArtifactId,
    ArtifactKey,
    BlockAssembler,
    Chunk,
    Seal,
    store_bytes_for,
)
from echo2.broadcast.route import ArtifactOffer, WorkerLink, plan_catch_up
from echo2.outside import here
from echo2.wire import broadcast as wire
from echo2.wire.broadcast import chunk_in

if TYPE_CHECKING:
    from echo2.weights import HostWeights

log = logging.getLogger("echo2.broadcast")
_LENGTH = struct.Struct(">I")
RECORD_BYTES_MAX = 8 << 20  # twice a chunk
SLOW_CLOSE_BYTES = 64 << 20  # closing a deleted file frees its pages, which takes about 0.1 s per GiB
Record = tuple[int, int]
"""Where a record lies in its file: offset and length of the frame."""


@dataclass(slots=True)
class _File:
    path: Path
    handle: int
    end: int
    chunks: dict[int, Record] = field(default_factory=dict)


class ChunkStore:
    """Artifact files by key. `bytes_max` 0: the limit follows the size of the weights (`fit`)."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self.folder = folder
        self.bytes_max = bytes_max or STORE_BYTES_FLOOR
        self._follows_weights = bytes_max == 0
        self.used_bytes = 0
        self._files: dict[ArtifactKey, _File] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def fit(self, weights_bytes: int) -> None:
        """Raises the limit to fit weights of this size, unless the user set a limit."""
        if self._follows_weights:
            self.bytes_max = max(self.bytes_max, store_bytes_for(weights_bytes))

    def left_files(self) -> list[Path]:
        """Files that an earlier run left, oldest first."""
        return sorted(self.folder.glob("*.artifact"), key=lambda path: (path.stat().st_mtime, path.name))

    def adopt(self, left: LeftFile) -> None:
        """Continues a file whose chunks were all checked."""
        handle = os.open(left.path, os.O_RDWR)
        before = os.fstat(handle)
        os.ftruncate(handle, left.end)
        os.utime(handle, ns=(before.st_atime_ns, before.st_mtime_ns))  # files are restored oldest first
        self._files[left.header.key] = _File(left.path, handle, left.end, left.records)
        self.used_bytes += left.end

    def create(self, key: ArtifactKey, header: bytes) -> None:
        """Creates an artifact's file; truncates an existing file of that name."""
        if key in self._files:
            return
        path = self.folder / f"{key.hex()}.artifact"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise _disk_error(error, self.folder) from None
        self._files[key] = _File(path, handle, 0)
        self._append(key, header)

    def put_chunk(self, key: ArtifactKey, index: int, frame: bytes | memoryview) -> None:
        offset = self._append(key, frame)
        self._files[key].chunks[index] = (offset, len(frame))

    def put_seal(self, key: ArtifactKey, seal: bytes) -> None:
        self._append(key, seal)

    def _append(self, key: ArtifactKey, frame: bytes | memoryview) -> int:
        file = self._files[key]
        size = _LENGTH.size + len(frame)
        if self.used_bytes + size > self.bytes_max:
            raise DiskFull(f"{self.folder}: expected at most {self.bytes_max} bytes of chunks, got more")
        try:
            written = here().files.write_at(file.handle, [_LENGTH.pack(len(frame)), frame], file.end)
        except OSError as error:
            raise _disk_error(error, self.folder) from None
        if written != size:
            raise DiskFull(f"{self.folder}: expected room for {size} bytes, wrote {written}")
        offset = file.end + _LENGTH.size
        file.end += size
        self.used_bytes += size
        return offset

    def chunk(self, key: ArtifactKey, index: int) -> bytes | None:
        """The frame of a chunk; None if it is not stored."""
        file = self._files.get(key)
        if file is None or index not in file.chunks:
            return None
        offset, length = file.chunks[index]
        frame = os.pread(file.handle, length, offset)
        return frame if len(frame) == length else None

    def size_of(self, key: ArtifactKey) -> int:
        """Bytes of an artifact's file; 0 if it has none."""
        file = self._files.get(key)
        return file.end if file is not None else 0

    def drop(self, key: ArtifactKey) -> None:
        file = self._files.pop(key, None)
        if file is None:
            return
        with contextlib.suppress(OSError):
            file.path.unlink(missing_ok=True)
        if file.end < SLOW_CLOSE_BYTES:
            os.close(file.handle)
        else:
            threading.Thread(target=os.close, args=(file.handle,), name="chunks closed").start()
        self.used_bytes -= file.end

    def close(self) -> None:
        """Closes the files; they stay on disk."""
        for file in self._files.values():
            os.close(file.handle)
        self._files.clear()


class LeftFile:
    """An artifact's file from an earlier run; EchoError where it is not sound. May be used from any thread, one call at a time.

    `seal`: None if it has none yet; `digests`, `signatures` and `records`: of the chunks checked so far, by index.
    """

    def __init__(self, path: Path) -> None:
        """Reads header and, if it is the last record, the seal."""
        self.path = path
        self.digests: dict[int, bytes] = {}
        self.signatures: dict[int, bytes] = {}
        self.records: dict[int, Record] = {}
        self.held_bytes = 0
        self.seal: Seal | None = None
        self._all = _records_of(path)
        self._unchecked = self.chunks()
        frames = [_read(path, record) for record in {self._all[0], self._all[-1]}] if self._all else []
        parts = {(part := wire.parse(frame, str(path))).WhichOneof("kind"): part for frame in frames}
        if "header" not in parts:
            raise MalformedMessage(f"{path}: expected an artifact, got no header")
        self.header = wire.header_from(parts["header"].header)
        self.header.verify()
        if "seal" in parts:
            self._take_seal(wire.seal_from(parts["seal"].seal))

    @property
    def end(self) -> int:
        offset, length = self._all[-1]
        return offset + length

    def _take_seal(self, seal: Seal) -> None:
        seal.verify(self.header.publisher)
        if seal.key != self.header.key:
            raise MalformedMessage(f"{self.path}: expected the seal of {self.header.artifact}, got another's")
        self.seal = seal

    def chunks(self) -> Iterator[tuple[Chunk, bytes, Record]]:
        """Verified chunks in the file's order, with their digests."""
        with self.path.open("rb") as file:
            for record in self._all[1:]:
                offset, length = record
                file.seek(offset)
                chunk, seal = _chunk_or_seal(file.read(length), str(self.path))
                if seal is not None:
                    self._take_seal(seal)
                if chunk is None:
                    continue
                if chunk.key != self.header.key:
                    raise MalformedMessage(f"{self.path}: expected chunks of {self.header.artifact}, got another's")
                yield chunk, chunk.verify(self.header.publisher), record

    def check_some(self, bytes_max: int) -> bool:
        """Checks about `bytes_max` bytes of chunks; returns whether more may be left."""
        checked = 0
        for chunk, digest, record in self._unchecked:
            self.digests[chunk.index], self.records[chunk.index] = digest, record
            self.signatures[chunk.index] = signed_as(chunk)
            self.held_bytes += len(chunk.payload)
            checked += record[1]
            if checked >= bytes_max:
                return True
        return False

    def blocks(self) -> Iterator[bytes]:
        """The blocks of a complete artifact in order."""
        assembler = BlockAssembler()
        for expected, (chunk, _, _) in enumerate(self.chunks()):
            if chunk.index != expected:
                raise StateError(f"{self.path}: expected chunk {expected} of {self.header.artifact}, got {chunk.index}")
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


def _chunk_or_seal(frame: bytes, whose: str) -> tuple[Chunk | None, Seal | None]:
    if (came := chunk_in(frame, whose)) is not None:
        return came.chunk, None
    message = wire.parse(frame, whose)
    match message.WhichOneof("kind"):
        case "chunk":
            return wire.chunk_from(message.chunk), None
        case "seal":
            return None, wire.seal_from(message.seal)
        case kind:
            raise MalformedMessage(f"{whose}: expected chunks and a seal, got {kind}")


def signed_as(chunk: Chunk) -> bytes:
    """Its signature, and the one thing beside key, index and payload that is signed."""
    return chunk.signature + (b"\1" if chunk.ends_block else b"\0")


def chunk_of(frame: bytes, whose: str) -> Chunk:
    """The chunk in a record; MalformedMessage if it is none."""
    chunk, _ = _chunk_or_seal(frame, whose)
    if chunk is None:
        raise MalformedMessage(f"{whose}: expected a chunk, got a seal")
    return chunk


def _disk_error(error: OSError, folder: Path) -> DiskFull:
    what = "no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (error.strerror or str(error))
    return DiskFull(f"{folder}: expected to keep chunks there, got: {what}")


_DISK = WorkerLink(1e9, 1e-4)  # bytes/s and seconds of a plain SSD


class LeftVersions:
    """The complete artifacts of a run in the chunk store at `folder`."""

    def __init__(self, folder: Path, run_id: RunId, lineage: str = f"delta {FORMAT_VERSION}") -> None:
        self._folder, self._run_id, self._lineage = folder, run_id, lineage
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
        is_ours = (left.header.run_id, left.header.lineage) == (self._run_id, self._lineage)
        return left if is_ours and left.seal is not None else None

    def fingerprint_of(self, version: Version) -> str:
        """The version's published fingerprint in hex; empty if no complete artifact of it is left."""
        seals = (left.seal for left in self.artifacts if left.header.artifact.version == version)
        return next((seal.fingerprint for seal in seals if seal is not None), "")

    def bring(self, host: HostWeights, version: Version, fingerprint: str) -> list[ArtifactId]:
        """Brings `host` from the version that it holds to `version`; returns the artifacts it applied."""
        if host.version != version:
            applied = [self._apply(left, host) for left in self._path(host.version, version)]
        else:
            applied = []
        if (found := f"{host.fingerprint():016x}") != fingerprint:
            raise FingerprintMismatch(
                f"version {version} from {self._folder}: expected fingerprint {fingerprint}, got {found}"
            )
        return applied

    def _path(self, start: Version | None, version: Version) -> list[LeftFile]:
        by_key = {left.header.key: left for left in self.artifacts}
        offers = [
            ArtifactOffer(key, left.header.artifact, left.end, left.header.full_snapshot_bytes)
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


class FileSpill:
    """An unlinked file in `folder`, which must be on a disk; created at the first `put`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._file = -1
        self._end = 0

    def put(self, data: bytes) -> int:
        """Appends bytes; returns their offset."""
        with self._lock:
            if self._file < 0:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file, path = tempfile.mkstemp(dir=self._folder, prefix="staged-")
                Path(path).unlink()
            place, self._end = self._end, self._end + len(data)
        view = memoryview(data)
        while view:
            view = view[os.pwrite(self._file, view, place + len(data) - len(view)) :]
        return place

    def get(self, place: int, size: int) -> bytes:
        """Reads `size` bytes at an offset; fewer if the file is truncated."""
        parts: list[bytes] = []
        while size and (part := os.pread(self._file, size, place)):
            parts.append(part)
            place, size = place + len(part), size - len(part)
        return b"".join(parts)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
