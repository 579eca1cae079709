"""How many connections a link has where losses hold one back and BBR may not be chosen: the rule, and who carries it out.

Guarantees: a doubling that brings nothing is undone; NODE_FURTHER connections in all, LINK_CONNECTIONS to one peer. The side that
is held back asks; the side that dialled opens. Waits for: nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from echo2.base.clock import ceiling_s
from echo2.base.errors import ResourceError, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.connection import Connection
from echo2.broadcast.events import WidthWished
from echo2.broadcast.exchange import Exchange
from echo2.broadcast.link import PeerLink
from echo2.broadcast.pace import LINK_CONNECTIONS
from echo2.broadcast.reachability import LinkWay
from echo2.broadcast.uplink import PathSent, SocketTotals
from echo2.wire import broadcast as wire

NODE_FURTHER = 28  # over all links, beside the first of each: the limit is a node's buffers and descriptors
SPAN_S = 2.0  # window of samples that is judged
SETTLE_S = 0.5  # for new connections to come up to speed
PAUSE_S = 1.0  # samples before a pause this long are discarded
HELD_BACK_SHARE = 0.2  # of samples: links wait for each other, so one held back a fifth of the time delays others
LOSSES_SPAN_S = 6.0  # a slow connection shows only one loss in a few seconds
BETTER_RATE, BETTER_HELD_BACK = 1.1, 0.6  # a doubling must achieve one of them
OPENING_S = 10.0  # dial and handshake over lossy paths
LEFT_ALONE_S, LEFT_ALONE_MAX_S = 30.0, 600.0  # doubled after each failure
CLEAN_S = 120.0  # of sending without a loss: fewer connections suffice


def connections_max(count: int, others: Iterable[tuple[int, bool]]) -> int:
    """The most connections that a link with `count` now may have, beside other links: (connections, whether it is short of them).
    Links that need only one leave their share to the others, which share equally. If fewer further connections are left than
    links that want one, those that have some keep them."""
    widths = list(others)
    wanting = 1 + sum(width > 1 or is_short for width, is_short in widths)
    spare = NODE_FURTHER - (count - 1) - sum(width - 1 for width, _ in widths)
    share = max(1, NODE_FURTHER // wanting)
    return 1 + max(0, min(LINK_CONNECTIONS - 1, share, count - 1 + max(0, spare)))


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
        # When; bytes delivered since the one before; `is_held_back`.
        self._samples: deque[tuple[float, int, bool]] = deque()
        self._losses: deque[float] = deque(maxlen=64)
        self._active_at = float("-inf")
        self._clean_since = float("-inf")
        self._trial: _Trial | None = None
        self._is_open = True
        self._next_growth_at = float("-inf")
        self._failures = 0

    def look(self, sent: PathSent, is_held_back: bool, open_count: int, limit: int, now: float) -> None:
        """Takes a sample; call it several times a second while sending. `sent`: over the link since the last one; `is_held_back`:
        chunks wait for its transport; `open_count`: open connections; `limit`: allowed ones."""
        self.count = min(self.count, limit)
        if not (sent.delivered_bytes or is_held_back):
            self.is_short = self.is_short and now - self._active_at <= PAUSE_S
            return
        if now - self._active_at > PAUSE_S:
            self._samples.clear()
            self._clean_since = now
            self._restart_trial(now)
        self._active_at = now
        self._samples.append((now, sent.delivered_bytes, is_held_back))
        if sent.lost:
            self._losses.append(now)
            self._clean_since = now
        while now - self._samples[0][0] > SPAN_S:
            self._samples.popleft()
        if self._trial is not None:
            self._judge(self._trial, open_count, now)
        if self._trial is None and self._samples and now - self._samples[0][0] > 0.9 * SPAN_S:
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
            self._samples.clear()
            return
        if not self._samples or now - trial.begun_at < SETTLE_S + SPAN_S:
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
        self._next_growth_at = now + ceiling_s(self._failures, LEFT_ALONE_S, LEFT_ALONE_MAX_S)
        self._failures += 1
        self._shrink_to(trial.count_before, reason, now)

    def _shrink_to(self, count: int, reason: str, now: float) -> None:
        self.count, self.reason, self._trial, self._clean_since = count, reason, None, now
        self._samples.clear()

    def _restart_trial(self, now: float) -> None:
        if self._trial is not None:
            self._trial = replace(self._trial, begun_at=now)

    @property
    def _held_back(self) -> float:
        return sum(is_held_back for _, _, is_held_back in self._samples) / len(self._samples)

    @property
    def _rate(self) -> float:
        (begun_at, first, _), (ended_at, _, _) = self._samples[0], self._samples[-1]
        span_s = ended_at - begun_at
        delivered = sum(size_bytes for _, size_bytes, _ in self._samples) - first
        return delivered / span_s if span_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """One live link; the reason in `way` also says why it has several connections."""

    peer_id: PeerId
    way: LinkWay
    connections: int
    sent_bytes: int
    received_bytes: int


RETRY_S, RETRY_MAX_S = 2.0, 60.0  # doubled after each failure
LASTING_S = 10.0  # a connection that ends sooner counts as a failure


@dataclass(slots=True)
class _Width:
    """The wanted width of one link."""

    striping: Striping = field(default_factory=Striping)
    announced: int = 1
    running: int = 0  # further connections that we opened or are opening
    failures: int = 0
    next_try: float = float("-inf")


class Stripes:
    """The widths of all links. `open_one` dials a further connection of a link and serves it until it ends."""

    def __init__(self, exchange: Exchange, open_one: Callable[[PeerLink], Coroutine[None, None, None]]) -> None:
        self._exchange, self._session, self._links = exchange, exchange.session, exchange.links
        self._open_one = open_one
        self._widths: WeakKeyDictionary[PeerLink, _Width] = WeakKeyDictionary()

    def _limit(self, link: PeerLink) -> int:
        rest = ((peer.width, self._width(peer).striping.is_short) for peer in self._links.values() if peer is not link)
        return connections_max(max(1, link.width), rest)

    def _width(self, link: PeerLink) -> _Width:
        return self._widths.setdefault(link, _Width())

    def look(self, sent: SocketTotals, now: float) -> None:
        """Takes a sample of all links; called by uplink.UplinkWatch."""
        for peer_id, link in self._links.items():
            peer = self._session.peers.get(peer_id)
            if peer is None or not link.connection.remotes:
                continue
            paths = (sent.paths.get(remote, PathSent()) for remote in link.remotes)
            path = functools.reduce(PathSent.__add__, paths, PathSent())
            self._width(link).striping.look(path, peer.is_held_back, link.width, self._limit(link), now)

    def tend(self, now: float) -> None:
        """Opens, closes and requests connections. Call it about every half second."""
        for link in self._links.values():
            if not link.connection.remotes:
                continue
            width, peer = self._width(link), self._session.peers.get(link.peer_id)
            if not link.connection.is_outgoing:
                self._ask(link, width)
                continue
            goal = min(self._limit(link), max(width.striping.count, peer.wished_connections if peer is not None else 1))
            if goal < link.width:
                link.narrow()
            elif now >= width.next_try:
                for _ in range(goal - 1 - width.running):
                    width.running += 1  # counted here, because `tend` may be called again before the task starts
                    self._exchange.tasks.start(self._open(link, width))

    def _ask(self, link: PeerLink, width: _Width) -> None:
        if width.striping.count != width.announced:
            with contextlib.suppress(ResourceError):  # the peer does not read: keepalive will end the link
                link.send_control(wire.control_frame(WidthWished(link.peer_id, width.striping.count)))
                width.announced = width.striping.count

    async def _open(self, link: PeerLink, width: _Width) -> None:
        now = asyncio.get_running_loop().time
        begun_at = now()
        try:
            await self._open_one(link)
        except Unreachable:
            pass  # the link works without it, and it is tried again
        finally:
            width.running -= 1
            width.failures = width.failures + 1 if now() - begun_at < LASTING_S else 0
            width.next_try = now() + ceiling_s(width.failures, RETRY_S, RETRY_MAX_S)

    async def carry(self, connection: Connection, of: PeerLink | None) -> None:
        """Serves a further connection until it ends. `of`: the link for which we opened it; None: the peer opened it for the link
        that it dialled. Unreachable if that link is gone or was replaced, or its limit is reached."""
        peer = connection.peer.peer_id
        link = self._links.get(peer)
        is_for_it = link is not None and (link is of if of is not None else not link.connection.is_outgoing)
        if link is None or not is_for_it or not link.connection.remotes:
            raise Unreachable(f"peer {peer}: the link of this further connection has ended")
        if link.width >= (limit := self._limit(link)):
            raise Unreachable(
                f"peer {peer}: {link.width} connections are open, of {limit} for one of {len(self._links)} links"
            )
        await link.carry(connection)

    def _way_of(self, link: PeerLink) -> LinkWay:
        """The link's kind and reason, including how many connections it has and why."""
        way, striping = link.connection.way, self._width(link).striping
        if link.width == 1:
            return way
        why = striping.reason if striping.count > 1 else "the peer asked for them"
        return LinkWay(way.kind, f"{way.reason}; {link.width} connections: {why}")

    def statuses(self) -> tuple[LinkStatus, ...]:
        """The status of all links, for the operator."""
        return tuple(
            LinkStatus(peer, self._way_of(link), link.width, link.sent_bytes, link.received_bytes)
            for peer, link in self._links.items()
        )
