"""The learner's journal: records on disk that survive a kill, and the state that a restart restores from them.

Guarantees: what was appended before `commit` is on disk when `commit` returns; a torn record at the end (a kill or power cut
during a write: fewer bytes than the record's header promises, or zeros where the disk had not stored the last sectors) is cut
off; damage anywhere else, even in the last record, which may have been acknowledged, raises a `StateError` that says how to
continue, and leaves the file unchanged. Each checkpoint begins a segment; a group's records are in the segment in which it was
opened or in later ones, so a restart reads from the oldest segment in which a live group was opened.

Replaying from a checkpoint's step gives every batch drawn since, in order, with the tokens and rewards that it was trained on;
every admitted rollout that was neither trained on nor dropped; every answer of an evaluation that has no result yet; and every
version that may have been published. Applying a record twice is idempotent. Leaves to others: which segments are still needed
(pool, checkpoint), training again (replay).

Framing: length, CRC-32 of the payload, CRC-32 of those two fields (little-endian, 32 bits each), payload. The second CRC prevents
a flipped bit in a length from looking like a torn end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from echo2.base.errors import DiskFull, StateError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import GroupSpec, Rollout, Work
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.groups import Batch, Draw, Group, SentTokens, is_driven, is_later_turn, root_of, turn_of
from echo2.outside import here
from echo2.wire.bounds import core_of, message_of
from echo2.wire.gen.echo2.v1 import journal_pb2 as pb
from echo2.wire.rollout import group_from_message, group_to_message, rollout_from_message, rollout_to_message

FORMAT = 1  # of the segments; another one is refused
RECORD_BYTES_MAX = 256 << 20  # a batch of 16,384 rollouts by name is far below
_SECTOR_BYTES = 512  # what a disk writes as a whole or not at all
_FIELDS = struct.Struct("<II")
_HEADER = struct.Struct("<III")
_log = logging.getLogger("echo2.learner")


# ---- records


@dataclass(frozen=True, slots=True)
class SegmentBegan:
    """First record of a journal segment, begun after `step` steps and `cursor` drawn prompts. `published`: versions that
    workers may still name."""

    run_id: str
    step: Step
    cursor: int
    published: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    draw: Draw
    spec: GroupSpec


@dataclass(frozen=True, slots=True)
class Finished:
    """A rollout, or one turn of it, is finished. `senders`: which worker reported which tokens."""

    rollout: Rollout
    senders: tuple[SentTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchDrawn:
    """A batch was drawn. `rewards[g][i]`: the reward of rollout i of the g-th group; None if scoring failed."""

    step: Step
    group_ids: tuple[GroupId, ...]
    rewards: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """The version is about to be published (`fingerprint` empty), or was published."""

    version: Version
    fingerprint: str


@dataclass(frozen=True, slots=True)
class EpisodeScored:
    """An agent's episode ended with this reward for its `chains` of calls; None: it failed. Journalled because the reward
    cannot be computed again.

    `lost`: chains that do not count. If not `is_final`, another episode took its seat.
    """

    group_id: GroupId
    chains: tuple[int, ...]
    reward: float | None
    lost: tuple[int, ...] = ()
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class GroupDropped:
    group_id: GroupId


Record = SegmentBegan | Opened | Finished | BatchDrawn | VersionPublished | GroupDropped | EpisodeScored


def to_message(record: Record) -> pb.JournalRecord:
    match record:
        case SegmentBegan():
            return pb.JournalRecord(header=message_of(record, pb.JournalHeader, format=FORMAT))
        case Opened():
            group = group_to_message(record.spec)
            return pb.JournalRecord(opened=message_of(record.draw, pb.OpenedGroup, group=group))
        case Finished():
            senders = [pb.Sender(peer_id=sent.peer_id, tokens=sent.token_count) for sent in record.senders]
            rollout = rollout_to_message(record.rollout)
            return pb.JournalRecord(rollout=pb.FinishedRollout(senders=senders, rollout=rollout))
        case BatchDrawn():
            groups = [
                pb.DrawnGroup(rewards=list(map(_reward_to_message, rewards)), group_id=group_id)
                for group_id, rewards in zip(record.group_ids, record.rewards, strict=True)
            ]
            return pb.JournalRecord(batch=pb.DrawnBatch(groups=groups, step=record.step))
        case VersionPublished():
            return pb.JournalRecord(published=message_of(record, pb.PublishedVersion))
        case GroupDropped():
            return pb.JournalRecord(closed=pb.ClosedGroup(group_id=record.group_id))
        case EpisodeScored():
            reward = _reward_to_message(record.reward)
            scored = message_of(
                record,
                pb.ScoredEpisode,
                is_failed=reward.is_failed,
                value=reward.value,
                is_restarted=not record.is_final,
            )
            return pb.JournalRecord(scored=scored)


def from_message(message: pb.JournalRecord) -> Record:
    """Raises `StateError` if the record is of another kind or format than this release writes."""
    match message.WhichOneof("kind"):
        case "header" if message.header.format == FORMAT:
            return core_of(message.header, SegmentBegan)
        case "opened":
            spec = group_from_message(message.opened.group)
            return Opened(Draw(message.opened.cursor, message.opened.retry, spec.prompt_token_ids, spec.sampling), spec)
        case "rollout":
            senders = tuple(SentTokens(PeerId(sent.peer_id), sent.tokens) for sent in message.rollout.senders)
            return Finished(rollout_from_message(message.rollout.rollout), senders)
        case "batch":
            rewards = tuple(tuple(map(_reward_of, group.rewards)) for group in message.batch.groups)
            group_ids = tuple(GroupId(group.group_id) for group in message.batch.groups)
            return BatchDrawn(Step(message.batch.step), group_ids, rewards)
        case "published":
            return core_of(message.published, VersionPublished)
        case "closed":
            return core_of(message.closed, GroupDropped)
        case "scored":
            scored = message.scored
            return core_of(scored, EpisodeScored, reward=_reward_of(scored), is_final=not scored.is_restarted)
        case kind:
            raise StateError(
                f"expected a known record of format {FORMAT}, got {kind} of format {message.header.format}"
            )


def _reward_to_message(reward: float | None) -> pb.DrawnReward:
    return pb.DrawnReward(value=reward or 0.0, is_failed=reward is None)


def _reward_of(message: pb.DrawnReward | pb.ScoredEpisode) -> float | None:
    return None if message.is_failed else message.value


# ---- the state that they add up to


@dataclass(slots=True)
class History:
    """The state that the records since a checkpoint add up to. `opened_in`: the journal segment of each group."""

    cursor: int = 0
    groups: dict[GroupId, Group] = field(default_factory=dict)
    opened_in: dict[GroupId, Step] = field(default_factory=dict)
    drawn: dict[Step, BatchDrawn] = field(default_factory=dict)
    published: dict[Version, str] = field(default_factory=dict)
    dropped: set[GroupId] = field(default_factory=set)

    def apply(self, record: Record, segment: Step) -> None:
        """Adds a record. `segment`: the step at which the record's journal segment begins."""
        match record:
            case SegmentBegan():
                self.cursor = max(self.cursor, record.cursor)
                for version in record.published:
                    self.published.setdefault(version, "")
            case Opened():
                if record.spec.work is Work.TRAIN:  # the questions of an evaluation have numbers of their own
                    self.cursor = max(self.cursor, record.draw.cursor + 1)
                self._open(record, segment)
            case Finished():
                group = self.groups.get(record.rollout.group_id)
                if group is not None:
                    group.rollouts[record.rollout.index] = record.rollout
                    group.senders[record.rollout.index] = record.senders
            case BatchDrawn():
                self.drawn[record.step] = record
            case VersionPublished():
                self.published[record.version] = record.fingerprint or self.published.get(record.version, "")
            case GroupDropped():
                self.dropped.add(record.group_id)
            case EpisodeScored():
                group = self.groups.get(record.group_id)
                if group is not None:
                    group.end_seat(record.chains, record.lost, record.reward, is_final=record.is_final)

    def _open(self, record: Opened, segment: Step) -> None:
        spec = record.spec
        if spec.group_id not in self.groups or spec.group_id in self.dropped:  # a version may be evaluated again
            self.dropped.discard(spec.group_id)
            self.groups[spec.group_id] = Group.opened(spec, record.draw)
            self.opened_in[spec.group_id] = segment
            root = self.groups.get(root_of(spec.group_id))
            if is_driven(spec.group_id) and is_later_turn(spec.group_id) and root is not None:
                while len(root.rollouts) <= turn_of(spec.group_id, 0).index:
                    root.add_chain()

    def restore(self, groups: OpenGroups) -> None:
        """Adds every group that a later batch or an unfinished evaluation may need; `groups` must be at the checkpoint's step."""
        groups.published = sorted({*groups.published, *self.published})
        trained_before = (drawn.group_ids for step, drawn in self.drawn.items() if step < groups.next_step)
        gone = self.dropped.union(*trained_before)
        for group_id, group in self.groups.items():
            root = root_of(group_id)
            if not {group_id, root} & gone and not groups.ledger.is_trained(root):
                groups.groups[group_id] = group

    def next_batch(self, groups: OpenGroups) -> Batch | None:
        """Draws the batch recorded for the next step again; None if none is recorded. Raises `StateError` if the journal lacks the
        rollouts of one of its groups."""
        record = self.drawn.get(groups.next_step)
        if record is None:
            return None
        missing = [group_id for group_id in record.group_ids if group_id not in groups.groups]
        if missing:
            raise StateError(
                f"journal: expected the rollouts of group {missing[0]} before step {record.step} trained on it, "
                "found none"
            )
        return groups.draw_recorded(record.group_ids, record.rewards)


