"""The learner's journal on disk: records that outlive a kill.

Guarantees: what was appended before `commit` returned is on the disk; a torn record at the end (a kill in the middle
of a write) is cut off, a broken one elsewhere is a `StateError`. A segment begins with each checkpoint; records of a
group stand in the segment in which it was opened or a later one, so a restart reads from the oldest segment in which a
live group was opened. Leaves to others: what the records mean (learner/history), which segments are still needed
(intake, daemon).

Framing of a record: length, CRC-32 (both little-endian 32 bit), a serialised JournalRecord.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError

from echo2.base.errors import DiskFull, StateError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.learner.episodes import Sent
from echo2.learner.group import Draw
from echo2.learner.history import Began, Drawn, Dropped, Finished, Opened, Published, Record
from echo2.wire.gen.echo2.v1 import journal_pb2
from echo2.wire.rollout import group_from_message, group_to_message, rollout_from_message, rollout_to_message

FORMAT = 1
RECORD_BYTES_MAX = 256 << 20
_FRAME = struct.Struct("<II")
_log = logging.getLogger("echo2.learner")


class Journal:
    """The segment that is being written. `append` and `commit` belong to one event loop's thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.segment = Step(0)
        self._file: int | None = None
        self._appended = 0
        self._synced = 0
        self._sync: asyncio.Task[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, first: Began) -> None:
        """Starts the segment of `first.step`, or goes on with it if a killed learner had begun it."""
        path = self.folder / f"segment-{first.step:08d}.log"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _write(file, _framed(first), self.folder)
            _synced(file, self.folder)
            _sync_folder(self.folder)
        except BaseException:
            os.close(file)
            raise
        if self._file is not None:
            _synced(self._file, self.folder)  # `commit` looks at the newest segment only
        self._replace(file)
        self.segment = first.step

    def go_on(self, step: Step) -> None:
        """Appends to the segment of `step`, which `read_journal` has mended."""
        self._replace(os.open(self.folder / f"segment-{step:08d}.log", os.O_WRONLY | os.O_APPEND))
        self.segment = step

    def append(self, record: Record) -> None:
        """Hands the record to the system; a kill of this process does not lose it, a power cut may until `commit`."""
        assert self._file is not None, "begin or go_on comes first"
        _write(self._file, _framed(record), self.folder)
        self._appended += 1

    async def commit(self) -> None:
        """Returns once everything appended so far is on the disk. Callers at the same time share one sync."""
        target = self._appended
        while self._synced < target:
            if self._sync is None or self._sync.done():
                self._sync = asyncio.get_running_loop().create_task(self._sync_once())
            await asyncio.shield(self._sync)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def forget_before(self, step: Step) -> None:
        """Deletes the segments that no kept checkpoint needs."""
        for begun, path in _segments(self.folder):
            if begun < step:
                path.unlink(missing_ok=True)

    async def _sync_once(self) -> None:
        reached = self._appended
        assert self._file is not None, "the journal is open"
        file = os.dup(self._file)  # a new segment may begin meanwhile
        try:
            await asyncio.to_thread(_synced, file, self.folder)
        finally:
            os.close(file)
        self._synced = max(self._synced, reached)

    def _replace(self, file: int) -> None:
        self.close()
        self._file = file


def has_journal(folder: Path) -> bool:
    """Whether anything was ever written."""
    return bool(_segments(folder))


def read_journal(folder: Path, step: Step) -> tuple[list[tuple[Step, Record]], Step]:
    """Records of all segments from the one of `step` on, each with its segment's, and the last segment's step.

    Cuts a torn end off.
    """
    segments = [(begun, path) for begun, path in _segments(folder) if begun >= step]
    if not segments or segments[0][0] != step:
        raise StateError(f"journal {folder}: expected a segment of step {step}, the checkpoint's, found none")
    records: list[tuple[Step, Record]] = []
    for number, (begun, path) in enumerate(segments):
        records += [(begun, record) for record in _read_segment(path, is_last=number == len(segments) - 1)]
    return records, segments[-1][0]


def _segments(folder: Path) -> list[tuple[Step, Path]]:
    return sorted((Step(int(path.stem.removeprefix("segment-"))), path) for path in folder.glob("segment-*.log"))


