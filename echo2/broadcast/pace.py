"""Constants and small estimators behind the session's decisions: pacing, relay windows, peer rates, timeouts. No IO, no clock.

Guarantees: every object here is small, takes the time as `now`, and keeps within its stated limits.
"""

from __future__ import annotations

from collections import deque

from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.events import UplinkSeen

SLOTS_PER_PEER = 2  # one on its way, one ready behind it
LINK_CONNECTIONS = 8  # to one peer: at 1 % loss and 100 ms, CUBIC carries 1.5 MB/s over them
HAVE_INTERVAL_S = 0.5  # some thousand chunks change meanwhile: maps are cheaper than lists
HAVE_PEERS = 5  # with more peers than this, have-maps go out less often
RELAY_SLACK_S = 0.15  # several chunks at any rate: an uplink is never idle over a round trip
RELAY_TIMEOUT_S = 2.0  # with four laps: slow start and one loss fit
RELAYS_FULL_S = 0.3  # twice RELAY_SLACK_S
STALL_S = 1.2  # longer than TCP takes for two losses in a row
PULL_AFTER_S = 1.5  # a relayed path of two hops and a loss
PULL_AFTER_MAX_S = 6.0  # a push that is later than this is lost
PULL_LAST_AFTER_S = 0.75  # half of PULL_AFTER_S: duplicates of the last 4 % cost little
PUSH_SILENCE_S = 1.0  # a tree that works brings many chunks a second
FIRST_PUSH_S = 0.4  # a header and the first chunk travel together
PUBLISHER_AFTER_S = 4.0  # well after peers were asked
PUBLISHER_ALONE_AFTER_S = 0.5  # HAVE_INTERVAL_S: peers would have announced it
FAR_AFTER_S = 8.0  # twice PUBLISHER_AFTER_S: the member of the region whose turn it was has not got it
PULL_WINDOW_S = 0.5  # of the measured rate: several round trips
PULL_TIMEOUT_S = 1.5  # of a peer that sends nothing; more for what is ahead in its queue
PULL_CHUNKS_MAX = 32  # a window of 8 MiB in chunks of 256 KiB
REQUESTS_HELD_MAX = 256  # eight windows
REPLAYS_MAX = 16  # trees that change repeat a few
ANSWERED_AGAIN_AFTER_S = 30.0
"""A link loses nothing while it stands, so a repeated request means that our uplink is full. With an interval of ten
seconds, impatient peers made a full uplink send the same chunks over and over, and nothing else."""


class Pacer:
    """A token bucket with a burst of `burst_s` seconds. Rate 0: unpaced."""

    __slots__ = ("_free_at", "burst_s", "rate_bytes_per_s")

    def __init__(self, rate_bytes_per_s: float, burst_s: float = 0.005) -> None:
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
    """How many unacknowledged chunks the seed keeps with one tree's relays: just enough to keep their uplinks busy. Each
    acknowledgement carries the relay's backlog. If the backlog is less than what the relay forwards in `slack_s` (or than one
    chunk at each hop), a window half used grows; above twice that, it shrinks. So neither the relay's uplink nor its round trip
    has to be known, and a relay's queue stays near `slack_s`: so long the last chunks of a version wait there."""

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
        self.outstanding: dict[tuple[ArtifactKey, int], float] = {}
        self.sent_bytes = 0.0
        self.retry_at = float("-inf")
        self._suspensions = 0

    def assigned(self, ref: tuple[ArtifactKey, int], size_bytes: int, is_owed: bool, now: float) -> None:
        """A chunk was assigned to the tree; `is_owed`: its relays will acknowledge it."""
        if self._first_bytes:
            planned = self._first_bytes / max(1, size_bytes)
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

    def passed_on(self, ref: tuple[ArtifactKey, int], backlog: int, now: float) -> None:
        """The relay has forwarded a chunk to all its children and has `backlog` more."""
        is_used = 2 * len(self.outstanding) >= self._window
        begun = self.outstanding.pop(ref, None)
        self.resume()
        if begun is None:
            return
        lap_s = now - begun
        self.lap_s = lap_s if self.lap_s == 0.0 else 0.8 * self.lap_s + 0.2 * lap_s
        if self._last_ack_at is not None and backlog:
            self._interval_s = 0.8 * self._interval_s + 0.2 * min(1.0, now - self._last_ack_at)
        self._last_ack_at = now
        enough = max(self.slack_s / RELAY_SLACK_S, self.slack_s / max(self._interval_s, 1e-3))
        if backlog < enough and is_used:  # a small version's first backlogs are short in any window
            self._window = min(self._largest, self._window + 0.5)
        elif backlog > 2 * enough:
            self._window = max(self.SMALLEST, self._window - 0.5)

    @property
    def times_out_at(self) -> float:
        """When a relay that acknowledges nothing has owed the oldest chunk for too long."""
        if not self.outstanding:
            return float("inf")
        return next(iter(self.outstanding.values())) + RELAY_TIMEOUT_S + 4 * self.lap_s

    def suspend(self, now: float) -> list[tuple[ArtifactKey, int]]:
        """Stops using the relay until it is heard from, or for a backoff that doubles; returns the chunks it still owed."""
        self.retry_at = now + min(self.PAUSE_MAX_S, 2.0 * 2**self._suspensions)
        self._suspensions = min(self._suspensions + 1, 10)
        owed = list(self.outstanding)
        self.outstanding.clear()
        self._window = self.SMALLEST
        return owed


