"""Finds free loopback ports: the well-known ones if they are free, else any.

Another process binds the chosen port a moment later. So a substitute never comes from the ephemeral range, from which an outgoing
connection could take it meanwhile.
"""

import random
import socket
from collections.abc import Sequence

CHOSEN_PORTS = range(10_000, 32_768)  # Linux gives outgoing connections 32768 and above
TRIES = 100


def choose_ports(preferred: Sequence[int], host: str = "127.0.0.1") -> tuple[int, ...]:
    """Returns a free port for each preferred one, all different; 0: no preference. Raises OSError if none is free."""
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
