"""BroadcastNode: runs one node's broadcast. It owns the connections, the store and the session's clock.

Waits for: frames of peers, transport slots, the session's timers, the consumer of `progress`; each wait is shown in
`stats().waits_for` or ended by a timer. Guarantees: only chunks signed by the publisher are kept, relayed or handed out; a
peer that sends anything else is logged, dropped and banned. Leaves to others: plan, coding (weights/), swaps (worker).

An artifact at one node:

    header ──▶ known ──on the way to the newest──▶ wanted ──all chunks and the seal──▶ sealed ──▶ consumer decodes
                 ▲                                  │  ▲                                  │
                 └────────── stalled: another way ──┘  └── disk or weights corrupt: refetch ─┘
    any of them ──no longer needed, or no room──▶ forgotten
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

from echo2.base.errors import CorruptChunk, EchoError, ResourceError, StateError
from echo2.base.ids import PeerId, Version
from echo2.broadcast.chunks import signed_chunks
from echo2.broadcast.events import (
    Accuse,
    ArtifactWanted,
    ChunkSeen,
    ChunkSent,
    Emptied,
    Event,
    Forgotten,
    HeaderSeen,
    PlanSet,
    SealSeen,
    SendChunk,
    SendRelayAck,
    Unwanted,
    Wake,
    Woken,
)
from echo2.broadcast.manifest import ArtifactId, ArtifactKey, Chunk, Header, Seal, root_of
from echo2.broadcast.room import expected_bytes
from echo2.broadcast.runtime.bans import Bans
from echo2.broadcast.runtime.chunk_store import ChunkStore
from echo2.broadcast.runtime.connections import ConnectionCalls, Connections
from echo2.broadcast.runtime.dialling import Dialling
from echo2.broadcast.runtime.following import Following
from echo2.broadcast.runtime.inbox import Inbox
from echo2.broadcast.runtime.library import Library
from echo2.broadcast.runtime.meter import Meter
from echo2.broadcast.runtime.node_options import NodeCalls, NodeOptions
from echo2.broadcast.runtime.outbox import control_frame
from echo2.broadcast.runtime.progress import (
    ArtifactSealed,
    AvailableArtifact,
    NodeStats,
    Progress,
    PublicationDone,
)
from echo2.broadcast.runtime.reader import ArtifactReader
from echo2.broadcast.runtime.restoring import restored
from echo2.broadcast.runtime.transport import Connection, Transport
from echo2.broadcast.runtime.transport_grpc import GrpcTransport
from echo2.broadcast.runtime.uplink import UplinkWatch
from echo2.broadcast.session import BroadcastSession
from echo2.broadcast.topology import BroadcastPlan, chunk_bytes_for
from echo2.outside import unix_now
from echo2.trust.identity import Role
from echo2.trust.runtime.gate import GatedServer
from echo2.trust.runtime.tls import Credentials
from echo2.weights.policy import BaseCheckpoint

log = logging.getLogger("echo2.broadcast")
CONNECT_INTERVAL_S = 0.5
SETTLE_S = 0.3  # a newcomer waits for all announcements before it chooses a way
WIRE_OVERHEAD = 1.05  # bytes on the link per chunk byte: TCP/IP, TLS, HTTP/2


class BroadcastNode:
    def __init__(
        self,
        credentials: Credentials,
        options: NodeOptions,
        transport: Transport | None = None,
        calls: NodeCalls | None = None,
    ) -> None:
        self.credentials, self._lost = credentials, (calls or NodeCalls()).lost
        self.options = options
        self.peer_id = credentials.peer_id
        store = ChunkStore(options.folder, options.store_bytes)
        self.library = Library(
            store,
            credentials.run_id,
            options.limits,
            options.lineage,
            lambda: self.following.link(),  # noqa: PLW0108 - `following` is created below
        )
        self.session = BroadcastSession(self.peer_id, options.seed, options.uplink_limit_bytes_per_s / WIRE_OVERHEAD)
        self.meter = Meter()
        self.following = Following(self.peer_id, self.library, self.meter, options.shape)
        self._grpc = GrpcTransport(credentials)
        self._transport: Transport = transport or self._grpc
        self._dialling = Dialling(self.peer_id)
        self._inbox = Inbox(self.peer_id, self.library, self.meter)
        self.bans = Bans()
        self._connections = Connections(
            credentials, self._transport, options.shape, self.session, self._dialling, self.bans,
            ConnectionCalls(
                self.library.frame, self.library.header_frame, self._chunk_sent, self._received,
                self._inbox.check_hello, (calls or NodeCalls()).is_proven, self._linked, self._act, self._spawn,
            ),
        )  # fmt: skip
        self._uplink = UplinkWatch(self.meter, self.session, self._act, self._connections.stripes.look)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._reader = ArtifactReader(self.library)
        self._settled_at = float("-inf")
        self._is_running = False
        self._error: BaseException | None = None
        self._sizes: dict[int, int] = {}  # bytes of the last artifact published that leads over so many versions
        if credentials.role is Role.LEARNER:
            self._inbox.publisher = self.peer_id

    # ---- life

    def serves_grpc_at(self, own: tuple[str, int]) -> None:
        """Sets the address of our own gRPC server, to which calls through byte pipes are forwarded."""
        self._connections.pipe_member.grpc_at = own

    def add_to_server(self, server: GatedServer) -> None:
        """Registers the gRPC service; call before the server starts. The server must demand client certificates of the run."""
        self._grpc.add_to_server(server, self.accept)

    async def start(self) -> None:
        """Restores the chunks of an earlier run and starts connecting."""
        async for event in restored(self.library, self.peer_id):
            self._act(event)
        if self.library.unsound_files and self._inbox.publisher == self.peer_id:
            self._lost("a chunk file")
        self._is_running = True
        if self.options.bulk_host:
            self._connections.listen(self.options.bulk_host, self.options.bulk_port)
        self._spawn(self._keep_connected())
        self._spawn(self._uplink.run())
        self._update_wants()

    async def stop(self) -> None:
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._connections.end()
            await self._transport.close()
        finally:  # even if the network part fails: each artifact holds an open file
            self.library.store.close()
            self._changed.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("broadcast: %s: %s", type(error).__name__, error)
            self._error = error
            self._changed.set()

    # ---- calls of the role

    def set_plan(self, plan: BroadcastPlan) -> None:
        """Adopts the coordinator's plan. Its seed is the publisher unless `set_publisher` named one."""
        if plan.seed is not None and self._inbox.publisher is None:
            self._trust(plan.seed.peer_id)
        self._dialling.plan = self.following.plan = plan
        self._dialling.refresh(self._now())
        self._act(PlanSet(plan))

    def set_publisher(self, peer_id: PeerId, address: str) -> None:
        """Sets the trusted publisher, and its address to dial even before the first plan."""
        self._dialling.publisher = peer_id, address
        self._dialling.refresh(self._now())
        self._trust(peer_id)

    def _trust(self, publisher: PeerId) -> None:
        self._inbox.publisher = publisher
        for peer, header in self._inbox.take_held_headers():
            self._take_events(self._inbox.header(peer, header))

    def set_live(self, version: Version | None) -> None:
        """Decoding starts from this version: a base checkpoint, or the live version before a restart; None: from a keyframe."""
        self._reader.restart_from(version)
        self._update_wants()

    def set_base(self, base: BaseCheckpoint | None, *, is_sought: bool = False) -> None:
        """Sets a version that the consumer got elsewhere. `is_sought`: it is still being looked for, so fetch nothing yet."""
        self.library.set_base(base)
        if is_sought or self._settled_at == float("inf"):
            self._settled_at = float("inf" if is_sought else "-inf")
        self._update_wants()

    def adopted(self, artifact: ArtifactId) -> None:
        """The consumer got this version elsewhere: stops fetching the artifact and continues from it."""
        if (key := self.library.find(artifact)) is not None:
            self._forget(key)
        self.set_live(artifact.version)

    def refetch(self, artifact: ArtifactId) -> None:
        """Refetches an artifact whose decoded weights did not match; the reader goes back to its parent."""
        if (key := self.library.find(artifact)) is not None:
            self._fetch_anew(key)
        self._reader.restart_from(artifact.parent)
        self._update_wants()

    def _fetch_anew(self, key: ArtifactKey) -> None:
        for dropped in self.library.empty(key):
            self._act(Forgotten(dropped))
        self._act(Emptied(key))

    def _look_after(self) -> None:
        """Refetches artifacts that the disk corrupted (the publisher reports them as lost) and replaces stalled ways."""
        for key, artifact in self.library.take_rotten():
            if self._inbox.publisher == self.peer_id:
                self._forget(key)
                self._lost(str(artifact))
            else:
                self._fetch_anew(key)
        stalled = self.following.look(self._reader.version, bool(self._connections.links), self._now())
        for key in stalled or ():
            self._act(Unwanted(key))
        if stalled is not None:
            self._update_wants()

    # ---- publishing

    async def publish(
        self,
        artifact: ArtifactId,
        blocks: Iterator[bytes],
        fingerprint: Callable[[], str],
        full_snapshot_bytes: int,
        *,
        is_pushed: bool = True,
    ) -> PublicationDone:
        """Publishes blocks as the iterator (run in a thread) yields them; calls `fingerprint` after the last one.

        `is_pushed` False: only peers that request it get it (a keyframe for newcomers). An artifact that is already
        sealed is not published again.
        """
        known = self.library.find(artifact)
        if known is not None and (entry := self.library.entries[known]).is_complete and entry.seal is not None:
            return PublicationDone(artifact, entry.seal.chunk_count, entry.seal.total_bytes)
        run_id, lineage = self.credentials.run_id, self.options.lineage
        header = Header(artifact, run_id, lineage, unix_now(), full_snapshot_bytes, is_pushed, self.peer_id)
        header = header.signed(self.credentials.identity)
        for dropped in self.library.add_header(header):
            self._act(Forgotten(dropped))
        self._act(HeaderSeen(None, header.key, is_wanted=False))
        span = artifact.version - artifact.parent if artifact.parent is not None else 0
        expected = self._sizes.get(span) or expected_bytes(artifact, full_snapshot_bytes)
        size = chunk_bytes_for(self.session.plan, self.options.chunk_bytes, expected)
        sign = functools.partial(signed_chunks, size, self.credentials.identity)
        index, total, digests = 0, 0, list[bytes]()
        try:
            while (block := await asyncio.to_thread(next, blocks, None)) is not None:
                for chunk, digest in await asyncio.to_thread(sign, header.key, index, block):
                    self._keep(chunk, digest, is_fresh=is_pushed)
                    digests.append(digest)
                    index, total = index + 1, total + len(chunk.payload)
                    await asyncio.sleep(0)  # yield to the event loop: a block may be hundreds of chunks
        except EchoError:  # a partial artifact is useless
            self._forget(header.key)
            raise
        seal = Seal(header.key, index, total, root_of(digests), fingerprint()).signed(self.credentials.identity)
        self._sizes[span] = total
        self.library.add_seal(header.key, seal)
        self._act(SealSeen(None, header.key, index))
        log.info("published %s: %d chunks, %d bytes", artifact, index, total)
        return PublicationDone(artifact, index, total)

    def _keep(self, chunk: Chunk, digest: bytes, *, is_fresh: bool) -> None:
        if chunk.key not in self.library.entries:
            raise StateError(f"artifact {chunk.key.hex()}: dropped while being published; the store is too small")
        for dropped in self.library.add_chunk(chunk, digest):
            self._act(Forgotten(dropped))
        self._act(ChunkSeen(None, chunk.key, chunk.index, len(chunk.payload), is_fresh=is_fresh))

    async def progress(self) -> AsyncIterator[Progress]:
        """Yields what to decode, in order; waits while nothing new has arrived. For one consumer only."""
        while self._is_running or self._error is None:
            step = self._next_step()
            if step is not None:
                if isinstance(step, ArtifactSealed):
                    self._update_wants()
                yield step
                continue
            if self._error is not None:
                raise self._error
            if not self._is_running:
                return
            self._changed.clear()
            await self._changed.wait()

    def _next_step(self) -> Progress | None:
        """The next step for the consumer; refetches an artifact that the disk corrupted."""
        if self._now() < self._settled_at:
            return None
        try:
            return self._reader.next()
        except CorruptChunk as error:
            log.warning("fetched anew: %s", error)
            if (artifact := self._reader.artifact) is not None:
                self.refetch(artifact)
            return self._reader.next()

    def artifacts_available(self) -> list[AvailableArtifact]:
        """All artifacts that this node holds or knows of, oldest version first."""
        return self.library.available()

    def _update_wants(self) -> None:
        """Requests the artifacts on the way to the newest version; the publisher needs none."""
        if self._inbox.publisher == self.peer_id:
            return
        now = self._now()
        if self._settled_at == float("-inf") and self.library.entries:
            self._settled_at = now + SETTLE_S
            asyncio.get_running_loop().call_later(SETTLE_S, self._update_wants)
        if now < self._settled_at:
            return
        way = self.following.choose(self._reader.version)
        if way is not None and (shortage := self.library.shortage(way.keys)):
            self._error = shortage
            self._changed.set()
            return
        for key in way.keys if way is not None else ():
            artifact = self.session.artifacts.get(key)
            if artifact is not None and not artifact.is_wanted:
                self._act(ArtifactWanted(key))
        self._changed.set()

    def _forget(self, key: ArtifactKey) -> None:
        self.library.drop(key)
        self._act(Forgotten(key))

    # ---- connections

    async def accept(self, connection: Connection) -> None:
        """Serves a connection that a peer dialled, until it ends."""
        if self._is_running:
            await self._connections.accept(connection)

    async def _keep_connected(self) -> None:
        """Every CONNECT_INTERVAL_S: handles corrupt and stalled artifacts, dials peers that are due."""
        while True:
            self._look_after()
            self._connections.tend(self._now())
            await asyncio.sleep(CONNECT_INTERVAL_S)

    def _linked(self) -> None:
        self._uplink.expect_new()

    def drop_banned(self) -> None:
        """Drops the links of all banned peers; call it after `bans` has changed."""
        self._connections.drop_banned()

    async def drop_connections(self) -> None:
        """Closes all connections, as a network failure would; they are dialled again."""
        await self._connections.close()

    def stats(self) -> NodeStats:
        """A snapshot for heartbeats and the operator."""
        newest = max(self.library.entries.values(), key=lambda entry: entry.rank, default=None)
        return NodeStats(
            links=self._connections.stripes.statuses(),
            sent_chunk_bytes=self.meter.sent_bytes,
            received_chunk_bytes=self.meter.received_bytes,
            duplicate_bytes=self.session.duplicates_bytes,
            pulled_chunks=self.session.pulled_chunks,
            sent_by_artifact=dict(self.meter.sent_by_artifact),
            received_by_artifact=dict(self.meter.received_by_artifact),
            uplink_bytes_per_s=self.session.governor.capacity_bytes_per_s or self.meter.uplink.bytes_per_s,
            newest_version_in_flight=newest.header.artifact.version if newest else 0,
            newest_chunks_held=len(newest.digests) if newest else 0,
            newest_chunk_count=newest.seal.chunk_count if newest and newest.seal else 0,
            banned=dict(self.bans.found),
            trouble=self.library.trouble,
            waits_for=self._waits_for(),
            way=self.following.describe(),
        )

    def _waits_for(self) -> str:
        if self._inbox.publisher is None:
            return "a plan that names the publisher"
        if not self._connections.links and self._dialling.targets:
            return self._dialling.waits_for()
        return self.library.waits_for(self._reader.version)

    # ---- frames in, actions out

    def _received(self, peer: PeerId, frame: bytes) -> bool:
        """Handles a peer's frame; returns whether it brought a new chunk."""
        self.meter.downlink.add(len(frame), self._now())
        held = self.library.chunks_taken
        self._take_events(self._inbox.events_of(peer, frame))
        return self.library.chunks_taken > held

    def _take_events(self, events: list[Event]) -> None:
        for event in events:
            self._act(event)
        if any(isinstance(event, HeaderSeen | ChunkSeen | SealSeen | Forgotten) for event in events):
            if not all(isinstance(event, ChunkSeen) for event in events):
                self._update_wants()
            self._changed.set()

    def _chunk_sent(self, action: SendChunk, frame_bytes: int | None) -> None:
        if frame_bytes is not None:
            entry = self.library.entries.get(action.key)
            self.meter.sent(entry.header.artifact if entry else None, frame_bytes, self._now())
        self._act(ChunkSent(action.peer, action.key, action.index, is_lost=frame_bytes is None))

    def _act(self, event: Event) -> None:
        """Passes an event to the session and carries out its actions."""
        for action in self.session.handle(event, self._now()):
            if isinstance(action, Wake):
                self._set_timer(action.at)
            elif isinstance(action, Accuse):
                self._connections.accuse(action.peer, action.reason, is_ban=True)
            elif (link := self._connections.links.get(action.peer)) is not None:
                if isinstance(action, SendChunk):
                    link.send_chunk(action)
                elif (frame := control_frame(action, self.library)) is not None:
                    with contextlib.suppress(ResourceError):  # the peer does not read: keepalive will end the link
                        (link.send_ack if isinstance(action, SendRelayAck) else link.send_control)(frame)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._in_loop().call_at(at, lambda: self._act(Woken()))

    def _now(self) -> float:
        return self._in_loop().time()

    def _in_loop(self) -> asyncio.AbstractEventLoop:
        """Looked up once: Python 3.11 asks the kernel each time."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop
