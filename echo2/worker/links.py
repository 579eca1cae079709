"""The worker's links: its credentials for a run, and its session with the coordinator.

Guarantees: identity and credentials are kept in the folder, so a restart needs no token; a folder that belongs to another run is
refused; an unreachable coordinator is retried without limit, with jittered backoff; a wrong token, peer or protocol version ends
the join at once. Messages sent while no session is open are dropped: the next hello lists the leases still held. A grant that is
malformed or for another worker is refused with the reason and affects nothing else; deadlines, which are on the coordinator's
clock, are corrected by the measured skew. A learner with another model than before ends the session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from echo2.base.clock import Clock
from echo2.base.errors import MalformedMessage, ResourceError, StateError, TrustError, VersionMismatch
from echo2.base.ids import LeaseId, PeerId, Version
from echo2.base.rollout import EndReason
from echo2.broadcast.node import BroadcastNode
from echo2.control.session import ControlSession, Party, check_interval, enrolled
from echo2.control.waits import Backoff, Waits
from echo2.outside import unix_now
from echo2.trust.identity import JoinLink, Role, dns_name_of
from echo2.trust.tls import Credentials, load_credentials, load_or_create_identity, save_credentials
from echo2.wire import broadcast as broadcast_wire
from echo2.wire import rollout as wire
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc
from echo2.worker.heartbeat import WorkerStatus
from echo2.worker.leases import Leases
from echo2.worker.machine import Finding, clock_finding
from echo2.worker.reports import Reports

RENEW_BEFORE_S = 3 * 86400.0  # a weekend without the coordinator
ADDRESS_CHARS_MAX = 300  # a host name has 253 at most, then the port
_log = logging.getLogger("echo2.worker")

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


class CoordinatorLink:
    def __init__(self, control: ControlSession[coordinator_pb2.WorkerMessage]) -> None:
        self.credentials, self._control = control.credentials, control

    async def run(
        self, status: WorkerStatus, commands: CoordinatorCommands, find: Callable[[], Awaitable[None]] | None = None
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
        await self._control.leave(
            coordinator_pb2.WorkerMessage(leaving=coordinator_pb2.WorkerLeaving(reason=reason)), within_s
        )


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
        self._skew_s = 0.0

    def on_lost(self) -> None:
        self._leases.on_coordinator_lost()

    def on_welcome(self, welcome: coordinator_pb2.WorkerWelcome) -> None:
        check_interval("report_interval_s", welcome.report_interval_s)
        _log.info("welcome in run %s, staleness bound %d", welcome.run_id, welcome.staleness_bound)
        if welcome.unix_s:
            self._skew_s = welcome.unix_s - unix_now()
            self._add_finding(clock_finding(self._skew_s))
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
        if self.learner is not None:
            _refuse_other_model(self.learner, learner)
        self.learner, peer_id = learner, PeerId(learner.peer_id)
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
        deadline = self._clock.now() + ticket.deadline_unix_s - (unix_now() + self._skew_s)
        self._leases.grant(lease_id, group, deadline, is_continuation=grant.is_continuation)


def _refuse_other_model(known: coordinator_pb2.LearnerWhereabouts, learner: coordinator_pb2.LearnerWhereabouts) -> None:
    """Raises VersionMismatch unless this worker's engine and memory serve the learner as it is now."""
    if known.model_digest != learner.model_digest:
        raise VersionMismatch(
            f"the learner's model: expected {known.model_name} (digest {known.model_digest[:16]}), it now trains "
            f"{learner.model_name} ({learner.model_digest[:16]}); start this worker anew"
        )
    # 0: the learner had not said, so memory is laid out for the model's whole context.
    if 0 < known.longest_sequence_tokens < learner.longest_sequence_tokens:
        raise VersionMismatch(
            f"the run's longest sequence: expected {known.longest_sequence_tokens} tokens, for which this worker's "
            f"memory is laid out, it is now {learner.longest_sequence_tokens}; start this worker anew"
        )
