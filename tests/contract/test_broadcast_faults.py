"""Broadcast under faults, on real connections, disks and (for kills and freezes) processes of their own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from echo2.base.errors import DiskFull, LimitExceeded
from echo2.base.ids import PeerId, Version
from echo2.base.link_shape import LinkShape
from echo2.broadcast import route
from echo2.broadcast.artifact import ArtifactId, Chunk, digest_of
from echo2.broadcast.connection import HEAD, Connection
from echo2.broadcast.node import NodeOptions
from echo2.broadcast.transport import Transport
from echo2.trust import tls
from echo2.trust.identity import Role
from echo2.wire import broadcast as wire
from echo2.wire.broadcast import FRAME_BYTES_MAX
from tests.contract.fleet import Fleet, Member, blocks_of, fleet, gathered, until
from tests.patience import WAIT_S

KEYFRAME = ArtifactId(Version(0))
LATER = ArtifactId(Version(1), Version(0))
BLOCKS = [random.Random(7).randbytes(100_000) for _ in range(12)]

# A worker in a process of its own; it serves until it is killed.
WORKER = """
import asyncio, sys
from pathlib import Path
from echo2.trust import tls
from echo2.broadcast.node import BroadcastNode
from echo2.broadcast.node import NodeOptions
from echo2.wire.broadcast import plan_from_message
from echo2.wire.gen.echo2.v1 import broadcast_pb2

async def main(folder):
    identity = tls.load_or_create_identity(folder)
    credentials = tls.load_credentials(folder, identity)
    node = BroadcastNode(credentials, NodeOptions(folder / "chunks", chunk_bytes=16 << 10))
    print(node.listen(), flush=True)
    await node.start()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        node.set_plan(plan_from_message(broadcast_pb2.BroadcastPlan.FromString(bytes.fromhex(line))))

