"""The journal on disk survives kills, power cuts and bad disks; and which groups come back by its records."""

import asyncio
import errno
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from echo2.base.errors import DiskFull, StateError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.learner.rollouts import journal as records
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.groups import Group, SentTokens, TurnOf
from echo2.learner.rollouts.journal import History, Journal, read_journal
from echo2.wire.gen.echo2.v1 import journal_pb2 as pb
from tests.unit.learner.made import groups_config, rollout_of

Record = pb.JournalRecord
SAMPLING = SamplingParams(temperature=0.5, max_new_tokens=8, stop_token_ids=(1,), seed=3)
SENDERS = (SentTokens(PeerId("alice"), 1), SentTokens(PeerId("bob"), 1))
BEGAN = records.began("run", Step(0), 0, (Version(0), Version(2)))


def opened(group_id: str, cursor: int, rollouts: int = 2, retry: int = 0, prompt: int = 2) -> Record:
    spec = GroupSpec(GroupId(group_id), (5,) * prompt, rollouts, SAMPLING, 0)
    return records.opened(Group(spec, cursor, retry))


def finished(group_id: str, index: int = 0, senders: tuple[SentTokens, ...] = SENDERS) -> Record:
    return records.finished(rollout_of((4, 1), index, name=group_id, spans=[(3, 2)], logprobs=(-0.5, -0.25)), senders)


def drawn(step: int, rewards: dict[str, tuple[float | None, ...]]) -> Record:
    groups = [
        pb.DrawnGroup(group_id=name, rewards=[pb.DrawnReward(value=v or 0.0, is_failed=v is None) for v in values])
        for name, values in rewards.items()
    ]
    return pb.JournalRecord(batch=pb.DrawnBatch(step=step, groups=groups))


RECORDS: list[Record] = [
    BEGAN,
    opened("g0", 0),
    opened("g1", 1, retry=2),
    finished("g0", 0, ()),
    finished("g0", 1),
    drawn(7, {"g0": (0.5, None), "g9": (0.0, 1.0)}),
    records.published(Version(4)),
    records.published(Version(4), "00ff"),
    records.scored(GroupId("a1"), (0, 2), 0.5, (1,), is_final=True),
    records.scored(GroupId("a1"), (), None, (3,), is_final=False),
    records.closed(GroupId("g1")),
]


def written(folder: Path, told: list[Record] = RECORDS) -> Path:
    journal = Journal(folder)
    journal.begin(told[0])
    for record in told[1:]:
        journal.append(record)
    asyncio.run(journal.commit())
    journal.close()
    return folder / "segment-00000000.records"


def read(folder: Path) -> list[Record]:
    return [record for _, record in read_journal(folder, Step(0))[0]]


