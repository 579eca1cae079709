"""The worker's links: its credentials for a run, its session with the coordinator, its stream of reports to the learner.

Guarantees: identity and credentials are kept in the folder, so a restart needs no token; a folder that belongs to another run is
refused; an unreachable coordinator is retried without limit, with jittered backoff; a wrong token, peer or protocol version ends
the join at once. Messages sent while no session is open are dropped: the next hello lists the leases still held. A grant that is
malformed or for another worker is refused with the reason and affects nothing else; deadlines, which are on the coordinator's
clock, are taken by the time that its welcome told. A learner with another model than before ends the session.

Reports leave in the order given, and each gets one verdict in that order; a stream that breaks, or stays silent for `VERDICT_S`
with reports in flight, is replaced, with jittered backoff and without limit; the ticket of a lease travels with its first report on
each stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from echo2.base.clock import Backoff, Clock, Waits
from echo2.base.errors import EngineError, MalformedMessage, ResourceError, StateError, TrustError, VersionMismatch
from echo2.base.ids import LeaseId, PeerId, Version
from echo2.base.rollout import EndReason, Rollout
from echo2.broadcast.node import BroadcastNode
from echo2.control.session import ControlSession, Party, check_interval, enrolled
from echo2.outside import monotonic, unix_now
from echo2.outside.guard import cancel_all, handling
from echo2.trust.identity import JoinLink, Role, dns_name_of
from echo2.trust.tls import Credentials, load_credentials, load_or_create_identity, open_channel, save_credentials
from echo2.wire import broadcast as broadcast_wire, rollout as wire
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc, ingest_pb2, ingest_pb2_grpc, rollout_pb2
from echo2.worker.leases import Leases
from echo2.worker.machine import Finding, clock_finding

if TYPE_CHECKING:
    from echo2.worker.heartbeat import WorkerStatus

ADDRESS_CHARS_MAX = 300  # a host name has 253 at most, then the port
_log = logging.getLogger("echo2.worker")

# -- joining


async def join(link: JoinLink, folder: Path, waits: Waits, backoff: Backoff) -> Credentials:
    """Credentials for the run that the link names; enrols if there are none, or they have expired. Raises ResourceError if the
    folder cannot hold them, StateError if it belongs to another run."""
    try:
        identity = load_or_create_identity(folder)
    except OSError as error:
        raise ResourceError(f"{folder}: expected a folder to keep the identity in, got {error}") from None
    credentials = load_credentials(folder, identity)
    if credentials is not None and credentials.coordinator_peer_id != link.peer_id:
        raise StateError(
            f"{folder}: it belongs to run {credentials.run_id} of coordinator {credentials.coordinator_peer_id}, the "
            f"link names {link.peer_id}; give this run a folder of its own"
        )
    if credentials is not None:  # about to expire, too: the link's token may have been used up since
        return credentials
    credentials = await enrolled(link, identity, Role.WORKER, waits, backoff)
    save_credentials(folder, credentials)
    _log.info("enrolled in run %s as %s", credentials.run_id, credentials.peer_id)
    return credentials


# -- the coordinator


class CoordinatorLink:
    def __init__(self, control: ControlSession[coordinator_pb2.WorkerMessage]) -> None:
        self.credentials, self._control = control.credentials, control

    async def run(
        self, status: WorkerStatus, commands: CoordinatorCommands, find: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Keeps the session until it is refused or cancelled. `find` updates the credentials with the coordinator's address."""
        party = Party(
            dial=lambda channel: coordinator_pb2_grpc.CoordinatorStub(channel).WorkerSession(),
            hello=lambda: coordinator_pb2.WorkerMessage(hello=status.hello()),
            beat=lambda: coordinator_pb2.WorkerMessage(heartbeat=status.heartbeat()),
            on_welcome=commands.on_welcome,
            on_order=commands.on_order,
            on_lost=commands.on_lost,
            find=find,
        )
        await self._control.run(party)

    def end_lease(self, lease_id: LeaseId, reason: EndReason, message: str) -> None:
        ended = coordinator_pb2.LeaseEnded(lease_id=lease_id, reason=f"REASON_{reason.name}", message=message[:2000])
        self._control.send(coordinator_pb2.WorkerMessage(lease_ended=ended))

    def report_progress(self, lease_id: LeaseId, finished_rollouts: int, tokens: int) -> None:
        progress = coordinator_pb2.LeaseProgress(lease_id=lease_id, finished_rollouts=finished_rollouts, tokens=tokens)
        self._control.send(coordinator_pb2.WorkerMessage(lease_progress=progress))

    def request_leases(self, free_rollouts: int, version: Version) -> None:
        request = coordinator_pb2.LeaseRequest(free_rollouts=free_rollouts, version=version)
        self._control.send(coordinator_pb2.WorkerMessage(lease_request=request))

    def send_heartbeat(self, heartbeat: coordinator_pb2.Heartbeat) -> None:
        """Sends an extra heartbeat because something changed, such as the live version; it precedes any later message."""
        self._control.send(coordinator_pb2.WorkerMessage(heartbeat=heartbeat))

    async def leave(self, reason: str, within_s: float) -> None:
        """Says good-bye, so that the coordinator reassigns the worker's leases at once."""
        leaving = coordinator_pb2.WorkerLeaving(reason=reason)
        await self._control.leave(coordinator_pb2.WorkerMessage(leaving=leaving), within_s)


