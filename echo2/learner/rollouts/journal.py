"""The learner's journal: records on disk that survive a kill, and the state that a restart restores from them.

Guarantees: what was appended before `commit` is on disk when `commit` returns; a torn record at the end (a kill or power cut
during a write: fewer bytes than the record's header promises, or zeros where the disk had not stored the last sectors) is cut
off; damage anywhere else, even in the last record, which may have been acknowledged, raises a `StateError` that says how to
continue, and leaves the file unchanged. Each checkpoint begins a segment; a group's records are in the segment in which it was
opened or in later ones, so a restart reads from the oldest segment in which a live group was opened.

Replaying from a checkpoint's step gives every batch drawn since, in order, with the tokens and rewards that it was trained on;
every admitted rollout that was neither trained on nor dropped; every answer of an evaluation that has no result yet; and every
version that may have been published. Applying a record twice is idempotent.

Framing: length, CRC-32 of the payload, CRC-32 of those two fields (little-endian, 32 bits each), payload. The second CRC
prevents a flipped bit in a length from looking like a torn end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from echo2.base.errors import NO_ROOM, DiskFull, StateError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import GroupSpec, Rollout, Work
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.groups import Batch, Group, SentTokens, is_driven, is_later_turn, root_of, turn_of
from echo2.outside import here
from echo2.wire.gen.echo2.v1 import journal_pb2 as pb
from echo2.wire.rollout import group_from_message, group_to_message, rollout_from_message, rollout_to_message

FORMAT = 1  # of the segments; another one is refused
RECORD_BYTES_MAX = 256 << 20  # a batch of 16,384 rollouts by name is far below
_SECTOR_BYTES = 512  # what a disk writes as a whole or not at all
_FIELDS = struct.Struct("<II")
_HEADER = struct.Struct("<III")
_log = logging.getLogger("echo2.learner")


# ---- records


def began(run_id: str, step: Step, cursor: int, published: Iterable[Version]) -> pb.JournalRecord:
    """First record of a journal segment, begun after `step` steps and `cursor` drawn prompts. `published`: versions that
    workers may still name."""
    head = pb.JournalHeader(format=FORMAT, run_id=run_id, step=step, cursor=cursor, published=published)
    return pb.JournalRecord(header=head)


def opened(group: Group) -> pb.JournalRecord:
    spec = group_to_message(group.spec)
    return pb.JournalRecord(opened=pb.OpenedGroup(cursor=group.cursor, retry=group.retry, group=spec))


def is_as_recorded(spec: GroupSpec, drawn: GroupSpec) -> bool:
    """Whether a group that comes from the journal is as the run would draw it now; numbers come back rounded to float32."""
    return group_to_message(spec) == group_to_message(drawn)


def finished(rollout: Rollout, senders: Iterable[SentTokens] = ()) -> pb.JournalRecord:
    """A rollout, or one turn of it, is finished. `senders`: which worker reported which tokens."""
    sent = [pb.Sender(peer_id=each.peer_id, tokens=each.token_count) for each in senders]
    return pb.JournalRecord(rollout=pb.FinishedRollout(senders=sent, rollout=rollout_to_message(rollout)))


def drawn(batch: Batch) -> pb.JournalRecord:
    """Enough to draw the batch again."""
    groups = []
    for group in batch.groups:
        known = {rollout.index: reward for rollout, reward in zip(group.rollouts, group.rewards, strict=True)}
        values = [known.get(index) for index in range(group.spec.rollout_count)]  # None: scoring failed
        rewards = [pb.DrawnReward(value=value or 0.0, is_failed=value is None) for value in values]
        groups.append(pb.DrawnGroup(group_id=group.spec.group_id, rewards=rewards))
    return pb.JournalRecord(batch=pb.DrawnBatch(step=batch.step, groups=groups))


def published(version: Version, fingerprint: str = "") -> pb.JournalRecord:
    """The version was published or, without a fingerprint, is about to be."""
    return pb.JournalRecord(published=pb.PublishedVersion(version=version, fingerprint=fingerprint))


def closed(group_id: GroupId) -> pb.JournalRecord:
    return pb.JournalRecord(closed=pb.ClosedGroup(group_id=group_id))


def scored(
    root: GroupId, chains: Iterable[int], reward: float | None, lost: Iterable[int], *, is_final: bool
) -> pb.JournalRecord:
    """An agent's episode ended with this reward for its `chains` of calls; None: it failed. Journalled because the reward cannot be
    computed again. `lost`: chains that do not count. If not `is_final`, another episode took its seat."""
    ended = pb.ScoredEpisode(
        group_id=root, chains=chains, lost=lost, value=reward or 0.0, is_failed=reward is None,
        is_restarted=not is_final,
    )  # fmt: skip
    return pb.JournalRecord(scored=ended)


def _reward_of(message: pb.DrawnReward | pb.ScoredEpisode) -> float | None:
    return None if message.is_failed else message.value


# ---- the state that they add up to


@dataclass(slots=True)
class History:
    """The state that the records since a checkpoint add up to. `opened_in`: the journal segment of each group. `finished`: the
    rollouts of `groups`, by index. Messages take an eighth of the memory of what they stand for, and there may be many steps
    of them; each group leaves with its rollouts when it is needed, for this object lasts as long as the learner."""

    cursor: int = 0
    groups: dict[GroupId, Group] = field(default_factory=dict)
    finished: dict[GroupId, dict[int, pb.FinishedRollout]] = field(default_factory=dict)
    opened_in: dict[GroupId, Step] = field(default_factory=dict)
    drawn: dict[Step, pb.DrawnBatch] = field(default_factory=dict)
    published: dict[Version, str] = field(default_factory=dict)
    dropped: set[GroupId] = field(default_factory=set)

    def apply(self, record: pb.JournalRecord, segment: Step) -> None:
        """Adds a record. `segment`: the step at which the record's journal segment begins."""
        match record.WhichOneof("kind"):
            case "header":
                self.cursor = max(self.cursor, record.header.cursor)
                for version in record.header.published:
                    self.published.setdefault(Version(version), "")
            case "opened":
                self._open(record.opened, segment)
            case "rollout":
                rollout = record.rollout.rollout
                if rollout.group_id in self.groups:
                    self.finished.setdefault(GroupId(rollout.group_id), {})[rollout.index] = record.rollout
            case "batch":
                self.drawn[Step(record.batch.step)] = record.batch
            case "published":
                version = Version(record.published.version)
                self.published[version] = record.published.fingerprint or self.published.get(version, "")
            case "closed":
                self.dropped.add(GroupId(record.closed.group_id))
                self.finished.pop(GroupId(record.closed.group_id), None)
            case "scored":
                ended = record.scored
                if (group := self.groups.get(GroupId(ended.group_id))) is not None:
                    group.end_seat(ended.chains, ended.lost, _reward_of(ended), is_final=not ended.is_restarted)

    def _open(self, record: pb.OpenedGroup, segment: Step) -> None:
        spec = group_from_message(record.group)
        if spec.work is Work.TRAIN:  # the questions of an evaluation have numbers of their own
            self.cursor = max(self.cursor, record.cursor + 1)
        if spec.group_id not in self.groups or spec.group_id in self.dropped:  # a version may be evaluated again
            self.dropped.discard(spec.group_id)
            self.groups[spec.group_id] = Group.opened(spec, record.cursor, record.retry)
            self.opened_in[spec.group_id] = segment
            root = self.groups.get(root_of(spec.group_id))
            if is_driven(spec.group_id) and is_later_turn(spec.group_id) and root is not None:
                while len(root.rollouts) <= turn_of(spec.group_id, 0).index:
                    root.add_chain()

    def restore(self, groups: OpenGroups) -> None:
        """Adds every group that is in no recorded batch and may be needed, and forgets those that nothing needs; `groups` must be
        at the checkpoint's step."""
        groups.published = sorted({*groups.published, *self.published})
        drawn = {GroupId(each.group_id) for batch in self.drawn.values() for each in batch.groups}
        for group_id in list(self.groups):
            root = root_of(group_id)
            if {group_id, root} & self.dropped or groups.ledger.is_trained(root):
                del self.groups[group_id]
                self.finished.pop(group_id, None)
            elif root not in drawn:
                group = self._take(group_id)
                group.min_version = min(self.opened_in[group_id], group.spec.consume_step) - groups.bound
                groups.put(group)

    def _take(self, group_id: GroupId) -> Group:
        group = self.groups.pop(group_id)
        for index, message in self.finished.pop(group_id, {}).items():
            group.rollouts[index] = rollout_from_message(message.rollout)
            group.senders[index] = tuple(SentTokens(PeerId(sent.peer_id), sent.tokens) for sent in message.senders)
        return group

    def next_batch(self, groups: OpenGroups) -> Batch | None:
        """Draws the batch recorded for the next step again; None if none is recorded. Raises `StateError` if the journal lacks the
        rollouts of one of its groups."""
        record = self.drawn.get(groups.next_step)
        if record is None:
            return None
        names = [GroupId(group.group_id) for group in record.groups]
        drawn = set(names)
        for group_id in [known for known in self.groups if root_of(known) in drawn]:
            groups.put(self._take(group_id))
        missing = [group_id for group_id in names if group_id not in groups.groups]
        if missing:
            raise StateError(
                f"journal: expected the rollouts of group {missing[0]} before step {record.step} trained on it, "
                "found none"
            )
        return groups.draw_recorded(names, [list(map(_reward_of, group.rewards)) for group in record.groups])


