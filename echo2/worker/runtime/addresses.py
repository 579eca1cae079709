"""At which addresses peers reach this worker's broadcast service."""

from __future__ import annotations

import ipaddress
import socket

from echo2.broadcast.identity import JoinLink
from echo2.worker.options import WorkerOptions


def advertised_addresses(options: WorkerOptions, link: JoinLink, port: int) -> list[str]:
    """As told; else where it listens, and for 'any address' the one from which it reaches the coordinator."""
    if options.advertised_addresses:
        return list(options.advertised_addresses)
    host = options.listen_host.strip("[]")
    if not _is_any(host):
        return [_joined(host, port)]
    family = socket.AF_INET6 if ":" in link.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((link.host, link.port))  # sends nothing: the system picks the route
        except OSError:
            return []
        return [_joined(probe.getsockname()[0], port)]


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
