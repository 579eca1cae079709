"""What strangers and members may hold of a listening port: gRPC's options, the watch over connections, the kernel's filter.

gRPC accepts connections itself and does not expose them, so the process's descriptors are scanned: each connection to a watched
port belongs to a caller, who is a stranger until a call on it has proven who it is (`know`). Guarantees: the ports of a process
together accept fewer connections than it may have descriptors, so that its database, journal and own dials always get one. Within
two scans, a stranger stays for at most `stranger_s`; an address has at most `strangers_per_host` strangers (slow ones are ended
first) and `per_host` connections in total; a peer has at most `per_peer`; received bytes not yet taken as a message use at most
`in_flight_bytes` of memory per peer, IN_FLIGHT_OF_TRUSTED per trusted peer, and IN_FLIGHT_IN_ALL in total, beyond which the
connections that hold most are ended. A host that floods a port with connections that bring nothing, or whose caller calls far
beyond its pace, is shut out for SHUT_OUT_S, up to SHUT_OUT_MAX_S while it goes on: the kernel drops its first packets (SYN)
before this process does any work for them; open connections go on.

The filter is for IPv4 only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import logging
import os
import resource
import socket
import struct
import threading
import urllib.parse
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from echo2.base.errors import ResourceError
from echo2.outside import monotonic
from echo2.outside.allocator import give_back

DESCRIPTORS_OWN = 192  # reserved, not available to ports: files, databases, pipes, connections that this process dials
CONNECTIONS_MIN = 16  # even with few descriptors, some workers and their learner can connect
DESCRIPTORS_MIN = DESCRIPTORS_OWN + 4 * CONNECTIONS_MIN  # the least that all ports together have
HEAD_BYTES_MAX = 16 << 10  # limit for a call's metadata
# Bulk streams must notice a dead peer within seconds, even while nothing is sent.
KEEPALIVE: Mapping[str, int] = {
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 8_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
}


@dataclass(frozen=True, slots=True)
class PortLimits:
    """Limits of one port. `share`: of the process's descriptors. A stranger is a connection on which no caller has proven who
    it is; it has `stranger_s` for that. A connection without a call ends after `idle_s`, as each costs about 60 kB.
    `window_bytes`: flow-control window of a stream, beyond the message being read. `in_flight_bytes`: unfinished messages of
    one peer, unless it is the learner or an operator, which are trusted."""

    message_bytes: int
    reply_bytes: int
    streams: int
    window_bytes: int
    share: float
    connections_cap: int
    strangers_per_host: int = 32
    per_peer: int = 64
    in_flight_bytes: int = 48 << 20
    handshake_s: float = 8.0
    stranger_s: float = 12.0
    idle_s: float = 60.0
    age_s: float = 0.0

    @property
    def connections(self) -> int:
        """Connections accepted at the same time; gRPC closes any more at once."""
        return connections_within(self.share, self.connections_cap)

    @property
    def per_host(self) -> int:
        """Connections of one address, so that it cannot use up everyone's."""
        return max(CONNECTIONS_MIN // 2, self.connections // 2)

    def options(self) -> dict[str, int]:
        options = {
            **KEEPALIVE,
            "grpc.max_receive_message_length": self.message_bytes,
            "grpc.max_send_message_length": self.reply_bytes,
            "grpc.max_concurrent_streams": self.streams,
            "grpc.http2.lookahead_bytes": self.window_bytes,
            "grpc.max_metadata_size": HEAD_BYTES_MAX // 2,
            "grpc.absolute_max_metadata_size": HEAD_BYTES_MAX,
            "grpc.max_allowed_incoming_connections": self.connections,
            "grpc.server_handshake_timeout_ms": int(1000 * self.handshake_s),
            "grpc.max_connection_idle_ms": int(1000 * self.idle_s),
            "grpc.so_reuseport": 0,  # without this a busy port is silently shared
            "grpc.http2.min_ping_interval_without_data_ms": 5_000,
        }
        if self.age_s:
            options["grpc.max_connection_age_ms"] = int(1000 * self.age_s)
            options["grpc.max_connection_age_grace_ms"] = 10_000
        if self.window_bytes <= WINDOW_BYTES_MIN:
            options["grpc.http2.bdp_probe"] = 0  # it would widen the window for callers that answer pings fast
        return options


WINDOW_BYTES_MIN = 64 << 10  # HTTP/2's own first window (RFC 9113)
STREAM_WINDOW_BYTES = 2 << 20  # the default of 64 KiB gives 0.8 MB/s over 80 ms until gRPC has adapted
ENROLMENT = PortLimits(
    message_bytes=64 << 10, reply_bytes=1 << 20, streams=4, window_bytes=WINDOW_BYTES_MIN, share=0.15,
    connections_cap=512, stranger_s=15.0, idle_s=30.0, age_s=180.0,
)  # fmt: skip
"""The enrolment port, whose callers have no certificate yet."""
SERVICES = PortLimits(
    message_bytes=16 << 20, reply_bytes=64 << 20, streams=64, window_bytes=WINDOW_BYTES_MIN, share=0.5,
    connections_cap=24_000, per_peer=8, in_flight_bytes=4 << 20,
)  # fmt: skip
"""The coordinator's control streams, operator calls and renewals. The learner's hello may have 16 MiB, a worker's messages
2 MiB."""
LEARNER = PortLimits(
    message_bytes=8 << 20, reply_bytes=256 << 20, streams=16, window_bytes=STREAM_WINDOW_BYTES, share=0.5,
    connections_cap=24_000, idle_s=30.0,
)  # fmt: skip
"""The learner's port: reports of rollouts."""
BULK = PortLimits(
    message_bytes=8 << 20, reply_bytes=8 << 20, streams=1, window_bytes=STREAM_WINDOW_BYTES, share=0.2, connections_cap=1_024
)  # fmt: skip
"""A node's port of the broadcast, for chunks over plain sockets."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of an HTTP port. `share`: part of the process's descriptors. `head_s`: deadline for a request's headers. One address
    may have `handshakes_per_host` TLS handshakes under way and `strangers_per_host` connections that have shown no key. One more
    ends the connection that has been idle longest; with `crowd_s` it is let in and has that long for its first request, up to half
    of the port's connections. So a client that opens many connections at once is served."""

    name: str
    share: float
    connections_cap: int
    strangers_per_host: int
    handshakes_per_host: int
    backlog: int
    head_s: float = 8.0
    crowd_s: float = 0.0

    @property
    def connections(self) -> int:
        """Open at a time."""
        return connections_within(self.share, self.connections_cap)


PAGE = HttpLimits("dashboard", 0.15, 512, strangers_per_host=48, handshakes_per_host=16, backlog=128)  # the dashboard
GATEWAY = HttpLimits("gateway", 0.15, 8192, strangers_per_host=48, handshakes_per_host=512, backlog=1024, crowd_s=3.0)
"""Agents' calls: hundreds of connections from one address, most of them waiting for a completion."""
RELAY_SHARE, RELAY_CONNECTIONS_MAX = 0.15, 2048  # limits of libp2p, which accepts connections itself
PIPES = PortLimits(
    message_bytes=64 << 10, reply_bytes=64 << 10, streams=1, window_bytes=WINDOW_BYTES_MIN, share=RELAY_SHARE,
    connections_cap=RELAY_CONNECTIONS_MAX, per_peer=4, in_flight_bytes=1 << 20,
)  # fmt: skip
"""A relay's byte-pipe port: callers until they have a pipe, and members that hold a place. A pipe counts as one connection."""


def raise_descriptor_limit() -> None:
    """Raises the soft limit of descriptors to the hard limit; many systems start at 1024. ResourceError if that is too few:
    libraries abort for want of one, and files that cannot be opened would be taken for damaged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # the system rejects the number: keep the present limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if 0 <= (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < DESCRIPTORS_MIN:
        raise ResourceError(
            f"open files: expected to be allowed {DESCRIPTORS_MIN} or more, got {limit}; raise that limit (ulimit -n, docker's "
            "--ulimit nofile, systemd's LimitNOFILE)"
        )


def connections_within(share: float, cap: int) -> int:
    """How many connections a port may have open at a time, of the descriptors that are left for incoming ones."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    left = max(4 * CONNECTIONS_MIN, limit - min(DESCRIPTORS_OWN, limit // 3))
    return max(CONNECTIONS_MIN, min(cap, int(share * left)))


LOOK_S = 0.2  # six offending connections in 2 s are seen within a tenth of that
LOOK_SHARE_MAX = 0.05  # share of the time that scans may take: with many connections they run less often
IN_FLIGHT_OF_TRUSTED = 48 << 20  # what a member may have unread: docs/security.md
IN_FLIGHT_IN_ALL = 192 << 20  # four members at their limit: docs/security.md
OVERHEAD_SHARE, OVERHEAD_PER_MESSAGE, OVERHEAD_PER_S, OVERHEAD = 0.03, 512, 256, 256 << 10
"""Upper bounds on the received bytes that are not messages: TLS, HTTP/2, call metadata, pings and the handshake."""
PROVING_S = 5.0  # strangers that have taken longer than this are ended first
EARLY_MAX = 65_536  # some MB, for every address of a /16
BROUGHT_NOTHING_S, BROUGHT_NOTHING = 2.0, 6
"""So many connections of a host that ended without a message or a proof, as far as scans saw them, are a flood."""
# docs/security.md: doubles while the host goes on; a minute of peace forgives.
SHUT_OUT_S, SHUT_OUT_MAX_S, OFFENCES_KEPT_S = 2.0, 16.0, 60.0
_RECEIVED_AT, _INFO_BYTES = 128, 136  # of struct tcp_info: tcpi_bytes_received
RETURNED_BYTES_MIN, RETURNED_FOR_S = 1 << 20, 1.0
"""A refused message of so much is worth a walk over the allocator's free memory, of milliseconds; and until gRPC has freed it."""
_log = logging.getLogger("echo2.ports")
Remote = tuple[str, int]


HANDSHAKE_S, CALL_S, MESSAGE_S, BYTE_S = 3e-3, 3e-4, 5e-5, 5e-9
"""What TLS, HTTP/2 and gRPC's threads work for a caller before Python sees a message, on one core of 2020
(`python -m tests.redteam.run`: CPU of the daemon beyond an honest run's, by attack)."""


@dataclass(slots=True)
class Caller:
    """One connection. `peer` empty: a stranger. `in_flight_max`: bytes that its peer's unfinished messages may use. Calls may
    tell of it before a scan finds it: its port is 0 until then, and `looks` counts scans that did not find it."""

    port: int
    remote: Remote
    since: float
    peer: str = ""
    fd: int = -1
    received_bytes: int = 0
    taken_bytes: int = 0
    messages: int = 0
    calls: int = 0
    charged_s: float = 0.0
    in_flight_max: int = IN_FLIGHT_OF_TRUSTED
    is_trusted: bool = False
    is_released: bool = False
    looks: int = 0

    def charge_s(self) -> float:
        """Seconds of work that its caller was not charged for yet. Received bytes that no message accounts for count as well."""
        size_bytes = max(self.received_bytes, self.taken_bytes)
        whole_s = HANDSHAKE_S + self.calls * CALL_S + self.messages * MESSAGE_S + size_bytes * BYTE_S
        due_s, self.charged_s = whole_s - self.charged_s, whole_s
        return due_s

    def in_flight_bytes(self, now: float) -> int:
        """Received bytes not yet taken as a message: a lower bound of what they use in memory."""
        overhead = OVERHEAD + OVERHEAD_SHARE * self.received_bytes + OVERHEAD_PER_MESSAGE * self.messages
        overhead += OVERHEAD_PER_S * (now - self.since)
        return max(0, int(self.received_bytes - self.taken_bytes - overhead))


class Floods:
    """Which hosts are shut out, and until when. A host that goes on is shut out twice as long; one from which a proven caller is
    here no longer than SHUT_OUT_S at a time."""

    def __init__(self) -> None:
        self._nothing: dict[str, deque[float]] = {}
        self._until: dict[str, tuple[float, float]] = {}  # and how long it was shut out

    def brought_nothing(self, host: str, now: float, *, is_shared: bool) -> None:
        """A connection from there ended, of which no message came and no caller was proven."""
        ends = self._nothing.setdefault(host, deque(maxlen=BROUGHT_NOTHING))
        ends.append(now)
        if len(ends) == BROUGHT_NOTHING and now - ends[0] <= BROUGHT_NOTHING_S:
            self.offended(host, now, is_shared=is_shared)
        while len(self._nothing) > EARLY_MAX:
            del self._nothing[next(iter(self._nothing))]

    def offended(self, host: str, now: float, *, is_shared: bool) -> None:
        until, seconds = self._until.pop(host, (0.0, 0.0))
        if now >= until:
            seconds = min(SHUT_OUT_S if is_shared else SHUT_OUT_MAX_S, max(SHUT_OUT_S, 2 * seconds))
            until = now + seconds
        self._until[host] = until, seconds
        while len(self._until) > HOSTS_MAX:
            del self._until[next(iter(self._until))]

    def hosts(self, now: float) -> frozenset[str]:
        for host in [host for host, (until, _) in self._until.items() if now - until > OFFENCES_KEPT_S]:
            del self._until[host]
        return frozenset(host for host, (until, _) in self._until.items() if now < until)


def overdue(callers: Iterable[Caller], limits: PortLimits, now: float) -> dict[str, list[Caller]]:
    """The callers of a port to end, by reason."""
    due: dict[str, list[Caller]] = defaultdict(list)
    by_host: dict[str, list[Caller]] = defaultdict(list)
    by_peer: dict[str, list[Caller]] = defaultdict(list)
    for caller in sorted(callers, key=lambda other: other.since):
        if not caller.peer and now - caller.since > limits.stranger_s:
            due[f"no call identified its caller within {limits.stranger_s:.0f} s"].append(caller)
            continue
        by_host[caller.remote[0]].append(caller)
        if caller.peer:
            by_peer[caller.peer].append(caller)
    for held in by_host.values():
        strangers = [other for other in held if not other.peer]
        excess = max(len(strangers) - limits.strangers_per_host, len(held) - limits.per_host)
        if excess > 0:
            due["an address holds more than its share"] += _too_many(strangers, excess, now)
            due["an address holds more than its share"] += [other for other in held if other.peer][limits.per_host :]
    for held in by_peer.values():
        if len(held) > limits.per_peer:
            due[f"more than {limits.per_peer} connections of a peer"] += held[: len(held) - limits.per_peer]
    return due


def _too_many(strangers: list[Caller], excess: int, now: float) -> list[Caller]:
    """Which strangers of an address to end, given in order of arrival: the slow ones first, then from the middle. The first
    ones stay, so that a fleet that reconnects from behind one address is admitted as fast as callers can be checked, instead of
    being ended over and over by later arrivals. The last ones stay, so that a few that prove nothing do not lock out their
    neighbours."""
    slow = min(excess, sum(now - stranger.since > PROVING_S for stranger in strangers))
    first = slow + (len(strangers) - excess) // 2
    return strangers[:slow] + strangers[first : first + excess - slow]


def overweight(callers: Iterable[Caller], now: float) -> list[Caller]:
    """Callers of all ports whose unfinished messages use more memory than a peer, or all peers together, may."""
    heavy: list[Caller] = []
    by_peer: dict[str, list[tuple[int, Caller]]] = defaultdict(list)
    for caller in callers:
        if size := caller.in_flight_bytes(now):
            by_peer[caller.peer or f"stranger {caller.remote[0]}"].append((size, caller))
    left: list[tuple[int, list[tuple[int, Caller]]]] = []
    for held in by_peer.values():
        total = sum(size for size, _ in held)
        if total > max(caller.in_flight_max for _, caller in held):
            heavy += [caller for _, caller in held]
        else:
            left.append((total, held))
    whole = sum(total for total, _ in left)
    for total, held in sorted(left, key=lambda entry: -entry[0]):
        if whole <= IN_FLIGHT_IN_ALL:
            break
        heavy += [caller for _, caller in held]
        whole -= total
    return heavy


@dataclass(slots=True)
class Doors:
    """Watches all ports of the process; one instance per process. Thread-safe."""

    _ports: dict[int, PortLimits] = field(default_factory=dict)
    _http_ports: set[int] = field(default_factory=set)
    _callers: dict[tuple[int, Remote], Caller] = field(default_factory=dict)  # as the last scan saw them
    _by_remote: dict[Remote, Caller] = field(default_factory=dict)  # the newest, and those that no scan has seen yet
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _floods: Floods = field(default_factory=Floods)
    _shut_out: frozenset[str] = frozenset()
    _offenders: dict[Remote, Caller] = field(default_factory=dict)
    _freed_at: float = float("-inf")

    def watch(self, port: int, limits: PortLimits) -> None:
        with self._lock:
            self._ports[port] = limits
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_on, name="ports", daemon=True)
            self._thread.start()

    def close(self, port: int) -> None:
        with self._lock:
            self._ports.pop(port, None)
            self._http_ports.discard(port)

    def know(self, name: str, peer: str, *, is_trusted: bool = False) -> None:
        """A call on the connection from `name` (gRPC's) has proven that the caller is `peer`. `is_trusted`: not a worker."""
        with self._lock:
            if (caller := self._caller(remote_of(name))) is not None:
                caller.peer, caller.is_trusted = peer, is_trusted
                caller.calls += 1
                self._limit(caller)

    def charge_s(self, name: str) -> float:
        """What was worked for the caller at `name` below its calls and was not charged yet; 0 if its connection is not watched, or
        while it has proven no name: an address may be that of many."""
        with self._lock:
            caller = self._caller(remote_of(name))
            return caller.charge_s() if caller is not None and caller.peer else 0.0

    def watch_http(self, port: int) -> None:
        """Of this port only the hosts are watched that flood it (`brought_nothing`)."""
        with self._lock:
            self._http_ports.add(port)
            self._start()

    def brought_nothing(self, host: str) -> None:
        """A connection from there ended that asked nothing."""
        with self._lock:
            self._floods.brought_nothing(host, monotonic(), is_shared=False)

    def offended(self, name: str) -> None:
        """The caller at `name` does not keep to its limits, whatever it is answered: its connection is ended, its host shut out."""
        with self._lock:
            if (caller := self._caller(remote_of(name))) is not None and len(self._offenders) < EARLY_MAX:
                self._offenders[caller.remote] = caller

    def release(self, name: str) -> None:
        """Stops watching a connection: its owner limits it from now on, and its bytes are not held in this process."""
        with self._lock:
            if (caller := self._caller(remote_of(name))) is not None:
                caller.is_released = True

    def _limit(self, caller: Caller) -> None:
        limits = self._ports.get(caller.port)
        caller.in_flight_max = IN_FLIGHT_OF_TRUSTED if caller.is_trusted or limits is None else limits.in_flight_bytes

    def took(self, name: str, size_bytes: int) -> None:
        """A complete message of `size_bytes` was received on the connection from `name`."""
        with self._lock:
            if (caller := self._caller(remote_of(name))) is not None:
                caller.taken_bytes += size_bytes
                caller.messages += 1

    def refused(self, size_bytes: int) -> None:
        """A message of `size_bytes` is not kept. gRPC received a large one in thousands of pieces, which glibc would keep once
        freed: the next scans return them."""
        if size_bytes >= RETURNED_BYTES_MIN:
            self._freed_at = monotonic()

    def _caller(self, remote: Remote) -> Caller | None:
        """Found by a scan, or heard of after the last one; None when there is no room for it."""
        known = self._by_remote.get(remote)
        if known is None and self._ports and len(self._by_remote) - len(self._callers) < EARLY_MAX:
            known = self._by_remote[remote] = Caller(0, remote, monotonic())
        return known

    def look(self, now: float) -> int:
        """Scans all connections once; returns how many it ended."""
        if now - self._freed_at < RETURNED_FOR_S:
            give_back()
        with self._lock:
            ports, http_ports = dict(self._ports), set(self._http_ports)
        connections = dict(_connections(ports))
        with self._lock:
            self._enter(connections, now)
            callers = [caller for caller in self._callers.values() if not caller.is_released]
            reasons: dict[str, list[Caller]] = defaultdict(list)
            for port, limits in ports.items():
                at_port = [caller for caller in callers if caller.port == port]
                for reason, overdue_callers in overdue(at_port, limits, now).items():
                    reasons[f"port {port}: {reason}"] += overdue_callers
            offenders, self._offenders = list(self._offenders.values()), {}  # also who hung up since, to come again
            offending = {caller.peer for caller in offenders}
            if offenders:
                reasons["calls without end"] += offenders
            proven = {caller.remote[0] for caller in callers if caller.peer and caller.peer not in offending}
            for host in {caller.remote[0] for reason in reasons for caller in reasons[reason] if "share" in reason}:
                self._floods.offended(host, now, is_shared=host in proven)
            for caller in offenders:
                self._floods.offended(caller.remote[0], now, is_shared=caller.remote[0] in proven)
            if heavy := overweight(callers, now):
                reasons["unfinished messages use more memory than allowed"] += heavy
                self._freed_at = now
            wanted = self._floods.hosts(now)
        if wanted != self._shut_out:
            self._shut_out = wanted
            for _, _, view in _sockets({*ports, *http_ports}):
                with contextlib.suppress(OSError):  # just closed
                    if view.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        shut_out(view, wanted)
        return sum(self._end(reason, overdue_callers) for reason, overdue_callers in reasons.items())

    def _enter(self, connections: dict[tuple[int, Remote], tuple[int, int]], now: float) -> None:
        gone = [key for key in self._callers if key not in connections]
        proven = {caller.remote[0] for caller in self._callers.values() if caller.peer} if gone else set()
        for key in gone:
            previous = self._callers.pop(key)
            if not (previous.peer or previous.messages or previous.is_released):
                self._floods.brought_nothing(previous.remote[0], now, is_shared=previous.remote[0] in proven)
            if self._by_remote.get(previous.remote) is previous:
                del self._by_remote[previous.remote]
        for key, (fd, received_bytes) in connections.items():
            caller = self._callers.get(key)
            if caller is None or received_bytes < caller.received_bytes:  # same ports, but a new connection
                port, remote = key
                early = self._by_remote.get(remote)
                caller = early if early is not None and not early.port else Caller(port, remote, now)
                caller.port, caller.since = port, now
                self._callers[key] = self._by_remote[remote] = caller
                self._limit(caller)
            caller.fd, caller.received_bytes = fd, received_bytes
        for remote, early in [known for known in self._by_remote.items() if not known[1].port]:
            early.looks += 1  # it may have come while this look was under way: the next one sees it
            if early.looks > 1:
                del self._by_remote[remote]

    def _end(self, reason: str, callers: list[Caller]) -> int:
        ended = sum(_shut(caller) for caller in callers)
        if ended:
            hosts = sorted({caller.remote[0] for caller in callers})
            _log.warning("%s: ended %d connections of %s", reason, ended, ", ".join(hosts[:4]))
        return ended

    def _look_on(self) -> None:
        pause = threading.Event()
        while True:
            began = monotonic()
            try:
                self.look(began)
            except OSError as error:  # no free descriptor to list the others with; the next scan may have one
                _log.warning("connections could not be scanned: %s", error)
            taken_s = monotonic() - began
            pause.wait(max(LOOK_S, taken_s / LOOK_SHARE_MAX))


