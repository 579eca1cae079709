"""What a node keeps of artifacts: checked before it is given out, dropped by its use, taken over by the next start."""

import asyncio
import errno
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from echo2.base.errors import CorruptChunk, DiskFull, EchoError
from echo2.base.ids import PeerId, RunId, Version
from echo2.base.units import LinkShape
from echo2.broadcast.artifact import (
    LINEAGE,
    STORE_BYTES_FLOOR,
    ArtifactId,
    ArtifactKey,
    Chunk,
    Header,
    Seal,
    all_of,
    root_of,
    signed_chunks,
    store_bytes_for,
    store_bytes_min,
)
from echo2.broadcast.catch_up import ArtifactBegun, ArtifactDropped, ArtifactReader, BlockArrived, CatchUpPlanner
from echo2.broadcast.events import ChunksKept, Event, HeaderSeen, PeerUp, Request, SealSeen
from echo2.broadcast.exchange import Bans, Exchange
from echo2.broadcast.library import Library, RecentChunks, restored
from echo2.broadcast.pace import Meter
from echo2.broadcast.route import STALL_S, BaseCheckpoint
from echo2.broadcast.session import BroadcastSession
from echo2.broadcast.store import SLOW_CLOSE_BYTES, ChunkStore, LeftFile
from echo2.config.run import StalenessSection
from echo2.learner.publishing.schedule import PublicationSchedule
from echo2.outside.files import MachineFiles
from echo2.trust.identity import Identity
from echo2.wire import broadcast as wire

RUN, ME, LEARNER = RunId("run"), PeerId("me"), Identity.generate()
CHUNK_BYTES = 256 << 10


def library(folder: Path, store_bytes: int = 0, recent_bytes: int = 16 << 20) -> Library:
    """`store_bytes`: a disk that is full then; 0: the limit follows the weights."""
    made = Library(ChunkStore(folder), RUN)
    made.recent = RecentChunks(recent_bytes)
    if store_bytes:
        made.store.bytes_max, made.store.fit = store_bytes, lambda weights_bytes: None  # type: ignore[method-assign]
    return made


def reader_of(held: Library) -> ArtifactReader:
    return ArtifactReader(held, CatchUpPlanner(ME, held, Meter(), LinkShape()))


def exchange_of(held: Library, me: PeerId = ME) -> Exchange:
    made = Exchange(me, held, BroadcastSession(me), Meter(), Bans())
    made.trust(LEARNER.peer_id)
    return made


def header_of(version: int, parent: int | None = None, *, run: RunId = RUN, weights_bytes: int = 1000) -> Header:
    artifact = ArtifactId(Version(version), None if parent is None else Version(parent))
    return Header(artifact, run, LINEAGE, float(version), weights_bytes, True, LEARNER.peer_id).signed(LEARNER)


def begun(to: Library, data: bytes, chunk_bytes: int, header: Header) -> list[tuple[Chunk, bytes]]:
    """The header and all chunks of an artifact, which is not sealed."""
    to.add_header(header)
    made = signed_chunks(chunk_bytes, LEARNER, header.key, 0, data)
    for chunk, digest in made:
        to.add_chunk(chunk, digest)
    return made


def added(to: Library, header: Header, size: int, chunk_bytes: int = 1000) -> ArtifactKey:
    digests = [digest for _, digest in begun(to, bytes(size), chunk_bytes, header)]
    to.add_seal(header.key, Seal(header.key, len(digests), size, root_of(digests), "print").signed(LEARNER))
    return header.key


