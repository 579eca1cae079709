"""What one caller may take of a daemon's time, memory and log, however it comes: by streams, calls, identities, headers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from echo2.base.clock import Pace
from echo2.base.errors import MalformedMessage
from echo2.base.ids import PeerId, RunId
from echo2.coordinator.streams import CoordinatorService
from echo2.learner.rollouts import ingest as ingest_module
from echo2.outside.guard import FairShare, FairShares
from echo2.trust import calls, ports, tls
from echo2.trust.identity import Identity, PeerIdentity, Role, RunAuthority
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb, ingest_pb2, ingest_pb2_grpc
from echo2.wire.gen.echo2.v1.probe_pb2 import ProbeBlock
from tests.certificates import issued
from tests.contract.fleet import until
from tests.patience import WAIT_S
from tests.unit.coordinator.test_daemon import Node, options, running
from tests.unit.learner.fleet import RandomWorker
from tests.unit.learner.stage import Stage
from tests.unit.learner.test_ingest import first_of, play as play_ingest, report_of

Served = Callable[[], grpc.aio.Channel]
MIB = 1 << 20


@contextlib.asynccontextmanager
async def served(
    limits: ports.PortLimits, method: grpc.RpcMethodHandler[ProbeBlock, ProbeBlock]
) -> AsyncIterator[Served]:
    """A server of one call, `/test.Service/Call`, for members of a run; opens channels of new members to it."""
    authority = RunAuthority.create(Identity.generate(), RunId("run"), time.time())
    server = tls.new_server(limits)
    server.add_registered_method_handlers("test.Service", {"Call": method})
    credentials = tls.server_credentials(tls.coordinator_credentials(authority, "127.0.0.1:0"))
    address = f"127.0.0.1:{tls.bind_server(server, '127.0.0.1:0', credentials)}"
    await server.start()
    yield lambda: tls.open_channel(address, authority.identity.peer_id, issued(authority))
    await server.stop(0)


def test_streams_one_after_another_are_one_share() -> None:
    shares, now, worked = FairShares(), 0.0, 0.0
    while now < 60:  # each message on a stream of its own
        worked += 0.05
        now += 0.05
        now += shares.of("w1").pause_s(0.05, now)
    assert worked <= FairShare.SHARE * now + FairShare.BURST_S + 0.5
    shares.of("w2").pause_s(0.0, now)
    assert shares.of("w2").pause_s(0.05, now + FairShare.BURST_S / FairShare.SHARE) == 0.0


def test_a_new_name_for_each_connection_brings_no_new_burst() -> None:
    shares, now, worked = FairShares(), 0.0, 0.0
    for number in range(300):
        worked += 0.01
        now += 0.01
        now += shares.of(f"name {number}").pause_s(0.01, now)
    assert worked <= FairShare.SHARE * now + 0.01


def test_a_caller_is_charged_for_its_handshake_its_calls_and_bytes_that_no_message_accounts_for() -> None:
    now, caller = 100.0, ports.Caller(1, ("10.0.0.1", 1), 0.0, "w")
    assert caller.charge_s() == ports.HANDSHAKE_S and caller.charge_s() == 0.0
    caller.received_bytes = 100 * MIB  # of calls that were aborted, say
    assert FairShare().pause_s(caller.charge_s(), now) >= 5.0
    caller.taken_bytes, caller.messages, caller.calls = 100 * MIB, 1000, 100
    assert caller.charge_s() == pytest.approx(1000 * ports.MESSAGE_S + 100 * ports.CALL_S), "a byte is charged once"


def test_calls_beyond_the_pace_wait_behind_one_another_and_those_too_late_take_nobodys_turn() -> None:
    pace = Pace(20.0, 200, 5.0)
    assert [pace.wait_s("w1", 0.0) for _ in range(200)] == [0.0] * 200
    waits = [pace.wait_s("w1", 0.0) for _ in range(1000)]
    assert waits[:3] == [pytest.approx(n / 20.0) for n in (1, 2, 3)]
    assert max(waits) == pytest.approx(5.0 + 1 / 20.0)
    assert pace.wait_s("w2", 0.0) == 0.0
    assert pace.wait_s("w1", 5.0) <= 2 / 20.0, "the thousand that were refused are not waited for"


async def test_refused_calls_go_at_a_pace_and_fill_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "CALLS_BURST", 20)
    monkeypatch.setattr(calls, "CALLS_PER_S", 50.0)
    async with running(options(tmp_path)) as daemon:
        worker, operator = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.OPERATOR)
        call = worker.channel.unary_unary("/echo2.v1.Operator/GetStatus")
        begun = time.monotonic()
        answers = await asyncio.gather(*(call(b"") for _ in range(60)), return_exceptions=True)
        assert time.monotonic() - begun >= 0.5, "forty of them wait"
        assert all(isinstance(answer, grpc.aio.AioRpcError) for answer in answers)
        honest = operator.channel.unary_unary("/echo2.v1.Operator/GetStatus")
        assert await honest(pb.GetStatusRequest().SerializeToString(), timeout=WAIT_S)
    assert len([record for record in caplog.records if "refused" in record.message]) < 30


async def test_newcomers_of_a_link_share_what_one_may_take_and_who_has_delivered_has_its_own(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        service = CoordinatorService(daemon.hub)
        a, b, c = (PeerIdentity(PeerId(name), Role.WORKER, link) for name, link in (("a", "x"), ("b", "x"), ("c", "y")))
        own = FairShare()
        assert service._share_of(a, own) is own, "while none has delivered, each has its own"
        daemon.hub.book.records.proven.add(PeerId("a"))
        of_link = service._share_of(b, own)
        assert of_link is service._share_of(PeerIdentity(PeerId("b2"), Role.WORKER, "x"), own)
        assert service._share_of(a, own) is own
        assert len({id(one) for one in (own, of_link, service._share_of(c, own))}) == 3
        assert service._share_of(PeerIdentity(PeerId("learner"), Role.LEARNER, "x"), own) is own


def spend(made: list[float]) -> None:
    """A fiftieth of a second of work."""
    made.append(time.monotonic())
    while time.monotonic() < made[-1] + 0.02:
        pass


def test_who_asks_for_the_tokens_held_again_and_again_takes_its_share_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    true = ingest_module.rollout_to_message

    def slowly(rollout: object) -> object:
        spend(made)
        return true(rollout)  # type: ignore[arg-type]

    monkeypatch.setattr(ingest_module, "rollout_to_message", slowly)

    async def scene(stage: Stage, worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        stream = stub.Report()
        report = report_of(stage, worker)
        await stream.write(ingest_pb2.RolloutReport(sequence=1, ticket=report.ticket, segments=report.segments[:2]))
        await stream.read()
        request = ingest_pb2.GetPartialsRequest(ticket=worker.ticket(first_of(stage), attempt=2))
        begun = time.monotonic()

        async def ask() -> None:
            while time.monotonic() < begun + 2.0:
                assert (await stub.GetPartials(request)).rollouts

        await asyncio.gather(*(ask() for _ in range(8)))
        seconds = time.monotonic() - begun
        assert 0.02 * 2 * len(made) <= FairShare.SHARE * seconds + FairShare.BURST_S + 0.1, len(made)

    play_ingest(scene)


def test_parsing_is_within_the_callers_share_though_its_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []

    def slowly(kind: object, data: bytes, limits: object, whose: str) -> object:
        spend(made)
        raise MalformedMessage(f"{whose}: expected another message")

    monkeypatch.setattr(calls, "parsed", slowly)

    async def scene(stage: Stage, worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        begun = time.monotonic()

        async def send() -> None:
            while time.monotonic() < begun + 2.0:
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.GetPartials(ingest_pb2.GetPartialsRequest())

        await asyncio.gather(*(send() for _ in range(4)))
        seconds = time.monotonic() - begun
        assert 0.02 * len(made) <= FairShare.SHARE * seconds + FairShare.BURST_S + 4 * 0.02 + 0.02, len(made)

    play_ingest(scene)


async def test_a_member_has_so_many_calls_at_a_time_and_others_are_served() -> None:
    may_end, running = asyncio.Event(), 0

    async def wait(request: ProbeBlock, context: object) -> ProbeBlock:
        nonlocal running
        running += 1
        await may_end.wait()
        return request

    method = grpc.unary_unary_rpc_method_handler(wait, ProbeBlock.FromString, ProbeBlock.SerializeToString)
    async with served(replace(ports.LEARNER, streams=2 * calls.CALLS_PER_CALLER), method) as channel:
        async with channel() as first, channel() as second:
            held = [first.unary_unary("/test.Service/Call")(b"") for _ in range(calls.CALLS_PER_CALLER)]
            await until(lambda: running == calls.CALLS_PER_CALLER, "as many calls as it may have")
            with pytest.raises(grpc.aio.AioRpcError, match="calls at a time"):
                await first.unary_unary("/test.Service/Call")(b"", timeout=WAIT_S)
            neighbours = second.unary_unary("/test.Service/Call")(b"")
            await until(lambda: running == calls.CALLS_PER_CALLER + 1, "another member's call")
            may_end.set()
            await asyncio.gather(*held, neighbours)
            assert await first.unary_unary("/test.Service/Call")(b"") == b"", "a call that has ended makes room"


async def test_a_members_connection_without_a_call_ends_and_is_made_anew() -> None:
    assert ports.LEARNER.idle_s <= 30 and ports.SERVICES.idle_s <= 60, "each keeps memory"

    async def echo(messages: object, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        await context.write(await context.read())

    method = grpc.stream_stream_rpc_method_handler(echo, ProbeBlock.FromString, ProbeBlock.SerializeToString)
    async with served(replace(ports.LEARNER, idle_s=1.0), method) as open_channel, open_channel() as channel:
        for _ in range(2):
            call = channel.stream_stream("/test.Service/Call")()
            said = ProbeBlock(data=b"x").SerializeToString()
            await call.write(said)
            assert await call.read() == said
            await call.done_writing()
            while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)


def test_a_workers_unfinished_messages_to_the_coordinator_hold_four_mib_and_the_learners_more() -> None:
    def caller(peer: str, size: int, limit: int) -> ports.Caller:
        return ports.Caller(1, ("10.0.0.1", hash(peer) % 60_000), 0.0, peer, received_bytes=size, in_flight_max=limit)

    worker = [caller("w", 3 * MIB, ports.SERVICES.in_flight_bytes) for _ in range(2)]
    learner = caller("l", 30 * MIB, ports.IN_FLIGHT_OF_TRUSTED)
    small = caller("v", 3 * MIB, ports.SERVICES.in_flight_bytes)
    assert ports.overweight([*worker, learner, small], 1.0) == worker
