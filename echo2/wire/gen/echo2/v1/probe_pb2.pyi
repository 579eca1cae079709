from echo2.wire.gen.echo2.v1 import bounds_pb2 as _bounds_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ReachRequest(_message.Message):
    __slots__ = ("protocol_version", "token", "port", "nonce")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    token: str
    port: int
    nonce: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., token: _Optional[str] = ..., port: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ReachReply(_message.Message):
    __slots__ = ("host", "port", "is_dialled", "failure", "has_relay", "unix_s", "role", "token_problem")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    IS_DIALLED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    HAS_RELAY_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    is_dialled: bool
    failure: str
    has_relay: bool
    unix_s: float
    role: str
    token_problem: str
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., is_dialled: _Optional[bool] = ..., failure: _Optional[str] = ..., has_relay: _Optional[bool] = ..., unix_s: _Optional[float] = ..., role: _Optional[str] = ..., token_problem: _Optional[str] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class ProbeBlock(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class UploadBlock(_message.Message):
    __slots__ = ("token", "data")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    token: str
    data: bytes
    def __init__(self, token: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("received_bytes", "bytes_per_s")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    bytes_per_s: float
    def __init__(self, received_bytes: _Optional[int] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...
