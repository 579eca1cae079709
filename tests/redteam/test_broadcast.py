"""Peers that speak the broadcast's protocol to hurt: nobody is held up, and whoever is banned gets nothing more."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId, Version
from echo2.broadcast.artifact import CHUNKS_MAX, ArtifactId, ArtifactKey, Chunk, digest_of
from echo2.broadcast.connection import HEAD
from echo2.broadcast.events import Cancel, ChunkSeen, Have, HeaderSeen, PeerUp, RelayAck, Request, Woken
from echo2.broadcast.node import BroadcastNode
from echo2.broadcast.peer import MISSING_MAX
from echo2.broadcast.session import BroadcastSession
from echo2.trust.identity import Identity
from echo2.wire import broadcast as wire
from echo2.wire.broadcast import FRAME_BYTES_MAX
from tests.contract.fleet import Member, blocks_of, fleet, hostile, until
from tests.patience import cpu_time_within

KEYFRAME = ArtifactId(Version(0))
BLOCKS = [random.Random(7).randbytes(100_000) for _ in range(4)]
PEER = PeerId("")  # whom a frame is for, only its connection says
EVERYTHING, LAST = (1 << CHUNKS_MAX) - 1, tuple(range(CHUNKS_MAX - 4096, CHUNKS_MAX))
CPU_S_MAX = 0.5
"""For a hundred of the worst messages, with TLS and gRPC at both ends of one process; one of them took 36 s."""


class Begun:
    """A publication whose end does not come before `finish`: until then nobody knows how many chunks it has."""

    def __init__(self, learner: BroadcastNode) -> None:
        self.artifact, self._learner, self._may_end = ArtifactId(Version(1), Version(0)), learner, threading.Event()
        self._task = asyncio.create_task(learner.publish(self.artifact, self._blocks(), lambda: "p", 1 << 20))

    def _blocks(self) -> Iterator[bytes]:
        yield BLOCKS[0]
        self._may_end.wait(30)

    async def key(self) -> ArtifactKey:
        await until(lambda: self._learner.library.find(self.artifact) is not None, "it has begun")
        return self._learner.library.find(self.artifact)

    async def finish(self) -> None:
        self._may_end.set()
        await self._task


def received_bytes(victim: Member, peer: PeerId) -> int:
    return sum(link.received_bytes for link in victim.node.stats().links if link.peer_id == peer)


FLOODS: dict[str, Callable[[ArtifactKey], bytes]] = {
    "have-maps of everything": lambda key: wire.control_frame(Have(PEER, key, EVERYTHING, False)),
    "have-maps of the last": lambda key: wire.control_frame(Have(PEER, key, 1 << (CHUNKS_MAX - 1), False)),
    "requests of everything": lambda key: wire.control_frame(Request(PEER, key, tuple(range(4096)))),
    "cancels of the last": lambda key: wire.control_frame(Cancel(PEER, key, LAST)),
    "acknowledgements": lambda key: wire.control_frame(RelayAck(PEER, key, CHUNKS_MAX - 1, CHUNKS_MAX)),
}


async def test_the_worst_messages_cost_a_node_little_time_and_hold_up_nobody(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as f:
        learner, victim = f.members
        await learner.node.publish(KEYFRAME, iter(BLOCKS), lambda: "p", 1 << 20)
        await blocks_of(victim.node, KEYFRAME)
        publication = Begun(learner.node)
        key = await publication.key()
        await until(lambda: key in victim.node.session.artifacts, "the victim has heard of it")
        session = victim.node.session
        for flood in FLOODS.values():
            credentials, connection = await hostile(f, victim)
            bad = credentials.peer_id
            await until(lambda bad=bad: bad in session.peers, "it is let in")  # type: ignore[misc]
            frame = flood(key)
            size = 20 * len(frame)
            with cpu_time_within(CPU_S_MAX + size / 20e6):
                for _ in range(20):
                    await connection.send(frame)
                await until(lambda bad=bad, size=size: received_bytes(victim, bad) >= size, "they are read")  # type: ignore[misc]
            assert len(session.artifacts[key].missing_since) <= MISSING_MAX
            await connection.close()
            await until(lambda bad=bad: bad not in session.peers, "it has gone")  # type: ignore[misc]
        await publication.finish()
        await until(lambda: victim.node.library.entries[key].is_complete, "the rest comes all the same")


def test_chunks_that_a_liar_made_up_keep_no_real_ones_out() -> None:
    """It speaks first, and of the last MISSING_MAX of all chunks that there may be."""
    session, key, liar, honest = BroadcastSession(PeerId("me")), ArtifactKey(b"k" * 16), PeerId("l"), PeerId("h")
    for peer in (liar, honest):
        session.handle(PeerUp(peer), 0.0)
    session.handle(HeaderSeen(honest, key, is_wanted=True), 0.0)
    session.handle(Have(liar, key, EVERYTHING & ~((1 << (CHUNKS_MAX - MISSING_MAX)) - 1), False), 0.1)
    real = 6000
    session.handle(Have(honest, key, (1 << real) - 1, False), 0.2)
    got: set[int] = set()
    now = 1.0
    while len(got) < real and now < 5000:
        now += 0.3
        for action in session.handle(Woken(), now):
            if isinstance(action, Request) and action.peer == honest:
                for index in action.indices:
                    got.add(index)
                    session.handle(ChunkSeen(honest, key, index, 1000, is_answer=True), now)
    assert got >= set(range(real))


@pytest.mark.parametrize("deed", ["corrupt", "replay", "rubbish", "foreign seal", "too large"])
async def test_who_breaks_the_protocol_is_named_dropped_and_banned(tmp_path: Path, deed: str) -> None:
    async with fleet(tmp_path, 1) as f:
        learner, victim = (member.node for member in f.members)
        await learner.publish(KEYFRAME, iter(BLOCKS), lambda: "p", 1 << 20)
        await blocks_of(victim, KEYFRAME)
        publication, key = Begun(learner), learner.library.find(KEYFRAME)
        fresh = await publication.key()
        await until(lambda: fresh in victim.library.entries, "the victim knows the header")
        credentials, connection = await hostile(f, f.members[1])
        while credentials.peer_id not in victim.bans.found:
            with contextlib.suppress(Unreachable):
                if deed == "too large":
                    connection.stream.write(HEAD.pack(FRAME_BYTES_MAX + 1))
                else:
                    await connection.send(bad_frame(deed, credentials.identity, learner, key, fresh))
            await asyncio.sleep(0.01)
        assert all(link.peer_id != credentials.peer_id for link in victim.stats().links)
        _, again = await hostile(f, f.members[1])
        await again.close()  # others are still served
        assert victim.library.entries[key].is_complete
        assert digest_of(b"evil") not in victim.library.entries[fresh].digests.values()
        await publication.finish()
        await connection.close()


def bad_frame(deed: str, forger: Identity, learner: BroadcastNode, key: ArtifactKey, fresh_key: ArtifactKey) -> bytes:
    match deed:
        case "corrupt":
            return wire.chunk_to_bytes(Chunk.signed(fresh_key, 500, True, b"evil", forger)[0])
        case "replay":
            return bytes(learner.library.frame(key, 0))
        case "rubbish":
            return b"\xff\xff not a message"
        case _:
            return learner.library.seal_frame(key).replace(key, fresh_key)
