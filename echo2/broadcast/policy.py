"""Constants and small estimators behind the session's decisions: pacing, relay windows, peer rates, timeouts. No IO, no clock.

Guarantees: every object here is small, takes the time as `now`, and keeps within its stated limits.
"""

from __future__ import annotations

SLOTS_PER_PEER = 2
HAVE_INTERVAL_S = 0.5
HAVE_PEERS = 5  # with more peers than this, have-maps go out less often
RELAY_SLACK_S = 0.15
RELAY_TIMEOUT_S = 2.0
RELAYS_FULL_S = 0.3
STALL_S = 1.2
OWN_PACE_STALL_S = 6.0  # for a peer with its own pace
PULL_AFTER_S = 1.5
PULL_AFTER_MAX_S = 6.0
PULL_LAST_AFTER_S = 0.75
PUSH_SILENCE_S = 1.0
FIRST_PUSH_S = 0.4
FRESH_PAUSE_S = 0.2  # this long without a fresh chunk ends an artifact's first stage
PUBLISHER_AFTER_S = 4.0
PUBLISHER_ALONE_AFTER_S = 0.5
PULL_WINDOW_S = 0.5
PULL_TIMEOUT_S = 1.5
PULL_CHUNKS_MAX = 32
REQUESTS_HELD_MAX = 256
REPLAYS_MAX = 16
ANSWERED_AGAIN_AFTER_S = 30.0
"""A link loses nothing while it stands, so a repeated request means that our uplink is full. With an interval of ten
seconds, impatient peers made a full uplink send the same chunks over and over, and nothing else."""


class Pacer:
    """A token bucket with a burst of `burst_s` seconds. Rate 0: unpaced."""

    __slots__ = ("_free_at", "burst_s", "rate_bytes_per_s")

    def __init__(self, rate_bytes_per_s: float, burst_s: float = 0.02) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.burst_s = burst_s
        self._free_at = float("-inf")

    def ready_at(self, now: float) -> float:
        """The earliest time at which the next chunk may leave, at least `now`."""
        if self.rate_bytes_per_s <= 0:
            return now
        return max(now, self._free_at - self.burst_s)

    def spend(self, size_bytes: int, now: float) -> None:
        if self.rate_bytes_per_s > 0:
            self._free_at = max(self._free_at, now) + size_bytes / self.rate_bytes_per_s


class RelayWindow:
    """How many unacknowledged chunks the seed keeps with one tree's relays: just enough to keep their uplinks busy.

    Each acknowledgement carries the relay's backlog. If the backlog is less than what the relay forwards in `slack_s`
    (or less than two chunks), the window grows; above twice that, it shrinks. So neither the relay's uplink nor its
    round trip has to be known, and a relay's queue stays near `slack_s`.
    """

    __slots__ = (
        "_first_bytes", "_interval_s", "_largest", "_last_ack_at", "_suspensions", "_window", "lap_s", "outstanding", "retry_at",
        "sent_bytes", "slack_s",
    )  # fmt: skip
    SMALLEST, LARGEST, LARGEST_PLANNED = 2.0, 48.0, 256.0
    TYPICAL_BYTES_MIN = 16 << 10  # a smaller chunk (a container's header) does not tell how large the others are
    PAUSE_MAX_S = 30.0

    def __init__(self, slack_s: float, first_bytes: float = 0.0) -> None:
        self.slack_s = slack_s
        self._first_bytes = first_bytes
        self._window, self._largest = 3.0, self.LARGEST
        self._interval_s = 0.1
        self._last_ack_at: float | None = None
        self.lap_s = 0.0
        self.outstanding: dict[tuple[bytes, int], float] = {}
        self.sent_bytes = 0.0
        self.retry_at = float("-inf")
        self._suspensions = 0

    def given(self, ref: tuple[bytes, int], size_bytes: int, is_owed: bool, now: float) -> None:
        """A chunk was assigned to the tree; `is_owed`: its relays will acknowledge it."""
        if self._first_bytes:
            planned = self._first_bytes / size_bytes
            is_typical = size_bytes >= self.TYPICAL_BYTES_MIN
            if is_typical:  # a relay that carries all of a fast link needs more than LARGEST
                self._largest = min(self.LARGEST_PLANNED, max(self.LARGEST, 2 * planned))
                self._first_bytes = 0.0
            self._window = min(self._largest, max(self._window, planned))
        self.sent_bytes += size_bytes
        if is_owed:
            self.outstanding[ref] = now

    def is_suspended(self, now: float) -> bool:
        return now < self.retry_at

    def has_room(self, now: float) -> bool:
        return not self.is_suspended(now) and len(self.outstanding) < int(self._window)

    def resume(self) -> None:
        """The relay was heard from: ends the suspension and resets the backoff."""
        self.retry_at, self._suspensions = float("-inf"), 0

    def passed_on(self, ref: tuple[bytes, int], backlog: int, now: float) -> None:
        """The relay has forwarded a chunk to all its children and has `backlog` more."""
        begun = self.outstanding.pop(ref, None)
        self.resume()
        if begun is None:
            return
        lap_s = now - begun
        self.lap_s = lap_s if self.lap_s == 0.0 else 0.8 * self.lap_s + 0.2 * lap_s
        if self._last_ack_at is not None and backlog:
            self._interval_s = 0.8 * self._interval_s + 0.2 * min(1.0, now - self._last_ack_at)
        self._last_ack_at = now
        enough = max(2.0, self.slack_s / max(self._interval_s, 1e-3))
        if backlog < enough:
            self._window = min(self._largest, self._window + 0.5)
        elif backlog > 2 * enough:
            self._window = max(self.SMALLEST, self._window - 0.5)

    def oldest_age_s(self, now: float) -> float:
        return now - next(iter(self.outstanding.values())) if self.outstanding else 0.0

    def suspend(self, now: float) -> list[tuple[bytes, int]]:
        """Stops using the relay until it is heard from, or for a backoff that doubles; returns the chunks it still owed."""
        self.retry_at = now + min(self.PAUSE_MAX_S, 2.0 * 2**self._suspensions)
        self._suspensions = min(self._suspensions + 1, 10)
        owed = list(self.outstanding)
        self.outstanding.clear()
        self._window = self.SMALLEST
        return owed


class RateEstimate:
    """Smoothed bytes per second while busy, measured from transfers."""

    __slots__ = ("_bytes", "_since", "bytes_per_s")
    WINDOW_S = 0.5

    def __init__(self, initial_bytes_per_s: float = 2e6) -> None:
        self.bytes_per_s = initial_bytes_per_s
        self._since = float("-inf")
        self._bytes = 0

    def begin(self, now: float) -> None:
        """A transfer starts after an idle time, which does not count."""
        self._since, self._bytes = now, 0

    def add(self, size_bytes: int, now: float) -> None:
        if self._since == float("-inf"):
            self._since = now
            return
        self._bytes += size_bytes
        span = now - self._since
        if span >= self.WINDOW_S:
            self.bytes_per_s = 0.5 * self.bytes_per_s + 0.5 * self._bytes / span
            self._since, self._bytes = now, 0

    def punish(self) -> None:
        """Halves the rate, because a request timed out."""
        self.bytes_per_s = max(1e3, self.bytes_per_s / 2)
