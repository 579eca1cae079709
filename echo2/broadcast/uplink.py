"""Reads this process's TCP connections from the kernel: bytes acknowledged, losses, round-trip times; sets their congestion
control. Linux only; a no-op elsewhere.

gRPC does not expose its sockets, so all descriptors of the process are examined. Loopback is left out: it has no
uplink to protect. A descriptor may be closed by its owner at any moment; then it is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from echo2.base.ids import PeerId
from echo2.base.units import is_loopback
from echo2.broadcast.events import UplinkSeen
from echo2.broadcast.pace import SHORT_QUEUE_S, CongestionChooser, Meter
from echo2.outside.streams import Remote
from echo2.outside.tls_streams import as_ipv4
from echo2.trust.ports import tcp_sockets

if TYPE_CHECKING:  # the codec, and with it torch, which a coordinator's machine lacks
    from echo2.broadcast.connections import Connections
    from echo2.broadcast.exchange import Exchange

_TCP_INFO, _TCP_CONGESTION = getattr(socket, "TCP_INFO", 11), getattr(socket, "TCP_CONGESTION", 13)
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
SO_MAX_PACING_RATE = 47  # of Linux; the socket module does not name it
_NAME_BYTES = 16  # TCP_CA_NAME_MAX
_FAST = b"bbr"
_TCP_INFO_PARTS = struct.Struct("=16xI8xI36xI28xI16xQ20xI")
"""Of struct tcp_info: snd_mss in bytes, sacked in segments, rtt in us, total_retrans in segments, bytes_acked, min_rtt in us."""
SOCKETS_MAX = 16_384  # a look at each takes microseconds
SCAN_EVERY = 20  # 2 s: /proc costs more than the looks
UNSENT_S, UNSENT_BYTES_MIN = 0.015, 32 << 10  # of the uplink's rate, that the kernel may buffer unsent per connection
UPLINK_STEP = 0.1  # the options are set on every socket
PACED_SHARE = 1.1
"""Of the uplink's rate, for each connection: one alone can fill it, and rates rise before the option does."""
SEGMENT_BYTES = 1448  # of an MTU of 1,500, with timestamps


@dataclass(frozen=True, slots=True)
class PathSent:
    """Traffic to one remote end since the last sample."""

    delivered_bytes: int = 0
    lost: int = 0  # segments retransmitted by connections whose queue was short

    def __add__(self, other: PathSent) -> PathSent:
        return PathSent(self.delivered_bytes + other.delivered_bytes, self.lost + other.lost)


@dataclass(frozen=True, slots=True)
class SocketTotals:
    """Totals since the last sample, over all connections that sent."""

    delivered_bytes: int
    queue_s: float  # of the connection with the shortest queue
    retransmitted: int = 0  # segments
    paths: Mapping[Remote, PathSent] = field(default_factory=dict)


class _TcpInfo(NamedTuple):
    rtt_us: int
    least_rtt_us: int
    confirmed_bytes: int
    retransmitted: int
    remote: Remote
    raw_remote: Remote = ("", 0)  # as the kernel tells it

    @property
    def queue_s(self) -> float:
        return (self.rtt_us - self.least_rtt_us) / 1e6


_UNSEEN = _TcpInfo(0, 0, 0, 0, ("", 0))


class SocketWatch:
    """Samples all connections. Rescans the descriptors every SCAN_EVERY samples, and where new ones are expected."""

    def __init__(self) -> None:
        self._last: dict[int, _TcpInfo] = {}
        self._looks = 0
        self._is_fast = False
        self._uplink = 0.0
        self._usual: dict[int, bytes] = {}  # by descriptor: the connection's original congestion control
        self.is_fast_offered = True

    @property
    def has_connections(self) -> bool:
        return bool(self._last)

    def look(self, expects_new: bool = False) -> SocketTotals:
        """`expects_new`: a connection was made since."""
        if expects_new or self._looks % SCAN_EVERY == 0:
            sockets = itertools.islice(tcp_sockets(), SOCKETS_MAX)
            self._last = {fd: self._last.get(fd, _UNSEEN) for fd, _ in sockets if _tcp_info(fd) is not None}
            self._usual = {fd: name for fd, name in self._usual.items() if fd in self._last}
            self._apply()
        self._looks += 1
        delivered, queue_s, retransmitted, paths = 0, float("inf"), 0, dict[Remote, PathSent]()
        for fd, before in self._last.items():
            info = _tcp_info(fd, before.raw_remote)
            if info is None:
                continue
            self._last[fd] = info
            if info.confirmed_bytes > before.confirmed_bytes > 0:
                acked, again = info.confirmed_bytes - before.confirmed_bytes, info.retransmitted - before.retransmitted
                delivered += acked
                queue_s = min(queue_s, info.queue_s)
                retransmitted += max(0, again)
                path = PathSent(acked, max(0, again) if info.queue_s < SHORT_QUEUE_S else 0)
                paths[info.remote] = paths.get(info.remote, PathSent()) + path
        return SocketTotals(delivered, max(0.0, queue_s) if delivered else 0.0, retransmitted, paths)

    def least_rtt_s(self, remotes: frozenset[Remote]) -> float:
        """Of the connections to these ends, in the kernel's last minutes; 0: there is none."""
        return min((info.least_rtt_us for info in self._last.values() if info.remote in remotes), default=0) / 1e6

    def make_fast(self, is_fast: bool) -> None:
        """Sets the congestion control of all known and future connections, to BBR or back to what each had."""
        if is_fast is not self._is_fast:
            self._is_fast = is_fast
            self._apply()

    def limit(self, uplink_bytes_per_s: float) -> None:
        """Limits what the kernel buffers unsent, so that the backlog stays in the session, and how fast a connection sends, since
        a chunk in one burst overflows short queues. 0: rate unknown, changes nothing."""
        if uplink_bytes_per_s and abs(uplink_bytes_per_s - self._uplink) > UPLINK_STEP * self._uplink:
            self._uplink = uplink_bytes_per_s
            self._apply()

    def _apply(self) -> None:
        for fd in self._last:
            if self._uplink:
                unsent_bytes = max(UNSENT_BYTES_MIN, int(UNSENT_S * self._uplink))
                _set(fd, _TCP_NOTSENT_LOWAT, struct.pack("=I", unsent_bytes))
                pacing = min(0xFFFFFFFE, int(PACED_SHARE * self._uplink))
                _set(fd, SO_MAX_PACING_RATE, struct.pack("=I", pacing), socket.SOL_SOCKET)
            if self._is_fast and self.is_fast_offered and fd not in self._usual:
                self._make_fast(fd)
            elif not self._is_fast and fd in self._usual:
                _set(fd, _TCP_CONGESTION, self._usual.pop(fd))

    def _make_fast(self, fd: int) -> None:
        usual = _control_of(fd)
        if usual is None:
            return
        if _set(fd, _TCP_CONGESTION, _FAST):
            self._usual[fd] = usual
        elif _control_of(fd) is not None:  # the connection still exists, so the kernel refused BBR
            self.is_fast_offered = False


