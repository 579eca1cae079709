"""Broadcast messages on the wire: golden bytes, round trips, and a decoder that only ever answers with our errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from echo2.base.errors import EchoError, MalformedMessage
from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.artifact import CHUNKS_MAX, ArtifactId, ArtifactKey, Chunk, Header, Seal
from echo2.broadcast.events import Route
from echo2.broadcast.plan import BroadcastPlan, NodeLink, Tree
from echo2.wire import broadcast as wire
from echo2.wire.gen.echo2.v1 import broadcast_pb2 as pb

GOLDEN = Path(__file__).parent / "golden"
KEY = ArtifactKey(bytes(range(16)))
HEADER = Header(
    ArtifactId(Version(7), Version(6)), RunId("r"), "main", 1.5e9, 1 << 20, True, PeerId("12D3seed"), b"\x01\x02"
)
CHUNK = Chunk(KEY, 5, True, b"payload", b"\x03\x04")
SEAL = Seal(KEY, 6, 4096, bytes(range(32)), "xxh:1", b"\x05\x06")
PLAN = BroadcastPlan(
    3,
    (
        NodeLink(PeerId("12D3seed"), "seed", ("10.0.0.1:7400",), 25e6, 50e6, 0.02),
        NodeLink(PeerId("12D3w0"), "w0", (), 12.5e6, 25e6, 0.06),
        NodeLink(PeerId("12D3w1"), "w1", ("10.0.0.3:7400",), 0.0, 0.0, 0.0),
    ),
    (Tree(0.75, (0, 1)), Tree(0.25, (2, 0))),
    "multi_tree",
    (1.25, 1.5),
    64 << 20,
    "it is fastest",
)  # fmt: skip
PLAN_WITH_LATE = replace(PLAN, nodes=(*PLAN.nodes[:2], replace(PLAN.nodes[2], is_late=True)), _index={})
FRAMES: dict[str, bytes] = {
    "peer_hello": wire.hello(1, RunId("r")),
    "peer_hello_further": wire.hello(1, RunId("r"), is_further=True),
    "artifact_header": wire.header_to_bytes(HEADER),
    "chunk": wire.chunk_to_bytes(CHUNK),
    "chunk_routed": wire.addressed(wire.chunk_to_bytes(CHUNK), Route(3, 1), False),
    "chunk_answer": wire.addressed(wire.chunk_to_bytes(CHUNK), None, True),
    "artifact_seal": wire.seal_to_bytes(SEAL),
    "have_map": wire.have_to_bytes(KEY, 0b1011, True),
    "chunk_request": wire.request_to_bytes(KEY, (0, 9, 300)),
    "chunk_cancel": wire.cancel_to_bytes(KEY, (9,)),
    "relay_ack": wire.relay_ack_to_bytes(KEY, 9, 2),
    "width_wish": wire.width_wish_to_bytes(4),
    "plan": wire.plan_to_message(PLAN).SerializeToString(deterministic=True),
    "plan_with_late": wire.plan_to_message(PLAN_WITH_LATE).SerializeToString(deterministic=True),
}
PEER_FRAMES = sorted(set(FRAMES) - {"plan", "plan_with_late", "plan_with_pace"})


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"broadcast_{name}.hex").read_text())


@pytest.mark.parametrize("name", FRAMES)
def test_bytes_are_those_of_the_golden_file(name: str) -> None:
    assert FRAMES[name].hex() == golden(name).hex()


def test_every_kind_of_message_has_a_golden_file() -> None:
    kinds = {field.name for field in pb.PeerMessage.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert kinds == {wire.parse(golden(name), "golden").WhichOneof("kind") for name in PEER_FRAMES}


def decode(frame: bytes) -> object:
    """What a node makes of a frame."""
    message = wire.parse(frame, "peer p")
    match message.WhichOneof("kind"):
        case "header":
            return wire.header_from(message.header)
        case "chunk":
            return wire.chunk_from(message.chunk), wire.route_of(message), message.is_answer
        case "seal":
            return wire.seal_from(message.seal)
        case "have":
            return wire.have_from(message.have)
        case "request":
            return wire.indices_from(message.request)
        case "cancel":
            return wire.indices_from(message.cancel)
        case "relay_ack":
            return wire.relay_ack_from(message.relay_ack)
        case "width_wish":
            return wire.width_wish_from(message.width_wish)
        case _:
            hello = message.hello
            return hello.protocol_version, hello.run_id, hello.is_further


def test_golden_bytes_decode_to_what_they_were_made_from() -> None:
    assert decode(golden("peer_hello")) == (1, "r", False)
    assert decode(golden("peer_hello_further")) == (1, "r", True)
    assert decode(golden("width_wish")) == 4
    assert decode(golden("artifact_header")) == HEADER
    assert decode(golden("chunk")) == (CHUNK, None, False)
    assert decode(golden("chunk_routed")) == (CHUNK, Route(3, 1), False)
    assert decode(golden("chunk_answer")) == (CHUNK, None, True)
    assert decode(golden("artifact_seal")) == SEAL
    assert decode(golden("have_map")) == (KEY, 0b1011, True)
    assert decode(golden("chunk_request")) == (KEY, (0, 9, 300))
    assert decode(golden("chunk_cancel")) == (KEY, (9,))
    assert decode(golden("relay_ack")) == (KEY, 9, 2)
    assert wire.plan_from_message(pb.BroadcastPlan.FromString(golden("plan"))) == PLAN
    assert wire.plan_from_message(pb.BroadcastPlan.FromString(golden("plan_with_late"))) == PLAN_WITH_LATE


@given(
    index=st.integers(0, CHUNKS_MAX - 1),
    ends_block=st.booleans(),
    payload=st.binary(max_size=40) | st.sampled_from([bytes(127), bytes(128), bytes(20_000), bytes(3 << 20)]),
    signature=st.binary(max_size=64),
)
def test_a_chunk_written_by_hand_is_what_protobuf_writes(
    index: int, ends_block: bool, payload: bytes, signature: bytes
) -> None:
    chunk = Chunk(KEY, index, ends_block, payload, signature)
    frame = pb.ChunkFrame(key=KEY, index=index, ends_block=ends_block, signature=signature, payload=payload)
    assert wire.chunk_to_bytes(chunk) == pb.PeerMessage(chunk=frame).SerializeToString()


def _damaged(name: str, data: st.DataObject) -> bytes:
    """Golden bytes with some replaced and perhaps cut, or arbitrary ones."""
    good = bytearray(golden(name))
    if data.draw(st.booleans()):
        return data.draw(st.binary(max_size=200))
    for _ in range(data.draw(st.integers(1, 6))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    return bytes(good[: data.draw(st.integers(0, len(good)))])


@pytest.mark.parametrize("name", PEER_FRAMES)
@given(data=st.data())
def test_any_bytes_decode_or_are_refused_with_our_error(name: str, data: st.DataObject) -> None:
    frame = _damaged(name, data)
    try:
        decode(frame)
    except EchoError as error:
        assert str(error)


@given(data=st.data())
def test_any_plan_decodes_or_is_refused_with_our_error(data: st.DataObject) -> None:
    try:
        message = pb.BroadcastPlan.FromString(_damaged("plan", data))
    except DecodeError:
        return
    try:
        plan = wire.plan_from_message(message)
    except EchoError:
        return
    for tree in plan.trees:
        assert len(tree.parents) == len(plan.nodes) - 1
        assert all(0 <= parent < len(plan.nodes) for parent in tree.parents)


@given(st.integers(0, (1 << 300) - 1), st.booleans())
@example((1 << 4096) - 1, True)
def test_have_maps_come_back_whole(bitmap: int, is_sealed: bool) -> None:
    assert decode(wire.have_to_bytes(KEY, bitmap, is_sealed)) == (KEY, bitmap, is_sealed)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (wire.have_to_bytes(ArtifactKey(b"short"), 1, False), "expected 16 bytes, got 5"),
        (
            wire.request_to_bytes(KEY, (CHUNKS_MAX,)),
            f"indices of peer p: expected 0 to {CHUNKS_MAX - 1}, got {CHUNKS_MAX}",
        ),
        (
            wire.request_to_bytes(KEY, range(4096 + 1)),
            "number of indices of peer p: expected up to 4096",
        ),
        (wire.seal_to_bytes(Seal(KEY, 1, 1, b"short", "f", b"s")), "expected a root hash of 32 bytes, got 5"),
        (b"", "expected a PeerMessage of a known kind"),
        (b"\xff\xff", "expected a PeerMessage, got 2 bytes that are not"),
    ],
    ids=["short key", "index too large", "too many indices", "short root", "empty", "rubbish"],
)
def test_what_is_out_of_bounds_is_refused_in_words(frame: bytes, expected: str) -> None:
    with pytest.raises(MalformedMessage, match=expected):
        decode(frame)
