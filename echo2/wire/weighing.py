"""Estimates from a message's bytes what parsing it would cost, before anything is allocated.

protobuf allocates a few hundred bytes per submessage, and an empty one takes two bytes on the wire: 15 MiB of
them become 600 MB. Guarantees: `parsed` creates at most `fields_max` fields of a message, whatever its bytes say; beyond that,
and for bytes that are not a message, it raises MalformedMessage. Packed lists count once: they grow at most eightfold. Takes
about a microsecond per field.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from echo2.base.errors import MalformedMessage

M = TypeVar("M", bound=Message)
_Shape: TypeAlias = "Mapping[int, _Shape]"
"""The fields of a message that are messages themselves, by field number."""
_FIXED_BYTES = {1: 8, 5: 4}


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of one message of a call."""

    bytes_max: int = 64 << 10
    fields_max: int = 256


CALLS: Mapping[str, CallLimits] = {
    "/echo2.v1.Coordinator/WorkerSession": CallLimits(2 << 20, 65_536),
    "/echo2.v1.Coordinator/LearnerSession": CallLimits(16 << 20, 262_144),
    "/echo2.v1.Ingest/Report": CallLimits(8 << 20, 65_536),
    "/echo2.v1.Operator/GetOutlook": CallLimits(256 << 10, 8_192),
}
"""All other calls carry a name, a token or a ticket, and use the defaults."""
PEER_FRAME = CallLimits(8 << 20, 256)
"""Frames between peers; their lists are packed."""


def limits_of(method: str) -> CallLimits:
    """The limits of a call, given its full name `/package.Service/Method`."""
    return CALLS.get(method, CallLimits())


def parsed(kind: type[M], data: bytes, limits: CallLimits, whose: str) -> M:
    """Parses a message; MalformedMessage beyond `limits`, or if the bytes are not such a message."""
    if len(data) > limits.bytes_max:
        raise MalformedMessage(f"{whose}: expected a message of up to {limits.bytes_max} bytes, got {len(data)}")
    if not _is_within(data, shape_of(kind.DESCRIPTOR), limits.fields_max):
        raise MalformedMessage(f"{whose}: expected a {kind.DESCRIPTOR.name} of up to {limits.fields_max} fields")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedMessage(
            f"{whose}: expected a {kind.DESCRIPTOR.name}, got {len(data)} bytes that are not ({error})"
        ) from None


@functools.cache
def shape_of(descriptor: Descriptor) -> _Shape:
    """The message's shape. Our messages are not recursive, so this ends."""
    return {
        field.number: shape_of(field.message_type)
        for field in descriptor.fields
        if field.type == FieldDescriptor.TYPE_MESSAGE
    }


def _is_within(data: bytes, shape: _Shape, fields_max: int) -> bool:
    """Whether `data` has at most `fields_max` fields, at all depths. Truncated data passes: the parser reports it."""
    left, at, end = fields_max, 0, len(data)
    above: list[tuple[int, _Shape]] = []
    try:
        while True:
            if at >= end:
                if not above:
                    return True
                end, shape = above.pop()
                continue
            left -= 1
            if left < 0:
                return False
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == 2:
                size, at = _varint(data, at)
                inner = shape.get(tag >> 3)
                if inner is None:
                    at += size
                else:
                    above.append((end, shape))
                    end, shape = min(end, at + size), inner
            elif kind == 0:
                _, at = _varint(data, at)
            elif kind in _FIXED_BYTES:
                at += _FIXED_BYTES[kind]
            else:
                return False  # groups, which none of our messages has
    except IndexError:
        return True


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise IndexError("a number of more than ten bytes")
