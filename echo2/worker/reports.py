"""The worker's side of `Ingest`: one report stream to the learner, and fetching partial rollouts.

Guarantees: reports leave in the order given, and each gets one verdict in that order; a stream that breaks, or stays silent for
`VERDICT_S` with reports in flight, is replaced, with jittered backoff and without limit; the ticket of a lease travels with its
first report on each stream. Waits for the learner's address, for a connection, for reports, for verdicts. Leaves to others: what
to report (leases).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque

import grpc
import grpc.aio

from echo2.base.errors import MalformedMessage
from echo2.base.ids import LeaseId, PeerId
from echo2.base.rollout import Rollout
from echo2.control.waits import Backoff, Waits
from echo2.outside import monotonic
from echo2.outside.guard import cancel_all, handling
from echo2.trust.tls import Credentials, open_channel
from echo2.wire import rollout as wire
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import ingest_pb2, ingest_pb2_grpc, rollout_pb2
from echo2.worker.leases import Leases

VERDICT_S = 30.0  # several syncs of a slow disk at the learner
PARTIALS_S = 20.0  # a group of 16 x 8,192 tokens is 1.5 MB, 12 s at 1 Mbit/s
_CODE = grpc.StatusCode
REFUSED_CODES = (
    _CODE.PERMISSION_DENIED, _CODE.UNAUTHENTICATED, _CODE.NOT_FOUND, _CODE.FAILED_PRECONDITION, _CODE.INVALID_ARGUMENT,
)  # fmt: skip
_log = logging.getLogger("echo2.worker")


class Reports:
    """One per worker; `run` is its loop. The learner's address may change at any time (`move_to`)."""

    def __init__(self, credentials: Credentials, waits: Waits, backoff: Backoff, connect_s: float) -> None:
        self.credentials, self._waits, self._backoff, self._connect_s = credentials, waits, backoff, connect_s
        self._leases: Leases  # as `run` is given it; nothing happens before
        self._target: tuple[PeerId, str] | None = None
        self._moved = asyncio.Event()
        self._stub: ingest_pb2_grpc.IngestStub | None = None
        self._tickets: dict[LeaseId, rollout_pb2.LeaseTicket] = {}
        self._ticket_was_sent: set[LeaseId] = set()
        self._outgoing: asyncio.Queue[ingest_pb2.RolloutReport] = asyncio.Queue()
        self._under_way: deque[LeaseId] = deque()
        self._waiting_since = 0.0  # for the next verdict: since the last one, or since the first report after it
        self._sequence = 0
        self._fetches: dict[LeaseId, asyncio.Task[None]] = {}
        self._draws_by_seed = self._keeps_cache = False  # until the engine is known
        self._engine_kind = ""

    def set_engine(self, draws_by_seed: bool, *, keeps_cache: bool, kind: str) -> None:
        """How the engine samples; every report from now on says so."""
        self._draws_by_seed, self._keeps_cache, self._engine_kind = draws_by_seed, keeps_cache, kind

    # -- called by the leases

    def keep_ticket(self, ticket: rollout_pb2.LeaseTicket) -> None:
        """Keeps the ticket, the right to report a lease; it replaces an older one of the same lease."""
        lease_id = LeaseId(ticket.lease_id)
        self._tickets[lease_id] = ticket
        self._ticket_was_sent.discard(lease_id)

    def ticket_of(self, lease_id: LeaseId) -> rollout_pb2.LeaseTicket | None:
        return self._tickets.get(lease_id)

    def report(self, lease_id: LeaseId, segments: tuple[Rollout, ...]) -> None:
        self._sequence += 1
        is_first = lease_id not in self._ticket_was_sent
        self._ticket_was_sent.add(lease_id)
        if not self._under_way:
            self._waiting_since = monotonic()
        self._under_way.append(lease_id)
        self._outgoing.put_nowait(  # bounded: at most one report in flight per lease, and the leases are bounded
            ingest_pb2.RolloutReport(
                sequence=self._sequence,
                ticket=self._tickets.get(lease_id) if is_first else None,
                lease_id=lease_id,
                segments=[wire.rollout_to_message(segment) for segment in segments],
                draws_by_seed=self._draws_by_seed,
                keeps_cache=self._keeps_cache,
                engine_kind=self._engine_kind,
            )
        )

    def fetch_partials(self, lease_id: LeaseId) -> None:
        self._fetches[lease_id] = asyncio.get_running_loop().create_task(self._fetch(lease_id))

    def forget(self, lease_id: LeaseId) -> None:
        self._tickets.pop(lease_id, None)
        self._ticket_was_sent.discard(lease_id)
        fetch = self._fetches.pop(lease_id, None)
        if fetch is not None and fetch is not asyncio.current_task():
            fetch.cancel()

    # -- the loop

    def move_to(self, peer_id: PeerId, address: str) -> None:
        """Sets where the learner's services are; closes a stream to another address."""
        if (peer_id, address) != self._target:
            self._target = peer_id, address
            self._moved.set()

    async def run(self, leases: Leases) -> None:
        """Keeps a stream to the learner until cancelled; `leases` takes what the learner answers."""
        self._leases = leases
        try:
            while True:
                if self._target is None:
                    await self._moved.wait()
                    continue
                self._moved.clear()
                await self._session(self._target)
                pause_s = self._backoff.next_pause_s()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._moved.wait(), pause_s)
        finally:
            for fetch in self._fetches.values():
                fetch.cancel()

    async def _session(self, target: tuple[PeerId, str]) -> None:
        peer_id, address = target
        whose = f"the learner at {address}"
        self._waits.begin("learner", f"a connection to {whose}")
        async with open_channel(address, peer_id, self.credentials, _CHANNEL_OPTIONS) as channel:
            try:
                await asyncio.wait_for(channel.channel_ready(), self._connect_s)
            except TimeoutError:
                return
            self._waits.end("learner")
            self._stub = ingest_pb2_grpc.IngestStub(channel)
            while not self._outgoing.empty():
                self._outgoing.get_nowait()
            self._under_way.clear()
            self._ticket_was_sent.clear()
            self._leases.on_learner()
            _log.info("reports to %s", whose)
            refused, reason = None, ""
            try:
                with handling("the report stream", whose):
                    await self._stream(self._stub)
            except (grpc.aio.AioRpcError, MalformedMessage, TimeoutError) as error:
                if self._under_way and isinstance(error, grpc.aio.AioRpcError) and error.code() in REFUSED_CODES:
                    refused = self._under_way[0]  # the first unanswered one, since the learner answers in order
                reason = (error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)) or repr(error)
                _log.warning("lost %s: %s", whose, reason)
            finally:
                self._stub = None
                self._leases.on_learner_lost()
            if refused is not None:
                self._leases.refuse(refused, reason)

    async def _stream(self, stub: ingest_pb2_grpc.IngestStub) -> None:
        """Returns when the learner moved or closed the stream; raises when it broke."""
        call: _Call = stub.Report()
        reading = asyncio.create_task(self._read(call))
        parts = [reading, asyncio.create_task(self._write(call, reading)), asyncio.create_task(self._moved.wait())]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            await cancel_all(parts)
            call.cancel()

    async def _write(self, call: _Call, reading: asyncio.Task[None]) -> None:
        while True:
            report = await self._outgoing.get()
            try:
                await call.write(report)
            except asyncio.InvalidStateError:  # gRPC raises this if the stream has just ended; the reader reports why
                await asyncio.wait([reading])
                return

    async def _read(self, call: _Call) -> None:
        while True:
            reply = await self._read_one(call)
            if reply is None:
                return
            if not self._under_way:
                raise MalformedMessage(f"verdict {reply.sequence}: expected none, since no report is under way")
            expected = self._sequence - len(self._under_way) + 1
            if reply.sequence != expected:
                raise MalformedMessage(f"verdict: expected that on report {expected}, got that on {reply.sequence}")
            check(reply, "the learner")
            verdicts = wire.verdicts_from_message(reply)
            self._backoff.succeeded()
            self._waiting_since = monotonic()
            self._leases.on_verdicts(self._under_way.popleft(), verdicts)

    async def _read_one(self, call: _Call) -> ingest_pb2.RolloutVerdict | None:
        """The next verdict; None at the end of the stream. Waits without limit while no report is in flight.

        Raises TimeoutError if a report is in flight and no verdict has come for `VERDICT_S`.
        """
        reading = asyncio.ensure_future(call.read())
        try:
            while True:
                left_s = self._waiting_since + VERDICT_S - monotonic() if self._under_way else VERDICT_S
                if left_s <= 0:
                    raise TimeoutError(f"no verdict within {VERDICT_S:.0f} s")
                await asyncio.wait([reading], timeout=left_s)
                if reading.done():
                    reply = reading.result()
                    return reply if isinstance(reply, ingest_pb2.RolloutVerdict) else None
        finally:
            reading.cancel()

    async def _fetch(self, lease_id: LeaseId) -> None:
        """Asks the learner for partial rollouts until it answers; cancelled when the lease ends."""
        while (ticket := self._tickets.get(lease_id)) is not None:
            if self._stub is not None:
                request = ingest_pb2.GetPartialsRequest(ticket=ticket)
                try:
                    reply = await self._stub.GetPartials(request, timeout=PARTIALS_S)
                    with handling("partial rollouts", "the learner"):
                        check(reply, "the learner")
                        rollouts = wire.rollouts_from_partials(reply)
                    self._leases.on_partials(lease_id, rollouts)
                    return
                except grpc.aio.AioRpcError as error:
                    if error.code() in REFUSED_CODES:
                        self._leases.refuse(lease_id, error.details() or error.code().name)
                        return
                except MalformedMessage as error:
                    self._leases.refuse(lease_id, str(error))
                    return
            await asyncio.sleep(self._backoff.first_s)


_Call = grpc.aio.StreamStreamCall[ingest_pb2.RolloutReport, ingest_pb2.RolloutVerdict]
_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", wire.PARTIALS_BYTES_MAX),)