asyncio.run(main(Path(sys.argv[1])))
"""


class WorkerProcess:
    """Speaks the same protocol as the nodes of this process."""

    def __init__(self, f: Fleet, process: asyncio.subprocess.Process, member: Member) -> None:
        self.fleet, self.process, self.member = f, process, member

    @classmethod
    async def start(cls, f: Fleet, folder: Path) -> WorkerProcess:
        credentials = f.credentials(Role.WORKER)
        tls.save_identity(folder, credentials.identity)
        tls.save_credentials(folder, credentials)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, str(folder), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), WAIT_S))
        stand_in = f.members[0]  # only its credentials and address are read when a plan is made
        member = Member(stand_in.node, f"127.0.0.1:{port}", credentials)
        return cls(f, process, member)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def _with_worker_process(folder: Path, signal_number: int) -> None:
    """Two workers here, one in a process that gets the signal in the middle of a broadcast."""

    def options(number: int) -> NodeOptions:
        shape = LinkShape(uplink_bytes_per_s=1.5e6) if number == 0 else LinkShape()
        return NodeOptions(folder / f"n{number}", chunk_bytes=16 << 10, shape=shape)

    async with fleet(folder, 2, options) as f:
        other = await WorkerProcess.start(f, folder / "process")
        try:
            made = f.plan_with(other.member.credentials.peer_id, other.member.address)
            assert other.process.stdin is not None
            other.process.stdin.write(wire.plan_to_message(made).SerializeToString().hex().encode() + b"\n")
            await until(lambda: all(len(m.node.stats().links) == 3 for m in f.members), "the process is connected")
            learner, *workers = (m.node for m in f.members)
            reading = gathered(*(blocks_of(w, KEYFRAME, 20.0) for w in workers))
            publishing = asyncio.create_task(learner.publish(KEYFRAME, iter(BLOCKS), lambda: "p", 1 << 20))
            await until(lambda: workers[0].stats().newest_chunks_held > 20, "the broadcast is on its way")
            os.kill(other.process.pid, signal_number)
            assert await reading == [BLOCKS] * 2
            await publishing
        finally:
            await other.kill()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_lost_relay_does_not_stop_the_others(tmp_path: Path, signal_number: int) -> None:
    asyncio.run(_with_worker_process(tmp_path, signal_number))


async def _hostile_connection(f: Fleet, victim: Member) -> tuple[PeerId, Connection]:
    """A member of the run, with a valid certificate, that speaks the protocol by hand."""
    credentials = f.credentials(Role.WORKER)
    connection = await Transport(credentials).dial(victim.address, victim.node.peer_id)
    await connection.send(wire.hello(tls.PROTOCOL_VERSION, credentials.run_id))
    assert await connection.receive() is not None
    return credentials.peer_id, connection


@pytest.mark.parametrize("deed", ["corrupt", "replay", "rubbish", "foreign seal", "too large"])
def test_malicious_peer_is_named_dropped_and_banned(tmp_path: Path, deed: str) -> None:
    async def scene() -> None:
        async with fleet(tmp_path, 1) as f:
            learner, victim = f.members
            await learner.node.publish(KEYFRAME, iter(BLOCKS[:2]), lambda: "p", 1 << 20)
            await blocks_of(victim.node, KEYFRAME)
            later = ArtifactId(Version(1), Version(0))
            header_only = await _publish_header(learner, later)
            await until(lambda: header_only in victim.node.library.entries, "the victim knows the header")
            bad, connection = await _hostile_connection(f, victim)
            key = learner.node.library.find(KEYFRAME)
            assert key is not None
            for _ in range(40):
                if bad in victim.node.stats().banned:
                    break
                if deed == "too large":
                    connection.stream.write(HEAD.pack(FRAME_BYTES_MAX + 1))  # type: ignore[attr-defined]
                else:
                    await connection.send(_bad_frame(deed, f, learner, key, header_only))
                await asyncio.sleep(0.01)
            await until(lambda: bad in victim.node.stats().banned, "the peer is banned")
            assert all(link.peer_id != bad for link in victim.node.stats().links)
            again = await Transport(f.credentials(Role.WORKER)).dial(victim.address, victim.node.peer_id)
            await again.close()  # others are still served
            assert victim.node.library.entries[key].is_complete
            kept = victim.node.library.entries[header_only].digests.values()
            assert digest_of(b"evil") not in kept
            await connection.close()

    asyncio.run(scene())


async def _publish_header(learner: Member, artifact: ArtifactId) -> bytes:
    """Begins a publication whose blocks do not come for a while."""

    def blocks():  # type: ignore[no-untyped-def]
        import time

        time.sleep(3)
        yield b"late"

    task = asyncio.create_task(learner.node.publish(artifact, blocks(), lambda: "q", 1 << 20))
    learner.background = task  # type: ignore[attr-defined]
    await until(lambda: learner.node.library.find(artifact) is not None, "the header is out")
    key = learner.node.library.find(artifact)
    assert key is not None
    return key


def _bad_frame(deed: str, f: Fleet, learner: Member, key: bytes, fresh_key: bytes) -> bytes:
    match deed:
        case "corrupt":
            forger = f.credentials(Role.WORKER).identity
            return wire.chunk_to_bytes(Chunk.make(fresh_key, 0, True, b"evil", forger))  # type: ignore[arg-type]
        case "replay":
            frame = learner.node.library.frame(key, 0)  # type: ignore[arg-type]
            assert frame is not None
            return bytes(frame)
        case "rubbish":
            return b"\xff\xff not a message"
        case _:
            frame = learner.node.library.seal_frame(key)  # type: ignore[arg-type]
            assert frame is not None
            return frame.replace(key, fresh_key)


def test_a_worker_whose_disk_is_full_ends_with_its_folder_and_harms_no_other(tmp_path: Path) -> None:
    async def scene() -> None:
        def options(number: int) -> NodeOptions:
            store_bytes = 200_000 if number == 1 else 1 << 30
            return NodeOptions(tmp_path / f"n{number}", chunk_bytes=16 << 10, store_bytes=store_bytes)

        async with fleet(tmp_path, 3, options) as f:
            learner, small, *others = (m.node for m in f.members)
            ending = asyncio.create_task(blocks_of(small, LATER))
            reading = gathered(*(blocks_of(node, LATER) for node in others))
            for node in (small, *others):
                node.set_live(Version(0))
            await learner.publish(LATER, iter(BLOCKS), lambda: "p", 100_000)
            assert await reading == [BLOCKS] * 2
            with pytest.raises(DiskFull, match=f"{small.options.folder}: expected at most 200000 bytes of chunks"):
                await ending
            assert str(small.options.folder) in small.stats().trouble
            assert not any(node.stats().trouble or node.stats().banned for node in (learner, *others))

    asyncio.run(scene())


def test_a_learner_whose_store_holds_one_keyframe_publishes_the_next_one(tmp_path: Path) -> None:
    async def scene() -> None:
        def options(number: int) -> NodeOptions:
            return NodeOptions(tmp_path / f"n{number}", chunk_bytes=16 << 10, store_bytes=1_500_000)

        async with fleet(tmp_path, 1, options) as f:
            learner, worker = (m.node for m in f.members)
            for version in range(3):
                keyframe = ArtifactId(Version(version))
                reading = asyncio.create_task(blocks_of(worker, keyframe))
                await learner.publish(keyframe, iter(BLOCKS), lambda: "p", 1_200_000, is_pushed=False)
                assert await reading == BLOCKS
                worker.set_live(keyframe.version)
            assert max(learner.library.store.used_bytes, worker.library.store.used_bytes) <= 1_500_000

    asyncio.run(scene())


def test_a_worker_whose_store_cannot_hold_a_keyframe_ends_with_the_number_that_it_needs(tmp_path: Path) -> None:
    async def scene() -> None:
        def options(number: int) -> NodeOptions:
            return NodeOptions(tmp_path / f"n{number}", chunk_bytes=16 << 10, store_bytes=200_000 if number else 0)

        async with fleet(tmp_path, 1, options) as f:
            learner, small = (m.node for m in f.members)
            reading = asyncio.create_task(blocks_of(small, KEYFRAME))
            await learner.publish(KEYFRAME, iter(BLOCKS), lambda: "p", 1_200_000, is_pushed=False)
            said = r"keyframe 0: expected a store of at least 1218750 bytes .* got 200000"
            with pytest.raises(LimitExceeded, match=said):
                await reading

    asyncio.run(scene())


def test_learner_restarted_in_the_middle_publishes_the_version_anew(tmp_path: Path) -> None:
    async def scene() -> None:
        async with fleet(tmp_path, 2) as f:
            learner, *workers = f.members

            def cut_off():  # type: ignore[no-untyped-def]
                yield BLOCKS[0]
                raise RuntimeError("the learner dies")

            with pytest.raises(RuntimeError):
                await learner.node.publish(KEYFRAME, cut_off(), lambda: "p", 1 << 20)
            await f.stop(learner)
            port = int(learner.address.rsplit(":", 1)[1])
            f.members[0] = await f.start(learner.credentials, learner.node.options, port)
            f.plan()
            reading = gathered(*(blocks_of(w.node, KEYFRAME) for w in workers))
            await f.members[0].node.publish(KEYFRAME, iter(BLOCKS), lambda: "p", 1 << 20)
            assert await reading == [BLOCKS] * 2

    asyncio.run(scene())


def test_cut_connection_comes_back_and_the_broadcast_completes(tmp_path: Path) -> None:
    async def scene() -> None:
        def options(number: int) -> NodeOptions:
            return NodeOptions(tmp_path / f"n{number}", chunk_bytes=16 << 10, shape=LinkShape(1.5e6))

        async with fleet(tmp_path, 2, options) as f:
            learner, first, second = (m.node for m in f.members)
            reading = gathered(blocks_of(first, KEYFRAME), blocks_of(second, KEYFRAME))
            publishing = asyncio.create_task(learner.publish(KEYFRAME, iter(BLOCKS), lambda: "p", 1 << 20))
            await until(lambda: first.stats().newest_chunks_held > 10, "the broadcast is on its way")
            await asyncio.gather(*(link.close() for link in learner.exchange.links.values()))
            assert await reading == [BLOCKS] * 2
            await publishing

    asyncio.run(scene())


def test_what_rots_at_the_learner_is_made_up_for_by_a_keyframe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else holds the delta: it cannot come whole any more, and who waits for it takes another way."""
    monkeypatch.setattr(route, "STALL_S", 1.0)
    delta, remade = ArtifactId(Version(1), Version(0)), ArtifactId(Version(1))

    async def scene() -> None:
        def options(number: int) -> NodeOptions:
            return NodeOptions(
                tmp_path / f"n{number}", chunk_bytes=16 << 10, recent_bytes_max=0
            )  # fmt: skip

        async with fleet(tmp_path, 1, options) as f:
            learner, worker = f.members
            await f.stop(worker)
            await learner.node.publish(delta, iter(BLOCKS), lambda: "p", 1 << 24)
            lost: list[str] = []
            learner.node._lost = lost.append
            (file,) = learner.node.library.store.folder.glob("*.*")
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
            f.members[1] = worker = await f.start(worker.credentials, worker.node.options)
            worker.node.set_publisher(learner.node.peer_id, learner.address)
            worker.node.set_live(Version(0))
            f.plan()
            reading = asyncio.create_task(blocks_of(worker.node, remade))
            await until(lambda: bool(lost), "the learner has seen what its disk did")
            assert lost == [str(delta)] and learner.node.library.find(delta) is None
            await learner.node.publish(remade, iter(BLOCKS[::-1]), lambda: "q", 1 << 24, is_pushed=False)
            assert await reading == BLOCKS[::-1]
            assert "has stalled" in worker.node.stats().way

    asyncio.run(scene())
