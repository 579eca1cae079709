"""The mark beside the coordinator's database: the number of its last transaction shows that a database is missing or too old."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from echo2.base.errors import DiskFull, StateError
from echo2.outside import here

MARK_BYTES = 256  # room for two numbers of 20 digits and two ids of up to 64 characters
_log = logging.getLogger("echo2.coordinator")


@dataclass(frozen=True, slots=True)
class LastTransaction:
    """The content of the mark's file. `written`: number of committed transactions; `safe`: how many of these are synced to disk;
    `boot`: the machine's boot id, which tells a kill from a power cut; `is_closed`: the database was closed cleanly."""

    store_id: str
    written: int
    safe: int
    boot: str
    is_closed: bool


class LastTransactionFile:
    """A small file beside the database with the number of its last transaction. After a kill every transaction must be there; after
    a power cut those since the last checkpoint (`safe`) may be missing. The file is rewritten in place, `MARK_BYTES` in one write:
    a kill leaves the old or the new content. Once open, thread-safe. `where`: the database, for messages."""

    def __init__(self, path: Path, where: str) -> None:
        self._path, self._where = path, where
        self._lock = threading.Lock()
        self._file: int | None = None
        self._mark = _read_mark(path)

    def check_is_there(self, database: Path) -> None:
        """StateError if there is a mark but no database. Call it before SQLite creates an empty one."""
        if self._mark is not None and not (database.exists() and database.stat().st_size):
            raise self._lost("the database that was there", "none")

    def check(self, store_id: str, written: int) -> None:
        """Compares the mark with the database's `store_id` (empty if it has none) and `written`; StateError if data is missing."""
        mark = self._mark
        if mark is None:
            return
        if store_id != mark.store_id:
            raise self._lost(f"database {mark.store_id}", f"database {store_id}" if store_id else "an empty one")
        may_lack_the_end = not mark.is_closed and mark.boot != _boot()
        if written < (mark.safe if may_lack_the_end else mark.written):
            raise self._lost(f"all of {mark.written} changes", f"the first {written}")
        if written < mark.written:
            _log.warning(
                "%s: the machine went down and the last %d changes of %d with it; learner and workers tell them again",
                self._where, mark.written - written, mark.written,
            )  # fmt: skip

    def open(self, written: int, store_id: str) -> str:
        """Opens the file and writes a mark for the database as it is. Returns the database's id: a new one if `store_id` is
        empty."""
        safe = min(written, self._mark.safe) if self._mark is not None else 0
        mark = LastTransaction(
            store_id or f"{here().rng.getrandbits(64):016x}", written, safe, _boot(), is_closed=False
        )
        self._create()
        self._write(mark, is_synced=True)
        return mark.store_id

    def note(self, written: int, *, is_safe: bool) -> None:
        """Call it after each commit."""
        with self._lock:
            mark = self._now()
            self._write(replace(mark, written=written, safe=written if is_safe else mark.safe), is_synced=False)

    def note_safe(self, safe: int) -> None:
        """Call it after the database has synced everything up to `safe`."""
        with self._lock:
            if safe > self._now().safe:
                self._write(replace(self._now(), safe=safe), is_synced=True)

    def write_back(self) -> str:
        """Makes the file again if it was removed; returns that in words."""
        with self._lock:
            if self._file is None or self._path.exists():
                return ""
            os.close(self._file)
            self._create()
            self._write(self._now(), is_synced=True)
        return f"{self._path} was removed while the coordinator ran; it was written again"

    def close(self) -> None:
        """Call it after the database was closed cleanly."""
        with self._lock:
            if self._file is None:
                return
            self._write(replace(self._now(), safe=self._now().written, is_closed=True), is_synced=True)
            os.close(self._file)
            self._file = None

    def _now(self) -> LastTransaction:
        assert self._mark is not None, "open comes first"
        return self._mark

    def _create(self) -> None:
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._error(error) from None

    def _write(self, mark: LastTransaction, *, is_synced: bool) -> None:
        assert self._file is not None, "open comes first"
        self._mark = mark
        text = json.dumps(
            {name: getattr(mark, name) for name in mark.__slots__}
        ).encode()  # asdict takes ten times as long
        data = _checksum(text) + b" " + text
        assert len(data) < MARK_BYTES, "ids and numbers are short"
        try:
            here().files.write_at(self._file, [data.ljust(MARK_BYTES - 1) + b"\n"], 0)
            if is_synced:
                here().files.sync(self._file)
        except OSError as error:
            raise self._error(error) from None

    def _lost(self, expected: str, came: str) -> StateError:
        return StateError(
            f"{self._where}: expected {expected}, found {came}; bans, revoked tokens and money spent may be missing. "
            f"Restore a backup of the database (docs/runbook.md). To go on with what is there, remove {self._path}"
        )

    def _error(self, error: OSError) -> DiskFull | StateError:
        kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StateError
        return kind(f"{self._path}: expected to write it, got: {error.strerror}")


def _read_mark(path: Path) -> LastTransaction | None:
    if not path.exists():
        return None
    try:
        data = path.read_bytes()
        checksum, text = data[:8], data[9:].rstrip()
        if checksum != _checksum(text):
            raise ValueError("its checksum differs")
        return LastTransaction(**json.loads(text))
    except (OSError, ValueError, TypeError) as error:
        raise StateError(
            f"{path}: expected the coordinator's mark of its database, found it damaged ({error}). If the database beside "
            "it is whole, remove the mark; else restore both from a backup"
        ) from None


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def _boot() -> str:
    return "".join(filter(str.isalnum, here().files.boot_id()))[:64]
