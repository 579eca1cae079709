"""How much each field of each message may hold, as its declaration in proto/ says, and the check that every receiver makes.

Guarantees: what `check` accepts holds only numbers within their bounds (so no NaN), texts, bytes and lists within their sizes,
and declared enum values; it visits each field once and keeps nothing. A field without a bound is a bug of ours, which a test
finds before any message does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from echo2.base.errors import MalformedMessage
from echo2.broadcast.artifact import CHUNKS_MAX, KEY_BYTES, VERSION_MAX
from echo2.wire.gen.echo2.v1 import bounds_pb2 as kinds, coordinator_pb2

ID_CHARS_MAX = 128  # a peer id has 52, a group's id up to 40
MESSAGE_CHARS_MAX = 2000  # a screen of text
TOKEN_ID_MAX = (1 << 31) - 1  # int32; vocabularies end below a million
ROLLOUT_TOKENS_MAX = 1 << 20  # a context of a million tokens
ROLLOUTS_PER_GROUP_MAX = 4096  # as task.eval_samples
NODES_MAX = 20_000  # as the workers of a run (coordinator/hub.WORKERS_MAX)


@dataclass(frozen=True, slots=True)
class Number:
    high: float
    low: float = 0

    def check(self, name: str, value: float, origin: str) -> None:
        if not self.low <= value <= self.high:
            raise MalformedMessage(f"{name} of {origin}: expected {self.low:.16g} to {self.high:.16g}, got {value}")

    def check_all(self, name: str, values: Sequence[float], origin: str) -> None:
        self.check(name, min(values), origin)
        self.check(name, max(values), origin)
        if math.isnan(sum(values)):  # which `min` and `max` may miss
            raise MalformedMessage(f"{name} of {origin}: expected finite numbers, got one that is none")


@dataclass(frozen=True, slots=True)
class Text:
    """`is_printable`: must be printable, because it is shown on pages and in logs as it is."""

    chars_max: int
    is_printable: bool = True

    def check(self, name: str, value: str, origin: str) -> None:
        if len(value) > self.chars_max or (self.is_printable and not value.isprintable()):
            kind = "printable characters" if self.is_printable else "characters"
            raise MalformedMessage(
                f"{name} of {origin}: expected up to {self.chars_max} {kind}, got {len(value)}: {value[:40]!r}"
            )


@dataclass(frozen=True, slots=True)
class Data:
    bytes_max: int

    def check(self, name: str, value: bytes, origin: str) -> None:
        _check_size(len(value), f"bytes of {name}", origin, self.bytes_max)


@dataclass(frozen=True, slots=True)
class Listed:
    """`each`: bound of the elements; None for messages, which have bounds of their own."""

    count_max: int
    each: Number | Text | Data | None = None

    def check(self, name: str, values: Sequence[Any], origin: str) -> None:
        _check_size(len(values), f"number of {name}", origin, self.count_max)
        match self.each:
            case None:
                for value in values:
                    check(value, origin)
            case Number():
                self.each.check_all(name, values, origin)
            case each:
                for value in values:
                    each.check(name, value, origin)


Bound = Number | Text | Data | Listed

_OF_KIND: dict[int, Number | Text | Data] = {
    kinds.ANY: Number((1 << 64) - 1),
    kinds.VERSION: Number(VERSION_MAX),
    kinds.COUNT: Number(1 << 62),
    kinds.BYTE_COUNT: Number(1 << 60),
    kinds.EPOCH: Number(1 << 53),
    kinds.RATE: Number(1e15),
    kinds.SECONDS: Number(1e9),
    kinds.UNIX_TIME: Number(1e12),
    kinds.USD: Number(1e12),
    kinds.SHARE: Number(1.0 + 1e-6),
    kinds.STALENESS: Number(64),
    kinds.TOKEN_COUNT: Number(ROLLOUT_TOKENS_MAX),
    kinds.GROUP_TOKENS: Number(ROLLOUTS_PER_GROUP_MAX * ROLLOUT_TOKENS_MAX),
    kinds.ROLLOUT_INDEX: Number(ROLLOUTS_PER_GROUP_MAX - 1),
    kinds.TOKEN_ID: Number(TOKEN_ID_MAX),
    kinds.LOGPROB: Number(1e-3, -1e6),
    kinds.REWARD: Number(1e12, -1e12),
    kinds.CHUNK_INDEX: Number(CHUNKS_MAX - 1),
    kinds.CHUNK_COUNT: Number(CHUNKS_MAX),
    kinds.NODE_COUNT: Number(NODES_MAX),
    kinds.ID: Text(ID_CHARS_MAX),
    kinds.NAME: Text(64),
    kinds.HEX: Text(128),
    kinds.HOST: Text(300),
    kinds.TEXT: Text(1000),
    kinds.WORDS: Text(MESSAGE_CHARS_MAX, False),
    kinds.LONG_WORDS: Text(20_000, False),
    kinds.SHOWN_TEXT: Text(4000, False),
    kinds.SECRET: Text(9000, False),
    kinds.KEY: Data(KEY_BYTES),
    kinds.SIGNATURE: Data(64),
    kinds.PEM: Data(64 << 10),
}


def bound_of(field: Any) -> Bound | None:
    """The bound that the declaration of a field (its descriptor) names; None if it names none."""
    options: Any = field.GetOptions()
    extensions = options.Extensions
    each: Number | Text | Data | None = _OF_KIND.get(extensions[kinds.holds])
    if each is None and options.HasExtension(kinds.max):
        match field.type:
            case FieldDescriptor.TYPE_STRING:
                each = Text(int(extensions[kinds.max]), not extensions[kinds.any_text])
            case FieldDescriptor.TYPE_BYTES:
                each = Data(int(extensions[kinds.max]))
            case _:
                each = Number(extensions[kinds.max])
    return Listed(extensions[kinds.most], each) if extensions[kinds.most] else each


def most_of(kind: type[Message], name: str) -> int:
    """How much a list or a text of a message may hold, for those who fill it."""
    match bound_of(kind.DESCRIPTOR.fields_by_name[name]):
        case Listed(count_max):
            return count_max
        case Text(chars_max):
            return chars_max
    raise AssertionError(f"{name}: expected a list or a text")


LOG_LINES_MAX = most_of(coordinator_pb2.LogTail, "lines")
LOG_CHARS_MAX = most_of(coordinator_pb2.LogLine, "text")
WAITS_CHARS_MAX = most_of(coordinator_pb2.LearnerReport, "waits_for")
REASON_CHARS_MAX = most_of(coordinator_pb2.WorkerAccused, "reason")
LENGTH_SHARES_MAX = most_of(coordinator_pb2.LearnerReport, "lengths")
ROLLOUTS_SHOWN_MAX = most_of(coordinator_pb2.RolloutsShown, "rollouts")
TOKENS_SHOWN_MAX = most_of(coordinator_pb2.RolloutsShown, "tokens")
SHOWN_CHARS_MAX = most_of(coordinator_pb2.RolloutsShown, "prompt")
SENDERS_SHOWN_MAX = most_of(coordinator_pb2.RolloutSummary, "peer_ids")
TURNS_SHOWN_MAX = most_of(coordinator_pb2.RolloutsShown, "turns")
TOKEN_CHARS_MAX = most_of(coordinator_pb2.TokenShown, "text")
TURN_CHARS_MAX = most_of(coordinator_pb2.TurnShown, "text")


def check(message: Message, origin: str) -> None:
    """Raises MalformedMessage for the first field out of bounds, in `message` or in nested messages."""
    rules = _rules_of(message.DESCRIPTOR)
    for field, value in message.ListFields():
        rules[field.number](value, origin)


_Rule = Callable[[Any, str], None]


@functools.cache
def _rules_of(kind: Descriptor) -> dict[int, _Rule]:
    return {field.number: _rule(field, bound_of(field)) for field in kind.fields}


def needs_bound(field: FieldDescriptor) -> bool:
    """Whether the declaration must name a bound: all except single messages, flags and enums, which bound themselves."""
    unbounded_types = (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_ENUM)
    return field.is_repeated or field.type not in unbounded_types


def _rule(field: FieldDescriptor, bound: Bound | None) -> _Rule:
    assert bound is not None or not needs_bound(field), f"{field.full_name}: expected a bound in proto/, got none"
    if bound is not None:
        return functools.partial(bound.check, field.name)
    if field.enum_type is not None:
        known = frozenset(value.number for value in field.enum_type.values)
        return functools.partial(_check_known, field.name, known)
    return check if field.message_type is not None else lambda value, origin: None


def _check_known(name: str, known: frozenset[int], value: int, origin: str) -> None:
    if value not in known:
        raise MalformedMessage(f"{name} of {origin}: expected a known one, got {value}")


def _check_size(size: int, what: str, origin: str, size_max: int) -> None:
    if size > size_max:
        raise MalformedMessage(f"{what} of {origin}: expected up to {size_max}, got {size}")


M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class _Field:
    """`kind`: how it is encoded (0: varint, 1: 8 bytes, 2: with its length, 5: 4 bytes). `bit`: of a field that a message has at
    most once; 0 for a list. `inner`: the fields of a message, by tag; None for anything else."""

    kind: int
    bit: int
    inner: _Shape | None


_Shape: TypeAlias = "Mapping[int, _Field]"
"""The fields of a message by tag: number and encoding."""
_VARINT, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5  # the even ones begin with a number
# Wire types of protobuf's fields.
_KINDS = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), _EIGHT),
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), _FOUR),
    **dict.fromkeys((FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE), _SIZED),
}


@dataclass(frozen=True, slots=True)
class CallLimits:
    bytes_max: int = 64 << 10
    fields_max: int = 256


CALLS: Mapping[str, CallLimits] = {
    "/echo2.v1.Coordinator/WorkerSession": CallLimits(2 << 20, 16_384),
    "/echo2.v1.Coordinator/LearnerSession": CallLimits(16 << 20, 262_144),
    "/echo2.v1.Ingest/Report": CallLimits(8 << 20, 65_536),
}
"""All other calls carry a name, a token or a ticket, and use the defaults."""
PEER_FRAME = CallLimits(8 << 20, 256)  # frames between peers; their lists are packed


def limits_of(method: str) -> CallLimits:
    return CALLS.get(method, CallLimits())


def parsed(kind: type[M], data: bytes, limits: CallLimits, origin: str) -> M:
    """Parses and checks a message: the only place where what a peer says is bounded, apart from replies, which gRPC parses.
    MalformedMessage beyond `limits` or the bounds of its fields, or if the bytes are not such a message."""
    if len(data) > limits.bytes_max:
        raise MalformedMessage(f"{origin}: expected a message of up to {limits.bytes_max} bytes, got {len(data)}")
    if problem := _problem(data, shape_of(kind.DESCRIPTOR), limits.fields_max):
        raise MalformedMessage(f"{origin}: expected a {kind.DESCRIPTOR.name} {problem}")
    problem = ""
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        problem = str(error)  # raised below, as an error within an error would keep the data
    if problem:
        raise MalformedMessage(
            f"{origin}: expected a {kind.DESCRIPTOR.name}, got {len(data)} bytes that are not ({problem})"
        )
    check(message, origin)
    return message


@functools.cache
def shape_of(descriptor: Descriptor) -> _Shape:
    """The message's shape. Our messages are not recursive, so this ends."""
    shape: dict[int, _Field] = {}
    for place, field in enumerate(descriptor.fields):
        kind = _SIZED if field.is_packed else _KINDS.get(field.type, _VARINT)
        bit = 0 if field.is_repeated and not field.is_packed else 1 << place
        inner = shape_of(field.message_type) if field.type == FieldDescriptor.TYPE_MESSAGE else None
        shape[field.number << 3 | kind] = _Field(kind, bit, inner)
    return shape


