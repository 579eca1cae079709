"""Artifacts on disk: one file each, with records appended as chunks arrive, so that chunks survive a restart.

Guarantees: `read_records` returns only completely written records (a torn tail is cut off); the store never exceeds `bytes_max`;
DiskFull names the folder. The caller verifies what it reads back: a disk is not trusted more than a peer.
Leaves to others: which artifacts to drop (node).
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from echo2.base.errors import DiskFull, LimitExceeded
from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.room import STORE_BYTES_FLOOR, store_bytes_for
from echo2.outside import here

_LENGTH = struct.Struct(">I")
RECORD_BYTES_MAX = 8 << 20
SLOW_CLOSE_BYTES = 64 << 20


@dataclass(slots=True)
class LeftRecords:
    """The usable contents of a file from an earlier run."""

    header: bytes = b""
    seal: bytes = b""
    chunks: dict[int, tuple[int, int]] = field(default_factory=dict)  # index -> offset, length
    end: int = 0


@dataclass(slots=True)
class _File:
    path: Path
    handle: int
    end: int
    chunks: dict[int, tuple[int, int]] = field(default_factory=dict)  # index -> offset, length
    header: bytes = b""
    seal: bytes = b""


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

    def adopt(self, key: ArtifactKey, path: Path, records: LeftRecords) -> None:
        """Continues a file whose records were read with `read_records` and verified."""
        handle = os.open(path, os.O_RDWR)
        before = os.fstat(handle)
        os.ftruncate(handle, records.end)
        os.utime(
            handle, ns=(before.st_atime_ns, before.st_mtime_ns)
        )  # keep the file's age: files are restored oldest first
        self._files[key] = _File(path, handle, records.end, records.chunks, records.header, records.seal)
        self.used_bytes += records.end

    def create(self, key: ArtifactKey, header: bytes) -> None:
        """Creates an artifact's file; truncates an existing file of that name."""
        if key in self._files:
            return
        path = self.folder / f"{key.hex()}.artifact"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise _disk_error(error, self.folder) from None
        self._files[key] = _File(path, handle, 0, header=header)
        self._append(key, header)

    def put_chunk(self, key: ArtifactKey, index: int, frame: bytes | memoryview) -> None:
        offset = self._append(key, frame)
        self._files[key].chunks[index] = (offset, len(frame))

    def put_seal(self, key: ArtifactKey, seal: bytes) -> None:
        self._append(key, seal)
        self._files[key].seal = seal

    def _append(self, key: ArtifactKey, frame: bytes | memoryview) -> int:
        file = self._files[key]
        size = _LENGTH.size + len(frame)
        if self.used_bytes + size > self.bytes_max:
            raise LimitExceeded(f"{self.folder}: expected at most {self.bytes_max} bytes of chunks, got more")
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
        place = file.chunks.get(index) if file is not None else None
        if file is None or place is None:
            return None
        offset, length = place
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
        else:  # closing frees the file's pages, which takes about 0.1 s per GiB
            threading.Thread(target=os.close, args=(file.handle,), name="chunks closed").start()
        self.used_bytes -= file.end

    def close(self) -> None:
        """Closes the files; they stay on disk."""
        for file in self._files.values():
            os.close(file.handle)
        self._files.clear()


def read_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, frame) of each completely written record."""
    with path.open("rb") as file:
        offset = _LENGTH.size
        while len(prefix := file.read(_LENGTH.size)) == _LENGTH.size:
            length = _LENGTH.unpack(prefix)[0]
            if length > RECORD_BYTES_MAX:
                return
            frame = file.read(length)
            if len(frame) != length:
                return
            yield offset, frame
            offset += length + _LENGTH.size


def ends_of_records(path: Path) -> tuple[bytes, bytes]:
    """The first and the last completely written record (empty bytes if none), without reading the others."""
    size = path.stat().st_size
    places: list[tuple[int, int]] = []
    with path.open("rb") as file:
        offset = 0
        while len(prefix := file.read(_LENGTH.size)) == _LENGTH.size:
            length = _LENGTH.unpack(prefix)[0]
            offset += _LENGTH.size
            if length > RECORD_BYTES_MAX or offset + length > size:
                break
            places = [*places[:1], (offset, length)]
            offset += length
            file.seek(offset)
        if not places:
            return b"", b""
        frames = []
        for begin, length in (places[0], places[-1]):
            file.seek(begin)
            frames.append(file.read(length))
    return frames[0], frames[1]


def _disk_error(error: OSError, folder: Path) -> DiskFull:
    what = "no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (error.strerror or str(error))
    return DiskFull(f"{folder}: expected to keep chunks there, got: {what}")