@pytest.mark.parametrize("seed", range(5))
def test_a_chunk_that_the_consumer_does_not_wait_for_brings_it_nothing(tmp_path: Path, seed: int) -> None:
    """So a node wakes it for few of the chunks that come out of order, and it gets all blocks all the same."""
    held, blocks, idle = library(tmp_path), list[bytes](), 0
    reader = reader_of(held)
    header, data = header_of(1), [bytes([number]) * 5000 for number in range(8)]
    chunks = [pair for at, block in enumerate(data) for pair in signed_chunks(1000, LEARNER, header.key, 5 * at, block)]
    held.add_header(header)
    reader.next()
    held.add_seal(header.key, Seal(header.key, 40, 40_000, root_of(digest for _, digest in chunks), "").signed(LEARNER))
    assert reader.next() is None
    for chunk, digest in random.Random(seed).sample(chunks, len(chunks)):
        held.add_chunk(chunk, digest)
        is_awaited = reader.awaits(chunk.key, chunk.index)
        idle += not is_awaited
        while (step := reader.next()) is not None:
            assert is_awaited
            blocks += [step.payload] if isinstance(step, BlockArrived) else []
    assert blocks == data and idle > 10


@pytest.mark.parametrize("why", ["replaced", "switched", "faster"])
def test_what_a_consumer_has_begun_and_gives_up_is_said_and_the_next_begins_with_its_first_byte(
    tmp_path: Path, why: str
) -> None:
    held = library(tmp_path)
    reader = reader_of(held)
    first, again = header_of(1), header_of(2 if why == "faster" else 1)
    if why == "replaced":
        again = replace(again, published_unix_s=2.0).signed(LEARNER)
    held.add_header(first)
    held.add_chunk(*signed_chunks(1000, LEARNER, first.key, 0, bytes(2500))[0])
    assert reader.next() == ArtifactBegun(first) and reader.next() is None, "half of a block"
    if why == "replaced":
        held.drop(first.key)
    if why == "switched":
        reader.restart_from(None)
    added(held, again, 2300)
    steps = list(iter(reader.next, None))
    assert isinstance(steps[0], ArtifactDropped) and steps[0].artifact == first.artifact
    assert steps[1] == ArtifactBegun(again) and steps[2] == BlockArrived(again.artifact, bytes(2300))
    assert len(steps) == 4 and reader.version == again.artifact.version and reader.artifact is None


def test_a_way_is_chosen_anew_when_a_base_is_found_and_when_it_stalls(tmp_path: Path) -> None:
    held = library(tmp_path)
    planner = CatchUpPlanner(ME, held, Meter(), LinkShape())
    keyframe, delta, of_base = added(held, header_of(1), 500), header_of(2, 1), header_of(2, 0)
    for header in (delta, of_base):
        held.add_header(header)
    assert planner.path(None) == (keyframe, delta.key)
    planner.base = BaseCheckpoint(Version(0), 0.0)
    assert planner.path(None) == (of_base.key,)
    assert planner.look(None, True, 0.0) is None and planner.look(None, True, STALL_S) == [of_base.key]
    assert planner.path(None) == (keyframe, delta.key)
    assert planner.look(None, True, STALL_S) is None and planner.look(None, True, 2 * STALL_S) == [delta.key]


