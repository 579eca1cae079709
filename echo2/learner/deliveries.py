"""Counts what each worker delivered. The coordinator believes nothing else about a worker's speed.

For each worker: the number of its rollouts that received tokens in the last `HEARD_S` seconds (a gauge), and the number of
its rollouts admitted since the last report. If several workers sampled a rollout, each is credited its share of the tokens.

Guarantees: only rollouts that passed the admission rule count; memory is bounded. Leaves to others: reporting
(runtime/shift).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from echo2.base.ids import GroupId, PeerId
from echo2.learner.episodes import NOBODY, SentTokens

HEARD_S = 6.0
"""Much longer than any worker's report interval, so that every rollout in progress is counted."""
NEWS_S, TELL_S = 0.25, 1.0
"""Reports go out every `TELL_S`; every `NEWS_S` while there are tokens of a worker that was not in the last report."""
ROLLOUTS_MAX = 1 << 20
WORKERS_MAX = 16_384

_Place = tuple[GroupId, int]


@dataclass(frozen=True, slots=True)
class DeliveryTally:
    """One worker's deliveries. `heard_rollouts`: with tokens in the last `HEARD_S`; `admitted_rollouts`: since the last report."""

    worker_id: PeerId
    heard_rollouts: int
    admitted_rollouts: float


@dataclass(slots=True)
class Deliveries:
    """`take` returns the report that is due, or None."""

    _fresh: set[tuple[PeerId, _Place]] = field(default_factory=set)
    _last: dict[tuple[PeerId, _Place], float] = field(default_factory=dict)  # seconds; ordered by time, oldest first
    _admitted: dict[PeerId, float] = field(default_factory=dict)
    _told_of: set[PeerId] = field(default_factory=set)
    _told_at: float | None = None
    _proven: dict[PeerId, None] = field(default_factory=dict)

    def is_proven(self, worker: PeerId) -> bool:
        """Whether the worker has ever had a rollout admitted. Remembers the last `WORKERS_MAX` such workers."""
        return worker in self._proven

    def heard(self, worker: PeerId, group_id: GroupId, index: int) -> None:
        """The worker delivered new tokens of this rollout."""
        if worker != NOBODY and len(self._fresh) < ROLLOUTS_MAX:
            self._fresh.add((worker, (group_id, index)))

    def admitted(self, senders: Iterable[SentTokens]) -> None:
        """A rollout was admitted. `senders`: which worker sent how many of its tokens."""
        known = [sent for sent in senders if sent.token_count > 0]
        total = sum(sent.token_count for sent in known)
        for sent in known:
            if sent.peer_id != NOBODY:
                share = sent.token_count / total
                self._admitted[sent.peer_id] = self._admitted.get(sent.peer_id, 0.0) + share
                self._proven.pop(sent.peer_id, None)
                self._proven[sent.peer_id] = None
        while len(self._proven) > WORKERS_MAX:
            del self._proven[next(iter(self._proven))]

    def take(self, now: float) -> tuple[DeliveryTally, ...] | None:
        """The tallies of all workers that delivered something, if a report is due at `now` (seconds), else None."""
        silent_s = float("inf") if self._told_at is None else now - self._told_at
        is_news = any(worker not in self._told_of for worker, _ in self._fresh)
        if silent_s < (NEWS_S if is_news else TELL_S):
            return None
        for key in self._fresh:
            self._last.pop(key, None)
            self._last[key] = now
        self._fresh.clear()
        while self._last and (len(self._last) > ROLLOUTS_MAX or now - next(iter(self._last.values())) > HEARD_S):
            del self._last[next(iter(self._last))]
        heard = Counter(worker for worker, _ in self._last)
        admitted, self._admitted = self._admitted, {}
        self._told_at, self._told_of = now, set(heard)
        workers = sorted(heard.keys() | admitted.keys())
        return tuple(DeliveryTally(worker, heard[worker], admitted.get(worker, 0.0)) for worker in workers)
