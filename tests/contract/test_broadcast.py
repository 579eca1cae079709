"""Broadcast nodes over real gRPC, TLS and disks: every worker gets the very blocks that were published."""

import asyncio
import random
from pathlib import Path

import pytest

from echo2.base.errors import DiskFull
from echo2.base.ids import Version
from echo2.base.units import LinkShape
from echo2.broadcast.artifact import LINEAGE, ArtifactId
from echo2.broadcast.node import NodeOptions
from tests.contract.fleet import blocks_of, fleet, gathered, until

KEYFRAME, LATER = ArtifactId(Version(0)), ArtifactId(Version(1), Version(0))
BLOCKS = [random.Random(7).randbytes(100_000) for _ in range(12)]


def _blocks(seed: int, *sizes: int) -> list[bytes]:
    return [random.Random(seed + i).randbytes(size) for i, size in enumerate(sizes)]


async def test_every_worker_gets_the_blocks_in_order_relays_and_fetches_anew_what_was_spoilt(tmp_path: Path) -> None:
    blocks = _blocks(1, 500_000, 1, 0, 16 << 10, 700_000)
    async with fleet(tmp_path, 3) as f:
        learner, *workers = (m.node for m in f.members)
        first = workers[0]
        reading = gathered(*(blocks_of(w, KEYFRAME) for w in workers))
        sent = await learner.publish(KEYFRAME, iter(blocks), lambda: "print", 1 << 20)
        assert sent.total_bytes == sum(map(len, blocks))
        assert await reading == [blocks] * 3
        assert sum(w.stats().sent_chunk_bytes for w in workers) > 0
        for v in (1, 2):
            delta = ArtifactId(Version(v), Version(v - 1))
            await learner.publish(delta, iter(_blocks(v, 30_000)), lambda: "d", 200_000)
        assert await blocks_of(first, delta) == _blocks(2, 30_000)
        # its weights did not match
        before_bytes = first.stats().received_chunk_bytes
        first.refetch(delta)
        assert await blocks_of(first, delta) == _blocks(2, 30_000)
        assert first.stats().received_chunk_bytes - before_bytes > 30_000
        assert not first.bans.found, "an answer is no replay"
        # its disk changed it
        key = first.library.find(KEYFRAME)
        assert key is not None
        first.library.recent.drop(key)
        path = first.options.folder / f"{key.hex()}.artifact"
        data = bytearray(path.read_bytes())
        data[100_000] ^= 1
        path.write_bytes(bytes(data))
        first.set_live(None)
        assert await blocks_of(first, KEYFRAME) == blocks


