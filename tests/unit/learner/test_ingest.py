from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from echo2.base.ids import GroupId, PeerId, RunId, Step, Version
from echo2.base.rollout import GroupSpec, SegmentVerdict, Verdict
from echo2.learner.rollouts.admission import GroupRules, OpenGroups
from echo2.learner.rollouts.evaluation import Evaluations
from echo2.learner.rollouts.groups import TrainGroup
from echo2.learner.rollouts.history import Finished, History, SegmentBegan
from echo2.learner.rollouts.ingest import STREAMS_PER_PEER_MAX, IngestService
from echo2.learner.rollouts.journal import Journal, read_journal
from echo2.learner.rollouts.pool import RolloutPool
from echo2.staleness.ledger import Ledger
from echo2.trust.identity import Identity, Role
from echo2.trust.ports import LEARNER
from echo2.trust.tls import bind_server, new_server, open_channel, server_credentials
from echo2.wire.gen.echo2.v1 import ingest_pb2, ingest_pb2_grpc
from echo2.wire.rollout import rollouts_from_partials, segment_to_message, verdicts_from_message
from tests.unit.learner.fleet import RUN, Coordinator, RandomWorker, issue, new_authority, options_for, prompts_for
from tests.unit.learner.tiny import make_tiny_model


class Stage:
    """The Ingest service alone, with one worker that may misbehave."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.authority = new_authority()
        self.coordinator = Coordinator(self.authority)
        self.learner = Identity.generate()
        options = options_for(folder, model, task={"eval_prompts": 0})
        prompts = prompts_for(options, 79)
        groups = OpenGroups(GroupRules(2, 8, 4, 79), Ledger(2))
        self.journal = Journal(folder / "journal")
        self.journal.begin(SegmentBegan(RUN, Step(0), 0, (Version(0),)))
        self.failures: list[BaseException] = []
        evaluations = Evaluations(folder, options.config, prompts, 60.0)
        self.pool = RolloutPool(groups, self.journal, History(), prompts, evaluations, self, self)
        self.pool.resume()
        self.service = self.service_for()
        self.group_id = next(iter(groups.groups))

    def service_for(self, *, requires_seeds: bool = False) -> IngestService:
        return IngestService(
            self.pool, RunId(RUN), self.authority.identity.peer_id, self.fail, requires_seeds=requires_seeds
        )

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def offer(self, specs: Sequence[GroupSpec]) -> None: ...

    def close(self, group_ids: Sequence[GroupId], reason: str) -> None: ...

    def accuse(self, peer_id: PeerId, reason: str, *, is_certain: bool) -> None: ...

    def on_answer(self, group: TrainGroup) -> None: ...

    def on_evaluation(self, row: Mapping[str, object]) -> None: ...

    async def play(self, scene: Callable[[RandomWorker, ingest_pb2_grpc.IngestStub], Awaitable[None]]) -> None:
        server = new_server(LEARNER)
        ingest_pb2_grpc.add_IngestServicer_to_server(self.service, server)
        credentials = issue(self.authority, self.learner, Role.LEARNER, "127.0.0.1:1")
        port = bind_server(server, "127.0.0.1:0", server_credentials(credentials))
        await server.start()
        worker = RandomWorker(self.coordinator, f"127.0.0.1:{port}", self.learner, 60)
        try:
            async with open_channel(worker.learner_address, self.learner.peer_id, worker.credentials) as channel:
                await asyncio.wait_for(scene(worker, ingest_pb2_grpc.IngestStub(channel)), 20)
        finally:
            await self.pool.close()
            await server.stop(0)
            self.journal.close()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stage(tmp_path: Path, model_path: Path) -> Stage:
    return Stage(tmp_path, model_path)


def report_of(stage: Stage, worker: RandomWorker, **changes: object) -> ingest_pb2.RolloutReport:
    segments = worker.segments(stage.pool.groups.groups[stage.group_id].spec, Version(0))
    given = {
        "sequence": 1,
        "ticket": worker.ticket(stage.group_id),
        "segments": [segment_to_message(s) for s in segments],
    }
    return ingest_pb2.RolloutReport(**{**given, **changes})  # type: ignore[arg-type]


async def answered(stream: Any, report: ingest_pb2.RolloutReport) -> list[SegmentVerdict]:
    await stream.write(report)
    return list(verdicts_from_message(await stream.read()))


def test_an_admitted_rollout_is_on_the_disk_before_the_verdict_and_the_ticket_is_asked_for_once_a_stream(
    stage: Stage,
) -> None:
    async def scene(worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        stream, report = stub.Report(), report_of(stage, worker)
        verdicts = await answered(stream, report)
        records, _ = read_journal(stage.journal.folder, Step(0))
        kept = {record.rollout.index for _, record in records if isinstance(record, Finished)}
        assert {v.index for v in verdicts if v.verdict is Verdict.ADMITTED} == kept == {0, 1, 2, 3}
        again = ingest_pb2.RolloutReport(sequence=2, lease_id=report.ticket.lease_id, segments=report.segments[-1:])
        assert (await answered(stream, again))[0].verdict is Verdict.DUPLICATE
        await refused(stub, ingest_pb2.RolloutReport(sequence=1, lease_id="other"), grpc.StatusCode.INVALID_ARGUMENT)

    asyncio.run(stage.play(scene))


def test_a_ticket_brings_rollouts_of_its_own_group_alone(stage: Stage) -> None:
    """Else one lease would do to write into every group of the run."""

    async def scene(worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        other = next(group_id for group_id in stage.pool.groups.groups if group_id != stage.group_id)
        report = report_of(stage, worker)
        foreign = ingest_pb2.RolloutReport.FromString(report.SerializeToString()).segments[0]
        foreign.group_id = other
        report.segments.insert(1, foreign)
        verdicts = await answered(stub.Report(), report)
        (refusal,) = [v for v in verdicts if v.group_id == other]
        assert refusal.verdict is Verdict.REFUSED and "is of group" in refusal.message
        assert not any(one.token_ids for one in stage.pool.groups.groups[other].rollouts)
        assert {v.index for v in verdicts if v.verdict is Verdict.ADMITTED} == {0, 1, 2, 3}, "the others are taken"

    asyncio.run(stage.play(scene))


async def refused(stub: ingest_pb2_grpc.IngestStub, report: ingest_pb2.RolloutReport, code: grpc.StatusCode) -> str:
    stream = stub.Report()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.write(report)
        assert await stream.read() is grpc.aio.EOF
        raise AssertionError(f"no error; {await stream.code()}")
    assert caught.value.code() is code, caught.value.details()
    return caught.value.details() or ""


def test_another_workers_ticket_a_forged_one_and_another_runs_are_refused(stage: Stage) -> None:
    async def scene(worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        stranger = RandomWorker(stage.coordinator, worker.learner_address, stage.learner, 60)
        denied = grpc.StatusCode.UNAUTHENTICATED
        await refused(stub, report_of(stage, worker, ticket=stranger.ticket(stage.group_id)), denied)
        forged = worker.ticket(stage.group_id)
        forged.attempt = 7
        await refused(stub, report_of(stage, worker, ticket=forged), denied)
        await refused(stub, report_of(stage, worker, ticket=worker.ticket(stage.group_id, run_id=RunId("x"))), denied)
        stage.pool.barred[PeerId(worker.identity.peer_id)] = "its log-probabilities are made up"
        await refused(stub, report_of(stage, worker), denied)
        assert stage.pool.groups.counts.admitted == 0

    asyncio.run(stage.play(scene))


def test_who_continues_a_group_gets_its_tokens_and_the_one_before_is_closed_out(stage: Stage) -> None:
    async def scene(worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        stream, report = stub.Report(), report_of(stage, worker)
        first = ingest_pb2.RolloutReport(sequence=1, ticket=report.ticket, segments=report.segments[:2])
        await answered(stream, first)
        held = rollouts_from_partials(
            await stub.GetPartials(ingest_pb2.GetPartialsRequest(ticket=worker.ticket(stage.group_id, attempt=2)))
        )
        assert len(held) == 1 and held[0].index == 0 and held[0].is_finished
        late = ingest_pb2.RolloutReport(sequence=2, lease_id=report.ticket.lease_id, segments=report.segments[2:3])
        assert (await answered(stream, late))[0].verdict is Verdict.CLOSED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetPartials(ingest_pb2.GetPartialsRequest(ticket=worker.ticket(GroupId("g99"))))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(stage.play(scene))


def test_more_streams_than_the_limit_are_refused(stage: Stage) -> None:
    async def scene(worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        streams = [stub.Report() for _ in range(STREAMS_PER_PEER_MAX)]
        for stream in streams:
            await answered(stream, report_of(stage, worker))
        await refused(stub, report_of(stage, worker), grpc.StatusCode.RESOURCE_EXHAUSTED)

    asyncio.run(stage.play(scene))


def test_an_unforeseen_error_in_answering_a_completion_costs_its_reward_and_names_the_sender(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*arguments: object) -> None:
        raise OverflowError("planted")

    monkeypatch.setattr(stage.pool.prompts, "answer", broken)

    async def scene(worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        group = stage.pool.groups.groups[stage.group_id]
        call = stub.Report()
        await answered(call, report_of(stage, worker))
        while len(group.rewards) < 4:
            await asyncio.sleep(0)
        assert set(group.rewards.values()) == {None}
        assert worker.credentials.peer_id in caplog.text
        assert not stage.failures
        call.cancel()

    asyncio.run(stage.play(scene))


def test_where_seeds_are_asked_for_nothing_is_taken_of_an_engine_that_draws_by_its_own(stage: Stage) -> None:
    """One that picks the best of several by reward would not be found."""
    stage.service = stage.service_for(requires_seeds=True)

    async def scene(worker: RandomWorker, stub: ingest_pb2_grpc.IngestStub) -> None:
        text = await refused(stub, report_of(stage, worker, draws_by_seed=False), grpc.StatusCode.UNAUTHENTICATED)
        assert "worker.draft_tokens = 0" in text
        assert not any(r.token_ids for r in stage.pool.groups.groups[stage.group_id].rollouts)
        verdicts = await answered(stub.Report(), report_of(stage, worker, draws_by_seed=True))
        assert any(v.verdict is Verdict.ADMITTED for v in verdicts)

    asyncio.run(stage.play(scene))
