"""Scores tokens for the learner: takes scoring leases on a separate stream and answers with the engine's scores.

Guarantees: a lease is answered once, in the order taken, or not at all once its time is over; scores under unproven weights are
never sent; the engine works on one lease at a time. Waits for scorable versions, for leases, for the engine. Leaves to others: the
connection (reporting), which leases (learner), the scores (engine).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc.aio

from echo2.base.clock import Clock
from echo2.base.errors import EngineError
from echo2.base.ids import LeaseId, Version
from echo2.outside.guard import handling
from echo2.scoring.request import ScoreRequest, TokenScores
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import ingest_pb2, ingest_pb2_grpc
from echo2.wire.scoring import lease_from_message, scores_to_message
from echo2.worker.engine import Engine
from echo2.worker.token_gate import TokenGate

PROOF_LOOK_S = 0.05
AGAIN_S = 5.0
"""Pause before a scoring stream that ended is opened again."""
_log = logging.getLogger("echo2.worker")
if TYPE_CHECKING:
    _Call = grpc.aio.StreamStreamCall[ingest_pb2.ScoringReport, ingest_pb2.ScoringLease]


class Scoring:
    """One per worker. `engine` is set once it has started."""

    def __init__(self, gate: TokenGate, clock: Clock) -> None:
        self.engine: Engine | None = None
        self.scored_tokens = 0
        self._gate = gate
        self._clock = clock
        self._proven: set[Version] = set()
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()

    def live(self, version: Version) -> None:
        """Records that `version` is live and proven."""
        assert self.engine is not None, "a version is live on an engine"
        self._proven = (self._proven | {version}) & (self.engine.scorable | {version})
        self._changed.set()

    @property
    def versions(self) -> frozenset[Version]:
        """The versions under which it can score now: proven, and still kept by the engine."""
        return self.engine.scorable & self._proven if self.engine is not None else frozenset()

    async def serve(self, stub: ingest_pb2_grpc.IngestStub) -> None:
        """Serves scoring leases on one connection until cancelled."""
        while True:
            while not self.versions:
                self._changed.clear()
                await self._changed.wait()
            call = stub.Score()
            parts = [asyncio.create_task(self._take(call)), asyncio.create_task(self._tell(call))]
            try:
                done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                for part in done:
                    part.result()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                _log.debug("scoring: the learner ended the stream: %s", error)
            finally:
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)
                call.cancel()
            await asyncio.sleep(AGAIN_S)

    async def _tell(self, call: _Call) -> None:
        """Sends the scorable versions, first and at each change."""
        while True:
            self._changed.clear()
            told = ingest_pb2.ScorableVersions(versions=sorted(self.versions))
            await self._write(call, ingest_pb2.ScoringReport(scorable=told))
            await self._changed.wait()

    async def _take(self, call: _Call) -> None:
        """Takes leases one at a time and answers them."""
        while isinstance(message := await call.read(), ingest_pb2.ScoringLease):
            with handling("scoring leases", "the learner"):
                check(message, "the learner")
                request, within_s = lease_from_message(message)
            scores = await self._answer(request, self._clock.now() + within_s)
            if scores is not None:
                answer = scores_to_message(LeaseId(request.request_id), scores)
                await self._write(call, ingest_pb2.ScoringReport(scores=answer))

    async def _write(self, call: _Call, report: ingest_pb2.ScoringReport) -> None:
        async with self._writing:
            await call.write(report)

    async def _answer(self, request: ScoreRequest, until: float) -> tuple[TokenScores, ...] | None:
        """The scores; empty if the engine cannot score the request or no longer keeps its versions; None after the deadline."""
        assert self.engine is not None, "leases come to an engine"
        await self._proof()
        if self._clock.now() >= until:
            return None
        if not request.versions <= self.versions:
            return ()
        discards = self._gate.discards
        try:
            scores = await self.engine.score(request)
        except EngineError as error:
            _log.info("scoring %s: %s", request.request_id, error)
            return ()
        await self._proof()
        if self._gate.discards != discards:
            return ()  # the weights it was computed with may have been of no version
        self.scored_tokens += request.read_tokens
        return scores

    async def _proof(self) -> None:
        """Returns once the live weights are proven."""
        while self._gate.is_holding:
            await asyncio.sleep(PROOF_LOOK_S)
