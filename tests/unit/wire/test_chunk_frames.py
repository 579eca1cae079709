"""A chunk that is read by hand is the chunk that protobuf reads; whatever is unusual is left to protobuf."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import MalformedMessage
from echo2.broadcast.artifact import CHUNKS_MAX, ArtifactKey, Chunk
from echo2.broadcast.events import Route
from echo2.trust.identity import Identity
from echo2.wire import broadcast as wire
from echo2.wire.chunk_frames import chunk_in
from echo2.wire.gen.echo2.v1 import broadcast_pb2 as pb

IDENTITY = Identity.from_private_bytes(bytes(32))
KEY = ArtifactKey(bytes(range(16)))


@given(
    st.integers(0, CHUNKS_MAX - 1), st.booleans(), st.binary(max_size=300),
    st.none() | st.builds(Route, st.integers(0, 1 << 40), st.integers(0, 31)), st.booleans(),
)  # fmt: skip
def test_it_is_what_protobuf_reads_wherever_the_route_stands(
    index: int, ends_block: bool, payload: bytes, route: Route | None, is_answer: bool
) -> None:
    chunk = Chunk.make(KEY, index, ends_block, payload, IDENTITY)
    record, beside = wire.chunk_to_bytes(chunk), wire.beside(route, is_answer)
    for frame in (record + beside, beside + record):
        found = chunk_in(frame, "peer x")
        assert found is not None
        message = wire.parse(frame, "peer x")
        assert found.chunk == chunk == wire.chunk_from(message.chunk)
        assert (found.route, found.is_answer) == (wire.route_of(message), message.is_answer)
        assert found.record == record


def test_what_is_no_plain_chunk_is_left_to_protobuf() -> None:
    record = wire.chunk_to_bytes(Chunk.make(KEY, 3, True, b"payload", IDENTITY))
    two, other = record + record, record + wire.have_to_bytes(KEY, 1, False)
    unsigned = pb.PeerMessage(chunk=pb.ChunkFrame(key=KEY, payload=b"payload")).SerializeToString()
    for frame in (b"", record[:-1], two, other, unsigned, wire.have_to_bytes(KEY, 1, False), record + bytes(40)):
        assert chunk_in(frame, "peer x") is None


def test_a_chunk_beyond_its_bounds_is_refused_as_protobufs_would_be() -> None:
    far = pb.PeerMessage(chunk=pb.ChunkFrame(key=KEY, index=CHUNKS_MAX, signature=bytes(64), payload=b"x"))
    for read in (chunk_in, wire.parse):
        with pytest.raises(MalformedMessage):
            read(far.SerializeToString(), "peer x")
