"""One node of the broadcast: publishes versions, takes those of others, and hands them to its consumer in order.

Guarantees: `progress` yields each block once, in order; a full disk, or an error in a task, ends it with that error; bad bytes
on disk are fetched anew, or reported as lost by the publisher. Waits for: peers, the disk, the consumer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from echo2.base.errors import CorruptChunk, EchoError, StateError
from echo2.base.ids import PeerId, Version
from echo2.base.units import LinkShape
from echo2.broadcast.artifact import (
    LINEAGE,
    ArtifactId,
    ArtifactKey,
    Header,
    Seal,
    expected_bytes,
    root_of,
    signed_chunks,
)
from echo2.broadcast.catch_up import ArtifactReader, ArtifactSealed, CatchUpPlanner, Progress
from echo2.broadcast.connection import Connection
from echo2.broadcast.connections import Connections, Dialling
from echo2.broadcast.events import ChunkSeen, Emptied, Forgotten, HeaderSeen, PlanSet, SealSeen, Wanted
from echo2.broadcast.exchange import Bans, Exchange
from echo2.broadcast.library import Library, restored
from echo2.broadcast.nat.reach import HostFacts, HostOptions, Nat
from echo2.broadcast.pace import Meter
from echo2.broadcast.plan import BroadcastPlan, chunk_bytes_for
from echo2.broadcast.route import BaseCheckpoint
from echo2.broadcast.session import BroadcastSession
from echo2.broadcast.store import ChunkStore, Entry
from echo2.broadcast.stripes import LinkStatus
from echo2.broadcast.uplink import UplinkWatch
from echo2.outside import unix_now
from echo2.trust.identity import Role
from echo2.trust.tls import Credentials

log = logging.getLogger("echo2.broadcast")
CONNECT_INTERVAL_S = 0.5  # as long as have-maps take
SETTLE_S = 0.3  # a newcomer waits for all announcements before it chooses a route
WIRE_OVERHEAD = 1.05  # bytes on the link per chunk byte: TCP/IP and TLS


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How one node takes part. `chunk_bytes`: a chunk's largest size; larger in very large artifacts (plan.chunk_bytes_for).
    `uplink_limit_bytes_per_s` 0: no cap. `shape`: an emulated link, for experiments. `host` and `port` (0: any): where it accepts
    connections."""

    folder: Path
    chunk_bytes: int = 256 << 10
    uplink_limit_bytes_per_s: float = 0.0
    shape: LinkShape = field(default_factory=LinkShape)
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    nat: HostOptions = field(default_factory=HostOptions)


def port_beside(port: int) -> int:
    """The next port, so that an operator who opens ports knows which; 0 (any) if `port` is not known yet."""
    return port + 1 if 0 < port < 65_535 else 0


@dataclass(frozen=True, slots=True)
class NodeCalls:
    """Callbacks to the node's owner. `is_proven`: whether a peer has delivered work. `lost`: called with the name of a published
    artifact whose bytes on disk are lost or corrupt. `met`: called when it is found out how this node can be reached."""

    is_proven: Callable[[PeerId], bool] = lambda peer_id: False
    lost: Callable[[str], None] = lambda what: None
    met: Callable[[HostFacts], None] = lambda facts: None


@dataclass(frozen=True, slots=True)
class NodeStats:
    """Counters since start; byte counts of links include all frames, `*_chunk_bytes` only chunk frames."""

    links: tuple[LinkStatus, ...]
    sent_chunk_bytes: int
    received_chunk_bytes: int
    uplink_bytes_per_s: float  # measured over the last busy second; 0 before the first
    rtt_s: float  # to the publisher; 0: not known
    newest_version_in_flight: int
    newest_chunks_held: int
    newest_chunk_count: int  # 0: not sealed yet
    waits_for: str
    way: str = ""  # how the newest version was or is to be reached, and why


