"""Control messages of proto/echo2/v1/coordinator.proto <-> the coordinator's core types.

Guarantees: what `*_from_message` returns has finite numbers, texts and lists within the limits below, and known enum
values; whatever else a message may hold, it raises `MalformedMessage`, saying which field of whose, what was expected
and what came. Leaves to others: whether the sender may say it (runtime/sessions).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from echo2.base.errors import MalformedMessage
from echo2.base.ids import PeerId, RunId, Step, Version
from echo2.base.rollout import GroupSpec
from echo2.broadcast.reachability import Access
from echo2.coordinator.lease_events import EndReason, HeldLease
from echo2.coordinator.telemetry import (
    Heartbeat,
    LearnerHello,
    LearnerReport,
    LinkReport,
    PeerLink,
    PublishedVersion,
    WorkerHello,
)
from echo2.wire.broadcast import access_from_message, access_to_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.gen.echo2.v1 import rollout_pb2
from echo2.wire.rollout import VERSION_MAX, group_from_message, group_id_from_wire, group_to_message, lease_id_from_wire

TEXT_CHARS_MAX = 1000
ADDRESSES_MAX = 8
LINKS_MAX = 64
HELD_LEASES_MAX = 4096
GROUPS_PER_MESSAGE_MAX = 65_536
LAGS_MAX = 256
MODEL_CONFIG_BYTES_MAX = 1 << 20
COUNT_MAX = 1 << 62
RATE_MAX = 1e15
SECONDS_MAX = 1e9

_END_REASONS = {
    pb.LeaseEnded.REASON_FINISHED: EndReason.FINISHED,
    pb.LeaseEnded.REASON_HANDED_BACK: EndReason.HANDED_BACK,
    pb.LeaseEnded.REASON_REFUSED: EndReason.REFUSED,
}


def text_of(value: str, what: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """A text within its limit; control characters are not let into logs and pages."""
    if len(value) > chars_max or not all(c.isprintable() for c in value):
        raise MalformedMessage(f"{what}: expected up to {chars_max} printable characters, got {value[:40]!r}")
    return value


def _count(value: int, what: str, high: int = COUNT_MAX) -> int:
    if not 0 <= value <= high:
        raise MalformedMessage(f"{what}: expected 0 to {high}, got {value}")
    return value


def _number(value: float, what: str, high: float, low: float = 0.0) -> float:
    if not (math.isfinite(value) and low <= value <= high):
        raise MalformedMessage(f"{what}: expected a number of {low:g} to {high:g}, got {value}")
    return value


def _version(value: int, what: str) -> Version:
    return Version(_count(value, what, VERSION_MAX))


def link_from_message(message: pb.Link, whose: str) -> LinkReport:
    return LinkReport(
        _number(message.uplink_bytes_per_s, f"uplink_bytes_per_s of {whose}", RATE_MAX),
        _number(message.downlink_bytes_per_s, f"downlink_bytes_per_s of {whose}", RATE_MAX),
        _number(message.rtt_s, f"rtt_s of {whose}", 60.0),
    )


def link_to_message(link: LinkReport) -> pb.Link:
    return pb.Link(
        uplink_bytes_per_s=link.uplink_bytes_per_s, downlink_bytes_per_s=link.downlink_bytes_per_s, rtt_s=link.rtt_s
    )


def worker_hello_from_message(message: pb.WorkerHello, whose: str) -> WorkerHello:
    _count(len(message.addresses), f"number of addresses of {whose}", ADDRESSES_MAX)
    _count(len(message.held_leases), f"number of held leases of {whose}", HELD_LEASES_MAX)
    held = tuple(
        HeldLease(lease_id_from_wire(one.lease_id), group_id_from_wire(one.group_id), one.attempt)
        for one in message.held_leases
    )
    return WorkerHello(
        protocol_version=message.protocol_version,
        name=text_of(message.name, f"name of {whose}", 64),
        run_id=RunId(text_of(message.run_id, f"run_id of {whose}", 64)),
        addresses=tuple(text_of(address, f"address of {whose}") for address in message.addresses),
        price_usd_per_hour=_number(message.price_usd_per_hour, f"price_usd_per_hour of {whose}", 1e6),
        is_spot=message.is_spot,
        gpu=text_of(message.gpu, f"gpu of {whose}", 100),
        engine=text_of(message.engine, f"engine of {whose}", 64),
        provider=text_of(message.provider, f"provider of {whose}", 64),
        slot_count=_count(message.slot_count, f"slot_count of {whose}", 1 << 20),
        link=link_from_message(message.link, whose),
        held_leases=held,
        model_digest=text_of(message.model_digest, f"model_digest of {whose}", 128),
        quantisation=text_of(message.quantisation, f"quantisation of {whose}", 32),
    )


def worker_hello_to_message(hello: WorkerHello) -> pb.WorkerHello:
    return pb.WorkerHello(
        protocol_version=hello.protocol_version, name=hello.name, run_id=hello.run_id, addresses=hello.addresses,
        price_usd_per_hour=hello.price_usd_per_hour, is_spot=hello.is_spot, gpu=hello.gpu, engine=hello.engine,
        provider=hello.provider, slot_count=hello.slot_count, link=link_to_message(hello.link),
        held_leases=[
            pb.HeldLease(lease_id=one.lease_id, group_id=one.group_id, attempt=one.attempt) for one in hello.held_leases
        ],
        model_digest=hello.model_digest, quantisation=hello.quantisation,
    )  # fmt: skip


_HEARTBEAT_NAMES = (
    "running_sequences", "waiting_sequences", "sampled_tokens", "finished_rollouts", "sent_chunk_bytes",
    "received_chunk_bytes", "newest_chunk_count", "newest_chunks_held", "newest_version_in_flight", "rollout_s_mean",
    "rollout_s_p95", "swap_s", "apply_s", "rollouts_per_s", "tokens_per_s", "waits_for", "waits_since_s", "fingerprint",
    "memory_used_bytes", "memory_total_bytes",
)  # fmt: skip


def heartbeat_from_message(message: pb.Heartbeat, whose: str) -> Heartbeat:
    """Counts are of unsigned 64-bit fields, so only their upper limit is asked."""
    return Heartbeat(
        version=_version(message.version, f"version of {whose}") if message.has_version else None,
        running_sequences=message.running_sequences,
        waiting_sequences=message.waiting_sequences,
        sampled_tokens=_count(message.sampled_tokens, f"sampled_tokens of {whose}"),
        finished_rollouts=_count(message.finished_rollouts, f"finished_rollouts of {whose}"),
        rollouts_per_s=_number(message.rollouts_per_s, f"rollouts_per_s of {whose}", RATE_MAX),
        tokens_per_s=_number(message.tokens_per_s, f"tokens_per_s of {whose}", RATE_MAX),
        rollout_s_mean=_number(message.rollout_s_mean, f"rollout_s_mean of {whose}", SECONDS_MAX),
        rollout_s_p95=_number(message.rollout_s_p95, f"rollout_s_p95 of {whose}", SECONDS_MAX),
        swap_s=_number(message.swap_s, f"swap_s of {whose}", SECONDS_MAX),
        apply_s=_number(message.apply_s, f"apply_s of {whose}", SECONDS_MAX),
        link=link_from_message(message.link, whose),
        sent_chunk_bytes=_count(message.sent_chunk_bytes, f"sent_chunk_bytes of {whose}"),
        received_chunk_bytes=_count(message.received_chunk_bytes, f"received_chunk_bytes of {whose}"),
        newest_chunk_count=_count(message.newest_chunk_count, f"newest_chunk_count of {whose}"),
        newest_chunks_held=_count(message.newest_chunks_held, f"newest_chunks_held of {whose}"),
        newest_version_in_flight=_version(message.newest_version_in_flight, f"newest_version_in_flight of {whose}"),
        waits_for=text_of(message.waits_for, f"waits_for of {whose}"),
        waits_since_s=_number(message.waits_since_s, f"waits_since_s of {whose}", 1e12),
        fingerprint=text_of(message.fingerprint, f"fingerprint of {whose}", 128),
        memory_used_bytes=_count(message.memory_used_bytes, f"memory_used_bytes of {whose}"),
        memory_total_bytes=_count(message.memory_total_bytes, f"memory_total_bytes of {whose}"),
        reach=_reach(message.reach, whose) if message.HasField("reach") else None,
        links=_links(message.links, whose) if message.HasField("links") else None,
    )


def _reach(message: pb.Reach, whose: str) -> Access:
    _count(len(message.addresses), f"number of addresses of {whose}", ADDRESSES_MAX)
    addresses = tuple(text_of(address, f"address of {whose}") for address in message.addresses)
    return replace(access_from_message(message.access), addresses=addresses)


def _links(message: pb.LinkTable, whose: str) -> tuple[PeerLink, ...]:
    _count(len(message.links), f"number of links of {whose}", LINKS_MAX)
    return tuple(
        PeerLink(
            PeerId(text_of(link.peer_id, f"peer_id of a link of {whose}", 128)),
            text_of(link.kind, f"kind of a link of {whose}", 32),
            text_of(link.reason, f"reason of a link of {whose}", 400),
        )
        for link in message.links
    )


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


def groups_from_messages(messages: Sequence[rollout_pb2.GroupSpec], whose: str) -> tuple[GroupSpec, ...]:
    _count(len(messages), f"number of groups of {whose}", GROUPS_PER_MESSAGE_MAX)
    return tuple(group_from_message(message) for message in messages)


def offer_from_message(message: pb.OfferGroups, whose: str) -> tuple[tuple[GroupSpec, ...], tuple[int, ...]]:
    """The groups, and of each how many tokens have reached the learner; no counts but in a reminder."""
    groups, held_tokens = groups_from_messages(message.groups, whose), tuple(message.held_tokens)
    if held_tokens and len(held_tokens) != len(groups):
        raise MalformedMessage(
            f"held_tokens of {whose}: expected none or one for each of {len(groups)} groups, got {len(held_tokens)}"
        )
    return groups, held_tokens


def learner_hello_from_message(message: pb.LearnerHello, whose: str) -> LearnerHello:
    if not 1 <= message.rollouts_per_group <= message.rollouts_per_step <= 1 << 24:
        raise MalformedMessage(
            f"batch of {whose}: expected 1 <= rollouts_per_group <= rollouts_per_step, got "
            f"{message.rollouts_per_group} and {message.rollouts_per_step}"
        )
    _count(len(message.model_config_json), f"bytes of model_config_json of {whose}", MODEL_CONFIG_BYTES_MAX)
    return LearnerHello(
        protocol_version=message.protocol_version,
        run_id=RunId(text_of(message.run_id, f"run_id of {whose}", 64)),
        address=text_of(message.address, f"address of {whose}"),
        model_name=text_of(message.model_name, f"model_name of {whose}"),
        model_config_json=message.model_config_json,
        model_digest=text_of(message.model_digest, f"model_digest of {whose}", 128),
        staleness_bound=_count(message.staleness_bound, f"staleness_bound of {whose}", 64),
        rollouts_per_step=message.rollouts_per_step,
        rollouts_per_group=message.rollouts_per_group,
        step=Step(_count(message.step, f"step of {whose}", VERSION_MAX)),
        newest_version=_version(message.newest_version, f"newest_version of {whose}"),
        open_groups=groups_from_messages(message.open_groups, whose),
        full_snapshot_bytes=_count(message.full_snapshot_bytes, f"full_snapshot_bytes of {whose}"),
        link=link_from_message(message.link, whose),
        step_limit=_count(message.step_limit, f"step_limit of {whose}", VERSION_MAX),
        kappa_is_fixed=message.kappa_is_fixed,
        kappa=_count(message.kappa, f"kappa of {whose}", 64),
        relay_address=text_of(message.relay_address, f"relay_address of {whose}", 300),
        longest_sequence_tokens=message.longest_sequence_tokens,
    )


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
_REPORT_PLAIN = ("train_s", "wait_s", "reward_mean", "utilisation", "waits_for", "waits_since_s", "is_finished")


def learner_report_from_message(message: pb.LearnerReport, whose: str) -> LearnerReport:
    _count(len(message.lag_histogram), f"number of lags of {whose}", LAGS_MAX)
    counts = {name: _count(getattr(message, name), f"{name} of {whose}") for name in _REPORT_COUNTS}
    eval_reward = _number(message.eval_reward, f"eval_reward of {whose}", 1e12, -1e12)
    return LearnerReport(
        **counts,
        step=Step(_count(message.step, f"step of {whose}", VERSION_MAX)),
        newest_version=_version(message.newest_version, f"newest_version of {whose}"),
        train_s=_number(message.train_s, f"train_s of {whose}", SECONDS_MAX),
        wait_s=_number(message.wait_s, f"wait_s of {whose}", SECONDS_MAX),
        reward_mean=_number(message.reward_mean, f"reward_mean of {whose}", 1e12, -1e12),
        lag_histogram=tuple(_count(count, f"lag_histogram of {whose}") for count in message.lag_histogram),
        utilisation=_number(message.utilisation, f"utilisation of {whose}", 1.0 + 1e-6),
        waits_for=text_of(message.waits_for, f"waits_for of {whose}"),
        waits_since_s=_number(message.waits_since_s, f"waits_since_s of {whose}", 1e12),
        is_finished=message.is_finished,
        eval_reward=None if eval_reward == -1 else eval_reward,
        fingerprint=text_of(message.fingerprint, f"fingerprint of {whose}", 128),
    )


def learner_report_to_message(report: LearnerReport) -> pb.LearnerReport:
    return pb.LearnerReport(
        **{name: getattr(report, name) for name in (*_REPORT_COUNTS, *_REPORT_PLAIN, "fingerprint")},
        step=report.step, newest_version=report.newest_version, lag_histogram=report.lag_histogram,
        eval_reward=-1.0 if report.eval_reward is None else report.eval_reward,
    )  # fmt: skip


def published_from_message(message: pb.VersionPublished, whose: str) -> PublishedVersion:
    return PublishedVersion(
        version=_version(message.version, f"published version of {whose}"),
        parent=_version(message.parent, f"parent version of {whose}") if message.has_parent else None,
        artifact_bytes=_count(message.artifact_bytes, f"artifact_bytes of {whose}"),
        full_snapshot_bytes=_count(message.full_snapshot_bytes, f"full_snapshot_bytes of {whose}"),
        encode_s=_number(message.encode_s, f"encode_s of {whose}", SECONDS_MAX),
        fingerprint=text_of(message.fingerprint, f"fingerprint of {whose}", 128),
    )
