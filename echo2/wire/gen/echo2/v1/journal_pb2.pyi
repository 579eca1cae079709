from echo2.wire.gen.echo2.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalRecord(_message.Message):
    __slots__ = ("header", "opened", "rollout", "batch", "published", "closed", "scored")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    header: JournalHeader
    opened: OpenedGroup
    rollout: FinishedRollout
    batch: DrawnBatch
    published: PublishedVersion
    closed: ClosedGroup
    scored: ScoredEpisode
    def __init__(self, header: _Optional[_Union[JournalHeader, _Mapping]] = ..., opened: _Optional[_Union[OpenedGroup, _Mapping]] = ..., rollout: _Optional[_Union[FinishedRollout, _Mapping]] = ..., batch: _Optional[_Union[DrawnBatch, _Mapping]] = ..., published: _Optional[_Union[PublishedVersion, _Mapping]] = ..., closed: _Optional[_Union[ClosedGroup, _Mapping]] = ..., scored: _Optional[_Union[ScoredEpisode, _Mapping]] = ...) -> None: ...

class JournalHeader(_message.Message):
    __slots__ = ("format", "run_id", "step", "cursor", "published")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    format: int
    run_id: str
    step: int
    cursor: int
    published: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, format: _Optional[int] = ..., run_id: _Optional[str] = ..., step: _Optional[int] = ..., cursor: _Optional[int] = ..., published: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenedGroup(_message.Message):
    __slots__ = ("cursor", "retry", "group")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    retry: int
    group: _rollout_pb2.GroupSpec
    def __init__(self, cursor: _Optional[int] = ..., retry: _Optional[int] = ..., group: _Optional[_Union[_rollout_pb2.GroupSpec, _Mapping]] = ...) -> None: ...

class FinishedRollout(_message.Message):
    __slots__ = ("rollout", "senders")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.RolloutSegment
    senders: _containers.RepeatedCompositeFieldContainer[Sender]
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.RolloutSegment, _Mapping]] = ..., senders: _Optional[_Iterable[_Union[Sender, _Mapping]]] = ...) -> None: ...

class DrawnBatch(_message.Message):
    __slots__ = ("step", "groups")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    step: int
    groups: _containers.RepeatedCompositeFieldContainer[DrawnGroup]
    def __init__(self, step: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[DrawnGroup, _Mapping]]] = ...) -> None: ...

class DrawnGroup(_message.Message):
    __slots__ = ("group_id", "rewards")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    rewards: _containers.RepeatedCompositeFieldContainer[DrawnReward]
    def __init__(self, group_id: _Optional[str] = ..., rewards: _Optional[_Iterable[_Union[DrawnReward, _Mapping]]] = ...) -> None: ...

class DrawnReward(_message.Message):
    __slots__ = ("is_failed", "value")
    IS_FAILED_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    is_failed: bool
    value: float
    def __init__(self, is_failed: _Optional[bool] = ..., value: _Optional[float] = ...) -> None: ...

class PublishedVersion(_message.Message):
    __slots__ = ("version", "fingerprint")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    version: int
    fingerprint: str
    def __init__(self, version: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class ClosedGroup(_message.Message):
    __slots__ = ("group_id",)
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    def __init__(self, group_id: _Optional[str] = ...) -> None: ...

class ScoredEpisode(_message.Message):
    __slots__ = ("group_id", "chains", "is_failed", "value", "lost", "is_restarted")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    IS_FAILED_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    IS_RESTARTED_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    chains: _containers.RepeatedScalarFieldContainer[int]
    is_failed: bool
    value: float
    lost: _containers.RepeatedScalarFieldContainer[int]
    is_restarted: bool
    def __init__(self, group_id: _Optional[str] = ..., chains: _Optional[_Iterable[int]] = ..., is_failed: _Optional[bool] = ..., value: _Optional[float] = ..., lost: _Optional[_Iterable[int]] = ..., is_restarted: _Optional[bool] = ...) -> None: ...

class Sender(_message.Message):
    __slots__ = ("peer_id", "tokens")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    tokens: int
    def __init__(self, peer_id: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...