async def test_a_newcomer_takes_the_keyframe_that_nobody_else_fetches(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as f:
        learner, first = (m.node for m in f.members)
        await learner.publish(KEYFRAME, iter(_blocks(2, 200_000)), lambda: "0", 200_000)
        for v in (1, 2):
            delta = ArtifactId(Version(v), Version(v - 1))
            await learner.publish(delta, iter(_blocks(v, 3_000)), lambda: "d", 200_000)
        assert await blocks_of(first, delta) == _blocks(2, 3_000)
        keyframe = ArtifactId(Version(2))
        await learner.publish(keyframe, iter(_blocks(9, 100_000)), lambda: "2", 200_000, is_pushed=False)
        newcomer = await f.add()
        assert await blocks_of(newcomer.node, keyframe) == _blocks(9, 100_000)
        assert not any(entry.digests for entry in first.artifacts_available() if entry.artifact == keyframe)


async def test_chunks_of_a_small_delta_follow_the_size_of_the_one_before_it(tmp_path: Path) -> None:
    """A delta's size is not known when its first chunk leaves. The first one is taken for a twentieth of the weights."""
    options = lambda number: NodeOptions(tmp_path / f"n{number}", chunk_bytes=1 << 20)  # noqa: E731
    async with fleet(tmp_path, 3, options) as f:
        learner = f.members[0].node
        sent = [
            await learner.publish(
                ArtifactId(Version(v), Version(v - 1)), iter(_blocks(v, 4 << 20)), lambda: "d", 1 << 30
            )
            for v in (1, 2)
        ]
        assert [one.chunk_count for one in sent] == [8, 64], "at 25 MB/s chunks of 512 KiB; then copies of 8 in 168 ms"


@pytest.mark.parametrize("lineage", [LINEAGE, "of the next release"])
async def test_chunks_survive_a_restart_of_worker_and_learner_and_not_another_release(
    tmp_path: Path, lineage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = _blocks(3, 300_000)
    async with fleet(tmp_path, 2) as f:
        learner, *workers = f.members
        await learner.node.publish(KEYFRAME, iter(blocks), lambda: "p", 300_000)
        await gathered(*(blocks_of(worker.node, KEYFRAME) for worker in workers))
        monkeypatch.setattr("echo2.broadcast.library.LINEAGE", lineage)
        for number, member in enumerate(f.members):
            await f.stop(member)
            options = NodeOptions(tmp_path / f"node{number}")
            f.members[number] = await f.start(member.credentials, options, int(member.address.rsplit(":", 1)[1]))
        learner, worker, _ = f.members
        is_known = bool(learner.node.library.entries)
        assert is_known == bool(worker.node.library.entries) == (lineage == LINEAGE)
        f.plan()
        worker.node.set_publisher(learner.node.peer_id, learner.address)
        if is_known:
            assert await blocks_of(worker.node, KEYFRAME) == blocks
            assert worker.node.stats().received_chunk_bytes == 0
        again = await learner.node.publish(KEYFRAME, iter([b"read if it is unknown"]), lambda: "x", 1)
        assert again.total_bytes == (300_000 if is_known else 21)
        if not is_known:
            assert await blocks_of(worker.node, KEYFRAME) == [b"read if it is unknown"]


async def test_a_worker_without_a_plan_follows_the_learner_also_after_its_link_was_cut(tmp_path: Path) -> None:
    async with fleet(tmp_path, 0) as f:
        worker = await f.add()
        learner = f.members[0].node
        for artifact in (KEYFRAME, LATER):
            await until(lambda: len(learner.stats().links) == 1, "the worker dialled")
            await learner.publish(artifact, iter(_blocks(4, 50_000)), lambda: "p", 50_000)
            assert await blocks_of(worker.node, artifact) == _blocks(4, 50_000)
            await asyncio.gather(*(link.close() for link in learner.exchange.links.values()))
            await until(lambda: not learner.stats().links, "the link is cut")


async def test_shaped_uplink_takes_the_time_that_its_rate_gives(tmp_path: Path) -> None:
    def options(number: int) -> NodeOptions:
        shape = LinkShape(uplink_bytes_per_s=1e6, rtt_s=0.05) if number == 0 else LinkShape()
        return NodeOptions(tmp_path / f"n{number}", chunk_bytes=16 << 10, shape=shape)

    async with fleet(tmp_path, 2, options) as f:
        learner, *workers = (m.node for m in f.members)
        begun = asyncio.get_running_loop().time()
        reading = gathered(*(blocks_of(w, KEYFRAME) for w in workers))
        await learner.publish(KEYFRAME, iter(_blocks(5, 1_000_000)), lambda: "p", 1_000_000)
        await reading
        assert learner.stats().sent_chunk_bytes < 1.8e6, "the learner sent what the workers should have relayed"
        assert asyncio.get_running_loop().time() - begun >= 1.0, "1 MB at 1 MB/s"


async def test_a_worker_whose_disk_is_full_ends_with_its_folder_and_harms_no_other(tmp_path: Path) -> None:
    def options(number: int) -> NodeOptions:
        return NodeOptions(tmp_path / f"n{number}", chunk_bytes=16 << 10)

    async with fleet(tmp_path, 3, options) as f:
        learner, small, *others = (m.node for m in f.members)
        small.library.store.bytes_max, small.library.store.fit = 200_000, lambda size: None  # type: ignore[method-assign]
        ending = asyncio.create_task(blocks_of(small, LATER))
        reading = gathered(*(blocks_of(node, LATER) for node in others))
        for node in (small, *others):
            node.set_live(Version(0))
        await learner.publish(LATER, iter(BLOCKS), lambda: "p", 100_000)
        assert await reading == [BLOCKS] * 2
        with pytest.raises(DiskFull, match=f"{small.options.folder}: expected at most 200000 bytes of chunks"):
            await ending
        assert not any(node.exchange.error or node.bans.found for node in (learner, *others))
