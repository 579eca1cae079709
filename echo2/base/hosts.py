"""Host and port as one text."""

from __future__ import annotations


def joined(host: str, port: int) -> str:
    """`host:port`; IPv6 addresses in brackets, whether they came in them or not."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
