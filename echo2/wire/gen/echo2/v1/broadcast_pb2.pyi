from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ArtifactId(_message.Message):
    __slots__ = ("version", "parent", "has_parent")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    HAS_PARENT_FIELD_NUMBER: _ClassVar[int]
    version: int
    parent: int
    has_parent: bool
    def __init__(self, version: _Optional[int] = ..., parent: _Optional[int] = ..., has_parent: _Optional[bool] = ...) -> None: ...

class PeerMessage(_message.Message):
    __slots__ = ("hello", "header", "chunk", "seal", "have", "request", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    header: ArtifactHeader
    chunk: ChunkFrame
    seal: ArtifactSeal
    have: HaveMap
    request: ChunkRequest
    cancel: ChunkCancel
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., header: _Optional[_Union[ArtifactHeader, _Mapping]] = ..., chunk: _Optional[_Union[ChunkFrame, _Mapping]] = ..., seal: _Optional[_Union[ArtifactSeal, _Mapping]] = ..., have: _Optional[_Union[HaveMap, _Mapping]] = ..., request: _Optional[_Union[ChunkRequest, _Mapping]] = ..., cancel: _Optional[_Union[ChunkCancel, _Mapping]] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("protocol_version", "run_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ...) -> None: ...

class ArtifactHeader(_message.Message):
    __slots__ = ("id", "run_id", "lineage", "published_unix_s", "full_snapshot_bytes", "signature")
    ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    FULL_SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    id: ArtifactId
    run_id: str
    lineage: str
    published_unix_s: float
    full_snapshot_bytes: int
    signature: bytes
    def __init__(self, id: _Optional[_Union[ArtifactId, _Mapping]] = ..., run_id: _Optional[str] = ..., lineage: _Optional[str] = ..., published_unix_s: _Optional[float] = ..., full_snapshot_bytes: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ChunkFrame(_message.Message):
    __slots__ = ("id", "index", "payload", "sha256", "signature")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    id: ArtifactId
    index: int
    payload: bytes
    sha256: bytes
    signature: bytes
    def __init__(self, id: _Optional[_Union[ArtifactId, _Mapping]] = ..., index: _Optional[int] = ..., payload: _Optional[bytes] = ..., sha256: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ArtifactSeal(_message.Message):
    __slots__ = ("id", "chunk_count", "total_bytes", "root_sha256", "fingerprint", "signature")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOT_SHA256_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    id: ArtifactId
    chunk_count: int
    total_bytes: int
    root_sha256: bytes
    fingerprint: str
    signature: bytes
    def __init__(self, id: _Optional[_Union[ArtifactId, _Mapping]] = ..., chunk_count: _Optional[int] = ..., total_bytes: _Optional[int] = ..., root_sha256: _Optional[bytes] = ..., fingerprint: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class HaveMap(_message.Message):
    __slots__ = ("id", "chunk_count", "bitmap", "is_sealed")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    IS_SEALED_FIELD_NUMBER: _ClassVar[int]
    id: ArtifactId
    chunk_count: int
    bitmap: bytes
    is_sealed: bool
    def __init__(self, id: _Optional[_Union[ArtifactId, _Mapping]] = ..., chunk_count: _Optional[int] = ..., bitmap: _Optional[bytes] = ..., is_sealed: _Optional[bool] = ...) -> None: ...

class ChunkRequest(_message.Message):
    __slots__ = ("id", "indices")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    id: ArtifactId
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[_Union[ArtifactId, _Mapping]] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class ChunkCancel(_message.Message):
    __slots__ = ("id", "indices")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    id: ArtifactId
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[_Union[ArtifactId, _Mapping]] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class BroadcastPlan(_message.Message):
    __slots__ = ("epoch", "nodes", "topology", "predicted_s_per_gb", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_PER_GB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    nodes: _containers.RepeatedCompositeFieldContainer[PlanNode]
    topology: str
    predicted_s_per_gb: float
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[PlanNode, _Mapping]]] = ..., topology: _Optional[str] = ..., predicted_s_per_gb: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class PlanNode(_message.Message):
    __slots__ = ("peer_id", "addresses", "relay_weight", "uplink_bytes_per_s", "downlink_bytes_per_s", "name", "neighbours")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    RELAY_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    UPLINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    relay_weight: float
    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    name: str
    neighbours: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., relay_weight: _Optional[float] = ..., uplink_bytes_per_s: _Optional[float] = ..., downlink_bytes_per_s: _Optional[float] = ..., name: _Optional[str] = ..., neighbours: _Optional[_Iterable[str]] = ...) -> None: ...
