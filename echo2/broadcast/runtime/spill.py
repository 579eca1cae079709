"""A spill file on disk: holds what a decoder stages beyond its share of memory.

Guarantees: the file is unlinked at once, so nothing is left of it however the process ends. Leaves to others:
what is kept in it, and for how long (echo2/weights/staging.py).
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path


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
