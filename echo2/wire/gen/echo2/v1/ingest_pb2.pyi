from echo2.wire.gen.echo2.v1 import bounds_pb2 as _bounds_pb2
from echo2.wire.gen.echo2.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RolloutReport(_message.Message):
    __slots__ = ("sequence", "ticket", "lease_id", "segments", "draws_by_seed", "keeps_cache", "engine_kind")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DRAWS_BY_SEED_FIELD_NUMBER: _ClassVar[int]
    KEEPS_CACHE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_KIND_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    ticket: _rollout_pb2.LeaseTicket
    lease_id: str
    segments: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.RolloutSegment]
    draws_by_seed: bool
    keeps_cache: bool
    engine_kind: str
    def __init__(self, sequence: _Optional[int] = ..., ticket: _Optional[_Union[_rollout_pb2.LeaseTicket, _Mapping]] = ..., lease_id: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[_rollout_pb2.RolloutSegment, _Mapping]]] = ..., draws_by_seed: _Optional[bool] = ..., keeps_cache: _Optional[bool] = ..., engine_kind: _Optional[str] = ...) -> None: ...

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
