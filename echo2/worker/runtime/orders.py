"""Parses the coordinator's orders and passes each to the part it concerns.

Guarantees: a grant that is malformed or for another worker is refused with the reason and affects nothing else; deadlines, which
are on the coordinator's clock, are corrected by the measured skew. Leaves to others: the stream (session), the leases
(assignments).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from echo2.base.clock import Clock
from echo2.base.errors import MalformedMessage, TrustError
from echo2.base.ids import LeaseId, PeerId
from echo2.base.rollout import EndReason
from echo2.broadcast.runtime.node import BroadcastNode
from echo2.control.runtime.session import check_interval
from echo2.outside import unix_now
from echo2.trust.peer_id import dns_name_of
from echo2.trust.runtime.tls import Credentials
from echo2.wire import broadcast as broadcast_wire
from echo2.wire import rollout as wire
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from echo2.worker import duties
from echo2.worker.runtime.desk import Desk
from echo2.worker.runtime.reporting import LearnerAddress, Reporting

ADDRESS_CHARS_MAX = 300
_log = logging.getLogger("echo2.worker")


@dataclass(frozen=True, slots=True)
class OrderCalls:
    """Callbacks for orders that concern other parts than the desk, the reports and the node. `refuse` ends a lease on the session;
    `use_relay` makes the transport keep a place at a relay."""

    learner_is_at: Callable[[coordinator_pb2.LearnerWhereabouts], None]
    skew_is: Callable[[float], None]
    refuse: Callable[[LeaseId, EndReason, str], None]
    use_relay: Callable[[PeerId, str], None]


class Orders:
    """One per worker; `credentials` name this worker and its coordinator."""

    def __init__(
        self,
        desk: Desk,
        reporting: Reporting,
        node: BroadcastNode,
        credentials: Credentials,
        calls: OrderCalls,
        clock: Clock,
    ) -> None:
        self._desk = desk
        self._reporting = reporting
        self._node = node
        self._me, self._coordinator = credentials.peer_id, credentials.coordinator_peer_id
        self._calls = calls
        self._clock = clock
        self._skew_s = 0.0

    def welcomed(self, welcome: coordinator_pb2.WorkerWelcome) -> None:
        check_interval("report_interval_s", welcome.report_interval_s)
        _log.info("welcome in run %s, staleness bound %d", welcome.run_id, welcome.staleness_bound)
        if welcome.unix_s:
            self._skew_s = welcome.unix_s - unix_now()
            self._calls.skew_is(self._skew_s)
        self._calls.use_relay(self._coordinator, welcome.relay_address[:ADDRESS_CHARS_MAX])
        self._node.bans.name_all(map(PeerId, welcome.banned_peer_ids))
        self._node.drop_banned()
        if welcome.HasField("learner"):
            self._learner(welcome.learner)
        self._desk.send(duties.CoordinatorCame(welcome.report_interval_s))

    def ordered(self, order: coordinator_pb2.WorkerOrder) -> None:
        match order.WhichOneof("kind"):
            case "lease_grant":
                self._granted(order.lease_grant)
            case "lease_revoke":
                lease_id = wire.lease_id_from_wire(order.lease_revoke.lease_id)
                self._desk.send(duties.Revoked(lease_id, order.lease_revoke.reason[:2000]))
            case "activation":
                is_active = order.activation.is_active
                _log.info("%s: %s", "active" if is_active else "on standby", order.activation.reason[:500])
                self._desk.send(duties.Activated(is_active))
            case "broadcast_plan":
                self._node.set_plan(broadcast_wire.plan_from_message(order.broadcast_plan))
            case "learner":
                self._learner(order.learner)
            case "banned":
                self._node.bans.name(PeerId(order.banned.peer_id), is_lifted=order.banned.is_lifted)
                self._node.drop_banned()
            case kind:
                raise MalformedMessage(f"the coordinator: expected an order, got {kind or 'one of an unknown kind'}")

    def _learner(self, whereabouts: coordinator_pb2.LearnerWhereabouts) -> None:
        try:
            dns_name_of(whereabouts.peer_id)
        except TrustError as error:
            raise MalformedMessage(f"the learner's whereabouts: {error}") from None
        self._calls.learner_is_at(whereabouts)
        peer_id = PeerId(whereabouts.peer_id)
        self._node.set_publisher(peer_id, whereabouts.address)
        self._calls.use_relay(peer_id, whereabouts.relay_address[:ADDRESS_CHARS_MAX])
        self._reporting.move_to(LearnerAddress(peer_id, whereabouts.address))

    def _granted(self, grant: coordinator_pb2.LeaseGrant) -> None:
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
            self._calls.refuse(lease_id, EndReason.REFUSED, str(error))
            return
        if grant.is_renewal and self._desk.machine.group_of(lease_id) is None:
            return  # the lease has ended here meanwhile, so its ticket is not needed
        self._reporting.keep_ticket(ticket)
        deadline = self._clock.now() + ticket.deadline_unix_s - (unix_now() + self._skew_s)
        self._desk.send(duties.Granted(lease_id, group, deadline, grant.is_continuation, grant.is_renewal))
