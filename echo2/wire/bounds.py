"""How large each field of each message may be: one table, and the check that every receiver makes with it.

Guarantees: what `check` accepts holds only numbers within their bounds (so no NaN), texts, bytes and
lists within their sizes, and declared enum values; it visits each field once and keeps nothing. A field missing from the
table is a bug of ours, which a test finds before any message does. Leaves to others: consistency between fields
(wire/rollout, wire/broadcast, wire/coordinator), what a sender may say (the services).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from echo2.base.errors import MalformedMessage
from echo2.base.routing import PROMPT_ROUTING_BYTES_MAX, ROLLOUT_ROUTING_BYTES_MAX
from echo2.base.stops import STOP_PIECE_BYTES_MAX, STOP_PIECES_MAX, STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX
from echo2.broadcast import manifest
from echo2.broadcast.manifest import CHUNK_BYTES_MAX, CHUNKS_MAX, KEY_BYTES

VERSION_MAX = manifest.VERSION_MAX
ID_CHARS_MAX = 128
TEXT_CHARS_MAX = 1000
MESSAGE_CHARS_MAX = 2000
HOST_CHARS_MAX = 300
PROMPT_TOKENS_MAX = 1 << 20
ROLLOUTS_PER_GROUP_MAX = 4096
STOP_TOKENS_MAX = 256
TOKEN_ID_MAX = (1 << 31) - 1
ROLLOUT_TOKENS_MAX = 1 << 20
SPANS_MAX = 256
"""Spans per segment or rollout. Versions only grow and lag by at most `staleness_bound` (64), so honest ones have far fewer."""
REPORT_SEGMENTS_MAX = 4096
GROUP_TOKENS_MAX = ROLLOUTS_PER_GROUP_MAX * ROLLOUT_TOKENS_MAX
INDICES_MAX = 4096
NODES_MAX = 20_000
TREES_MAX = 256
HELD_LEASES_MAX = 1024
GROUPS_PER_MESSAGE_MAX = 65_536
LINKS_MAX = 64
OFFERS_MAX = 512
BANNED_MAX = 20_000
LOG_LINES_MAX = 20
LOG_CHARS_MAX = 300
ROLLOUTS_SHOWN_MAX = 64
TOKENS_SHOWN_MAX = 512
SENDERS_SHOWN_MAX = 8
TOKEN_CHARS_MAX = 64
SHOWN_CHARS_MAX = 4000
"""Texts of workers and models that operators look at."""
ATTEMPT_MAX = 1 << 20
COUNT_MAX = 1 << 62
SIZE_BYTES_MAX = 1 << 60
EPOCH_MAX = 1 << 53
FREE_ROLLOUTS_MAX = 1 << 20
RATE_MAX = 1e15
SECONDS_MAX = 1e9
UNIX_S_MAX = 1e12
USD_MAX = 1e12
PRICE_USD_PER_HOUR_MAX = 1e6


@dataclass(frozen=True, slots=True)
class Number:
    high: float
    low: float = 0


@dataclass(frozen=True, slots=True)
class Text:
    """`is_printable`: must be printable, because it is shown on pages and in logs as it is."""

    chars_max: int
    is_printable: bool = True


@dataclass(frozen=True, slots=True)
class Data:
    bytes_max: int


@dataclass(frozen=True, slots=True)
class Listed:
    """`each`: bound of the elements; None for messages, which have bounds of their own."""

    count_max: int
    each: Number | Text | Data | None = None


Bound = Number | Text | Data | Listed

_U32, _U64 = Number((1 << 32) - 1), Number((1 << 64) - 1)
_ID, _TEXT, _WORDS, _HOST = (
    Text(ID_CHARS_MAX),
    Text(TEXT_CHARS_MAX),
    Text(MESSAGE_CHARS_MAX, False),
    Text(HOST_CHARS_MAX),
)
_VERSION, _COUNT, _BYTES, _EPOCH = Number(VERSION_MAX), Number(COUNT_MAX), Number(SIZE_BYTES_MAX), Number(EPOCH_MAX)
_RATE, _SECONDS, _UNIX_S, _USD = Number(RATE_MAX), Number(SECONDS_MAX), Number(UNIX_S_MAX), Number(USD_MAX)
_TOKENS, _INDEX = Number(ROLLOUT_TOKENS_MAX), Number(ROLLOUTS_PER_GROUP_MAX - 1)
_KEY, _SIGNATURE, _HEX, _REWARD = Data(KEY_BYTES), Data(64), Text(128), Number(1e12, -1e12)
_CHUNK, _TOKEN_ID, _LOGPROB = Number(CHUNKS_MAX - 1), Number(TOKEN_ID_MAX), Number(1e-3, -1e6)
_LOGPROBS = Listed(ROLLOUT_TOKENS_MAX, _LOGPROB)
_CHANCES = Listed(ROLLOUT_TOKENS_MAX, Number(1.001))
_PEM, _SECRET, _SHARE, _KAPPA = Data(64 << 10), Text(9000, False), Number(1.0 + 1e-6), Number(64)
_ADDRESSES = Listed(8, _HOST)

BOUNDS: dict[str, dict[str, Bound]] = {
    # ---- rollout.proto
    "SamplingParams": {
        "temperature": Number(100), "top_p": Number(1), "top_k": _U32, "max_new_tokens": _TOKENS,
        "stop_token_ids": Listed(STOP_TOKENS_MAX, _TOKEN_ID), "seed": _U64,
        "stop_strings": Listed(STOP_STRINGS_MAX, Data(STOP_STRING_BYTES_MAX)),
        "stop_piece_ids": Listed(STOP_PIECES_MAX, _TOKEN_ID),
        "stop_pieces": Listed(STOP_PIECES_MAX, Data(STOP_PIECE_BYTES_MAX)),
    },
    "GroupSpec": {
        "group_id": _ID, "prompt_token_ids": Listed(PROMPT_TOKENS_MAX, _TOKEN_ID),
        "rollout_count": Number(ROLLOUTS_PER_GROUP_MAX), "consume_step": _VERSION, "exact_version": _VERSION,
    },
    "VersionSpan": {"version": _VERSION, "count": _TOKENS},
    "RolloutSegment": {
        "group_id": _ID, "index": _INDEX, "offset": _TOKENS, "token_ids": Listed(ROLLOUT_TOKENS_MAX, _TOKEN_ID),
        "logprobs": Listed(ROLLOUT_TOKENS_MAX, _LOGPROB), "raw_logprobs": Listed(ROLLOUT_TOKENS_MAX, _LOGPROB),
        "version_spans": Listed(SPANS_MAX), "expected_remaining_tokens": _TOKENS,
        "routing": Data(ROLLOUT_ROUTING_BYTES_MAX), "prompt_routing": Data(PROMPT_ROUTING_BYTES_MAX),
    },
    "LeaseTicket": {
        "lease_id": _ID, "group_id": _ID, "worker_peer_id": _ID, "attempt": Number(ATTEMPT_MAX),
        "deadline_unix_s": _UNIX_S, "run_id": _ID, "signature": _SIGNATURE,
    },
    # ---- ingest.proto
    "RolloutReport": {"sequence": _COUNT, "lease_id": _ID, "segments": Listed(REPORT_SEGMENTS_MAX)},
    "RolloutVerdict": {"sequence": _COUNT, "segments": Listed(REPORT_SEGMENTS_MAX)},
    "SegmentVerdict": {"group_id": _ID, "index": _INDEX, "held_tokens": _TOKENS, "message": _WORDS},
    "GetPartialsReply": {"rollouts": Listed(ROLLOUTS_PER_GROUP_MAX)},
    "ScorableVersions": {"versions": Listed(SPANS_MAX, _VERSION)},
    "Scores": {"lease_id": _ID, "stretches": Listed(2 * SPANS_MAX)},
    "StretchScores": {
        "logprobs": _LOGPROBS, "drawn": _LOGPROBS, "expected": _LOGPROBS, "stop_chances": _CHANCES, "stopped": _CHANCES,
        "below": _CHANCES, "collisions": _CHANCES,
    },
    "ScoringLease": {
        "lease_id": _ID, "token_ids": Listed(ROLLOUT_TOKENS_MAX, _TOKEN_ID), "stretches": Listed(2 * SPANS_MAX),
        "within_s": _SECONDS,
    },
    "Stretch": {"version": _VERSION, "first": _TOKENS, "count": _TOKENS, "group_id": _ID, "position": _TOKENS},
    # ---- broadcast.proto
    "PeerHello": {"protocol_version": _U32, "run_id": _ID, "bulk_port": Number(65_535)},
    "Route": {"epoch": _EPOCH, "tree": Number(TREES_MAX - 1)},
    "ArtifactHeader": {
        "version": _VERSION, "parent": _VERSION, "run_id": _ID, "lineage": _ID, "published_unix_s": _UNIX_S,
        "full_snapshot_bytes": _BYTES, "publisher_peer_id": _ID, "signature": _SIGNATURE,
    },
    "ChunkFrame": {"key": _KEY, "index": _CHUNK, "signature": _SIGNATURE, "payload": Data(CHUNK_BYTES_MAX)},
    "ArtifactSeal": {
        "key": _KEY, "chunk_count": Number(CHUNKS_MAX), "total_bytes": _BYTES, "root_sha256": Data(32),
        "fingerprint": Text(256), "signature": _SIGNATURE,
    },
    "HaveMap": {"key": _KEY, "bitmap": Data(CHUNKS_MAX // 8)},
    "ChunkRequest": {"key": _KEY, "indices": Listed(INDICES_MAX, _CHUNK)},
    "ChunkCancel": {"key": _KEY, "indices": Listed(INDICES_MAX, _CHUNK)},
    "RelayAck": {"key": _KEY, "index": _CHUNK, "backlog": Number(CHUNKS_MAX)},
    "WidthWish": {"connections": Number(1024)},
    "BroadcastPlan": {
        "epoch": _EPOCH, "nodes": Listed(NODES_MAX), "topology": Text(64), "trees": Listed(TREES_MAX),
        "predicted_s": Listed(NODES_MAX, Number(math.inf)), "predicted_bytes": _BYTES, "reason": _WORDS,
    },
    "PlanNode": {
        "peer_id": _ID, "name": _ID, "addresses": _ADDRESSES, "uplink_bytes_per_s": _RATE,
        "downlink_bytes_per_s": _RATE, "rtt_s": _SECONDS, "deferred_share": _SHARE, "turn": Number(NODES_MAX),
    },
    "PeerAccess": {
        "lan_addresses": Listed(64, _HOST), "public_host": _HOST, "relays": Listed(64, _ID), "met": Listed(1024, _ID),
    },
    "PlanTree": {"weight": Number(1.000001), "parents": Listed(NODES_MAX, Number(NODES_MAX))},
    # ---- coordinator.proto, worker -> coordinator
    "WorkerHello": {
        "protocol_version": _U32, "name": Text(64), "run_id": Text(64), "addresses": _ADDRESSES,
        "price_usd_per_hour": Number(PRICE_USD_PER_HOUR_MAX), "gpu": Text(100), "engine": Text(64),
        "slot_count": Number(1 << 20), "held_tickets": Listed(HELD_LEASES_MAX), "provider": Text(64),
        "model_digest": _HEX, "quantisation": Text(32), "region": Text(64),
    },
    "Link": {"uplink_bytes_per_s": _RATE, "downlink_bytes_per_s": _RATE, "rtt_s": Number(60)},
    "Heartbeat": {
        "version": _VERSION, "running_sequences": _U32, "waiting_sequences": _U32, "sampled_tokens": _COUNT,
        "finished_rollouts": _COUNT, "rollouts_per_s": _RATE, "tokens_per_s": _RATE, "rollout_s_mean": _SECONDS,
        "rollout_s_p95": _SECONDS, "swap_s": _SECONDS, "apply_s": _SECONDS, "sent_chunk_bytes": _BYTES,
        "received_chunk_bytes": _BYTES, "newest_chunk_count": Number(CHUNKS_MAX),
        "newest_chunks_held": Number(CHUNKS_MAX), "newest_version_in_flight": _VERSION, "waits_for": _TEXT,
        "waits_since_s": _UNIX_S, "fingerprint": _HEX, "memory_used_bytes": _BYTES, "memory_total_bytes": _BYTES,
    },
    "Reach": {"addresses": _ADDRESSES},
    "LinkTable": {"links": Listed(LINKS_MAX)},
    "PeerLink": {"peer_id": _ID, "kind": Text(32), "reason": Text(400)},
    "LogTail": {"lines": Listed(LOG_LINES_MAX)},
    "LogLine": {"unix_s": _UNIX_S, "text": Text(LOG_CHARS_MAX)},
    "LeaseRequest": {"free_rollouts": Number(FREE_ROLLOUTS_MAX), "version": _VERSION},
    "LeaseProgress": {
        "lease_id": _ID, "finished_rollouts": Number(ROLLOUTS_PER_GROUP_MAX), "tokens": Number(GROUP_TOKENS_MAX),
    },
    "LeaseEnded": {"lease_id": _ID, "message": _WORDS},
    "WorkerLeaving": {"reason": _TEXT},
    # ---- coordinator -> worker
    "WorkerWelcome": {
        "run_id": _ID, "staleness_bound": _KAPPA, "heartbeat_interval_s": _SECONDS, "report_interval_s": _SECONDS,
        "relay_address": _HOST, "unix_s": _UNIX_S, "banned_peer_ids": Listed(BANNED_MAX, _ID),
    },
    "LearnerWhereabouts": {
        "peer_id": _ID, "address": _TEXT, "model_name": _TEXT, "model_config_json": Data(1 << 20), "model_digest": _HEX,
        "newest_version": _VERSION, "relay_address": _HOST, "longest_sequence_tokens": _U32, "full_snapshot_bytes": _BYTES,
    },
    "LeaseRevoke": {"lease_id": _ID, "reason": _WORDS},
    "Activation": {"reason": Text(20_000, False)},
    "Refusal": {"code": _ID, "message": _WORDS},
    # ---- learner -> coordinator
    "LearnerHello": {
        "protocol_version": _U32, "run_id": Text(64), "address": _TEXT, "model_name": _TEXT,
        "model_config_json": Data(1 << 20), "model_digest": _HEX, "staleness_bound": _KAPPA,
        "rollouts_per_step": Number(1 << 24), "rollouts_per_group": Number(1 << 24), "step": _VERSION,
        "newest_version": _VERSION, "open_groups": Listed(GROUPS_PER_MESSAGE_MAX), "full_snapshot_bytes": _BYTES,
        "step_limit": _VERSION, "kappa": _KAPPA, "relay_address": _HOST, "longest_sequence_tokens": _U32,
    },
    "WorkersDelivered": {"workers": Listed(NODES_MAX)},
    "WorkerDelivered": {"peer_id": _ID, "heard_rollouts": _U32, "admitted_rollouts": _RATE},
    "LearnerReport": {
        "step": _VERSION, "newest_version": _VERSION, "train_s": _SECONDS, "wait_s": _SECONDS, "reward_mean": _REWARD,
        "buffered_rollouts": _U32, "open_rollouts": _U32, "trained_rollouts": _COUNT, "trained_tokens": _COUNT,
        "dropped_stale_rollouts": _COUNT, "duplicate_rollouts": _COUNT, "refused_rollouts": _COUNT,
        "over_stale_tokens_trained": _COUNT, "lag_histogram": Listed(256, _COUNT), "utilisation": _SHARE,
        "sent_chunk_bytes": _BYTES, "waits_for": _TEXT, "waits_since_s": _UNIX_S, "eval_reward": _REWARD,
        "fingerprint": _HEX, "evaluation_rollouts": Number(1 << 24), "idle_s": _SECONDS,
        "audit_fleet_share": Number(1 << 24), "audit_s": _SECONDS,
    },
    "OfferGroups": {
        "groups": Listed(GROUPS_PER_MESSAGE_MAX), "held_tokens": Listed(GROUPS_PER_MESSAGE_MAX, Number(GROUP_TOKENS_MAX)),
    },
    "CloseGroups": {"group_ids": Listed(GROUPS_PER_MESSAGE_MAX, _ID), "reason": _TEXT},
    "VersionPublished": {
        "version": _VERSION, "parent": _VERSION, "artifact_bytes": _BYTES, "full_snapshot_bytes": _BYTES,
        "encode_s": _SECONDS, "fingerprint": _HEX,
    },
    "LearnerLeaving": {"reason": _TEXT},
    "RolloutsShown": {
        "request": _COUNT, "rollouts": Listed(ROLLOUTS_SHOWN_MAX), "tokens": Listed(TOKENS_SHOWN_MAX),
        "prompt": Text(SHOWN_CHARS_MAX, False),
    },
    "RolloutSummary": {
        "rollout_id": _ID, "step": _VERSION, "reward": _REWARD, "token_count": Number(ROLLOUT_TOKENS_MAX),
        "oldest_version": _VERSION, "newest_version": _VERSION, "finish_reason": Text(32),
        "peer_ids": Listed(SENDERS_SHOWN_MAX, _ID), "completion": Text(SHOWN_CHARS_MAX, False),
    },
    "TokenShown": {
        "token_id": Number(TOKEN_ID_MAX), "text": Text(TOKEN_CHARS_MAX, False), "logprob": Number(0.01, -1e6),
        "version": _VERSION,
    },
    # ---- coordinator -> learner
    "LearnerWelcome": {"run_id": _ID, "heartbeat_interval_s": _SECONDS, "relay_address": _HOST},
    "PlanUpdate": {
        "kappa": _KAPPA, "in_flight_cap_rollouts": _U32, "predicted_utilisation": _SHARE,
        "predicted_broadcast_s": Number(math.inf), "usd_per_hour": _USD, "reason": Text(20_000, False),
    },
    "WorkerBanned": {"peer_id": _ID, "reason": _WORDS},
    "RolloutsWanted": {"request": _COUNT, "rollout_id": _ID, "offset": Number(ROLLOUT_TOKENS_MAX)},
    "BannedPeer": {"peer_id": _ID},
    "WorkerAccused": {"peer_id": _ID, "reason": _TEXT},
    # ---- operator
    "RunStatus": {
        "run_id": _ID, "unix_s": _UNIX_S, "workers": Listed(NODES_MAX), "plan_terms": Listed(1000, _WORDS),
        "open_leases": _U32, "queued_groups": _U32, "usd_spent": _USD, "usd_per_hour": _USD,
        "artifact_bytes_published": _COUNT, "full_bytes_published": _COUNT, "events": Listed(5000),
        "measured_utilisation": _SHARE, "measured_broadcast_s": _SECONDS, "waits": Listed(2 * NODES_MAX),
        "usd_useful": _USD, "usd_useful_per_hour": _USD, "finished": _TEXT,
    },
    "Wait": {"what": Text(20_000, False), "since_unix_s": _UNIX_S},
    "WorkerStatus": {
        "peer_id": _ID, "name": _ID, "state": Text(32), "activation": Text(32), "heartbeat_age_s": _UNIX_S,
        "leases": _U32, "usd_spent": _USD,
    },
    "Event": {"unix_s": _UNIX_S, "kind": Text(32), "text": Text(20_000, False)},
    "CreateTokenRequest": {"role": _WORDS, "lifetime_s": _SECONDS, "use_limit": _U32, "label": Text(9000, False)},
    "CreateTokenReply": {"token_id": _ID, "join_link": _TEXT},
    "OfferedMachine": {
        "provider": _ID, "instance": _TEXT, "region": _TEXT, "gpu": _ID, "gpu_count": _U32, "gpu_memory_gib": Number(1e6),
        "usd_per_hour": Number(PRICE_USD_PER_HOUR_MAX),
    },
    "GetOutlookRequest": {"offers": Listed(OFFERS_MAX), "prices": _TEXT, "learner_usd_per_hour": Number(PRICE_USD_PER_HOUR_MAX)},
    "GetOutlookReply": {"outlook_json": Data(1 << 20)},
    # ---- enrolment.proto
    "EnrolRequest": {"protocol_version": _U32, "token": _SECRET, "role": _WORDS, "certificate_request_der": _PEM},
    "EnrolReply": {
        "certificate_pem": _PEM, "authority_pem": _PEM, "run_id": _ID, "coordinator_peer_id": _ID,
        "coordinator_address": _HOST, "certificate_expires_unix_s": _UNIX_S,
    },
    "RenewRequest": {"protocol_version": _U32, "certificate_request_der": _PEM},
    "RenewReply": {"certificate_pem": _PEM},
    # ---- probe.proto
    "ReachRequest": {"protocol_version": _U32, "token": _SECRET, "port": _U32, "nonce": Data(64)},
    "ReachReply": {
        "host": _HOST, "port": Number(65_535), "failure": _WORDS, "unix_s": _UNIX_S, "role": Text(32),
        "token_problem": _WORDS,
    },
    "DownloadRequest": {"token": _SECRET},
    "ProbeBlock": {"data": Data(4 << 20)},
    "UploadBlock": {"token": _SECRET, "data": Data(4 << 20)},
    "UploadReply": {"received_bytes": _BYTES, "bytes_per_s": _RATE},
}  # fmt: skip


def check(message: Message, whose: str) -> None:
    """Raises MalformedMessage for the first field out of bounds, in `message` or in nested messages."""
    rules = _rules_of(message.DESCRIPTOR)
    for field, value in message.ListFields():
        rules[field.number](value, whose)


_Rule = Callable[[Any, str], None]


@functools.cache
def _rules_of(kind: Descriptor) -> dict[int, _Rule]:
    return {field.number: _rule(field, BOUNDS.get(kind.name, {}).get(field.name)) for field in kind.fields}


def needs_bound(field: FieldDescriptor) -> bool:
    """Whether the table must list the field: all except single messages, flags and enums, which bound themselves."""
    own = (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_ENUM)
    return field.is_repeated or field.type not in own


def _rule(field: FieldDescriptor, bound: Bound | None) -> _Rule:
    name = field.name
    assert bound is not None or not needs_bound(field), f"{field.full_name}: expected a bound in BOUNDS, got none"
    match bound:
        case Listed(count_max, each):
            return lambda values, whose: _check_list(values, name, whose, count_max, each)
        case Number(high, low):
            return lambda value, whose: _check_number(value, name, whose, low, high)
        case Text():
            return lambda value, whose: _check_text(value, name, whose, bound)
        case Data(bytes_max):
            return lambda value, whose: _check_size(len(value), f"bytes of {name}", whose, bytes_max)
    if field.enum_type is not None:
        known = _values_of(field.enum_type)
        return lambda value, whose: _check_known(value, name, whose, known)
    return check if field.message_type is not None else lambda value, whose: None


def _values_of(kind: EnumDescriptor) -> frozenset[int]:
    return frozenset(value.number for value in kind.values)


def _check_list(
    values: Sequence[Any], name: str, whose: str, count_max: int, each: Number | Text | Data | None
) -> None:
    _check_size(len(values), f"number of {name}", whose, count_max)
    match each:
        case None:
            for value in values:
                check(value, whose)
        case Number(high, low):
            _check_number(min(values), name, whose, low, high)
            _check_number(max(values), name, whose, low, high)
            if math.isnan(sum(values)):  # which `min` and `max` may miss
                raise MalformedMessage(f"{name} of {whose}: expected finite numbers, got one that is none")
        case Text():
            for value in values:
                _check_text(value, name, whose, each)
        case Data(bytes_max):
            for value in values:
                _check_size(len(value), f"bytes of {name}", whose, bytes_max)


def _check_number(value: float, name: str, whose: str, low: float, high: float) -> None:
    if not low <= value <= high:
        raise MalformedMessage(f"{name} of {whose}: expected {low:.16g} to {high:.16g}, got {value}")


def _check_text(value: str, name: str, whose: str, bound: Text) -> None:
    if len(value) > bound.chars_max or (bound.is_printable and not value.isprintable()):
        kind = "printable characters" if bound.is_printable else "characters"
        raise MalformedMessage(
            f"{name} of {whose}: expected up to {bound.chars_max} {kind}, got {len(value)}: {value[:40]!r}"
        )


def _check_size(size: int, what: str, whose: str, size_max: int) -> None:
    if size > size_max:
        raise MalformedMessage(f"{what} of {whose}: expected up to {size_max}, got {size}")


def _check_known(value: int, name: str, whose: str, known: frozenset[int]) -> None:
    if value not in known:
        raise MalformedMessage(f"{name} of {whose}: expected a known one, got {value}")
