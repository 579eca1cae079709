"""The operations that make bytes durable: writing to an open file, syncing, renaming, querying free space.

The real implementation guarantees what the system does. Reading, listing and making folders need no seam: the simulator gives
each machine a real folder, and after a power cut removes what was written there but never synced.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from echo2.base.errors import StateError


class Files(Protocol):
    """Methods raise `OSError` as the system does: ENOSPC if the disk is full."""

    def write(self, handle: int, data: bytes | memoryview) -> int:
        """Appends, or writes at the handle's position; returns the number of bytes written."""
        ...

    def write_at(self, handle: int, parts: Sequence[bytes | memoryview], offset: int) -> int: ...

    def sync(self, handle: int) -> None:
        """Returns once everything written to the file is on the disk."""
        ...

    def sync_path(self, path: Path) -> None:
        """Like `sync`, for a file that is not open, or for the names in a folder."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Replaces `new`. The rename is durable once the folder is synced."""
        ...

    def free_bytes(self, folder: Path) -> int: ...


class MachineFiles:
    """The system's files."""

    __slots__ = ()

    def write(self, handle: int, data: bytes | memoryview) -> int:
        return os.write(handle, data)

    def write_at(self, handle: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        return os.pwritev(handle, list(parts), offset)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def sync_path(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def free_bytes(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free


def hold(lock: Path, role: str) -> int:
    """Locks the file for this process until the returned descriptor is closed, and writes the process's id into it. StateError if
    another process holds it."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise StateError(
            f"{lock.parent}: expected it free, but process {holder} runs a {role} in it; give this one another folder"
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle
