from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    ANY: _ClassVar[Kind]
    VERSION: _ClassVar[Kind]
    COUNT: _ClassVar[Kind]
    BYTE_COUNT: _ClassVar[Kind]
    EPOCH: _ClassVar[Kind]
    RATE: _ClassVar[Kind]
    SECONDS: _ClassVar[Kind]
    UNIX_TIME: _ClassVar[Kind]
    USD: _ClassVar[Kind]
    SHARE: _ClassVar[Kind]
    STALENESS: _ClassVar[Kind]
    TOKEN_COUNT: _ClassVar[Kind]
    GROUP_TOKENS: _ClassVar[Kind]
    ROLLOUT_INDEX: _ClassVar[Kind]
    TOKEN_ID: _ClassVar[Kind]
    LOGPROB: _ClassVar[Kind]
    REWARD: _ClassVar[Kind]
    CHUNK_INDEX: _ClassVar[Kind]
    CHUNK_COUNT: _ClassVar[Kind]
    NODE_COUNT: _ClassVar[Kind]
    ID: _ClassVar[Kind]
    NAME: _ClassVar[Kind]
    HEX: _ClassVar[Kind]
    HOST: _ClassVar[Kind]
    TEXT: _ClassVar[Kind]
    WORDS: _ClassVar[Kind]
    LONG_WORDS: _ClassVar[Kind]
    SHOWN_TEXT: _ClassVar[Kind]
    SECRET: _ClassVar[Kind]
    KEY: _ClassVar[Kind]
    SIGNATURE: _ClassVar[Kind]
    PEM: _ClassVar[Kind]
KIND_UNSPECIFIED: Kind
ANY: Kind
VERSION: Kind
COUNT: Kind
BYTE_COUNT: Kind
EPOCH: Kind
RATE: Kind
SECONDS: Kind
UNIX_TIME: Kind
USD: Kind
SHARE: Kind
STALENESS: Kind
TOKEN_COUNT: Kind
GROUP_TOKENS: Kind
ROLLOUT_INDEX: Kind
TOKEN_ID: Kind
LOGPROB: Kind
REWARD: Kind
CHUNK_INDEX: Kind
CHUNK_COUNT: Kind
NODE_COUNT: Kind
ID: Kind
NAME: Kind
HEX: Kind
HOST: Kind
TEXT: Kind
WORDS: Kind
LONG_WORDS: Kind
SHOWN_TEXT: Kind
SECRET: Kind
KEY: Kind
SIGNATURE: Kind
PEM: Kind
HOLDS_FIELD_NUMBER: _ClassVar[int]
holds: _descriptor.FieldDescriptor
MAX_FIELD_NUMBER: _ClassVar[int]
max: _descriptor.FieldDescriptor
MOST_FIELD_NUMBER: _ClassVar[int]
most: _descriptor.FieldDescriptor
ANY_TEXT_FIELD_NUMBER: _ClassVar[int]
any_text: _descriptor.FieldDescriptor
