"""The learner's side of scoring: one stream per scoring worker, which carries leases out and scores in.

Guarantees: a worker has one such stream, the newest; its messages are bounded and use no more than its fair share of the event
loop; a barred worker scores nothing. Waits for: workers' messages, and leases to send. Leaves to others: who scores what
(learner/scorings), judging the scores (learner/disputes).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from echo2.base.errors import MalformedMessage
from echo2.base.ids import PeerId, Version
from echo2.learner import scorings
from echo2.outside import monotonic
from echo2.scoring.request import ScoreRequest
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import ingest_pb2
from echo2.wire.scoring import lease_to_message, scores_from_message

Tell = Callable[[scorings.Event], None]
Pause = Callable[[float, PeerId], Awaitable[None]]
Allowed = Callable[[PeerId], None]


class ScoringStreams:
    """The streams of all scoring workers. `tell`: called with each event from a worker."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._leases: dict[PeerId, asyncio.Queue[ingest_pb2.ScoringLease | None]] = {}

    def lease(self, worker: PeerId, request: ScoreRequest, within_s: float) -> None:
        """Sends a lease to a worker, if it has a stream. The queue is bounded by the leases that a worker may hold at a time."""
        if worker in self._leases:
            self._leases[worker].put_nowait(lease_to_message(request, within_s))

    async def serve(
        self,
        worker: PeerId,
        reports: AsyncIterator[ingest_pb2.ScoringReport],
        check_allowed: Allowed,
        pause: Pause,
    ) -> AsyncIterator[ingest_pb2.ScoringLease]:
        """Yields the leases of one worker until it leaves or opens another stream."""
        if worker in self._leases:
            self._leases[worker].put_nowait(None)
        queue: asyncio.Queue[ingest_pb2.ScoringLease | None] = asyncio.Queue()
        self._leases[worker] = queue
        hearing = asyncio.ensure_future(self._hear(worker, reports, check_allowed, pause))
        hearing.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (lease := await queue.get()) is not None:
                check_allowed(worker)
                yield lease
            if hearing.done():
                hearing.result()
        finally:
            hearing.cancel()
            if self._leases.get(worker) is queue:
                del self._leases[worker]
                self._tell(scorings.ScorerGone(worker))

    async def _hear(
        self,
        worker: PeerId,
        reports: AsyncIterator[ingest_pb2.ScoringReport],
        check_allowed: Allowed,
        pause: Pause,
    ) -> None:
        async for report in reports:
            begun = monotonic()
            check_allowed(worker)
            check(report, worker)
            match report.WhichOneof("kind"):
                case "scorable":
                    versions = frozenset(map(Version, report.scorable.versions))
                    self._tell(scorings.ScorerCame(worker, versions))
                case "scores":
                    lease_id, scores = scores_from_message(report.scores)
                    self._tell(scorings.ScoresCame(worker, lease_id, scores))
                case kind:
                    raise MalformedMessage(f"{worker}: expected versions or scores, got {kind}")
            await pause(monotonic() - begun, worker)
