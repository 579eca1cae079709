"""Checksums of a checkpoint's files, computed while writing and verified while reading.

Guarantees: a changed byte, or a file that is missing, shorter, longer or foreign to the checkpoint, raises a `StateError` that
names file and place before any data of that block is used; verification costs no second read from disk: a block is verified just
before tensors are copied from it, which then find it in memory. Several threads verify blocks (xxh3 releases the GIL). Leaves to
others: what is in the files (checkpoint).

`sums.json` holds, per file, its size and the XXH3-128 of each block, and a checksum over all that.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from echo2.base.errors import StateError
from echo2.outside import here

BLOCK_BYTES = 16 << 20
THREADS_MAX = 8
SUMS_FILE = "sums.json"
_PART_SUFFIX = ".sums"


@dataclass(frozen=True, slots=True)
class FileSums:
    """Checksums of one file. `size` in bytes. `blocks`: one hex digest per `BLOCK_BYTES`; the last block may be shorter."""

    size: int
    blocks: tuple[str, ...]


class SummingFile:
    """Passes writes through to `file` and computes their checksums."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size = 0
        self._blocks: list[str] = []
        self._open_block = xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        while view:
            piece = view[: BLOCK_BYTES - self._size % BLOCK_BYTES]
            piece = piece[: here().files.write(self._file.fileno(), piece)]
            self._open_block.update(piece)
            self._size += len(piece)
            if self._size % BLOCK_BYTES == 0:
                self._end_block()
            view = view[len(piece) :]
        return len(data)

    def _end_block(self) -> None:
        self._blocks.append(self._open_block.hexdigest())
        self._open_block = xxhash.xxh3_128()

    def sums(self) -> FileSums:
        """Returns the checksums. Call it once, after the last write."""
        if self._size % BLOCK_BYTES:
            self._end_block()
        return FileSums(self._size, tuple(self._blocks))

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Does nothing: writes are unbuffered."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


@contextmanager
def written_with_sums(path: Path) -> Iterator[SummingFile]:
    """Opens a new file for writing; its checksums are in a file next to it until `gather_sums`."""
    with path.open("wb", buffering=0) as file:
        summing = SummingFile(file)
        yield summing
    _write_text(path.with_name(part_of(path.name)), json.dumps(_as_json(summing.sums())))


def part_of(name: str) -> str:
    """Name of the file that holds the checksums of file `name` until `gather_sums`."""
    return name + _PART_SUFFIX


def gather_sums(folder: Path) -> None:
    """Merges the checksum files of all ranks into `sums.json`. Every file in `folder` must have been written with checksums."""
    parts = {path.name.removesuffix(_PART_SUFFIX): path for path in _listed(folder) if path.suffix == _PART_SUFFIX}
    files = {name: json.loads(path.read_text()) for name, path in sorted(parts.items())}
    _write_text(folder / SUMS_FILE, json.dumps({"files": files, "sum": _sum_of(files)}))
    for path in parts.values():
        path.unlink()


def read_sums(folder: Path) -> dict[str, FileSums] | None:
    """Reads the checksums by file name and compares names and sizes with the folder; None if the checkpoint has no checksums.

    Raises `StateError` if `sums.json` or the set of files is damaged.
    """
    path = folder / SUMS_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        files = content["files"]
        if content["sum"] != _sum_of(files):
            raise ValueError("its own sum differs")
        sums = {str(name): FileSums(int(said["size"]), tuple(said["blocks"])) for name, said in files.items()}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise damaged(folder, f"{SUMS_FILE} as it was written, found it changed ({error})") from None
    there = {path.name: path.stat().st_size for path in _listed(folder) if path.name != SUMS_FILE}
    for name, said in sums.items():
        if there.get(name) != said.size:
            came = "none" if name not in there else f"{there[name]} bytes"
            raise damaged(folder, f"{name} of {said.size} bytes, found {came}")
    if unknown := sorted(there.keys() - sums.keys()):
        raise damaged(folder, f"only files of this checkpoint, found {unknown[0]}")
    return sums


def damaged(folder: Path, what: str) -> StateError:
    """The error for any damage; the remedy is always a backup or the previous checkpoint."""
    return StateError(
        f"checkpoint {folder}: expected {what}. Restore this folder from a backup; or remove it to go on from the "
        "checkpoint before, whose batches since are trained on again from the journal"
    )


class CheckedFile:
    """A file that is verified from front to back, some blocks ahead of the requested position."""

    def __init__(self, path: Path, sums: FileSums) -> None:
        self._path = path
        self._sums = sums
        self._checked = 0  # blocks
        self._threads = min(THREADS_MAX, os.cpu_count() or 1)

    def check_to(self, end: int) -> None:
        """Verifies all bytes before offset `end`; raises `StateError` if a block differs."""
        wanted = -(-end // BLOCK_BYTES)
        if wanted <= self._checked:
            return
        last = min(len(self._sums.blocks), max(wanted, self._checked + 2 * self._threads))
        with (
            self._path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
            ThreadPoolExecutor(self._threads) as pool,
        ):
            indices = range(self._checked, last)
            for index, found in zip(indices, pool.map(lambda i: _block_sum(view, i), indices), strict=True):
                if found != self._sums.blocks[index]:
                    raise damaged(
                        self._path.parent,
                        f"bytes {index * BLOCK_BYTES} to {(index + 1) * BLOCK_BYTES} of {self._path.name} with the sum "
                        f"{self._sums.blocks[index]}, found {found}",
                    )
        self._checked = last

    def check_all(self) -> None:
        self.check_to(self._sums.size)


def _block_sum(view: memoryview, index: int) -> str:
    with view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES] as block:
        return xxhash.xxh3_128_hexdigest(block)


def _as_json(sums: FileSums) -> dict[str, object]:
    return {"size": sums.size, "blocks": list(sums.blocks)}


def _sum_of(files: Mapping[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir())
