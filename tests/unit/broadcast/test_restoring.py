"""Chunks of an earlier run: checked in threads, whole or not at all."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.artifact import ArtifactId, ArtifactKey, Header, Seal, all_of, root_of, signed_chunks
from echo2.broadcast.events import ChunksKept, Event, HeaderSeen, SealSeen
from echo2.broadcast.library import Library, LibraryLimits, restored
from echo2.broadcast.store import SLOW_CLOSE_BYTES, ChunkStore
from echo2.trust.identity import Identity

RUN, ME = RunId("run"), PeerId("me")
CHUNK_BYTES = 256 << 10
LARGE = SLOW_CLOSE_BYTES // CHUNK_BYTES + 1


def library(folder: Path) -> Library:
    return Library(ChunkStore(folder, 1 << 30), RUN, LibraryLimits(), "delta 1")


def left(
    folder: Path, identity: Identity, chunk_count: int, *, is_sealed: bool = True, run: RunId = RUN
) -> ArtifactKey:
    """What a run that ended leaves in the folder."""
    made = library(folder)
    size = chunk_count * CHUNK_BYTES
    header = Header(ArtifactId(Version(1)), run, "delta 1", 1.0, size, True, identity.peer_id).signed(identity)
    made.add_header(header)
    digests = []
    for chunk, digest in signed_chunks(CHUNK_BYTES, identity, header.key, 0, bytes(size)):
        made.add_chunk(chunk, digest)
        digests.append(digest)
    if is_sealed:
        made.add_seal(header.key, Seal(header.key, chunk_count, size, root_of(digests), "print").signed(identity))
    made.store.close()
    return header.key


def events(found: Library, me: PeerId = ME, piece_bytes: int = 1 << 20) -> list[Event]:
    async def all_of_them() -> list[Event]:
        return [event async for event in restored(found, me, piece_bytes)]

    return asyncio.run(all_of_them())


def test_what_was_left_is_taken_over_at_once(tmp_path: Path) -> None:
    key = left(tmp_path, Identity.generate(), 20)
    found = library(tmp_path)
    assert events(found) == [
        HeaderSeen(None, key, is_wanted=False),
        ChunksKept(key, all_of(20), dict.fromkeys(range(20), CHUNK_BYTES)),
        SealSeen(None, key, 20),
    ]
    assert found.entries[key].is_complete and found.chunk(key, 19).payload == bytes(CHUNK_BYTES)


def test_the_loop_goes_on_while_chunks_are_checked(tmp_path: Path) -> None:
    left(tmp_path, Identity.generate(), 200)

    async def scene() -> tuple[float, float, int]:
        turns, is_over = 0, False

        async def others() -> None:
            nonlocal turns
            while not is_over:
                turns += 1
                await asyncio.sleep(0.001)

        task = asyncio.create_task(others())
        on_loop_s, in_all_s = time.thread_time(), time.process_time()
        async for _ in restored(library(tmp_path), ME, piece_bytes=4 << 20):
            pass
        on_loop_s, in_all_s = time.thread_time() - on_loop_s, time.process_time() - in_all_s
        is_over = True
        await task
        return on_loop_s, in_all_s, turns

    on_loop_s, in_all_s, turns = asyncio.run(scene())
    assert on_loop_s < 0.5 * in_all_s, "the loop's thread checks chunks itself"
    assert turns > 200 * CHUNK_BYTES // (4 << 20), "it has a turn with each piece at least"


def test_checking_is_given_up_between_two_pieces(tmp_path: Path) -> None:
    key = left(tmp_path, Identity.generate(), 200)

    async def scene() -> Library:
        found = library(tmp_path)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                async for _ in restored(found, ME, piece_bytes=1 << 20):
                    pass
        return found

    assert key not in asyncio.run(scene()).entries
    assert [path.exists() for path in tmp_path.iterdir()] == [True], "the next start checks it"


def test_what_is_not_sound_or_of_another_run_is_removed_and_counted(tmp_path: Path) -> None:
    identity = Identity.generate()
    left(tmp_path, identity, 5, run=RunId("another"))
    good = left(tmp_path, identity, 4)
    for number, data in enumerate([b"", b"\0\0\0\5wrong"]):
        (tmp_path / f"{number}.artifact").write_bytes(data)
    spoilt = bytearray((tmp_path / f"{good.hex()}.artifact").read_bytes())
    spoilt[len(spoilt) // 2] ^= 1
    (tmp_path / "spoilt.artifact").write_bytes(spoilt)
    found = library(tmp_path)
    assert {event.key for event in events(found) if isinstance(event, ChunksKept)} == {good} == set(found.entries)
    assert found.unsound_files == 4 and len(list(tmp_path.iterdir())) == 1


def test_our_own_that_was_cut_off_is_dropped_and_another_publishers_goes_on(tmp_path: Path) -> None:
    identity = Identity.generate()
    key = left(tmp_path, identity, 3, is_sealed=False)
    assert [type(event) for event in events(library(tmp_path))] == [HeaderSeen, ChunksKept]
    ours = library(tmp_path)
    assert events(ours, identity.peer_id) == [] and key not in ours.entries and not list(tmp_path.iterdir())


def test_what_was_half_written_is_overwritten_and_leaves_nothing_behind_the_next_chunk(tmp_path: Path) -> None:
    """A longer record than the next one: its rest would be taken for records at the start after that."""
    identity = Identity.generate()
    key = left(tmp_path, identity, 3, is_sealed=False)
    with (tmp_path / f"{key.hex()}.artifact").open("ab") as file:
        file.write((3 * CHUNK_BYTES).to_bytes(4, "big") + bytes(2 * CHUNK_BYTES))
    found = library(tmp_path)
    events(found)
    (made,) = signed_chunks(CHUNK_BYTES, identity, key, 3, bytes(CHUNK_BYTES))
    found.add_chunk(*made)
    found.store.close()
    again = library(tmp_path)
    assert ChunksKept(key, all_of(4), dict.fromkeys(range(4), CHUNK_BYTES)) in events(again)
    assert again.unsound_files == 0


def test_a_large_file_is_dropped_without_waiting_for_its_pages(tmp_path: Path) -> None:
    """The kernel takes 0.1 s a GiB: no thread that others wait for closes it."""
    key = left(tmp_path, Identity.generate(), LARGE)
    found = library(tmp_path)
    events(found, piece_bytes=64 << 20)
    assert found.store.used_bytes > SLOW_CLOSE_BYTES
    found.drop(key)
    assert not list(tmp_path.iterdir()) and found.store.used_bytes == 0 and found.store.chunk(key, 0) is None
