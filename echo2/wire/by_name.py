"""Converts messages and core types by field name: a field with the same name on both sides is declared only in those two places.

Guarantees: plain fields with the same name are copied, lists as tuples; the caller passes fields that hold messages or enums,
and those that need a check. If a core type has a field without counterpart and default, its constructor raises.
Leaves to others: bounds (bounds, rollout); that no field is forgotten (tests/unit/wire/test_messages).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

T = TypeVar("T")
M = TypeVar("M", bound=Message)
_NOT_PLAIN = {FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_ENUM}  # these need a conversion of their own


def core_of(message: Message, kind: type[T], **given: Any) -> T:
    """Builds a `kind` from `message`; `given`: the fields that are not copied by name."""
    names, read, listed = _shared(kind, type(message), tuple(given))
    given.update(zip(names, read(message), strict=True))
    for name in listed:
        given[name] = tuple(given[name])
    return kind(**given)


def message_of(made: object, kind: type[M], **given: Any) -> M:
    """Builds a message of `kind` from `made`; `given` as above. None leaves an optional field unset."""
    names, read, _ = _shared(type(made), kind, tuple(given))
    given.update(zip(names, read(made), strict=True))
    return kind(**given)


_Fields = tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]], tuple[str, ...]]
_known: dict[tuple[type[Any], type[Message], tuple[str, ...]], _Fields] = {}


def _shared(core: type[Any], message: type[Message], given: tuple[str, ...]) -> _Fields:
    """The common field names, a getter for them, and which of them are lists. Cached per combination of arguments."""
    fields = _known.get((core, message, given))
    if fields is None:
        fields = _known[core, message, given] = _looked_up(core, message, given)
    return fields


def _looked_up(core: type[Any], message: type[Message], given: tuple[str, ...]) -> _Fields:
    own = set(core.__dataclass_fields__) - set(given)
    plain = [field for field in message.DESCRIPTOR.fields if field.name in own and field.type not in _NOT_PLAIN]
    names = tuple(field.name for field in plain)
    assert names, f"{core.__name__} and {message.__name__} share no field"
    read: Callable[[object], Any] = attrgetter(*names)
    listed = tuple(field.name for field in plain if field.is_repeated)
    return names, read if len(names) > 1 else lambda one: (read(one),), listed
