"""Presets: what differs from the defaults on one machine, on a local network and over the Internet."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # One machine: everything on loopback, quick heartbeats, small chunks for small models.
    "local": {
        "coordinator": {
            "heartbeat_interval": "500ms", "suspect_after": "3s", "gone_after": "6s",
            "lease_timeout": "30s", "report_interval": "1s",
        },
        "broadcast": {"chunk_bytes": "32KiB"},
    },
    # One building: links are fast, machines answer within seconds.
    "lan": {
        "coordinator": {
            "host": "::", "heartbeat_interval": "2s", "suspect_after": "8s", "gone_after": "20s",
            "lease_timeout": "60s",
        },
        "learner": {"host": "::"},
        "worker": {"host": "::"},
        "broadcast": {"chunk_bytes": "1MiB"},
    },
    # Rented machines across the Internet: long timeouts, smaller chunks so that relaying starts early.
    "wan": {
        "coordinator": {"host": "::"},
        "learner": {"host": "::"},
        "worker": {"host": "::"},
        "broadcast": {"chunk_bytes": "256KiB"},
    },
}  # fmt: skip
