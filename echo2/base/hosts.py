"""Host and port as one string."""

from __future__ import annotations

import ipaddress

from echo2.base.errors import ConfigError


def joined(host: str, port: int) -> str:
    """`host:port`; IPv6 addresses get brackets if they have none."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def mapped_address(text: str, option: str) -> tuple[str, int]:
    """Parses an option's public address and port. ConfigError unless it is an IP address with a port of 1024 or above."""
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        address = None
    is_port = port.isascii() and port.isdigit() and 1024 <= int(port[:6]) < 1 << 16
    if address is None or address.is_unspecified or not is_port:
        raise ConfigError(
            f"{option}: expected the public IP address and the mapped port, 1024 or above, as in 203.0.113.5:41873 or "
            f"[2001:db8::5]:41873, got {text!r}; peers do not dial names, because a name may resolve to another address later"
        )
    return str(address), int(port)


def is_loopback(address: str) -> bool:
    """Whether host or host:port is a loopback address: a run on one machine has no NAT to cross."""
    host = address.strip("[]")
    if host.count(":") == 1 or "]" in host:
        host = host.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
