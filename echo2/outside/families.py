"""Listening on all addresses: `::` if the system lets one socket accept IPv4 and IPv6, else `0.0.0.0`."""

from __future__ import annotations

import functools
import socket

EVERY_ADDRESS = "::"


@functools.cache
def has_both() -> bool:
    """Whether one socket can accept both families here. Kernels without IPv6 are common in containers."""
    return socket.has_dualstack_ipv6()


def listened(host: str) -> str:
    """The address to bind for a configured host, without brackets."""
    bare = host.strip("[]")
    return "0.0.0.0" if bare == EVERY_ADDRESS and not has_both() else bare


def listening_socket(host: str) -> socket.socket:
    """An unbound TCP socket of the host's family; of both families for `::`."""
    bare = listened(host)
    made = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if ":" in bare:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return made
