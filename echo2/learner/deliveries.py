"""What each worker has delivered: for the coordinator, which believes nothing else about a worker's speed.

Of each worker: how many different rollouts gave tokens in the last `HEARD_S` seconds (a level), and how many rollouts of
it were admitted since that was last told; a rollout that several workers sampled counts for each by its share of the tokens.

Guarantees: only what passed the admission rule counts; bounded memory. Leaves to others: telling it (runtime/shift).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from echo2.base.ids import GroupId, PeerId
from echo2.learner.episodes import NOBODY, SentTokens

HEARD_S = 6.0
"""Longer than any worker's report interval by far, so that each rollout in progress is among those heard of."""
NEWS_S, TELL_S = 0.25, 1.0
"""Told every `TELL_S`; within `NEWS_S` of the first tokens of a worker that was silent before."""
ROLLOUTS_MAX = 1 << 20
WORKERS_MAX = 16_384

_Place = tuple[GroupId, int]


@dataclass(frozen=True, slots=True)
class DeliveryTally:
    """By one worker."""

    worker_id: PeerId
    heard_rollouts: int
    admitted_rollouts: float


@dataclass(slots=True)
class Deliveries:
    """`take` gives what is to be told now, or None while nothing is due."""

    _fresh: set[tuple[PeerId, _Place]] = field(default_factory=set)
    _last: dict[tuple[PeerId, _Place], float] = field(
        default_factory=dict
    )  # in the order in which they were heard last
    _admitted: dict[PeerId, float] = field(default_factory=dict)
    _told_of: set[PeerId] = field(default_factory=set)
    _told_at: float | None = None
    _proven: dict[PeerId, None] = field(default_factory=dict)

    def is_proven(self, worker: PeerId) -> bool:
        """Whether a rollout of it was ever admitted; the WORKERS_MAX last ones are remembered."""
        return worker in self._proven

    def heard(self, worker: PeerId, group_id: GroupId, index: int) -> None:
        """New tokens of this rollout came from this worker."""
        if worker != NOBODY and len(self._fresh) < ROLLOUTS_MAX:
            self._fresh.add((worker, (group_id, index)))

    def admitted(self, senders: Iterable[SentTokens]) -> None:
        """A rollout was admitted; `senders`: who sent which share of it."""
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
        """All workers of which something was heard, as of now."""
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