class RateEstimate:
    """Smoothed bytes per second while busy, measured from transfers."""

    __slots__ = ("_bytes", "_came_at", "_since", "bytes_per_s")
    WINDOW_S = 0.5

    def __init__(self) -> None:
        self.bytes_per_s = 2e6
        self._since = self._came_at = float("-inf")
        self._bytes = 0

    def begin(self, now: float) -> None:
        """A transfer starts after an idle time, which does not count."""
        self._since, self._bytes = now, 0

    def add(self, size_bytes: int, now: float, *, is_awaited: bool) -> None:
        """`is_awaited`: something was asked for, so that the time since then was no pause."""
        was_idle = not is_awaited and now - self._came_at > self.WINDOW_S
        self._came_at = now
        if was_idle:
            self.begin(now)
            return
        self._bytes += size_bytes
        span = now - self._since
        if span >= self.WINDOW_S:
            self.bytes_per_s = 0.5 * self.bytes_per_s + 0.5 * self._bytes / span
            self._since, self._bytes = now, 0

    def punish(self) -> None:
        """Halves the rate, because a request timed out."""
        self.bytes_per_s = max(1e3, self.bytes_per_s / 2)


QUEUE_S, QUEUE_MIN_S, QUEUE_MAX_S = 0.010, 0.020, 0.045
"""The queue aimed at: so much beside one chunk, within these bounds. Routers' queues are often no longer than 60 ms: a chunk of
20 ms more overflows one that is held at 40."""
LOWER_MAX = 0.03  # per look of 0.1 s, while the queue is beyond its aim
RAISE_FIRST, RAISE_MAX, RAISE_FASTER = 0.008, 0.08, 1.3
"""Per look that found a short queue: little near the rate at which the queue was last full, so that short queues lose little, then
faster and faster: an uplink that has become twice as fast is full again after 1.7 s."""
FULL_SHARE, EMPTYING_SHARE = 0.97, 0.9  # of what was delivered while the queue was full: it empties, at most so fast
LOST_SHARE = 0.025  # of what is sent: a queue too short for its delay to be seen; paths that lose 1 % have no more
FIRST_SHARE = 0.96  # of a planned rate, which includes packet headers
LOWER_AT_ONCE = 0.75  # of the rate: a look that came late, or bytes that were held up, may tell of too little
SLOWER_SHARE = 0.7  # of what is planned: less is no noise
FLOOR_SHARE = 0.25  # a queue that others fill must not stop us
DELIVERY_SPAN_S = 0.35  # over which delivery is averaged: three looks
LOSS_SPAN_S = 0.8  # over which losses are counted: several round trips


