"""What control messages (proto/echo2/v1/coordinator.proto) say of leases and of the run's end, as core types. All others are kept
and shown as the messages that they are.

Guarantees: of a message within its bounds (bounds.parsed, check), what `*_from_message` returns is consistent; for anything else it
raises `MalformedMessage`, which names the field and sender, what was expected and what came. Leaves to others: whether the
sender may say it (coordinator/streams).
"""

from __future__ import annotations

from echo2.base.errors import MalformedMessage
from echo2.base.ids import PeerId, RunId
from echo2.base.rollout import EndReason, GroupSpec
from echo2.coordinator.leases.lease import HeldLease, WorkerDelivery
from echo2.wire.bounds import core_of
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.gen.echo2.v1 import rollout_pb2
from echo2.wire.rollout import group_from_message, verify_ticket

FINISHED = "finished"
"""The reason with which a learner leaves after its last step; with any other reason the run goes on, unless it is this word,
a colon and the cause that ended the run before."""
STOPPED = "stopped"  # the reason of a learner that was asked to stop
LEAVING_CHARS_MAX = 500  # a cause, in the page's event log


def leaving_reason(cause: str, is_over: bool) -> str:
    """The reason of a learner that an error ends. `is_over`: it ends the run, too."""
    text = "".join(c if c.isprintable() else " " for c in cause[:LEAVING_CHARS_MAX])
    return f"{FINISHED}: {text}" if is_over else text


def cause_of_end(reason: str) -> str | None:
    """What ended the run, given the reason with which its learner leaves: empty if that is its last step; None: it goes on."""
    word, colon, cause = reason.partition(": ")
    if word != FINISHED:
        return None
    return cause if colon else ""


# Message to core type.
_END_REASONS = {pb.LeaseEnded.Reason.Value(f"REASON_{reason.name}"): reason for reason in EndReason}


def held_lease_from_ticket(
    message: rollout_pb2.LeaseTicket, run_id: RunId, coordinator_peer_id: PeerId, worker_peer_id: PeerId
) -> HeldLease:
    """The lease of a ticket; TrustError unless this run's coordinator signed it for exactly this worker."""
    ticket = verify_ticket(message, run_id, coordinator_peer_id, worker_peer_id)
    return HeldLease(ticket.lease_id, ticket.group_id, ticket.attempt, ticket.deadline_unix_s)


def end_reason_from_message(message: pb.LeaseEnded) -> EndReason:
    reason = _END_REASONS.get(message.reason)
    if reason is None:
        raise MalformedMessage(f"reason of the end of lease {message.lease_id[:64]!r}: expected a known one")
    return reason


def offer_from_message(message: pb.OfferGroups, whose: str) -> tuple[tuple[GroupSpec, ...], tuple[int, ...]]:
    """The groups, and how many tokens of each have reached the learner; counts are sent only in a reminder."""
    groups, held_tokens = tuple(map(group_from_message, message.groups)), tuple(message.held_tokens)
    if held_tokens and len(held_tokens) != len(groups):
        raise MalformedMessage(
            f"held_tokens of {whose}: expected none or one for each of {len(groups)} groups, got {len(held_tokens)}"
        )
    return groups, held_tokens


def delivered_from_message(message: pb.WorkersDelivered) -> tuple[WorkerDelivery, ...]:
    return tuple(core_of(worker, WorkerDelivery, worker_id=PeerId(worker.peer_id)) for worker in message.workers)
