"""How many more rollouts a worker requests: enough to keep its slots full, and no more.

A lease takes a while to arrive, and slots become free meanwhile. So the target is slots + cover, where cover is the number of
rollouts that finish while a lease travels, rounded up to whole groups because leases are whole groups. A request states a level
(rollouts wanted now), not an addition: it is sent when the level differs from what the coordinator believes, and repeated every
`REPEAT_S`. Guarantees: requests at most slots + cover + one group, with cover <= slots. Leaves to others: whether the worker may
request at all (leases), sending the request (worker).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from echo2.base.ids import Version

REPEAT_S = 5.0  # so long at most a lost request leaves slots idle
SAFETY = 1.5  # half as many again as finish at the mean rate: a free slot costs more than a waiting rollout
FINISHES_KEPT = 64  # the rate of the last groups, not of a day
TRAVELS_KEPT = 8  # the least of the last few: one slow answer is no travel time


@dataclass(slots=True)
class Demand:
    """`group_size`: rollouts in the last group granted, the best estimate for the next."""

    slot_count: int = 0
    version: Version | None = None
    group_size: int = 1
    _believed: int = 0
    _believed_version: Version | None = None
    _asked_at: float | None = None
    _awaits_grant_since: float | None = None
    _finishes: deque[float] = field(default_factory=lambda: deque(maxlen=FINISHES_KEPT))
    _travels: deque[float] = field(default_factory=lambda: deque(maxlen=TRAVELS_KEPT))

    def live(self, version: Version, slot_count: int) -> None:
        self.version = version
        self.slot_count = slot_count

    def finished(self, now: float) -> None:
        """Records that a rollout ended and its slot is free."""
        self._finishes.append(now)

    def granted(self, rollout_count: int, now: float) -> None:
        self.group_size = rollout_count
        self._believed = max(0, self._believed - rollout_count)
        if self._awaits_grant_since is not None:
            self._travels.append(now - self._awaits_grant_since)
            self._awaits_grant_since = None

    def forget_request(self) -> None:
        """Forgets the last request: after a reconnect or restart the coordinator does not know it."""
        self._believed = 0
        self._asked_at = None
        self._awaits_grant_since = None

    def cover(self) -> int:
        """Rollouts that finish while a lease travels. Uses the shortest recent travel time: in longer ones the coordinator mostly
        had no work."""
        if len(self._finishes) < 2 or not self._travels:
            return 0
        span = self._finishes[-1] - self._finishes[0]
        rate = (len(self._finishes) - 1) / span if span > 0 else math.inf
        return int(min(self.slot_count, math.ceil(SAFETY * rate * min(self._travels)) if math.isfinite(rate) else 0))

    def level(self, held: int, is_willing: bool) -> int:
        """How many more rollouts are wanted while `held` are running or waiting for a slot."""
        missing = self.slot_count + self.cover() - held
        if not is_willing or missing <= 0:
            return 0
        return math.ceil(missing / self.group_size) * self.group_size

    def request(self, held: int, is_willing: bool, now: float) -> tuple[int, Version] | None:
        """The request to send now, if any: the level and the live version."""
        if self.version is None:
            return None
        level = self.level(held, is_willing)
        is_news = level != self._believed or (level > 0 and self.version != self._believed_version)
        is_old = level > 0 and self._asked_at is not None and now >= self._asked_at + REPEAT_S
        if not is_news and not is_old:
            return None
        if level > self._believed:
            self._awaits_grant_since = now
        self._believed = level
        self._believed_version = self.version
        self._asked_at = now
        return level, self.version

    def repeat_at(self) -> float | None:
        """When to repeat a standing request; None if there is none."""
        if self._believed <= 0 or self._asked_at is None:
            return None
        return self._asked_at + REPEAT_S
