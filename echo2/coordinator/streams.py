"""Serves the control streams over gRPC: one per worker, one for the learner.

Guarantees: the caller is the one that its certificate names, in the role that the service is for; the first message is a hello;
a message that is malformed or out of order changes nothing and ends the stream with a refusal that says what was
expected; messages that arrive too fast are read more slowly, and all newcomers of one join link share a fifth of the loop's time,
so that making new identities gains nothing. Waits for messages and for orders; when reading or writing ends, so does the other.
Leaves to others: what messages mean (hub).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from google.protobuf.message import Message

from echo2.base.errors import EchoError, LimitExceeded, MalformedMessage, NotAllowed, Unreachable
from echo2.base.ids import LeaseId, PeerId, Version
from echo2.broadcast.reachability import NAMED_MAX, Access, dialable
from echo2.coordinator.commands import RolloutQuestions
from echo2.coordinator.fleet.enrolment import caller_host
from echo2.coordinator.fleet.members import OperatorSetting
from echo2.coordinator.fleet.tokens import RateLimiter
from echo2.coordinator.hub import WORKERS_MAX, Hub
from echo2.coordinator.leases import events as le
from echo2.coordinator.sessions import Order, StreamSession, refusal_of
from echo2.outside import monotonic
from echo2.outside.ending import cancel_all
from echo2.outside.guard import FairShare, FairShares, Refusals, handling
from echo2.trust.identity import PeerIdentity, Role
from echo2.trust.tls import peer_of
from echo2.wire import coordinator as wire
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.gen.echo2.v1 import coordinator_pb2_grpc, rollout_pb2
from echo2.wire.rollout import group_id_from_wire, lease_id_from_wire

HELLO_TIMEOUT_S = 20.0  # a fleet that comes back at once waits for its turn
LAST_WORDS_S = 5.0  # for a refusal to reach its peer
SEND_QUEUE_MAX = 1024  # orders waiting for one node; one that falls further behind is disconnected
MESSAGES_PER_S = 200.0  # of a stream; beyond it the stream is read more slowly
MESSAGES_BURST = 1000  # of a worker that comes back with all its leases
HELLOS_PER_S = 1.0  # of a peer, because each hello writes a line in the event log
HELLOS_BURST = 30  # of a peer on a link that breaks again and again
TICKETS_AT_ONCE = 16  # signatures checked before others have their turn: two milliseconds
_log = logging.getLogger("echo2.coordinator")


class StreamRole(Protocol[Order]):
    """What differs between a worker's stream and the learner's."""

    role: Role

    async def began(self, peer_id: PeerId, first: Any, session: StreamSession[Order]) -> None: ...
    def said(self, peer_id: PeerId, message: Any) -> None: ...
    def ended(self, peer_id: PeerId, session: StreamSession[Order]) -> None: ...


class WorkerParty:
    """Passes one worker's messages to the hub. `seen_from`: the host that its stream comes from. Peers are told only addresses at
    that host, private ones behind it, and those at which the relay has reached the worker."""

    role = Role.WORKER

    def __init__(self, hub: Hub, seen_from: str) -> None:
        self._hub, self._seen_from = hub, seen_from
        self._left_out: tuple[str, ...] = ()

    async def began(self, peer_id: PeerId, first: pb.WorkerMessage, session: StreamSession[pb.WorkerOrder]) -> None:
        _expect_hello(first, f"worker {peer_id}")
        hello = wire.worker_hello_from_message(first.hello, f"worker {first.hello.name[:64]!r} ({peer_id})")
        held = await self._held_leases(peer_id, first.hello.held_tickets)
        named = self._dialable(Access(addresses=hello.addresses), peer_id)
        self._hub.worker_came(peer_id, replace(hello, held_leases=held, addresses=named.addresses), session)

    def _dialable(self, named: Access, peer_id: PeerId) -> Access:
        """The part of the worker's declared access that peers are told. Logs the part left out when it changes, once a minute."""
        proven = self._hub.proven.of(peer_id, self._hub.clock.now())
        kept, left_out = dialable(named, self._seen_from, proven)
        if left_out and left_out != self._left_out:
            shown = ", ".join(repr(one) for one in left_out[:NAMED_MAX])
            if (more := self._hub.peer_lines.more(peer_id, "addresses")) is not None:
                _log.info("worker %s: peers are not told %s: seen from %s%s", peer_id, shown, self._seen_from, more)
        self._left_out = left_out
        return kept

    async def _held_leases(
        self, peer_id: PeerId, tickets: Sequence[rollout_pb2.LeaseTicket]
    ) -> tuple[le.HeldLease, ...]:
        """The leases that the worker holds, verified by this coordinator's signatures on the tickets. MalformedMessage if one comes
        twice. Yields to the event loop every `TICKETS_AT_ONCE` tickets."""
        held: dict[LeaseId, le.HeldLease] = {}
        for ticket in tickets:
            one = wire.held_lease_from_ticket(ticket, self._hub.options.run_id, self._hub.identity.peer_id, peer_id)
            if one.lease_id in held:
                raise MalformedMessage(f"held_tickets of {peer_id}: expected each lease once, got {one.lease_id} again")
            held[one.lease_id] = one
            if len(held) % TICKETS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return tuple(held.values())

    def said(self, peer_id: PeerId, message: pb.WorkerMessage) -> None:
        whose = f"worker {peer_id}"
        match message.WhichOneof("kind"):
            case "heartbeat":
                beat = wire.heartbeat_from_message(message.heartbeat, whose)
                if beat.reach is not None:
                    beat = replace(beat, reach=self._dialable(beat.reach, peer_id))
                self._hub.worker_beat(peer_id, beat)
            case "lease_request":
                self._hub.worker_event(peer_id, _wanted(peer_id, message.lease_request, whose))
            case "lease_progress":
                told = message.lease_progress
                check(told, whose)
                lease_id = lease_id_from_wire(told.lease_id)
                self._hub.worker_event(peer_id, le.Progressed(peer_id, lease_id, told.finished_rollouts, told.tokens))
            case "lease_ended":
                ended = message.lease_ended
                check(ended, whose)
                text = "".join(c if c.isprintable() else " " for c in ended.message[:300])
                reason = wire.end_reason_from_message(ended)
                self._hub.worker_event(
                    peer_id, le.LeaseEnded(peer_id, lease_id_from_wire(ended.lease_id), reason, text)
                )
            case "leaving":
                check(message.leaving, whose)
                self._hub.worker_left(peer_id, message.leaving.reason)
            case other:
                raise MalformedMessage(f"{whose}: expected a message of a known kind after its hello, got {other}")

    def ended(self, peer_id: PeerId, session: StreamSession[pb.WorkerOrder]) -> None:
        self._hub.worker_cut(peer_id, session)


