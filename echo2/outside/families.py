"""Every address of this machine, of both families: `::` where the system lets one socket take IPv4 and IPv6, else `0.0.0.0`."""

from __future__ import annotations

import functools
import socket

EVERY_ADDRESS = "::"


@functools.cache
def has_both() -> bool:
    """Whether one socket takes connections of both families here. Kernels without IPv6 are common in containers."""
    return socket.has_dualstack_ipv6()


def listened(host: str) -> str:
    """What is bound for a host that options name, without brackets."""
    bare = host.strip("[]")
    return "0.0.0.0" if bare == EVERY_ADDRESS and not has_both() else bare


def listening_socket(host: str) -> socket.socket:
    """Not bound yet, of the host's family; of both for `::`."""
    bare = listened(host)
    made = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if ":" in bare:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return made
