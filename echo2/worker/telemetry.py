"""Measures a worker's speed: rates over a sliding window of busy time, and rollout durations.

Guarantees: rates are per second in which the engine had something to decode, so a worker without leases does not look
slow; the window and the sample of durations are bounded. Leaves to others: sending the rates (runtime).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 20.0
BUCKET_S = 0.5
DURATIONS_MAX = 256
BUSY_S_MIN = 0.05


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