class CoordinatorCommands:
    """Parses the coordinator's orders and passes each to the part it concerns. `learner`: where it is, and its model; None until
    `learner_known` is set."""

    def __init__(
        self,
        link: CoordinatorLink,
        leases: Leases,
        reports: Reports,
        node: BroadcastNode,
        clock: Clock,
        add_finding: Callable[[Finding], None],
    ) -> None:
        self.learner: coordinator_pb2.LearnerWhereabouts | None = None
        self.learner_known = asyncio.Event()
        self._link, self._leases, self._reports, self._node = link, leases, reports, node
        self._clock, self._add_finding = clock, add_finding
        self._ahead_s = unix_now() - clock.now()  # the coordinator's time before this clock, which nobody sets

    def on_lost(self) -> None:
        self._leases.on_coordinator_lost()

    def on_welcome(self, welcome: coordinator_pb2.WorkerWelcome) -> None:
        check_interval("report_interval_s", welcome.report_interval_s)
        _log.info("welcome in run %s, staleness bound %d", welcome.run_id, welcome.staleness_bound)
        if welcome.unix_s:
            self._ahead_s = welcome.unix_s - self._clock.now()
            self._add_finding(clock_finding(welcome.unix_s - unix_now()))
        coordinator = self._link.credentials.coordinator_peer_id
        self._node.nat.use_relay(coordinator, welcome.relay_address[:ADDRESS_CHARS_MAX])
        self._node.bans.name_all(map(PeerId, welcome.banned_peer_ids))
        self._node.drop_banned()
        if welcome.HasField("learner"):
            self._on_learner(welcome.learner)
        self._leases.on_coordinator(welcome.report_interval_s)

    def on_order(self, order: coordinator_pb2.WorkerOrder) -> None:
        match order.WhichOneof("kind"):
            case "lease_grant":
                self._on_grant(order.lease_grant)
            case "lease_revoke":
                revoke = order.lease_revoke
                self._leases.revoke(wire.lease_id_from_wire(revoke.lease_id), revoke.reason[:2000])
            case "activation":
                is_active = order.activation.is_active
                _log.info("%s: %s", "active" if is_active else "on standby", order.activation.reason[:500])
                self._leases.activate(is_active)
            case "broadcast_plan":
                self._node.set_plan(broadcast_wire.plan_from_message(order.broadcast_plan))
            case "learner":
                self._on_learner(order.learner)
            case "banned":
                self._node.bans.name(PeerId(order.banned.peer_id), is_lifted=order.banned.is_lifted)
                self._node.drop_banned()
            case kind:
                raise MalformedMessage(f"the coordinator: expected an order, got {kind or 'one of an unknown kind'}")

    def _on_learner(self, learner: coordinator_pb2.LearnerWhereabouts) -> None:
        try:
            dns_name_of(learner.peer_id)
        except TrustError as error:
            raise MalformedMessage(f"the learner's whereabouts: {error}") from None
        if self.learner is None:
            self.learner = learner
        _refuse_other_model(self.learner, learner)
        peer_id = PeerId(learner.peer_id)
        if self.learner.peer_id != peer_id:  # before it can hear of them
            self.learner.peer_id = peer_id
            self._leases.on_another_learner()
        self.learner_known.set()
        self._node.set_publisher(peer_id, learner.chunk_address)
        self._node.nat.use_relay(peer_id, learner.relay_address[:ADDRESS_CHARS_MAX])
        self._reports.move_to(peer_id, learner.address)

    def _on_grant(self, grant: coordinator_pb2.LeaseGrant) -> None:
        ticket, me = grant.ticket, self._link.credentials.peer_id
        lease_id = wire.lease_id_from_wire(ticket.lease_id)
        try:
            group = wire.group_from_message(grant.group)
            if ticket.group_id != group.group_id or ticket.worker_peer_id != me:
                raise MalformedMessage(
                    f"ticket of lease {lease_id}: expected group {group.group_id} and worker {me}, got "
                    f"{ticket.group_id[:128]} and {ticket.worker_peer_id[:128]}"
                )
        except MalformedMessage as error:
            _log.warning("refusing lease %s: %s", lease_id, error)
            self._link.end_lease(lease_id, EndReason.REFUSED, str(error))
            return
        if grant.is_renewal and lease_id not in self._leases.lease_ids:
            return  # the two messages crossed: the lease has ended here, so neither it nor its ticket begins again
        self._reports.keep_ticket(ticket)
        deadline = ticket.deadline_unix_s - self._ahead_s
        self._leases.grant(lease_id, group, deadline, is_continuation=grant.is_continuation)


