"""Files of a virtual machine: real files in a folder of its own, with a record of how much would survive a power cut.

Guarantees: data synced through `Files` survives. After a power cut, a file keeps only a part of the data added since its last
sync, possibly torn; a file never synced may be gone, and renames not synced with their folder may be undone. A full disk accepts
no more bytes. After a crash, the next process works on a copy of the folder, so nothing that the ended process still writes is
seen again. Leaves to others: what files mean. SQLite syncs by itself: of its files, a power cut only shortens the write-ahead log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

PLENTY_BYTES = 1 << 40  # a disk that is never full
# SQLite syncs by itself, outside these files; locks and sockets need none.
SELF_SYNCED = (".sqlite", ".sqlite-wal", ".sqlite-shm", "lock", ".lock", ".sock", ".link")


class VirtualDisk:
    """The disk. `folder`: where the present process of the machine keeps its files."""

    def __init__(self, root: Path) -> None:
        self._root, self._lives = root, 0
        self.folder = root / "0"
        self.folder.mkdir(parents=True)
        self.is_full = False
        self.boots = 1
        self._synced: dict[str, int] = {}  # path in the folder -> bytes that survive
        self._logs: dict[str, tuple[bytes, int]] = {}  # by path of a SQLite log: its salt and the frames that survive
        self._renamed: dict[str, bytes | None] = {}  # renamed files whose folder is not synced yet -> former content

    def key(self, path: Path) -> str | None:
        with contextlib.suppress(ValueError):
            return str(path.relative_to(self.folder))
        return None  # written by a process that has ended

    def synced(self, path: Path) -> None:
        key = self.key(path)
        if key is None:
            return
        if path.is_dir():
            for name in [name for name in self._renamed if str(Path(name).parent) == (key or ".")]:
                del self._renamed[name]
            return
        self._synced[key] = path.stat().st_size
        if path.name.endswith("-wal"):
            self._logs[key] = _frames_of(path.read_bytes())

    def renamed(self, old: Path, new: Path, before: bytes | None) -> None:
        old_key, new_key = self.key(old), self.key(new)
        if old_key is None or new_key is None:
            return
        if new.is_dir():
            moved = {n: size for n, size in self._synced.items() if n.startswith(f"{old_key}/")}
            for name, size in moved.items():
                self._synced[new_key + name.removeprefix(old_key)] = size
                del self._synced[name]
            return
        self._synced[new_key] = self._synced.pop(old_key, 0)
        self._renamed[new_key] = before

    def crash(self) -> None:
        """Copies the files for the next process; whatever the ended process still writes goes to the old copy."""
        old, self._lives = self.folder, self._lives + 1
        self.folder = self._root / str(self._lives)
        shutil.copytree(old, self.folder, symlinks=True, ignore=_sockets)

    def power_cut(self, rng: random.Random) -> int:
        """Discards unsynced data, after `crash`; returns how many files lost something."""
        self.boots += 1
        lost = 0
        for path in sorted(self.folder.rglob("*.sqlite-wal")):
            lost += _cut_log(path, rng, self._logs.get(str(path.relative_to(self.folder))))
        for path in sorted(self.folder.rglob("*")):
            key = str(path.relative_to(self.folder))
            if not path.is_file() or path.name.endswith(SELF_SYNCED) or "-wal" in path.name or "-shm" in path.name:
                continue
            if key in self._renamed and rng.random() < 0.5:
                lost += 1
                before = self._renamed[key]
                if before is None:
                    path.unlink()
                else:
                    path.write_bytes(before)
                continue
            size = path.stat().st_size
            kept = min(size, self._synced.get(key, 0))
            if kept < size:
                lost += 1
                dated = path.stat()
                os.truncate(path, rng.randint(kept, size))
                os.utime(path, ns=(dated.st_atime_ns, dated.st_mtime_ns))
                if key not in self._synced and rng.random() < 0.5:
                    path.unlink()
        self._renamed.clear()
        self._synced = {key: size for key, size in self._synced.items() if (self.folder / key).exists()}
        for path in self.folder.rglob("*"):  # whatever survived the power cut is on the disk
            if path.is_file():
                self._synced[str(path.relative_to(self.folder))] = path.stat().st_size
        return lost

    def wipe(self) -> None:
        """Empties the disk, as if it were a new one."""
        for path in list(self.folder.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._synced.clear()
        self._renamed.clear()

    def rot(self, rng: random.Random, pattern: str) -> str | None:
        """Flips one bit in a random file that matches; returns the place, or None if no file matches."""
        files = [path for path in sorted(self.folder.glob(pattern)) if path.is_file() and path.stat().st_size > 64]
        if not files:
            return None
        path = rng.choice(files)
        before = path.stat()
        place = rng.randrange(before.st_size)
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return f"byte {place} of {path.name}"


class VirtualFiles:
    """`Files` of one process. `now`: virtual time, for the files' timestamps. `synced`: called by each sync, to spend its time."""

    def __init__(self, disk: VirtualDisk, now: Callable[[], float], synced: Callable[[], None]) -> None:
        self._disk, self._now, self._synced = disk, now, synced

    def check_room(self) -> None:
        if self._disk.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, handle: int, data: bytes | memoryview) -> int:
        self.check_room()
        written = os.write(handle, data)
        os.utime(handle, (self._now(), self._now()))
        return written

    def write_at(self, handle: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        self.check_room()
        written = os.pwritev(handle, list(parts), offset)
        os.utime(handle, (self._now(), self._now()))
        return written

    def sync(self, handle: int) -> None:
        self._synced()
        self._disk.synced(Path(f"/proc/self/fd/{handle}").readlink())

    def sync_path(self, path: Path) -> None:
        self._synced()
        self._disk.synced(path)

    def rename(self, old: Path, new: Path) -> None:
        before = new.read_bytes() if new.is_file() else None
        old.replace(new)
        self._disk.renamed(old, new, before)

    def free_bytes(self, folder: Path) -> int:
        return 0 if self._disk.is_full else PLENTY_BYTES

    def boot_id(self) -> str:
        return f"boot{self._disk.boots}"


LOG_HEADER_BYTES, FRAME_HEADER_BYTES, BACKFILLED_AT = 32, 24, 96
"""Header sizes of SQLite's write-ahead log, and the offset in its index of the number of frames already in the database file."""


def _frame_bytes(log: bytes) -> int:
    return FRAME_HEADER_BYTES + int.from_bytes(log[8:12], "big")


def _frames_of(log: bytes) -> tuple[bytes, int]:
    """The log's salt, which changes when the log starts over, and its number of frames."""
    salt, size, count = log[16:24], _frame_bytes(log), 0
    while log[(at := LOG_HEADER_BYTES + count * size) + 8 : at + 16] == salt and at + size <= len(log):
        count += 1
    return salt, count


def _cut_log(path: Path, rng: random.Random, synced: tuple[bytes, int] | None) -> bool:
    """Truncates a log at a random place after the frames that the database file holds and those `synced`. False if nothing is
    lost."""
    log, index = path.read_bytes(), path.with_name(path.name.replace("-wal", "-shm"))
    if len(log) < LOG_HEADER_BYTES or not index.exists():
        return False
    salt, count = _frames_of(log)
    frame_bytes = _frame_bytes(log)
    with index.open("rb") as file:
        file.seek(BACKFILLED_AT)
        kept = int.from_bytes(file.read(4), sys.byteorder)
    if synced is not None and synced[0] == salt:
        kept = max(kept, synced[1])
    if kept >= count:
        return False
    end = LOG_HEADER_BYTES + rng.randint(kept, count) * frame_bytes
    os.truncate(path, min(len(log), end + rng.randrange(frame_bytes)))
    return True


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if stat.S_ISSOCK((Path(folder) / name).lstat().st_mode)]
