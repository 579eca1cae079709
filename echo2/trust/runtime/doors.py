"""Tracks which callers hold the TCP connections of this process's ports, and ends connections beyond the limits.

gRPC accepts connections itself and does not expose them, so the process's descriptors are scanned: each connection to
a watched port belongs to a caller, who is a stranger until a call on it has proven who it is (`know`). Guarantees, within two
scans: a stranger stays for at most `stranger_s`; an address has at most `strangers_per_host` strangers (slow ones are ended
first) and `per_host` connections in total; a peer has at most `per_peer`; received bytes not yet taken as a message use at
most `in_flight_bytes` of memory per peer, IN_FLIGHT_OF_TRUSTED per trusted peer, and IN_FLIGHT_IN_ALL in total, beyond which
the connections that hold most are ended. Waits LOOK_S between scans, in a thread of its own. Leaves to others: how many
connections are accepted at all (port_limits), calls (gate), released connections (`release`).

Linux only; elsewhere only gRPC's own counts limit callers.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
import urllib.parse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from echo2.outside import monotonic
from echo2.trust.runtime.port_limits import PortLimits

LOOK_S = 0.2
LOOK_SHARE_MAX = 0.05
"""Share of the time that scans may take: with many connections they run less often."""
IN_FLIGHT_OF_TRUSTED = 48 << 20
IN_FLIGHT_IN_ALL = 192 << 20
OVERHEAD_SHARE, OVERHEAD_PER_MESSAGE, OVERHEAD_PER_S, OVERHEAD = 0.03, 512, 256, 256 << 10
"""Upper bounds on the received bytes that are not messages: TLS, HTTP/2, call metadata, pings and the handshake."""
PROVING_S = 5.0
"""Strangers that have taken longer than this are ended first."""
EARLY_MAX = 65_536
_RECEIVED_AT, _INFO_BYTES = 128, 136  # of struct tcp_info: tcpi_bytes_received
_log = logging.getLogger("echo2.ports")
Remote = tuple[str, int]


@dataclass(slots=True)
class Caller:
    """One connection. `peer` empty: a stranger. `in_flight_max`: bytes that its peer's unfinished messages may use."""

    port: int
    remote: Remote
    since: float
    peer: str = ""
    fd: int = -1
    received_bytes: int = 0
    taken_bytes: int = 0
    messages: int = 0
    in_flight_max: int = IN_FLIGHT_OF_TRUSTED
    is_released: bool = False

    def in_flight_bytes(self, now: float) -> int:
        """Received bytes not yet taken as a message: a lower bound of what they use in memory."""
        overhead = OVERHEAD + OVERHEAD_SHARE * self.received_bytes + OVERHEAD_PER_MESSAGE * self.messages
        overhead += OVERHEAD_PER_S * (now - self.since)
        return max(0, int(self.received_bytes - self.taken_bytes - overhead))