@contextlib.contextmanager
def _view(fd: int) -> Iterator[socket.socket]:
    """A descriptor as a socket, which its owner keeps. OSError if it is not a socket (any more)."""
    view = socket.socket(fileno=fd)
    try:
        yield view
    finally:
        view.detach()


def _control_of(fd: int) -> bytes | None:
    """The name of a connection's congestion control; None if it is closed."""
    try:
        with _view(fd) as view:
            return view.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0")
    except OSError:
        return None


def _set(fd: int, option: int, value: bytes, level: int = socket.IPPROTO_TCP) -> bool:
    """Sets an option of a socket; returns whether the kernel accepted it."""
    try:
        with _view(fd) as view:
            view.setsockopt(level, option, value)
    except OSError:
        return False
    return True


def local_end(remote_port: int) -> tuple[str, int] | None:
    """The local address of a connection of this process to `remote_port` on any machine; None if there is none."""
    for _, view in tcp_sockets():
        with contextlib.suppress(OSError):  # it is not connected
            if view.getpeername()[1] == remote_port:
                host, port = view.getsockname()[:2]
                return as_ipv4(host), int(port)
    return None


def _tcp_info(fd: int, known: Remote = ("", 0)) -> _TcpInfo | None:
    """The TCP_INFO of an established connection to another machine; None for any other descriptor. `known`: the remote end that
    this descriptor had before, as the kernel told it; where it still has it, no more is asked."""
    try:
        view = socket.SocketType(socket.AF_INET, socket.SOCK_STREAM, 0, fd)  # which asks the kernel least
    except OSError:
        return None
    try:
        host, port = raw = view.getpeername()[:2]
        if raw != known and is_loopback(as_ipv4(host)):
            return None
        info = view.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_PARTS.size)
    except (OSError, ValueError, AttributeError):  # reused for another kind of socket
        return None
    finally:
        view.detach()
    if len(info) < _TCP_INFO_PARTS.size:
        return None
    segment_bytes, sacked, rtt_us, retransmitted, acked_bytes, least_us = _TCP_INFO_PARTS.unpack(info)
    least_us = least_us if 0 < least_us < 0xFFFFFFFF else rtt_us
    confirmed_bytes = acked_bytes + sacked * segment_bytes
    return _TcpInfo(rtt_us, least_us, confirmed_bytes, retransmitted, (as_ipv4(host), port), raw)


log = logging.getLogger("echo2.broadcast")
UPLINK_INTERVAL_S = 0.1  # a few round trips


class UplinkWatch:
    """Samples the uplink for the session's pacing, and chooses the congestion control or, where it may not, tells the stripes."""

    def __init__(self, meter: Meter, exchange: Exchange, connections: Connections) -> None:
        self._meter, self._exchange, self._connections = meter, exchange, connections
        self._sockets = SocketWatch()
        self._chooser = CongestionChooser()
        self._links_made = -1
        self._sent_before = 0

    def rtt_s(self, peer: PeerId | None) -> float:
        """Of the link to a peer; 0: not known."""
        link = self._exchange.links.get(peer) if peer is not None else None
        return self._sockets.least_rtt_s(link.remotes) if link is not None else 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(UPLINK_INTERVAL_S)
            self._look(loop.time())

    def _look(self, now: float) -> None:
        """Takes one sample. The first one of a connection also tells the session that there is an uplink to pace."""
        session, links, sent = self._exchange.session, self._connections.links_made, self._meter.sent_bytes
        is_new = links != self._links_made  # even if nothing is being sent
        is_sending = sent != self._sent_before or session.is_waiting
        self._sent_before, self._links_made = sent, links
        if is_new or is_sending:
            look = self._sockets.look(is_new)
            if look.delivered_bytes or (is_new and self._sockets.has_connections):
                self._exchange.act(UplinkSeen(look.delivered_bytes, look.queue_s, SEGMENT_BYTES * look.retransmitted))
            if is_sending:
                self._chooser.sent(look.retransmitted, look.queue_s, now)
                if not self._sockets.is_fast_offered:
                    self._connections.stripes.look(look, now)
        self._sockets.limit(session.governor.rate_bytes_per_s)
        was_offered = self._sockets.is_fast_offered
        self._sockets.make_fast(self._chooser.is_fast(now))
        if was_offered and not self._sockets.is_fast_offered:
            log.info(
                "this kernel does not let us use BBR: sending a version takes longer to reach full speed, especially with losses"
            )
