"""An error that nobody foresaw, planted in a daemon's own lines: its sender's session ends, everything else goes on."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from echo2.base.errors import MalformedMessage, Unreachable
from echo2.base.ids import Version
from echo2.broadcast.artifact import ArtifactId
from echo2.coordinator.planning import service as planning
from echo2.coordinator.streams import WorkerStream
from echo2.outside.guard import MISHAPS, QUIET_S, FairShare, Mishaps, handling
from echo2.trust.calls import _Gate
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.contract.fleet import fleet, until
from tests.patience import WAIT_S
from tests.unit.coordinator.test_daemon import Node, group, options, running


def broken(*arguments: Any, **named: Any) -> Any:
    raise OverflowError("planted")


async def test_an_error_costs_its_sender_a_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(options(tmp_path)) as daemon:
        hub = daemon.hub
        learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
        operator = await Node.join(daemon, Role.OPERATOR)
        await learner.hello(open_groups=[group("g1")])
        monkeypatch.setattr(WorkerStream, "_on_heartbeat", broken)
        with caplog.at_level(logging.ERROR):
            for _ in range(5):
                await worker.hello()
                await worker.say(heartbeat=pb.Heartbeat())
                assert (await worker.until("refusal")).code == "MalformedMessage"
        said = [record for record in caplog.records if "unforeseen" in record.message]
        assert len(said) == 1 and worker.credentials.peer_id in said[0].message
        monkeypatch.setattr(planning, "broadcast_nodes", broken)
        ticks, tick = 0, hub.tick

        def counted() -> None:
            nonlocal ticks
            ticks += 1
            tick()
            broken()

        hub.tick = counted  # type: ignore[method-assign]
        hub.broadcast_needed.set()
        await until(lambda: ticks >= 3, "the clock goes on")
        hub.money.sums = broken  # type: ignore[method-assign]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await operator.channel.unary_unary("/echo2.v1.Operator/GetStatus")(b"", timeout=WAIT_S)
        assert raised.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        for node in (learner, worker):
            assert (await node.hello()).WhichOneof("kind") == "welcome"


async def test_a_caller_that_goes_or_a_server_that_stops_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    class Gone:
        """gRPC's context of a call that is over: nothing can be sent."""

        def peer(self) -> str:
            return ""

        def auth_context(self) -> dict[str, list[bytes]]:
            return {}

        async def read(self) -> bytes:
            return b""

        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("Failed execute_batch")

    class Stopped(Gone):
        """Of a call that is read from when this server has stopped."""

        async def read(self) -> bytes:
            raise grpc.aio.BaseError("Server already stopped.")

    async def unary(request: object, context: Gone) -> None:
        await context.abort()

    async def stream(request: object, context: Gone) -> AsyncIterator[bytes]:
        yield b"x"
        await context.abort()

    async def malformed(request: object, context: Gone) -> None:
        raise MalformedMessage("nobody hears of it")

    noted, gate = MISHAPS.count, _Gate(lambda context: ("w1", FairShare.SHARE))
    parse = pb.Heartbeat.FromString
    for serve, context in ((unary, Gone()), (malformed, Gone()), (unary, Stopped())):
        handler = gate.gated("/s/m", grpc.unary_unary_rpc_method_handler(serve, parse))
        with pytest.raises(asyncio.CancelledError):
            await handler.stream_unary(None, context)
    handler = gate.gated("/s/m", grpc.unary_stream_rpc_method_handler(stream, parse))
    with pytest.raises(asyncio.CancelledError):
        async for _ in handler.stream_stream(None, Gone()):
            pass
    assert MISHAPS.count == noted
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


async def test_an_error_over_what_a_dialled_peer_sent_ends_that_link_and_not_the_node(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as f:
        learner, worker = (member.node for member in f.members)
        before = worker.exchange.links[learner.peer_id]
        worker.exchange.on_header = broken  # type: ignore[method-assign]
        await learner.publish(ArtifactId(Version(0)), iter([b"x" * 1000]), lambda: "p", 1 << 20)
        await until(lambda: worker.exchange.links.get(learner.peer_id) is not before, "the link has ended")
        await asyncio.sleep(0.5)
        assert worker.exchange.error is None
        assert not worker.bans.found, "what nobody foresaw is no guilt"


def test_an_unforeseen_error_is_its_senders_and_foreseen_ones_stay_what_they_are() -> None:
    with pytest.raises(MalformedMessage, match="w1: expected a message that can be handled"), handling("x", "w1"):
        raise ZeroDivisionError
    with pytest.raises(Unreachable), handling("x", "w1"):
        raise Unreachable("gone")


def test_mishaps_of_one_peer_are_logged_now_and_then_and_of_many_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    assert QUIET_S >= 10
    mishaps = Mishaps()
    for _ in range(1000):
        mishaps.note("a call", "w1", ValueError("x"))
    mishaps.note("a call", "w2", ValueError("x"))
    assert (mishaps.count, len(caplog.records)) == (1001, 2)
