"""The control streams' readers: what is still heard of whom."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from echo2.base.ids import PeerId
from echo2.coordinator.sessions import StreamSession
from echo2.coordinator.streams import CoordinatorService
from echo2.outside.guard import FairShare
from echo2.trust.identity import PeerIdentity, Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import options, running


class Heard:
    """A party that only listens."""

    role = Role.LEARNER

    def __init__(self) -> None:
        self.said_by_peer: list[str] = []

    async def on_hello(self, peer_id: PeerId, first: Any, session: Any) -> None: ...

    def on_message(self, peer_id: PeerId, message: pb.LearnerMessage) -> None:
        self.said_by_peer.append(message.close.reason)

    def on_end(self, peer_id: PeerId, session: Any) -> None: ...


class Stream:
    """What a replaced stream may still hold: one message before, one after its session was ended."""

    def __init__(self, session: StreamSession[pb.LearnerOrder]) -> None:
        self.session = session
        self.left = ["in time", "out of date"]
        self.share = FairShare()

    async def read(self) -> pb.LearnerMessage | None:
        if not self.left:
            return None
        reason = self.left.pop(0)
        if reason == "out of date":
            self.session.end()
        return pb.LearnerMessage(close=pb.CloseGroups(group_ids=["g"], reason=reason))


def test_a_stream_that_another_has_replaced_is_not_heard_any_more(tmp_path: Path) -> None:
    """An old offer, read behind a newer hello, would put a group on the queue that the learner has closed."""

    async def scene() -> None:
        async with running(options(tmp_path)) as daemon:
            peer = PeerId("learner")
            session: StreamSession[pb.LearnerOrder] = StreamSession(
                peer, 8, lambda refusal: pb.LearnerOrder(refusal=refusal)
            )
            hub = daemon.hub
            assert hub is not None
            heard = Heard()
            service = CoordinatorService(hub)
            await service._read(Stream(session), heard, PeerIdentity(peer, Role.LEARNER), session)
            assert heard.said_by_peer == ["in time"]

    asyncio.run(scene())
