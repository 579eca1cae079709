"""Frames between nodes: what is written by hand is protobuf's, and what is no frame of ours is refused in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import MalformedMessage
from echo2.broadcast.artifact import CHUNKS_MAX, ArtifactKey, Chunk, Seal
from echo2.broadcast.events import Route
from echo2.broadcast.pace import LINK_CONNECTIONS
from echo2.broadcast.plan import BroadcastPlan, NodeLink, Tree
from echo2.trust.identity import Identity
from echo2.wire import broadcast as wire
from echo2.wire.broadcast import chunk_in
from echo2.wire.gen.echo2.v1 import broadcast_pb2 as pb

KEY = ArtifactKey(bytes(range(16)))
IDENTITY = Identity.from_private_bytes(bytes(32))
PLAIN = wire.chunk_to_bytes(Chunk.make(KEY, 3, True, b"payload", IDENTITY))


@given(
    st.integers(0, CHUNKS_MAX - 1), st.booleans(),
    st.binary(max_size=300) | st.sampled_from([bytes(127), bytes(128), bytes(20_000), bytes(3 << 20)]),
    st.none() | st.builds(Route, st.integers(0, 1 << 40), st.integers(0, 31)), st.booleans(),
)  # fmt: skip
def test_a_chunk_written_and_read_by_hand_is_protobufs_wherever_its_route_stands(
    index: int, ends_block: bool, payload: bytes, route: Route | None, is_answer: bool
) -> None:
    chunk = Chunk.make(KEY, index, ends_block, payload, IDENTITY)
    record, beside = wire.chunk_to_bytes(chunk), wire.beside(route, is_answer)
    frame = pb.ChunkFrame(key=KEY, index=index, ends_block=ends_block, signature=chunk.signature, payload=payload)
    assert record == pb.PeerMessage(chunk=frame).SerializeToString()
    for data in (record + beside, beside + record):
        found, message = chunk_in(data, "peer x"), wire.parse(data, "peer x")
        assert found is not None
        assert found.chunk == chunk == wire.chunk_from(message.chunk)
        said = (None if is_answer else route, is_answer)
        assert (found.route, found.is_answer) == (wire.route_of(message), message.is_answer) == said
        assert found.record == record


def test_what_is_no_plain_chunk_is_left_to_protobuf_and_one_beyond_its_bounds_refused_by_both() -> None:
    have = wire.have_to_bytes(KEY, 1, False)
    unsigned = pb.PeerMessage(chunk=pb.ChunkFrame(key=KEY, payload=b"payload")).SerializeToString()
    for frame in (b"", PLAIN[:-1], PLAIN + PLAIN, PLAIN + have, unsigned, have, PLAIN + bytes(40)):
        assert chunk_in(frame, "peer x") is None
    far = pb.PeerMessage(chunk=pb.ChunkFrame(key=KEY, index=CHUNKS_MAX, signature=bytes(64), payload=b"x"))
    for read in (chunk_in, wire.parse):
        with pytest.raises(MalformedMessage):
            read(far.SerializeToString(), "peer x")


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (wire.have_to_bytes(ArtifactKey(b"short"), 1, False), "expected 16 bytes, got 5"),
        (wire.request_to_bytes(KEY, (CHUNKS_MAX,)), f"indices of peer p: expected 0 to {CHUNKS_MAX - 1}, got"),
        (wire.request_to_bytes(KEY, range(4096 + 1)), "number of indices of peer p: expected up to 4096"),
        (wire.seal_to_bytes(Seal(KEY, 1, 1, b"short", "f", b"s")), "expected a root hash of 32 bytes, got 5"),
        (wire.width_wish_to_bytes(LINK_CONNECTIONS + 1), "width: expected 1 to"),
        (b"", "expected a PeerMessage of a known kind"),
        (b"\xff\xff", "expected a PeerMessage, got 2 bytes that are not"),
    ],
    ids=["short key", "index too large", "too many indices", "short root", "too wide", "empty", "rubbish"],
)
def test_what_is_out_of_bounds_is_refused_in_words(frame: bytes, expected: str) -> None:
    with pytest.raises(MalformedMessage, match=expected):
        message = wire.parse(frame, "peer p")
        wire.have_from(message.have) if message.HasField("have") else None
        wire.seal_from(message.seal) if message.HasField("seal") else None
        wire.width_wish_from(message.width_wish) if message.HasField("width_wish") else None


@pytest.mark.parametrize("parents", [(0,), (0, 1, 2), (0, 3)])
def test_a_plan_whose_trees_are_not_of_its_nodes_is_refused(parents: tuple[int, ...]) -> None:
    nodes = tuple(NodeLink(IDENTITY.peer_id, f"n{number}", (), 1.0, 1.0, 0.1) for number in range(3))
    message = wire.plan_to_message(BroadcastPlan(3, nodes, (Tree(1.0, (0, 1)),), "multi_tree", (1.0,), 1, ""))
    assert wire.plan_from_message(message).trees == (Tree(1.0, (0, 1)),)
    message.trees[0].parents[:] = parents
    with pytest.raises(MalformedMessage, match="plan: expected trees over 3 nodes"):
        wire.plan_from_message(message)