def _wanted(peer_id: PeerId, request: pb.LeaseRequest, whose: str) -> le.RolloutsWanted:
    check(request, f"the lease request of {whose}")
    return le.RolloutsWanted(peer_id, request.free_rollouts, Version(request.version))


class LearnerParty:
    """Passes the learner's messages to the hub."""

    role = Role.LEARNER

    def __init__(self, hub: Hub, rollouts: RolloutQuestions) -> None:
        self._hub, self._rollouts = hub, rollouts

    async def began(self, peer_id: PeerId, first: pb.LearnerMessage, session: StreamSession[pb.LearnerOrder]) -> None:
        _expect_hello(first, f"learner {peer_id}")
        self._hub.learner.came(peer_id, wire.learner_hello_from_message(first.hello, f"learner {peer_id}"), session)

    def said(self, peer_id: PeerId, message: pb.LearnerMessage) -> None:
        whose = f"learner {peer_id}"
        match message.WhichOneof("kind"):
            case "report":
                self._hub.learner.reported(wire.learner_report_from_message(message.report, whose))
            case "offer":
                self._hub.learner.said(le.GroupsOffered(*wire.offer_from_message(message.offer, whose)))
            case "close":
                check(message.close, whose)
                ids = tuple(group_id_from_wire(group_id) for group_id in message.close.group_ids)
                self._hub.learner.said(le.GroupsClosed(ids, message.close.reason))
            case "delivered":
                self._hub.learner.said(wire.delivered_from_message(message.delivered, whose))
            case "published":
                self._hub.learner.published(wire.published_from_message(message.published, whose))
            case "accused":
                check(message.accused, whose)
                accused(self._hub, PeerId(message.accused.peer_id), message.accused.reason, message.accused.is_certain)
            case "shown":
                check(message.shown, whose)
                self._rollouts.answered(message.shown)
            case "leaving":
                check(message.leaving, whose)
                self._hub.learner.leaving(message.leaving.reason)
            case other:
                raise MalformedMessage(f"{whose}: expected a message of a known kind after its hello, got {other}")

    def ended(self, peer_id: PeerId, session: StreamSession[pb.LearnerOrder]) -> None:
        self._hub.learner.cut(session)


