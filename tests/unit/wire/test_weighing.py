"""Fields of a message are counted before it is parsed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import MalformedMessage
from echo2.wire.gen.echo2.v1 import coordinator_pb2, ingest_pb2, rollout_pb2
from echo2.wire.weighing import CALLS, CallLimits, limits_of, parsed

REPORT = limits_of("/echo2.v1.Ingest/Report")


def test_empty_submessages_are_counted_at_any_depth() -> None:
    with pytest.raises(MalformedMessage, match="fields"):
        parsed(ingest_pb2.RolloutReport, b"\x22\x00" * (REPORT.fields_max + 1), REPORT, "a worker")
    spans = b"\x3a\x00" * 1000  # of one segment
    inner = b"\x22" + bytes((len(spans) & 0x7F | 0x80, len(spans) >> 7)) + spans
    parsed(ingest_pb2.RolloutReport, inner, CallLimits(1 << 20, 1001), "a worker")
    with pytest.raises(MalformedMessage, match="fields"):
        parsed(ingest_pb2.RolloutReport, inner, CallLimits(1 << 20, 1000), "a worker")


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


@given(st.binary(max_size=400))
def test_what_is_refused_was_no_message_or_too_much(data: bytes) -> None:
    try:
        message = parsed(ingest_pb2.RolloutReport, data, CallLimits(300, 20), "a worker")
    except MalformedMessage:
        return
    assert len(data) <= 300
    assert len(message.segments) <= 20


def test_the_limits_are_of_calls_that_exist() -> None:
    from google.protobuf import descriptor_pool

    for method in CALLS:
        service, name = method.strip("/").split("/")
        assert name in descriptor_pool.Default().FindServiceByName(service).methods_by_name
