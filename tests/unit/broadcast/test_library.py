from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from echo2.base.errors import CorruptChunk, DiskFull
from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.artifact import (
    STORE_BYTES_FLOOR,
    ArtifactId,
    ArtifactKey,
    Header,
    Seal,
    root_of,
    signed_chunks,
    store_bytes_for,
    store_bytes_min,
)
from echo2.broadcast.events import ChunksKept, Event
from echo2.broadcast.exchange import Bans, Exchange
from echo2.broadcast.library import Library, LibraryLimits, restored
from echo2.broadcast.pace import Meter
from echo2.broadcast.session import BroadcastSession
from echo2.broadcast.store import ChunkStore
from echo2.outside.files import MachineFiles
from echo2.trust.identity import Identity

RUN = RunId("run")


@pytest.mark.parametrize("part", ["payload", "signature"])
def test_a_chunk_that_the_disk_changed_is_neither_served_nor_decoded(tmp_path: Path, part: str) -> None:
    """Served, it would make honest peers ban this node for a signature that does not hold."""
    identity = Identity.generate()
    library = Library(ChunkStore(tmp_path, 1 << 20), RUN, LibraryLimits(recent_bytes_max=0), "delta 1")
    header = Header(ArtifactId(Version(1)), RUN, "", time.time(), 1000, True, identity.peer_id).signed(identity)
    library.add_header(header)
    made = signed_chunks(100, identity, header.key, 0, bytes(range(250)))
    for chunk, digest in made:
        library.add_chunk(chunk, digest)
    assert all(library.frame(header.key, index) for index in range(3))
    (path,) = tmp_path.glob("*.artifact")
    data = bytearray(path.read_bytes())
    data[data.index(bytes(getattr(made[1][0], part)))] ^= 1
    path.write_bytes(bytes(data))
    assert library.frame(header.key, 1) is None and "disk changed it" in library.trouble
    assert library.frame(header.key, 0) and library.frame(header.key, 2)
    with pytest.raises(CorruptChunk, match="chunk 1"):
        library.chunk(header.key, 1)


