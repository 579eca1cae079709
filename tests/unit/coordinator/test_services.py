"""The control streams' readers: what is still heard of whom."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from echo2.base.ids import PeerId
from echo2.coordinator.sessions import StreamSession
from echo2.coordinator.streams import CoordinatorService
from echo2.outside.guard import FairShare
from echo2.trust.identity import PeerIdentity, Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import options, running


async def test_a_stream_that_another_has_replaced_is_not_heard_any_more(tmp_path: Path) -> None:
    """An old offer, read behind a newer hello, would put a group on the queue that the learner has closed."""
    heard: list[str] = []
    async with running(options(tmp_path)) as daemon:
        session: StreamSession[pb.LearnerOrder] = StreamSession(PeerId("learner"), 8, lambda refusal: pb.LearnerOrder())
        left = ["in time", "out of date"]

        async def read() -> pb.LearnerMessage | None:
            reason = left.pop(0) if left else None
            if reason == "out of date":
                session.end()
            return pb.LearnerMessage(close=pb.CloseGroups(group_ids=["g"], reason=reason)) if reason else None

        def on_message(peer_id: PeerId, message: pb.LearnerMessage) -> None:
            heard.append(message.close.reason)

        stream: Any = SimpleNamespace(read=read, share=FairShare())
        node: Any = SimpleNamespace(role=Role.LEARNER, on_message=on_message)
        await CoordinatorService(daemon.hub)._read(stream, node, PeerIdentity(PeerId("learner"), Role.LEARNER), session)
        await asyncio.sleep(0)
    assert heard == ["in time"]