@functools.lru_cache(maxsize=4096)  # asked for each message
def remote_of(name: str) -> Remote:
    """Parses gRPC's name of a caller: ipv4:10.0.0.1:4711 or ipv6:%5B2001:db8::1%5D:4711; port 0 for other forms."""
    host, _, port = urllib.parse.unquote(name).partition(":")[2].rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port) if port.isdigit() else 0


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """This process's TCP sockets: descriptor and a view of it, valid until the next is asked for."""
    for path in Path("/proc/self/fd").iterdir():
        fd = int(path.name)
        try:
            view = socket.socket(fileno=fd)
        except OSError:
            continue  # not a socket, or closed meanwhile
        try:
            if view.family in (socket.AF_INET, socket.AF_INET6) and view.type == socket.SOCK_STREAM:
                yield fd, view
        finally:
            view.detach()


def _sockets(ports: Iterable[int]) -> Iterator[tuple[int, int, socket.socket]]:
    """Those at these ports, each with its port."""
    wanted = set(ports)
    for fd, view in tcp_sockets() if wanted else ():
        with contextlib.suppress(OSError):  # just closed
            if (port := view.getsockname()[1]) in wanted:
                yield fd, port, view


def _connections(ports: Iterable[int]) -> Iterator[tuple[tuple[int, Remote], tuple[int, int]]]:
    """Yields ((port, remote end), (descriptor, received bytes)) of every connection to the ports."""
    for fd, port, view in _sockets(ports):
        with contextlib.suppress(OSError):  # a listening socket, or just closed
            host, remote_port = view.getpeername()[:2]
            info = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            received = struct.unpack_from("=Q", info, _RECEIVED_AT)[0] if len(info) >= _INFO_BYTES else 0
            yield (port, (host.removeprefix("::ffff:"), remote_port)), (fd, received)


