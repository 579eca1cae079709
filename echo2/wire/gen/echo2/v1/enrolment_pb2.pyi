from echo2.wire.gen.echo2.v1 import bounds_pb2 as _bounds_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class WheelRequest(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class WheelBlock(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("protocol_version", "certificate_request_der")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_REQUEST_DER_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    certificate_request_der: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., certificate_request_der: _Optional[bytes] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate_pem",)
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    def __init__(self, certificate_pem: _Optional[bytes] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("protocol_version", "token", "role", "certificate_request_der")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_REQUEST_DER_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    token: str
    role: str
    certificate_request_der: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., token: _Optional[str] = ..., role: _Optional[str] = ..., certificate_request_der: _Optional[bytes] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("certificate_pem", "authority_pem", "run_id", "coordinator_peer_id", "coordinator_address", "certificate_expires_unix_s")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_PEM_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_PEER_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    authority_pem: bytes
    run_id: str
    coordinator_peer_id: str
    coordinator_address: str
    certificate_expires_unix_s: float
    def __init__(self, certificate_pem: _Optional[bytes] = ..., authority_pem: _Optional[bytes] = ..., run_id: _Optional[str] = ..., coordinator_peer_id: _Optional[str] = ..., coordinator_address: _Optional[str] = ..., certificate_expires_unix_s: _Optional[float] = ...) -> None: ...