def _read_segment(path: Path, is_last: bool) -> Iterator[Record]:
    data = path.read_bytes()
    position = 0
    while position < len(data):
        end, payload = _record_at(data, position)
        if payload is None:
            # Only the end can be torn: a record's bytes reach the file in order.
            if not is_last:
                raise StateError(f"journal {path}: broken record at byte {position}")
            _log.warning("journal %s: cut off %d bytes of a torn record", path, len(data) - position)
            os.truncate(path, position)
            return
        position = end
        yield _from_message(payload, path)


def _record_at(data: bytes, position: int) -> tuple[int, bytes | None]:
    if position + _FRAME.size > len(data):
        return position, None
    size, checksum = _FRAME.unpack_from(data, position)
    end = position + _FRAME.size + size
    if size > RECORD_BYTES_MAX or end > len(data):
        return position, None
    payload = data[position + _FRAME.size : end]
    return end, payload if zlib.crc32(payload) == checksum else None


def _framed(record: Record) -> bytes:
    payload = _to_message(record).SerializeToString()
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _write(file: int, data: bytes, folder: Path) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(file, view) :]
        except OSError as error:
            raise _disk_error(error, folder) from error


def _synced(file: int, folder: Path) -> None:
    try:
        os.fsync(file)
    except OSError as error:
        raise _disk_error(error, folder) from error


def _disk_error(error: OSError, folder: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"journal: no space left in {folder}: {error}")
    return error


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _to_message(record: Record) -> journal_pb2.JournalRecord:
    message = journal_pb2.JournalRecord()
    match record:
        case Began():
            header = message.header
            header.format, header.run_id, header.step, header.cursor = FORMAT, record.run_id, record.step, record.cursor
            header.published.extend(record.published)
        case Opened():
            message.opened.cursor, message.opened.retry = record.draw.cursor, record.draw.retry
            message.opened.group.CopyFrom(group_to_message(record.spec))
        case Finished():
            message.rollout.rollout.CopyFrom(rollout_to_message(record.rollout))
            for sent in record.senders:
                message.rollout.senders.add(peer_id=sent.peer_id, tokens=sent.token_count)
        case Drawn():
            message.batch.step = record.step
            for group_id, rewards in zip(record.group_ids, record.rewards, strict=True):
                group = message.batch.groups.add(group_id=group_id)
                for reward in rewards:
                    group.rewards.add(is_failed=reward is None, value=reward or 0.0)
        case Published():
            message.published.version, message.published.fingerprint = record.version, record.fingerprint
        case Dropped():
            message.closed.group_id = record.group_id
    return message


def _from_message(payload: bytes, path: Path) -> Record:
    try:
        message = journal_pb2.JournalRecord.FromString(payload)
    except DecodeError as error:
        raise StateError(f"journal {path}: a record with a right checksum does not parse: {error}") from error
    match message.WhichOneof("kind"):
        case "header":
            if message.header.format != FORMAT:
                raise StateError(f"journal {path}: expected format {FORMAT}, got {message.header.format}")
            published = tuple(Version(version) for version in message.header.published)
            return Began(message.header.run_id, Step(message.header.step), message.header.cursor, published)
        case "opened":
            spec = group_from_message(message.opened.group)
            draw = Draw(message.opened.cursor, message.opened.retry, spec.prompt_token_ids, spec.sampling)
            return Opened(draw, spec)
        case "rollout":
            senders = tuple(Sent(PeerId(sent.peer_id), sent.tokens) for sent in message.rollout.senders)
            return Finished(rollout_from_message(message.rollout.rollout), senders)
        case "batch":
            return _drawn(message.batch)
        case "published":
            return Published(Version(message.published.version), message.published.fingerprint)
        case "closed":
            return Dropped(GroupId(message.closed.group_id))
        case kind:
            raise StateError(f"journal {path}: expected a known record, got {kind}")


def _drawn(message: journal_pb2.DrawnBatch) -> Drawn:
    return Drawn(
        Step(message.step),
        tuple(GroupId(group.group_id) for group in message.groups),
        tuple(tuple(None if r.is_failed else r.value for r in group.rewards) for group in message.groups),
    )
