"""Every field of every message has a bound, the bound is kept, and what honest nodes send is within it."""

import math
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from echo2.base.errors import MalformedMessage
from echo2.wire.bounds import (
    CALLS,
    Bound,
    CallLimits,
    Data,
    Listed,
    Number,
    Text,
    bound_of,
    check,
    limits_of,
    needs_bound,
    parsed,
)
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2, enrolment_pb2, ingest_pb2, probe_pb2, rollout_pb2
from tests.patience import cpu_time_within

FILES = (broadcast_pb2, coordinator_pb2, enrolment_pb2, ingest_pb2, probe_pb2, rollout_pb2)
"""Not the journal, which is never sent."""


def fields() -> Iterator[FieldDescriptor]:
    for file in FILES:
        for kind in file.DESCRIPTOR.message_types_by_name.values():
            yield from kind.fields


BOUNDED = [field for field in fields() if needs_bound(field)]


def test_each_number_text_list_and_bytes_of_each_message_has_a_bound_and_nothing_else_names_one() -> None:
    assert {field.full_name for field in fields() if bound_of(field) is not None} == {f.full_name for f in BOUNDED}


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
    bound = bound_of(field)
    assert bound is not None
    each = bound.each if isinstance(bound, Listed) else bound
    good: object = b"" if isinstance(each, Data) else "" if isinstance(each, Text) else 0
    for value in beyond(field, each) if each is not None else ():
        message = made(field.containing_type)
        if isinstance(bound, Listed):
            getattr(message, field.name).extend([good, value, good])
        else:
            setattr(message, field.name, value)
        with pytest.raises(MalformedMessage, match=f"{field.name} of the sender"):
            check(message, "the sender")
    if isinstance(bound, Listed):
        message, count = made(field.containing_type), bound.count_max + 1
        element = good if each is not None else GetMessageClass(field.message_type)()
        getattr(message, field.name).extend([element] * count)
        with pytest.raises(MalformedMessage, match=f"number of {field.name} of the sender"):
            check(message, "the sender")


def test_what_lies_deep_in_a_message_and_an_undeclared_enum_value_are_looked_at_too() -> None:
    ticket = rollout_pb2.LeaseTicket(attempt=(1 << 32) - 1)
    hello = coordinator_pb2.WorkerHello(held_tickets=[ticket])
    with pytest.raises(MalformedMessage, match="attempt of worker w: expected 0 to 1048576, got 4294967295"):
        check(coordinator_pb2.WorkerMessage(hello=hello), "worker w")
    with pytest.raises(MalformedMessage, match="finish_reason of w: expected a known one, got 17"):
        check(rollout_pb2.RolloutSegment(finish_reason=17), "w")  # type: ignore[arg-type]
    check(rollout_pb2.RolloutSegment(finish_reason=rollout_pb2.FINISH_REASON_STOP), "w")


REPORT = limits_of("/echo2.v1.Ingest/Report")


def test_empty_submessages_are_counted_at_any_depth() -> None:
    with pytest.raises(MalformedMessage, match="fields"):
        parsed(ingest_pb2.RolloutReport, b"\x22\x00" * (REPORT.fields_max + 1), REPORT, "a worker")
    spans = b"\x3a\x00" * 200  # of one segment
    inner = b"\x22" + bytes((len(spans) & 0x7F | 0x80, len(spans) >> 7)) + spans
    parsed(ingest_pb2.RolloutReport, inner, CallLimits(1 << 20, 201), "a worker")
    with pytest.raises(MalformedMessage, match="fields"):
        parsed(ingest_pb2.RolloutReport, inner, CallLimits(1 << 20, 200), "a worker")


def test_the_largest_honest_messages_pass() -> None:
    segments = [
        rollout_pb2.RolloutSegment(
            group_id="g" * 64, index=index, token_ids=range(64), logprobs=[-1.0] * 64, raw_logprobs=[-1.0] * 64,
            version_spans=[rollout_pb2.VersionSpan(version=1, count=64)],
        )
        for index in range(4096)
    ]  # fmt: skip
    report = ingest_pb2.RolloutReport(sequence=1, segments=segments)
    assert parsed(ingest_pb2.RolloutReport, report.SerializeToString(), REPORT, "a worker") == report
    ticket = rollout_pb2.LeaseTicket(
        lease_id="l" * 128, group_id="g" * 128, worker_peer_id="p" * 128, attempt=1, deadline_unix_s=1.0,
        run_id="r" * 64, signature=b"s" * 64,
    )  # fmt: skip
    hello = coordinator_pb2.WorkerMessage(hello=coordinator_pb2.WorkerHello(held_tickets=[ticket] * 1024))
    session = limits_of("/echo2.v1.Coordinator/WorkerSession")
    assert parsed(coordinator_pb2.WorkerMessage, hello.SerializeToString(), session, "a worker") == hello


def test_the_limits_are_of_calls_that_exist() -> None:
    from google.protobuf import descriptor_pool

    for method in CALLS:
        service, name = method.strip("/").split("/")
        assert name in descriptor_pool.Default().FindServiceByName(service).methods_by_name


def test_fields_of_another_release_are_refused_at_the_first_one() -> None:
    data = b"\xf8\x07\x01" * 65_000  # field 127
    expected = "a worker: expected a RolloutReport of this release, got its field 127"
    with cpu_time_within(0.01), pytest.raises(MalformedMessage, match=expected):
        parsed(ingest_pb2.RolloutReport, data, REPORT, "a worker")


def test_a_field_that_is_no_list_comes_once_and_a_packed_list_in_one_piece() -> None:
    for data, match in (
        (b"\x08\x01\x08\x01", "field 1 once"),  # sequence
        (b"\x22\x04\x10\x01\x10\x02", "field 2 once"),  # the index of a segment
        (b"\x22\x04\x20\x01\x20\x02", "field 4 in encoding 0"),  # its token ids, one by one
    ):
        with pytest.raises(MalformedMessage, match=match):
            parsed(ingest_pb2.RolloutReport, data, REPORT, "a worker")
