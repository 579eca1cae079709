"""The learner's journal on disk: records that survive a kill.

Guarantees: what was appended before `commit` is on disk when `commit` returns; a torn record at the end (a kill or power cut
during a write: fewer bytes than the record's header promises, or zeros where the disk had not stored the last sectors) is cut
off; damage anywhere else, even in the last record, which may have been acknowledged, raises a `StateError` that says how to
continue, and leaves the file unchanged. Each checkpoint begins a segment; a group's records are in the segment in which it was
opened or in later ones, so a restart reads from the oldest segment in which a live group was opened. Leaves to others: the
meaning of records (history), which segments are still needed (pool, checkpoint).

Framing: length, CRC-32 of the payload, CRC-32 of those two fields (little-endian, 32 bits each), payload. The second CRC prevents
a flipped bit in a length from looking like a torn end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from echo2.base.errors import DiskFull, StateError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.learner.rollouts.groups import Draw, SentTokens
from echo2.learner.rollouts.history import (
    BatchDrawn,
    EpisodeScored,
    Finished,
    GroupDropped,
    Opened,
    Record,
    SegmentBegan,
    VersionPublished,
)
from echo2.outside import here
from echo2.wire.gen.echo2.v1 import journal_pb2
from echo2.wire.rollout import group_from_message, group_to_message, rollout_from_message, rollout_to_message

FORMAT = 1  # of the segments; another one is refused
_log = logging.getLogger("echo2.learner")


class Journal:
    """Writes the newest segment. Call `append` and `commit` only on one event loop's thread.

    Writes raise `DiskFull` if space runs out, `StateError` if the folder is not writable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.segment = Step(0)
        self._file: int | None = None
        self._appended = 0
        self._synced = 0
        self._sync: asyncio.Task[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, first: SegmentBegan) -> None:
        """Starts the segment of `first.step`, or continues it if a killed learner had begun it."""
        path = _path_of(self.folder, first.step)
        file = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, self.folder)
        try:
            _write(file, framed(_to_message(first).SerializeToString()), self.folder)
            _synced(file, self.folder)
            here().files.sync_path(self.folder)
        except BaseException:
            os.close(file)
            raise
        if self._file is not None:
            _synced(self._file, self.folder)  # `commit` syncs only the newest segment
        self._replace(file)
        self.segment = first.step

    def go_on(self, step: Step) -> None:
        """Continues the segment of `step`, whose torn end `read_journal` has cut off."""
        path = _path_of(self.folder, step)
        self._replace(_open(path, os.O_WRONLY | os.O_APPEND, self.folder))
        self.segment = step

    def append(self, record: Record) -> None:
        """Writes the record without syncing: it survives a kill of this process, but a power cut only after `commit`."""
        assert self._file is not None, "begin or go_on comes first"
        _write(self._file, framed(_to_message(record).SerializeToString()), self.folder)
        self._appended += 1

    async def commit(self) -> None:
        """Returns once everything appended so far is on disk. Concurrent callers share one sync."""
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
        """Deletes the segments before `step`, which no kept checkpoint needs."""
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
    """Whether the folder has any segment."""
    return bool(_segments(folder))


def read_journal(folder: Path, step: Step) -> tuple[list[tuple[Step, Record]], Step]:
    """Reads all segments from the one of `step` on; returns each record with its segment's step, and the last segment's step.

    Cuts off a torn end. Raises `StateError` if the segment of `step` is missing or a record is damaged.
    """
    segments = [(begun, path) for begun, path in _segments(folder) if begun >= step]
    if not segments or segments[0][0] != step:
        raise StateError(f"journal {folder}: expected a segment of step {step}, the checkpoint's, found none")
    records: list[tuple[Step, Record]] = []
    for number, (begun, path) in enumerate(segments):
        records += [(begun, record) for record in _read_segment(path, is_last=number == len(segments) - 1)]
    return records, segments[-1][0]


