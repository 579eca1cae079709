"""Who holds the TCP connections of this process's ports, and which of them have to go.

gRPC accepts connections by itself and shows none of them, so the process's own descriptors are looked through: each
connection to a watched port is a caller's, who is a stranger until a call on it has proven who it is (`know`). Guarantees,
within two looks: a stranger stays for `stranger_s`; an address has `strangers_per_host` strangers, of which the slow go first,
and `per_host` connections in all; a peer has `per_peer`; what has come and was not taken as a message holds `in_flight_bytes`
of memory for a peer, IN_FLIGHT_OF_TRUSTED for those whom all trust, and IN_FLIGHT_IN_ALL for all, beyond which the connections
that hold most are ended. Waits LOOK_S between looks, in a thread of its own. Leaves to others: how many are accepted at all
(port_limits), calls (gate), connections that were let go (`release`).

Linux only; elsewhere callers are limited by gRPC's own counts alone.
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
"""Of the time, that looking may take: with many connections it is done less often."""
IN_FLIGHT_OF_TRUSTED = 48 << 20
IN_FLIGHT_IN_ALL = 192 << 20
OVERHEAD_SHARE, OVERHEAD_PER_MESSAGE, OVERHEAD_PER_S, OVERHEAD = 0.03, 512, 256, 256 << 10
"""Of the bytes that a connection brought, those that TLS, HTTP/2, heads of calls, pings and the handshake take at most."""
PROVING_S = 5.0
"""A stranger that took so long is the first to go where there are too many."""
EARLY_MAX = 65_536
_RECEIVED_AT, _INFO_BYTES = 128, 136  # of struct tcp_info: tcpi_bytes_received
_log = logging.getLogger("echo2.ports")
Remote = tuple[str, int]


@dataclass(slots=True)
class Caller:
    """One connection. `peer` empty: a stranger. `in_flight_max`: bytes of unfinished messages that its peer may hold."""

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
        """What came and was not taken as a message: at least so much of it lies in memory."""
        overhead = OVERHEAD + OVERHEAD_SHARE * self.received_bytes + OVERHEAD_PER_MESSAGE * self.messages
        overhead += OVERHEAD_PER_S * (now - self.since)
        return max(0, int(self.received_bytes - self.taken_bytes - overhead))


@dataclass(slots=True)
class _Early:
    """What was told of a connection before a look has seen it."""

    peer: str = ""
    is_trusted: bool = False
    taken_bytes: int = 0
    messages: int = 0
    is_released: bool = False
    looks: int = 0


def overdue(callers: Iterable[Caller], limits: PortLimits, now: float) -> dict[str, list[Caller]]:
    """Who of a port's callers has to go, by the reason."""
    found: dict[str, list[Caller]] = defaultdict(list)
    by_host: dict[str, list[Caller]] = defaultdict(list)
    by_peer: dict[str, list[Caller]] = defaultdict(list)
    for caller in sorted(callers, key=lambda one: one.since):
        if not caller.peer and now - caller.since > limits.stranger_s:
            found[f"no caller proved who it is within {limits.stranger_s:.0f} s"].append(caller)
            continue
        by_host[caller.remote[0]].append(caller)
        if caller.peer:
            by_peer[caller.peer].append(caller)
    for held in by_host.values():
        strangers = [one for one in held if not one.peer]
        excess = max(len(strangers) - limits.strangers_per_host, len(held) - limits.per_host)
        if excess > 0:
            found["an address holds more than its share"] += _too_many(strangers, excess, now)
            found["an address holds more than its share"] += [one for one in held if one.peer][limits.per_host :]
    for held in by_peer.values():
        if len(held) > limits.per_peer:
            found[f"more than {limits.per_peer} connections of a peer"] += held[: len(held) - limits.per_peer]
    return found


def _too_many(strangers: list[Caller], excess: int, now: float) -> list[Caller]:
    """Which of an address go, of those in order of arrival: the slow ones first, then from the middle.

    The first to come stay, so that a fleet behind one address that returns all at once is let in at the pace at which
    callers can be looked at, and is not ended over and over by those behind. The last to come stay, so that a few
    that prove nothing do not shut the door on their neighbours.
    """
    slow = min(excess, sum(now - one.since > PROVING_S for one in strangers))
    first = slow + (len(strangers) - excess) // 2
    return strangers[:slow] + strangers[first : first + excess - slow]