def drawn_of(batch: Batch) -> BatchDrawn:
    """The record of a batch: enough to draw it again."""
    rewards = []
    for group in batch.groups:
        known = {rollout.index: reward for rollout, reward in zip(group.rollouts, group.rewards, strict=True)}
        rewards.append(tuple(known.get(index) for index in range(group.spec.rollout_count)))
    return BatchDrawn(batch.step, tuple(group.spec.group_id for group in batch.groups), tuple(rewards))


# ---- on disk


class Journal:
    """Writes the newest segment. Call `append` and `commit` only on one event loop's thread.

    Writes raise `DiskFull` if space runs out, `StateError` if the folder is not writable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.segment = Step(0)
        self._file: int | None = None
        self._appended = self._synced = 0
        self._sync: asyncio.Task[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, first: SegmentBegan) -> None:
        """Starts the segment of `first.step`, or continues it if a killed learner had begun it."""
        previous = self._file
        with self._disk():
            file = os.open(self._path(first.step), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                _write(file, framed(to_message(first).SerializeToString()))
                here().files.sync(file)
                here().files.sync_path(self.folder)
                if previous is not None:
                    here().files.sync(previous)  # `commit` syncs only the newest segment
            except BaseException:
                os.close(file)
                raise
        self.close()
        self._file, self.segment = file, first.step

    def go_on(self, step: Step) -> None:
        """Continues the segment of `step`, whose torn end `read_journal` has cut off."""
        with self._disk():
            self._file = os.open(self._path(step), os.O_WRONLY | os.O_APPEND)
        self.segment = step

    def append(self, record: Record) -> None:
        """Writes the record without syncing: it survives a kill of this process, but a power cut only after `commit`."""
        assert self._file is not None, "begin or go_on comes first"
        with self._disk():
            _write(self._file, framed(to_message(record).SerializeToString()))
        self._appended += 1

    async def commit(self) -> None:
        """Returns once everything appended so far is on disk. Concurrent callers share one sync."""
        target = self._appended
        while self._synced < target:
            if self._sync is None or self._sync.done():
                self._sync = asyncio.get_running_loop().create_task(self._sync_once())
            await asyncio.shield(self._sync)

    async def _sync_once(self) -> None:
        reached = self._appended
        assert self._file is not None, "the journal is open"
        file = os.dup(self._file)  # a new segment may begin meanwhile
        try:
            with self._disk():
                await asyncio.to_thread(here().files.sync, file)
        finally:
            os.close(file)
        self._synced = max(self._synced, reached)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def forget_before(self, step: Step) -> None:
        """Deletes the segments before `step`, which no kept checkpoint needs."""
        for begun, path in _segments(self.folder):
            if begun < step:
                path.unlink(missing_ok=True)

    def _path(self, step: Step) -> Path:
        return self.folder / f"segment-{step:08d}.records"

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """Names what the disk refuses."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"journal: no space left in {self.folder}: {error}") from error
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
                raise StateError(f"journal: expected to write in {self.folder}, got: {error}") from error
            raise