def _segments(folder: Path) -> list[tuple[Step, Path]]:
    return sorted((Step(int(path.stem.removeprefix("segment-"))), path) for path in folder.glob("segment-*.records"))


def _path_of(folder: Path, step: Step) -> Path:
    return folder / f"segment-{step:08d}.records"


def _read_segment(path: Path, is_last: bool) -> Iterator[Record]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateError(f"journal {path}: expected to read it, got: {error.strerror}") from None
    for payload in payloads(data):
        if not isinstance(payload, Break):
            yield _from_message(payload, path)
            continue
        # Only the end of the last segment can be torn: bytes reach a file in order, and `begin` syncs the previous segment.
        if not (is_last and payload.is_torn):
            raise _damage(path, payload, is_last)
        _log.warning(
            "journal %s: cut off %d bytes of a record whose write was interrupted; it was never acknowledged",
            path, len(data) - payload.position,
        )  # fmt: skip
        os.truncate(path, payload.position)


def _damage(path: Path, found: Break, is_last: bool) -> StateError:
    later = "" if is_last else ", and remove the later segments"
    return StateError(
        f"journal {path}: expected a whole record at byte {found.position}, found a broken record (changed on the disk) "
        f"with at least {found.whole_after} whole ones right behind it; the file is unchanged. Restore the learner's "
        "folder from a backup; or give up this record and all after it: truncate -s "
        f"{found.position} {path}{later}"
    )


# ---- files


def _open(path: Path, flags: int, folder: Path) -> int:
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        raise _disk_error(error, folder) from error


def _write(file: int, data: bytes, folder: Path) -> None:
    """Appends all of `data` or nothing: a partial record followed by others would count as damage."""
    view = memoryview(data)
    while view:
        try:
            view = view[here().files.write(file, view) :]
        except OSError as error:
            if part := len(data) - len(view):
                os.ftruncate(file, os.fstat(file).st_size - part)
            raise _disk_error(error, folder) from error


def _synced(file: int, folder: Path) -> None:
    try:
        here().files.sync(file)
    except OSError as error:
        raise _disk_error(error, folder) from error