# ---- on disk


class Journal:
    """Writes the newest segment. Call `append` and `commit` only on one event loop's thread. Writes raise `DiskFull` if space
    runs out, `StateError` if the disk fails in another way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.segment = Step(0)
        self._file: int | None = None
        self._appended = self._synced = 0
        self._sync: asyncio.Task[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, first: pb.JournalRecord) -> None:
        """Starts the segment of the step in `first`, or continues it if a killed learner had begun it."""
        previous, step = self._file, Step(first.header.step)
        with self._disk():
            if previous is not None:  # before the new name is on the disk: only the newest may have a torn end
                here().files.sync(previous)
            file = os.open(self._path(step), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                _write(file, framed(first.SerializeToString()))
                here().files.sync(file)
                here().files.sync_path(self.folder)
            except BaseException:
                os.close(file)
                raise
        self.close()
        self._file, self.segment = file, step

    def go_on(self, step: Step) -> None:
        """Continues the segment of `step`, whose torn end `read_journal` has cut off."""
        with self._disk():
            self._file = os.open(self._path(step), os.O_WRONLY | os.O_APPEND)
        self.segment = step

    def append(self, record: pb.JournalRecord) -> None:
        """Writes the record without syncing: it survives a kill of this process, but a power cut only after `commit`."""
        assert self._file is not None, "begin or go_on comes first"
        with self._disk():
            _write(self._file, framed(record.SerializeToString()))
        self._appended += 1

    async def commit(self) -> None:
        """Returns once everything appended so far is on disk. Concurrent callers share one sync. After a failed one all fail: the
        system may have dropped what it could not write, and says so once."""
        target = self._appended
        while self._synced < target:
            if self._sync is None or (self._sync.done() and self._sync.exception() is None):
                self._sync = asyncio.get_running_loop().create_task(self._sync_once())
            await asyncio.shield(self._sync)

    async def _sync_once(self) -> None:
        reached = self._appended
        assert self._file is not None, "the journal is open"
        with self._disk():
            file = os.dup(self._file)  # a new segment may begin meanwhile
            try:
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
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(f"journal: no space left in {self.folder}: {error}") from error
            raise StateError(f"journal: expected to write in {self.folder}, got: {error}") from error


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
    return bool(_segments(folder))


def read_journal(folder: Path, step: Step) -> tuple[Iterator[tuple[Step, pb.JournalRecord]], Step]:
    """Reads all segments from the one of `step` on, as its first result is iterated: each record with its segment's step; and the
    last segment's step. Cuts off a torn end. Raises `StateError` if the segment of `step` is missing or a record is damaged."""
    segments = [(begun, path) for begun, path in _segments(folder) if begun >= step]
    if not segments or segments[0][0] != step:
        at_start = "a checkpoint beside it, or segments from step 0 on"
        what = f"a segment of step {step}, the checkpoint's" if step else at_start
        raise StateError(f"journal {folder}: expected {what}, found none. Restore the learner's folder from a backup")
    newest = segments[-1][0]
    return ((begun, record) for begun, path in segments for record in _read_segment(path, begun == newest)), newest


def _segments(folder: Path) -> list[tuple[Step, Path]]:
    return sorted((Step(int(path.stem.removeprefix("segment-"))), path) for path in folder.glob("segment-*.records"))


def _read_segment(path: Path, is_newest: bool) -> Iterator[pb.JournalRecord]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateError(f"journal {path}: expected to read it, got: {error.strerror}") from None
    position = 0
    while (payload := _payload_at(data, position)) is not None:
        try:
            record = pb.JournalRecord.FromString(payload)
        except DecodeError as error:
            raise StateError(f"journal {path}: a record with a right checksum cannot be read: {error}") from error
        kind = record.WhichOneof("kind")
        if kind is None or (kind == "header" and record.header.format != FORMAT):
            raise StateError(
                f"journal {path}: expected a known record of format {FORMAT}, got {kind} of format {record.header.format}"
            )
        yield record
        position += _HEADER.size + len(payload)
    if position == len(data):
        return
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


# ---- framing


def framed(payload: bytes) -> bytes:
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
