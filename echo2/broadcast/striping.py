"""How many TCP connections one link uses: more if losses limit one connection, fewer if more do not help. Pure.

With BBR, one connection fills a long path that loses packets. Where the kernel does not let us choose BBR, a congestion
control that takes each loss for a full queue gives one connection at most about 1.22 segments / (round trip * sqrt(loss));
k connections carry k times that. So a link is doubled if its own transport is what its chunks wait for, and segments are lost
although its queue is short. Then its rate is compared: if it did not help (the peer reads slowly, its downlink is full), the
link returns to its previous width and is left alone for a backoff that doubles.

    steady --held back by losses--> opening --opened--> trial --faster--> steady (wider)
      ^  '--CLEAN_S without loss: half as wide  '--OPENING_S--.  '--no faster--.
      '----------------- previous width, backoff -------------'----------------'

Guarantees: at most `connections_max` per link, so that all links of a node together have at most NODE_FURTHER connections beside
their first ones. Leaves to others: sampling (runtime/sockets), opening and closing (runtime/stripes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

LINK_CONNECTIONS = 8
NODE_FURTHER = 28  # over all links, beside the first of each: the limit is a node's buffers and descriptors
SPAN_S = 2.0  # window of samples that is judged
SETTLE_S = 0.5  # for new connections to come up to speed
PAUSE_S = 1.0  # samples before a pause this long are discarded
HELD_BACK_SHARE = 0.2  # of samples: links wait for each other, so one held back a fifth of the time delays others
LOSSES_SPAN_S = 6.0  # a slow connection shows only one loss in a few seconds
BETTER_RATE, BETTER_HELD_BACK = 1.1, 0.6  # a doubling must achieve one of them
OPENING_S = 10.0
LEFT_ALONE_S, LEFT_ALONE_MAX_S = 30.0, 600.0
CLEAN_S = 120.0  # of sending without a loss: fewer connections suffice


def connections_max(own: int, others: Iterable[tuple[int, bool]]) -> int:
    """The most connections that a link with `own` now may have, beside other links: (connections, whether it is short of them).

    Links that need only one leave their share to the others, which share equally. If fewer further connections
    are left than links that want one, those that have some keep them.
    """
    widths = list(others)
    wanting = 1 + sum(width > 1 or is_short for width, is_short in widths)
    spare = NODE_FURTHER - (own - 1) - sum(width - 1 for width, _ in widths)
    share = max(1, NODE_FURTHER // wanting)
    return 1 + max(0, min(LINK_CONNECTIONS - 1, share, own - 1 + max(0, spare)))


@dataclass(frozen=True, slots=True)
class LinkLook:
    """A sample of a link since the last one: bytes that the peer confirmed, segments lost while its queue
    was short, and whether chunks wait for its transport."""

    delivered_bytes: int
    lost: int
    is_held_back: bool


@dataclass(frozen=True, slots=True)
class _Seen:
    at: float
    look: LinkLook


@dataclass(frozen=True, slots=True)
class _Trial:
    """A doubling whose effect is still being measured."""

    begun_at: float
    count_before: int
    rate_before: float
    held_back_before: float


class Striping:
    """The width of one link, for what this side sends. `count`: how many connections it should have; `reason`: why.
    `is_short`: losses limit it, and it would use more connections if it were allowed to."""

    def __init__(self) -> None:
        self.count = 1
        self.is_short = False
        self.reason = ""
        self._seen: deque[_Seen] = deque()
        self._losses: deque[float] = deque(maxlen=64)
        self._active_at = float("-inf")
        self._clean_since = float("-inf")
        self._trial: _Trial | None = None
        self._is_open = True
        self._next_growth_at = float("-inf")
        self._failures = 0

    def look(self, seen: LinkLook, open_count: int, limit: int, now: float) -> None:
        """Takes a sample; call it several times a second while sending. `open_count`: open connections; `limit`: allowed ones."""
        self.count = min(self.count, limit)
        if not (seen.delivered_bytes or seen.is_held_back):
            self.is_short = self.is_short and now - self._active_at <= PAUSE_S
            return
        if now - self._active_at > PAUSE_S:
            self._seen.clear()
            self._clean_since = now
            self._restart_trial(now)
        self._active_at = now
        self._seen.append(_Seen(now, seen))
        if seen.lost:
            self._losses.append(now)
            self._clean_since = now
        while now - self._seen[0].at > SPAN_S:
            self._seen.popleft()
        if self._trial is not None:
            self._judge(self._trial, open_count, now)
        if self._trial is None and self._seen and now - self._seen[0].at > 0.9 * SPAN_S:
            self._choose(max(self.count, min(open_count, limit)), limit, now)

    def _choose(self, present: int, limit: int, now: float) -> None:
        held_back, losses = self._held_back, sum(now - at < LOSSES_SPAN_S for at in self._losses)
        wants_more = held_back >= HELD_BACK_SHARE and losses > 0 and now >= self._next_growth_at
        self.is_short = wants_more and present < LINK_CONNECTIONS
        if wants_more and present < limit:
            self._trial = _Trial(now, self.count, self._rate, held_back)
            self._is_open = False
            self.count = min(2 * present, limit)
            self.reason = (
                f"{losses} losses in {LOSSES_SPAN_S:.0f} s hold one connection back, and BBR may not be chosen here"
            )
        elif self.count > 1 and now - self._clean_since > CLEAN_S:
            self._shrink_to(self.count // 2, f"no loss for {CLEAN_S:.0f} s of sending", now)

    def _judge(self, trial: _Trial, open_count: int, now: float) -> None:
        if not self._is_open:
            if open_count >= self.count:
                self._is_open = True
                self._restart_trial(now)
            elif now - trial.begun_at > OPENING_S:
                self._fail(trial, f"more than {open_count} could not be opened", now)
            return
        if now - trial.begun_at < SETTLE_S:
            self._seen.clear()
            return
        if not self._seen or now - trial.begun_at < SETTLE_S + SPAN_S:
            return
        held_back = self._held_back
        is_better = (
            self._rate >= BETTER_RATE * trial.rate_before or held_back <= BETTER_HELD_BACK * trial.held_back_before
        )
        if is_better or held_back < HELD_BACK_SHARE:
            self._trial, self._failures = None, 0
        else:
            self._fail(trial, f"{self.count} carried no more than {trial.count_before}", now)

    def _fail(self, trial: _Trial, reason: str, now: float) -> None:
        self._next_growth_at = now + min(LEFT_ALONE_MAX_S, LEFT_ALONE_S * 2**self._failures)
        self._failures = min(self._failures + 1, 10)
        self._shrink_to(trial.count_before, reason, now)

    def _shrink_to(self, count: int, reason: str, now: float) -> None:
        self.count, self.reason, self._trial, self._clean_since = count, reason, None, now
        self._seen.clear()

    def _restart_trial(self, now: float) -> None:
        if self._trial is not None:
            trial = self._trial
            self._trial = _Trial(now, trial.count_before, trial.rate_before, trial.held_back_before)

    @property
    def _held_back(self) -> float:
        return sum(seen.look.is_held_back for seen in self._seen) / len(self._seen)

    @property
    def _rate(self) -> float:
        span_s = self._seen[-1].at - self._seen[0].at
        delivered = sum(seen.look.delivered_bytes for seen in self._seen) - self._seen[0].look.delivered_bytes
        return delivered / span_s if span_s > 0 else 0.0
