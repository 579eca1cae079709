"""Serves the control streams over gRPC, one per worker and one for the learner, and says what a worker's messages change.

Guarantees: the caller is the one that its certificate names, in the role that the service is for; the first message is a hello;
a message that is malformed or out of order changes nothing and ends the stream with a refusal that says what was expected;
messages that arrive too fast are read more slowly, and all newcomers of one join link share a fifth of the loop's time, so that
making new identities gains nothing. Waits for messages and for orders; when reading or writing ends, so does the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from echo2.base.clock import Pace
from echo2.base.errors import (
    ConfigError,
    EchoError,
    LimitExceeded,
    MalformedMessage,
    NotAllowed,
    Unreachable,
    VersionMismatch,
)
from echo2.base.ids import LeaseId, PeerId, RunId, Version
from echo2.base.rollout import Ticket
from echo2.base.units import one_line
from echo2.broadcast.reachability import NAMED_MAX, Access, dialable
from echo2.coordinator.fleet.enrolment import caller_host, check_protocol
from echo2.coordinator.fleet.members import OF_LINK, Activation
from echo2.coordinator.hub import Hub
from echo2.coordinator.leases import lease as le
from echo2.coordinator.planning.advice import bar_text
from echo2.outside import monotonic
from echo2.outside.guard import FairShare, FairShares, Refusals, cancel_all, handling
from echo2.trust.identity import PeerIdentity, Role
from echo2.trust.tls import peer_of
from echo2.wire import rollout as wire
from echo2.wire.broadcast import access_from_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb, coordinator_pb2_grpc, rollout_pb2
from echo2.wire.rollout import lease_id_from_wire

HELLO_TIMEOUT_S = 20.0  # a fleet that comes back at once waits for its turn
LAST_WORDS_S = 5.0  # for a refusal to reach its peer
SEND_QUEUE_MAX = 1024  # orders waiting for one node; one that falls further behind is disconnected
MESSAGES_PER_S = 200.0  # of a stream; beyond it the stream is read more slowly
MESSAGES_BURST = 1000  # of a worker that comes back with all its leases
HELLOS_PER_S = 1.0  # of a peer, because each hello writes a line in the event log
HELLOS_BURST = 30  # of a peer on a link that breaks again and again
LINK_CHANGE = 0.2  # of a measured rate; less is its fluctuation
TICKETS_AT_ONCE = 16  # signatures checked before others have their turn: two milliseconds
Order = TypeVar("Order")
_log = logging.getLogger("echo2.coordinator")


def refusal_of(error: EchoError) -> pb.Refusal:
    """The error as a message: its class name and its text."""
    return pb.Refusal(code=type(error).__name__, message=str(error)[:2000])


class StreamSession(Generic[Order]):
    """One node's stream as the hub sees it: a bounded queue of orders, of which None ends it. `send` never blocks; a node that
    reads so slowly that SEND_QUEUE_MAX orders wait is disconnected and must reconnect, so that it costs bounded memory and delays
    no other. `as_order`: turns a refusal into an order. `orders_max`: raised by those that a hello is answered with at once."""

    def __init__(self, peer_id: PeerId, as_order: Callable[[pb.Refusal], Order]) -> None:
        self.peer_id = peer_id
        self.orders: asyncio.Queue[Order | None] = asyncio.Queue()
        self.is_open, self.orders_max = True, SEND_QUEUE_MAX
        self._as_order = as_order

    def send(self, order: Order) -> None:
        if not self.is_open:
            return
        if self.orders.qsize() >= self.orders_max:
            self.refuse(LimitExceeded(f"{self.peer_id}: expected at most {self.orders_max} unread orders; read faster"))
            return
        self.orders.put_nowait(order)

    def refuse(self, error: EchoError) -> None:
        """Ends the stream with the reason. Drops waiting orders, because the node starts anew when it reconnects."""
        if not self.is_open:
            return
        while not self.orders.empty():
            self.orders.get_nowait()
        self.orders.put_nowait(self._as_order(refusal_of(error)))
        self.end()

    def replace(self) -> None:
        """A newer stream of the node has come. Its own process has ended this one before; whoever reads it still is another."""
        self.refuse(
            NotAllowed(
                f"{self.peer_id} has connected from another process, so a copy of its folder is in use; stop one of them, or empty "
                "its folder, and it joins as a new node"
            )
        )

    def end(self) -> None:
        if self.is_open:
            self.is_open = False
            self.orders.put_nowait(None)


WorkerSession = StreamSession[pb.WorkerOrder]


class NodeStreams(Protocol[Order]):
    """What differs between a worker's stream and the learner's. `on_hello` raises an EchoError, before any change, if the node is
    refused."""

    role: Role

    async def on_hello(self, peer_id: PeerId, full: Any, session: StreamSession[Order]) -> None: ...
    def on_message(self, peer_id: PeerId, message: Any) -> None: ...
    def on_end(self, peer_id: PeerId, session: StreamSession[Order]) -> None: ...


class WorkerStream:
    """One worker's stream. `seen_from`: the host that it comes from. Peers are told only addresses at that host, private ones
    behind it, and those at which the relay has reached the worker.

    hello --> [ welcome, activation, broadcast plan ] --> heartbeats, lease events --> leaving (clean) --> broken
       '-- hello again: the newer stream takes the older one's place
    """

    role = Role.WORKER

    def __init__(self, hub: Hub, seen_from: str) -> None:
        self._hub, self._seen_from = hub, seen_from
        self._left_out: tuple[str, ...] = ()
        self._bar_text = ""

    async def on_hello(self, peer_id: PeerId, full: pb.WorkerHello, session: WorkerSession) -> None:
        held = await self._held_leases(peer_id, full.held_tickets)
        full.ClearField("held_tickets")
        hello = pb.WorkerHello()
        hello.CopyFrom(full)  # a part of a message keeps the whole of it in memory
        hello.addresses[:] = self._dialable(Access(addresses=tuple(hello.addresses)), peer_id).addresses
        self._join(peer_id, hello, held, session)

    def _join(self, peer_id: PeerId, hello: pb.WorkerHello, held: tuple[Ticket, ...], session: WorkerSession) -> None:
        hub, section = self._hub, self._hub.config.coordinator
        hub.learner.check_model(peer_id, hello)
        if hello.quantisation not in ("", hub.config.worker.quantisation):
            raise ConfigError(
                f"worker {hello.name}: expected weights as they are published, it generates by {hello.quantisation} "
                "(worker.quantisation); a run allows that by worker.quantisation in its own file"
            )
        hub.ending.check_open()
        if (machine := hub.money.machine_of(peer_id)) is not None:
            hello.price_usd_per_hour = machine.usd_per_hour  # whatever price it was started with
        is_new = peer_id not in hub.membership.members
        member = hub.membership.on_hello(peer_id, hello, hub.clock.now())
        member.price_limit, member.paused = hub.money.limit_of(member, section), hub.halted
        member.is_wanted &= not (is_new and hub.plan.now is not None and section.planner_mode == "auto")
        old = hub.workers.pop(peer_id, None)
        if old is not None:
            old.replace()
        hub.workers[peer_id] = session
        hub.note("worker", f"{member.name} {'joined' if is_new else 'is back'}: {hello.gpu or 'cpu'}, "
                 f"{hello.slot_count} slots, {hello.price_usd_per_hour:g} USD/h, "
                 f"{len(held)} leases held", peer_id, "joins")  # fmt: skip
        session.send(pb.WorkerOrder(welcome=self._welcome()))
        activation = pb.Activation(is_active=member.activation is Activation.ACTIVE, reason=member.activation_reason)
        session.send(pb.WorkerOrder(activation=activation))
        if hub.broadcast_plan is not None:
            hub.send_broadcast_plan(session)
        # Before it may lease: discards its old lease request.
        hub.handle(hub.book.reconnect, peer_id, held, member.activation is Activation.ACTIVE)
        hub.review(member)
        hub.allow(member)
        hub.state.save("members", peer_id, member)
        hub.broadcast_needed.set()
        hub.plan_needed.set()

    def _welcome(self) -> pb.WorkerWelcome:
        hub, section = self._hub, self._hub.config.coordinator
        return pb.WorkerWelcome(
            run_id=hub.options.run_id, staleness_bound=hub.learner_bound,
            heartbeat_interval_s=section.heartbeat_interval, report_interval_s=section.report_interval,
            learner=hub.learner.whereabouts(), relay_address=hub.relay_address, unix_s=hub.clock.now(),
            banned_peer_ids=hub.membership.banned,
        )  # fmt: skip

    def _dialable(self, named: Access, peer_id: PeerId) -> Access:
        """The part of the worker's declared access that peers are told. Logs the part left out when it changes, once a minute."""
        proven = self._hub.proven.of(peer_id, self._hub.clock.now())
        access, left_out = dialable(named, self._seen_from, proven)
        if left_out and left_out != self._left_out:
            names = ", ".join(repr(name) for name in left_out[:NAMED_MAX])
            if (more := self._hub.peer_lines.more(peer_id, "addresses")) is not None:
                _log.info("worker %s: peers are not told %s: seen from %s%s", peer_id, names, self._seen_from, more)
        self._left_out = left_out
        return access

    async def _held_leases(self, peer_id: PeerId, tickets: Sequence[rollout_pb2.LeaseTicket]) -> tuple[Ticket, ...]:
        """The leases that the worker holds, verified by this coordinator's signatures on the tickets. MalformedMessage if one comes
        twice. Yields to the event loop every `TICKETS_AT_ONCE` tickets."""
        held: dict[LeaseId, Ticket] = {}
        for ticket in tickets:
            lease = wire.verify_ticket(ticket, self._hub.options.run_id, self._hub.identity.peer_id, peer_id)
            if (lease_id := lease.lease_id) in held:
                raise MalformedMessage(f"held_tickets of {peer_id}: expected each lease once, got {lease_id} again")
            held[lease_id] = lease
            if len(held) % TICKETS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return tuple(held.values())

    def on_message(self, peer_id: PeerId, message: pb.WorkerMessage) -> None:
        book = self._hub.book
        match message.WhichOneof("kind"):
            case "heartbeat":
                self._on_heartbeat(peer_id, message.heartbeat)
            case "lease_request":
                request = message.lease_request
                version = Version(request.version)
                self._on_lease_message(book.request, peer_id, request.free_rollouts, version)
            case "lease_progress":
                progress = message.lease_progress
                lease_id = lease_id_from_wire(progress.lease_id)
                self._on_lease_message(book.on_progress, peer_id, lease_id, progress.finished_rollouts, progress.tokens)
            case "lease_ended":
                ended = message.lease_ended
                text = one_line(ended.message, 300)
                reason, lease_id = wire.end_reason_from_message(ended), lease_id_from_wire(ended.lease_id)
                self._on_lease_message(book.end, peer_id, lease_id, reason, text)
            case "leaving":
                self._hub.part_with(peer_id, message.leaving.reason)
            case other:
                raise MalformedMessage(
                    f"worker {peer_id}: expected a message of a known kind after its hello, got {other}"
                )

    def _on_heartbeat(self, peer_id: PeerId, heartbeat: pb.Heartbeat) -> None:
        reach = None
        if heartbeat.HasField("reach"):
            access = access_from_message(heartbeat.reach.access)
            reach = self._dialable(replace(access, addresses=tuple(heartbeat.reach.addresses)), peer_id)
            heartbeat.ClearField("reach")  # nobody is shown an address that peers are not told
        has_links = heartbeat.HasField("links")
        hub, now = self._hub, self._hub.clock.now()
        member = hub.membership.members[peer_id]
        before, access = member.link, member.access
        hub.membership.on_heartbeat(peer_id, heartbeat, reach, now)
        hub.board.on_live(peer_id, member.version, now)
        hub.plan.on_spread(hub.board.newest_complete)
        hub.review(member)
        hub.book.rate(peer_id, heartbeat.rollouts_per_s)
        if (text := bar_text(hub.book, peer_id, now)) != self._bar_text:
            self._bar_text = text  # as the operator reads it
            active = pb.Activation(
                is_active=member.activation is Activation.ACTIVE, reason=text or member.activation_reason
            )
            hub.send(peer_id, pb.WorkerOrder(activation=active))
        rates = ((getattr(before, name), getattr(member.link, name)) for name in OF_LINK)
        is_changed = any(abs(new - old) > LINK_CHANGE * max(new, old, 1e-3) for old, new in rates)
        if has_links or member.access != access or is_changed:
            hub.broadcast_needed.set()

    def _on_lease_message(
        self, method: le.BookMethod[Concatenate[PeerId, le.P]], peer_id: PeerId, *args: le.P.args, **kwargs: le.P.kwargs
    ) -> None:
        self._hub.membership.members[peer_id].heard_at = self._hub.clock.now()
        self._hub.handle(method, peer_id, *args, **kwargs)

    def on_end(self, peer_id: PeerId, session: WorkerSession) -> None:
        """The worker's stream ended; ignored if a newer one has replaced it."""
        hub = self._hub
        if hub.workers.get(peer_id) is not session:
            return
        del hub.workers[peer_id]
        hub.handle(hub.book.request, peer_id, 0, Version(0))
        hub.membership.on_disconnect(peer_id, hub.clock.now())
        hub.review(hub.membership.members[peer_id])


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """Serves both kinds of stream until they end or `stop` is called."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._messages = Pace(MESSAGES_PER_S, MESSAGES_BURST)
        self._hellos = Pace(HELLOS_PER_S, HELLOS_BURST)
        self._newcomers = FairShares()
        self._refusals = Refusals(_log)
        self._streams: set[asyncio.Task[None]] = set()

    async def WorkerSession(self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any) -> None:
        stream = WorkerStream(self._hub, caller_host(context))
        await self._serve(context, stream, lambda refusal: pb.WorkerOrder(refusal=refusal))

    async def LearnerSession(self, request_iterator: AsyncIterator[pb.LearnerMessage], context: Any) -> None:
        await self._serve(context, self._hub.learner, lambda refusal: pb.LearnerOrder(refusal=refusal))

    async def _serve(self, context: Any, node: NodeStreams[Order], as_order: Callable[[pb.Refusal], Order]) -> None:
        try:
            caller = peer_of(context, node.role)
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
            if not isinstance(first, Message):
                return
            early_s = self._hellos.wait_s(caller.peer_id, self._hub.clock.now())
            if early_s > 0:
                raise LimitExceeded(
                    f"{caller.peer_id}: too many streams, expected the next in {early_s:.1f} s or later"
                )
            if caller.role is Role.WORKER:
                self._hub.tokens.greet(caller.token_id, caller.peer_id)
            session = StreamSession(caller.peer_id, as_order)
            with handling("a hello", caller.peer_id):
                await node.on_hello(caller.peer_id, _hello_of(first, self._hub.options.run_id, caller), session)
        except TimeoutError:
            late = Unreachable(f"expected a hello within {HELLO_TIMEOUT_S:.0f} s, got none")
            await context.write(as_order(refusal_of(late)))
            return
        except EchoError as error:
            self._refusals.warn("refused %s: %s: %s", caller_host(context), type(error).__name__, error)
            await context.write(as_order(refusal_of(error)))
            return
        try:
            await self._talk(context, node, caller, session)
        finally:
            session.end()
            node.on_end(caller.peer_id, session)

    async def _talk(
        self, context: Any, node: NodeStreams[Order], caller: PeerIdentity, session: StreamSession[Order]
    ) -> None:
        reader = asyncio.create_task(self._read(context, node, caller, session))
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

    def _share_of(self, caller: PeerIdentity, share: FairShare) -> FairShare:
        """Of the loop's time: the learner and each proven worker have their own; newcomers of one join link share one. While no
        worker is proven, each worker has its own."""
        proven = self._hub.book.records.proven
        is_known = caller.role is not Role.WORKER or not proven or caller.peer_id in proven
        if not is_known:
            return self._newcomers.of(f"link {caller.token_id}", FairShare.OF_MANY)
        return share

    async def _read(
        self, context: Any, node: NodeStreams[Order], caller: PeerIdentity, session: StreamSession[Order]
    ) -> None:
        peer_id = caller.peer_id
        try:
            while isinstance(message := await context.read(), Message):
                early_s = self._messages.wait_s(peer_id, self._hub.clock.now())
                if early_s > 0:  # back-pressure: the stream's window fills while we do not read
                    await asyncio.sleep(early_s)
                if not session.is_open:  # a newer stream has replaced this one: its messages are outdated
                    return
                begun = monotonic()
                with handling("the control stream", peer_id):
                    node.on_message(peer_id, message)
                now = monotonic()
                if (pause_s := self._share_of(caller, context.share).pause_s(now - begun, now)) > 0:
                    await asyncio.sleep(pause_s)
        except EchoError as error:
            self._refusals.warn("stream of %s ended: %s: %s", peer_id, type(error).__name__, error)
            session.refuse(error)


def _hello_of(first: Any, run_id: RunId, caller: PeerIdentity) -> Any:
    """The hello. MalformedMessage unless a stream's first message is one; VersionMismatch for another protocol or another run."""
    sender = f"{caller.role.value} {getattr(first.hello, 'name', '') or caller.peer_id}"
    if first.WhichOneof("kind") != "hello":
        raise MalformedMessage(f"{sender}: expected a hello as the first message, got {first.WhichOneof('kind')}")
    check_protocol(first.hello.protocol_version, sender)
    if first.hello.run_id != run_id:
        raise VersionMismatch(f"{sender}: expected run {run_id!r}, got {first.hello.run_id!r}")
    return first.hello


async def _write(context: Any, session: StreamSession[Order]) -> None:
    while (order := await session.orders.get()) is not None:
        await context.write(order)