@pytest.mark.parametrize(("room", "said"), [(0, "got: no space left"), (50, r"expected room for \d+ bytes, wrote 50")])
def test_a_full_disk_is_told_with_its_folder_and_what_it_has_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, said: str
) -> None:
    """The system either refuses to write, or writes what there is room for and says how much that was."""
    identity = Identity.generate()
    library = Library(ChunkStore(tmp_path, 1 << 20), RUN, LibraryLimits(recent_bytes_max=0), "delta 1")
    header = Header(ArtifactId(Version(1)), RUN, "", time.time(), 1000, True, identity.peer_id).signed(identity)
    library.add_header(header)
    made = signed_chunks(100, identity, header.key, 0, bytes(range(250)))
    library.add_chunk(*made[0])

    def write_at(_: MachineFiles, handle: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwrite(handle, b"".join(parts)[:room], offset)

    monkeypatch.setattr(MachineFiles, "write_at", write_at)
    with pytest.raises(DiskFull, match=f"^{tmp_path}: .*{said}$"):
        library.add_chunk(*made[1])
    assert library.chunk(header.key, 0) == made[0][0] and library.frame(header.key, 1) is None


def test_what_just_came_is_passed_on_and_decoded_without_the_disk(tmp_path: Path) -> None:
    identity = Identity.generate()
    library = Library(ChunkStore(tmp_path, 1 << 20), RUN, LibraryLimits(recent_bytes_max=1000), "delta 1")
    header = Header(ArtifactId(Version(1)), RUN, "", time.time(), 1000, True, identity.peer_id).signed(identity)
    library.add_header(header)
    made = signed_chunks(100, identity, header.key, 0, bytes(range(250)) * 4)
    for chunk, digest in made:
        library.add_chunk(chunk, digest)
    kept = [index for index in range(len(made)) if library.recent.get(header.key, index)]
    assert kept == [5, 6, 7, 8, 9] and library.recent.held_bytes <= 1000, "a payload lies in its frame"
    library.store.drop(header.key)
    assert library.chunk(header.key, 9) == made[9][0] and library.frame(header.key, 9) is not None
    assert library.frame(header.key, 0) is None
    library.drop(header.key)
    assert library.recent.get(header.key, 9) is None and library.recent.held_bytes == 0


def _artifact(library: Library, identity: Identity, version: int, parent: int | None, size: int) -> ArtifactKey:
    artifact = ArtifactId(Version(version), None if parent is None else Version(parent))
    header = Header(artifact, RUN, "", float(version), 1000, True, identity.peer_id).signed(identity)
    library.add_header(header)
    digests = []
    for chunk, digest in signed_chunks(1000, identity, header.key, 0, bytes(size)):
        library.add_chunk(chunk, digest)
        digests.append(digest)
    seal = Seal(header.key, len(digests), size, root_of(digests), "print").signed(identity)
    library.add_seal(header.key, seal)
    return header.key


def test_a_full_disk_loses_first_what_leads_to_old_versions(tmp_path: Path) -> None:
    identity = Identity.generate()
    library = Library(ChunkStore(tmp_path, 40_000), RUN, LibraryLimits(), "delta 1")
    keyframe = _artifact(library, identity, 4, None, 10_000)
    for v in range(1, 9):
        _artifact(library, identity, v, v - 1, 2_000)
    into_newest = _artifact(library, identity, 8, 0, 6_000)
    _artifact(library, identity, 9, 8, 8_000)
    held = {str(entry.header.artifact) for entry in library.entries.values()}
    assert keyframe in library.entries and library.store.used_bytes <= 40_000
    assert {f"delta {v - 1}->{v}" for v in range(5, 10)} <= held, "a newcomer's way from the keyframe"
    assert into_newest in library.entries
    assert not {"delta 0->1", "delta 1->2"} & held
    assert not library.trouble


def test_a_newer_keyframe_replaces_the_older_where_only_one_has_room(tmp_path: Path) -> None:
    """Else the learner's second keyframe ends the run, and a worker's is fetched for ever."""
    identity = Identity.generate()
    library = Library(ChunkStore(tmp_path, 14_000), RUN, LibraryLimits(), "delta 1")
    first = _artifact(library, identity, 1, None, 10_000)
    _artifact(library, identity, 2, 1, 500)
    second = _artifact(library, identity, 2, None, 10_000)
    assert first not in library.entries and library.entries[second].is_complete and not library.trouble
    assert library.store.used_bytes <= 14_000


def taken_over(library: Library) -> list[ChunksKept]:
    async def events() -> list[Event]:
        return [event async for event in restored(library, PeerId("me"))]

    return [event for event in asyncio.run(events()) if isinstance(event, ChunksKept)]


def test_a_store_without_a_size_of_its_own_follows_the_weights_and_is_kept_after_a_restart(tmp_path: Path) -> None:
    identity = Identity.generate()
    library = Library(ChunkStore(tmp_path, 0), RUN, LibraryLimits(), "delta 1")
    assert library.store.bytes_max == STORE_BYTES_FLOOR
    weights_bytes = 8 << 30
    header = Header(ArtifactId(Version(1)), RUN, "delta 1", 1.0, weights_bytes, True, identity.peer_id).signed(identity)
    library.add_header(header)
    assert library.store.bytes_max == store_bytes_for(weights_bytes) >= 2 * store_bytes_min(weights_bytes) > 16 << 30
    library.store.close()
    again = Library(ChunkStore(tmp_path, 0), RUN, LibraryLimits(), "delta 1")
    assert [kept.key for kept in taken_over(again)] == [header.key] and again.store.bytes_max == store_bytes_for(
        weights_bytes
    )
    asked = Library(ChunkStore(tmp_path / "asked", 1 << 20), RUN, LibraryLimits(), "delta 1")
    asked.add_header(header)
    assert asked.store.bytes_max == 1 << 20
    assert f"at least {store_bytes_min(weights_bytes)} bytes for a keyframe" in str(asked.shortage([header.key]))


def test_blocks_are_read_back_and_what_was_dropped_meanwhile_is_said(tmp_path: Path) -> None:
    identity = Identity.generate()
    library = Library(ChunkStore(tmp_path, 1 << 20), RUN, LibraryLimits(), "delta 1")
    key = _artifact(library, identity, 1, 0, 2_500)
    artifact = ArtifactId(Version(1), Version(0))
    blocks = library.blocks_of(artifact)
    assert blocks is not None and list(blocks) == [bytes(2_500)]
    blocks = library.blocks_of(artifact)
    library.drop(key)
    assert blocks is not None
    with pytest.raises(CorruptChunk, match="dropped"):
        next(blocks)
    assert library.blocks_of(artifact) is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_publications_of_a_version_the_newer_is_taken_in_whichever_order_they_come(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    identity = Identity.generate()
    library = Library(ChunkStore(tmp_path, 1 << 20), RUN, LibraryLimits(), "delta 1")
    made = [
        Header(ArtifactId(Version(1)), RUN, "delta 1", at_s, 1000, True, identity.peer_id).signed(identity)
        for at_s in (1.0, 2.0)
    ]

    async def scene() -> None:
        exchange = Exchange(PeerId("me"), library, BroadcastSession(PeerId("me")), Meter(), Bans())
        exchange.trust(identity.peer_id)
        for number in order:
            exchange.on_header(PeerId("peer"), made[number])
        exchange.stop_timer()

    asyncio.run(scene())
    assert list(library.entries) == [made[1].key]
