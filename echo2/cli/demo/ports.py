"""Free loopback ports: the ones people know where they are free, else any.

What is chosen here is bound a moment later, by another process. So never one of those that the system gives to outgoing
connections: between the two moments one of them could have got it.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

CHOSEN_PORTS = range(10_000, 32_768)  # Linux gives outgoing connections 32768 and above
TRIES = 100


def choose_ports(preferred: Sequence[int], host: str = "127.0.0.1") -> tuple[int, ...]:
    """One free port for each preferred one, all different; 0 prefers none."""
    chosen: dict[int, None] = {}
    for port in preferred:
        candidates = [port] * bool(port) + random.SystemRandom().sample(CHOSEN_PORTS, TRIES)
        free = next((at for at in candidates if at not in chosen and _is_free(at, host)), None)
        if free is None:
            raise OSError(f"no free port on {host}")
        chosen[free] = None
    return tuple(chosen)


def _is_free(port: int, host: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