def overweight(callers: Iterable[Caller], now: float) -> list[Caller]:
    """Of all ports: whose unfinished messages hold more memory than a peer, or all of them, may."""
    found: list[Caller] = []
    by_peer: dict[str, list[tuple[int, Caller]]] = defaultdict(list)
    for caller in callers:
        if size := caller.in_flight_bytes(now):
            by_peer[caller.peer or f"stranger {caller.remote[0]}"].append((size, caller))
    left: list[tuple[int, list[tuple[int, Caller]]]] = []
    for held in by_peer.values():
        total = sum(size for size, _ in held)
        if total > max(caller.in_flight_max for _, caller in held):
            found += [caller for _, caller in held]
        else:
            left.append((total, held))
    whole = sum(total for total, _ in left)
    for total, held in sorted(left, key=lambda one: -one[0]):
        if whole <= IN_FLIGHT_IN_ALL:
            break
        found += [caller for _, caller in held]
        whole -= total
    return found


@dataclass(slots=True)
class Doors:
    """One a process, as its descriptors are. Called from any thread."""

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
        """The port listens no more."""
        with self._lock:
            self._ports.pop(port, None)

    def know(self, told: str, peer: str, *, is_trusted: bool = False) -> None:
        """A call on the connection from `told` (as gRPC names it) has proven that `peer` is there; `is_trusted`: by all."""
        remote = remote_of(told)
        with self._lock:
            caller = self._by_remote.get(remote)
            if caller is not None:
                self._name(caller, peer, is_trusted)
            elif (early := self._early(remote)) is not None:
                early.peer, early.is_trusted = peer, is_trusted

    def release(self, told: str) -> None:
        """From now on others limit this connection, and its bytes do not lie in this process: it is not looked at any more."""
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
        """A message from there has come whole."""
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
        """Of a connection that came after the last look, and is entered at the next. None where there is no room for it."""
        if remote not in self._known_early and (not self._ports or len(self._known_early) >= EARLY_MAX):
            return None
        return self._known_early.setdefault(remote, _Early())

    def look(self, now: float) -> int:
        """One look; returns how many connections it ended."""
        with self._lock:
            ports = dict(self._ports)
        seen = dict(_connections(ports))
        with self._lock:
            self._enter(seen, now)
            callers = [caller for caller in self._callers.values() if not caller.is_released]
            reasons: dict[str, list[Caller]] = defaultdict(list)
            for port, limits in ports.items():
                for reason, those in overdue([one for one in callers if one.port == port], limits, now).items():
                    reasons[f"port {port}: {reason}"] += those
            if heavy := overweight(callers, now):
                reasons["unfinished messages hold more memory than they may"] += heavy
        return sum(self._end(reason, those) for reason, those in reasons.items())

    def _enter(self, seen: dict[tuple[int, Remote], tuple[int, int]], now: float) -> None:
        for key in [key for key in self._callers if key not in seen]:
            gone = self._callers.pop(key)
            if self._by_remote.get(gone.remote) is gone:
                del self._by_remote[gone.remote]
        for key, (fd, received_bytes) in seen.items():
            caller = self._callers.get(key)
            if caller is None or received_bytes < caller.received_bytes:  # the same ports, another connection
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
            except OSError as error:  # no descriptor is left to list the others by; at the next look there is
                _log.warning("connections could not be looked through: %s", error)
            taken_s = monotonic() - began
            pause.wait(max(LOOK_S, taken_s / LOOK_SHARE_MAX))


def remote_of(told: str) -> Remote:
    """What gRPC calls a caller: ipv4:10.0.0.1:4711 or ipv6:%5B2001:db8::1%5D:4711."""
    host, _, port = urllib.parse.unquote(told).partition(":")[2].rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port) if port.isdigit() else 0


def _connections(ports: Iterable[int]) -> Iterator[tuple[tuple[int, Remote], tuple[int, int]]]:
    """By port and other end: the descriptor, and the bytes that have come."""
    wanted = set(ports)
    if not wanted:
        return
    for path in Path("/proc/self/fd").iterdir():
        fd = int(path.name)
        try:
            view = socket.socket(fileno=fd)
        except OSError:
            continue  # no socket, or closed meanwhile
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
            continue  # it listens, or has just ended
        finally:
            view.detach()


def _shut(caller: Caller) -> bool:
    """Ends a connection, not its descriptor, which stays gRPC's. By a copy of it: the number may be another's by now."""
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
