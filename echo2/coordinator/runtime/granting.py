"""A grant as the worker is told of it, with the ticket that the learner will ask for."""

from __future__ import annotations

from echo2.base.ids import RunId
from echo2.coordinator.lease_events import Grant
from echo2.trust.identity import Identity
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.rollout import group_to_message
from echo2.wire.ticket import Ticket, sign_ticket


def order_of(grant: Grant, run_id: RunId, identity: Identity) -> pb.WorkerOrder:
    """`identity`: the coordinator's, which signs."""
    ticket = Ticket(grant.lease_id, grant.group.group_id, grant.worker_id, grant.attempt, grant.deadline, run_id)
    return pb.WorkerOrder(
        lease_grant=pb.LeaseGrant(
            ticket=sign_ticket(ticket, identity),
            group=group_to_message(grant.group),
            is_continuation=grant.is_continuation,
            is_renewal=grant.is_renewal,
        )
    )
