"""The worker's links: the addresses at which peers reach it, its credentials for a run, and its session with the coordinator.

Guarantees: identity and credentials are kept in the folder, so a restart needs no token; a folder that belongs to another run is
refused; an unreachable coordinator is retried without limit, with jittered backoff; a wrong token, peer or protocol version ends
the join at once. Messages sent while no session is open are dropped: the next hello lists the leases still held. A grant that is
malformed or for another worker is refused with the reason and affects nothing else; deadlines, which are on the coordinator's
clock, are corrected by the measured skew.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from echo2.base.clock import Clock
from echo2.base.errors import MalformedMessage, ResourceError, StateError, TrustError
from echo2.base.hosts import is_loopback, joined
from echo2.base.ids import LeaseId, PeerId, Version
from echo2.base.rollout import EndReason
from echo2.broadcast.nat.facts import outward_host
from echo2.broadcast.node import BroadcastNode
from echo2.control.session import ControlSession, Party, check_interval, enrolled
from echo2.control.waits import Backoff, Waits
from echo2.outside import unix_now
from echo2.outside.net import EVERY_ADDRESS
from echo2.trust.identity import JoinLink, Role, dns_name_of
from echo2.trust.tls import Credentials, load_credentials, load_or_create_identity, save_credentials
from echo2.wire import broadcast as broadcast_wire
from echo2.wire import rollout as wire
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc
from echo2.worker import leases
from echo2.worker.leases_service import LeaseService
from echo2.worker.options import WorkerOptions
from echo2.worker.reports import LearnerAddress, Reports

RENEW_BEFORE_S = 3 * 86400.0  # a weekend without the coordinator
ADDRESS_CHARS_MAX = 300  # a host name has 253 at most, then the port
_REASONS = {
    EndReason.FINISHED: coordinator_pb2.LeaseEnded.REASON_FINISHED,
    EndReason.HANDED_BACK: coordinator_pb2.LeaseEnded.REASON_HANDED_BACK,
    EndReason.REFUSED: coordinator_pb2.LeaseEnded.REASON_REFUSED,
}
_log = logging.getLogger("echo2.worker")

# -- addresses


def own_addresses(options: WorkerOptions, link: JoinLink, port: int) -> list[str]:
    """Where the service listens, as its own network sees it; for 'any address', the one from which it reaches the coordinator."""
    host = outward_host(options.listen_host, link.address)
    return [joined(host, port)] if host else []


def listen_host(options: WorkerOptions, link: JoinLink) -> str:
    """The host given by the operator; else loopback if the coordinator is on loopback, else every address."""
    # The coordinator's address family, because ::1 and 127.0.0.1 appear to others as two hosts.
    own = link.host if ":" in link.host else "127.0.0.1"
    return options.listen_host or (own if is_loopback(link.host) else EVERY_ADDRESS)


def dialled_port(options: WorkerOptions, port: int) -> int:
    """The port at which others reach the service that listens on `port`; a NAT may map a different one to it."""
    return int(options.advertised_addresses[0].rpartition(":")[2]) if options.advertised_addresses else port


# -- joining


async def join(link: JoinLink, folder: Path, waits: Waits, backoff: Backoff) -> Credentials:
    """Credentials for the run that the link names; enrols if there are none or they expire within `RENEW_BEFORE_S`.

    Raises ResourceError if the folder cannot hold them, StateError if it belongs to another run.
    """
    try:
        identity = load_or_create_identity(folder)
    except OSError as error:
        raise ResourceError(f"{folder}: expected a folder to keep the identity in, got {error}") from None
    try:
        credentials = load_credentials(folder, identity)
    except TrustError as error:
        _log.info("enrolling anew: %s", error)
        credentials = None
    if credentials is not None and credentials.coordinator_peer_id != link.peer_id:
        raise StateError(
            f"{folder}: it belongs to run {credentials.run_id} of coordinator {credentials.coordinator_peer_id}, the "
            f"link names {link.peer_id}; give this run a folder of its own"
        )
    if credentials is not None and credentials.certificate.not_after_unix_s >= unix_now() + RENEW_BEFORE_S:
        return credentials
    credentials = await enrolled(link, identity, Role.WORKER, waits, backoff)
    save_credentials(folder, credentials)
    _log.info("enrolled in run %s as %s", credentials.run_id, credentials.peer_id)
    return credentials


# -- the coordinator


class SessionPart(Protocol):
    """What the session needs of the worker while it lasts."""

    def hello(self) -> coordinator_pb2.WorkerHello: ...

    def heartbeat(self) -> coordinator_pb2.Heartbeat: ...


class CoordinatorLink:
    """What the worker sends to the coordinator; `run` keeps the session."""

    def __init__(self, control: ControlSession[coordinator_pb2.WorkerMessage]) -> None:
        self._control = control

    async def run(
        self, status: SessionPart, commands: CoordinatorCommands, find: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Keeps the session until it is refused or cancelled. `find` updates the credentials with the coordinator's address."""
        await self._control.run(
            Party(
                dial=lambda channel: coordinator_pb2_grpc.CoordinatorStub(channel).WorkerSession(),
                hello=lambda: coordinator_pb2.WorkerMessage(hello=status.hello()),
                beat=lambda: coordinator_pb2.WorkerMessage(heartbeat=status.heartbeat()),
                on_welcome=commands.on_welcome,
                on_order=commands.on_order,
                on_lost=commands.on_lost,
                find=find,
            )
        )

    def end_lease(self, lease_id: LeaseId, reason: EndReason, message: str) -> None:
        ended = coordinator_pb2.LeaseEnded(lease_id=lease_id, reason=_REASONS[reason], message=message[:2000])
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


