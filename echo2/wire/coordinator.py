"""Control messages of proto/echo2/v1/coordinator.proto <-> the coordinator's core types.

Guarantees: what `*_from_message` returns is within the bounds of wire/bounds and fits together; whatever else a message may
hold, it raises `MalformedMessage`, saying which field of whose, what was expected and what came. Leaves to others: whether
the sender may say it (runtime/services).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echo2.base.errors import MalformedMessage
from echo2.base.ids import PeerId, RunId, Step, Version
from echo2.base.rollout import EndReason, GroupSpec
from echo2.broadcast.reachability import Access
from echo2.coordinator.lease_events import Delivered, HeldLease, WorkerDelivered
from echo2.coordinator.telemetry import (
    Heartbeat,
    LearnerHello,
    LearnerReport,
    LinkReport,
    PublishedVersion,
    ReportedLink,
    WorkerHello,
)
from echo2.wire.bounds import check
from echo2.wire.broadcast import access_from_message, access_to_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.gen.echo2.v1 import rollout_pb2
from echo2.wire.rollout import group_from_message, group_to_message
from echo2.wire.ticket import verify_ticket

FINISHED = "finished"
"""Why a learner leaves that has made its last step; for any other reason the run goes on."""
_END_REASONS = {
    pb.LeaseEnded.REASON_FINISHED: EndReason.FINISHED,
    pb.LeaseEnded.REASON_HANDED_BACK: EndReason.HANDED_BACK,
    pb.LeaseEnded.REASON_REFUSED: EndReason.REFUSED,
}


def link_from_message(message: pb.Link) -> LinkReport:
    return LinkReport(message.uplink_bytes_per_s, message.downlink_bytes_per_s, message.rtt_s)


def link_to_message(link: LinkReport) -> pb.Link:
    return pb.Link(
        uplink_bytes_per_s=link.uplink_bytes_per_s, downlink_bytes_per_s=link.downlink_bytes_per_s, rtt_s=link.rtt_s
    )


def worker_hello_from_message(
    message: pb.WorkerHello, whose: str, held_leases: tuple[HeldLease, ...] = ()
) -> WorkerHello:
    """`held_leases`: as the message's tickets say (`held_lease_from_ticket`), once they are verified."""
    check(message, whose)
    return WorkerHello(
        protocol_version=message.protocol_version,
        name=message.name,
        run_id=RunId(message.run_id),
        addresses=tuple(message.addresses),
        price_usd_per_hour=message.price_usd_per_hour,
        is_spot=message.is_spot,
        gpu=message.gpu,
        engine=message.engine,
        provider=message.provider,
        slot_count=message.slot_count,
        link=link_from_message(message.link),
        held_leases=held_leases,
        model_digest=message.model_digest,
        quantisation=message.quantisation,
    )


def worker_hello_to_message(hello: WorkerHello) -> pb.WorkerHello:
    """Without the tickets: the page and the store do not need them."""
    return pb.WorkerHello(
        protocol_version=hello.protocol_version, name=hello.name, run_id=hello.run_id, addresses=hello.addresses,
        price_usd_per_hour=hello.price_usd_per_hour, is_spot=hello.is_spot, gpu=hello.gpu, engine=hello.engine,
        provider=hello.provider, slot_count=hello.slot_count, link=link_to_message(hello.link),
        model_digest=hello.model_digest, quantisation=hello.quantisation,
    )  # fmt: skip


def held_lease_from_ticket(
    message: rollout_pb2.LeaseTicket, run_id: RunId, coordinator_peer_id: PeerId, worker_peer_id: PeerId
) -> HeldLease:
    """What the ticket is of; a TrustError unless this run's coordinator signed it for that very worker."""
    ticket = verify_ticket(message, run_id, coordinator_peer_id, worker_peer_id)
    return HeldLease(ticket.lease_id, ticket.group_id, ticket.attempt, ticket.deadline_unix_s)


_HEARTBEAT_NAMES = (
    "running_sequences", "waiting_sequences", "sampled_tokens", "finished_rollouts", "sent_chunk_bytes",
    "received_chunk_bytes", "newest_chunk_count", "newest_chunks_held", "newest_version_in_flight", "rollout_s_mean",
    "rollout_s_p95", "swap_s", "apply_s", "rollouts_per_s", "tokens_per_s", "waits_for", "waits_since_s", "fingerprint",
    "memory_used_bytes", "memory_total_bytes",
)  # fmt: skip


def heartbeat_from_message(message: pb.Heartbeat, whose: str) -> Heartbeat:
    check(message, whose)
    return Heartbeat(
        **{name: getattr(message, name) for name in _HEARTBEAT_NAMES},
        version=Version(message.version) if message.has_version else None,
        link=link_from_message(message.link),
        reach=_reach(message.reach) if message.HasField("reach") else None,
        links=_links(message.links) if message.HasField("links") else None,
    )


def _reach(message: pb.Reach) -> Access:
    return replace(access_from_message(message.access), addresses=tuple(message.addresses))


def _links(message: pb.LinkTable) -> tuple[ReportedLink, ...]:
    return tuple(ReportedLink(PeerId(link.peer_id), link.kind, link.reason) for link in message.links)


def heartbeat_to_message(heartbeat: Heartbeat) -> pb.Heartbeat:
    values = {name: getattr(heartbeat, name) for name in _HEARTBEAT_NAMES}
    message = pb.Heartbeat(**values, link=link_to_message(heartbeat.link))
    if heartbeat.version is not None:
        message.version, message.has_version = heartbeat.version, True
    if heartbeat.reach is not None:
        message.reach.CopyFrom(
            pb.Reach(
                addresses=heartbeat.reach.addresses, access=access_to_message(replace(heartbeat.reach, addresses=()))
            )
        )
    if heartbeat.links is not None:
        links = [pb.PeerLink(peer_id=one.peer_id, kind=one.kind, reason=one.reason) for one in heartbeat.links]
        message.links.CopyFrom(pb.LinkTable(links=links))
    return message


