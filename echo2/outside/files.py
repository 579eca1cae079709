"""The operations that make bytes durable: writing to an open file, syncing, renaming, querying free space.

The real implementation guarantees what the system does. Reading, listing and making folders need no seam: the simulator gives
each machine a real folder, and after a power cut removes what was written there but never synced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


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
