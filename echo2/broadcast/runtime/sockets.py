"""What the kernel knows of this process's TCP connections: bytes confirmed, round-trip times. Linux only; else silent.

gRPC does not show its sockets, so all descriptors of the process are looked through. Loopback is left out: it has no
uplink to protect. A descriptor may be closed by its owner at any moment; then it is skipped.
"""

from __future__ import annotations

import itertools
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_INFO_BYTES = 152
_RTT_AT, _ACKED_AT, _MIN_RTT_AT = 68, 120, 148  # of struct tcp_info, in microseconds and bytes
SOCKETS_MAX = 1024
SCAN_EVERY = 20


@dataclass(frozen=True, slots=True)
class Sent:
    """Since the last look, over all connections that sent."""

    delivered_bytes: int
    queue_s: float  # of the connection with the least


class SocketWatch:
    """Which descriptors are connections is looked up anew every SCAN_EVERY looks."""

    def __init__(self) -> None:
        self._confirmed: dict[int, int] = {}
        self._looks = 0

    def look(self) -> Sent:
        if self._looks % SCAN_EVERY == 0:
            self._confirmed = {fd: self._confirmed.get(fd, 0) for fd in _descriptors() if _tcp_info(fd) is not None}
        self._looks += 1
        delivered, queue_s = 0, float("inf")
        for fd, before in self._confirmed.items():
            found = _tcp_info(fd)
            if found is None:
                continue
            rtt_us, confirmed, least_us = found
            self._confirmed[fd] = confirmed
            if confirmed > before > 0:
                delivered += confirmed - before
                queue_s = min(queue_s, (rtt_us - least_us) / 1e6)
        return Sent(delivered, max(0.0, queue_s) if delivered else 0.0)


def _descriptors() -> list[int]:
    if not sys.platform.startswith("linux"):
        return []
    try:
        return [int(path.name) for path in itertools.islice(Path("/proc/self/fd").iterdir(), SOCKETS_MAX)]
    except OSError:
        return []


def local_end(remote_port: int) -> tuple[str, int] | None:
    """This end of a connection of this process to `remote_port` of whatever machine; None where it cannot be told."""
    for fd in _descriptors():
        try:
            view = socket.socket(fileno=fd)
        except OSError:
            continue
        try:
            if view.family in (socket.AF_INET, socket.AF_INET6) and view.getpeername()[1] == remote_port:
                host, port = view.getsockname()[:2]
                return str(host).removeprefix("::ffff:"), int(port)
        except OSError:
            continue
        finally:
            view.detach()
    return None


def is_loopback(host: str) -> bool:
    return host.startswith(("127.", "::ffff:127.")) or host == "::1"


def _tcp_info(fd: int) -> tuple[int, int, int] | None:
    """(round trip, bytes confirmed, least round trip) of an established connection to another machine."""
    try:
        view = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        if view.family not in (socket.AF_INET, socket.AF_INET6) or view.type != socket.SOCK_STREAM:
            return None
        if is_loopback(view.getpeername()[0]):
            return None
        info = view.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    finally:
        view.detach()
    if len(info) < _INFO_BYTES:
        return None
    least_us = struct.unpack_from("=I", info, _MIN_RTT_AT)[0]
    rtt_us = struct.unpack_from("=I", info, _RTT_AT)[0]
    confirmed = struct.unpack_from("=Q", info, _ACKED_AT)[0]
    return rtt_us, confirmed, least_us if 0 < least_us < 0xFFFFFFFF else rtt_us
