"""What a node does with its peers' frames, and what its session has it do: the session's only caller.

Guarantees: a chunk enters the library, and the session, only after its signature was verified; a header only from the trusted
publisher. Until that is known, what peers send waits unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable

from echo2.base.errors import DiskFull, EchoError, ResourceError, VersionMismatch
from echo2.base.ids import PeerId
from echo2.broadcast import events
from echo2.broadcast.artifact import ArtifactKey, Header, Seal
from echo2.broadcast.connection import Connection
from echo2.broadcast.library import Library
from echo2.broadcast.link import PeerLink
from echo2.broadcast.pace import Meter
from echo2.broadcast.session import BroadcastSession
from echo2.outside import monotonic
from echo2.outside.guard import MISHAPS, Refusals, Tasks, cancel_all
from echo2.wire import broadcast as wire
from echo2.wire.broadcast import ChunkIn, chunk_in

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
        for host in hosts:
            self._hosts.pop(host, None)
            self._hosts[host] = monotonic() + HOST_REFUSED_S
        while len(self._hosts) > HOSTS_MAX:
            self._hosts.popitem(last=False)

    def is_refused(self, host: str) -> bool:
        return monotonic() < self._hosts.get(host, 0.0)

    def name(self, peer: PeerId, *, is_lifted: bool) -> None:
        (self._named.discard if is_lifted else self._named.add)(peer)

    def name_all(self, peers: Iterable[PeerId]) -> None:
        self._named = set(peers)


def deserves_ban(error: Exception, peer: PeerId) -> bool:
    """Whether `peer` broke the protocol. An unexpected error is recorded, and costs the peer only its connection."""
    if not isinstance(error, EchoError):
        MISHAPS.note("a connection of the broadcast", peer, error)
    return isinstance(error, EchoError) and not isinstance(error, ResourceError | VersionMismatch)


class Exchange:
    """`links`: to connected peers; `publisher`: whose artifacts are taken, None until it is known; `revised` is set when an
    artifact was added, sealed, completed or dropped, `changed` when there may be something for the consumer. `is_awaited`: whether
    this chunk is that. `error`: why the node ended."""

    def __init__(
        self, me: PeerId, library: Library, session: BroadcastSession, meter: Meter, bans: Bans,
        is_awaited: Callable[[ArtifactKey, int], bool] = lambda key, index: True,
    ) -> None:  # fmt: skip
        self.links: dict[PeerId, PeerLink] = {}
        self.publisher: PeerId | None = None
        self._is_publisher_known = asyncio.Event()
        self.revised, self.changed = asyncio.Event(), asyncio.Event()
        self.error: BaseException | None = None
        self.session = session
        self.tasks = Tasks(self.fail)
        self._me, self.library, self._meter, self._bans = me, library, meter, bans
        self._is_awaited = is_awaited
        self._revision = 0  # of the library, when `revised` was set
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- errors and time

    def fail(self, error: BaseException) -> None:
        """Ends the node's progress, once what has come is handed out."""
        if self.error is None:
            log.error("broadcast: %s: %s", type(error).__name__, error)
            self.error = error
            self.changed.set()

    def now(self) -> float:
        if self._loop is None:  # Python 3.11 asks the kernel each time
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # ---- actions of the session

    def act(self, event: events.Event) -> None:
        if self._revision != self.library.revision:
            self._revision = self.library.revision
            self.revised.set()
        for action in self.session.handle(event, self.now()):
            if isinstance(action, events.Wake):
                self.stop_timer()
                assert self._loop is not None, "`now` was called"
                self._timer = self._loop.call_at(action.at, lambda: self.act(events.Woken()))
            elif isinstance(action, events.Accuse):
                self.accuse(action.peer, action.reason, is_ban=True)
            elif (link := self.links.get(action.peer)) is None:
                continue
            elif isinstance(action, events.SendChunk):
                link.send_chunk(action)
            elif (frame := self._control_frame(action)) is not None:
                with contextlib.suppress(ResourceError):  # the peer does not read: keepalive will end the link
                    link.send_control(frame)

    def _control_frame(self, action: events.Message) -> bytes | None:
        """None if the artifact has been dropped."""
        match action:
            case events.SendHeader():
                return self.library.header_frame(action.key)
            case events.SendSeal():
                return self.library.seal_frame(action.key)
        return wire.control_frame(action)

    def accuse(self, peer: PeerId, reason: str, *, is_ban: bool) -> None:
        """Drops the peer; `is_ban`: also bans it."""
        self._bans.accuse(peer, reason, is_ban=is_ban)
        if (link := self.links.pop(peer, None)) is not None:  # first, so that no more of its frames are handled
            self.act(events.PeerDown(peer))
            self.tasks.start(link.close())

    # ---- what links call

    def on_width(self, link: PeerLink) -> None:
        if self.links.get(link.peer_id) is link:
            self.act(events.LinkWidened(link.peer_id, link.width))

    def on_sent(self, action: events.SendChunk, frame_bytes: int | None) -> None:
        """`frame_bytes`: on the wire; None: the store no longer had it."""
        if frame_bytes is not None:
            self._meter.sent(frame_bytes, self.now())
        self.act(events.ChunkSent(action.peer, action.key, action.index, is_lost=frame_bytes is None))

    def on_frame(self, peer: PeerId, frame: bytes) -> bool:
        """Checks and keeps what a peer sent, and has the session decide; returns whether it brought what is kept. EchoError if the
        peer broke the protocol; a full disk ends the node."""
        self._meter.downlink.add(len(frame), self.now())
        try:
            if (incoming := chunk_in(frame, f"peer {peer}")) is not None:
                return self._on_chunk(peer, incoming, len(frame))
            message = wire.parse(frame, f"peer {peer}")
            match message.WhichOneof("kind"):
                case "header":
                    return self.on_header(peer, wire.header_from(message.header))
                case "seal":
                    return self._on_seal(peer, wire.seal_from(message.seal))
                case _:
                    self.act(wire.control_from(message, peer))
        except DiskFull as error:
            self.fail(error)
        return False

    # ---- messages

    def _on_chunk(self, peer: PeerId, incoming: ChunkIn, frame_bytes: int) -> bool:
        chunk = incoming.chunk
        entry = self.library.entries.get(chunk.key)
        if entry is None:
            return False
        self._meter.received_bytes += frame_bytes
        is_new = chunk.index not in entry.digests
        if is_new:
            digest = chunk.verify(entry.header.publisher)
            if not self.library.add_chunk(chunk, digest, incoming.record):
                return False
        size = len(chunk.payload)
        self.act(events.ChunkSeen(peer, chunk.key, chunk.index, size, incoming.route, is_answer=incoming.is_answer))
        if self._is_awaited(chunk.key, chunk.index):
            self.changed.set()
        return is_new

    def _on_seal(self, peer: PeerId, seal: Seal) -> bool:
        entry = self.library.entries.get(seal.key)
        if entry is None:
            return False
        if is_new := entry.seal is None:
            seal.verify(entry.header.publisher)
            if not self.library.add_seal(seal.key, seal):
                return False
        self.act(events.SealSeen(peer, seal.key, seal.chunk_count))
        return is_new

    def on_header(self, peer: PeerId, header: Header) -> bool:
        key = header.key
        if key in self.library.entries:
            self.act(events.HeaderSeen(peer, key, is_wanted=False))
            return False
        if header.publisher not in (self._me, self.publisher) or header.run_id != self.library.run_id:
            log.debug("peer %s: header of %s by %s, not our publisher", peer, header.artifact, header.publisher)
            return False
        header.verify()
        artifact, at, newest_at = header.artifact, header.published_unix_s, self.library.published_unix_s
        if header.publisher == self._me:  # that we have dropped: do not announce it again, but publish later than that
            self.library.published_unix_s = max(at, newest_at)
            return False
        if any(
            entry.header.published_unix_s > at
            and (entry.artifact == artifact or entry.artifact.version < artifact.version)
            for entry in self.library.entries.values()
        ):
            return False  # we have a newer publication of the same, or one by which the learner has gone back from it
        self.library.add_header(header)
        self.act(events.HeaderSeen(peer, key, is_wanted=False))
        return at > newest_at  # else we may have dropped it, and it is sent again

    def trust(self, publisher: PeerId) -> None:
        """Names the publisher, whose artifacts alone are kept; from now on peers are read."""
        for key in [key for key, entry in self.library.entries.items() if entry.header.publisher != publisher]:
            self.library.drop(key)
        self.publisher = publisher
        self._is_publisher_known.set()

    async def wait_for_publisher(self, connection: Connection) -> None:
        """Until it is known, or the connection has ended."""
        if self._is_publisher_known.is_set():
            return
        either = [asyncio.ensure_future(event.wait()) for event in (self._is_publisher_known, connection.ended)]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(either)