def _shut(caller: Caller) -> bool:
    """Shuts down a connection through a copy of its descriptor, which stays gRPC's and may have been reused meanwhile."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(caller.fd)) as copy:
        host, port = copy.getpeername()[:2]
        if (host.removeprefix("::ffff:"), port) == caller.remote and copy.getsockname()[1] == caller.port:
            copy.shutdown(socket.SHUT_RDWR)
            return True
    return False


DOORS = Doors()  # one per process: the kernel's filters are


HOSTS_MAX = 200  # the filter jumps at most 255 instructions
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER
_NETWORK_HEAD = 0xFFF00000  # SKF_NET_OFF; offsets without it begin at the TCP header
# Linux/bpf_common.h: LD|B|ABS, LD|W|ABS, ALU|AND, JMP|JEQ, RET.
_BYTE, _WORD, _AND, _EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
# RFC 9293 and RFC 791: places and bits of TCP's and IPv4's headers.
_FLAGS_AT, _SYN, _SYN_OR_ACK, _VERSION_MASK, _IPV4, _SOURCE_AT = 13, 0x02, 0x12, 0xF0, 0x40, 12


def filter_of(hosts: Iterable[str]) -> bytes:
    """The program, for classic BPF: accepts all but first packets of these hosts, given as IPv4 addresses."""
    numbers = [int(ipaddress.IPv4Address(host)) for host in hosts]
    count = len(numbers)
    lines = [
        (_BYTE, 0, 0, _FLAGS_AT), (_AND, 0, 0, _SYN_OR_ACK), (_EQUAL, 0, count + 4, _SYN),
        (_BYTE, 0, 0, _NETWORK_HEAD), (_AND, 0, 0, _VERSION_MASK), (_EQUAL, 0, count + 1, _IPV4),
        (_WORD, 0, 0, _NETWORK_HEAD + _SOURCE_AT),
        *((_EQUAL, count - place, 0, number) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0),
    ]  # fmt: skip
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def shut_out(listener: socket.socket, hosts: Iterable[str]) -> None:
    """Drops first packets of exactly these hosts from now on; those of IPv6 are left out."""
    known = [host for host in hosts if ":" not in host][:HOSTS_MAX]
    with contextlib.suppress(OSError, AttributeError):  # this kernel has no filters, or the socket has just been closed
        if not known:
            listener.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
            return
        program = filter_of(known)
        held = ctypes.create_string_buffer(program)
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("HL", len(program) // 8, ctypes.addressof(held)))
