"""What a node does with its peers' frames, and what its session has it do: the session's only caller.

Guarantees: a chunk enters the library, and the session, only after its signature was verified; a header only from the trusted
publisher. Until the publisher is known, up to HELD_HEADERS_MAX headers wait; beyond that, the oldest one of the peer that sent
most is dropped. Leaves to others: how links come and go (connections), frames (wire/broadcast), decisions (session).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Iterable

from echo2.base.errors import DiskFull, EchoError, IntegrityError, MalformedMessage, ResourceError, VersionMismatch
from echo2.base.ids import PeerId
from echo2.broadcast.artifact import ArtifactKey, Chunk, Header
from echo2.broadcast.events import (
    Accuse,
    Action,
    Cancel,
    ChunkSeen,
    ChunkSent,
    Event,
    Forgotten,
    Have,
    HeaderSeen,
    LinkWidened,
    PeerDown,
    RelayAck,
    Request,
    SealSeen,
    SendChunk,
    SendHeader,
    SendSeal,
    Wake,
    WidthWished,
    Woken,
)
from echo2.broadcast.library import Frame, Library
from echo2.broadcast.link import PeerLink
from echo2.broadcast.pace import Meter
from echo2.broadcast.session import BroadcastSession
from echo2.outside import monotonic
from echo2.outside.guard import MISHAPS, Refusals
from echo2.trust.tls import PROTOCOL_VERSION
from echo2.wire import broadcast as wire
from echo2.wire.broadcast import ChunkIn, chunk_in
from echo2.wire.gen.echo2.v1 import broadcast_pb2 as pb

HELD_HEADERS_MAX = 128  # each at most some hundred bytes
BANS_MAX = 4096  # identities cost an attacker little, and must not cost us memory
HOSTS_MAX = 1024  # some 100 KB
HOST_REFUSED_S = 10.0  # a banned peer tries again every few seconds, with a handshake each
log = logging.getLogger("echo2.broadcast")


class Bans:
    """Banned peers: those that this node caught itself, which stay until its process ends or BANS_MAX newer ones push them out,
    and those that the coordinator names, which only it can lift. A host is refused for a while after a banned peer came from it."""

    def __init__(self) -> None:
        self._drops = Refusals(log)  # rate-limited: newcomers may come and go without end
        self.found: dict[PeerId, str] = {}
        self._named: set[PeerId] = set()
        self._hosts: OrderedDict[str, float] = OrderedDict()  # of banned peers that came: until when each is refused

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._named or peer in self.found

    def accuse(self, peer: PeerId, reason: str, *, is_ban: bool) -> None:
        """Logs why a peer is dropped; `is_ban`: also bans it, as this node's own finding."""
        if not is_ban:
            self._drops.warn("peer %s dropped: %s", peer, reason)
            return
        log.warning("peer %s banned: %s", peer, reason)
        self.found.pop(peer, None)
        self.found[peer] = reason
        while len(self.found) > BANS_MAX:
            del self.found[next(iter(self.found))]

    def refuse(self, hosts: Iterable[str]) -> None:
        """A banned peer has come from there."""
        for host in hosts:
            self._hosts.pop(host, None)
            self._hosts[host] = monotonic() + HOST_REFUSED_S
        while len(self._hosts) > HOSTS_MAX:
            self._hosts.popitem(last=False)

    def is_refused(self, host: str) -> bool:
        return monotonic() < self._hosts.get(host, 0.0)

    def name(self, peer: PeerId, *, is_lifted: bool) -> None:
        """Adds or lifts the coordinator's ban of one peer."""
        (self._named.discard if is_lifted else self._named.add)(peer)

    def name_all(self, peers: Iterable[PeerId]) -> None:
        """Replaces the whole list of the coordinator's bans."""
        self._named = set(peers)


def deserves_ban(error: Exception, peer: PeerId) -> bool:
    """Whether `peer` broke the protocol. An unexpected error is recorded, and costs the peer only its connection."""
    if not isinstance(error, EchoError):
        MISHAPS.note("a connection of the broadcast", peer, error)
    return isinstance(error, EchoError) and not isinstance(error, ResourceError | VersionMismatch)


