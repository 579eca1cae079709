"""Converts broadcast messages and core types. Parses at the edge: the result is within limits, or MalformedMessage.

A chunk frame is encoded once and forwarded unchanged; its route stands before it, which protobuf parses as one message. Every node
writes and reads every chunk, and protobuf would copy its payload three times: `chunk_to_bytes` and `chunk_in` do it by hand, with
the same result. A chunk is taken only as nodes write it: fields in order, each once, the route or answer mark before or after it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from echo2.base.errors import MalformedMessage
from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.artifact import (
    CHUNK_BYTES_MAX,
    KEY_BYTES,
    ArtifactId,
    ArtifactKey,
    Chunk,
    Header,
    Seal,
    bitmap_from_bytes,
    bitmap_to_bytes,
)
from echo2.broadcast.events import Cancel, Have, RelayAck, Request, Route, WidthWished
from echo2.broadcast.pace import LINK_CONNECTIONS
from echo2.broadcast.plan import BroadcastPlan, NodeLink, Tree
from echo2.broadcast.reachability import Access
from echo2.wire.bounds import PEER_FRAME, core_of, message_of, parsed, read_varint
from echo2.wire.gen.echo2.v1 import broadcast_pb2 as pb

# Of an access: a host name has 253 characters, a node a few addresses, two relays and at most 48 links (broadcast/connections).
HOST_CHARS_MAX, ADDRESSES_MAX, RELAYS_MAX, MET_MAX = 256, 8, 8, 64
# Protobuf tags of a chunk: field number << 3 | wire type.
_CHUNK, _KEY, _INDEX, _ENDS_BLOCK, _SIGNATURE, _PAYLOAD = 0x1A, 0x0A, 0x10, 0x18, 0x22, 0x2A
_SIGNATURE_BYTES = 64  # ed25519
_HEAD_BYTES_MAX = 128  # everything in a chunk except its payload
BESIDE_BYTES_MAX = 32  # a route, or the answer mark
BESIDE_KEPT = 1024  # a few trees for each neighbour
FRAME_BYTES_MAX = CHUNK_BYTES_MAX + _HEAD_BYTES_MAX + BESIDE_BYTES_MAX  # the largest chunk and what lies around it


Control = Have | Request | Cancel | RelayAck | WidthWished


def parse(data: bytes, origin: str) -> pb.PeerMessage:
    """Parses a peer's message within its bounds; MalformedMessage if it is not valid."""
    message = parsed(pb.PeerMessage, data, PEER_FRAME, origin)
    if message.WhichOneof("kind") is None:
        raise MalformedMessage(f"{origin}: expected a PeerMessage of a known kind, got none")
    return message


def hello(protocol_version: int, run_id: RunId, *, is_further: bool = False) -> bytes:
    greeting = pb.PeerHello(protocol_version=protocol_version, run_id=run_id, is_further=is_further)
    return pb.PeerMessage(hello=greeting).SerializeToString()


def header_to_bytes(header: Header) -> bytes:
    version, parent = header.artifact.version, header.artifact.parent
    message = message_of(
        header,
        pb.ArtifactHeader,
        version=version,
        parent=parent or 0,
        has_parent=parent is not None,
        publisher_peer_id=header.publisher,
    )
    return pb.PeerMessage(header=message).SerializeToString()


def header_from(message: pb.ArtifactHeader) -> Header:
    parent = Version(message.parent) if message.has_parent else None
    artifact = ArtifactId(Version(message.version), parent)
    return core_of(message, Header, artifact=artifact, publisher=PeerId(message.publisher_peer_id))


def chunk_to_bytes(chunk: Chunk) -> bytes:
    """Encodes a chunk by hand exactly as protobuf would: every node does this for every chunk; copies the payload only once."""
    parts: list[bytes | memoryview] = [bytes((_KEY,)), _varint(len(chunk.key)), chunk.key]
    if chunk.index:
        parts += [b"\x10", _varint(chunk.index)]
    if chunk.ends_block:
        parts.append(b"\x18\x01")
    if chunk.signature:
        parts += [b"\x22", _varint(len(chunk.signature)), chunk.signature]
    if chunk.payload:
        parts += [b"\x2a", _varint(len(chunk.payload)), chunk.payload]
    return b"".join([b"\x1a", _varint(sum(map(len, parts))), *parts])


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


@functools.lru_cache(maxsize=BESIDE_KEPT)
def beside(route: Route | None, is_answer: bool) -> bytes:
    """The bytes that go before or after an encoded chunk: its route, or the answer mark; often empty."""
    if is_answer:
        return pb.PeerMessage(is_answer=True).SerializeToString()
    if route is None:
        return b""
    return pb.PeerMessage(route=pb.Route(epoch=route.epoch, tree=route.tree)).SerializeToString()


@dataclass(frozen=True, slots=True)
class ChunkIn:
    """`record`: the encoded chunk to store and forward, without route or answer mark."""

    chunk: Chunk
    record: memoryview
    route: Route | None
    is_answer: bool


def chunk_in(frame: bytes, origin: str) -> ChunkIn | None:
    """The chunk in a frame; None for another message or an unusual encoding. MalformedMessage if out of bounds."""
    try:
        begin = 0 if frame[0] == _CHUNK else _after_beside(frame)
        if frame[begin] != _CHUNK:
            return None
        size, at = read_varint(frame, begin + 1)
        end = at + size
        if not at < end <= len(frame) or begin + len(frame) - end > BESIDE_BYTES_MAX:
            return None
        chunk = _chunk(frame, at, end)
    except IndexError:
        return None
    if chunk is None:
        return None
    if end - begin == len(frame):
        return ChunkIn(chunk, memoryview(frame), None, False)
    beside = _said_beside(frame[:begin] + frame[end:], origin)
    return None if beside is None else ChunkIn(chunk, memoryview(frame)[begin:end], *beside)


