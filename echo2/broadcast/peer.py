"""The session's state per artifact and per peer. Plain data; the rules are in session.py and pulling.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from echo2.base.ids import PeerId
from echo2.broadcast.artifact import ArtifactKey, all_of, indices_of, those_in
from echo2.broadcast.events import Route
from echo2.broadcast.pace import ANSWERED_AGAIN_AFTER_S, PULL_AFTER_S, SLOTS_PER_PEER, RateEstimate

Ref = tuple[ArtifactKey, int]
SENT_REMEMBERED_MAX = 512  # more than REQUESTS_HELD_MAX and what crosses
KNOWN_MAX = 1024  # ten times what a library holds
MISSING_MAX = 4096
"""Missing chunks remembered per artifact. The lowest indices are kept; the list is refilled when it runs low."""
LAST_SHARE = 0.04  # of an artifact's chunks: once only so few are missing, they are requested early
PUSH_LAG_KEPT = 0.995  # factor per pushed chunk


@dataclass(slots=True)
class Outgoing:
    """One chunk queued for one peer."""

    key: ArtifactKey
    index: int
    route: Route | None
    since: float
    is_answer: bool = False  # to a request


@dataclass(slots=True)
class Artifact:
    key: ArtifactKey
    is_wanted: bool
    held: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    held_bytes: int = 0
    chunk_count: int | None = None  # None until sealed
    # Chunks a neighbour holds and we do not (up to MISSING_MAX).
    missing_since: dict[int, float] = field(default_factory=dict)
    has_more_missing: bool = False  # more are missing than `missing_since` lists
    pushed_at: float = float("-inf")
    push_lag_s: float = 0.0  # how much later a push reaches us than a neighbour: slowly decaying maximum

    def offered(self, bitmap: int, now: float) -> None:
        """A neighbour says that it holds these chunks. Remembers the first MISSING_MAX of those that we lack. Chunks are
        numbered from 0 without gaps, so invented indices beyond the last chunk cannot crowd out real ones."""
        lacking = bitmap & ~self.held
        if self.chunk_count is not None:
            lacking &= all_of(self.chunk_count)
        for index in islice(indices_of(lacking), MISSING_MAX):
            self.missing_since.setdefault(index, now)
        self.has_more_missing |= lacking.bit_count() > MISSING_MAX
        if len(self.missing_since) > MISSING_MAX:
            self.has_more_missing = True
            for index in sorted(self.missing_since)[MISSING_MAX:]:
                del self.missing_since[index]

    @property
    def is_short_of_missing(self) -> bool:
        """Whether `missing_since` should be refilled: it has run low, and more chunks are missing than it lists."""
        return self.has_more_missing and len(self.missing_since) < MISSING_MAX // 2

    def offered_by_none(self, offered: int) -> None:
        """Only chunks in `offered` can still be requested from a connected peer; forgets the others."""
        available = set(those_in(offered, self.missing_since))
        self.missing_since = {index: since for index, since in self.missing_since.items() if index in available}

    def sealed(self, chunk_count: int) -> None:
        """Sets the chunk count; drops missing chunks beyond it, which a peer invented."""
        self.chunk_count = chunk_count
        self.missing_since = {index: since for index, since in self.missing_since.items() if index < chunk_count}

    def holds(self, index: int, size_bytes: int) -> None:
        """We hold the chunk; its size is counted once."""
        self.held |= 1 << index
        if index not in self.sizes:
            self.sizes[index] = size_bytes
            self.held_bytes += size_bytes

    def restored(self, bitmap: int, sizes: Mapping[int, int]) -> None:
        """Adds chunks that the store kept from an earlier run."""
        new = {index: size for index, size in sizes.items() if index not in self.sizes}
        self.held |= bitmap
        self.sizes.update(new)
        self.held_bytes += sum(new.values())
        self.missing_since = {index: since for index, since in self.missing_since.items() if index not in self.sizes}

    def arrived(self, index: int, is_answer: bool, now: float) -> None:
        """The chunk is no longer missing; a push updates `push_lag_s`."""
        since = self.missing_since.pop(index, None)
        if not is_answer:
            self.push_lag_s = max(PUSH_LAG_KEPT * self.push_lag_s, now - since if since is not None else 0.0)

    def emptied(self, offered: int, now: float) -> None:
        """We hold none of its chunks any more; those that neighbours offer are requested at once."""
        self.held, self.held_bytes, self.is_wanted, self.pushed_at = 0, 0, True, float("-inf")
        self.sizes.clear()
        self.missing_since.clear()
        self.offered(offered, now)

    @property
    def is_complete(self) -> bool:
        return self.chunk_count is not None and self.held == all_of(self.chunk_count)

    @property
    def is_nearly_complete(self) -> bool:
        return self.chunk_count is not None and self.chunk_count - len(self.sizes) <= LAST_SHARE * self.chunk_count

    @property
    def mean_chunk_bytes(self) -> int:
        return max(1, self.held_bytes // len(self.sizes)) if self.sizes else 128 << 10


@dataclass(slots=True)
class OpenRequest:
    """A chunk that we asked a peer for."""

    since: float
    deadline: float


@dataclass(slots=True)
class Peer:
    peer_id: PeerId
    is_late: bool = False  # by the plan: served only when nothing is queued for other peers
    is_near: bool = True  # by the plan: in our region
    haves: dict[ArtifactKey, int] = field(default_factory=dict)
    sealed: set[ArtifactKey] = field(default_factory=set)  # it knows the seal
    knows: set[ArtifactKey] = field(default_factory=set)  # it knows the header
    sent_haves: dict[ArtifactKey, int] = field(default_factory=dict)  # the have-map that we sent last
    relay_queue: deque[Outgoing] = field(default_factory=deque)
    pull_queue: deque[Outgoing] = field(default_factory=deque)
    leaf_queue: deque[Outgoing] = field(default_factory=deque)
    connections: int = 1  # of the link to it
    wished_connections: int = 1  # that it asks for
    in_transport: int = 0
    taken_at: float = 0.0  # when the transport last took a chunk, or was first handed one
    send_s: float = 0.0  # smoothed time that it needs to take one chunk
    is_stuck: bool = False
    served_at: int = 0
    requests: dict[Ref, OpenRequest] = field(default_factory=dict)
    answer_s: float = float("inf")  # the least that it took to answer one
    asked: dict[ArtifactKey, int] = field(default_factory=dict)  # chunks that we ever requested from it
    received: dict[ArtifactKey, int] = field(default_factory=dict)  # chunks that it ever sent us
    sent: dict[Ref, float] = field(default_factory=dict)  # chunks sent to it recently, and when
    answered: dict[Ref, float] = field(default_factory=dict)  # those of them that answered its request
    replays: int = 0
    rate: RateEstimate = field(default_factory=RateEstimate)

    def has(self, key: ArtifactKey, index: int) -> bool:
        return bool(self.haves.get(key, 0) >> index & 1)

    def note(self, key: ArtifactKey, index: int) -> None:
        self.note_all(key, 1 << index)

    def note_all(self, key: ArtifactKey, bitmap: int) -> None:
        self.haves[key] = self.haves.get(key, 0) | bitmap
        self.knows.add(key)

    def cancelled(self, key: ArtifactKey, indices: Collection[int]) -> None:
        """It asks for these chunks no more; whether it has them, its have-map says."""
        dropped = set(indices)
        self.pull_queue = deque(o for o in self.pull_queue if o.key != key or o.index not in dropped)

    def withdraw(self, key: ArtifactKey) -> tuple[int, ...]:
        """Drops all open requests for an artifact; returns their indices."""
        asked = tuple(index for of, index in self.requests if of == key)
        for index in asked:
            del self.requests[key, index]
        return asked

    def forget(self, key: ArtifactKey) -> None:
        for table in (self.haves, self.sent_haves, self.asked, self.received):
            table.pop(key, None)
        for known in (self.knows, self.sealed):  # kept a while, so that nobody is told again what everybody dropped
            if len(known) > KNOWN_MAX:
                known.intersection_update(self.haves)
        self.withdraw(key)

    def needs(self, wholes: Mapping[ArtifactKey, int]) -> bool:
        """Whether chunks are queued or in transport for it, or it holds none of the artifacts in full. `wholes`: full have-maps."""
        has_one = any(self.haves.get(key, 0) & whole == whole for key, whole in wholes.items())
        return self.is_queued or self.in_transport > 0 or (bool(wholes) and not has_one)

    def remember_sent(self, ref: Ref, now: float, is_answer: bool) -> None:
        for table in (self.sent, self.answered) if is_answer else (self.sent,):
            table.pop(ref, None)
            table[ref] = now
            if len(table) > SENT_REMEMBERED_MAX:
                del table[next(iter(table))]

    def may_be_answered(self, ref: Ref, now: float) -> bool:
        """Whether to answer a request. Not while an earlier answer is in transit: a second one only lengthens the queue."""
        never = float("-inf")
        if now - self.answered.get(ref, never) <= ANSWERED_AGAIN_AFTER_S:
            return False
        return now - self.sent.get(ref, never) > PULL_AFTER_S  # a request may cross a push of the same chunk

    @property
    def has_slot(self) -> bool:
        """Whether the transport may take one more chunk for it."""
        return self.in_transport < SLOTS_PER_PEER * self.connections

    @property
    def is_held_back(self) -> bool:
        """Whether chunks are queued for it because all its transport slots are in use."""
        return not self.is_late and self.is_queued and not self.has_slot

    def shed(self) -> None:
        """Clears its queues; it has to pull those chunks."""
        for queue in (self.relay_queue, self.leaf_queue, self.pull_queue):
            queue.clear()

    @property
    def is_queued(self) -> bool:
        return bool(self.relay_queue or self.pull_queue or self.leaf_queue)


def service_order(peers: Iterable[Peer]) -> Iterator[tuple[Peer, deque[Outgoing]]]:
    """Queues of peers with a free slot, in the order of service: chunks to relay, then requested ones, then those for
    leaves; within each kind the peer that has waited longest first. Late peers come last, when no other peer could take a
    chunk, and get what they ask for one at a time."""
    free = [peer for peer in peers if peer.is_queued and peer.has_slot]
    free.sort(key=lambda peer: peer.served_at)
    for peer in free:
        yield peer, peer.relay_queue
    others = [peer for peer in free if not peer.is_late]
    for peer in others:
        yield peer, peer.pull_queue
    for peer in others:
        yield peer, peer.leaf_queue
    for peer in () if others else free:
        if not peer.in_transport:
            yield peer, peer.pull_queue