def _write(file: int, data: bytes) -> None:
    """Appends all of `data` or nothing: a partial record followed by others would count as damage."""
    view = memoryview(data)
    try:
        while view:
            view = view[here().files.write(file, view) :]
    except OSError:
        if part := len(data) - len(view):
            os.ftruncate(file, os.fstat(file).st_size - part)
        raise


# ---- reading


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
    newest = segments[-1][0]
    return [(begun, record) for begun, path in segments for record in _read_segment(path, begun == newest)], newest


def _segments(folder: Path) -> list[tuple[Step, Path]]:
    return sorted((Step(int(path.stem.removeprefix("segment-"))), path) for path in folder.glob("segment-*.records"))


def _read_segment(path: Path, is_newest: bool) -> list[Record]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateError(f"journal {path}: expected to read it, got: {error.strerror}") from None
    records: list[Record] = []
    position = 0
    while (payload := _payload_at(data, position)) is not None:
        try:
            records.append(from_message(pb.JournalRecord.FromString(payload)))
        except (DecodeError, StateError) as error:
            raise StateError(f"journal {path}: a record with a right checksum cannot be read: {error}") from error
        position += _HEADER.size + len(payload)
    if position == len(data):
        return records
    # Only the end of the newest segment can be torn: bytes reach a file in order, and `begin` syncs the previous segment.
    if not is_newest or not _is_torn(data, position):
        raise StateError(
            f"journal {path}: expected a whole record at byte {position} of {len(data)}, found a broken record (changed on "
            "the disk); the file is unchanged. Restore the learner's folder from a backup; or give up this record and all "
            f"after it: truncate -s {position} {path}" + ("" if is_newest else ", and remove the later segments")
        )
    _log.warning(
        "journal %s: cut off %d bytes of a record whose write was interrupted; it was never acknowledged",
        path, len(data) - position,
    )  # fmt: skip
    os.truncate(path, position)
    return records


