"""How fast a worker generates, over a sliding window of busy time, and how many more rollouts it requests: enough to keep its slots
full, and no more.

A lease takes a while to arrive, and slots become free meanwhile. So the target is slots + cover, where cover is the number of
rollouts that finish while a lease travels, rounded up to whole groups because leases are whole groups. A request states a level
(rollouts wanted now), not an addition: it is sent when the level differs from what the coordinator believes, and repeated every
`REPEAT_S`. Guarantees: requests at most slots + cover + one group, with cover <= slots; rates are per second in which the engine
had something to decode, so a worker without leases does not look slow; the window and the sample of durations are bounded.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from echo2.base.ids import Version

WINDOW_S = 20.0  # evens out single steps; a change of load is seen whole after as long
BUCKET_S = 0.5  # 40 buckets a window
DURATIONS_MAX = 256  # 12 of them lie above the 95th percentile
BUSY_S_MIN = 0.05  # one or two steps of a large model; a rate over less is noise
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

    def repeat_at(self) -> float:
        """When to repeat a standing request; infinity if there is none."""
        return math.inf if self._believed <= 0 or self._asked_at is None else self._asked_at + REPEAT_S


@dataclass(slots=True)
class _Bucket:
    begin: float
    tokens: int = 0
    rollouts: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per busy second of the window. `rollout_s_*`: seconds from a rollout's start on this worker to its last token, over
    recent rollouts."""

    tokens_per_s: float
    rollouts_per_s: float
    rollout_s_mean: float
    rollout_s_p95: float


@dataclass(slots=True)
class RateWindow:
    """Counts tokens and finished rollouts as they come. The caller reports through `busy` when the engine has work."""

    window_s: float = WINDOW_S
    sampled_tokens: int = 0
    finished_rollouts: int = 0
    _buckets: deque[_Bucket] = field(default_factory=deque)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=DURATIONS_MAX))
    _busy_since: float | None = None
    _last: Rates = Rates(0.0, 0.0, 0.0, 0.0)

    def sampled(self, tokens: int, now: float) -> None:
        self.sampled_tokens += tokens
        self._bucket(now).tokens += tokens

    def finished(self, duration_s: float, now: float) -> None:
        self.finished_rollouts += 1
        self._bucket(now).rollouts += 1
        self._durations.append(duration_s)

    def declare(self, tokens_per_s: float) -> None:
        """Sets the rate measured before the first lease; it holds until leases give measured rates."""
        self._last = Rates(tokens_per_s, 0.0, 0.0, 0.0)

    def busy(self, is_busy: bool, now: float) -> None:
        """Records whether the engine has sequences from `now` on."""
        self._account(now)
        self._busy_since = now if is_busy else None

    def rates(self, now: float) -> Rates:
        """Rates over the window; the last known ones while the window holds less than `BUSY_S_MIN` of busy time."""
        self._account(now)
        self._forget(now)
        busy_s = sum(bucket.busy_s for bucket in self._buckets)
        if busy_s >= BUSY_S_MIN:
            durations = sorted(self._durations)
            self._last = Rates(
                tokens_per_s=sum(bucket.tokens for bucket in self._buckets) / busy_s,
                rollouts_per_s=sum(bucket.rollouts for bucket in self._buckets) / busy_s,
                rollout_s_mean=sum(durations) / len(durations) if durations else 0.0,
                rollout_s_p95=durations[min(len(durations) - 1, int(0.95 * len(durations)))] if durations else 0.0,
            )
        return self._last

    def _account(self, now: float) -> None:
        # All time since the last call goes to the current bucket. Coarse, but calls come at least every heartbeat.
        if self._busy_since is not None:
            self._bucket(now).busy_s += max(0.0, now - self._busy_since)
            self._busy_since = now

    def _bucket(self, now: float) -> _Bucket:
        if not self._buckets or now >= self._buckets[-1].begin + BUCKET_S:
            self._forget(now)
            self._buckets.append(_Bucket(now))
        return self._buckets[-1]

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0].begin < now - self.window_s:
            self._buckets.popleft()