class BroadcastNode:
    def __init__(self, credentials: Credentials, options: NodeOptions, calls: NodeCalls | None = None) -> None:
        calls = calls or NodeCalls()
        me, shape = credentials.peer_id, options.shape
        self.peer_id, self.credentials, self.options, self._lost = me, credentials, options, calls.lost
        self.library = Library(ChunkStore(options.folder), credentials.run_id, self._on_drop)
        self.session = BroadcastSession(me, options.seed, options.uplink_limit_bytes_per_s / WIRE_OVERHEAD)
        self.meter, self.bans = Meter(), Bans()
        self.planner = CatchUpPlanner(me, self.library, self.meter, shape)
        self.reader = ArtifactReader(self.library, self.planner)
        self.exchange = Exchange(me, self.library, self.session, self.meter, self.bans, self.reader.awaits)
        self.nat = Nat(credentials, self.accept, options.nat, calls.met)
        self._dialling = Dialling(me)
        self._connections = Connections(
            credentials, self.nat, shape, self.exchange, self._dialling, self.bans, calls.is_proven
        )
        self._uplink = UplinkWatch(self.meter, self.exchange, self._connections)
        self._is_publisher = credentials.role is Role.LEARNER
        self._is_running = False
        self._is_base_sought = False
        self._settled_at: float | None = None  # when all announcements are in; None: none has come
        self._wanted: tuple[ArtifactKey, ...] = ()  # the artifacts on the path
        self._sizes: dict[int, int] = {}  # bytes of the last artifact published that leads over so many versions

    # ---- life

    def serves_grpc_at(self, address: tuple[str, int]) -> None:
        """Sets the address of our own gRPC server, to which calls through byte pipes are forwarded."""
        self._connections.pipe_member.grpc_at = address

    def listen(self) -> int:
        """Takes this node's port and returns it; PortBusy if it is taken."""
        port = self._connections.transport.listen(self.options.host, self.options.port)
        self.nat.own_port = self.options.nat.own_port or port
        return port

    async def start(self) -> None:
        """Restores the chunks of an earlier run and starts connecting."""
        async for event in restored(self.library, self.peer_id):
            self.exchange.act(event)
        if self._is_publisher:
            self.exchange.trust(self.peer_id)
            if self.library.unsound_files:
                self._lost("a chunk file")
        self._is_running = True
        self._connections.transport.serve(self.accept)
        for work in (self._keep_connected(), self._keep_wanting(), self._uplink.run()):
            self.exchange.tasks.start(work)

    async def stop(self) -> None:
        self._is_running = False
        self.exchange.stop_timer()
        try:
            await self.exchange.tasks.end()
            await self._connections.end()
            await self.nat.close()
        finally:  # even if the network part fails: each artifact holds an open file
            self.library.close()
            self.exchange.changed.set()

    async def accept(self, connection: Connection) -> None:
        """Serves a connection that a peer dialled, until it ends."""
        if self._is_running:
            await self._connections.accept(connection)

    async def _keep_connected(self) -> None:
        """Every CONNECT_INTERVAL_S: handles corrupt and stalled artifacts, dials peers that are due."""
        while True:
            self._mend()
            self._connections.tend(self.exchange.now())
            await asyncio.sleep(CONNECT_INTERVAL_S)

    async def _keep_wanting(self) -> None:
        """Requests the artifacts on the path whenever the path may be another."""
        while True:
            self._update_wants()
            await self.exchange.revised.wait()
            self.exchange.revised.clear()

    def _on_drop(self, key: ArtifactKey) -> None:
        self.exchange.act(Forgotten(key))

    def drop_banned(self) -> None:
        """Drops the links of all banned peers; call it after `bans` has changed."""
        self._connections.drop_banned()

    # ---- what it takes

    def set_plan(self, plan: BroadcastPlan) -> None:
        """Adopts the coordinator's plan. Its seed is the publisher unless `set_publisher` named one."""
        if plan.seed is not None and self.exchange.publisher is None:
            self.exchange.trust(plan.seed.peer_id)
        self._dialling.plan = self.planner.plan = plan
        self._dialling.refresh(self.exchange.now())
        self.exchange.act(PlanSet(plan))

    def set_publisher(self, peer_id: PeerId, address: str) -> None:
        """Sets the trusted publisher, and its address to dial even before the first plan."""
        self._dialling.publisher = peer_id, address
        self._dialling.refresh(self.exchange.now())
        self.exchange.trust(peer_id)

    def set_live(self, version: Version | None) -> None:
        """Decoding starts from this version: a base checkpoint, or the live version before a restart; None: from a keyframe."""
        self.reader.restart_from(version)
        self.exchange.revised.set()

    def set_base(self, base: BaseCheckpoint | None, *, is_sought: bool = False) -> None:
        """Sets a version that the consumer got elsewhere. `is_sought`: it is still being looked for, so fetch nothing yet."""
        self.planner.base = base
        if is_sought or self._is_base_sought:
            self._is_base_sought, self._settled_at = is_sought, None
        self.exchange.revised.set()

    def adopted(self, artifact: ArtifactId) -> None:
        """The consumer got this version elsewhere: stops fetching the artifact and continues from it."""
        if (key := self.library.find(artifact)) is not None:
            self.library.drop(key)
        self.set_live(artifact.version)

    def refetch(self, artifact: ArtifactId) -> None:
        """Refetches an artifact whose decoded weights did not match; the reader goes back to its parent."""
        if (key := self.library.find(artifact)) is not None:
            self._fetch_anew(key)
        self.set_live(artifact.parent)

    def _fetch_anew(self, key: ArtifactKey) -> None:
        self.library.empty(key)
        self.exchange.act(Emptied(key))

    def _mend(self) -> None:
        """Refetches artifacts that the disk corrupted (the publisher reports them as lost) and replaces stalled paths."""
        for key, artifact in self.library.take_rotten():
            if self._is_publisher:
                self.library.drop(key)
                self._lost(str(artifact))
            else:
                self._fetch_anew(key)
        stalled = self.planner.look(self.reader.version, bool(self.exchange.links), self.exchange.now())
        for key in stalled or ():
            self.exchange.act(Wanted(key, is_wanted=False))
        if stalled is not None:
            self.exchange.revised.set()

    def _update_wants(self) -> None:
        """Requests the artifacts on the path to the newest version, and no longer those that were; the publisher needs none."""
        if self._is_publisher:
            return
        now = self.exchange.now()
        if self._settled_at is None and self.library.entries and not self._is_base_sought:
            self._settled_at = now + SETTLE_S
            asyncio.get_running_loop().call_later(SETTLE_S, self.exchange.revised.set)
        back_to, self.library.back_to = self.library.back_to, None
        if back_to is not None and self.reader.version is not None and self.reader.version > back_to:
            log.warning("the learner has gone back to version %d: %d is dropped here", back_to, self.reader.version)
            self.reader.restart_from(None)
        if self._is_settling(now):
            return
        route, before = self.planner.choose(self.reader.version), self._wanted
        self._wanted = route.keys if route is not None else ()
        for key in (*before, *self._wanted):
            artifact, is_wanted = self.session.artifacts.get(key), key in self._wanted
            if artifact is not None and artifact.is_wanted != is_wanted:
                self.exchange.act(Wanted(key, is_wanted=is_wanted))
        self.exchange.changed.set()

    def _is_settling(self, now: float) -> bool:
        """Whether it is too early to choose a way."""
        return self._is_base_sought or (self._settled_at is not None and now < self._settled_at)

    async def progress(self) -> AsyncIterator[Progress]:
        """Yields what to decode, in order; waits while nothing new has arrived. For one consumer only."""
        while self._is_running or self.exchange.error is None:
            step = self._next_step()
            if step is not None:
                if isinstance(step, ArtifactSealed):
                    self.exchange.revised.set()
                yield step
                continue
            if self.exchange.error is not None:
                raise self.exchange.error
            if not self._is_running:
                return
            self.exchange.changed.clear()
            await self.exchange.changed.wait()

    def _next_step(self) -> Progress | None:
        """The next step for the consumer; refetches an artifact that the disk corrupted."""
        if self._is_settling(self.exchange.now()):
            return None
        try:
            return self.reader.next()
        except CorruptChunk as error:
            log.warning("fetched anew: %s", error)
            if (artifact := self.reader.artifact) is not None:
                self.refetch(artifact)
            return self.reader.next()

    # ---- publishing

    async def publish(
        self,
        artifact: ArtifactId,
        blocks: Iterator[bytes],
        fingerprint: Callable[[], str],
        full_snapshot_bytes: int,
        *,
        is_pushed: bool = True,
    ) -> Seal:
        """Publishes blocks as the iterator (run in a thread) yields them; calls `fingerprint` after the last one. `is_pushed`
        False: only peers that request it get it (a keyframe for newcomers). An artifact that is already sealed is not published
        again, unless a learner that was restored from an older backup has left later ones here: peers follow what is newest."""
        known = self.library.find(artifact)
        is_back = any(entry.artifact.version > artifact.version for entry in self.library.entries.values())
        if known is not None and (entry := self.library.entries[known]).is_complete and entry.seal and not is_back:
            return entry.seal
        run_id = self.credentials.run_id
        # Later than what was published before, also where the clock has gone back: else it would be the older publication.
        now_unix_s = max(unix_now(), self.library.published_unix_s + 1e-3)
        header = Header(artifact, run_id, LINEAGE, now_unix_s, full_snapshot_bytes, is_pushed, self.peer_id)
        header = header.signed(self.credentials.identity)
        self.library.add_header(header)
        self.exchange.act(HeaderSeen(None, header.key, is_wanted=False))
        span = artifact.version - artifact.parent if artifact.parent is not None else 0
        expected = self._sizes.get(span) or expected_bytes(artifact, full_snapshot_bytes)
        size = chunk_bytes_for(self.session.plan, self.options.chunk_bytes, expected)
        sign = functools.partial(signed_chunks, size, self.credentials.identity)
        index, total, digests = 0, 0, list[bytes]()
        try:
            while (block := await asyncio.to_thread(next, blocks, None)) is not None:
                for chunk, digest in await asyncio.to_thread(sign, header.key, index, block):
                    if header.key not in self.library.entries:
                        raise StateError(f"{artifact}: dropped while being published; the store is too small")
                    self.library.add_chunk(chunk, digest)
                    size_bytes = len(chunk.payload)
                    self.exchange.act(ChunkSeen(None, header.key, index, size_bytes, is_fresh=is_pushed))
                    digests.append(digest)
                    index, total = index + 1, total + size_bytes
                    await asyncio.sleep(0)  # yield to the event loop: a block may be hundreds of chunks
        except EchoError:  # a partial artifact is useless
            self.library.drop(header.key)
            raise
        seal = Seal(header.key, index, total, root_of(digests), fingerprint()).signed(self.credentials.identity)
        self._sizes[span] = total
        self.library.add_seal(header.key, seal)
        self.exchange.act(SealSeen(None, header.key, index))
        log.info("published %s: %d chunks, %d bytes", artifact, index, total)
        return seal

    # ---- what is seen of it

    def artifacts_available(self) -> list[Entry]:
        """All artifacts that this node holds or knows of, oldest version first."""
        return sorted(self.library.entries.values(), key=lambda entry: (entry.artifact.version, entry.held_bytes))

    def stats(self) -> NodeStats:
        """A snapshot for heartbeats and the operator."""
        newest = max(self.library.entries.values(), key=lambda entry: entry.rank, default=None)
        return NodeStats(
            links=self._connections.stripes.statuses(),
            sent_chunk_bytes=self.meter.sent_bytes,
            received_chunk_bytes=self.meter.received_bytes,
            uplink_bytes_per_s=self.session.governor.capacity_bytes_per_s or self.meter.uplink.bytes_per_s,
            rtt_s=self._uplink.rtt_s(self.exchange.publisher),
            newest_version_in_flight=newest.artifact.version if newest else 0,
            newest_chunks_held=len(newest.digests) if newest else 0,
            newest_chunk_count=newest.seal.chunk_count if newest and newest.seal else 0,
            waits_for=self._waits_for(),
            way=self.planner.describe(),
        )

    def _waits_for(self) -> str:
        if self.exchange.publisher is None:
            return "a plan that names the publisher"
        if not self.exchange.links and self._dialling.targets:
            return self._dialling.waits_for()
        return self.planner.waits_for(self.reader.version)