# ---- framing


def framed(payload: bytes) -> bytes:
    """The record of one payload."""
    fields = _FIELDS.pack(len(payload), zlib.crc32(payload))
    return fields + struct.pack("<I", zlib.crc32(fields)) + payload


def _end_at(data: bytes, position: int) -> int | None:
    """End of the record at `position` according to its header; None if there is no valid header."""
    if position + _HEADER.size > len(data):
        return None
    size, _, check = _HEADER.unpack_from(data, position)
    if not 0 < size <= RECORD_BYTES_MAX:  # a size of 0 would accept a run of zeros as records
        return None
    is_whole = zlib.crc32(data[position : position + _FIELDS.size]) == check
    return position + _HEADER.size + int(size) if is_whole else None


def _payload_at(data: bytes, position: int) -> bytes | None:
    end = _end_at(data, position)
    if end is None or end > len(data):
        return None
    payload = data[position + _HEADER.size : end]
    return payload if zlib.crc32(payload) == _FIELDS.unpack_from(data, position)[1] else None


def _is_torn(data: bytes, position: int) -> bool:
    """Whether the file ends in a record at `position` that is cut short, or of which the disk stored nothing, or nothing from
    some sector before the record's end on."""
    end = _end_at(data, position)
    reach = position + _HEADER.size if end is None else end
    if reach > len(data):
        return True
    stored = len(data.rstrip(b"\0"))
    lost_from = -(-stored // _SECTOR_BYTES) * _SECTOR_BYTES
    return stored <= position or lost_from < reach