@pytest.mark.parametrize("part", ["payload", "signature"])
def test_a_chunk_that_the_disk_changed_is_neither_served_nor_decoded(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Served, it would make honest peers ban this node for a signature that does not hold."""
    held, header = library(tmp_path, recent_bytes=0), header_of(1)
    made = begun(held, bytes(range(250)), 100, header)
    assert all(held.frame(header.key, index) for index in range(3))
    (path,) = tmp_path.glob("*.artifact")
    data = bytearray(path.read_bytes())
    data[data.index(bytes(getattr(made[1][0], part)))] ^= 1
    path.write_bytes(bytes(data))
    assert held.frame(header.key, 1) is None and "disk changed it" in caplog.text
    assert held.frame(header.key, 0) and held.frame(header.key, 2)
    with pytest.raises(CorruptChunk, match="chunk 1"):
        held.chunk(header.key, 1)


@pytest.mark.parametrize(("room", "said"), [(0, "got: no space left"), (50, r"expected room for \d+ bytes, wrote 50")])
def test_a_full_disk_is_told_with_its_folder_and_what_it_has_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, said: str
) -> None:
    """The system either refuses to write, or writes what there is room for and says how much that was."""
    held, header = library(tmp_path, recent_bytes=0), header_of(1)
    held.add_header(header)
    made = signed_chunks(100, LEARNER, header.key, 0, bytes(range(250)))
    held.add_chunk(*made[0])

    def write_at(_: MachineFiles, handle: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwrite(handle, b"".join(parts)[:room], offset)

    monkeypatch.setattr(MachineFiles, "write_at", write_at)
    with pytest.raises(DiskFull, match=f"^{tmp_path}: .*{said}$"):
        held.add_chunk(*made[1])
    assert held.chunk(header.key, 0) == made[0][0] and held.frame(header.key, 1) is None
    there = lambda: [len(list(folder.iterdir())) for folder in (tmp_path, Path("/proc/self/fd"))]  # noqa: E731
    before = there()
    with pytest.raises(DiskFull):
        held.add_header(header_of(2))
    assert there() == before, "nothing of it stays"


class Later:
    """A thread that does its work once it is waited for."""

    def __init__(self, target: Callable[[int], None], args: tuple[int], name: str) -> None:
        self.start, self.is_alive, self.join = (lambda: None), (lambda: True), lambda: target(*args)


def test_on_a_full_disk_no_more_is_dropped_than_has_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file leaves its room once a thread has closed it; until then one after another was dropped for nothing, and the
    worker ended."""
    monkeypatch.setattr("echo2.broadcast.store.SLOW_CLOSE_BYTES", 0)
    monkeypatch.setattr("echo2.broadcast.store.threading", SimpleNamespace(Thread=Later))
    held = library(tmp_path)
    for version in range(1, 5):
        added(held, header_of(version, version - 1), 1_000)
    added(held, header_of(4), 1_000)
    opened = {entry.handle for entry in held.entries.values()}

    def write_at(_: MachineFiles, handle: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        if all(Path(f"/proc/self/fd/{each}").exists() for each in opened):
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwrite(handle, b"".join(parts), offset)

    monkeypatch.setattr(MachineFiles, "write_at", write_at)
    added(held, header_of(5, 4), 1_000)
    assert [str(entry.artifact) for entry in held.entries.values()] == [
        "delta 1->2", "delta 2->3", "delta 3->4", "keyframe 4", "delta 4->5",
    ]  # fmt: skip


def test_what_just_came_is_passed_on_and_decoded_without_the_disk(tmp_path: Path) -> None:
    held, header = library(tmp_path, recent_bytes=1000), header_of(1)
    made = begun(held, bytes(range(250)) * 4, 100, header)
    held.entries[header.key].records.clear()
    served = [index for index in range(len(made)) if held.frame(header.key, index) is not None]
    assert served == [5, 6, 7, 8, 9] and held.recent.held_bytes <= 1000, "a payload lies in its frame"
    assert held.chunk(header.key, 9) == made[9][0]
    held.drop(header.key)
    assert held.frame(header.key, 9) is None and held.recent.held_bytes == 0


@pytest.mark.parametrize("free", [0, 50, 300, 450])
def test_a_header_and_a_seal_find_room_in_a_store_that_is_full_to_the_last_bytes(tmp_path: Path, free: int) -> None:
    held = library(tmp_path, 1 << 20)
    for version in range(1, 4):
        added(held, header_of(version, version - 1), 2_000)
    held.store.bytes_max = held.store.used_bytes + free
    newest = added(held, header_of(4, 3), 1_000)
    begun(held, bytes(1_000), 1_000, header_of(5, 4))
    held.store.bytes_max = held.store.used_bytes + free
    (left,) = (key for key, entry in held.entries.items() if entry.artifact.version == 5)
    digests = [held.entries[left].digests[0]]
    assert held.add_seal(left, Seal(left, 1, 1_000, root_of(digests), "").signed(LEARNER))
    assert held.entries[newest].is_complete and held.entries[left].is_complete
    assert len(list(tmp_path.iterdir())) == len(held.entries) and held.store.used_bytes <= held.store.bytes_max


@pytest.mark.parametrize("is_short", [True, False])
def test_a_chunk_that_the_disk_does_not_give_is_fetched_anew_as_one_that_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    """Else its peers' links end, one after another, by our own disk's error."""
    held = library(tmp_path, recent_bytes=0)
    key = added(held, header_of(1), 3_000)

    def read(handle: int, length: int, offset: int) -> bytes:
        if is_short:
            return bytes(length // 2)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", read)
    assert held.frame(key, 1) is None
    with pytest.raises(CorruptChunk):
        held.chunk(key, 1)
    assert [held.take_rotten(), held.take_rotten()] == [[(key, ArtifactId(Version(1)))], []], "it is told once"
    assert held.frame(key, 1) is None
    held.empty(key)
    assert held.entries[key].seal is not None and not held.entries[key].digests
    assert not held.take_rotten(), "its reader has it fetched anew: what has come since is no worse"


def test_a_file_that_is_gone_before_it_is_taken_over_is_not_taken_for_held(tmp_path: Path) -> None:
    left(tmp_path, 1)
    (path,) = tmp_path.iterdir()
    found, file = library(tmp_path), LeftFile(path)
    path.unlink()
    with pytest.raises(OSError, match="No such file"):
        found.take_over(file)
    assert not found.entries


async def test_what_is_new_is_of_use_and_costs_its_bringer_none_of_the_loops_time_and_what_is_forged_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may take long to make a file, in which the link would be read no more."""
    held, header = library(tmp_path), header_of(1)
    exchange = exchange_of(held)
    (made,) = signed_chunks(1000, LEARNER, header.key, 0, bytes(500))
    seal = Seal(header.key, 1, 500, root_of([made[1]]), "").signed(LEARNER)
    asks = Request(PeerId("a"), header.key, (0,))
    frames = [wire.header_to_bytes(header), wire.seal_to_bytes(seal)]
    told = [exchange.on_frame(PeerId(name), frames[0]) for name in ("a", "b")]
    forged = replace(made[0], payload=bytes(499)), replace(seal, fingerprint="another")
    for frame in (wire.chunk_to_bytes(forged[0]), wire.seal_to_bytes(forged[1])):
        with pytest.raises(EchoError):
            exchange.on_frame(PeerId("c"), frame)
    for frame in (frames[1], wire.chunk_to_bytes(made[0])):
        told += [exchange.on_frame(PeerId(name), frame) for name in ("a", "b")]
    link = exchange.links[PeerId("a")] = Mock()
    for event in (PeerUp(PeerId("a")), *[asks] * 2):
        exchange.act(event)
    (sent,) = link.send_chunk.call_args.args
    exchange.on_sent(sent, None)
    later = exchange.now() + 5.0
    monkeypatch.setattr(Exchange, "now", lambda _: later)
    exchange.act(asks)
    assert link.send_chunk.call_count == 2, "the disk did not give it, so it is not on its way"
    held.drop(header.key)
    told.append(exchange.on_frame(PeerId("a"), frames[0]))
    exchange.stop_timer()
    assert told == [True, False] * 3 + [False], "what was dropped may be told again without end"


def test_a_full_store_loses_first_what_leads_to_old_versions(tmp_path: Path) -> None:
    held = library(tmp_path, 40_000)
    keyframe = added(held, header_of(4), 10_000)
    for v in range(1, 9):
        added(held, header_of(v, v - 1), 2_000)
    into_newest = added(held, header_of(8, 0), 6_000)
    added(held, header_of(9, 8), 8_000)
    names = {str(entry.header.artifact) for entry in held.entries.values()}
    assert keyframe in held.entries and into_newest in held.entries and held.store.used_bytes <= 40_000
    assert {f"delta {v - 1}->{v}" for v in range(5, 10)} <= names, "a newcomer's way from the keyframe"
    assert not {"delta 0->1", "delta 1->2"} & names and not held.take_rotten()


def test_no_more_files_are_open_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.broadcast.library.ARTIFACTS_MAX", 3)
    held = library(tmp_path)
    for version in range(1, 8):
        added(held, header_of(version, version - 1), 10)
    assert [entry.artifact.version for entry in held.entries.values()] == [5, 6, 7]


def test_a_newcomers_way_is_not_given_up_for_a_delta_that_has_no_room(tmp_path: Path) -> None:
    held = library(tmp_path, 14_000)
    keyframe = added(held, header_of(1), 10_000)
    with pytest.raises(DiskFull):
        added(held, header_of(2, 1), 8_000)
    assert held.entries[keyframe].is_complete and held.frame(keyframe, 9) is not None


@pytest.mark.parametrize("is_sealed_last", [True, False])
def test_what_the_publisher_sealed_wrongly_is_dropped_with_its_last_part(tmp_path: Path, is_sealed_last: bool) -> None:
    dropped, header = list[ArtifactKey](), header_of(1)
    held = Library(ChunkStore(tmp_path), RUN, dropped.append)
    (made,) = signed_chunks(1000, LEARNER, header.key, 0, bytes(500))
    wrong = Seal(header.key, 1, 500, b"x" * 32, "")
    held.add_header(header)
    parts = [lambda: held.add_chunk(*made), lambda: held.add_seal(header.key, wrong)]
    first, last = parts if is_sealed_last else reversed(parts)
    assert first() and not last()
    assert dropped == [header.key] and not held.entries and not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [0.01, 0.3, 0.8, 1.0])
def test_a_newcomers_way_has_room_however_large_the_deltas_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Those of weights in float32 take 0.4 to 0.7: the second or third after a keyframe found no room, which ended the run."""
    monkeypatch.setattr("echo2.broadcast.artifact.STORE_BYTES_FLOOR", 0)
    weights_bytes = 1 << 20
    held, schedule = library(tmp_path, store_bytes_for(weights_bytes)), PublicationSchedule(StalenessSection(bound=2))
    keyframe_bytes, delta_bytes = int(0.99 * weights_bytes), int(0.99 * share * weights_bytes)
    for version in map(Version, range(12)):
        if version:
            schedule.begin(version)
            added(held, header_of(version, version - 1), delta_bytes, 16 << 10)
            schedule.delta_published(version, delta_bytes, weights_bytes)
        if schedule.is_keyframe_due or not version:
            added(held, header_of(version), keyframe_bytes, 16 << 10)
            schedule.keyframe_published(keyframe_bytes)


def test_a_newer_keyframe_replaces_the_older_where_only_one_has_room(tmp_path: Path) -> None:
    """Else the learner's second keyframe ends the run, and a worker's is fetched for ever."""
    held = library(tmp_path, 14_000)
    first = added(held, header_of(1), 10_000)
    added(held, header_of(2, 1), 500)
    second = added(held, header_of(2), 10_000)
    assert first not in held.entries and held.entries[second].is_complete and not held.take_rotten()
    assert held.store.used_bytes <= 14_000


def events(found: Library, me: PeerId = ME) -> list[Event]:
    async def all_of_them() -> list[Event]:
        return [event async for event in restored(found, me)]

    return asyncio.run(all_of_them())


def test_a_store_follows_the_weights_also_after_a_restart(tmp_path: Path) -> None:
    held, header = library(tmp_path), header_of(1, weights_bytes=8 << 30)
    assert held.store.bytes_max == STORE_BYTES_FLOOR
    held.add_header(header)
    assert held.store.bytes_max == store_bytes_for(8 << 30) >= 2 * store_bytes_min(8 << 30) > 16 << 30
    held.close()
    again = library(tmp_path)
    events(again)
    assert header.key in again.entries and again.store.bytes_max == store_bytes_for(8 << 30)


def test_blocks_are_read_back_of_the_whole_or_newer_publication_and_what_was_dropped_is_said(tmp_path: Path) -> None:
    held = library(tmp_path)
    key, artifact = added(held, header_of(1, 0), 2_500), ArtifactId(Version(1), Version(0))
    blocks = held.blocks_of(artifact)
    assert blocks is not None and list(blocks) == [bytes(2_500)]
    blocks = held.blocks_of(artifact)
    held.drop(key)
    assert blocks is not None
    with pytest.raises(CorruptChunk, match="dropped"):
        next(blocks)
    assert held.blocks_of(artifact) is None
    older, newer = added(held, header_of(1, 0), 500), replace(header_of(1, 0), published_unix_s=2.0).signed(LEARNER)
    begun(held, bytes(700), 1000, newer)
    assert held.find(artifact) == older, "the one that is whole"
    assert added(held, newer, 700) == held.find(artifact), "the newer of two whole ones"
    held.add_header(header_of(0))
    assert held.published_unix_s == 2.0, "the next is published later"
    held.close()
    for at, (key, name) in enumerate([(older, "b"), (newer.key, "a")]):
        named = (tmp_path / f"{key.hex()}.artifact").rename(tmp_path / f"{name}.artifact")
        os.utime(named, (at, at))
    for me in (ME, LEARNER.peer_id):
        again = library(tmp_path)
        events(again, me)
        path = CatchUpPlanner(ME, again, Meter(), LinkShape()).path(Version(0))
        assert path == (newer.key,), "the next goes upon that"
        again.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_of_two_publications_of_a_version_the_newer_is_taken_in_whichever_order_they_come(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    held = library(tmp_path)
    made = [header_of(1), replace(header_of(1), published_unix_s=2.0).signed(LEARNER)]
    exchange = exchange_of(held)
    for number in order:
        exchange.on_header(PeerId("peer"), made[number])
    exchange.on_header(PeerId("peer"), header_of(2, run=RunId("another")))  # signed by our publisher, of no use here
    exchange.on_header(PeerId("peer"), replace(header_of(2), publisher=PeerId("another")))
    with pytest.raises(EchoError):
        exchange.on_header(PeerId("peer"), replace(header_of(2), published_unix_s=9.0))  # not as it was signed
    exchange.stop_timer()
    assert list(held.entries) == [made[1].key]
    exchange.trust(PeerId("the learner that took its place"))
    assert not held.entries, "nobody takes what another has signed"
    publisher = exchange_of(library(tmp_path / "publisher"), LEARNER.peer_id)
    publisher.on_header(PeerId("peer"), header_of(1))
    assert not publisher.library.entries, "what it has dropped itself is not announced again"


# ---- the next start


def left(folder: Path, chunks: int, *, is_sealed: bool = True, run: RunId = RUN) -> ArtifactKey:
    """What a run that ended leaves in the folder; the seal came before the last chunk."""
    made, size = library(folder), chunks * CHUNK_BYTES
    header = header_of(1, run=run, weights_bytes=size)
    made.add_header(header)
    parts = signed_chunks(CHUNK_BYTES, LEARNER, header.key, 0, bytes(size))
    for chunk, digest in parts:
        if is_sealed and chunk.index == chunks - 1:
            root = root_of(each for _, each in parts)
            made.add_seal(header.key, Seal(header.key, chunks, size, root, "print").signed(LEARNER))
        made.add_chunk(chunk, digest)
    made.close()
    made.drop(header.key)
    return header.key


def test_what_was_left_is_taken_over_at_once_and_a_large_file_is_dropped_without_waiting(tmp_path: Path) -> None:
    """The kernel takes 0.1 s a GiB to free a file's pages: no thread that others wait for closes it."""
    count = SLOW_CLOSE_BYTES // CHUNK_BYTES + 1
    key = left(tmp_path, count)
    found = library(tmp_path)
    assert events(found) == [
        HeaderSeen(None, key, is_wanted=False),
        ChunksKept(key, all_of(count), dict.fromkeys(range(count), CHUNK_BYTES)),
        SealSeen(None, key, count),
    ]
    assert found.entries[key].is_complete and found.chunk(key, count - 1).payload == bytes(CHUNK_BYTES)
    found.drop(key)
    assert not list(tmp_path.iterdir()) and found.store.used_bytes == 0 and found.frame(key, 0) is None


async def test_the_loop_goes_on_while_chunks_are_checked_and_checking_is_given_up_between_two_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.broadcast.library.PIECE_BYTES", 4 << 20)
    key = left(tmp_path, 200)
    unchecked = LeftFile(*tmp_path.iterdir())
    assert len(list(iter(lambda: unchecked.check_some(16 * CHUNK_BYTES), False))) == 200 // 16
    found = library(tmp_path)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            async for _ in restored(found, ME):
                pass
    assert key not in found.entries and len(list(tmp_path.iterdir())) == 1, "the next start checks it"
    on_loop_s, in_all_s = time.thread_time(), time.process_time()
    async for _ in restored(library(tmp_path), ME):
        pass
    on_loop_s, in_all_s = time.thread_time() - on_loop_s, time.process_time() - in_all_s
    assert on_loop_s < 0.5 * in_all_s, "the loop's thread checks chunks itself"


def test_what_is_not_sound_or_of_another_run_is_removed_and_counted(tmp_path: Path) -> None:
    left(tmp_path, 5, run=RunId("another"))
    good = left(tmp_path, 4)
    for number, data in enumerate([b"", b"\0\0\0\5wrong"]):
        (tmp_path / f"{number}.artifact").write_bytes(data)
    for wrong in ("chunk of another", "seal of another", "seal by another", "header by another"):
        header = header_of(2)
        of = good if wrong == "chunk of another" else header.key
        ((chunk, digest),) = signed_chunks(100, LEARNER, of, 0, bytes(10))
        seal = Seal(good if wrong == "seal of another" else header.key, 1, 10, root_of([digest]), "")
        seal = seal.signed(Identity.generate() if wrong == "seal by another" else LEARNER)
        header = replace(header, signature=bytes(64)) if wrong == "header by another" else header
        frames = wire.header_to_bytes(header), wire.chunk_to_bytes(chunk), wire.seal_to_bytes(seal)
        whole = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
        (tmp_path / f"{wrong}.artifact").write_bytes(whole)
    spoilt = bytearray((tmp_path / f"{good.hex()}.artifact").read_bytes())
    spoilt[len(spoilt) // 2] ^= 1
    (tmp_path / "spoilt.artifact").write_bytes(spoilt)
    found = library(tmp_path)
    assert {event.key for event in events(found) if isinstance(event, ChunksKept)} == {good} == set(found.entries)
    assert found.unsound_files == 8 and len(list(tmp_path.iterdir())) == 1


def test_our_own_that_was_cut_off_is_dropped_and_another_publishers_goes_on(tmp_path: Path) -> None:
    """What was half written is overwritten; it is longer than the next record, whose rest must not be taken for records."""
    key = left(tmp_path, 3, is_sealed=False)
    with (tmp_path / f"{key.hex()}.artifact").open("ab") as file:
        file.write((3 * CHUNK_BYTES).to_bytes(4, "big") + bytes(2 * CHUNK_BYTES))
    found = library(tmp_path)
    assert [type(event) for event in events(found)] == [HeaderSeen, ChunksKept]
    (made,) = signed_chunks(CHUNK_BYTES, LEARNER, key, 3, bytes(CHUNK_BYTES))
    found.add_chunk(*made)
    found.close()
    again = library(tmp_path)
    assert ChunksKept(key, all_of(4), dict.fromkeys(range(4), CHUNK_BYTES)) in events(again)
    assert again.unsound_files == 0
    again.close()
    ours = library(tmp_path)
    assert events(ours, LEARNER.peer_id) == [] and key not in ours.entries and not list(tmp_path.iterdir())
