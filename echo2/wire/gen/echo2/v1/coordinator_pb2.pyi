from echo2.wire.gen.echo2.v1 import bounds_pb2 as _bounds_pb2
from echo2.wire.gen.echo2.v1 import broadcast_pb2 as _broadcast_pb2
from echo2.wire.gen.echo2.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "lease_request", "lease_progress", "lease_ended", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEASE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    LEASE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ENDED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    heartbeat: Heartbeat
    lease_request: LeaseRequest
    lease_progress: LeaseProgress
    lease_ended: LeaseEnded
    leaving: WorkerLeaving
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., lease_request: _Optional[_Union[LeaseRequest, _Mapping]] = ..., lease_progress: _Optional[_Union[LeaseProgress, _Mapping]] = ..., lease_ended: _Optional[_Union[LeaseEnded, _Mapping]] = ..., leaving: _Optional[_Union[WorkerLeaving, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol_version", "name", "run_id", "addresses", "price_usd_per_hour", "is_spot", "gpu", "engine", "slot_count", "link", "provider", "model_digest", "quantisation", "held_tickets", "region")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PRICE_USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    IS_SPOT_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    HELD_TICKETS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    name: str
    run_id: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    price_usd_per_hour: float
    is_spot: bool
    gpu: str
    engine: str
    slot_count: int
    link: Link
    provider: str
    model_digest: str
    quantisation: str
    held_tickets: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.LeaseTicket]
    region: str
    def __init__(self, protocol_version: _Optional[int] = ..., name: _Optional[str] = ..., run_id: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., price_usd_per_hour: _Optional[float] = ..., is_spot: _Optional[bool] = ..., gpu: _Optional[str] = ..., engine: _Optional[str] = ..., slot_count: _Optional[int] = ..., link: _Optional[_Union[Link, _Mapping]] = ..., provider: _Optional[str] = ..., model_digest: _Optional[str] = ..., quantisation: _Optional[str] = ..., held_tickets: _Optional[_Iterable[_Union[_rollout_pb2.LeaseTicket, _Mapping]]] = ..., region: _Optional[str] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("uplink_bytes_per_s", "downlink_bytes_per_s", "rtt_s")
    UPLINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    rtt_s: float
    def __init__(self, uplink_bytes_per_s: _Optional[float] = ..., downlink_bytes_per_s: _Optional[float] = ..., rtt_s: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("version", "has_version", "running_sequences", "waiting_sequences", "sampled_tokens", "finished_rollouts", "rollouts_per_s", "tokens_per_s", "rollout_s_mean", "rollout_s_p95", "swap_s", "apply_s", "link", "sent_chunk_bytes", "received_chunk_bytes", "newest_chunk_count", "newest_chunks_held", "newest_version_in_flight", "waits_for", "waits_since_s", "fingerprint", "memory_used_bytes", "memory_total_bytes", "reach", "links", "log")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_S_MEAN_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_S_P95_FIELD_NUMBER: _ClassVar[int]
    SWAP_S_FIELD_NUMBER: _ClassVar[int]
    APPLY_S_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    SENT_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_CHUNKS_HELD_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    WAITS_SINCE_S_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    version: int
    has_version: bool
    running_sequences: int
    waiting_sequences: int
    sampled_tokens: int
    finished_rollouts: int
    rollouts_per_s: float
    tokens_per_s: float
    rollout_s_mean: float
    rollout_s_p95: float
    swap_s: float
    apply_s: float
    link: Link
    sent_chunk_bytes: int
    received_chunk_bytes: int
    newest_chunk_count: int
    newest_chunks_held: int
    newest_version_in_flight: int
    waits_for: str
    waits_since_s: float
    fingerprint: str
    memory_used_bytes: int
    memory_total_bytes: int
    reach: Reach
    links: LinkTable
    log: LogTail
    def __init__(self, version: _Optional[int] = ..., has_version: _Optional[bool] = ..., running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., finished_rollouts: _Optional[int] = ..., rollouts_per_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., rollout_s_mean: _Optional[float] = ..., rollout_s_p95: _Optional[float] = ..., swap_s: _Optional[float] = ..., apply_s: _Optional[float] = ..., link: _Optional[_Union[Link, _Mapping]] = ..., sent_chunk_bytes: _Optional[int] = ..., received_chunk_bytes: _Optional[int] = ..., newest_chunk_count: _Optional[int] = ..., newest_chunks_held: _Optional[int] = ..., newest_version_in_flight: _Optional[int] = ..., waits_for: _Optional[str] = ..., waits_since_s: _Optional[float] = ..., fingerprint: _Optional[str] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., reach: _Optional[_Union[Reach, _Mapping]] = ..., links: _Optional[_Union[LinkTable, _Mapping]] = ..., log: _Optional[_Union[LogTail, _Mapping]] = ...) -> None: ...

class LogTail(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[LogLine]
    def __init__(self, lines: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("unix_s", "is_error", "text")
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    IS_ERROR_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    unix_s: float
    is_error: bool
    text: str
    def __init__(self, unix_s: _Optional[float] = ..., is_error: _Optional[bool] = ..., text: _Optional[str] = ...) -> None: ...

class Reach(_message.Message):
    __slots__ = ("addresses", "access")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    access: _broadcast_pb2.PeerAccess
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., access: _Optional[_Union[_broadcast_pb2.PeerAccess, _Mapping]] = ...) -> None: ...

class LinkTable(_message.Message):
    __slots__ = ("links",)
    LINKS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[PeerLink]
    def __init__(self, links: _Optional[_Iterable[_Union[PeerLink, _Mapping]]] = ...) -> None: ...

class PeerLink(_message.Message):
    __slots__ = ("peer_id", "kind", "reason")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    kind: str
    reason: str
    def __init__(self, peer_id: _Optional[str] = ..., kind: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("free_rollouts", "version")
    FREE_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    free_rollouts: int
    version: int
    def __init__(self, free_rollouts: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class LeaseProgress(_message.Message):
    __slots__ = ("lease_id", "finished_rollouts", "tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    finished_rollouts: int
    tokens: int
    def __init__(self, lease_id: _Optional[str] = ..., finished_rollouts: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class LeaseEnded(_message.Message):
    __slots__ = ("lease_id", "reason", "message")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[LeaseEnded.Reason]
        REASON_FINISHED: _ClassVar[LeaseEnded.Reason]
        REASON_HANDED_BACK: _ClassVar[LeaseEnded.Reason]
        REASON_REFUSED: _ClassVar[LeaseEnded.Reason]
    REASON_UNSPECIFIED: LeaseEnded.Reason
    REASON_FINISHED: LeaseEnded.Reason
    REASON_HANDED_BACK: LeaseEnded.Reason
    REASON_REFUSED: LeaseEnded.Reason
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reason: LeaseEnded.Reason
    message: str
    def __init__(self, lease_id: _Optional[str] = ..., reason: _Optional[_Union[LeaseEnded.Reason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class WorkerLeaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class WorkerOrder(_message.Message):
    __slots__ = ("welcome", "lease_grant", "lease_revoke", "activation", "broadcast_plan", "refusal", "learner", "banned")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LEASE_GRANT_FIELD_NUMBER: _ClassVar[int]
    LEASE_REVOKE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_PLAN_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    welcome: WorkerWelcome
    lease_grant: LeaseGrant
    lease_revoke: LeaseRevoke
    activation: Activation
    broadcast_plan: _broadcast_pb2.BroadcastPlan
    refusal: Refusal
    learner: LearnerWhereabouts
    banned: BannedPeer
    def __init__(self, welcome: _Optional[_Union[WorkerWelcome, _Mapping]] = ..., lease_grant: _Optional[_Union[LeaseGrant, _Mapping]] = ..., lease_revoke: _Optional[_Union[LeaseRevoke, _Mapping]] = ..., activation: _Optional[_Union[Activation, _Mapping]] = ..., broadcast_plan: _Optional[_Union[_broadcast_pb2.BroadcastPlan, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., learner: _Optional[_Union[LearnerWhereabouts, _Mapping]] = ..., banned: _Optional[_Union[BannedPeer, _Mapping]] = ...) -> None: ...

class WorkerWelcome(_message.Message):
    __slots__ = ("run_id", "staleness_bound", "heartbeat_interval_s", "report_interval_s", "learner", "relay_address", "unix_s", "banned_peer_ids")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STALENESS_BOUND_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    REPORT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    RELAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    BANNED_PEER_IDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    staleness_bound: int
    heartbeat_interval_s: float
    report_interval_s: float
    learner: LearnerWhereabouts
    relay_address: str
    unix_s: float
    banned_peer_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., staleness_bound: _Optional[int] = ..., heartbeat_interval_s: _Optional[float] = ..., report_interval_s: _Optional[float] = ..., learner: _Optional[_Union[LearnerWhereabouts, _Mapping]] = ..., relay_address: _Optional[str] = ..., unix_s: _Optional[float] = ..., banned_peer_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class BannedPeer(_message.Message):
    __slots__ = ("peer_id", "is_lifted")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LIFTED_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    is_lifted: bool
    def __init__(self, peer_id: _Optional[str] = ..., is_lifted: _Optional[bool] = ...) -> None: ...

class LearnerWhereabouts(_message.Message):
    __slots__ = ("peer_id", "address", "model_name", "model_config_json", "model_digest", "newest_version", "relay_address", "longest_sequence_tokens", "full_snapshot_bytes", "chunk_address")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FULL_SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    address: str
    model_name: str
    model_config_json: bytes
    model_digest: str
    newest_version: int
    relay_address: str
    longest_sequence_tokens: int
    full_snapshot_bytes: int
    chunk_address: str
    def __init__(self, peer_id: _Optional[str] = ..., address: _Optional[str] = ..., model_name: _Optional[str] = ..., model_config_json: _Optional[bytes] = ..., model_digest: _Optional[str] = ..., newest_version: _Optional[int] = ..., relay_address: _Optional[str] = ..., longest_sequence_tokens: _Optional[int] = ..., full_snapshot_bytes: _Optional[int] = ..., chunk_address: _Optional[str] = ...) -> None: ...

class LeaseGrant(_message.Message):
    __slots__ = ("ticket", "group", "is_continuation", "is_renewal")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    IS_CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    IS_RENEWAL_FIELD_NUMBER: _ClassVar[int]
    ticket: _rollout_pb2.LeaseTicket
    group: _rollout_pb2.GroupSpec
    is_continuation: bool
    is_renewal: bool
    def __init__(self, ticket: _Optional[_Union[_rollout_pb2.LeaseTicket, _Mapping]] = ..., group: _Optional[_Union[_rollout_pb2.GroupSpec, _Mapping]] = ..., is_continuation: _Optional[bool] = ..., is_renewal: _Optional[bool] = ...) -> None: ...

class LeaseRevoke(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reason: str
    def __init__(self, lease_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Activation(_message.Message):
    __slots__ = ("is_active", "reason")
    IS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    is_active: bool
    reason: str
    def __init__(self, is_active: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class LearnerMessage(_message.Message):
    __slots__ = ("hello", "report", "offer", "close", "published", "leaving", "accused", "delivered", "shown")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    hello: LearnerHello
    report: LearnerReport
    offer: OfferGroups
    close: CloseGroups
    published: VersionPublished
    leaving: LearnerLeaving
    accused: WorkerAccused
    delivered: WorkersDelivered
    shown: RolloutsShown
    def __init__(self, hello: _Optional[_Union[LearnerHello, _Mapping]] = ..., report: _Optional[_Union[LearnerReport, _Mapping]] = ..., offer: _Optional[_Union[OfferGroups, _Mapping]] = ..., close: _Optional[_Union[CloseGroups, _Mapping]] = ..., published: _Optional[_Union[VersionPublished, _Mapping]] = ..., leaving: _Optional[_Union[LearnerLeaving, _Mapping]] = ..., accused: _Optional[_Union[WorkerAccused, _Mapping]] = ..., delivered: _Optional[_Union[WorkersDelivered, _Mapping]] = ..., shown: _Optional[_Union[RolloutsShown, _Mapping]] = ...) -> None: ...

class LearnerHello(_message.Message):
    __slots__ = ("protocol_version", "run_id", "address", "model_name", "model_config_json", "model_digest", "staleness_bound", "rollouts_per_step", "rollouts_per_group", "step", "newest_version", "open_groups", "full_snapshot_bytes", "link", "step_limit", "kappa_is_fixed", "kappa", "relay_address", "longest_sequence_tokens", "chunk_address", "later_group_ids", "barred_peer_ids")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STALENESS_BOUND_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_PER_GROUP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_GROUPS_FIELD_NUMBER: _ClassVar[int]
    FULL_SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    STEP_LIMIT_FIELD_NUMBER: _ClassVar[int]
    KAPPA_IS_FIXED_FIELD_NUMBER: _ClassVar[int]
    KAPPA_FIELD_NUMBER: _ClassVar[int]
    RELAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LATER_GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    BARRED_PEER_IDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    address: str
    model_name: str
    model_config_json: bytes
    model_digest: str
    staleness_bound: int
    rollouts_per_step: int
    rollouts_per_group: int
    step: int
    newest_version: int
    open_groups: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.GroupSpec]
    full_snapshot_bytes: int
    link: Link
    step_limit: int
    kappa_is_fixed: bool
    kappa: int
    relay_address: str
    longest_sequence_tokens: int
    chunk_address: str
    later_group_ids: _containers.RepeatedScalarFieldContainer[str]
    barred_peer_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., address: _Optional[str] = ..., model_name: _Optional[str] = ..., model_config_json: _Optional[bytes] = ..., model_digest: _Optional[str] = ..., staleness_bound: _Optional[int] = ..., rollouts_per_step: _Optional[int] = ..., rollouts_per_group: _Optional[int] = ..., step: _Optional[int] = ..., newest_version: _Optional[int] = ..., open_groups: _Optional[_Iterable[_Union[_rollout_pb2.GroupSpec, _Mapping]]] = ..., full_snapshot_bytes: _Optional[int] = ..., link: _Optional[_Union[Link, _Mapping]] = ..., step_limit: _Optional[int] = ..., kappa_is_fixed: _Optional[bool] = ..., kappa: _Optional[int] = ..., relay_address: _Optional[str] = ..., longest_sequence_tokens: _Optional[int] = ..., chunk_address: _Optional[str] = ..., later_group_ids: _Optional[_Iterable[str]] = ..., barred_peer_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class LearnerReport(_message.Message):
    __slots__ = ("step", "newest_version", "train_s", "wait_s", "reward_mean", "buffered_rollouts", "open_rollouts", "trained_rollouts", "trained_tokens", "dropped_stale_rollouts", "duplicate_rollouts", "refused_rollouts", "over_stale_tokens_trained", "lag_histogram", "utilisation", "sent_chunk_bytes", "waits_for", "waits_since_s", "is_finished", "eval_reward", "fingerprint", "evaluation_rollouts", "idle_s", "audit_s", "rewards_due", "prompts_exhausted", "reward_s", "reward_processes", "lengths", "discarded_rollouts", "equal_reward_steps")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAIN_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    BUFFERED_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_STALE_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    OVER_STALE_TOKENS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    LAG_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    SENT_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    WAITS_SINCE_S_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    EVAL_REWARD_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    AUDIT_S_FIELD_NUMBER: _ClassVar[int]
    REWARDS_DUE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    REWARD_S_FIELD_NUMBER: _ClassVar[int]
    REWARD_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    EQUAL_REWARD_STEPS_FIELD_NUMBER: _ClassVar[int]
    step: int
    newest_version: int
    train_s: float
    wait_s: float
    reward_mean: float
    buffered_rollouts: int
    open_rollouts: int
    trained_rollouts: int
    trained_tokens: int
    dropped_stale_rollouts: int
    duplicate_rollouts: int
    refused_rollouts: int
    over_stale_tokens_trained: int
    lag_histogram: _containers.RepeatedScalarFieldContainer[int]
    utilisation: float
    sent_chunk_bytes: int
    waits_for: str
    waits_since_s: float
    is_finished: bool
    eval_reward: float
    fingerprint: str
    evaluation_rollouts: float
    idle_s: float
    audit_s: float
    rewards_due: int
    prompts_exhausted: bool
    reward_s: float
    reward_processes: int
    lengths: _containers.RepeatedScalarFieldContainer[int]
    discarded_rollouts: int
    equal_reward_steps: int
    def __init__(self, step: _Optional[int] = ..., newest_version: _Optional[int] = ..., train_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., reward_mean: _Optional[float] = ..., buffered_rollouts: _Optional[int] = ..., open_rollouts: _Optional[int] = ..., trained_rollouts: _Optional[int] = ..., trained_tokens: _Optional[int] = ..., dropped_stale_rollouts: _Optional[int] = ..., duplicate_rollouts: _Optional[int] = ..., refused_rollouts: _Optional[int] = ..., over_stale_tokens_trained: _Optional[int] = ..., lag_histogram: _Optional[_Iterable[int]] = ..., utilisation: _Optional[float] = ..., sent_chunk_bytes: _Optional[int] = ..., waits_for: _Optional[str] = ..., waits_since_s: _Optional[float] = ..., is_finished: _Optional[bool] = ..., eval_reward: _Optional[float] = ..., fingerprint: _Optional[str] = ..., evaluation_rollouts: _Optional[float] = ..., idle_s: _Optional[float] = ..., audit_s: _Optional[float] = ..., rewards_due: _Optional[int] = ..., prompts_exhausted: _Optional[bool] = ..., reward_s: _Optional[float] = ..., reward_processes: _Optional[int] = ..., lengths: _Optional[_Iterable[int]] = ..., discarded_rollouts: _Optional[int] = ..., equal_reward_steps: _Optional[int] = ...) -> None: ...

class OfferGroups(_message.Message):
    __slots__ = ("groups", "held_tokens")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.GroupSpec]
    held_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, groups: _Optional[_Iterable[_Union[_rollout_pb2.GroupSpec, _Mapping]]] = ..., held_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseGroups(_message.Message):
    __slots__ = ("group_ids", "reason")
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, group_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class VersionPublished(_message.Message):
    __slots__ = ("version", "parent", "has_parent", "artifact_bytes", "full_snapshot_bytes", "encode_s", "fingerprint")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    HAS_PARENT_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    version: int
    parent: int
    has_parent: bool
    artifact_bytes: int
    full_snapshot_bytes: int
    encode_s: float
    fingerprint: str
    def __init__(self, version: _Optional[int] = ..., parent: _Optional[int] = ..., has_parent: _Optional[bool] = ..., artifact_bytes: _Optional[int] = ..., full_snapshot_bytes: _Optional[int] = ..., encode_s: _Optional[float] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class LearnerLeaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class LearnerOrder(_message.Message):
    __slots__ = ("welcome", "plan", "broadcast_plan", "refusal", "banned", "wanted")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_PLAN_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    welcome: LearnerWelcome
    plan: PlanUpdate
    broadcast_plan: _broadcast_pb2.BroadcastPlan
    refusal: Refusal
    banned: WorkerBanned
    wanted: RolloutsWanted
    def __init__(self, welcome: _Optional[_Union[LearnerWelcome, _Mapping]] = ..., plan: _Optional[_Union[PlanUpdate, _Mapping]] = ..., broadcast_plan: _Optional[_Union[_broadcast_pb2.BroadcastPlan, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., banned: _Optional[_Union[WorkerBanned, _Mapping]] = ..., wanted: _Optional[_Union[RolloutsWanted, _Mapping]] = ...) -> None: ...

class LearnerWelcome(_message.Message):
    __slots__ = ("run_id", "heartbeat_interval_s", "relay_address")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    RELAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    heartbeat_interval_s: float
    relay_address: str
    def __init__(self, run_id: _Optional[str] = ..., heartbeat_interval_s: _Optional[float] = ..., relay_address: _Optional[str] = ...) -> None: ...

class PlanUpdate(_message.Message):
    __slots__ = ("kappa", "in_flight_cap_rollouts", "predicted_utilisation", "predicted_broadcast_s", "usd_per_hour", "reason")
    KAPPA_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_CAP_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_BROADCAST_S_FIELD_NUMBER: _ClassVar[int]
    USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kappa: int
    in_flight_cap_rollouts: int
    predicted_utilisation: float
    predicted_broadcast_s: float
    usd_per_hour: float
    reason: str
    def __init__(self, kappa: _Optional[int] = ..., in_flight_cap_rollouts: _Optional[int] = ..., predicted_utilisation: _Optional[float] = ..., predicted_broadcast_s: _Optional[float] = ..., usd_per_hour: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class WorkerBanned(_message.Message):
    __slots__ = ("peer_id", "reason", "is_lifted", "is_banned")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_LIFTED_FIELD_NUMBER: _ClassVar[int]
    IS_BANNED_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    reason: str
    is_lifted: bool
    is_banned: bool
    def __init__(self, peer_id: _Optional[str] = ..., reason: _Optional[str] = ..., is_lifted: _Optional[bool] = ..., is_banned: _Optional[bool] = ...) -> None: ...

class WorkerAccused(_message.Message):
    __slots__ = ("peer_id", "reason", "is_certain")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_CERTAIN_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    reason: str
    is_certain: bool
    def __init__(self, peer_id: _Optional[str] = ..., reason: _Optional[str] = ..., is_certain: _Optional[bool] = ...) -> None: ...

class RolloutsWanted(_message.Message):
    __slots__ = ("request", "rollout_id", "offset")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    request: int
    rollout_id: str
    offset: int
    def __init__(self, request: _Optional[int] = ..., rollout_id: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class RolloutsShown(_message.Message):
    __slots__ = ("request", "rollouts", "tokens", "prompt", "turns")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    request: int
    rollouts: _containers.RepeatedCompositeFieldContainer[RolloutSummary]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenShown]
    prompt: str
    turns: _containers.RepeatedCompositeFieldContainer[TurnShown]
    def __init__(self, request: _Optional[int] = ..., rollouts: _Optional[_Iterable[_Union[RolloutSummary, _Mapping]]] = ..., tokens: _Optional[_Iterable[_Union[TokenShown, _Mapping]]] = ..., prompt: _Optional[str] = ..., turns: _Optional[_Iterable[_Union[TurnShown, _Mapping]]] = ...) -> None: ...

class RolloutSummary(_message.Message):
    __slots__ = ("rollout_id", "step", "reward", "token_count", "oldest_version", "newest_version", "finish_reason", "peer_ids", "completion", "turn_count")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PEER_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    TURN_COUNT_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    step: int
    reward: float
    token_count: int
    oldest_version: int
    newest_version: int
    finish_reason: str
    peer_ids: _containers.RepeatedScalarFieldContainer[str]
    completion: str
    turn_count: int
    def __init__(self, rollout_id: _Optional[str] = ..., step: _Optional[int] = ..., reward: _Optional[float] = ..., token_count: _Optional[int] = ..., oldest_version: _Optional[int] = ..., newest_version: _Optional[int] = ..., finish_reason: _Optional[str] = ..., peer_ids: _Optional[_Iterable[str]] = ..., completion: _Optional[str] = ..., turn_count: _Optional[int] = ...) -> None: ...

class TokenShown(_message.Message):
    __slots__ = ("token_id", "text", "logprob", "version", "peer")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    logprob: float
    version: int
    peer: int
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., logprob: _Optional[float] = ..., version: _Optional[int] = ..., peer: _Optional[int] = ...) -> None: ...

class TurnShown(_message.Message):
    __slots__ = ("turn", "position", "text")
    TURN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    turn: int
    position: int
    text: str
    def __init__(self, turn: _Optional[int] = ..., position: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class WorkersDelivered(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerDelivered]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerDelivered, _Mapping]]] = ...) -> None: ...

class WorkerDelivered(_message.Message):
    __slots__ = ("peer_id", "heard_rollouts", "admitted_rollouts")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    HEARD_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    heard_rollouts: int
    admitted_rollouts: float
    def __init__(self, peer_id: _Optional[str] = ..., heard_rollouts: _Optional[int] = ..., admitted_rollouts: _Optional[float] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run_id", "unix_s", "learner_hello", "learner", "learner_is_connected", "workers", "plan", "plan_terms", "open_leases", "queued_groups", "usd_spent", "usd_per_hour", "artifact_bytes_published", "full_bytes_published", "events", "measured_utilisation", "measured_broadcast_s", "waits", "usd_useful", "usd_useful_per_hour", "finished", "headline", "headline_kind", "open_machines", "rented_usd_per_hour")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LEARNER_HELLO_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    LEARNER_IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PLAN_TERMS_FIELD_NUMBER: _ClassVar[int]
    OPEN_LEASES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    USD_SPENT_FIELD_NUMBER: _ClassVar[int]
    USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_BYTES_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    FULL_BYTES_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    MEASURED_BROADCAST_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    USD_USEFUL_FIELD_NUMBER: _ClassVar[int]
    USD_USEFUL_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    HEADLINE_FIELD_NUMBER: _ClassVar[int]
    HEADLINE_KIND_FIELD_NUMBER: _ClassVar[int]
    OPEN_MACHINES_FIELD_NUMBER: _ClassVar[int]
    RENTED_USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    unix_s: float
    learner_hello: LearnerHello
    learner: LearnerReport
    learner_is_connected: bool
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    plan: PlanUpdate
    plan_terms: _containers.RepeatedScalarFieldContainer[str]
    open_leases: int
    queued_groups: int
    usd_spent: float
    usd_per_hour: float
    artifact_bytes_published: int
    full_bytes_published: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    measured_utilisation: float
    measured_broadcast_s: float
    waits: _containers.RepeatedCompositeFieldContainer[Wait]
    usd_useful: float
    usd_useful_per_hour: float
    finished: str
    headline: str
    headline_kind: str
    open_machines: int
    rented_usd_per_hour: float
    def __init__(self, run_id: _Optional[str] = ..., unix_s: _Optional[float] = ..., learner_hello: _Optional[_Union[LearnerHello, _Mapping]] = ..., learner: _Optional[_Union[LearnerReport, _Mapping]] = ..., learner_is_connected: _Optional[bool] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., plan: _Optional[_Union[PlanUpdate, _Mapping]] = ..., plan_terms: _Optional[_Iterable[str]] = ..., open_leases: _Optional[int] = ..., queued_groups: _Optional[int] = ..., usd_spent: _Optional[float] = ..., usd_per_hour: _Optional[float] = ..., artifact_bytes_published: _Optional[int] = ..., full_bytes_published: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., measured_utilisation: _Optional[float] = ..., measured_broadcast_s: _Optional[float] = ..., waits: _Optional[_Iterable[_Union[Wait, _Mapping]]] = ..., usd_useful: _Optional[float] = ..., usd_useful_per_hour: _Optional[float] = ..., finished: _Optional[str] = ..., headline: _Optional[str] = ..., headline_kind: _Optional[str] = ..., open_machines: _Optional[int] = ..., rented_usd_per_hour: _Optional[float] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("what", "since_unix_s")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    what: str
    since_unix_s: float
    def __init__(self, what: _Optional[str] = ..., since_unix_s: _Optional[float] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("peer_id", "name", "state", "activation", "hello", "heartbeat", "heartbeat_age_s", "leases", "usd_spent")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    USD_SPENT_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    state: str
    activation: str
    hello: WorkerHello
    heartbeat: Heartbeat
    heartbeat_age_s: float
    leases: int
    usd_spent: float
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., activation: _Optional[str] = ..., hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., heartbeat_age_s: _Optional[float] = ..., leases: _Optional[int] = ..., usd_spent: _Optional[float] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("unix_s", "kind", "text")
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    unix_s: float
    kind: str
    text: str
    def __init__(self, unix_s: _Optional[float] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ActRequest(_message.Message):
    __slots__ = ("name", "body_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    body_json: bytes
    def __init__(self, name: _Optional[str] = ..., body_json: _Optional[bytes] = ...) -> None: ...

class ActReply(_message.Message):
    __slots__ = ("answer_json",)
    ANSWER_JSON_FIELD_NUMBER: _ClassVar[int]
    answer_json: bytes
    def __init__(self, answer_json: _Optional[bytes] = ...) -> None: ...
