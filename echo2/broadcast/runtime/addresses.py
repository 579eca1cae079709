"""Which of this machine's addresses others can reach, and whether an address is local to this machine."""

from __future__ import annotations

import ipaddress
import socket


def outward_host(listen_host: str, towards: str) -> str:
    """The listening host; for a wildcard, the address from which this machine reaches `towards` (host:port). Empty: no route."""
    host = listen_host.strip("[]")
    if not _is_any(host):
        return host
    there, _, port = towards.rpartition(":")
    there = there.strip("[]")
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, int(port)))  # sends nothing: the system picks the route
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def loopback_of(listen_host: str) -> str:
    """The host at which this machine itself reaches that listener."""
    host = listen_host.strip("[]")
    return "127.0.0.1" if _is_any(host) else host


def is_loopback(address: str) -> bool:
    """Whether host or host:port is a loopback address: a run on one machine has no NAT to cross."""
    host = address.strip("[]")
    if host.count(":") == 1 or "]" in host:
        host = host.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
