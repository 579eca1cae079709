"""What a session remembers of artifacts and peers. Plain state; the rules are in session.py and pulling.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from echo2.base.ids import PeerId
from echo2.broadcast.chunks import all_of, bitmap_of, indices_of, those_in
from echo2.broadcast.events import LinkWidened, Route, WidthWished
from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.policy import ANSWERED_AGAIN_AFTER_S, PULL_AFTER_S, RateEstimate

Ref = tuple[bytes, int]
SENT_REMEMBERED_MAX = 512
MISSING_MAX = 4096
"""Of one artifact, what is remembered of the chunks that others hold: what is asked for next, and then the next."""
LAST_SHARE = 0.04  # of an artifact's chunks: too few to be worth waiting for
PUSH_LAG_KEPT = 0.995  # per chunk that is pushed to us


@dataclass(slots=True)
class Outgoing:
    """One chunk that waits to be sent to one peer."""

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
    missing_since: dict[int, float] = field(default_factory=dict)  # held by a neighbour, not by us: the first of them
    has_more_missing: bool = False  # than `missing_since` names
    pushed_at: float = float("-inf")
    is_deferred: bool = False  # pushes of it come at our own pace, some of them long after neighbours have it
    push_lag_s: float = 0.0  # how much later than to a neighbour a push came to us; falls slowly

    def offered(self, bitmap: int, now: float) -> None:
        """A neighbour says that it holds these chunks.

        Of those that are missing the first MISSING_MAX are remembered. Chunks are numbered from 0 without a gap, so those
        that somebody made up, behind the last, keep no others out.
        """
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
        """Whether more are missing than are remembered, of which few are left."""
        return self.has_more_missing and len(self.missing_since) < MISSING_MAX // 2

    def offered_by_none(self, offered: int) -> None:
        """Nothing but what is `offered` can be asked for any more."""
        kept = set(those_in(offered, self.missing_since))
        self.missing_since = {index: since for index, since in self.missing_since.items() if index in kept}

    def sealed(self, chunk_count: int) -> None:
        """Whoever spoke of chunks behind the last one made them up."""
        self.chunk_count = chunk_count
        self.missing_since = {index: since for index, since in self.missing_since.items() if index < chunk_count}

    def holds(self, index: int, size_bytes: int) -> None:
        """A chunk is here, whose size counts once."""
        self.held |= 1 << index
        if index not in self.sizes:
            self.sizes[index] = size_bytes
            self.held_bytes += size_bytes

    def kept(self, bitmap: int, sizes: Mapping[int, int]) -> None:
        """These chunks have been here since an earlier run."""
        new = {index: size for index, size in sizes.items() if index not in self.sizes}
        self.held |= bitmap
        self.sizes.update(new)
        self.held_bytes += sum(new.values())
        self.missing_since = {index: since for index, since in self.missing_since.items() if index not in self.sizes}

    def came(self, index: int, is_answer: bool, now: float) -> None:
        """The chunk is missing no more."""
        since = self.missing_since.pop(index, None)
        if not is_answer:
            self.push_lag_s = max(PUSH_LAG_KEPT * self.push_lag_s, now - since if since is not None else 0.0)

    def emptied(self, offered: int, now: float) -> None:
        """Nothing of it is held any more; what neighbours hold of it is asked for at once."""
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
class Request:
    """A chunk that we asked a peer for."""

    since: float
    deadline: float


@dataclass(slots=True)
class Peer:
    peer_id: PeerId
    is_late: bool = False  # by the plan: served when nothing waits for others
    turn: int = 0  # by the plan: among those who wait for deferred chunks
    has_own_pace: bool = False  # by the plan: no tree waits for it
    is_narrow: bool = (
        False  # by the plan: what it is to pass on fills its downlink while anything of an artifact is fresh
    )
    haves: dict[ArtifactKey, int] = field(default_factory=dict)
    sealed: set[ArtifactKey] = field(default_factory=set)  # it knows the seal
    knows: set[ArtifactKey] = field(default_factory=set)  # it knows the header
    told: dict[ArtifactKey, int] = field(default_factory=dict)  # the have-map that we sent last
    relay_queue: deque[Outgoing] = field(default_factory=deque)
    pull_queue: deque[Outgoing] = field(default_factory=deque)
    leaf_queue: deque[Outgoing] = field(default_factory=deque)
    deferred_queue: deque[Outgoing] = field(default_factory=deque)
    connections: int = 1  # that the link to it is made of
    wished_connections: int = 1  # that it would like
    in_transport: int = 0
    taken_at: float = 0.0  # when the transport last took a chunk, or was first handed one
    send_s: float = 0.0  # smoothed time in which it takes one
    is_stuck: bool = False
    served_at: int = 0
    requests: dict[Ref, Request] = field(default_factory=dict)
    asked: dict[ArtifactKey, int] = field(default_factory=dict)  # ever asked for
    given: dict[ArtifactKey, int] = field(default_factory=dict)  # ever sent to us
    sent: dict[Ref, float] = field(default_factory=dict)  # to it, lately
    answered: dict[Ref, float] = field(default_factory=dict)  # of these, what it had asked for
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
        """It has these from elsewhere."""
        gone = set(indices)
        self.pull_queue = deque(o for o in self.pull_queue if o.key != key or o.index not in gone)
        self.note_all(key, bitmap_of(gone))

    def withdraw(self, key: ArtifactKey) -> tuple[int, ...]:
        """Nothing of it is on request any more; returns what was."""
        asked = tuple(index for of, index in self.requests if of == key)
        for index in asked:
            del self.requests[key, index]
        return asked

    def forget(self, key: ArtifactKey) -> None:
        for table in (self.haves, self.told, self.asked, self.given):
            table.pop(key, None)
        self.withdraw(key)

    def needs(self, wholes: Mapping[ArtifactKey, int]) -> bool:
        """Whether something waits for it here, or it has told of none of these have-maps that it has it all."""
        has_one = any(self.haves.get(key, 0) & whole == whole for key, whole in wholes.items())
        return self.is_queued or self.in_transport > 0 or (bool(wholes) and not has_one)

    def remember_sent(self, ref: Ref, now: float, is_answer: bool) -> None:
        for table in (self.sent, self.answered) if is_answer else (self.sent,):
            table.pop(ref, None)
            table[ref] = now
            if len(table) > SENT_REMEMBERED_MAX:
                del table[next(iter(table))]

    def may_be_answered(self, ref: Ref, now: float) -> bool:
        """Not while an answer is on its way: a second one only makes the queue longer that holds it up."""
        never = float("-inf")
        if now - self.answered.get(ref, never) <= ANSWERED_AGAIN_AFTER_S:
            return False
        return now - self.sent.get(ref, never) > PULL_AFTER_S  # a request may cross a push of the same chunk

    def note_width(self, event: LinkWidened | WidthWished) -> None:
        if isinstance(event, LinkWidened):
            self.connections = event.connections
        else:
            self.wished_connections = event.connections

    def slots(self, per_connection: int) -> int:
        """How many chunks to it may be in the transport at once."""
        return 1 if self.is_late else per_connection * self.connections

    def is_held_back(self, slots_per_connection: int) -> bool:
        """Whether chunks for it wait because the transport holds all that it may."""
        return not self.is_late and self.is_queued and self.in_transport >= self.slots(slots_per_connection)

    def shed(self) -> None:
        """What waits for it is left for it to pull."""
        for queue in (self.relay_queue, self.leaf_queue, self.pull_queue, self.deferred_queue):
            queue.clear()

    @property
    def is_queued(self) -> bool:
        return bool(self.queued or self.deferred_queue)

    @property
    def queued(self) -> int:
        """Chunks that wait for it, without those that are deferred."""
        return len(self.relay_queue) + len(self.pull_queue) + len(self.leaf_queue)


def service_order(peers: Iterable[Peer], slots: int) -> Iterator[tuple[Peer, deque[Outgoing]]]:
    """Queues of peers with a free slot: chunks that others will pass on first, then what was asked for, then the rest;
    of each kind the longest unserved peer. Where none of these can be sent, chunks that were deferred, by turn. Late peers have one
    slot, and that while nothing waits for others."""
    waiting = [peer for peer in peers if peer.is_queued]
    if not waiting:
        return
    waiting.sort(key=lambda peer: peer.served_at)
    needed = [peer for peer in waiting if not peer.is_late]
    free = [peer for peer in needed or waiting if peer.in_transport < peer.slots(slots)]
    for rank in range(3):
        for peer in free:
            yield peer, (peer.relay_queue, peer.pull_queue, peer.leaf_queue)[rank]
    for peer in sorted(free, key=lambda peer: peer.turn):
        yield peer, peer.deferred_queue


@dataclass(slots=True)
class RelayJob:
    """A chunk that we pass on: to whom still, and who waits to hear of it."""

    parent: PeerId | None
    waiting: set[PeerId]
    child_count: int
