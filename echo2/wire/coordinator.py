"""Control messages of proto/echo2/v1/coordinator.proto <-> the coordinator's core types.

Guarantees: of a message within its bounds (bounds.parsed, check), what `*_from_message` returns is consistent; for anything else it
raises `MalformedMessage`, which names the field and sender, what was expected and what came. Leaves to others: whether the
sender may say it (coordinator/streams).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echo2.base.errors import MalformedMessage
from echo2.base.ids import PeerId, RunId, Version
from echo2.base.rollout import EndReason, GroupSpec
from echo2.coordinator.leases.lease import HeldLease, WorkerDelivered
from echo2.coordinator.planning.telemetry import (
    Heartbeat,
    LearnerHello,
    LearnerReport,
    LinkReport,
    PublishedVersion,
    ReportedLine,
    ReportedLink,
    WorkerHello,
)
from echo2.wire.broadcast import access_from_message, access_to_message
from echo2.wire.by_name import core_of, message_of
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.gen.echo2.v1 import rollout_pb2
from echo2.wire.rollout import group_from_message, group_to_message, verify_ticket

FINISHED = "finished"
"""The reason with which a learner leaves after its last step; with any other reason the run goes on, unless it is this word,
a colon and the cause that ended the run before."""
STOPPED = "stopped"
"""The reason of a learner that was asked to stop."""
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
_END_REASONS = {
    pb.LeaseEnded.REASON_FINISHED: EndReason.FINISHED,
    pb.LeaseEnded.REASON_HANDED_BACK: EndReason.HANDED_BACK,
    pb.LeaseEnded.REASON_REFUSED: EndReason.REFUSED,
}


def link_from_message(message: pb.Link) -> LinkReport:
    return LinkReport(message.uplink_bytes_per_s, message.downlink_bytes_per_s, message.rtt_s)  # in every heartbeat


def link_to_message(link: LinkReport) -> pb.Link:
    return message_of(link, pb.Link)


def worker_hello_from_message(message: pb.WorkerHello, held_leases: tuple[HeldLease, ...] = ()) -> WorkerHello:
    """`held_leases`: from the message's verified tickets (`held_lease_from_ticket`)."""
    return core_of(message, WorkerHello, link=link_from_message(message.link), held_leases=held_leases)


def worker_hello_to_message(hello: WorkerHello) -> pb.WorkerHello:
    """Encodes a hello without its tickets, which the dashboard and the store do not need."""
    return message_of(hello, pb.WorkerHello, link=link_to_message(hello.link))


def held_lease_from_ticket(
    message: rollout_pb2.LeaseTicket, run_id: RunId, coordinator_peer_id: PeerId, worker_peer_id: PeerId
) -> HeldLease:
    """The lease of a ticket; TrustError unless this run's coordinator signed it for exactly this worker."""
    ticket = verify_ticket(message, run_id, coordinator_peer_id, worker_peer_id)
    return HeldLease(ticket.lease_id, ticket.group_id, ticket.attempt, ticket.deadline_unix_s)


def heartbeat_from_message(message: pb.Heartbeat) -> Heartbeat:
    return core_of(
        message,
        Heartbeat,
        version=Version(message.version) if message.has_version else None,
        link=link_from_message(message.link),
        reach=replace(access_from_message(message.reach.access), addresses=tuple(message.reach.addresses))
        if message.HasField("reach")
        else None,
        links=tuple(core_of(link, ReportedLink) for link in message.links.links) if message.HasField("links") else None,
        log=tuple(core_of(one, ReportedLine) for one in message.log.lines) if message.HasField("log") else None,
    )


def heartbeat_to_message(heartbeat: Heartbeat) -> pb.Heartbeat:
    version = heartbeat.version
    message = message_of(
        heartbeat,
        pb.Heartbeat,
        version=version or 0,
        has_version=version is not None,
        link=link_to_message(heartbeat.link),
    )
    if heartbeat.reach is not None:
        message.reach.CopyFrom(
            pb.Reach(
                addresses=heartbeat.reach.addresses, access=access_to_message(replace(heartbeat.reach, addresses=()))
            )
        )
    if heartbeat.links is not None:
        links = [message_of(one, pb.PeerLink) for one in heartbeat.links]
        message.links.CopyFrom(pb.LinkTable(links=links))
    if heartbeat.log is not None:
        message.log.CopyFrom(pb.LogTail(lines=[message_of(one, pb.LogLine) for one in heartbeat.log]))
    return message


def end_reason_from_message(message: pb.LeaseEnded) -> EndReason:
    reason = _END_REASONS.get(message.reason)
    if reason is None:
        raise MalformedMessage(f"reason of the end of lease {message.lease_id[:64]!r}: expected a known one")
    return reason


def groups_from_messages(messages: Sequence[rollout_pb2.GroupSpec]) -> tuple[GroupSpec, ...]:
    return tuple(group_from_message(message) for message in messages)


def offer_from_message(message: pb.OfferGroups, whose: str) -> tuple[tuple[GroupSpec, ...], tuple[int, ...]]:
    """The groups, and how many tokens of each have reached the learner; counts are sent only in a reminder."""
    groups, held_tokens = groups_from_messages(message.groups), tuple(message.held_tokens)
    if held_tokens and len(held_tokens) != len(groups):
        raise MalformedMessage(
            f"held_tokens of {whose}: expected none or one for each of {len(groups)} groups, got {len(held_tokens)}"
        )
    return groups, held_tokens


def learner_hello_from_message(message: pb.LearnerHello, whose: str) -> LearnerHello:
    if not 1 <= message.rollouts_per_group <= message.rollouts_per_step:
        raise MalformedMessage(
            f"batch of {whose}: expected 1 <= rollouts_per_group <= rollouts_per_step, got "
            f"{message.rollouts_per_group} and {message.rollouts_per_step}"
        )
    return core_of(
        message,
        LearnerHello,
        open_groups=groups_from_messages(message.open_groups),
        link=link_from_message(message.link),
    )


def learner_hello_to_message(hello: LearnerHello) -> pb.LearnerHello:
    """Encodes a hello; the dashboard and the store pass it without open groups, which they do not need."""
    groups = [group_to_message(group) for group in hello.open_groups]
    return message_of(hello, pb.LearnerHello, open_groups=groups, link=link_to_message(hello.link))


def learner_report_from_message(message: pb.LearnerReport, whose: str) -> LearnerReport:
    if list(message.lengths) != sorted(message.lengths):
        raise MalformedMessage(f"{whose}: lengths: expected ascending token counts, got {list(message.lengths)}")
    return core_of(message, LearnerReport, eval_reward=None if message.eval_reward == -1 else message.eval_reward)


def learner_report_to_message(report: LearnerReport) -> pb.LearnerReport:
    eval_reward = -1.0 if report.eval_reward is None else report.eval_reward
    return message_of(report, pb.LearnerReport, eval_reward=eval_reward)


def delivered_from_message(message: pb.WorkersDelivered) -> tuple[WorkerDelivered, ...]:
    return tuple(core_of(worker, WorkerDelivered, worker_id=PeerId(worker.peer_id)) for worker in message.workers)


def published_from_message(message: pb.VersionPublished) -> PublishedVersion:
    return core_of(message, PublishedVersion, parent=Version(message.parent) if message.has_parent else None)