def end_reason_from_message(message: pb.LeaseEnded) -> EndReason:
    reason = _END_REASONS.get(message.reason)
    if reason is None:
        raise MalformedMessage(f"reason of the end of lease {message.lease_id[:64]!r}: expected a known one")
    return reason


def groups_from_messages(messages: Sequence[rollout_pb2.GroupSpec]) -> tuple[GroupSpec, ...]:
    return tuple(group_from_message(message) for message in messages)


def offer_from_message(message: pb.OfferGroups, whose: str) -> tuple[tuple[GroupSpec, ...], tuple[int, ...]]:
    """The groups, and of each how many tokens have reached the learner; no counts but in a reminder."""
    check(message, whose)
    groups, held_tokens = groups_from_messages(message.groups), tuple(message.held_tokens)
    if held_tokens and len(held_tokens) != len(groups):
        raise MalformedMessage(
            f"held_tokens of {whose}: expected none or one for each of {len(groups)} groups, got {len(held_tokens)}"
        )
    return groups, held_tokens


def learner_hello_from_message(message: pb.LearnerHello, whose: str) -> LearnerHello:
    check(message, whose)
    if not 1 <= message.rollouts_per_group <= message.rollouts_per_step:
        raise MalformedMessage(
            f"batch of {whose}: expected 1 <= rollouts_per_group <= rollouts_per_step, got "
            f"{message.rollouts_per_group} and {message.rollouts_per_step}"
        )
    return LearnerHello(
        **{name: getattr(message, name) for name in _LEARNER_HELLO_NAMES},
        run_id=RunId(message.run_id),
        step=Step(message.step),
        newest_version=Version(message.newest_version),
        open_groups=groups_from_messages(message.open_groups),
        link=link_from_message(message.link),
    )


_LEARNER_HELLO_NAMES = (
    "protocol_version", "address", "model_name", "model_config_json", "model_digest", "staleness_bound",
    "rollouts_per_step", "rollouts_per_group", "full_snapshot_bytes", "step_limit", "kappa_is_fixed", "kappa",
    "relay_address", "longest_sequence_tokens",
)  # fmt: skip


def learner_hello_to_message(hello: LearnerHello) -> pb.LearnerHello:
    """Without the open groups when they are not given: the page and the store need them not."""
    return pb.LearnerHello(
        protocol_version=hello.protocol_version, run_id=hello.run_id, address=hello.address,
        model_name=hello.model_name, model_config_json=hello.model_config_json, model_digest=hello.model_digest,
        staleness_bound=hello.staleness_bound, rollouts_per_step=hello.rollouts_per_step,
        rollouts_per_group=hello.rollouts_per_group, step=hello.step, newest_version=hello.newest_version,
        open_groups=[group_to_message(group) for group in hello.open_groups],
        full_snapshot_bytes=hello.full_snapshot_bytes, link=link_to_message(hello.link), step_limit=hello.step_limit,
        kappa_is_fixed=hello.kappa_is_fixed, kappa=hello.kappa, relay_address=hello.relay_address,
        longest_sequence_tokens=hello.longest_sequence_tokens,
    )  # fmt: skip


_REPORT_COUNTS = (
    "buffered_rollouts", "open_rollouts", "trained_rollouts", "trained_tokens", "dropped_stale_rollouts",
    "duplicate_rollouts", "refused_rollouts", "over_stale_tokens_trained", "sent_chunk_bytes",
)  # fmt: skip
_REPORT_PLAIN = (
    "train_s", "wait_s", "reward_mean", "utilisation", "waits_for", "waits_since_s", "is_finished",
    "evaluation_rollouts", "checkpoint_s",
)  # fmt: skip


def learner_report_from_message(message: pb.LearnerReport, whose: str) -> LearnerReport:
    check(message, whose)
    return LearnerReport(
        **{name: getattr(message, name) for name in (*_REPORT_COUNTS, *_REPORT_PLAIN, "fingerprint")},
        step=Step(message.step),
        newest_version=Version(message.newest_version),
        lag_histogram=tuple(message.lag_histogram),
        eval_reward=None if message.eval_reward == -1 else message.eval_reward,
    )


def learner_report_to_message(report: LearnerReport) -> pb.LearnerReport:
    return pb.LearnerReport(
        **{name: getattr(report, name) for name in (*_REPORT_COUNTS, *_REPORT_PLAIN, "fingerprint")},
        step=report.step, newest_version=report.newest_version, lag_histogram=report.lag_histogram,
        eval_reward=-1.0 if report.eval_reward is None else report.eval_reward,
    )  # fmt: skip


def delivered_from_message(message: pb.WorkersDelivered, whose: str) -> Delivered:
    check(message, whose)
    return Delivered(
        tuple(
            WorkerDelivered(PeerId(one.peer_id), one.heard_rollouts, one.admitted_rollouts) for one in message.workers
        )
    )


def published_from_message(message: pb.VersionPublished, whose: str) -> PublishedVersion:
    check(message, whose)
    return PublishedVersion(
        version=Version(message.version),
        parent=Version(message.parent) if message.has_parent else None,
        artifact_bytes=message.artifact_bytes,
        full_snapshot_bytes=message.full_snapshot_bytes,
        encode_s=message.encode_s,
        fingerprint=message.fingerprint,
    )