def _problem(data: bytes, shape: _Shape, fields_max: int) -> str:
    """What keeps `data` from being parsed; empty if it has at most `fields_max` fields at all depths, all of them known, and none
    twice where it is no list. Truncated data passes: the parser reports it."""
    left, at, end, present = fields_max, 0, len(data), 0
    above: list[tuple[int, _Shape, int]] = []
    try:
        while True:
            if at >= end:
                if not above:
                    return ""
                end, shape, present = above.pop()
                continue
            left -= 1
            if left < 0:
                return f"of up to {fields_max} fields"
            tag = data[at]
            at += 1
            if tag >= 0x80:
                tag, at = read_varint(data, at - 1)
            field = shape.get(tag)
            if field is None:
                return f"of this release, got its field {tag >> 3} in encoding {tag & 7}: use one release of echo2 everywhere"
            if present & field.bit:
                return f"with its field {tag >> 3} once, got it again"
            present |= field.bit
            kind = field.kind
            if not kind & 1:
                value = data[at]
                at += 1
                if value >= 0x80:
                    value, at = read_varint(data, at - 1)
                if kind == _VARINT:
                    continue
                if field.inner is None:
                    at += value
                else:
                    above.append((end, shape, present))
                    end, shape, present = min(end, at + value), field.inner, 0
            else:
                at += 8 if kind == _EIGHT else 4
    except IndexError:
        return ""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends. IndexError beyond the data, or for one of more than ten bytes."""
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


# Converts messages and core types by field name: a field with the same name on both sides is declared only in those two places.
#
# Guarantees: plain fields with the same name are copied, lists as tuples; the caller passes fields that hold messages or enums,
# and those that need a check. If a core type has a field without counterpart and default, its constructor raises.

T = TypeVar("T")
_NOT_PLAIN = {FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_ENUM}  # these need a conversion of their own


def core_of(message: Message, kind: type[T], **others: Any) -> T:
    """Builds a `kind` from `message`; `others`: the fields that are not copied by name."""
    names, read, listed = _shared(kind, type(message), tuple(others))
    others.update(zip(names, read(message), strict=True))
    for name in listed:
        others[name] = tuple(others[name])
    return kind(**others)


def message_of(core: object, kind: type[M], **others: Any) -> M:
    """Builds a message of `kind` from `core`; `others` as above. None leaves an optional field unset."""
    names, read, _ = _shared(type(core), kind, tuple(others))
    others.update(zip(names, read(core), strict=True))
    return kind(**others)


_Fields = tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]], tuple[str, ...]]
_known: dict[tuple[type[Any], type[Message], tuple[str, ...]], _Fields] = {}


def _shared(core: type[Any], message: type[Message], others: tuple[str, ...]) -> _Fields:
    """The common field names, a getter for them, and which of them are lists. Cached per combination of arguments."""
    fields = _known.get((core, message, others))
    if fields is None:
        fields = _known[core, message, others] = _looked_up(core, message, others)
    return fields


def _looked_up(core: type[Any], message: type[Message], others: tuple[str, ...]) -> _Fields:
    names_read = set(core.__dataclass_fields__) - set(others)
    plain = [field for field in message.DESCRIPTOR.fields if field.name in names_read and field.type not in _NOT_PLAIN]
    names = tuple(field.name for field in plain)
    assert names, f"{core.__name__} and {message.__name__} share no field"
    read: Callable[[object], Any] = attrgetter(*names)
    listed = tuple(field.name for field in plain if field.is_repeated)
    return names, read if len(names) > 1 else lambda source: (read(source),), listed
