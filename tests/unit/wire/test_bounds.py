"""Every field of every message has a bound, the bound is kept, and what honest nodes send is within it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from echo2.base.errors import MalformedMessage
from echo2.wire.bounds import BOUNDS, Bound, Data, Listed, Number, Text, check, needs_bound
from echo2.wire.gen.echo2.v1 import (
    broadcast_pb2,
    coordinator_pb2,
    enrolment_pb2,
    ingest_pb2,
    probe_pb2,
    rollout_pb2,
)

FILES = (broadcast_pb2, coordinator_pb2, enrolment_pb2, ingest_pb2, probe_pb2, rollout_pb2)
"""Not the journal, which is never sent."""


def fields() -> Iterator[FieldDescriptor]:
    for file in FILES:
        for kind in file.DESCRIPTOR.message_types_by_name.values():
            yield from kind.fields


BOUNDED = [field for field in fields() if needs_bound(field)]


def test_each_number_text_list_and_bytes_of_each_message_has_a_bound_and_the_table_names_no_other() -> None:
    declared = {f"{message}.{field}" for message, bounds in BOUNDS.items() for field in bounds}
    assert declared == {f"{field.containing_type.name}.{field.name}" for field in BOUNDED}


def made(kind: Descriptor) -> Message:
    message: Message = GetMessageClass(kind)()
    return message


def beyond(field: FieldDescriptor, bound: Bound) -> Iterator[object]:
    """Values just over the bound, and what is no number at all; none where the type itself holds less."""
    match bound:
        case Number(high, low):
            is_real = field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
            if is_real:
                yield from (math.nan, -math.inf)
                if high < math.inf:
                    yield math.inf
                if low == 0:
                    yield -1e-3
            elif high < (1 << (64 if field.type == FieldDescriptor.TYPE_UINT64 else 32)) - 1:
                yield int(high) + 1
        case Text(chars_max, is_printable):
            yield "x" * (chars_max + 1)
            if is_printable:
                yield "a\x1b[2Jb"
        case Data(bytes_max):
            yield b"x" * (bytes_max + 1)
        case Listed():
            raise AssertionError("of one value")


@pytest.mark.parametrize("field", BOUNDED, ids=lambda field: f"{field.containing_type.name}.{field.name}")
def test_a_field_over_its_bound_is_refused_by_name(field: FieldDescriptor) -> None:
    bound = BOUNDS[field.containing_type.name][field.name]
    if not isinstance(bound, Listed):
        for value in beyond(field, bound):
            message = made(field.containing_type)
            setattr(message, field.name, value)
            with pytest.raises(MalformedMessage, match=f"{field.name} of the sender"):
                check(message, "the sender")
        return
    message = made(field.containing_type)
    values = getattr(message, field.name)
    if bound.each is None:
        for _ in range(bound.count_max + 1):
            values.add()
    else:
        values.extend(
            [b"" if isinstance(bound.each, Data) else "" if isinstance(bound.each, Text) else 0] * (bound.count_max + 1)
        )
    with pytest.raises(MalformedMessage, match=f"number of {field.name} of the sender"):
        check(message, "the sender")
    if bound.each is None:
        return
    for value in beyond(field, bound.each):
        message = made(field.containing_type)
        good: object = b"" if isinstance(bound.each, Data) else "" if isinstance(bound.each, Text) else 0
        getattr(message, field.name).extend([good, value, good])
        with pytest.raises(MalformedMessage, match=f"{field.name} of the sender"):
            check(message, "the sender")


def test_what_lies_deep_in_a_message_is_looked_at_too() -> None:
    ticket = rollout_pb2.LeaseTicket(attempt=(1 << 32) - 1)
    hello = coordinator_pb2.WorkerHello(held_tickets=[ticket])
    with pytest.raises(MalformedMessage, match="attempt of worker w: expected 0 to 1048576, got 4294967295"):
        check(coordinator_pb2.WorkerMessage(hello=hello), "worker w")


def test_an_enum_value_that_is_not_declared_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="finish_reason of w: expected a known one, got 17"):
        check(rollout_pb2.RolloutSegment(finish_reason=17), "w")  # type: ignore[arg-type]
    check(rollout_pb2.RolloutSegment(finish_reason=rollout_pb2.FINISH_REASON_STOP), "w")
