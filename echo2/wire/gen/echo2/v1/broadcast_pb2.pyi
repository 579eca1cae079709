from echo2.wire.gen.echo2.v1 import bounds_pb2 as _bounds_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerMessage(_message.Message):
    __slots__ = ("hello", "header", "chunk", "seal", "have", "request", "cancel", "relay_ack", "width_wish", "route", "is_answer")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RELAY_ACK_FIELD_NUMBER: _ClassVar[int]
    WIDTH_WISH_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    IS_ANSWER_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    header: ArtifactHeader
    chunk: ChunkFrame
    seal: ArtifactSeal
    have: HaveMap
    request: ChunkRequest
    cancel: ChunkCancel
    relay_ack: RelayAck
    width_wish: WidthWish
    route: Route
    is_answer: bool
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., header: _Optional[_Union[ArtifactHeader, _Mapping]] = ..., chunk: _Optional[_Union[ChunkFrame, _Mapping]] = ..., seal: _Optional[_Union[ArtifactSeal, _Mapping]] = ..., have: _Optional[_Union[HaveMap, _Mapping]] = ..., request: _Optional[_Union[ChunkRequest, _Mapping]] = ..., cancel: _Optional[_Union[ChunkCancel, _Mapping]] = ..., relay_ack: _Optional[_Union[RelayAck, _Mapping]] = ..., width_wish: _Optional[_Union[WidthWish, _Mapping]] = ..., route: _Optional[_Union[Route, _Mapping]] = ..., is_answer: _Optional[bool] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("protocol_version", "run_id", "is_further")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    IS_FURTHER_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    is_further: bool
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., is_further: _Optional[bool] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("epoch", "tree")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    tree: int
    def __init__(self, epoch: _Optional[int] = ..., tree: _Optional[int] = ...) -> None: ...

class ArtifactHeader(_message.Message):
    __slots__ = ("version", "parent", "has_parent", "run_id", "lineage", "published_unix_s", "full_snapshot_bytes", "is_pushed", "publisher_peer_id", "signature")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    HAS_PARENT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    FULL_SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_PUSHED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHER_PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    version: int
    parent: int
    has_parent: bool
    run_id: str
    lineage: str
    published_unix_s: float
    full_snapshot_bytes: int
    is_pushed: bool
    publisher_peer_id: str
    signature: bytes
    def __init__(self, version: _Optional[int] = ..., parent: _Optional[int] = ..., has_parent: _Optional[bool] = ..., run_id: _Optional[str] = ..., lineage: _Optional[str] = ..., published_unix_s: _Optional[float] = ..., full_snapshot_bytes: _Optional[int] = ..., is_pushed: _Optional[bool] = ..., publisher_peer_id: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ChunkFrame(_message.Message):
    __slots__ = ("key", "index", "ends_block", "signature", "payload")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ENDS_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    index: int
    ends_block: bool
    signature: bytes
    payload: bytes
    def __init__(self, key: _Optional[bytes] = ..., index: _Optional[int] = ..., ends_block: _Optional[bool] = ..., signature: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ArtifactSeal(_message.Message):
    __slots__ = ("key", "chunk_count", "total_bytes", "root_sha256", "fingerprint", "signature")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOT_SHA256_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    chunk_count: int
    total_bytes: int
    root_sha256: bytes
    fingerprint: str
    signature: bytes
    def __init__(self, key: _Optional[bytes] = ..., chunk_count: _Optional[int] = ..., total_bytes: _Optional[int] = ..., root_sha256: _Optional[bytes] = ..., fingerprint: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class HaveMap(_message.Message):
    __slots__ = ("key", "bitmap", "is_sealed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    IS_SEALED_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    bitmap: bytes
    is_sealed: bool
    def __init__(self, key: _Optional[bytes] = ..., bitmap: _Optional[bytes] = ..., is_sealed: _Optional[bool] = ...) -> None: ...

class ChunkRequest(_message.Message):
    __slots__ = ("key", "indices")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[bytes] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class ChunkCancel(_message.Message):
    __slots__ = ("key", "indices")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[bytes] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class RelayAck(_message.Message):
    __slots__ = ("key", "index", "backlog", "is_slow")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    IS_SLOW_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    index: int
    backlog: int
    is_slow: bool
    def __init__(self, key: _Optional[bytes] = ..., index: _Optional[int] = ..., backlog: _Optional[int] = ..., is_slow: _Optional[bool] = ...) -> None: ...

class WidthWish(_message.Message):
    __slots__ = ("connections",)
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    connections: int
    def __init__(self, connections: _Optional[int] = ...) -> None: ...

class BroadcastPlan(_message.Message):
    __slots__ = ("epoch", "nodes", "topology", "trees", "predicted_s", "predicted_bytes", "reason", "others")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    nodes: _containers.RepeatedCompositeFieldContainer[PlanNode]
    topology: str
    trees: _containers.RepeatedCompositeFieldContainer[PlanTree]
    predicted_s: _containers.RepeatedScalarFieldContainer[float]
    predicted_bytes: int
    reason: str
    others: _containers.RepeatedCompositeFieldContainer[PlanTree]
    def __init__(self, epoch: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[PlanNode, _Mapping]]] = ..., topology: _Optional[str] = ..., trees: _Optional[_Iterable[_Union[PlanTree, _Mapping]]] = ..., predicted_s: _Optional[_Iterable[float]] = ..., predicted_bytes: _Optional[int] = ..., reason: _Optional[str] = ..., others: _Optional[_Iterable[_Union[PlanTree, _Mapping]]] = ...) -> None: ...

class PlanNode(_message.Message):
    __slots__ = ("peer_id", "name", "addresses", "uplink_bytes_per_s", "downlink_bytes_per_s", "rtt_s", "access", "is_late", "region")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    UPLINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    IS_LATE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    rtt_s: float
    access: PeerAccess
    is_late: bool
    region: str
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., uplink_bytes_per_s: _Optional[float] = ..., downlink_bytes_per_s: _Optional[float] = ..., rtt_s: _Optional[float] = ..., access: _Optional[_Union[PeerAccess, _Mapping]] = ..., is_late: _Optional[bool] = ..., region: _Optional[str] = ...) -> None: ...

class PeerAccess(_message.Message):
    __slots__ = ("lan_addresses", "public_host", "relays", "met")
    LAN_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_HOST_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    lan_addresses: _containers.RepeatedScalarFieldContainer[str]
    public_host: str
    relays: _containers.RepeatedScalarFieldContainer[str]
    met: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lan_addresses: _Optional[_Iterable[str]] = ..., public_host: _Optional[str] = ..., relays: _Optional[_Iterable[str]] = ..., met: _Optional[_Iterable[str]] = ...) -> None: ...

class PlanTree(_message.Message):
    __slots__ = ("weight", "parents")
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    weight: float
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, weight: _Optional[float] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...
