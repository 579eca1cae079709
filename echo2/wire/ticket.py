"""Lease tickets: the coordinator signs them, the learner verifies them on its own.

Guarantees: a ticket that `verify_ticket` returns was signed by this run's coordinator, for this run and this worker,
and its fields are within limits. The signature covers the deterministic serialisation of all other fields, after a
prefix that no other signature in the project starts with. Leaves to others: whether its deadline has passed and whether
a later attempt has superseded it (learner).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo2.base.errors import BadSignature, MalformedMessage, NotAllowed
from echo2.base.ids import GroupId, LeaseId, PeerId, RunId
from echo2.trust.identity import Identity, verify_signature
from echo2.wire.bounds import ATTEMPT_MAX
from echo2.wire.gen.echo2.v1 import rollout_pb2
from echo2.wire.rollout import group_id_from_wire, lease_id_from_wire

_PREFIX = b"echo2-lease-ticket-v1:"


@dataclass(frozen=True, slots=True)
class Ticket:
    """One worker's right to produce one group, as the coordinator granted it."""

    lease_id: LeaseId
    group_id: GroupId
    worker_peer_id: PeerId
    attempt: int
    deadline_unix_s: float
    run_id: RunId


def _signed_bytes(message: rollout_pb2.LeaseTicket) -> bytes:
    bare = rollout_pb2.LeaseTicket()
    bare.CopyFrom(message)
    bare.signature = b""
    return _PREFIX + bare.SerializeToString(deterministic=True)


def sign_ticket(ticket: Ticket, coordinator: Identity) -> rollout_pb2.LeaseTicket:
    """The ticket as a message, signed by the coordinator's identity."""
    message = rollout_pb2.LeaseTicket(
        lease_id=ticket.lease_id,
        group_id=ticket.group_id,
        worker_peer_id=ticket.worker_peer_id,
        attempt=ticket.attempt,
        deadline_unix_s=ticket.deadline_unix_s,
        run_id=ticket.run_id,
    )
    message.signature = coordinator.sign(_signed_bytes(message))
    return message


def verify_ticket(
    message: rollout_pb2.LeaseTicket, run_id: RunId, coordinator_peer_id: PeerId, worker_peer_id: PeerId
) -> Ticket:
    """Returns the ticket if this run's coordinator granted it to `worker_peer_id` (the caller, known from TLS), else raises."""
    lease_id, group_id = lease_id_from_wire(message.lease_id), group_id_from_wire(message.group_id)
    whose = f"ticket of lease {lease_id} from {worker_peer_id}"
    if len(message.signature) != 64:
        raise BadSignature(f"{whose}: expected a signature of 64 bytes, got {len(message.signature)}")
    try:
        verify_signature(coordinator_peer_id, _signed_bytes(message), message.signature)
    except BadSignature:
        raise BadSignature(f"{whose}: expected the signature of the coordinator {coordinator_peer_id}") from None
    if message.run_id != run_id:
        raise NotAllowed(f"{whose}: expected a ticket of run {run_id}, got one of run {message.run_id[:64]!r}")
    if message.worker_peer_id != worker_peer_id:
        raise NotAllowed(f"{whose}: it was granted to {message.worker_peer_id[:64]}")
    if not 1 <= message.attempt <= ATTEMPT_MAX or not math.isfinite(message.deadline_unix_s):
        raise MalformedMessage(f"{whose}: expected attempt 1 to {ATTEMPT_MAX} and a finite deadline")
    return Ticket(lease_id, group_id, worker_peer_id, message.attempt, message.deadline_unix_s, run_id)
