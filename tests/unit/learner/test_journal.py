from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.errors import DiskFull, StateError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.rollouts.groups import Draw, SentTokens
from echo2.learner.rollouts.history import (
    BatchDrawn,
    Finished,
    GroupDropped,
    History,
    Opened,
    Record,
    SegmentBegan,
    VersionPublished,
)
from echo2.learner.rollouts.journal import Journal, read_journal

SAMPLING = SamplingParams(temperature=0.5, max_new_tokens=8, stop_token_ids=(1,), seed=3)


def opened(cursor: int) -> Opened:
    spec = GroupSpec(GroupId(f"g{cursor:08d}"), (5, 6), 2, SAMPLING, 0)
    return Opened(Draw(cursor, 0, (5, 6), SAMPLING), spec)


def finished(cursor: int, index: int) -> Finished:
    spans = (VersionSpan(Version(3), 2),)
    senders = (SentTokens(PeerId("alice"), 1), SentTokens(PeerId("bob"), 1)) if index else ()
    rollout = Rollout(GroupId(f"g{cursor:08d}"), index, (4, 1), (-0.5, -0.25), (-0.5, -0.25), spans, FinishReason.STOP)
    return Finished(rollout, senders)


RECORDS: list[Record] = [
    SegmentBegan("run", Step(0), 0, (Version(0),)),
    opened(0),
    opened(1),
    finished(0, 0),
    finished(0, 1),
    BatchDrawn(Step(0), (GroupId("g00000000"),), ((0.5, None),)),
    VersionPublished(Version(4), ""),
    VersionPublished(Version(4), "00ff"),
    GroupDropped(GroupId("g00000001")),
]


def written(folder: Path) -> Path:
    journal = Journal(folder)
    first = RECORDS[0]
    assert isinstance(first, SegmentBegan)
    journal.begin(first)
    for record in RECORDS[1:]:
        journal.append(record)
    asyncio.run(journal.commit())
    journal.close()
    return folder / "segment-00000000.records"