class Exchange:
    """`links`: to connected peers; `publisher`: whose artifacts are taken, None until it is known; `revised` is set when an
    artifact was added, sealed or dropped, `changed` when there may be something for the consumer. `error`: why the node ended."""

    def __init__(self, me: PeerId, library: Library, session: BroadcastSession, meter: Meter, bans: Bans) -> None:
        self.links: dict[PeerId, PeerLink] = {}
        self.publisher: PeerId | None = None
        self.revised, self.changed = asyncio.Event(), asyncio.Event()
        self.error: BaseException | None = None
        self.session, self.tasks = session, set[asyncio.Task[None]]()
        self._me, self._library, self._meter, self._bans = me, library, meter, bans
        self._held: dict[tuple[PeerId, ArtifactKey], Header] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- tasks and time

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs it beside the node; its error ends the node."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the node's progress, once what has come is handed out."""
        if self.error is None:
            log.error("broadcast: %s: %s", type(error).__name__, error)
            self.error, self._library.trouble = error, str(error)
            self.changed.set()

    def now(self) -> float:
        if self._loop is None:  # Python 3.11 asks the kernel each time
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # ---- actions of the session

    def act(self, event: Event) -> None:
        """Passes an event to the session and carries out its actions."""
        for action in self.session.handle(event, self.now()):
            if isinstance(action, Wake):
                self.stop_timer()
                assert self._loop is not None, "`now` was called"
                self._timer = self._loop.call_at(action.at, lambda: self.act(Woken()))
            elif isinstance(action, Accuse):
                self.accuse(action.peer, action.reason, is_ban=True)
            elif (link := self.links.get(action.peer)) is None:
                continue
            elif isinstance(action, SendChunk):
                link.send_chunk(action)
            elif (frame := self._control_frame(action)) is not None:
                with contextlib.suppress(ResourceError):  # the peer does not read: keepalive will end the link
                    link.send_control(frame)

    def _control_frame(self, action: Action) -> bytes | None:
        """The frame of a control message; None if its artifact has been dropped."""
        match action:
            case SendHeader():
                return self._library.header_frame(action.key)
            case SendSeal():
                return self._library.seal_frame(action.key)
            case Have():
                return wire.have_to_bytes(action.key, action.bitmap, action.is_sealed)
            case Request():
                return wire.request_to_bytes(action.key, action.indices)
            case Cancel():
                return wire.cancel_to_bytes(action.key, action.indices)
            case RelayAck():
                return wire.relay_ack_to_bytes(action.key, action.index, action.backlog)
            case _:
                raise AssertionError(f"not a message: {action}")

    def accuse(self, peer: PeerId, reason: str, *, is_ban: bool) -> None:
        """Drops the peer; `is_ban`: also bans it."""
        self._bans.accuse(peer, reason, is_ban=is_ban)
        if (link := self.links.pop(peer, None)) is not None:  # first, so that no more of its frames are handled
            self.act(PeerDown(peer))
            self.spawn(link.close())

    # ---- what links call

    def frame(self, key: ArtifactKey, index: int) -> Frame | None:
        return self._library.frame(key, index)

    def header(self, key: ArtifactKey) -> bytes | None:
        return self._library.header_frame(key)

    def on_width(self, link: PeerLink) -> None:
        """A connection of the link was opened, closed or lost."""
        if self.links.get(link.peer_id) is link:
            self.act(LinkWidened(link.peer_id, link.width))

    def on_sent(self, action: SendChunk, frame_bytes: int | None) -> None:
        """`frame_bytes`: on the wire; None: the store no longer had it."""
        if frame_bytes is not None:
            entry = self._library.entries.get(action.key)
            self._meter.sent(entry.header.artifact if entry else None, frame_bytes, self.now())
        self.act(ChunkSent(action.peer, action.key, action.index, is_lost=frame_bytes is None))

    def on_frame(self, peer: PeerId, frame: bytes) -> bool:
        """Checks and keeps what a peer sent, and has the session decide; returns whether it brought a new chunk. EchoError if the
        peer broke the protocol; a full disk ends the node."""
        self._meter.downlink.add(len(frame), self.now())
        held = self._library.chunks_stored
        try:
            if (came := chunk_in(frame, f"peer {peer}")) is not None:
                self._on_chunk(peer, came, len(frame))
            else:
                self._on_message(peer, wire.parse(frame, f"peer {peer}"), len(frame))
        except DiskFull as error:
            self.fail(error)
        return self._library.chunks_stored > held

    def check_hello(self, peer: PeerId, frame: bytes) -> bool:
        """Of the first frame of a connection: whether that joins an existing link. VersionMismatch for another run or protocol."""
        message = wire.parse(frame, f"peer {peer}")
        if message.WhichOneof("kind") != "hello":
            raise MalformedMessage(f"peer {peer}: expected a hello first, got {message.WhichOneof('kind')}")
        if message.hello.protocol_version != PROTOCOL_VERSION or message.hello.run_id != self._library.run_id:
            raise VersionMismatch(
                f"peer {peer}: expected protocol {PROTOCOL_VERSION} of run {self._library.run_id}, got "
                f"protocol {message.hello.protocol_version} of run {message.hello.run_id}"
            )
        return bool(message.hello.is_further)

    # ---- messages

    def _on_message(self, peer: PeerId, message: pb.PeerMessage, frame_bytes: int) -> None:
        match message.WhichOneof("kind"):
            case "chunk":
                chunk = wire.chunk_from(message.chunk)
                record = memoryview(wire.chunk_to_bytes(chunk))
                came = ChunkIn(chunk, record, wire.route_of(message), message.is_answer)
                self._on_chunk(peer, came, frame_bytes)
            case "header":
                self.on_header(peer, wire.header_from(message.header))
            case "seal":
                self._on_seal(peer, message.seal)
            case "have":
                self.act(Have(peer, *wire.have_from(message.have)))
            case "request":
                self.act(Request(peer, *wire.indices_from(message.request)))
            case "cancel":
                self.act(Cancel(peer, *wire.indices_from(message.cancel)))
            case "relay_ack":
                self.act(RelayAck(peer, *wire.relay_ack_from(message.relay_ack)))
            case "width_wish":
                self.act(WidthWished(peer, wire.width_wish_from(message.width_wish)))
            case kind:
                raise MalformedMessage(f"peer {peer}: expected one hello at the start, got {kind} again")

    def _on_chunk(self, peer: PeerId, came: ChunkIn, frame_bytes: int) -> None:
        chunk = came.chunk
        entry = self._library.entries.get(chunk.key)
        if entry is None:
            return
        self._meter.received(entry.header.artifact, frame_bytes)
        if chunk.index not in entry.digests:
            digest = chunk.verify(entry.header.publisher)
            if not self._keep(chunk, digest, came.record):
                return
        size = len(chunk.payload)
        self.act(ChunkSeen(peer, chunk.key, chunk.index, size, came.route, is_answer=came.is_answer))
        self.changed.set()

    def _keep(self, chunk: Chunk, digest: bytes, record: memoryview) -> bool:
        """False if the artifact turned out to be sealed wrongly."""
        try:
            dropped = self._library.add_chunk(chunk, digest, record)
        except IntegrityError as error:
            log.error("%s", error)
            self.forget(chunk.key)
            return False
        for key in dropped:
            self.on_dropped(key)
        return True

    def _on_seal(self, peer: PeerId, message: pb.ArtifactSeal) -> None:
        seal = wire.seal_from(message)
        entry = self._library.entries.get(seal.key)
        if entry is None:
            return
        if entry.seal is None:
            seal.verify(entry.header.publisher)
            try:
                self._library.add_seal(seal.key, seal)
            except IntegrityError as error:
                log.error("%s", error)
                self.forget(seal.key)
                return
        self.act(SealSeen(peer, seal.key, seal.chunk_count))
        self.revised.set()
        self.changed.set()

    def on_header(self, peer: PeerId, header: Header) -> None:
        key = header.key
        if key in self._library.entries:
            self.act(HeaderSeen(peer, key, is_wanted=False))
            return
        if header.publisher == self._me:
            return  # our own artifact that we have dropped: do not announce it again
        if self.publisher is None:
            self._hold(peer, header)
            return
        if header.publisher != self.publisher or header.run_id != self._library.run_id:
            log.debug("peer %s: header of %s by %s, not our publisher", peer, header.artifact, header.publisher)
            return
        header.verify()
        if any(
            entry.header.artifact == header.artifact and entry.header.published_unix_s > header.published_unix_s
            for entry in self._library.entries.values()
        ):
            return  # we have a newer publication of the same version
        for dropped in self._library.add_header(header):
            self.on_dropped(dropped)
        self.act(HeaderSeen(peer, key, is_wanted=False))
        self.revised.set()
        self.changed.set()

    def _hold(self, peer: PeerId, header: Header) -> None:
        self._held[peer, header.key] = header
        if len(self._held) > HELD_HEADERS_MAX:
            counts = Counter(sender for sender, _ in self._held)
            del self._held[max(self._held, key=lambda held: counts[held[0]])]

    def trust(self, publisher: PeerId) -> None:
        """Names the publisher; headers that came before are looked at now."""
        self.publisher = publisher
        held, self._held = self._held, {}
        try:
            for (peer, _), header in held.items():
                self.on_header(peer, header)
        except DiskFull as error:
            self.fail(error)

    # ---- what is dropped

    def forget(self, key: ArtifactKey) -> None:
        """Drops an artifact."""
        self._library.drop(key)
        self.on_dropped(key)

    def on_dropped(self, key: ArtifactKey) -> None:
        """The library has dropped an artifact."""
        self.act(Forgotten(key))
        self.revised.set()
        self.changed.set()
