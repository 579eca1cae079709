"""What a node does about chunks that nobody gives, or that its own disk has changed; in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.artifact import ArtifactId, Header
from echo2.broadcast.events import Have, Request
from echo2.broadcast.node import BroadcastNode, NodeCalls, NodeOptions
from echo2.broadcast.reachability import LinkKind, LinkWay
from echo2.broadcast.route import FORGOTTEN_S, STALL_S
from echo2.outside.streams import Remote
from echo2.sim.virtual_loop import VirtualLoop
from echo2.trust import tls
from echo2.trust.identity import Identity, PeerIdentity, Role, RunAuthority
from echo2.wire import broadcast as wire
from tests.certificates import issued

RUN = RunId("a-run")
SLACK_S = 2.0
PEER = PeerId("")  # whom a frame is for, only its connection says


class Promises:
    """A connection on which a peer says what it has, and nothing more."""

    is_outgoing, remotes, way = False, frozenset[Remote](), LinkWay(LinkKind.REVERSE, "it dialled us")

    def __init__(self, peer: PeerIdentity, *frames: bytes) -> None:
        self.peer, self._frames = peer, list(frames)
        self.asked_at: list[float] = []

    async def receive(self) -> bytes | None:
        return self._frames.pop(0)

    async def receive_all(self, take: Callable[[bytes], bool]) -> None:
        for frame in self._frames:
            take(frame)
        await asyncio.Event().wait()

    async def send(self, *parts: bytes) -> None:
        if wire.parse(b"".join(parts), "the node").WhichOneof("kind") == "request":
            self.asked_at.append(asyncio.get_running_loop().time())

    async def close(self) -> None:
        pass


def test_the_only_way_is_asked_for_however_long_nothing_of_it_comes(tmp_path: Path) -> None:
    authority = RunAuthority.create(Identity.generate(), RUN, time.time())
    learner = issued(authority, Role.LEARNER)
    header = Header(ArtifactId(Version(1), None), RUN, "", 1.0, 1 << 20, True, learner.peer_id)
    header = header.signed(learner.identity)
    promises = Promises(
        PeerIdentity(learner.peer_id, Role.LEARNER),
        wire.hello(tls.PROTOCOL_VERSION, RUN), wire.header_to_bytes(header),
        wire.control_frame(Have(PEER, header.key, 0b11, False)),
    )  # fmt: skip

    async def scene() -> None:
        node = BroadcastNode(issued(authority, Role.WORKER), NodeOptions(tmp_path))
        node.set_publisher(learner.peer_id, "")
        await node.start()
        serving = asyncio.create_task(node.accept(promises))
        await asyncio.sleep(2 * STALL_S + FORGOTTEN_S)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await node.stop()

    loop = VirtualLoop()
    loop.run_until_complete(scene())
    loop.close()
    asked = promises.asked_at
    assert any(at < STALL_S for at in asked)
    assert [at for at in asked if STALL_S + SLACK_S < at < FORGOTTEN_S], "there is no other way"
    assert [at for at in asked if at > FORGOTTEN_S + STALL_S], "and it may come after all"


def test_a_publisher_makes_up_for_a_chunk_that_its_disk_has_changed(tmp_path: Path) -> None:
    """Whoever asks for it gets nothing, and its publisher is told which artifact to publish anew."""
    authority = RunAuthority.create(Identity.generate(), RUN, time.time())
    learner, worker = issued(authority, Role.LEARNER), issued(authority, Role.WORKER)
    lost: list[str] = []

    async def scene() -> None:
        options = NodeOptions(tmp_path, recent_bytes_max=0)
        node = BroadcastNode(learner, options, calls=NodeCalls(lost=lost.append))
        await node.start()
        artifact = ArtifactId(Version(1), None)
        await node.publish(artifact, iter([bytes(range(250))]), lambda: "print", 1000)
        (path,) = tmp_path.glob("*.artifact")
        data = bytearray(path.read_bytes())
        data[data.index(bytes(range(100, 110)))] ^= 1
        path.write_bytes(bytes(data))
        key = node.library.find(artifact)
        assert key is not None and lost == []
        asks = Promises(
            PeerIdentity(worker.peer_id, Role.WORKER),
            wire.hello(tls.PROTOCOL_VERSION, RUN), wire.control_frame(Request(PEER, key, (0,))),
        )  # fmt: skip
        serving = asyncio.create_task(node.accept(asks))
        await asyncio.sleep(3.0)
        assert node.library.find(artifact) is None and lost == [str(artifact)]
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await node.stop()

    loop = VirtualLoop()
    loop.run_until_complete(scene())
    loop.close()
