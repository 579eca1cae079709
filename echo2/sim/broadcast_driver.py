"""Drives the real broadcast session on the simulated network, as broadcast/runtime/node.py does on a real one.

The session decides; this keeps chunks, checks signatures (the real ones, with real keys), dials, and hands artifacts out
in the order in which they apply. Guarantees, as the runtime's: only what the publisher signed is kept, passed on or
handed out; a peer that sends anything else is banned; a chunk that the disk changed is not sent. Leaves to others:
encoding, decoding, swapping (learner and worker drivers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from echo2.base.errors import BadSignature, CorruptChunk, DiskFull
from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast import events as be
from echo2.broadcast.catch_up import UNKNOWN_LINK, plan_way
from echo2.broadcast.chunks import signed_chunks
from echo2.broadcast.manifest import ArtifactId, ArtifactKey, Chunk, Header, Seal, root_of
from echo2.broadcast.session import Session
from echo2.broadcast.topology import BroadcastPlan
from echo2.sim import messages as m
from echo2.sim.artifact_reader import Entry, Reader, Step
from echo2.sim.disk import ChunkDisk
from echo2.sim.host import Host
from echo2.sim.network import End, Network
from echo2.sim.scene import Sabotage
from echo2.sim.stall_watch import StallWatch
from echo2.trust.identity import Identity

CHUNK_BYTES = 96
RUN = RunId("simulated")
CONNECT_INTERVAL_S = 0.5
SETTLE_S = 0.3
ARTIFACTS_MAX = 24
BACKOFF_MAX_S = 8.0
WIRE_SCALE = 4000
"""Simulated bytes on the wire for each real byte of a chunk: the tiny model stands for a large one."""


@dataclass(slots=True)
class _Target:
    failures: int = 0
    next_try: float = 0.0
    is_dialling: bool = False


class BroadcastDriver:
    """`changed` is called when there may be something new to hand out. `address_of` finds a peer's machine."""

    def __init__(
        self,
        host: Host,
        network: Network,
        identity: Identity,
        disk: ChunkDisk,
        address_of: Callable[[PeerId], str | None],
        changed: Callable[[], None],
        seed: int,
    ) -> None:
        self.host, self.network, self.identity, self.disk = host, network, identity, disk
        self.me = identity.peer_id
        self.publisher: PeerId | None = None
        self.session = Session(self.me, seed)
        self.entries: dict[ArtifactKey, Entry] = {}
        self.links: dict[PeerId, End] = {}
        self.banned: dict[PeerId, str] = {}
        self.reader = Reader(self)
        self.settled_at: float | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self.stalls = StallWatch(network.counts)
        self._sabotage = Sabotage.NONE
        self._rotten: set[ArtifactKey] = set()
        self._address_of, self._changed = address_of, changed
        self._plan: BroadcastPlan | None = None
        self._targets: dict[PeerId, _Target] = {}
        self._wake_at = float("inf")

    def suffer(self, sabotage: Sabotage) -> None:
        self._sabotage, self.stalls.is_for_good = sabotage, sabotage is Sabotage.STALLED_FOR_GOOD

    # ---- life

    def start(self) -> None:
        """Takes over what an earlier process kept, each chunk checked again, and begins to connect."""
        for key, kept in list(self.disk.artifacts.items()):
            entry = Entry(kept.header, kept.seal)
            try:
                for index, chunk in kept.chunks.items():
                    entry.digests[index] = chunk.verify(kept.header.publisher)
                    entry.held_bytes += len(chunk.payload)
            except CorruptChunk:
                del self.disk.artifacts[key]
                if kept.header.publisher == self.me:
                    self.on_lost()
                continue
            if kept.header.publisher == self.me and entry.seal is None:
                del self.disk.artifacts[key]  # our own, cut off: it will be published anew
                continue
            self.entries[key] = entry
            self.act(be.HeaderSeen(None, key, is_wanted=False))
            for index in sorted(entry.digests):
                self.act(be.ChunkSeen(None, key, index, len(kept.chunks[index].payload)))
            if entry.seal is not None:
                self.act(be.SealSeen(None, key, entry.seal.chunk_count))
        self._connect()
        self.update_wants()

    def accept(self, end: End) -> None:
        """A connection that a peer dialled."""
        peer = self._peer_behind(end)
        if peer is None or peer in self.banned:
            end.close("banned")
            return
        self._serve(end, peer)

    def _peer_behind(self, end: End) -> PeerId | None:
        return self.network.peer_ids.get(end.peer.host.name)

    def _serve(self, end: End, peer: PeerId) -> None:
        old = self.links.pop(peer, None)
        if old is not None:
            self.act(be.PeerDown(peer))
            old.close("replaced")
        self.links[peer] = end
        end.on_message = lambda message: self._received(peer, message)
        end.on_closed = lambda reason: self._lost(peer, end)
        self.act(be.PeerUp(peer))

    def _lost(self, peer: PeerId, end: End) -> None:
        if self.links.get(peer) is end:
            del self.links[peer]
            self.act(be.PeerDown(peer))

    # ---- connections

    def set_plan(self, plan: BroadcastPlan) -> None:
        self.publisher = self.publisher or (plan.seed.peer_id if plan.seed is not None else None)
        self._plan = plan
        self._retarget()
        self.act(be.PlanSet(plan))

    def set_publisher(self, peer: PeerId) -> None:
        self.publisher = peer
        self._retarget()

    def _retarget(self) -> None:
        wanted = set(self._plan.neighbours(self.me)) if self._plan is not None else set()
        if self.publisher is not None and self.publisher != self.me:
            wanted.add(self.publisher)
        for peer in sorted(wanted):
            self._targets.setdefault(peer, _Target(next_try=self.host.now()))
        self._targets = {peer: target for peer, target in self._targets.items() if peer in wanted}

    def _look_after(self) -> None:
        """As the node: what the disk changed is fetched anew, or made up for."""
        for key in sorted(self._rotten & self.entries.keys()):
            if self.publisher != self.me:
                self._fetch_anew(key)
            elif self.entries[key].seal is not None:
                self._drop(key)
                self.act(be.Forgotten(key))
                self.on_lost()
            else:
                continue
            self._rotten.discard(key)

    def _go_around_stalls(self) -> None:
        held = {key: len(entry.digests) for key, entry in self.entries.items()}
        is_late = self._plan is not None and self.me in self._plan.late
        missing = {key: held[key] for key in self._missing()}
        stopped = self.stalls.look(missing, held, bool(self.links), self.host.now(), is_late)
        if stopped is None:
            return
        for key in stopped:
            self.host.story.tell(self.host.name, f"{self.entries[key].header.artifact} has stopped coming")
            self.act(be.Unwanted(key))
        if self._sabotage is not Sabotage.STALLED_UNASKED:
            self.update_wants()
        self._changed()

    def _connect(self) -> None:
        self._look_after()
        self._go_around_stalls()
        now = self.host.now()
        for peer, target in self._targets.items():
            is_ours = peer == self.publisher or (self.publisher != self.me and self.me < peer)
            is_due = is_ours and peer not in self.links and not target.is_dialling and now >= target.next_try
            address = self._address_of(peer)
            if is_due and peer not in self.banned and address is not None:
                self._dial(peer, target, address)
        self.host.after(CONNECT_INTERVAL_S, self._connect)

    def _dial(self, peer: PeerId, target: _Target, address: str) -> None:
        target.is_dialling = True

        def opened(end: End) -> None:
            target.is_dialling, target.failures = False, 0
            self._serve(end, peer)

        def failed(text: str) -> None:
            target.is_dialling = False
            target.failures += 1
            target.next_try = self.host.now() + min(BACKOFF_MAX_S, 0.25 * 2 ** min(target.failures, 10))

        self.network.dial(self.host, address, "chunks", opened, failed)

    def accuse(self, peer: PeerId, reason: str) -> None:
        self.host.story.tell(self.host.name, f"bans {self.network.name_of(peer)}: {reason}")
        self.banned[peer] = reason
        end = self.links.pop(peer, None)
        if end is not None:
            self.act(be.PeerDown(peer))
            end.close("banned")

    # ---- what peers send

    def _received(self, peer: PeerId, message: object) -> None:
        try:
            events = list(self._events_of(peer, message))
        except (CorruptChunk, BadSignature) as error:
            self.accuse(peer, str(error))
            return
        for event in events:
            self.act(event)
        if any(isinstance(event, be.HeaderSeen | be.ChunkSeen | be.SealSeen | be.Forgotten) for event in events):
            self.update_wants()
            self._changed()

    def _events_of(self, peer: PeerId, message: object) -> Iterator[be.Event]:
        match message:
            case m.HeaderMessage(header):
                yield from self._header(peer, header)
            case m.ChunkMessage(chunk, route, is_answer):
                entry = self.entries.get(chunk.key)
                if entry is None:
                    return
                if chunk.index not in entry.digests:
                    digest = chunk.verify(entry.header.publisher)
                    yield from (be.Forgotten(old) for old in self._keep(chunk, digest))
                yield be.ChunkSeen(peer, chunk.key, chunk.index, len(chunk.payload), route, is_answer=is_answer)
            case m.SealMessage(seal):
                entry = self.entries.get(seal.key)
                if entry is None:
                    return
                if entry.seal is None:
                    seal.verify(entry.header.publisher)
                    self._keep_seal(entry, seal)
                yield be.SealSeen(peer, seal.key, seal.chunk_count)
            case m.HaveMessage(key, bitmap, is_sealed):
                yield be.HaveSeen(peer, key, bitmap, is_sealed)
            case m.RequestMessage(key, indices):
                yield be.RequestSeen(peer, key, indices)
            case m.CancelMessage(key, indices):
                yield be.CancelSeen(peer, key, indices)
            case m.RelayAckMessage(key, index, backlog):
                yield be.RelayAckSeen(peer, key, index, backlog)

    def _header(self, peer: PeerId, header: Header) -> Iterator[be.Event]:
        key = header.key
        if key in self.entries:
            yield be.HeaderSeen(peer, key, is_wanted=False)
            return
        if header.publisher != self.publisher or header.publisher == self.me:
            return
        header.verify()
        same = [entry.header for entry in self.entries.values() if entry.header.artifact == header.artifact]
        if any(known.published_unix_s > header.published_unix_s for known in same):
            return
        yield from (be.Forgotten(old) for old in self._enter(header))
        yield be.HeaderSeen(peer, key, is_wanted=False)

    # ---- keeping

    def _enter(self, header: Header) -> list[ArtifactKey]:
        dropped = [
            key for key, entry in self.entries.items()
            if entry.header.artifact == header.artifact and not entry.is_complete
            and entry.header.published_unix_s <= header.published_unix_s
        ]  # fmt: skip
        for key in dropped:
            self._drop(key)
        while len(self.entries) >= ARTIFACTS_MAX and (victim := self._victim(header.key)) is not None:
            self._drop(victim)
            dropped.append(victim)
        self.entries[header.key] = Entry(header)
        try:
            self.disk.create(header.key, header)
        except DiskFull:
            self.host.story.trace(self.host.name, "keeps an artifact in memory")
        return dropped

    def _victim(self, spared: ArtifactKey) -> ArtifactKey | None:
        keyframes = {e.header.artifact.version: key for key, e in self.entries.items() if e.header.artifact.is_keyframe}
        around = {keyframes[max(keyframes)]} if keyframes else set()  # what stops coming
        needed = {*self.path(None), spared, *around}
        free = [key for key in self.entries if key not in needed]
        return min(free, key=lambda key: self.entries[key].header.published_unix_s, default=None)

    def _keep(self, chunk: Chunk, digest: bytes) -> list[ArtifactKey]:
        entry = self.entries[chunk.key]
        dropped: list[ArtifactKey] = []
        while chunk.key in self.disk.artifacts:
            try:
                self.disk.put(chunk.key, chunk)
                break
            except DiskFull:
                victim = self._victim(chunk.key)
                if victim is None:
                    entry.memory[chunk.index] = chunk
                    break
                self._drop(victim)
                dropped.append(victim)
        else:
            entry.memory[chunk.index] = chunk
        entry.digests[chunk.index] = digest
        entry.held_bytes += len(chunk.payload)
        return dropped

    def _keep_seal(self, entry: Entry, seal: Seal) -> None:
        entry.seal = seal
        if seal.key in self.disk.artifacts:
            try:
                self.disk.put_seal(seal.key, seal)
            except DiskFull:
                self.host.story.trace(self.host.name, "keeps a seal in memory")

    def _drop(self, key: ArtifactKey) -> None:
        self.entries.pop(key, None)
        self.disk.artifacts.pop(key, None)

    def chunk(self, key: ArtifactKey, index: int) -> Chunk | None:
        """As it is in memory or on the disk, and as it was when it came; None when the disk changed or lost it."""
        entry, kept = self.entries.get(key), self.disk.artifacts.get(key)
        if entry is None or index not in entry.digests:
            return None
        found = entry.memory.get(index) or (kept.chunks.get(index) if kept is not None else None)
        if found is None or hashlib.sha256(found.payload).digest() != entry.digests[index]:
            self._rotten.add(key)
            return None
        return found

    def path(self, start: Version | None) -> list[ArtifactKey]:
        offers = [entry.offer(key) for key, entry in self.entries.items()]
        way = plan_way(offers, start, UNKNOWN_LINK, self.stalls.keys)
        return list(way.keys) if way is not None else []

    def find(self, artifact: ArtifactId) -> ArtifactKey | None:
        keys = [key for key, entry in self.entries.items() if entry.header.artifact == artifact]
        return max(
            keys, key=lambda k: (self.entries[k].is_complete, self.entries[k].header.published_unix_s), default=None
        )

    # ---- publishing

    def publish(self, artifact: ArtifactId, data: bytes, fingerprint: str, full_bytes: int, is_pushed: bool) -> int:
        """Returns its size. One that lies sealed in the store is not published again."""
        known = self.find(artifact)
        if known is not None and self.entries[known].is_complete:
            return len(data)
        header = Header(artifact, RUN, "", self.host.unix(), full_bytes, is_pushed, self.me).signed(self.identity)
        for dropped in self._enter(header):
            self.act(be.Forgotten(dropped))
        self.act(be.HeaderSeen(None, header.key, is_wanted=False))
        digests = []
        for chunk, digest in signed_chunks(CHUNK_BYTES, self.identity, header.key, 0, data):
            for dropped in self._keep(chunk, digest):
                self.act(be.Forgotten(dropped))
            digests.append(digest)
            self.act(be.ChunkSeen(None, header.key, chunk.index, len(chunk.payload), is_fresh=is_pushed))
        seal = Seal(header.key, len(digests), len(data), root_of(digests), fingerprint).signed(self.identity)
        self._keep_seal(self.entries[header.key], seal)
        self.act(be.SealSeen(None, header.key, len(digests)))
        return len(data)

    # ---- receiving in order

    def update_wants(self) -> None:
        if self.publisher == self.me:
            return
        now = self.host.now()
        if self.reader.version is None and self.settled_at is None and self.entries:
            self.settled_at = now + SETTLE_S
            self.host.after(SETTLE_S, self._settled)
        if self.settled_at is None or now < self.settled_at:
            return
        for key in self.path(self.reader.version):
            artifact = self.session.artifacts.get(key)
            if artifact is not None and not artifact.is_wanted:
                self.act(be.Wanted(key))

    def _settled(self) -> None:
        self.settled_at = self.host.now()  # by a drifting clock the sum may be a hair later
        self.update_wants()
        self._changed()

    def next_step(self) -> Step | None:
        if self.settled_at is None or self.host.now() < self.settled_at:
            return None
        try:
            return self.reader.next()
        except CorruptChunk:
            if (artifact := self.reader.artifact) is not None:
                self.refetch(artifact)
            return self.reader.next()

    def set_live(self, version: Version | None) -> None:
        self.reader.restart_from(version)
        self.update_wants()
        self._changed()

    def refetch(self, artifact: ArtifactId) -> None:
        key = self.find(artifact)
        if key is not None:
            self._fetch_anew(key)
        self.set_live(artifact.parent)

    def _fetch_anew(self, key: ArtifactKey) -> None:
        entry = self.entries[key]
        self._drop(key)
        for dropped in self._enter(entry.header):
            self.act(be.Forgotten(dropped))
        if entry.seal is not None:
            self._keep_seal(self.entries[key], entry.seal)
        self.act(be.Emptied(key))

    # ---- the session

    def act(self, event: be.Event) -> None:
        for action in self.session.handle(event, self.host.now()):
            self._carry_out(action)

    def _carry_out(self, action: be.Action) -> None:
        if isinstance(action, be.Wake):
            self._set_timer(action.at)
        elif isinstance(action, be.Accuse):
            self.accuse(action.peer, action.reason)
        elif (end := self.links.get(action.peer)) is not None:
            if isinstance(action, be.SendChunk):
                self._send_chunk(end, action)
            elif (message := self.message_of(action)) is not None:
                end.send(message)

    def _send_chunk(self, end: End, action: be.SendChunk) -> None:
        is_late = self._plan is not None and action.peer in self._plan.late
        is_denied = is_late and self._sabotage is Sabotage.LATE_UNSERVED
        chunk = self.chunk(action.key, action.index)
        if chunk is None or is_denied:
            lost = be.ChunkSent(action.peer, action.key, action.index, is_lost=True)
            self.host.after(0.0, lambda: self.act(lost))
            return
        sent = be.ChunkSent(action.peer, action.key, action.index)
        message = m.ChunkMessage(self.outgoing(chunk), action.route, action.is_answer)
        end.send(message, len(chunk.payload) * WIRE_SCALE, lambda: self.act(sent))

    def outgoing(self, chunk: Chunk) -> Chunk:
        """What is sent in a chunk's place; a malicious node changes it."""
        return chunk

    def message_of(self, action: be.Action) -> object | None:
        match action:
            case be.SendHeader():
                entry = self.entries.get(action.key)
                return m.HeaderMessage(entry.header) if entry is not None else None
            case be.SendSeal():
                entry = self.entries.get(action.key)
                return m.SealMessage(entry.seal) if entry is not None and entry.seal is not None else None
            case _:
                return m.of_session(action)

    def _set_timer(self, at: float) -> None:
        self._wake_at = at

        def woken() -> None:
            if self._wake_at == at:
                self._wake_at = float("inf")
                self.act(be.Woken())

        self.host.after(at - self.host.now(), woken)

    def _missing(self) -> list[ArtifactKey]:
        return [key for key in self.path(self.reader.version) if not self.entries[key].is_complete]

    @property
    def unasked(self) -> list[ArtifactKey]:
        """What is missing of its way and not asked for."""
        is_settled = self.settled_at is not None and self.host.now() >= self.settled_at
        return [key for key in self._missing() if is_settled and not self.session.artifacts[key].is_wanted]

    @property
    def waits_for(self) -> str:
        if self.publisher is None:
            return "a plan that names the publisher"
        if missing := self._missing():
            return f"chunks of {self.entries[missing[0]].header.artifact}"
        return "" if self.links else "a connection to a peer"