def test_what_a_later_try_and_a_later_step_say_is_read_too(tmp_path: Path) -> None:
    group = opened(3)
    told: list[Record] = [
        Opened(replace(group.draw, retry=2), group.spec),
        BatchDrawn(Step(7), (GroupId("a"), GroupId("b")), ((0.0, 1.0), (None,))),
    ]
    journal = Journal(tmp_path)
    journal.begin(SegmentBegan("run", Step(6), 5, (Version(4), Version(6))))
    for record in told:
        journal.append(record)
    journal.close()
    records, newest = read_journal(tmp_path, Step(6))
    assert [record for _, record in records][1:] == told and newest == 6


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written(tmp_path)
    records, newest = read_journal(tmp_path, Step(0))
    assert [record for _, record in records] == RECORDS and newest == 0


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(1, 400))
def test_a_torn_end_is_cut_off_and_writing_goes_on(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("journal")
    path = written(folder)
    os.truncate(path, max(0, path.stat().st_size - cut))
    records, newest = read_journal(folder, Step(0))
    kept = [record for _, record in records]
    assert kept == RECORDS[: len(kept)] and len(kept) < len(RECORDS)
    journal = Journal(folder)
    journal.go_on(newest)
    journal.append(RECORDS[-1])
    journal.close()
    assert [record for _, record in read_journal(folder, Step(0))[0]] == [*kept, RECORDS[-1]]


def test_every_flipped_bit_of_a_journal_stops_the_start_and_changes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in (0, 3, 7):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            path.write_bytes(data)
            with pytest.raises(StateError, match=r"found a broken record .* truncate -s \d+"):
                read_journal(tmp_path, Step(0))
            assert path.read_bytes() == data


def test_the_remedy_in_the_message_keeps_what_stands_before_the_damage(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError) as told:
        read_journal(tmp_path, Step(0))
    os.truncate(path, int(str(told.value).split("truncate -s ")[1].split()[0]))
    kept = [record for _, record in read_journal(tmp_path, Step(0))[0]]
    assert kept == RECORDS[: len(kept)] and 2 <= len(kept) < len(RECORDS) - 2


@settings(max_examples=60, deadline=None)
@given(whole=st.integers(1, 8), stored=st.integers(0, 2000))
def test_sectors_that_a_power_cut_lost_are_a_torn_end(
    tmp_path_factory: pytest.TempPathFactory, whole: int, stored: int
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder)
    assert isinstance(RECORDS[0], SegmentBegan)
    journal.begin(RECORDS[0])
    for record in RECORDS[1:whole]:
        journal.append(record)
    path = folder / "segment-00000000.records"
    synced = path.stat().st_size
    long = Opened(Draw(9, 0, (7,) * 3000, SAMPLING), GroupSpec(GroupId("g9"), (7,) * 3000, 2, SAMPLING, 0))
    journal.append(long)
    journal.close()
    data = bytearray(path.read_bytes())
    lost_from = -(-(synced + stored) // 512) * 512
    data[lost_from:] = bytes(len(data) - lost_from)
    path.write_bytes(data)
    assert [record for _, record in read_journal(folder, Step(0))[0]] == RECORDS[:whole]
    assert path.stat().st_size == synced


def test_a_broken_record_before_the_last_segment_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path)
    journal = Journal(tmp_path)
    journal.begin(SegmentBegan("run", Step(2), 5, (Version(0), Version(2))))
    journal.close()
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(StateError, match="found a broken record .* and remove the later segments"):
        read_journal(tmp_path, Step(0))
    assert read_journal(tmp_path, Step(2))[1] == 2
    with pytest.raises(StateError, match="segment of step 1"):
        read_journal(tmp_path, Step(1))


def test_history_holds_what_was_neither_trained_nor_dropped(tmp_path: Path) -> None:
    written(tmp_path)
    history = History()
    for segment, record in read_journal(tmp_path, Step(0))[0]:
        history.apply(record, segment)
    assert history.cursor == 2 and history.published == {0: "", 4: "00ff"}
    assert history.drawn[Step(0)].rewards == ((0.5, None),) and history.dropped == {"g00000001"}
    assert history.groups[GroupId("g00000000")].rollouts[1].is_finished


def test_commits_at_the_same_time_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    first = RECORDS[0]
    assert isinstance(first, SegmentBegan)
    journal.begin(first)
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), real(file))[1])

    async def many() -> None:
        async def one(cursor: int) -> None:
            journal.append(opened(cursor))
            await journal.commit()

        await asyncio.gather(*(one(cursor) for cursor in range(50)))

    asyncio.run(many())
    journal.close()
    assert 1 <= len(synced) <= 3


def test_a_new_segment_begins_once_the_one_before_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was appended but not committed in the old one would else be missing behind a commit of the new one."""
    path = written(tmp_path)
    journal = Journal(tmp_path)
    journal.go_on(Step(0))
    journal.append(opened(2))
    synced: set[int] = set()
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), real(file))[1])
    journal.begin(SegmentBegan("run", Step(2), 3, (Version(0),)))
    assert path.stat().st_ino in synced
    journal.close()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    first = RECORDS[0]
    assert isinstance(first, SegmentBegan)
    journal.begin(first)

    def full(file: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFull, match="journal"):
        journal.append(opened(0))
    journal.close()


def test_a_record_that_found_no_room_leaves_nothing_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    journal = Journal(tmp_path)
    journal.go_on(Step(0))
    real, calls = os.write, iter(range(9))

    def half(file: int, data: bytes) -> int:
        if next(calls) > 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[: len(data) // 2])

    before = path.stat().st_size
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        with pytest.raises(DiskFull, match="journal"):
            journal.append(opened(5))
    assert path.stat().st_size == before
    journal.append(opened(6))  # there is room again
    journal.close()
    assert [record for _, record in read_journal(tmp_path, Step(0))[0]] == [*RECORDS, opened(6)]


def test_a_journal_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StateError, match="expected to read it"):
        read_journal(tmp_path, Step(0))


def test_a_journal_says_who_sent_which_tokens() -> None:
    history = History()
    for record in RECORDS:
        history.apply(record, Step(0))
    group = history.groups[GroupId("g00000000")]
    assert group.senders == {0: (), 1: (SentTokens(PeerId("alice"), 1), SentTokens(PeerId("bob"), 1))}