@functools.lru_cache(maxsize=BESIDE_KEPT)
def _said_beside(data: bytes, origin: str) -> tuple[Route | None, bool] | None:
    """The route and the answer mark; None for another message."""
    message = parsed(pb.PeerMessage, data, PEER_FRAME, origin)
    if message.WhichOneof("kind") is not None:
        return None
    return Route(message.route.epoch, message.route.tree) if message.HasField("route") else None, message.is_answer


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
        index, at = read_varint(frame, at + 1)
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
        size, at = read_varint(frame, at + 1)
        payload, at = memoryview(frame)[at : at + size], at + size
    return Chunk(key, index, ends_block, payload, signature) if at == end else None


def seal_to_bytes(seal: Seal) -> bytes:
    return pb.PeerMessage(seal=message_of(seal, pb.ArtifactSeal)).SerializeToString()


def seal_from(message: pb.ArtifactSeal) -> Seal:
    if len(message.root_sha256) != 32:
        raise MalformedMessage(f"seal: expected a root hash of 32 bytes, got {len(message.root_sha256)}")
    return core_of(message, Seal, key=_key(message.key))


def control_frame(message: Control) -> bytes:
    """The frame that tells a peer; which peer, only the connection says."""
    key = b"" if isinstance(message, WidthWished) else message.key
    match message:
        case Have():
            bitmap = bitmap_to_bytes(message.bitmap)
            answer = pb.PeerMessage(have=pb.HaveMap(key=key, bitmap=bitmap, is_sealed=message.is_sealed))
        case Request():
            answer = pb.PeerMessage(request=pb.ChunkRequest(key=key, indices=message.indices))
        case Cancel():
            answer = pb.PeerMessage(cancel=pb.ChunkCancel(key=key, indices=message.indices))
        case RelayAck():
            ack = pb.RelayAck(key=key, index=message.index, backlog=message.backlog, is_slow=message.is_slow)
            answer = pb.PeerMessage(relay_ack=ack)
        case WidthWished():
            answer = pb.PeerMessage(width_wish=pb.WidthWish(connections=message.connections))
    return answer.SerializeToString()


def control_from(message: pb.PeerMessage, peer: PeerId) -> Control:
    """What `peer` said; MalformedMessage for anything but the messages of `control_frame`."""
    match kind := message.WhichOneof("kind"):
        case "have":
            have = message.have
            return Have(peer, _key(have.key), bitmap_from_bytes(have.bitmap), have.is_sealed)
        case "request":
            return Request(peer, _key(message.request.key), tuple(message.request.indices))
        case "cancel":
            return Cancel(peer, _key(message.cancel.key), tuple(message.cancel.indices))
        case "relay_ack":
            ack = message.relay_ack
            return RelayAck(peer, _key(ack.key), ack.index, ack.backlog, ack.is_slow)
        case "width_wish":
            count = message.width_wish.connections
            if not 1 <= count <= LINK_CONNECTIONS:
                raise MalformedMessage(
                    f"width of peer {peer}: expected 1 to {LINK_CONNECTIONS} connections, got {count}"
                )
            return WidthWished(peer, count)
    raise MalformedMessage(
        f"peer {peer}: expected what members say after their hello, as they write it, got another {kind}"
    )


def _key(data: bytes) -> ArtifactKey:
    if len(data) != KEY_BYTES:
        raise MalformedMessage(f"artifact key: expected {KEY_BYTES} bytes, got {len(data)}")
    return ArtifactKey(data)


def plan_to_message(plan: BroadcastPlan) -> pb.BroadcastPlan:
    nodes = [message_of(node, pb.PlanNode, access=access_to_message(node.access)) for node in plan.nodes]
    trees, others = ([message_of(tree, pb.PlanTree) for tree in trees] for trees in (plan.trees, plan.others))
    return message_of(plan, pb.BroadcastPlan, nodes=nodes, trees=trees, others=others)


def plan_from_message(message: pb.BroadcastPlan) -> BroadcastPlan:
    """Parses a plan; MalformedMessage if its trees do not match its nodes."""
    nodes = tuple(core_of(node, NodeLink, access=access_from_message(node.access)) for node in message.nodes)
    for tree in (*message.trees, *message.others):
        if len(tree.parents) != len(nodes) - 1 or any(parent >= len(nodes) for parent in tree.parents):
            raise MalformedMessage(f"plan: expected trees over {len(nodes)} nodes, got one of {len(tree.parents) + 1}")
    trees, others = (tuple(core_of(tree, Tree) for tree in trees) for trees in (message.trees, message.others))
    return core_of(message, BroadcastPlan, nodes=nodes, trees=trees, others=others)


def access_to_message(access: Access) -> pb.PeerAccess | None:
    """None if there is nothing to say, as for every node that can be dialled."""
    if access == Access():
        return None
    return message_of(access, pb.PeerAccess)


def access_from_message(message: pb.PeerAccess) -> Access:
    """Parses an access; lists are truncated to their limits."""
    return Access(
        lan_addresses=tuple(message.lan_addresses[:ADDRESSES_MAX]),
        public_host=message.public_host[:HOST_CHARS_MAX],
        relays=tuple(PeerId(peer) for peer in message.relays[:RELAYS_MAX]),
        met=tuple(PeerId(peer) for peer in message.met[:MET_MAX]),
    )
