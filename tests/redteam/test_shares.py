"""What one caller may take of a daemon's time, memory and log, however it comes: by streams, calls, identities, headers."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import grpc.aio
import pytest

from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.manifest import ArtifactId, Header
from echo2.broadcast.runtime.chunk_store import ChunkStore
from echo2.broadcast.runtime.inbox import HELD_HEADERS_MAX, Inbox
from echo2.broadcast.runtime.library import Library, LibraryLimits
from echo2.broadcast.runtime.meter import Meter
from echo2.coordinator.runtime.asking import RolloutDesk
from echo2.coordinator.runtime.services import CoordinatorService
from echo2.learner.runtime import ingest as ingest_module
from echo2.outside.guard import FairShare, FairShares, Pace
from echo2.trust.identity import Identity, PeerIdentity, Role
from echo2.trust.runtime.doors import IN_FLIGHT_OF_TRUSTED, Caller, overweight
from echo2.trust.runtime.port_limits import SERVICES
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.gen.echo2.v1 import ingest_pb2, ingest_pb2_grpc
from tests.unit.coordinator.test_daemon import Node, options, play, running
from tests.unit.learner.fleet import RandomWorker
from tests.unit.learner.test_ingest import Stage, model_path, report_of, stage

assert model_path and stage  # fixtures
MIB = 1 << 20


def test_streams_one_after_another_are_one_share() -> None:
    shares, now, worked = FairShares(), 0.0, 0.0
    while now < 60:  # each message on a stream of its own
        worked += 0.05
        now += 0.05
        now += shares.of("w1").pause_s(0.05, now)
    assert worked <= FairShare.SHARE * now + FairShare.BURST_S + 0.5
    assert shares.of("w2").pause_s(0.05, now) == 0.0


def test_calls_beyond_the_pace_wait_behind_one_another_and_those_too_late_take_nobodys_turn() -> None:
    pace = Pace()
    assert [pace.wait_s("w1", 0.0) for _ in range(Pace.BURST)] == [0.0] * Pace.BURST
    waits = [pace.wait_s("w1", 0.0) for _ in range(1000)]
    assert waits[:3] == [pytest.approx(n / Pace.PER_S) for n in (1, 2, 3)]
    assert max(waits) == pytest.approx(Pace.WAIT_MAX_S + 1 / Pace.PER_S)
    assert pace.wait_s("w2", 0.0) == 0.0
    assert pace.wait_s("w1", Pace.WAIT_MAX_S) <= 2 / Pace.PER_S, "the thousand that were refused are not waited for"


def test_refused_calls_go_at_a_pace_and_fill_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Pace, "BURST", 20)
    monkeypatch.setattr(Pace, "PER_S", 50.0)

    async def scene() -> None:
        async with running(options(tmp_path)) as daemon:
            worker, operator = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.OPERATOR)
            call = worker.channel.unary_unary("/echo2.v1.Operator/GetStatus")
            begun = time.monotonic()
            answers = await asyncio.gather(*(call(b"") for _ in range(60)), return_exceptions=True)
            assert time.monotonic() - begun >= 0.5, "forty of them wait"
            assert all(isinstance(answer, grpc.aio.AioRpcError) for answer in answers)
            honest = operator.channel.unary_unary("/echo2.v1.Operator/GetStatus")
            assert await honest(pb.GetStatusRequest().SerializeToString(), timeout=5)
            for node in (worker, operator):
                await node.close()

    with caplog.at_level(logging.WARNING):
        play(scene)
    assert len([record for record in caplog.records if "refused" in record.message]) < 30


def test_newcomers_of_a_link_share_what_one_may_take_and_who_has_delivered_has_its_own(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon:
            assert daemon.hub is not None
            service = CoordinatorService(daemon.hub, RolloutDesk(daemon.hub.learner.tell))
            a, b, c = (
                PeerIdentity(PeerId(name), Role.WORKER, link) for name, link in (("a", "x"), ("b", "x"), ("c", "y"))
            )
            assert service._share_of(a) is not service._share_of(b), "while none has delivered, all are alike"
            daemon.hub.book.worth.proven.add(PeerId("a"))
            assert service._share_of(b) is service._share_of(PeerIdentity(PeerId("b2"), Role.WORKER, "x"))
            assert len({id(service._share_of(one)) for one in (a, b, c)}) == 3
            learner = PeerIdentity(PeerId("learner"), Role.LEARNER, "x")
            assert service._share_of(learner) is not service._share_of(b)

    play(scene)


def test_who_asks_for_the_tokens_held_again_and_again_takes_its_share_and_no_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []
    true = ingest_module.rollout_to_message

    def slowly(rollout: object) -> object:
        made.append(time.monotonic())
        while time.monotonic() < made[-1] + 0.02:
            pass
        return true(rollout)  # type: ignore[arg-type]

    monkeypatch.setattr(ingest_module, "rollout_to_message", slowly)

    async def scene(worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        stream = stub.Report()
        report = report_of(stage, worker)
        await stream.write(ingest_pb2.RolloutReport(sequence=1, ticket=report.ticket, segments=report.segments[:2]))
        await stream.read()
        request = ingest_pb2.GetPartialsRequest(ticket=worker.ticket(stage.group_id, attempt=2))
        begun = time.monotonic()

        async def ask() -> None:
            while time.monotonic() < begun + 2.0:
                assert (await stub.GetPartials(request)).rollouts

        await asyncio.gather(*(ask() for _ in range(8)))
        seconds = time.monotonic() - begun
        assert 0.02 * 2 * len(made) <= FairShare.SHARE * seconds + FairShare.BURST_S + 0.1, len(made)

    asyncio.run(stage.play(scene))


def test_headers_of_one_peer_leave_room_for_those_of_others_while_no_publisher_is_known(tmp_path: Path) -> None:
    run, publisher = RunId("a-run"), Identity.generate()
    inbox = Inbox(PeerId("me"), Library(ChunkStore(tmp_path, 1 << 20), run, LibraryLimits(), ""), Meter())

    def header(version: int) -> Header:
        made = Header(ArtifactId(Version(version)), run, "", 1.0, 100, True, publisher.peer_id)
        return made.signed(publisher)

    inbox.header(PeerId("honest"), header(1))
    for version in range(2, 2 * HELD_HEADERS_MAX):
        inbox.header(PeerId("liar"), header(version))
        inbox.header(PeerId("liar"), header(version))
    inbox.header(PeerId("late"), header(1))
    held = inbox.take_held_headers()
    assert len(held) == HELD_HEADERS_MAX
    assert {peer for peer, _ in held} == {"honest", "late", "liar"}


def test_a_workers_unfinished_messages_to_the_coordinator_hold_four_mib_and_the_learners_more() -> None:
    def caller(peer: str, size: int, limit: int) -> Caller:
        return Caller(1, ("10.0.0.1", hash(peer) % 60_000), 0.0, peer, received_bytes=size, in_flight_max=limit)

    worker = [caller("w", 3 * MIB, SERVICES.in_flight_bytes), caller("w", 3 * MIB, SERVICES.in_flight_bytes)]
    learner = caller("l", 30 * MIB, IN_FLIGHT_OF_TRUSTED)
    small = caller("v", 3 * MIB, SERVICES.in_flight_bytes)
    assert overweight([*worker, learner, small], 1.0) == worker
