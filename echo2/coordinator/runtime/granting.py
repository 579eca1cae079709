"""Builds messages to workers: a grant with the signed ticket that the learner will check, and the learner's address."""

from __future__ import annotations

from echo2.base.ids import RunId
from echo2.coordinator.board import LearnerBoard
from echo2.coordinator.lease_events import Grant
from echo2.trust.identity import Identity
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.rollout import group_to_message
from echo2.wire.ticket import Ticket, sign_ticket


def order_of(grant: Grant, run_id: RunId, identity: Identity) -> pb.WorkerOrder:
    """The order for a grant. `identity`: the coordinator's, which signs the ticket."""
    ticket = Ticket(grant.lease_id, grant.group.group_id, grant.worker_id, grant.attempt, grant.deadline, run_id)
    return pb.WorkerOrder(
        lease_grant=pb.LeaseGrant(
            ticket=sign_ticket(ticket, identity),
            group=group_to_message(grant.group),
            is_continuation=grant.is_continuation,
            is_renewal=grant.is_renewal,
        )
    )


def whereabouts_of(board: LearnerBoard) -> pb.LearnerWhereabouts | None:
    """The learner's address and model; None before the first learner has connected."""
    hello = board.hello
    if hello is None:
        return None
    return pb.LearnerWhereabouts(
        peer_id=board.peer_id, address=board.address, model_name=hello.model_name,
        model_config_json=hello.model_config_json, model_digest=hello.model_digest,
        newest_version=board.newest_version, relay_address=hello.relay_address,
        longest_sequence_tokens=hello.longest_sequence_tokens, full_snapshot_bytes=hello.full_snapshot_bytes,
        audits_nothing=hello.audits_nothing,
    )  # fmt: skip
