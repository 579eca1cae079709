"""Measures the CPU cost of one session that fetches a large artifact from many peers. No network, no disk, no payloads.

Guarantees: same load and seed, same calls. Measures the thread's CPU time, so other load on the machine hardly matters.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.events import (
    ChunkSeen,
    ChunksKept,
    Event,
    Have,
    HeaderSeen,
    PeerDown,
    PeerUp,
    Request,
    SealSeen,
    Woken,
)
from echo2.broadcast.session import BroadcastSession

KEY = ArtifactKey(b"a large artefact")
LINK_BYTES_PER_S = 500e6
IDLE_MAX = 1000


@dataclass(frozen=True, slots=True)
class PullLoad:
    """The artifact and its peers. `held_share`: share of the chunks that each peer holds. `kept_share`: share of the chunks
    that the session holds from the start."""

    chunk_count: int
    chunk_bytes: int = 64 << 10
    peer_count: int = 30
    held_share: float = 0.9
    kept_share: float = 0.0


@dataclass(slots=True)
class PullCost:
    chunks: int = 0
    bytes: int = 0
    spent_s: float = 0.0
    longest: dict[str, float] = field(default_factory=dict)  # by kind of event, in seconds

    @property
    def chunk_s(self) -> float:
        return self.spent_s / max(1, self.chunks)

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / max(1e-9, self.spent_s)

    @property
    def longest_s(self) -> float:
        return max(self.longest.values(), default=0.0)


class Puller:
    def __init__(self, load: PullLoad, seed: int = 0) -> None:
        self.load = load
        self.session = BroadcastSession(PeerId("me"), seed)
        self.cost = PullCost()
        self.now = 0.0
        self._asked: deque[tuple[PeerId, int]] = deque()
        self._peers = [PeerId(f"peer {number}") for number in range(load.peer_count)]
        self._rng = random.Random(seed)

    def begin(self) -> None:
        """Delivers the header, the chunks kept, the seal, and each peer with its have-map."""
        self._tell(HeaderSeen(None, KEY, is_wanted=True))
        if self.load.kept_share:
            kept = self._some(self.load.kept_share)
            sizes = {index: self.load.chunk_bytes for index in range(self.load.chunk_count) if kept >> index & 1}
            self._tell(ChunksKept(KEY, kept, sizes))
        self._tell(SealSeen(None, KEY, self.load.chunk_count))
        self.now += 10.0
        for peer in self._peers:
            self._tell(PeerUp(peer))
            self._tell(Have(peer, KEY, self._some(self.load.held_share), is_sealed=True))

    def fetch(self, chunks_max: int) -> PullCost:
        """Answers requests in order until `chunks_max` more chunks have arrived. Returns the total cost, `begin` included."""
        until, idle = self.cost.chunks + chunks_max, 0
        while self.cost.chunks < until and not self.session.artifacts[KEY].is_complete and idle < IDLE_MAX:
            if not self._asked:
                idle += 1
                self.now += 0.05
                self._tell(Woken())
                continue
            peer, index = self._asked.popleft()
            self.now += self.load.chunk_bytes / LINK_BYTES_PER_S
            self._tell(ChunkSeen(peer, KEY, index, self.load.chunk_bytes, is_answer=True))
            self.cost.chunks, self.cost.bytes, idle = self.cost.chunks + 1, self.cost.bytes + self.load.chunk_bytes, 0
        return self.cost

    def leave(self) -> None:
        """Disconnects the peers, one after another."""
        for peer in self._peers:
            self._tell(PeerDown(peer))

    def _some(self, share: float) -> int:
        """A random `share` of the chunks as a bitmap, in steps of 1/16."""
        bitmap, wanted = 0, round(share * 16)
        # From the share's lowest binary digit: OR sets half of the unset bits, AND keeps half of the set ones.
        for bit in range(4):
            drawn = self._rng.getrandbits(self.load.chunk_count)
            bitmap = bitmap | drawn if wanted >> bit & 1 else bitmap & drawn
        return bitmap

    def _tell(self, event: Event) -> None:
        begun_s = time.thread_time()
        actions = self.session.handle(event, self.now)
        spent_s = time.thread_time() - begun_s
        kind = type(event).__name__
        self.cost.spent_s += spent_s
        self.cost.longest[kind] = max(self.cost.longest.get(kind, 0.0), spent_s)
        for action in actions:
            if isinstance(action, Request):
                self._asked.extend((action.peer, index) for index in action.indices)
