from echo2.wire.gen.echo2.v1 import bounds_pb2 as _bounds_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Work(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORK_TRAIN: _ClassVar[Work]
    WORK_EVALUATE: _ClassVar[Work]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
WORK_TRAIN: Work
WORK_EVALUATE: Work
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids", "seed", "stop_strings", "stop_piece_ids", "stop_pieces")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    STOP_PIECE_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_PIECES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    stop_strings: _containers.RepeatedScalarFieldContainer[bytes]
    stop_piece_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_pieces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., stop_strings: _Optional[_Iterable[bytes]] = ..., stop_piece_ids: _Optional[_Iterable[int]] = ..., stop_pieces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GroupSpec(_message.Message):
    __slots__ = ("group_id", "prompt_token_ids", "rollout_count", "sampling", "consume_step", "work", "exact_version")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CONSUME_STEP_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    EXACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    rollout_count: int
    sampling: SamplingParams
    consume_step: int
    work: Work
    exact_version: int
    def __init__(self, group_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., rollout_count: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., consume_step: _Optional[int] = ..., work: _Optional[_Union[Work, str]] = ..., exact_version: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "count")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    version: int
    count: int
    def __init__(self, version: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class RolloutSegment(_message.Message):
    __slots__ = ("group_id", "index", "offset", "token_ids", "logprobs", "raw_logprobs", "version_spans", "finish_reason", "expected_remaining_tokens", "routing", "prompt_routing")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RAW_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REMAINING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROUTING_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    index: int
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    raw_logprobs: _containers.RepeatedScalarFieldContainer[float]
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: FinishReason
    expected_remaining_tokens: int
    routing: bytes
    prompt_routing: bytes
    def __init__(self, group_id: _Optional[str] = ..., index: _Optional[int] = ..., offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., raw_logprobs: _Optional[_Iterable[float]] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., expected_remaining_tokens: _Optional[int] = ..., routing: _Optional[bytes] = ..., prompt_routing: _Optional[bytes] = ...) -> None: ...

class LeaseTicket(_message.Message):
    __slots__ = ("lease_id", "group_id", "worker_peer_id", "attempt", "deadline_unix_s", "run_id", "signature")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    group_id: str
    worker_peer_id: str
    attempt: int
    deadline_unix_s: float
    run_id: str
    signature: bytes
    def __init__(self, lease_id: _Optional[str] = ..., group_id: _Optional[str] = ..., worker_peer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., deadline_unix_s: _Optional[float] = ..., run_id: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...