@dataclass(slots=True)
class _Early:
    """What is known of a connection before a scan has found it."""

    peer: str = ""
    is_trusted: bool = False
    taken_bytes: int = 0
    messages: int = 0
    is_released: bool = False
    looks: int = 0


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
    """Which strangers of an address to end, given in order of arrival: the slow ones first, then from the middle.

    The first ones stay, so that a fleet that reconnects from behind one address is admitted as fast as callers can be
    checked, instead of being ended over and over by later arrivals. The last ones stay, so that a few that prove nothing do
    not lock out their neighbours.
    """
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

    ended: int = 0
    _ports: dict[int, PortLimits] = field(default_factory=dict)
    _callers: dict[tuple[int, Remote], Caller] = field(default_factory=dict)
    _by_remote: dict[Remote, Caller] = field(default_factory=dict)
    _known_early: dict[Remote, _Early] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None

    def watch(self, port: int, limits: PortLimits) -> None:
        with self._lock:
            self._ports[port] = limits
            if self._thread is None and sys.platform.startswith("linux"):
                self._thread = threading.Thread(target=self._look_on, name="doors", daemon=True)
                self._thread.start()

    def close(self, port: int) -> None:
        """The port has stopped listening."""
        with self._lock:
            self._ports.pop(port, None)

    def know(self, told: str, peer: str, *, is_trusted: bool = False) -> None:
        """A call on the connection from `told` (gRPC's name) has proven that the caller is `peer`. `is_trusted`: not a worker."""
        remote = remote_of(told)
        with self._lock:
            caller = self._by_remote.get(remote)
            if caller is not None:
                self._name(caller, peer, is_trusted)
            elif (early := self._early(remote)) is not None:
                early.peer, early.is_trusted = peer, is_trusted

    def release(self, told: str) -> None:
        """Stops watching a connection: its owner limits it from now on, and its bytes are not held in this process."""
        remote = remote_of(told)
        with self._lock:
            caller = self._by_remote.get(remote) or self._early(remote)
            if caller is not None:
                caller.is_released = True

    def _name(self, caller: Caller, peer: str, is_trusted: bool) -> None:
        limits = self._ports.get(caller.port)
        caller.peer = peer
        caller.in_flight_max = IN_FLIGHT_OF_TRUSTED if is_trusted or limits is None else limits.in_flight_bytes

    def took(self, told: str, size_bytes: int) -> None:
        """A complete message of `size_bytes` was received on the connection from `told`."""
        remote = remote_of(told)
        with self._lock:
            caller = self._by_remote.get(remote)
            if caller is not None:
                caller.taken_bytes += size_bytes
                caller.messages += 1
            elif (early := self._early(remote)) is not None:
                early.taken_bytes += size_bytes
                early.messages += 1

    def _early(self, remote: Remote) -> _Early | None:
        """The record of a connection that came after the last scan; None when there is no room for it."""
        if remote not in self._known_early and (not self._ports or len(self._known_early) >= EARLY_MAX):
            return None
        return self._known_early.setdefault(remote, _Early())

    def look(self, now: float) -> int:
        """Scans all connections once; returns how many it ended."""
        with self._lock:
            ports = dict(self._ports)
        seen = dict(_connections(ports))
        with self._lock:
            self._enter(seen, now)
            callers = [caller for caller in self._callers.values() if not caller.is_released]
            reasons: dict[str, list[Caller]] = defaultdict(list)
            for port, limits in ports.items():
                for reason, overdue_callers in overdue(
                    [caller for caller in callers if caller.port == port], limits, now
                ).items():
                    reasons[f"port {port}: {reason}"] += overdue_callers
            if heavy := overweight(callers, now):
                reasons["unfinished messages use more memory than allowed"] += heavy
        return sum(self._end(reason, overdue_callers) for reason, overdue_callers in reasons.items())

    def _enter(self, seen: dict[tuple[int, Remote], tuple[int, int]], now: float) -> None:
        for key in [key for key in self._callers if key not in seen]:
            gone = self._callers.pop(key)
            if self._by_remote.get(gone.remote) is gone:
                del self._by_remote[gone.remote]
        for key, (fd, received_bytes) in seen.items():
            caller = self._callers.get(key)
            if caller is None or received_bytes < caller.received_bytes:  # same ports, but a new connection
                caller = self._callers[key] = Caller(*key, now)
                self._by_remote[caller.remote] = caller
                early = self._known_early.pop(caller.remote, _Early())
                self._name(caller, early.peer, early.is_trusted)
                caller.taken_bytes, caller.messages = early.taken_bytes, early.messages
                caller.is_released = early.is_released
            caller.fd, caller.received_bytes = fd, received_bytes
        for remote, early in list(self._known_early.items()):
            early.looks += 1  # it may have come while this look was under way: the next one sees it
            if early.looks > 1:
                del self._known_early[remote]

    def _end(self, reason: str, callers: list[Caller]) -> int:
        ended = sum(_shut(caller) for caller in callers)
        if ended:
            self.ended += ended
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


def remote_of(told: str) -> Remote:
    """Parses gRPC's name of a caller: ipv4:10.0.0.1:4711 or ipv6:%5B2001:db8::1%5D:4711."""
    host, _, port = urllib.parse.unquote(told).partition(":")[2].rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port) if port.isdigit() else 0


def _connections(ports: Iterable[int]) -> Iterator[tuple[tuple[int, Remote], tuple[int, int]]]:
    """Yields ((port, remote end), (descriptor, received bytes)) of every connection to the ports."""
    wanted = set(ports)
    if not wanted:
        return
    for path in Path("/proc/self/fd").iterdir():
        fd = int(path.name)
        try:
            view = socket.socket(fileno=fd)
        except OSError:
            continue  # not a socket, or closed meanwhile
        try:
            if view.family not in (socket.AF_INET, socket.AF_INET6) or view.type != socket.SOCK_STREAM:
                continue
            port = view.getsockname()[1]
            if port not in wanted:
                continue
            host, remote_port = view.getpeername()[:2]
            info = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            received = struct.unpack_from("=Q", info, _RECEIVED_AT)[0] if len(info) >= _INFO_BYTES else 0
            yield (port, (host.removeprefix("::ffff:"), remote_port)), (fd, received)
        except OSError:
            continue  # a listening socket, or just closed
        finally:
            view.detach()


def _shut(caller: Caller) -> bool:
    """Shuts down a connection through a copy of its descriptor, which stays gRPC's and may have been reused meanwhile."""
    try:
        copy = socket.socket(fileno=os.dup(caller.fd))
    except OSError:
        return False
    try:
        host, port = copy.getpeername()[:2]
        if (host.removeprefix("::ffff:"), port) != caller.remote or copy.getsockname()[1] != caller.port:
            return False
        copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    finally:
        copy.close()
    return True


DOORS = Doors()
