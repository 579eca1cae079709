"""The Ingest service over mutual TLS, with one worker that may misbehave."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from echo2.base.ids import GroupId, RunId, Version
from echo2.base.rollout import Routing, SegmentVerdict, Verdict
from echo2.learner.rollouts import ingest
from echo2.learner.rollouts.ingest import STREAMS_PER_PEER_MAX, IngestService
from echo2.trust.identity import Identity, Role
from echo2.trust.ports import LEARNER
from echo2.trust.tls import bind_server, new_server, open_channel, server_credentials
from echo2.wire.gen.echo2.v1 import ingest_pb2, ingest_pb2_grpc
from echo2.wire.rollout import rollout_to_message, rollouts_from_partials, verdicts_from_message
from tests.certificates import issued
from tests.patience import WAIT_S
from tests.unit.learner.fleet import RUN, Coordinator, RandomWorker, new_authority
from tests.unit.learner.stage import Stage

Scene = Callable[[Stage, RandomWorker, ingest_pb2_grpc.IngestStub], Awaitable[None]]
REFUSED = grpc.StatusCode.UNAUTHENTICATED


def play(scene: Scene, *, requires_seeds: bool = False) -> None:
    stage, coordinator, learner = Stage(), Coordinator(new_authority()), Identity.generate()

    async def served() -> None:
        server = new_server(LEARNER)
        owner = coordinator.authority.identity.peer_id
        service = IngestService(stage.pool, RunId(RUN), owner, stage.fail, requires_seeds=requires_seeds)
        ingest_pb2_grpc.add_IngestServicer_to_server(service, server)
        credentials = issued(coordinator.authority, Role.LEARNER, "127.0.0.1:1", identity=learner)
        port = bind_server(server, "127.0.0.1:0", server_credentials(credentials))
        await server.start()
        worker = RandomWorker(coordinator, f"127.0.0.1:{port}", learner, 45)
        try:
            async with open_channel(worker.learner_address, learner.peer_id, worker.credentials) as channel:
                await asyncio.wait_for(scene(stage, worker, ingest_pb2_grpc.IngestStub(channel)), WAIT_S)
        finally:
            await stage.pool.close()
            await server.stop(0)

    stage.loop.run_until_complete(served())


def first_of(stage: Stage) -> GroupId:
    return next(iter(stage.pool.groups.groups))


def report_of(stage: Stage, worker: RandomWorker, **changes: object) -> ingest_pb2.RolloutReport:
    segments = worker.segments(stage.pool.groups.groups[first_of(stage)].spec, Version(0))
    given: dict[str, Any] = {"sequence": 1, "ticket": worker.ticket(first_of(stage))}
    return ingest_pb2.RolloutReport(**{**given, "segments": map(rollout_to_message, segments), **changes})


async def answered(stream: Any, report: ingest_pb2.RolloutReport) -> list[SegmentVerdict]:
    await stream.write(report)
    return list(verdicts_from_message(await stream.read()))


async def refused(
    stub: ingest_pb2_grpc.IngestStub, report: ingest_pb2.RolloutReport, code: grpc.StatusCode = REFUSED
) -> str:
    stream = stub.Report()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.write(report)
        assert await stream.read() is grpc.aio.EOF
        raise AssertionError(f"no error; {await stream.code()}")
    assert caught.value.code() is code, caught.value.details()
    return caught.value.details() or ""


def test_an_admitted_rollout_is_on_the_disk_before_the_verdict_and_the_ticket_is_asked_for_once_a_stream() -> None:
    async def scene(stage: Stage, worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        stream, report = stub.Report(), report_of(stage, worker)
        verdicts = await answered(stream, report)
        synced = (record for _, record in stage.journal.records[: stage.journal.synced])
        kept = {record.rollout.rollout.index for record in synced if record.HasField("rollout")}
        assert {v.index for v in verdicts if v.verdict is Verdict.ADMITTED} == kept == {0, 1}
        again = ingest_pb2.RolloutReport(sequence=2, lease_id=report.ticket.lease_id, segments=report.segments[-1:])
        assert (await answered(stream, again))[0].verdict is Verdict.DUPLICATE
        await refused(stub, ingest_pb2.RolloutReport(sequence=1, lease_id="other"), grpc.StatusCode.INVALID_ARGUMENT)

    play(scene)


def test_a_ticket_brings_rollouts_of_its_own_group_alone() -> None:
    """Else one lease would do to write into every group of the run."""

    async def scene(stage: Stage, worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        _, other, *_ = stage.pool.groups.groups
        report = report_of(stage, worker)
        foreign = ingest_pb2.RolloutReport.FromString(report.SerializeToString()).segments[0]
        foreign.group_id = other
        report.segments.insert(1, foreign)
        assert f"is of group {first_of(stage)}, not of {other}" in await refused(stub, report)
        assert stage.pool.groups.counts.admitted == 0 and not stage.pool.groups.groups[other].is_begun

    play(scene)


def test_another_workers_ticket_a_forged_one_another_runs_and_a_barred_workers_are_refused() -> None:
    async def scene(stage: Stage, worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        group_id = first_of(stage)
        stranger = RandomWorker(worker.coordinator, worker.learner_address, worker.learner, 45)
        forged = worker.ticket(group_id)
        forged.attempt = 7
        for ticket in (stranger.ticket(group_id), forged, worker.ticket(group_id, run_id=RunId("x"))):
            await refused(stub, report_of(stage, worker, ticket=ticket))
        stage.pool.barred[worker.identity.peer_id] = "its log-probabilities are made up"
        assert "its log-probabilities are made up" in await refused(stub, report_of(stage, worker))
        with pytest.raises(grpc.aio.AioRpcError, match="its log-probabilities are made up"):
            await stub.GetPartials(ingest_pb2.GetPartialsRequest(ticket=worker.ticket(group_id)))
        assert stage.pool.groups.counts.admitted == 0 and not stage.failures

    play(scene)


def test_who_continues_a_group_gets_its_tokens_the_one_before_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage, worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        stream, report = stub.Report(), report_of(stage, worker)
        first = ingest_pb2.RolloutReport(sequence=1, ticket=report.ticket, segments=report.segments[:2])
        await answered(stream, first)
        held = rollouts_from_partials(
            await stub.GetPartials(ingest_pb2.GetPartialsRequest(ticket=worker.ticket(first_of(stage), attempt=2)))
        )
        assert len(held) == 1 and held[0].index == 0 and held[0].is_finished
        late = ingest_pb2.RolloutReport(sequence=2, lease_id=report.ticket.lease_id, segments=report.segments[2:3])
        assert (await answered(stream, late))[0].verdict is Verdict.CLOSED
        routed = replace(held[0], routing=Routing(b"", bytes(len(held[0].token_ids))))
        stage.pool.groups.groups[first_of(stage)].rollouts[:] = [routed, replace(routed, index=1)]
        monkeypatch.setattr(ingest, "REPLY_ROUTING_BYTES_MAX", len(routed.token_ids))
        asked = ingest_pb2.GetPartialsRequest(ticket=worker.ticket(first_of(stage), attempt=2))
        held = rollouts_from_partials(await stub.GetPartials(asked))
        assert [bool(each.routing) for each in held] == [True, False], "what does not fit goes without its routing"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetPartials(ingest_pb2.GetPartialsRequest(ticket=worker.ticket(GroupId("g99"))))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    play(scene)


def test_more_streams_than_the_limit_are_refused() -> None:
    async def scene(stage: Stage, worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        streams = [stub.Report() for _ in range(STREAMS_PER_PEER_MAX)]
        for stream in streams:
            await answered(stream, report_of(stage, worker))
        await refused(stub, report_of(stage, worker), grpc.StatusCode.RESOURCE_EXHAUSTED)

    play(scene)


def test_an_error_in_scoring_costs_one_reward_and_names_the_sender(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(*arguments: object) -> Any:
        raise OverflowError("planted")

    async def scene(stage: Stage, worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        group = stage.pool.groups.groups[first_of(stage)]
        stage.prompts.answer = broken  # type: ignore[method-assign]
        stream = stub.Report()
        await answered(stream, report_of(stage, worker))
        while len(group.rewards) < 2:
            await asyncio.sleep(0)
        assert set(group.rewards.values()) == {None} and not stage.failures
        assert worker.credentials.peer_id in caplog.text
        stream.cancel()

    play(scene)


def test_a_full_disk_is_no_refusal_and_ends_the_learner() -> None:
    async def scene(stage: Stage, worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        stage.journal.is_full = True
        await refused(stub, report_of(stage, worker), grpc.StatusCode.INTERNAL)
        assert [str(failure) for failure in stage.failures] == ["journal: no space left"]

    play(scene)


def test_where_seeds_are_asked_for_nothing_is_taken_of_an_engine_that_draws_by_its_own() -> None:
    """One that picks the best of several by reward would not be found; nor one that lies within the noise of fp8."""

    async def scene(stage: Stage, worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        text = await refused(stub, report_of(stage, worker, draws_by_seed=False))
        assert "worker.draft_tokens = 0" in text
        text = await refused(stub, report_of(stage, worker, draws_by_seed=True, engine_kind="vllm fp8"))
        assert "worker.quantisation" in text
        assert not any(r.token_ids for r in stage.pool.groups.groups[first_of(stage)].rollouts)
        verdicts = await answered(stub.Report(), report_of(stage, worker, draws_by_seed=True))
        assert any(v.verdict is Verdict.ADMITTED for v in verdicts)

    play(scene, requires_seeds=True)
