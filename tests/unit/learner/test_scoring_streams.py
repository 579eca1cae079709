"""The learner's end of scoring: leases out to whoever may score, scores in from nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from echo2.base.errors import MalformedMessage, NotAllowed
from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import SamplingParams
from echo2.learner.runtime.scoring import ScoringStreams
from echo2.learner.scorings import Event, ScorerCame, ScorerGone, ScoresCame
from echo2.scoring.request import ScoreRequest, Stretch
from echo2.wire.gen.echo2.v1 import ingest_pb2

WORKER = PeerId("w")
VERSIONS = ingest_pb2.ScoringReport(scorable=ingest_pb2.ScorableVersions(versions=[3]))
SCORES = ingest_pb2.ScoringReport(scores=ingest_pb2.Scores(lease_id="s-1"))
REQUEST = ScoreRequest("s-1", (5, 6), SamplingParams(), (Stretch(Version(3), 1, 1, GroupId("g"), 0),))


class Stage:
    def __init__(self) -> None:
        self.told: list[Event] = []
        self.barred: set[PeerId] = set()
        self.streams = ScoringStreams(self.told.append)

    def check(self, worker: PeerId) -> None:
        if worker in self.barred:
            raise NotAllowed(f"nothing is taken from {worker}")

    async def pause(self, worked_s: float, worker: PeerId) -> None:
        await asyncio.sleep(0)

    def serve(self, said: asyncio.Queue[ingest_pb2.ScoringReport]) -> AsyncIterator[ingest_pb2.ScoringLease]:
        async def reports() -> AsyncIterator[ingest_pb2.ScoringReport]:
            while True:
                yield await said.get()

        return self.streams.serve(WORKER, reports(), self.check, self.pause)


def test_leases_go_out_and_scores_come_in_until_the_worker_goes() -> None:
    async def scene() -> None:
        stage, said = Stage(), asyncio.Queue[ingest_pb2.ScoringReport]()
        leases = stage.serve(said)
        said.put_nowait(VERSIONS)
        first = asyncio.ensure_future(anext(leases))
        while not stage.told:
            await asyncio.sleep(0)
        stage.streams.lease(WORKER, REQUEST, 9.0)
        lease = await first
        assert (lease.lease_id, lease.within_s) == ("s-1", 9.0)
        said.put_nowait(SCORES)
        rest = asyncio.ensure_future(anext(leases))
        while len(stage.told) < 2:
            await asyncio.sleep(0)
        rest.cancel()
        await asyncio.gather(rest, return_exceptions=True)
        assert stage.told == [
            ScorerCame(WORKER, frozenset({Version(3)})),
            ScoresCame(WORKER, "s-1", ()),
            ScorerGone(WORKER),
        ]  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize("report", [VERSIONS, SCORES], ids=["versions", "scores"])
def test_of_a_worker_that_is_barred_meanwhile_nothing_more_is_heard(report: ingest_pb2.ScoringReport) -> None:
    async def scene() -> None:
        stage, said = Stage(), asyncio.Queue[ingest_pb2.ScoringReport]()
        leases = stage.serve(said)
        said.put_nowait(VERSIONS)
        going = asyncio.ensure_future(anext(leases))
        while not stage.told:
            await asyncio.sleep(0)
        stage.barred.add(WORKER)
        said.put_nowait(report)
        with pytest.raises(NotAllowed):
            await going
        assert stage.told == [ScorerCame(WORKER, frozenset({Version(3)})), ScorerGone(WORKER)]

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_worker_that_is_barred_is_sent_no_lease() -> None:
    async def scene() -> None:
        stage = Stage()
        leases = stage.serve(asyncio.Queue())
        going = asyncio.ensure_future(anext(leases))
        await asyncio.sleep(0)
        stage.barred.add(WORKER)
        stage.streams.lease(WORKER, REQUEST, 9.0)
        with pytest.raises(NotAllowed):
            await going

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_newer_stream_takes_the_place_of_the_one_before_and_nothing_at_all_is_malformed() -> None:
    async def scene() -> None:
        stage, said = Stage(), asyncio.Queue[ingest_pb2.ScoringReport]()
        older = asyncio.ensure_future(anext(stage.serve(asyncio.Queue())))
        await asyncio.sleep(0)
        newer = asyncio.ensure_future(anext(stage.serve(said)))
        with pytest.raises(StopAsyncIteration):
            await older
        assert not stage.told, "it is still there"
        said.put_nowait(ingest_pb2.ScoringReport())
        with pytest.raises(MalformedMessage, match="expected versions or scores"):
            await newer

    asyncio.run(asyncio.wait_for(scene(), 30))
