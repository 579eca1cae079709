from echo2.wire.gen.echo2.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RolloutReport(_message.Message):
    __slots__ = ("sequence", "ticket", "lease_id", "segments", "draws_by_seed", "keeps_cache")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DRAWS_BY_SEED_FIELD_NUMBER: _ClassVar[int]
    KEEPS_CACHE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    ticket: _rollout_pb2.LeaseTicket
    lease_id: str
    segments: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.RolloutSegment]
    draws_by_seed: bool
    keeps_cache: bool
    def __init__(self, sequence: _Optional[int] = ..., ticket: _Optional[_Union[_rollout_pb2.LeaseTicket, _Mapping]] = ..., lease_id: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[_rollout_pb2.RolloutSegment, _Mapping]]] = ..., draws_by_seed: _Optional[bool] = ..., keeps_cache: _Optional[bool] = ...) -> None: ...

class RolloutVerdict(_message.Message):
    __slots__ = ("sequence", "segments")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    segments: _containers.RepeatedCompositeFieldContainer[SegmentVerdict]
    def __init__(self, sequence: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[SegmentVerdict, _Mapping]]] = ...) -> None: ...

class SegmentVerdict(_message.Message):
    __slots__ = ("group_id", "index", "verdict", "held_tokens", "message")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[SegmentVerdict.Verdict]
        VERDICT_HELD: _ClassVar[SegmentVerdict.Verdict]
        VERDICT_ADMITTED: _ClassVar[SegmentVerdict.Verdict]
        VERDICT_DUPLICATE: _ClassVar[SegmentVerdict.Verdict]
        VERDICT_STALE: _ClassVar[SegmentVerdict.Verdict]
        VERDICT_REFUSED: _ClassVar[SegmentVerdict.Verdict]
        VERDICT_RESEND: _ClassVar[SegmentVerdict.Verdict]
        VERDICT_CLOSED: _ClassVar[SegmentVerdict.Verdict]
    VERDICT_UNSPECIFIED: SegmentVerdict.Verdict
    VERDICT_HELD: SegmentVerdict.Verdict
    VERDICT_ADMITTED: SegmentVerdict.Verdict
    VERDICT_DUPLICATE: SegmentVerdict.Verdict
    VERDICT_STALE: SegmentVerdict.Verdict
    VERDICT_REFUSED: SegmentVerdict.Verdict
    VERDICT_RESEND: SegmentVerdict.Verdict
    VERDICT_CLOSED: SegmentVerdict.Verdict
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    index: int
    verdict: SegmentVerdict.Verdict
    held_tokens: int
    message: str
    def __init__(self, group_id: _Optional[str] = ..., index: _Optional[int] = ..., verdict: _Optional[_Union[SegmentVerdict.Verdict, str]] = ..., held_tokens: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class GetPartialsRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _rollout_pb2.LeaseTicket
    def __init__(self, ticket: _Optional[_Union[_rollout_pb2.LeaseTicket, _Mapping]] = ...) -> None: ...

class GetPartialsReply(_message.Message):
    __slots__ = ("rollouts",)
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.RolloutSegment]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.RolloutSegment, _Mapping]]] = ...) -> None: ...

class ScoringReport(_message.Message):
    __slots__ = ("scorable", "scores")
    SCORABLE_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scorable: ScorableVersions
    scores: Scores
    def __init__(self, scorable: _Optional[_Union[ScorableVersions, _Mapping]] = ..., scores: _Optional[_Union[Scores, _Mapping]] = ...) -> None: ...

class ScorableVersions(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, versions: _Optional[_Iterable[int]] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("lease_id", "stretches")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STRETCHES_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    stretches: _containers.RepeatedCompositeFieldContainer[StretchScores]
    def __init__(self, lease_id: _Optional[str] = ..., stretches: _Optional[_Iterable[_Union[StretchScores, _Mapping]]] = ...) -> None: ...

class StretchScores(_message.Message):
    __slots__ = ("logprobs", "drawn", "expected", "stop_chances", "stopped", "below", "collisions")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    STOP_CHANCES_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    BELOW_FIELD_NUMBER: _ClassVar[int]
    COLLISIONS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    drawn: _containers.RepeatedScalarFieldContainer[float]
    expected: _containers.RepeatedScalarFieldContainer[float]
    stop_chances: _containers.RepeatedScalarFieldContainer[float]
    stopped: _containers.RepeatedScalarFieldContainer[float]
    below: _containers.RepeatedScalarFieldContainer[float]
    collisions: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., drawn: _Optional[_Iterable[float]] = ..., expected: _Optional[_Iterable[float]] = ..., stop_chances: _Optional[_Iterable[float]] = ..., stopped: _Optional[_Iterable[float]] = ..., below: _Optional[_Iterable[float]] = ..., collisions: _Optional[_Iterable[float]] = ...) -> None: ...

class ScoringLease(_message.Message):
    __slots__ = ("lease_id", "token_ids", "sampling", "stretches", "within_s")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STRETCHES_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _rollout_pb2.SamplingParams
    stretches: _containers.RepeatedCompositeFieldContainer[Stretch]
    within_s: float
    def __init__(self, lease_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_rollout_pb2.SamplingParams, _Mapping]] = ..., stretches: _Optional[_Iterable[_Union[Stretch, _Mapping]]] = ..., within_s: _Optional[float] = ...) -> None: ...

class Stretch(_message.Message):
    __slots__ = ("version", "first", "count", "group_id", "position")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    version: int
    first: int
    count: int
    group_id: str
    position: int
    def __init__(self, version: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., group_id: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...
