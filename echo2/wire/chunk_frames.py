"""Parses chunk frames by hand: every node does this for every chunk, and protobuf would copy the payload three times.

Guarantees: the result equals what protobuf would parse from the same bytes. For a frame that is not a single chunk as nodes
write it (fields in order, each once, the route or answer mark before or after it), `chunk_in` returns None, and the
caller parses it like any other message. The views point into the frame and keep it alive.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.broadcast.artifact import CHUNK_BYTES_MAX, KEY_BYTES, ArtifactKey, Chunk
from echo2.broadcast.events import Route
from echo2.wire.bounds import PEER_FRAME, check, parsed
from echo2.wire.gen.echo2.v1 import broadcast_pb2 as pb

# Protobuf tags: field number << 3 | wire type, of ChunkFrame.
_CHUNK, _KEY, _INDEX, _ENDS_BLOCK, _SIGNATURE, _PAYLOAD = 0x1A, 0x0A, 0x10, 0x18, 0x22, 0x2A
_SIGNATURE_BYTES = 64  # ed25519
_HEAD_BYTES_MAX = 128
"""Everything in a chunk except its payload."""
BESIDE_BYTES_MAX = 32
"""A route, or the answer mark."""
FRAME_BYTES_MAX = CHUNK_BYTES_MAX + _HEAD_BYTES_MAX + BESIDE_BYTES_MAX  # the largest chunk and what lies around it


@dataclass(frozen=True, slots=True)
class ChunkIn:
    """`record`: the encoded chunk to store and forward, without route or answer mark."""

    chunk: Chunk
    record: memoryview
    route: Route | None
    is_answer: bool


def chunk_in(frame: bytes, whose: str) -> ChunkIn | None:
    """The chunk in a frame; None for another message or an unusual encoding. MalformedMessage if out of bounds."""
    try:
        begin = 0 if frame[0] == _CHUNK else _after_beside(frame)
        if frame[begin] != _CHUNK:
            return None
        size, at = _varint(frame, begin + 1)
        end = at + size
        if not at < end <= len(frame) or begin + len(frame) - end > BESIDE_BYTES_MAX:
            return None
        chunk = _chunk(frame, at, end)
    except IndexError:
        return None
    beside = frame[:begin] + frame[end:]
    if chunk is None:
        return None
    if not beside:
        return ChunkIn(chunk, memoryview(frame), None, False)
    message = parsed(pb.PeerMessage, beside, PEER_FRAME, whose)
    if message.WhichOneof("kind") is not None:
        return None
    check(message, whose)
    route = Route(message.route.epoch, message.route.tree) if message.HasField("route") else None
    return ChunkIn(chunk, memoryview(frame)[begin:end], route, message.is_answer)


def _after_beside(frame: bytes) -> int:
    """The offset of the chunk after a route or an answer mark."""
    if frame[0] == 0x50:  # is_answer
        return 2
    if frame[0] == 0x4A and frame[1] < BESIDE_BYTES_MAX:  # route
        return 2 + frame[1]
    raise IndexError("the frame does not start like a chunk")


def _chunk(frame: bytes, at: int, end: int) -> Chunk | None:
    """Parses the bytes from `at` to `end`; None if fields are not in the order and of the sizes that nodes write."""
    if frame[at] != _KEY or frame[at + 1] != KEY_BYTES:
        return None
    key, at = ArtifactKey(frame[at + 2 : at + 2 + KEY_BYTES]), at + 2 + KEY_BYTES
    index, ends_block, payload = 0, False, memoryview(b"")
    if frame[at] == _INDEX:
        index, at = _varint(frame, at + 1)
    if frame[at] == _ENDS_BLOCK:
        if frame[at + 1] != 1:
            return None
        ends_block, at = True, at + 2
    if frame[at] != _SIGNATURE or frame[at + 1] != _SIGNATURE_BYTES:
        return None
    signature, at = frame[at + 2 : at + 2 + _SIGNATURE_BYTES], at + 2 + _SIGNATURE_BYTES
    if at < end:
        if frame[at] != _PAYLOAD:
            return None
        size, at = _varint(frame, at + 1)
        payload, at = memoryview(frame)[at : at + size], at + size
    return Chunk(key, index, ends_block, payload, signature) if at == end else None


def _varint(frame: bytes, at: int) -> tuple[int, int]:
    """Reads a varint of at most four bytes, which is enough for sizes and indices of chunks."""
    value = 0
    for place in range(4):
        byte = frame[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise IndexError("a number of more than four bytes")