class UplinkGovernor:
    """`rate_bytes_per_s` 0: unpaced. `capacity_bytes_per_s` 0: the uplink was never seen full."""

    def __init__(self, limit_bytes_per_s: float = 0.0) -> None:
        self._limit = limit_bytes_per_s
        self._rate = 0.0
        self._highest = 0.0
        self._full = 0.0  # what was delivered when the queue was last beyond its aim
        self._raise, self._raise_max = RAISE_FIRST, RAISE_MAX
        self._recent: deque[tuple[float, UplinkSeen]] = deque()
        self._planned = self.capacity_bytes_per_s = 0.0

    @property
    def is_slower_than_planned(self) -> bool:
        return 0 < self.rate_bytes_per_s < SLOWER_SHARE * self._planned

    @property
    def rate_bytes_per_s(self) -> float:
        if self._limit > 0:
            return min(self._limit, self._rate) if self._rate else self._limit
        return self._rate

    def planned(self, uplink_bytes_per_s: float) -> None:
        """Starts from the plan's estimate of our uplink, unless a rate is already known."""
        self._planned = uplink_bytes_per_s
        if self._rate == 0.0 and uplink_bytes_per_s > 0:
            self._hold(FIRST_SHARE * uplink_bytes_per_s)

    def sample(self, sample: UplinkSeen, now: float, *, is_waiting: bool, chunk_bytes: int = 0) -> None:
        """`is_waiting`: chunks waited for the pacer since the last one."""
        self._recent.append((now, sample))
        while now - self._recent[0][0] > LOSS_SPAN_S:
            self._recent.popleft()
        if self._rate == 0.0:
            if sample.queue_s > QUEUE_MAX_S:
                self._hold(FULL_SHARE * self._delivered_per_s(now))
            return
        aim_s = max(QUEUE_MIN_S, min(QUEUE_MAX_S, QUEUE_S + chunk_bytes / self._rate))
        delivered, lost_share = self._delivered_per_s(now), self._lost_share(now)
        if is_waiting and lost_share > LOST_SHARE:
            self._lower(max(FULL_SHARE * delivered, (1 - lost_share) * self._rate))
            self._raise_max = RAISE_MAX if sample.queue_s > aim_s else RAISE_FIRST
            self._recent.clear()  # what was lost before says nothing about the new rate
            self._full = 0.0
        elif sample.queue_s > aim_s:  # what gets through is then all that the uplink carries
            self._full = delivered
            share = LOWER_MAX * min(1.0, sample.queue_s / aim_s - 1)
            if sample.queue_s > QUEUE_MAX_S and is_waiting and delivered:
                self._lower(FULL_SHARE * delivered)
                self._raise_max = RAISE_MAX
            else:
                self._lower(max(EMPTYING_SHARE * delivered, (1 - share) * self._rate))
        elif is_waiting and FULL_SHARE * self._full > self._rate:  # it has emptied
            self._hold(FULL_SHARE * self._full)
            self._full = 0.0
        elif is_waiting:
            self._hold((1 + self._raise * (1 - sample.queue_s / aim_s)) * self._rate)
            self._raise = min(self._raise_max, RAISE_FASTER * self._raise)

    def _lower(self, rate: float) -> None:
        self._hold(min(self._rate, max(rate, LOWER_AT_ONCE * self._rate, FLOOR_SHARE * self._highest)))
        self._raise, self.capacity_bytes_per_s = RAISE_FIRST, self._rate

    def _hold(self, rate: float) -> None:
        self._rate = rate
        self._highest = max(rate, 0.999 * self._highest)

    def _delivered_per_s(self, now: float) -> float:
        """0 where the samples are too few: if the last one came late, this process stood still and had nothing under way."""
        recent = [(at, sample) for at, sample in self._recent if now - at <= DELIVERY_SPAN_S]
        if len(recent) < 3:
            return 0.0
        return sum(sample.delivered_bytes for _, sample in recent[1:]) / (now - recent[0][0])

    def _lost_share(self, now: float) -> float:
        """0 where the samples do not span enough."""
        if now - self._recent[0][0] < LOSS_SPAN_S / 2:
            return 0.0
        resent = sum(sample.resent_bytes for _, sample in self._recent)
        return resent / max(1, resent + sum(sample.delivered_bytes for _, sample in self._recent))


IDLE_S = 1.0  # connections idle for this long begin anew
START_S = 8.0  # BBR probes for the rate in its first seconds
SHORT_QUEUE_S = 0.045  # QUEUE_MAX_S: a loss beside a longer queue is our own doing
LOOKS = 50  # 5 s of sending
LOSSY_LOOKS, CLEAN_LOOKS = 6, 1  # of LOOKS: a path becomes lossy at the first count and stops being lossy at the second


class CongestionChooser:
    """Chooses from samples of the connections whether their congestion control is to be BBR, if the kernel offers it."""

    def __init__(self) -> None:
        self._begun_at = float("-inf")
        self._last_sent_at = float("-inf")
        self._was_lossy_look: deque[bool] = deque(maxlen=LOOKS)
        self.is_lossy = False

    def sent(self, retransmitted: int, queue_s: float, now: float) -> None:
        """Data was sent since the last sample; `retransmitted`: segments of it; `queue_s`: seconds of queue at the uplink."""
        if now - self._last_sent_at > IDLE_S:
            self._begun_at = now
        self._last_sent_at = now
        if now - self._begun_at < START_S and not self.is_lossy:
            return  # while BBR probes for its rate it overflows queues itself
        self._was_lossy_look.append(retransmitted > 0 and queue_s < SHORT_QUEUE_S)
        lossy_looks = sum(self._was_lossy_look)
        if lossy_looks >= LOSSY_LOOKS:
            self.is_lossy = True
        elif lossy_looks <= CLEAN_LOOKS and len(self._was_lossy_look) == LOOKS:
            self.is_lossy = False

    def is_fast(self, now: float) -> bool:
        is_starting = now - self._begun_at < START_S or now - self._last_sent_at > IDLE_S
        return is_starting or self.is_lossy


BUSY_SPAN_S = 1.0  # a shorter one counts bursts


class BusyRate:
    """Bytes per second while bytes flow; 0 before the first busy second."""

    __slots__ = ("_span_begun_at", "_span_bytes", "bytes_per_s")

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._span_begun_at = float("-inf")
        self._span_bytes = 0

    def add(self, size_bytes: int, now: float) -> None:
        span_s = now - self._span_begun_at
        if span_s > 2 * BUSY_SPAN_S:  # after a pause, start a new span
            self._span_begun_at, self._span_bytes = now, 0
            return
        self._span_bytes += size_bytes
        if span_s >= BUSY_SPAN_S:
            rate = self._span_bytes / span_s
            self.bytes_per_s = rate if self.bytes_per_s == 0.0 else 0.7 * self.bytes_per_s + 0.3 * rate
            self._span_begun_at, self._span_bytes = now, 0


class Meter:
    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.uplink = BusyRate()
        self.downlink = BusyRate()

    def sent(self, size_bytes: int, now: float) -> None:
        self.sent_bytes += size_bytes
        self.uplink.add(size_bytes, now)
