"""No field of a message is lost on its way through the core's types: by the messages' own descriptors, so none is forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from echo2.base.errors import MalformedMessage
from echo2.base.ids import RunId
from echo2.wire import broadcast as bw
from echo2.wire import coordinator as cw
from echo2.wire import rollout as rw
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2, ingest_pb2, rollout_pb2
from tests.contract.test_golden import filled

W = "a peer"
Convert = Callable[[Any], Any]
FRAME = broadcast_pb2.PeerMessage


def framed(kind: str) -> Callable[[bytes], Message]:
    """The message in a frame of the broadcast."""
    return lambda data: getattr(FRAME.FromString(data), kind)  # type: ignore[no-any-return]


def through(there: Convert, back: Convert) -> Convert:
    return lambda message: back(there(message))


ROUND_TRIPS: dict[type[Message], Convert] = {
    rollout_pb2.GroupSpec: through(rw.group_from_message, rw.group_to_message),
    rollout_pb2.RolloutSegment: through(rw.segment_from_message, rw.segment_to_message),
    ingest_pb2.SegmentVerdict: through(rw.verdict_from_message, rw.verdict_to_message),
    broadcast_pb2.BroadcastPlan: through(bw.plan_from_message, bw.plan_to_message),
    broadcast_pb2.PeerAccess: through(bw.access_from_message, bw.access_to_message),
    broadcast_pb2.ArtifactHeader: through(bw.header_from, through(bw.header_to_bytes, framed("header"))),
    broadcast_pb2.ArtifactSeal: through(bw.seal_from, through(bw.seal_to_bytes, framed("seal"))),
    broadcast_pb2.ChunkFrame: through(bw.chunk_from, through(bw.chunk_to_bytes, framed("chunk"))),
    broadcast_pb2.PeerHello: lambda m: framed("hello")(
        bw.hello(m.protocol_version, RunId(m.run_id), is_further=m.is_further)
    ),
    broadcast_pb2.HaveMap: through(bw.have_from, lambda said: framed("have")(bw.have_to_bytes(*said))),
    broadcast_pb2.ChunkRequest: through(bw.indices_from, lambda said: framed("request")(bw.request_to_bytes(*said))),
    broadcast_pb2.ChunkCancel: through(bw.indices_from, lambda said: framed("cancel")(bw.cancel_to_bytes(*said))),
    broadcast_pb2.RelayAck: through(bw.relay_ack_from, lambda said: framed("relay_ack")(bw.relay_ack_to_bytes(*said))),
    broadcast_pb2.WidthWish: through(bw.width_wish_from, through(bw.width_wish_to_bytes, framed("width_wish"))),
}
READ: dict[type[Message], Convert] = {
    coordinator_pb2.OfferGroups: lambda m: cw.offer_from_message(m, W),
    coordinator_pb2.WorkersDelivered: cw.delivered_from_message,
}
"""Read only: what is read must depend on every field."""
SENSIBLE: dict[str, dict[str, Any]] = {  # values that fit together, in the place of those that follow from names
    "SamplingParams": {"top_p": 0.5, "temperature": 1.5, "max_new_tokens": 64},
    "GroupSpec": {"rollout_count": 4},
    "RolloutSegment": {
        "index": 3, "token_ids": [5, 6], "logprobs": [-0.5, -0.25], "raw_logprobs": [-0.75, -1.5],
        "version_spans": [rollout_pb2.VersionSpan(version=4, count=1), rollout_pb2.VersionSpan(version=5, count=1)],
        "finish_reason": 0, "routing": b"abcd", "prompt_routing": b"efghij",
    },
    "SegmentVerdict": {"index": 3},
    "PlanTree": {"parents": [0], "weight": 0.5},
    "BroadcastPlan": {"topology": "multi_tree", "predicted_s": [1.5]},
    "PlanNode": {"addresses": ["10.0.0.1:7", "10.0.0.2:8"]},
    "PeerAccess": {"lan_addresses": ["10.0.0.1:7", "10.0.0.2:8"], "public_host": "10.1.1.1"},
    "ArtifactHeader": {"parent": 1, "version": 2, "signature": bytes(64)},
    "ArtifactSeal": {"key": bytes(range(16)), "root_sha256": bytes(32), "signature": bytes(64)},
    "ChunkFrame": {"key": bytes(range(16)), "signature": bytes(64)},
    "HaveMap": {"key": bytes(range(16))}, "ChunkRequest": {"key": bytes(range(16))},
    "ChunkCancel": {"key": bytes(range(16))}, "RelayAck": {"key": bytes(range(16))}, "WidthWish": {"connections": 3},
}  # fmt: skip


def sensible(message: Any) -> Any:
    """Every field set, to values that a reader takes."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if field.is_repeated else (value,):
                sensible(one)
    for name, value in SENSIBLE.get(message.DESCRIPTOR.name, {}).items():
        if isinstance(value, list):
            del getattr(message, name)[:]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def instance(kind: type[Message]) -> Any:
    return sensible(filled(kind.DESCRIPTOR))


@pytest.mark.parametrize("kind", ROUND_TRIPS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_a_message_comes_out_of_the_cores_type_as_it_went_in_or_is_refused(kind: type[Message]) -> None:
    """With all its fields, and without any one of them."""
    message = instance(kind)
    assert ROUND_TRIPS[kind](message) == message
    for field in kind.DESCRIPTOR.fields:
        lacking = kind()
        lacking.CopyFrom(message)
        lacking.ClearField(field.name)
        lacking.ClearField("parent") if field.name == "has_parent" else None
        with contextlib.suppress(MalformedMessage):
            assert ROUND_TRIPS[kind](lacking) == lacking, field.name


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.DESCRIPTOR.name)
def test_what_is_read_depends_on_every_field(kind: type[Message]) -> None:
    read, whole = READ[kind], instance(kind)
    for field in kind.DESCRIPTOR.fields:
        lacking = kind()
        lacking.CopyFrom(whole)
        lacking.ClearField(field.name)
        try:
            found = read(lacking)
        except Exception:  # noqa: BLE001  (it is missed: that is all that is asked)
            continue
        assert found != read(whole), f"{kind.DESCRIPTOR.name}.{field.name} is read by nobody"
