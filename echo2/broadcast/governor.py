"""How fast this node may send: learns the uplink's rate from how its TCP connections fare. Pure.

A full drop-tail queue loses packets of all connections at once, and each needs round trips to recover while the uplink
idles. So chunks are paced just below the uplink's rate: queues stay short, little is lost, and other traffic of the
machine (rollouts on their way to the learner) still gets through. The rate follows the queue: it rises while chunks are
waiting and round trips are hardly longer than their minimum; it falls when round trips grow on all connections at once,
which only our own uplink can cause.

Guarantees: never above the user's limit; never below FLOOR_SHARE of the highest rate so far; no pacing (rate 0) before
there was a reason to hold back. Leaves to others: reading the connections (runtime/sockets.py).
"""

from __future__ import annotations

from dataclasses import dataclass

QUEUE_S, QUEUE_MIN_S, QUEUE_MAX_S = 0.010, 0.020, 0.045
"""The queue aimed at: so much beside one chunk, within these bounds. Routers' queues are often no longer than 60 ms: a chunk of
20 ms more overflows one that is held at 40."""
GAIN_PER_S = 0.6  # change of the rate per sample, as a share, per second of queue above or below the target
RAISE_MAX, LOWER_MAX = 0.02, 0.03
FIRST_SHARE = 0.96  # of a planned rate, which includes packet headers
FLOOR_SHARE = 0.25
SPAN_S = 0.8  # over which delivery is averaged


@dataclass(frozen=True, slots=True)
class UplinkSample:
    """All connections that sent something since the last sample: bytes confirmed by peers, and `queue_s`, by how much the
    least delayed connection's round trip exceeds its own minimum."""

    delivered_bytes: int
    queue_s: float
    is_waiting: bool  # chunks waited for the pacer
    chunk_bytes: int = 0


class UplinkGovernor:
    """`rate_bytes_per_s` 0: unpaced. `capacity_bytes_per_s` 0: the uplink was never seen full."""

    def __init__(self, limit_bytes_per_s: float = 0.0) -> None:
        self._limit = limit_bytes_per_s
        self._rate = 0.0
        self._highest = 0.0
        self._recent: list[tuple[float, int]] = []
        self.capacity_bytes_per_s = 0.0

    @property
    def rate_bytes_per_s(self) -> float:
        if self._limit > 0:
            return min(self._limit, self._rate) if self._rate else self._limit
        return self._rate

    def planned(self, uplink_bytes_per_s: float) -> None:
        """Starts from the plan's estimate of our uplink, unless a rate is already known."""
        if self._rate == 0.0 and uplink_bytes_per_s > 0:
            self._hold(FIRST_SHARE * uplink_bytes_per_s)

    def sample(self, seen: UplinkSample, now: float) -> None:
        self._recent.append((now, seen.delivered_bytes))
        while now - self._recent[0][0] > SPAN_S:
            del self._recent[0]
        if self._rate == 0.0:
            if seen.queue_s > QUEUE_MAX_S:
                self._hold((1 - LOWER_MAX) * self._delivered_per_s(now))
            return
        aim_s = max(QUEUE_MIN_S, min(QUEUE_MAX_S, QUEUE_S + seen.chunk_bytes / self._rate))
        change = max(-LOWER_MAX, min(RAISE_MAX, GAIN_PER_S * (aim_s - seen.queue_s)))
        if change < 0 or seen.is_waiting:
            self._hold(max((1 + change) * self._rate, FLOOR_SHARE * self._highest))
        if change < 0:
            self.capacity_bytes_per_s = self._rate

    def _hold(self, rate: float) -> None:
        self._rate = rate
        self._highest = max(rate, 0.999 * self._highest)

    def _delivered_per_s(self, now: float) -> float:
        span = now - self._recent[0][0]
        return sum(size for _, size in self._recent[1:]) / span if span > 0.2 else 0.0
