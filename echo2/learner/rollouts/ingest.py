"""The Ingest service: receives workers' rollouts over mutual TLS.

Guarantees: a segment is processed only if this run's coordinator signed its lease's ticket for the peer whose certificate opened
the connection; reports of a stream are answered one at a time, in order, so the stream's flow control bounds a worker's
unanswered reports; every message is within the limits of wire/rollout; each peer gets its fair share of the event loop
(outside/guard), however many streams it opens one after another. Waits for: the next report of each stream, and the journal
before a verdict.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import grpc

from echo2.base.errors import EchoError, LimitExceeded, MalformedMessage, NotAllowed
from echo2.base.ids import LeaseId, PeerId, RunId
from echo2.base.rollout import NO_ROUTING, Ticket, Verdict
from echo2.base.units import address_of
from echo2.broadcast.nat.reach import loopback_of, outward_host
from echo2.learner.audit import Habits
from echo2.learner.bets import noise_prior
from echo2.learner.options import LearnerOptions
from echo2.learner.rollouts.pool import RolloutPool
from echo2.outside import monotonic
from echo2.trust.ports import LEARNER
from echo2.trust.tls import Credentials, bind_server, new_server, peer_of, server_credentials
from echo2.wire.gen.echo2.v1 import ingest_pb2, ingest_pb2_grpc
from echo2.wire.rollout import (
    lease_id_from_wire,
    rollout_to_message,
    segments_from_report,
    verdict_to_message,
    verify_ticket,
)

STREAMS_PER_PEER_MAX = 4  # one, and those that a broken link has left
LEASES_PER_STREAM_MAX = 2048  # more than a worker holds at a time
REPLY_ROUTING_BYTES_MAX = 64 << 20
"""Routing bytes in one reply with partial rollouts; rollouts beyond the limit are sent without routing."""


class IngestService(ingest_pb2_grpc.IngestServicer):
    """Serves the workers of one run. `fail`: ends the learner with an error of its own, as of a full disk."""

    def __init__(
        self, pool: RolloutPool, run_id: RunId, coordinator_peer_id: PeerId, fail: Callable[[BaseException], None], *,
        requires_seeds: bool = False, precision: str = "",
    ) -> None:  # fmt: skip
        self.pool, self._fail = pool, fail
        self._requires_seeds, self._noise_nats = requires_seeds, noise_prior(precision)
        self.run_id, self.coordinator_peer_id = run_id, coordinator_peer_id
        self._streams: Counter[PeerId] = Counter()
        self._turns: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()

    async def Report(
        self, request_iterator: AsyncIterator[ingest_pb2.RolloutReport], context: Any
    ) -> AsyncIterator[ingest_pb2.RolloutVerdict]:
        peer_id = peer_of(context).peer_id
        self._streams[peer_id] += 1
        tickets: dict[LeaseId, Ticket] = {}
        try:
            if self._streams[peer_id] > STREAMS_PER_PEER_MAX:
                raise LimitExceeded(f"{peer_id}: expected at most {STREAMS_PER_PEER_MAX} report streams")
            async for report in request_iterator:
                yield await self._answer(report, peer_id, tickets, context)
        except asyncio.CancelledError:
            return  # the worker left or the server stops; gRPC would log it as our error
        finally:
            self._streams[peer_id] -= 1
            if not self._streams[peer_id]:
                del self._streams[peer_id]

    async def _answer(
        self, report: ingest_pb2.RolloutReport, peer_id: PeerId, tickets: dict[LeaseId, Ticket], call: Any
    ) -> ingest_pb2.RolloutVerdict:
        begun, charged_s = monotonic(), call.charged_s
        self._check_barred(peer_id)
        ticket = self._ticket_of(report, peer_id, tickets)
        if self._requires_seeds and not report.draws_by_seed:
            raise NotAllowed(
                f"{peer_id}: expected an engine that draws by the seeds of its leases, got one that drafts tokens: "
                "set worker.draft_tokens = 0 there, or give the learner's run file the number that is set there"
            )
        if noise_prior(report.engine_kind) > self._noise_nats:  # what is no noise would pass as some
            raise NotAllowed(f"{peer_id}: expected worker.quantisation of the run file, got {report.engine_kind}")
        segments = segments_from_report(report)
        worked_s = 2 * (monotonic() - begun)  # the rest takes about as long again
        await call.pause(worked_s)
        foreign = [segment.group_id for segment in segments if segment.group_id != ticket.group_id]
        if foreign:
            raise NotAllowed(f"{peer_id}: lease {ticket.lease_id} is of group {ticket.group_id}, not of {foreign[0]}")
        self.pool.note_habits(peer_id, Habits(report.draws_by_seed, report.keeps_cache, report.engine_kind))
        before = self.pool.held_tokens(ticket.group_id)
        try:
            verdicts = await self.pool.report(segments, ticket.attempt, peer_id)
        except EchoError as error:  # the learner's own: the worker has done nothing wrong
            self._fail(error)
            await call.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            raise
        useful = [verdict for verdict in verdicts if verdict.verdict in (Verdict.HELD, Verdict.ADMITTED)]
        new = sum(max(0, verdict.held_tokens - before.get(verdict.index, 0)) for verdict in useful)
        sent = sum(len(segment.token_ids) for segment in segments)
        call.share.repay((worked_s + charged_s) * min(1.0, new / max(1, sent)))
        return ingest_pb2.RolloutVerdict(sequence=report.sequence, segments=map(verdict_to_message, verdicts))

    async def GetPartials(self, request: ingest_pb2.GetPartialsRequest, context: Any) -> ingest_pb2.GetPartialsReply:
        """The rollouts of a group so far. A small request gets a large reply, so replies are made one at a time per peer and within
        its fair share."""
        peer_id = peer_of(context).peer_id
        self._check_barred(peer_id)
        ticket = self._verified(request.ticket, peer_id)
        async with self._turns.setdefault(peer_id, asyncio.Lock()):
            held = self.pool.groups.take_over(ticket.group_id, ticket.attempt)
            if held is None:
                text = f"group {ticket.group_id} is closed or was taken over"
                await context.abort(grpc.StatusCode.NOT_FOUND, text)
                raise AssertionError("abort raises")
            reply = ingest_pb2.GetPartialsReply()
            routing_room = REPLY_ROUTING_BYTES_MAX
            for rollout in held:
                if rollout.token_ids:
                    begun = monotonic()
                    routing_room -= len(rollout.routing.tokens) + len(rollout.routing.prompt)
                    sent = rollout if routing_room >= 0 else replace(rollout, routing=NO_ROUTING)
                    reply.rollouts.append(rollout_to_message(sent))
                    await context.pause(2 * (monotonic() - begun))  # gRPC serialises it once more
            return reply

    def _ticket_of(self, report: ingest_pb2.RolloutReport, peer_id: PeerId, tickets: dict[LeaseId, Ticket]) -> Ticket:
        """`tickets`: those that came on this stream."""
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
        if peer_id in self.pool.barred:
            raise NotAllowed(f"nothing is taken from {peer_id}: {self.pool.barred[peer_id]}")


class IngestPort:
    """The port at which workers reach the learner. `address`: for workers; `local`: host and port on this machine."""

    def __init__(
        self, pool: RolloutPool, options: LearnerOptions, credentials: Credentials,
        fail: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self.server = new_server(LEARNER)
        service = IngestService(
            pool, credentials.run_id, credentials.coordinator_peer_id, fail,
            requires_seeds=not options.config.worker.draft_tokens, precision=options.config.worker.quantisation,
        )  # fmt: skip
        ingest_pb2_grpc.add_IngestServicer_to_server(service, self.server)
        listen = address_of(options.host, options.config.learner.port)
        port = bind_server(self.server, listen, server_credentials(credentials))
        self.local = loopback_of(options.host), port
        host = outward_host(options.host, credentials.coordinator_address)
        self.address = options.config.learner.advertise or address_of(host, port)
