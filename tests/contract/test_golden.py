"""The bytes of every message on the wire and in the journal: a field that is renumbered, retyped or dropped is another protocol.

Each message is filled with values that follow from its fields' names, one line for each alternative of a oneof. After a change
that is meant (and a new protocol version where old and new no longer understand each other), `python -m tests.contract.test_golden`
writes the file anew.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from echo2.wire.gen.echo2.v1 import (
    broadcast_pb2,
    coordinator_pb2,
    enrolment_pb2,
    ingest_pb2,
    journal_pb2,
    probe_pb2,
    rollout_pb2,
)

FILE = Path(__file__).with_name("golden") / "messages.txt"
FILES = (broadcast_pb2, coordinator_pb2, enrolment_pb2, ingest_pb2, journal_pb2, probe_pb2, rollout_pb2)
F = FieldDescriptor


def number_of(field: FieldDescriptor, place: int) -> int:
    """By its name: another number for a field changes the bytes, not the value."""
    digest = hashlib.blake2b(f"{field.full_name}/{place}".encode(), digest_size=2).digest()
    return 1 + int.from_bytes(digest, "big") % 9973


def value_of(field: FieldDescriptor, place: int) -> Any:
    if field.message_type is not None:
        return filled(field.message_type, depth=1)
    number = number_of(field, place)
    match field.cpp_type:
        case F.CPPTYPE_BOOL:
            return True
        case F.CPPTYPE_DOUBLE | F.CPPTYPE_FLOAT:
            return number / 8
        case F.CPPTYPE_ENUM:
            return field.enum_type.values[1 + number % (len(field.enum_type.values) - 1)].number
        case F.CPPTYPE_STRING:
            text = f"{field.name}-{number}"
            return text.encode() if field.type == F.TYPE_BYTES else text
    return number


def filled(kind: Descriptor, alternative: str = "", depth: int = 0) -> Message:
    """Every field set, twice where it is repeated; of a oneof the `alternative`, or the first."""
    made = GetMessageClass(kind)()
    for field in kind.fields:
        chosen = field.containing_oneof
        if chosen is not None and field.name != (alternative or chosen.fields[0].name):
            continue
        values = [value_of(field, place) for place in range(2 if field.is_repeated else 1)]
        if field.is_repeated:
            getattr(made, field.name).extend(values)
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(values[0])
            getattr(made, field.name).SetInParent()
        else:
            setattr(made, field.name, values[0])
    return made


def kinds() -> Iterator[tuple[str, Descriptor, str]]:
    """Every message, by its name, and by that of the alternative where it has some."""
    for file in FILES:
        for kind in file.DESCRIPTOR.message_types_by_name.values():
            alternatives = [field.name for field in kind.oneofs[0].fields] if kind.oneofs else [""]
            for alternative in alternatives:
                yield f"{kind.full_name}{'.' if alternative else ''}{alternative}", kind, alternative


KINDS = {name: (kind, alternative) for name, kind, alternative in kinds()}


LINES = FILE.read_text().splitlines() if FILE.exists() else []
GOLDEN = {name: data for name, _, data in (line.partition(" ") for line in LINES)}


def test_every_message_has_its_bytes_and_nothing_else_has() -> None:
    assert set(GOLDEN) == set(KINDS), "python -m tests.contract.test_golden writes the file, once the change is meant"


@pytest.mark.parametrize("name", KINDS)
def test_a_message_has_the_bytes_that_it_has_always_had(name: str) -> None:
    kind, alternative = KINDS[name]
    made = filled(kind, alternative)
    assert made.SerializeToString(deterministic=True).hex() == GOLDEN[name], (
        f"{name}: another protocol; if that is meant, python -m tests.contract.test_golden"
    )
    assert GetMessageClass(kind).FromString(bytes.fromhex(GOLDEN[name])) == made


if __name__ == "__main__":
    lines = [
        f"{name} {filled(kind, other).SerializeToString(deterministic=True).hex()}"
        for name, (kind, other) in KINDS.items()
    ]
    FILE.write_text("\n".join(lines) + "\n")
