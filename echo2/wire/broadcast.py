"""Converts broadcast messages and core types. Parses at the edge: the result is within limits, or MalformedMessage.

A chunk frame is encoded once and forwarded unchanged; its route is appended, which protobuf parses as one message.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo2.base.errors import MalformedMessage
from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.artifact import (
    KEY_BYTES,
    ArtifactId,
    ArtifactKey,
    Chunk,
    Header,
    Seal,
    bitmap_from_bytes,
    bitmap_to_bytes,
)
from echo2.broadcast.events import Route
from echo2.broadcast.pace import LINK_CONNECTIONS
from echo2.broadcast.plan import BroadcastPlan, NodeLink, Tree
from echo2.broadcast.reachability import Access
from echo2.wire.bounds import PEER_FRAME, check, parsed
from echo2.wire.by_name import core_of, message_of
from echo2.wire.gen.echo2.v1 import broadcast_pb2 as pb

# Of an access: a host name has 253 characters, a node a few addresses, two relays and at most 48 links (broadcast/dialling).
HOST_CHARS_MAX, ADDRESSES_MAX, RELAYS_MAX, MET_MAX = 256, 8, 8, 64


def parse(data: bytes, whose: str) -> pb.PeerMessage:
    """Parses a peer's message within its bounds; MalformedMessage if it is not valid."""
    message = parsed(pb.PeerMessage, data, PEER_FRAME, whose)
    if message.WhichOneof("kind") is None:
        raise MalformedMessage(f"{whose}: expected a PeerMessage of a known kind, got none")
    check(message, whose)
    return message


def hello(protocol_version: int, run_id: RunId, *, is_further: bool = False) -> bytes:
    made = pb.PeerHello(protocol_version=protocol_version, run_id=run_id, is_further=is_further)
    return pb.PeerMessage(hello=made).SerializeToString()


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
    parts: list[bytes | memoryview] = [b"\x0a", _varint(len(chunk.key)), chunk.key]
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


def chunk_from(message: pb.ChunkFrame) -> Chunk:
    return Chunk(_key(message.key), message.index, message.ends_block, message.payload, message.signature)


def beside(route: Route | None, is_answer: bool) -> bytes:
    """The bytes that go before or after an encoded chunk: its route, or the answer mark; often empty."""
    if is_answer:
        return pb.PeerMessage(is_answer=True).SerializeToString()
    if route is None:
        return b""
    return pb.PeerMessage(route=pb.Route(epoch=route.epoch, tree=route.tree)).SerializeToString()


def addressed(frame: bytes | memoryview, route: Route | None, is_answer: bool) -> bytes:
    """An encoded chunk with its route or answer mark appended."""
    return b"".join((frame, beside(route, is_answer)))


def route_of(message: pb.PeerMessage) -> Route | None:
    if not message.HasField("route"):
        return None
    return Route(message.route.epoch, message.route.tree)


def seal_to_bytes(seal: Seal) -> bytes:
    return pb.PeerMessage(seal=message_of(seal, pb.ArtifactSeal)).SerializeToString()


def seal_from(message: pb.ArtifactSeal) -> Seal:
    if len(message.root_sha256) != 32:
        raise MalformedMessage(f"seal: expected a root hash of 32 bytes, got {len(message.root_sha256)}")
    return core_of(message, Seal, key=_key(message.key))


def have_to_bytes(key: ArtifactKey, bitmap: int, is_sealed: bool) -> bytes:
    have = pb.HaveMap(key=key, bitmap=bitmap_to_bytes(bitmap), is_sealed=is_sealed)
    return pb.PeerMessage(have=have).SerializeToString()


def have_from(message: pb.HaveMap) -> tuple[ArtifactKey, int, bool]:
    return _key(message.key), bitmap_from_bytes(message.bitmap), message.is_sealed


def request_to_bytes(key: ArtifactKey, indices: Sequence[int]) -> bytes:
    return pb.PeerMessage(request=pb.ChunkRequest(key=key, indices=indices)).SerializeToString()


def cancel_to_bytes(key: ArtifactKey, indices: Sequence[int]) -> bytes:
    return pb.PeerMessage(cancel=pb.ChunkCancel(key=key, indices=indices)).SerializeToString()


def indices_from(message: pb.ChunkRequest | pb.ChunkCancel) -> tuple[ArtifactKey, tuple[int, ...]]:
    return _key(message.key), tuple(message.indices)


def relay_ack_to_bytes(key: ArtifactKey, index: int, backlog: int) -> bytes:
    return pb.PeerMessage(relay_ack=pb.RelayAck(key=key, index=index, backlog=backlog)).SerializeToString()


def relay_ack_from(message: pb.RelayAck) -> tuple[ArtifactKey, int, int]:
    return _key(message.key), message.index, message.backlog


def width_wish_to_bytes(connections: int) -> bytes:
    return pb.PeerMessage(width_wish=pb.WidthWish(connections=connections)).SerializeToString()


def width_wish_from(message: pb.WidthWish) -> int:
    if not 1 <= message.connections <= LINK_CONNECTIONS:
        raise MalformedMessage(f"width: expected 1 to {LINK_CONNECTIONS} connections, got {message.connections}")
    return message.connections


def _key(data: bytes) -> ArtifactKey:
    if len(data) != KEY_BYTES:
        raise MalformedMessage(f"artifact key: expected {KEY_BYTES} bytes, got {len(data)}")
    return ArtifactKey(data)


def plan_to_message(plan: BroadcastPlan) -> pb.BroadcastPlan:
    nodes = [message_of(node, pb.PlanNode, access=access_to_message(node.access)) for node in plan.nodes]
    trees = [message_of(tree, pb.PlanTree) for tree in plan.trees]
    return message_of(plan, pb.BroadcastPlan, nodes=nodes, trees=trees)


def plan_from_message(message: pb.BroadcastPlan) -> BroadcastPlan:
    """Parses a plan; MalformedMessage if its trees do not match its nodes."""
    check(message, "the plan")
    nodes = tuple(
        NodeLink(
            PeerId(node.peer_id), node.name, tuple(node.addresses), node.uplink_bytes_per_s,
            node.downlink_bytes_per_s, node.rtt_s, access_from_message(node.access),
            node.is_late,
        )
        for node in message.nodes
    )  # fmt: skip
    for tree in message.trees:
        if len(tree.parents) != len(nodes) - 1 or any(parent >= len(nodes) for parent in tree.parents):
            raise MalformedMessage(f"plan: expected trees over {len(nodes)} nodes, got one of {len(tree.parents) + 1}")
    trees = tuple(Tree(tree.weight, tuple(tree.parents)) for tree in message.trees)
    return BroadcastPlan(
        message.epoch, nodes, trees, message.topology, tuple(message.predicted_s), message.predicted_bytes,
        message.reason,
    )  # fmt: skip


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
