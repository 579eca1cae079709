"""A worker on its scoring stream: what it tells first and at each change, and that each lease is answered by its own scores."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import numpy as np

from echo2.base.ids import GroupId, Version
from echo2.base.rollout import SamplingParams
from echo2.outside import SteadyClock
from echo2.scoring.request import ScoreRequest, Stretch, TokenScores
from echo2.wire.gen.echo2.v1 import ingest_pb2
from echo2.wire.scoring import lease_to_message, scores_from_message
from echo2.worker.runtime.scoring import Scoring
from echo2.worker.token_gate import TokenGate


class Engine:
    """Scores by a rule that tells versions apart."""

    def __init__(self) -> None:
        self.scorable = frozenset({Version(1), Version(2)})

    async def score(self, request: ScoreRequest) -> tuple[TokenScores, ...]:
        return tuple(
            TokenScores(*(np.full(one.count, column / 8 * (-1 if column < 3 else 1)) for column in range(1, 8)))
            for one in request.stretches
        )


class Call:
    """The worker's end of a stream; the learner's end are `leases` and `reports`."""

    def __init__(self) -> None:
        self.leases: asyncio.Queue[Any] = asyncio.Queue()
        self.reports: asyncio.Queue[ingest_pb2.ScoringReport] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.leases.get()

    async def write(self, report: ingest_pb2.ScoringReport) -> None:
        self.reports.put_nowait(ingest_pb2.ScoringReport.FromString(report.SerializeToString()))

    def cancel(self) -> None:
        self.leases.put_nowait(grpc.aio.EOF)


class Stub:
    def __init__(self) -> None:
        self.call = Call()

    def Score(self) -> Call:
        return self.call


def lease(name: str, version: int) -> ingest_pb2.ScoringLease:
    stretch = Stretch(Version(version), 1, 2, GroupId("g"), 0)
    return lease_to_message(ScoreRequest(name, (5, 6, 7), SamplingParams(), (stretch,)), 60.0)


def test_versions_are_told_first_and_at_each_change_and_leases_are_answered() -> None:
    async def scene() -> None:
        engine, stub = Engine(), Stub()
        scoring = Scoring(TokenGate(lambda chunks: None, lambda lease_id: None), SteadyClock())
        scoring.engine = engine  # type: ignore[assignment]
        serving = asyncio.create_task(scoring.serve(stub))  # type: ignore[arg-type]
        reports = stub.call.reports
        await asyncio.sleep(0)
        assert reports.empty(), "nothing is proven yet"
        scoring.live(Version(1))
        assert list((await reports.get()).scorable.versions) == [1]
        scoring.live(Version(2))
        assert list((await reports.get()).scorable.versions) == [1, 2]
        stub.call.leases.put_nowait(lease("s-1", 2))
        lease_id, (scores,) = scores_from_message((await reports.get()).scores)
        assert lease_id == "s-1" and [column.tolist() for column in scores.columns] == [
            [-0.125, -0.125], [-0.25, -0.25], *([value / 8] * 2 for value in range(3, 8)),
        ]  # fmt: skip
        assert scoring.scored_tokens > 0
        stub.call.leases.put_nowait(lease("s-2", 3))
        answer = scores_from_message((await reports.get()).scores)
        assert answer == ("s-2", ()), "a version that is not kept: answered at once, by nothing"
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_scores_of_weights_that_were_found_wrong_meanwhile_are_not_sent() -> None:
    async def scene() -> None:
        engine, stub = Engine(), Stub()
        gate = TokenGate(lambda chunks: None, lambda lease_id: None)
        scoring = Scoring(gate, SteadyClock())
        scoring.engine = engine  # type: ignore[assignment]
        scoring.live(Version(1))
        computed = engine.score

        async def spoiled(request: ScoreRequest) -> tuple[TokenScores, ...]:
            gate.hold(Version(1))
            gate.discard()
            return await computed(request)

        engine.score = spoiled  # type: ignore[method-assign]
        serving = asyncio.create_task(scoring.serve(stub))  # type: ignore[arg-type]
        await stub.call.reports.get()
        stub.call.leases.put_nowait(lease("s-1", 1))
        assert scores_from_message((await stub.call.reports.get()).scores) == ("s-1", ())
        assert not scoring.scored_tokens
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_lease_whose_time_is_over_is_not_worked_on() -> None:
    async def scene() -> None:
        engine, stub = Engine(), Stub()
        scoring = Scoring(TokenGate(lambda chunks: None, lambda lease_id: None), SteadyClock())
        scoring.engine = engine  # type: ignore[assignment]
        scoring.live(Version(1))
        serving = asyncio.create_task(scoring.serve(stub))  # type: ignore[arg-type]
        await stub.call.reports.get()
        late = lease("s-1", 1)
        late.within_s = 1e-9
        stub.call.leases.put_nowait(late)
        stub.call.leases.put_nowait(lease("s-2", 1))
        lease_id, _ = scores_from_message((await stub.call.reports.get()).scores)
        assert lease_id == "s-2", "nobody waits for the first any longer"
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scene(), 30))