class CoordinatorCommandsPort(Protocol):
    """What orders need of the worker besides its leases, reports and node."""

    def on_learner(self, learner: coordinator_pb2.LearnerWhereabouts) -> None:
        """The learner's address and model; raises if it trains another model than before."""
        ...

    def on_skew(self, skew_s: float) -> None:
        """The coordinator's clock is this many seconds ahead."""
        ...

    def use_relay(self, peer_id: PeerId, address: str) -> None:
        """Keeps this worker reachable through a relay; empty: the peer has none."""
        ...


class CoordinatorCommands:
    """Parses the coordinator's orders and passes each to the part it concerns."""

    def __init__(
        self,
        credentials: Credentials,
        link: CoordinatorLink,
        lease_service: LeaseService,
        reports: Reports,
        node: BroadcastNode,
        port: CoordinatorCommandsPort,
        clock: Clock,
    ) -> None:
        self._me, self._coordinator = credentials.peer_id, credentials.coordinator_peer_id
        self._link, self._leases, self._reports, self._node = link, lease_service, reports, node
        self._port, self._clock = port, clock
        self._skew_s = 0.0

    def on_lost(self) -> None:
        self._leases.send(leases.CoordinatorDown())

    def on_welcome(self, welcome: coordinator_pb2.WorkerWelcome) -> None:
        check_interval("report_interval_s", welcome.report_interval_s)
        _log.info("welcome in run %s, staleness bound %d", welcome.run_id, welcome.staleness_bound)
        if welcome.unix_s:
            self._skew_s = welcome.unix_s - unix_now()
            self._port.on_skew(self._skew_s)
        self._port.use_relay(self._coordinator, welcome.relay_address[:ADDRESS_CHARS_MAX])
        self._node.bans.name_all(map(PeerId, welcome.banned_peer_ids))
        self._node.drop_banned()
        if welcome.HasField("learner"):
            self._on_learner(welcome.learner)
        self._leases.send(leases.CoordinatorUp(welcome.report_interval_s))

    def on_order(self, order: coordinator_pb2.WorkerOrder) -> None:
        match order.WhichOneof("kind"):
            case "lease_grant":
                self._on_grant(order.lease_grant)
            case "lease_revoke":
                lease_id = wire.lease_id_from_wire(order.lease_revoke.lease_id)
                self._leases.send(leases.Revoked(lease_id, order.lease_revoke.reason[:2000]))
            case "activation":
                is_active = order.activation.is_active
                _log.info("%s: %s", "active" if is_active else "on standby", order.activation.reason[:500])
                self._leases.send(leases.Activated(is_active))
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
        self._port.on_learner(learner)
        peer_id = PeerId(learner.peer_id)
        self._node.set_publisher(peer_id, learner.chunk_address)
        self._port.use_relay(peer_id, learner.relay_address[:ADDRESS_CHARS_MAX])
        self._reports.move_to(LearnerAddress(peer_id, learner.address))

    def _on_grant(self, grant: coordinator_pb2.LeaseGrant) -> None:
        ticket = grant.ticket
        lease_id = wire.lease_id_from_wire(ticket.lease_id)
        try:
            group = wire.group_from_message(grant.group)
            if ticket.group_id != group.group_id or ticket.worker_peer_id != self._me:
                raise MalformedMessage(
                    f"ticket of lease {lease_id}: expected group {group.group_id} and worker {self._me}, got "
                    f"{ticket.group_id[:128]} and {ticket.worker_peer_id[:128]}"
                )
        except MalformedMessage as error:
            _log.warning("refusing lease %s: %s", lease_id, error)
            self._link.end_lease(lease_id, EndReason.REFUSED, str(error))
            return
        if grant.is_renewal and self._leases.machine.group_of(lease_id) is None:
            return  # the lease has ended here meanwhile, so its ticket is not needed
        self._reports.keep_ticket(ticket)
        deadline = self._clock.now() + ticket.deadline_unix_s - (unix_now() + self._skew_s)
        self._leases.send(leases.Granted(lease_id, group, deadline, grant.is_continuation, grant.is_renewal))