def _expect_hello(first: Any, whose: str) -> None:
    if first.WhichOneof("kind") != "hello":
        raise MalformedMessage(f"{whose}: expected a hello as the first message, got {first.WhichOneof('kind')}")


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """Serves both kinds of stream until they end or `stop` is called."""

    def __init__(self, hub: Hub, rollouts: RolloutQuestions) -> None:
        self._hub, self._rollouts = hub, rollouts
        self._rates = RateLimiter(MESSAGES_PER_S, MESSAGES_BURST, WORKERS_MAX)
        self._hellos = RateLimiter(HELLOS_PER_S, HELLOS_BURST, WORKERS_MAX)
        self._newcomers = FairShares()
        self._refusals = Refusals(_log)
        self._streams: set[asyncio.Task[None]] = set()

    async def WorkerSession(self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any) -> None:
        party = WorkerParty(self._hub, caller_host(context))
        await self._serve(context, party, lambda refusal: pb.WorkerOrder(refusal=refusal))

    async def LearnerSession(self, request_iterator: AsyncIterator[pb.LearnerMessage], context: Any) -> None:
        await self._serve(
            context, LearnerParty(self._hub, self._rollouts), lambda refusal: pb.LearnerOrder(refusal=refusal)
        )

    async def _serve(self, context: Any, party: StreamRole[Order], as_order: Callable[[pb.Refusal], Order]) -> None:
        try:
            caller = peer_of(context)
            _check_role(caller.role, party.role, caller.peer_id)
            first = await asyncio.wait_for(context.read(), HELLO_TIMEOUT_S)
            if not isinstance(first, Message):
                return
            early_s = self._hellos.take(caller.peer_id, self._hub.clock.now())
            if early_s > 0:
                raise LimitExceeded(
                    f"{caller.peer_id}: too many streams, expected the next in {early_s:.1f} s or later"
                )
            if caller.role is Role.WORKER:
                self._hub.tokens.greet(caller.token_id, caller.peer_id)
            session = StreamSession(caller.peer_id, SEND_QUEUE_MAX, as_order)
            with handling("a hello", caller.peer_id):
                await party.began(caller.peer_id, first, session)
        except TimeoutError:
            late = Unreachable(f"expected a hello within {HELLO_TIMEOUT_S:.0f} s, got none")
            await context.write(as_order(refusal_of(late)))
            return
        except EchoError as error:
            self._refusals.warn("refused %s: %s: %s", caller_host(context), type(error).__name__, error)
            await context.write(as_order(refusal_of(error)))
            return
        try:
            await self._talk(context, party, caller, session)
        finally:
            session.end()
            party.ended(caller.peer_id, session)

    async def _talk(
        self, context: Any, party: StreamRole[Order], caller: PeerIdentity, session: StreamSession[Order]
    ) -> None:
        reader = asyncio.create_task(self._read(context, party, caller, session))
        writer = asyncio.create_task(_write(context, session))
        self._streams.add(writer)
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():  # a refusal may still have to be written
                session.end()
                await asyncio.wait((writer,), timeout=LAST_WORDS_S)
        finally:
            self._streams.discard(writer)
            await cancel_all((reader, writer))

    def _share_of(self, caller: PeerIdentity, own: FairShare) -> FairShare:
        """Of the loop's time: the learner and each proven worker have their own; newcomers of one join link share one. While no
        worker is proven, each worker has its own."""
        proven = self._hub.book.records.proven
        is_known = caller.role is not Role.WORKER or not proven or caller.peer_id in proven
        if not is_known:
            return self._newcomers.of(f"link {caller.token_id}", FairShare.OF_MANY)
        return own

    async def _read(
        self, context: Any, party: StreamRole[Order], caller: PeerIdentity, session: StreamSession[Order]
    ) -> None:
        peer_id = caller.peer_id
        try:
            while isinstance(message := await context.read(), Message):
                early_s = self._rates.take(peer_id, self._hub.clock.now())
                if early_s > 0:  # back-pressure: the stream's window fills while we do not read
                    await asyncio.sleep(early_s)
                if not session.is_open:  # a newer stream has replaced this one: its messages are outdated
                    return
                begun = monotonic()
                with handling("the control stream", peer_id):
                    party.said(peer_id, message)
                now = monotonic()
                if (pause_s := self._share_of(caller, context.share).pause_s(now - begun, now)) > 0:
                    await asyncio.sleep(pause_s)
        except EchoError as error:
            self._refusals.warn("stream of %s ended: %s: %s", peer_id, type(error).__name__, error)
            session.refuse(error)


async def _write(context: Any, session: StreamSession[Order]) -> None:
    while (order := await session.orders.get()) is not None:
        await context.write(order)


def _check_role(role: Role, expected: Role, peer_id: PeerId) -> None:
    if role is not expected:
        raise NotAllowed(f"{peer_id}: expected the role {expected.value}, its certificate says {role.value}")


def accused(hub: Hub, peer_id: PeerId, reason: str, is_certain: bool) -> None:
    """Bans the worker, or quarantines it if the finding is not certain. A worker that is already banned stays banned."""
    member = hub.membership.members.get(peer_id)
    if member is not None and member.setting is not OperatorSetting.BANNED:
        hub.note("audit", f"{member.name}: {reason}")
        hub.set_worker(peer_id, OperatorSetting.BANNED if is_certain else OperatorSetting.QUARANTINED, reason)
