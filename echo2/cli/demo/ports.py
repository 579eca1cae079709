"""Free loopback ports: the ones people know where they are free, else any."""

from __future__ import annotations

import socket
from collections.abc import Sequence


def choose_ports(preferred: Sequence[int], host: str = "127.0.0.1") -> tuple[int, ...]:
    """One free port for each preferred one, all different. All are held until the last is chosen."""
    held: list[socket.socket] = []
    try:
        return tuple(_bound(port, host, held) for port in preferred)
    finally:
        for taken in held:
            taken.close()


def _bound(port: int, host: str, held: list[socket.socket]) -> int:
    for candidate in (port, 0):
        probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.append(probe)
        try:
            probe.bind((host, candidate))
        except OSError:
            continue
        return int(probe.getsockname()[1])
    raise OSError(f"no free port on {host}")
