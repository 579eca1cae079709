"""Parses peers' frames into verified events. Raises on anything that the publisher did not sign.

Guarantees: a chunk enters the library only after its signature was verified; a header only from the trusted publisher. Until
the publisher is known, up to HELD_HEADERS_MAX headers wait; beyond that, the oldest one of the peer that sent most is dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from echo2.base.errors import IntegrityError, MalformedMessage, ResourceError, VersionMismatch
from echo2.base.ids import PeerId
from echo2.broadcast.events import (
    CancelSeen,
    ChunkSeen,
    Event,
    Forgotten,
    HaveSeen,
    HeaderSeen,
    RelayAckSeen,
    RequestSeen,
    SealSeen,
    WidthWished,
)
from echo2.broadcast.manifest import ArtifactKey, Header
from echo2.broadcast.runtime.library import Library
from echo2.broadcast.runtime.meter import Meter
from echo2.trust.runtime.tls import PROTOCOL_VERSION
from echo2.wire import broadcast as wire
from echo2.wire.chunk_frames import ChunkIn, chunk_in
from echo2.wire.gen.echo2.v1 import broadcast_pb2 as pb

log = logging.getLogger("echo2.broadcast")
HELD_HEADERS_MAX = 128


@dataclass(frozen=True, slots=True)
class Hello:
    """`is_further`: this connection joins an existing link. `bulk_port`: where the peer accepts bulk connections; 0: nowhere."""

    is_further: bool
    bulk_port: int


class Inbox:
    def __init__(self, me: PeerId, library: Library, meter: Meter) -> None:
        self._me = me
        self.publisher: PeerId | None = None
        self._library = library
        self._meter = meter
        self._held: dict[tuple[PeerId, ArtifactKey], Header] = {}

    def check_hello(self, peer: PeerId, frame: bytes) -> Hello:
        """Parses the first frame of a connection; VersionMismatch for another run or protocol version."""
        message = wire.parse(frame, f"peer {peer}")
        if message.WhichOneof("kind") != "hello":
            raise MalformedMessage(f"peer {peer}: expected a hello first, got {message.WhichOneof('kind')}")
        if message.hello.protocol_version != PROTOCOL_VERSION or message.hello.run_id != self._library.run_id:
            raise VersionMismatch(
                f"peer {peer}: expected protocol {PROTOCOL_VERSION} of run {self._library.run_id}, got "
                f"protocol {message.hello.protocol_version} of run {message.hello.run_id}"
            )
        return Hello(message.hello.is_further, message.hello.bulk_port)

    def take_held_headers(self) -> list[tuple[PeerId, Header]]:
        held, self._held = self._held, {}
        return [(peer, header) for (peer, _), header in held.items()]

    def _hold(self, peer: PeerId, header: Header) -> None:
        self._held[peer, header.key] = header
        if len(self._held) > HELD_HEADERS_MAX:
            counts = Counter(sender for sender, _ in self._held)
            del self._held[max(self._held, key=lambda held: counts[held[0]])]

    def events_of(self, peer: PeerId, frame: bytes) -> list[Event]:
        """The events of a frame; EchoError if the peer has broken the protocol."""
        if (came := chunk_in(frame, f"peer {peer}")) is not None:
            return self._chunk(peer, came, len(frame))
        message = wire.parse(frame, f"peer {peer}")
        match message.WhichOneof("kind"):
            case "chunk":
                chunk = wire.chunk_from(message.chunk)
                record = memoryview(wire.chunk_to_bytes(chunk))
                came = ChunkIn(chunk, record, wire.route_of(message), message.is_answer)
                return self._chunk(peer, came, len(frame))
            case "header":
                return self.header(peer, wire.header_from(message.header))
            case "seal":
                return self._seal(peer, message.seal)
            case "have":
                return [HaveSeen(peer, *wire.have_from(message.have))]
            case "request":
                return [RequestSeen(peer, *wire.indices_from(message.request))]
            case "cancel":
                return [CancelSeen(peer, *wire.indices_from(message.cancel))]
            case "relay_ack":
                return [RelayAckSeen(peer, *wire.relay_ack_from(message.relay_ack))]
            case "width_wish":
                return [WidthWished(peer, wire.width_wish_from(message.width_wish))]
            case kind:
                raise MalformedMessage(f"peer {peer}: expected one hello at the start, got {kind} again")

    def header(self, peer: PeerId, header: Header) -> list[Event]:
        key = header.key
        if key in self._library.entries:
            return [HeaderSeen(peer, key, is_wanted=False)]
        if header.publisher == self._me:
            return []  # our own artifact that we have dropped: do not announce it again
        if self.publisher is None:
            self._hold(peer, header)
            return []
        if header.publisher != self.publisher or header.run_id != self._library.run_id:
            log.debug("peer %s: header of %s by %s, not our publisher", peer, header.artifact, header.publisher)
            return []
        header.verify()
        if any(
            entry.header.artifact == header.artifact and entry.header.published_unix_s > header.published_unix_s
            for entry in self._library.entries.values()
        ):
            return []  # we have a newer publication of the same version
        dropped = self._library.add_header(header)
        return [*(Forgotten(old) for old in dropped), HeaderSeen(peer, key, is_wanted=False)]

    def _chunk(self, peer: PeerId, came: ChunkIn, frame_bytes: int) -> list[Event]:
        chunk = came.chunk
        entry = self._library.entries.get(chunk.key)
        if entry is None:
            return []
        self._meter.received(entry.header.artifact, frame_bytes)
        events: list[Event] = []
        if chunk.index not in entry.digests:
            digest = chunk.verify(entry.header.publisher)
            try:
                events += (Forgotten(old) for old in self._library.add_chunk(chunk, digest, came.record))
            except ResourceError as error:
                log.error("chunk %d of %s not kept: %s", chunk.index, entry.header.artifact, error)
                return []
            except IntegrityError as error:
                log.error("%s", error)
                self._library.drop(chunk.key)
                return [Forgotten(chunk.key)]
        size = len(chunk.payload)
        events.append(ChunkSeen(peer, chunk.key, chunk.index, size, came.route, is_answer=came.is_answer))
        return events

    def _seal(self, peer: PeerId, message: pb.ArtifactSeal) -> list[Event]:
        seal = wire.seal_from(message)
        entry = self._library.entries.get(seal.key)
        if entry is None:
            return []
        if entry.seal is None:
            seal.verify(entry.header.publisher)
            try:
                self._library.add_seal(seal.key, seal)
            except IntegrityError as error:
                log.error("%s", error)
                self._library.drop(seal.key)
                return [Forgotten(seal.key)]
        return [SealSeen(peer, seal.key, seal.chunk_count)]
