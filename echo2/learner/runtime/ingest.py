"""The Ingest service: receives workers' rollouts over mutual TLS.

Guarantees: a segment is processed only if this run's coordinator signed its lease's ticket for the peer whose certificate opened
the connection; reports of a stream are answered one at a time, in order, so the stream's flow control bounds a worker's
unanswered reports; every message is within the limits of wire/rollout; each peer gets its fair share of the event loop
(outside/guard), however many streams it opens one after another. Waits for: the next report of each stream, and the journal
before a verdict. Leaves to others: processing the segments (intake).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import grpc

from echo2.base.errors import EchoError, LimitExceeded, MalformedMessage, NotAllowed, ProtocolError, TrustError
from echo2.base.ids import LeaseId, PeerId, RunId
from echo2.base.rollout import RolloutSegment, SegmentVerdict, Verdict
from echo2.base.routing import NO_ROUTING
from echo2.learner.audit import Habits
from echo2.learner.runtime.intake import Intake
from echo2.learner.runtime.scoring import ScoringStreams
from echo2.outside import monotonic
from echo2.outside.guard import FairShares, Refusals
from echo2.trust.runtime.tls import peer_of
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import ingest_pb2, ingest_pb2_grpc
from echo2.wire.rollout import lease_id_from_wire, rollout_to_message, segments_from_report, verdict_to_message
from echo2.wire.ticket import Ticket, verify_ticket

STREAMS_PER_PEER_MAX = 4
LEASES_PER_STREAM_MAX = 2048
WORKERS_MAX = 16_384
REPLY_ROUTING_BYTES_MAX = 64 << 20
"""Routing bytes in one reply with partial rollouts; rollouts beyond the limit are sent without routing."""
_log = logging.getLogger("echo2.learner")


class IngestService(ingest_pb2_grpc.IngestServicer):
    """Serves the workers of one run. `failed`: reports an error of the learner's own, which ends it."""

    def __init__(
        self,
        intake: Intake,
        run_id: RunId,
        coordinator_peer_id: PeerId,
        scoring: ScoringStreams,
        failed: Callable[[BaseException], None],
        *,
        requires_seeds: bool = False,
    ) -> None:
        self.intake, self._requires_seeds = intake, requires_seeds
        self._scoring, self._failed = scoring, failed
        self.run_id = run_id
        self.coordinator_peer_id = coordinator_peer_id
        self.barred: dict[PeerId, str] = {}
        self.refused_reports = 0
        self._habits: dict[PeerId, Habits] = {}
        self._streams: Counter[PeerId] = Counter()
        self._shares = FairShares()
        self._turns: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()
        self._refusals = Refusals(_log)

    async def Report(
        self, request_iterator: AsyncIterator[ingest_pb2.RolloutReport], context: Any
    ) -> AsyncIterator[ingest_pb2.RolloutVerdict]:
        peer_id = await self._admitted_peer(context)
        self._streams[peer_id] += 1
        tickets: dict[LeaseId, Ticket] = {}
        try:
            if self._streams[peer_id] > STREAMS_PER_PEER_MAX:
                raise LimitExceeded(f"{peer_id}: expected at most {STREAMS_PER_PEER_MAX} report streams")
            async for report in request_iterator:
                self._check_barred(peer_id)
                yield await self._answer(report, peer_id, tickets)
        except EchoError as error:
            await self._end(context, error, peer_id)
        except asyncio.CancelledError:
            return  # the worker left or the server stops; gRPC would log it as our error
        finally:
            self._streams[peer_id] -= 1
            if not self._streams[peer_id]:
                del self._streams[peer_id]

    async def Score(
        self, request_iterator: AsyncIterator[ingest_pb2.ScoringReport], context: Any
    ) -> AsyncIterator[ingest_pb2.ScoringLease]:
        peer_id = await self._admitted_peer(context)
        try:
            self._check_barred(peer_id)
            async for lease in self._scoring.serve(peer_id, request_iterator, self._check_barred, self._pause):
                yield lease
        except EchoError as error:
            await self._end(context, error, peer_id)
        except asyncio.CancelledError:
            return  # the worker left or the server stops

    async def GetPartials(self, request: ingest_pb2.GetPartialsRequest, context: Any) -> ingest_pb2.GetPartialsReply:
        peer_id = await self._admitted_peer(context)
        try:
            check(request, peer_id)
            self._check_barred(peer_id)
            ticket = self._verified(request.ticket, peer_id)
        except EchoError as error:
            await self._end(context, error, peer_id)
            raise
        async with self._turns.setdefault(peer_id, asyncio.Lock()):
            reply = await self._partials(ticket, peer_id)
        if reply is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"group {ticket.group_id} is closed or was taken over")
            raise AssertionError("abort raises")
        return reply

    async def _partials(self, ticket: Ticket, peer_id: PeerId) -> ingest_pb2.GetPartialsReply | None:
        """The rollouts of a group so far; None if it is closed or taken over. A small request gets a large reply, so replies are
        made one at a time per peer and within its fair share."""
        held = self.intake.held_rollouts(ticket.group_id, ticket.attempt)
        if held is None:
            return None
        reply = ingest_pb2.GetPartialsReply()
        routing_room = REPLY_ROUTING_BYTES_MAX
        for rollout in held:
            if rollout.token_ids:
                begun = monotonic()
                routing_room -= len(rollout.routing.tokens) + len(rollout.routing.prompt)
                told = rollout if routing_room >= 0 else replace(rollout, routing=NO_ROUTING)
                reply.rollouts.append(rollout_to_message(told))
                await self._pause(2 * (monotonic() - begun), peer_id)  # gRPC serialises it once more
        return reply

    async def _pause(self, worked_s: float, peer_id: PeerId) -> None:
        """Pauses after `worked_s` seconds of work for a peer, as long as its fair share requires; always yields to other tasks."""
        await asyncio.sleep(self._shares.of(peer_id).pause_s(worked_s, monotonic()))

    async def _answer(
        self, report: ingest_pb2.RolloutReport, peer_id: PeerId, tickets: dict[LeaseId, Ticket]
    ) -> ingest_pb2.RolloutVerdict:
        begun = monotonic()
        check(report, peer_id)
        ticket = self._ticket_of(report, peer_id, tickets)
        if self._requires_seeds and not report.draws_by_seed:
            raise NotAllowed(
                f"{peer_id}: expected an engine that draws by the seeds of its leases, got one that drafts tokens: "
                "set worker.draft_tokens = 0 there, or learner.drafting_workers = true here"
            )
        segments = segments_from_report(report)
        await self._pause(2 * (monotonic() - begun), peer_id)  # the rest takes about as long again
        own = [segment for segment in segments if segment.group_id == ticket.group_id]
        self._note_habits(peer_id, Habits(report.draws_by_seed, report.keeps_cache))
        verdicts = await self.intake.report(own, ticket.attempt, peer_id)
        answered = iter(verdicts)
        everything = [
            next(answered) if segment.group_id == ticket.group_id else _foreign(segment, ticket) for segment in segments
        ]
        return ingest_pb2.RolloutVerdict(
            sequence=report.sequence, segments=[verdict_to_message(verdict) for verdict in everything]
        )

    def habits_of(self, peer_id: PeerId) -> Habits:
        """What the worker reports about its engine; the weakest assumptions if it has reported nothing yet."""
        return self._habits.get(peer_id, Habits())

    def _note_habits(self, peer_id: PeerId, told: Habits) -> None:
        """Records a worker's habits. One that once did not draw by its seeds stays marked so: otherwise it could choose with
        each report how it is tested."""
        known = self._habits.get(peer_id, told)
        if peer_id not in self._habits and len(self._habits) >= WORKERS_MAX:
            del self._habits[next(iter(self._habits))]
        self._habits[peer_id] = replace(told, draws_by_seed=told.draws_by_seed and known.draws_by_seed)

    def _ticket_of(self, report: ingest_pb2.RolloutReport, peer_id: PeerId, tickets: dict[LeaseId, Ticket]) -> Ticket:
        if report.HasField("ticket"):
            ticket = self._verified(report.ticket, peer_id)
            if len(tickets) >= LEASES_PER_STREAM_MAX:  # the oldest lease ended long ago
                del tickets[next(iter(tickets))]
            tickets[ticket.lease_id] = ticket
            return ticket
        lease_id = lease_id_from_wire(report.lease_id)
        if lease_id not in tickets:
            raise MalformedMessage(
                f"report {report.sequence} of {peer_id}: expected a ticket with the first report of lease {lease_id}"
            )
        return tickets[lease_id]

    def _verified(self, message: Any, peer_id: PeerId) -> Ticket:
        return verify_ticket(message, self.run_id, self.coordinator_peer_id, peer_id)

    def _check_barred(self, peer_id: PeerId) -> None:
        if peer_id in self.barred:
            raise NotAllowed(f"nothing is taken from {peer_id}: {self.barred[peer_id]}")

    async def _admitted_peer(self, context: Any) -> PeerId:
        try:
            return peer_of(context).peer_id
        except TrustError as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise

    async def _end(self, context: Any, error: EchoError, peer_id: PeerId) -> None:
        """Aborts a call. If the peer broke a rule, counts and logs that; an error of our own (a full disk) ends the learner too."""
        if isinstance(error, TrustError | ProtocolError | LimitExceeded):
            self.refused_reports += 1
            self._refusals.warn("refused %s: %s", peer_id, error)
        else:
            self._failed(error)
        await context.abort(_status_of(error), f"{type(error).__name__}: {error}")


def _foreign(segment: RolloutSegment, ticket: Ticket) -> SegmentVerdict:
    text = f"lease {ticket.lease_id} is of group {ticket.group_id}, not of {segment.group_id}"
    return SegmentVerdict(segment.group_id, segment.index, Verdict.REFUSED, 0, text)


def _status_of(error: EchoError) -> grpc.StatusCode:
    if isinstance(error, TrustError):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(error, ProtocolError):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, LimitExceeded):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return grpc.StatusCode.INTERNAL