def _refuse_other_model(known: coordinator_pb2.LearnerWhereabouts, learner: coordinator_pb2.LearnerWhereabouts) -> None:
    """Raises VersionMismatch for another model; EngineError, after which units start it again, for longer sequences than fit."""
    if known.model_digest != learner.model_digest:
        raise VersionMismatch(
            f"the learner's model: expected {known.model_name} (digest {known.model_digest[:16]}), it now trains "
            f"{learner.model_name} ({learner.model_digest[:16]}); start this worker anew"
        )
    # 0: the learner had not said, so memory is laid out for the model's whole context.
    if 0 < known.longest_sequence_tokens < learner.longest_sequence_tokens:
        raise EngineError(
            f"the run's longest sequence: expected {known.longest_sequence_tokens} tokens, for which this worker's "
            f"memory is laid out, it is now {learner.longest_sequence_tokens}; start this worker anew"
        )


# -- the learner

VERDICT_S = 30.0  # several syncs of a slow disk at the learner
PARTIALS_S = 20.0  # a group of 16 x 8,192 tokens is 1.5 MB, 12 s at 1 Mbit/s
_CODE = grpc.StatusCode
REFUSED_CODES = (
    _CODE.PERMISSION_DENIED, _CODE.UNAUTHENTICATED, _CODE.NOT_FOUND, _CODE.FAILED_PRECONDITION, _CODE.INVALID_ARGUMENT,
)  # fmt: skip


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
        report = ingest_pb2.RolloutReport(
            sequence=self._sequence,
            ticket=self._tickets.get(lease_id) if is_first else None,
            lease_id=lease_id,
            segments=[wire.rollout_to_message(segment) for segment in segments],
            draws_by_seed=self._draws_by_seed,
            keeps_cache=self._keeps_cache,
            engine_kind=self._engine_kind,
        )
        self._outgoing.put_nowait(report)  # bounded: one report in flight per lease at most, and the leases are bounded

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

    def reopen(self) -> None:
        """Closes the stream: the next one shows the certificate as it is now."""
        if self._target is not None:
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
                    async with asyncio.timeout(pause_s):
                        await self._moved.wait()
        finally:
            for fetch in self._fetches.values():
                fetch.cancel()

    async def _session(self, target: tuple[PeerId, str]) -> None:
        peer_id, address = target
        peer = f"the learner at {address}"
        self._waits.begin("learner", f"a connection to {peer}")
        async with open_channel(address, peer_id, self.credentials, _CHANNEL_OPTIONS) as channel:
            try:
                async with asyncio.timeout(self._connect_s):
                    await channel.channel_ready()
            except TimeoutError:
                return
            self._waits.end("learner")
            self._stub = ingest_pb2_grpc.IngestStub(channel)
            while not self._outgoing.empty():
                self._outgoing.get_nowait()
            self._under_way.clear()
            self._ticket_was_sent.clear()
            self._leases.on_learner()
            _log.info("reports to %s", peer)
            refused, reason = None, ""
            try:
                with handling("the report stream", peer):
                    await self._stream(self._stub)
            except (grpc.aio.AioRpcError, MalformedMessage, TimeoutError) as error:
                if self._under_way and isinstance(error, grpc.aio.AioRpcError) and error.code() in REFUSED_CODES:
                    refused = self._under_way[0]  # the first unanswered one, since the learner answers in order
                reason = (error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)) or repr(error)
                _log.warning("lost %s: %s", peer, reason)
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
        """The next verdict; None at the end of the stream. Waits without limit while no report is in flight. Raises
        TimeoutError if a report is in flight and no verdict has come for `VERDICT_S`."""
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
        while True:
            if self._stub is not None:
                request = ingest_pb2.GetPartialsRequest(ticket=self._tickets[lease_id])
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