def _disk_error(error: OSError, folder: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"journal: no space left in {folder}: {error}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
        return StateError(f"journal: expected to write in {folder}, got: {error}")
    return error


# ---- messages


def _to_message(record: Record) -> journal_pb2.JournalRecord:
    message = journal_pb2.JournalRecord()
    match record:
        case SegmentBegan():
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
        case BatchDrawn():
            message.batch.step = record.step
            for group_id, rewards in zip(record.group_ids, record.rewards, strict=True):
                group = message.batch.groups.add(group_id=group_id)
                for reward in rewards:
                    group.rewards.add(is_failed=reward is None, value=reward or 0.0)
        case VersionPublished():
            message.published.version, message.published.fingerprint = record.version, record.fingerprint
        case GroupDropped():
            message.closed.group_id = record.group_id
        case EpisodeScored():
            message.scored.group_id, message.scored.is_failed = record.group_id, record.reward is None
            message.scored.chains.extend(record.chains)
            message.scored.lost.extend(record.lost)
            message.scored.is_restarted = not record.is_final
            message.scored.value = record.reward or 0.0
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
            return SegmentBegan(message.header.run_id, Step(message.header.step), message.header.cursor, published)
        case "opened":
            spec = group_from_message(message.opened.group)
            draw = Draw(message.opened.cursor, message.opened.retry, spec.prompt_token_ids, spec.sampling)
            return Opened(draw, spec)
        case "rollout":
            senders = tuple(SentTokens(PeerId(sent.peer_id), sent.tokens) for sent in message.rollout.senders)
            return Finished(rollout_from_message(message.rollout.rollout), senders)
        case "batch":
            return _drawn(message.batch)
        case "published":
            return VersionPublished(Version(message.published.version), message.published.fingerprint)
        case "closed":
            return GroupDropped(GroupId(message.closed.group_id))
        case "scored":
            reward = None if message.scored.is_failed else message.scored.value
            scored = message.scored
            return EpisodeScored(
                GroupId(scored.group_id), tuple(scored.chains), reward, tuple(scored.lost), not scored.is_restarted
            )
        case kind:
            raise StateError(f"journal {path}: expected a known record, got {kind}")


def _drawn(message: journal_pb2.DrawnBatch) -> BatchDrawn:
    return BatchDrawn(
        Step(message.step),
        tuple(GroupId(group.group_id) for group in message.groups),
        tuple(tuple(None if r.is_failed else r.value for r in group.rewards) for group in message.groups),
    )


# ---- framing

RECORD_BYTES_MAX = 256 << 20  # a batch of 16,384 rollouts by name is far below
_SECTOR_BYTES = 512  # what a disk writes as a whole or not at all
_LOOKED_THROUGH_BYTES = 16 << 20
"""Bytes searched for complete records after damage; their count informs the operator."""
_PAIR = struct.Struct("<II")
_TRIPLE = struct.Struct("<III")


@dataclass(frozen=True, slots=True)
class Break:
    """The first position without a complete record. `whole_after`: readable records found after it, within the searched bytes."""

    position: int
    is_torn: bool
    whole_after: int = 0


def framed(payload: bytes) -> bytes:
    """The record of one payload."""
    pair = _PAIR.pack(len(payload), zlib.crc32(payload))
    return pair + struct.pack("<I", zlib.crc32(pair)) + payload


def payloads(data: bytes) -> Iterator[bytes | Break]:
    """Yields the records' payloads in order, and a `Break` last if there is one."""
    position = 0
    while position < len(data):
        payload = _record_at(data, position)
        if payload is None:
            yield _break_at(data, position)
            return
        yield payload
        position += _TRIPLE.size + len(payload)


def _end_at(data: bytes, position: int) -> int | None:
    """End of the record at `position` according to its header; None if there is no valid header."""
    if position + _TRIPLE.size > len(data):
        return None
    size, _, check = _TRIPLE.unpack_from(data, position)
    if not 0 < size <= RECORD_BYTES_MAX:  # a size of 0 would accept a run of zeros as records
        return None
    if zlib.crc32(data[position : position + _PAIR.size]) != check:
        return None
    return position + _TRIPLE.size + int(size)


def _record_at(data: bytes, position: int) -> bytes | None:
    end = _end_at(data, position)
    if end is None or end > len(data):
        return None
    payload = data[position + _TRIPLE.size : end]
    return payload if zlib.crc32(payload) == _PAIR.unpack_from(data, position)[1] else None


def _break_at(data: bytes, position: int) -> Break:
    end, header_end = _end_at(data, position), position + _TRIPLE.size
    is_short = header_end > len(data) or (end is not None and end > len(data))
    if is_short or _ends_in_lost_sectors(data, position, header_end if end is None else end):
        return Break(position, is_torn=True)
    return Break(position, False, _whole_after(data, position + 1 if end is None else end))


def _whole_after(data: bytes, start: int) -> int:
    """Number of consecutive readable records in the first run of them from `start` on."""
    for begin in range(start, min(len(data) - _TRIPLE.size, start + _LOOKED_THROUGH_BYTES) + 1):
        count, position = 0, begin
        while (payload := _record_at(data, position)) is not None:
            position += _TRIPLE.size + len(payload)
            count += 1
        if count:
            return count
    return 0


def _ends_in_lost_sectors(data: bytes, position: int, reach: int) -> bool:
    """Whether the file grew by a record of which the disk stored nothing, or nothing from some sector before `reach` on."""
    stored = len(data.rstrip(b"\0"))
    lost_from = -(-stored // _SECTOR_BYTES) * _SECTOR_BYTES
    return stored <= position or lost_from < min(reach, len(data))