@settings(max_examples=60, deadline=None)
@given(whole=st.integers(1, len(RECORDS)), stored=st.integers(0, 9200), is_zeroed=st.booleans())
def test_a_torn_end_is_cut(tmp_path_factory: pytest.TempPathFactory, whole: int, stored: int, is_zeroed: bool) -> None:
    """A kill leaves fewer bytes of the last record; a power cut may leave zeros in its last sectors."""
    folder = tmp_path_factory.mktemp("journal")
    path = written(folder, RECORDS[:whole])
    synced = path.stat().st_size
    journal = Journal(folder)
    journal.go_on(Step(0))
    journal.append(opened("g9", 9, prompt=9000))
    journal.close()
    data = path.read_bytes()
    assert len(data) > synced + 9000
    end = -(-(synced + stored) // 512) * 512 if is_zeroed else synced + stored
    path.write_bytes(data[:end] + bytes(max(0, len(data) - end) if is_zeroed else 0))
    assert read(folder) == RECORDS[:whole] or end >= len(data)
    if end < len(data):
        assert path.stat().st_size == synced
        journal = Journal(folder)
        journal.go_on(Step(0))
        journal.append(RECORDS[-1])
        journal.close()
        assert read(folder) == [*RECORDS[:whole], RECORDS[-1]]


def test_what_was_written_is_read_every_flipped_bit_stops_the_start_and_the_remedy_keeps_what_stands_before(
    tmp_path: Path,
) -> None:
    path = written(tmp_path)
    assert read(tmp_path) == RECORDS and read_journal(tmp_path, Step(0))[1] == 0
    whole = path.read_bytes()
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(StateError, match=r"found a broken record .* truncate -s \d+") as told:
            read(tmp_path)
        assert path.read_bytes() == data
    os.truncate(path, int(str(told.value).split("truncate -s ")[1].split()[0]))
    assert read(tmp_path) == RECORDS[:-1]
    path.unlink()
    path.mkdir()
    with pytest.raises(StateError, match="expected to read it"):
        read(tmp_path)


def test_a_new_segment_begins_once_the_old_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was appended but not committed in the old one would else be missing behind a commit of the new one."""
    path = written(tmp_path)
    journal = Journal(tmp_path)
    journal.go_on(Step(0))
    journal.append(opened("g2", 2))
    begun: dict[int, bool] = {}
    real, new = os.fsync, tmp_path / "segment-00000002.records"
    monkeypatch.setattr(
        os, "fsync", lambda file: (begun.setdefault(os.fstat(file).st_ino, new.exists()), real(file))[1]
    )
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    journal.begin(records.began("run", Step(2), 0, ()))
    assert journal.segment == 2 and len(list(Path("/proc/self/fd").iterdir())) == open_files
    journal.close()
    assert not begun[path.stat().st_ino], "a power cut in between would leave a torn end before the newest segment"
    assert begun[new.stat().st_ino] and begun[tmp_path.stat().st_ino], "it has its name before a commit counts on it"
    assert [step for step, _ in read_journal(tmp_path, Step(0))[0]] == [0] * (len(RECORDS) + 1) + [2]
    os.truncate(path, path.stat().st_size - 1)  # so its end cannot be torn
    with pytest.raises(StateError, match="found a broken record .* and remove the later segments"):
        read(tmp_path)
    assert read_journal(tmp_path, Step(2))[1] == 2
    again = Journal(tmp_path)
    again.go_on(Step(2))
    assert again.segment == 2, "a checkpoint says from which one on a restart reads: those before are gone"
    again.close()
    with pytest.raises(StateError, match="segment of step 1"):
        read_journal(tmp_path, Step(1))


def test_a_commit_returns_after_a_sync_that_began_with_its_record_and_many_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, [BEGAN])
    journal = Journal(tmp_path)
    journal.go_on(Step(0))
    synced: list[int] = []
    real = os.fsync

    def fsync(file: int) -> None:
        reached = os.fstat(file).st_size
        time.sleep(0.004)
        real(file)
        synced.append(reached)

    monkeypatch.setattr(os, "fsync", fsync)

    async def many() -> None:
        async def append(cursor: int) -> None:
            await asyncio.sleep(cursor % 4 * 0.002)  # some while a sync is under way
            journal.append(opened("g", cursor))
            reached = path.stat().st_size
            leaving = asyncio.create_task(journal.commit())
            await asyncio.sleep(0)
            leaving.cancel()  # its worker is gone: others wait for the same sync
            await journal.commit()
            assert max(synced, default=0) >= reached

        await asyncio.gather(*(append(cursor) for cursor in range(50)))

    asyncio.run(many())
    journal.close()
    assert len(synced) <= 8


@pytest.mark.parametrize("failing", ["fsync", "dup"])
async def test_after_a_sync_that_failed_no_commit_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Linux reports a lost write once; whoever asks again is told that all is well."""
    journal, real, failures = Journal(tmp_path), getattr(os, failing), [errno.EIO]
    journal.begin(BEGAN)

    def sync(file: int) -> object:
        if failures:
            raise OSError(failures.pop(), "Input/output error")
        return real(file)

    monkeypatch.setattr(os, failing, sync)
    journal.append(opened("g", 0))
    for _ in range(2):
        with pytest.raises(StateError, match="expected to write .* Input/output error"):
            await journal.commit()
    journal.close()


def test_a_record_without_room_leaves_no_part_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with pytest.raises(DiskFull, match="journal: no space left"):
            journal.append(opened("g5", 5))
    assert path.stat().st_size == before
    journal.append(opened("g6", 6))  # there is room again
    journal.close()
    assert read(tmp_path) == [*RECORDS, opened("g6", 6)]


# ---- what comes back


def restored(told: list[Record], next_step: int = 0, segment: int = 0) -> tuple[OpenGroups, History]:
    history, groups = History(), OpenGroups(groups_config(4, 2, is_driven=True), 100, Step(next_step))
    for record in told:
        history.apply(record, Step(segment))
    history.restore(groups)
    return groups, history


def test_history_holds_what_was_neither_trained_nor_dropped_and_who_sent_it() -> None:
    groups, history = restored(RECORDS)
    assert history.cursor == 2 and history.published == {0: "", 2: "", 4: "00ff"} and groups.published == [0, 2, 4]
    assert history.drawn[Step(7)] == RECORDS[5].batch
    assert not groups.groups, "only once its batch is due: it takes eight times the memory"
    groups.next_step = Step(7)
    with pytest.raises(StateError, match="expected the rollouts of group g9"):
        history.next_batch(groups)
    assert not history.groups and not history.finished
    assert list(groups.groups) == ["g0"] and groups.groups[GroupId("g0")].rollouts[1].is_finished
    assert groups.groups[GroupId("g0")].senders == {0: (), 1: SENDERS}
    (anew,) = restored([*RECORDS[:2], RECORDS[3], records.closed(GroupId("g0")), RECORDS[1]])[0].groups.values()
    assert not anew.is_begun, "what it had is dropped"
    of_step_5 = opened("g1", 1, retry=2)
    of_step_5.opened.group.consume_step = 5
    for segment in (1, 9):
        again_groups, _ = restored([BEGAN, of_step_5], segment=segment)
        (again,) = again_groups.groups.values()
        assert (again.cursor, again.retry) == (1, 2), "a restart gives its prompt no further tries"
        assert again.min_version == min(segment, 5) - again_groups.bound, "as when it was opened"


def problem(root: GroupId, cursor: int) -> tuple[list[GroupId], list[Record]]:
    """Two seats at which agents play: of one a call has ended and its next is open, of the other the first is open."""
    calls = [TurnOf(root, chain, depth).group_id for chain, depth in ((0, 1), (0, 2), (1, 1))]
    return [root, *calls], [
        opened(root, cursor), *(opened(call, cursor, 1) for call in calls), finished(calls[0])
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["dropped", "trained", "evaluation over"])
def test_of_a_problem_that_has_ended_no_call_comes_back_and_of_another_all(end: str) -> None:
    kind = "x00000003-0000" if end == "evaluation over" else "a0000000"
    gone, told = problem(GroupId(f"{kind}0"), 0)
    others, told_of_others = problem(GroupId(f"{kind}1"), 1)
    last = records.closed(gone[0])
    if end == "trained":
        told.append(records.scored(gone[0], (0, 1), 1.0, (), is_final=True))
        last = drawn(0, {gone[0]: (1.0, 1.0)})
    groups, _ = restored([*told, *told_of_others, last], next_step=1)
    assert list(groups.groups) == others
    assert [group.spec.group_id for group in groups.lacking] == others[2:], "of the agents' open calls"
    assert [turn.token_ids for _, turn in groups.turns(others[0], 0)] == [(4, 1), ()]
