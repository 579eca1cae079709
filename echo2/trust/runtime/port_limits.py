"""What strangers and members may hold of a listening port, and the matching gRPC options.

Guarantees: if an option is given twice, the more specific table wins (gRPC takes the first value it finds, so each name is
passed once); the ports of a process together accept fewer connections than it may have descriptors, so that its database,
journal and own dials always get one. Leaves to others: what each caller holds (doors), what messages cost to
parse (gate).
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass

DESCRIPTORS_OWN = 192
"""Reserved, not available to ports: files, databases, pipes, connections that this process dials."""
CONNECTIONS_MIN = 16
HEAD_BYTES_MAX = 16 << 10
"""Limit for a call's metadata."""
# Bulk streams must notice a dead peer within seconds, even while nothing is sent.
KEEPALIVE: Mapping[str, int] = {
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 8_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
}


@dataclass(frozen=True, slots=True)
class PortLimits:
    """Limits of one port. `share`: of the process's descriptors. A stranger is a connection on which no caller has proven who it
    is; it has `stranger_s` for that. A connection without a call ends after `idle_s`, as each costs about 60 kB.
    `window_bytes`: flow-control window of a stream, beyond the message being read. `in_flight_bytes`: unfinished messages of
    one peer, unless it is the learner or an operator, which are trusted.
    """

    message_bytes: int
    reply_bytes: int
    streams: int
    window_bytes: int
    share: float
    connections_cap: int
    strangers_per_host: int = 32
    per_peer: int = 64
    in_flight_bytes: int = 48 << 20
    handshake_s: float = 8.0
    stranger_s: float = 12.0
    idle_s: float = 60.0
    age_s: float = 0.0

    @property
    def connections(self) -> int:
        """Connections accepted at the same time; gRPC closes any more at once."""
        return connections_within(self.share, self.connections_cap)

    @property
    def per_host(self) -> int:
        """Connections of one address, so that it cannot use up everyone's."""
        return max(CONNECTIONS_MIN // 2, self.connections // 2)

    def options(self) -> dict[str, int]:
        """The limits as gRPC options."""
        options = {
            **KEEPALIVE,
            "grpc.max_receive_message_length": self.message_bytes,
            "grpc.max_send_message_length": self.reply_bytes,
            "grpc.max_concurrent_streams": self.streams,
            "grpc.http2.lookahead_bytes": self.window_bytes,
            "grpc.max_metadata_size": HEAD_BYTES_MAX // 2,
            "grpc.absolute_max_metadata_size": HEAD_BYTES_MAX,
            "grpc.max_allowed_incoming_connections": self.connections,
            "grpc.server_handshake_timeout_ms": int(1000 * self.handshake_s),
            "grpc.max_connection_idle_ms": int(1000 * self.idle_s),
            "grpc.so_reuseport": 0,  # without this a busy port is silently shared
            "grpc.http2.min_ping_interval_without_data_ms": 5_000,
        }
        if self.age_s:
            options |= {
                "grpc.max_connection_age_ms": int(1000 * self.age_s),
                "grpc.max_connection_age_grace_ms": 10_000,
            }
        if self.window_bytes <= WINDOW_BYTES_MIN:
            options["grpc.http2.bdp_probe"] = 0  # it would widen the window for callers that answer pings fast
        return options


WINDOW_BYTES_MIN = 64 << 10
STREAM_WINDOW_BYTES = 2 << 20  # the default of 64 KiB gives 0.8 MB/s over 80 ms until gRPC has adapted
ENROLMENT = PortLimits(
    message_bytes=64 << 10, reply_bytes=1 << 20, streams=4, window_bytes=WINDOW_BYTES_MIN, share=0.15,
    connections_cap=512, stranger_s=15.0, idle_s=30.0, age_s=180.0,
)  # fmt: skip
"""The enrolment port, whose callers have no certificate yet."""
SERVICES = PortLimits(
    message_bytes=16 << 20, reply_bytes=64 << 20, streams=64, window_bytes=WINDOW_BYTES_MIN, share=0.5,
    connections_cap=24_000, per_peer=8, in_flight_bytes=4 << 20,
)  # fmt: skip
"""The coordinator's control streams, operator calls and renewals. The learner's hello may have 16 MiB, a worker's messages
2 MiB."""
LEARNER = PortLimits(
    message_bytes=8 << 20, reply_bytes=256 << 20, streams=16, window_bytes=STREAM_WINDOW_BYTES, share=0.5,
    connections_cap=24_000, idle_s=30.0,
)  # fmt: skip
"""The learner's port: reports of rollouts, and its part of the broadcast."""
PEERS = PortLimits(
    message_bytes=8 << 20, reply_bytes=8 << 20, streams=8, window_bytes=STREAM_WINDOW_BYTES, share=0.5,
    connections_cap=4_096, idle_s=30.0,
)  # fmt: skip
"""A worker's port: its part of the broadcast."""
BULK = PortLimits(
    message_bytes=8 << 20,
    reply_bytes=8 << 20,
    streams=1,
    window_bytes=STREAM_WINDOW_BYTES,
    share=0.2,
    connections_cap=1_024,
)
"""Bulk ports: chunks over plain sockets, beside the streams of the two ports above."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of an HTTP port. `share`: part of the process's descriptors. `head_s`: deadline for a request's headers. One address
    may have `handshakes_per_host` TLS handshakes under way and `strangers_per_host` connections that have shown no key. One more
    ends the connection that has been idle longest; with `crowd_s` it is let in and has that long for its first request, up to half
    of the port's connections. So a client that opens many connections at once is served."""

    name: str
    share: float
    connections_cap: int
    strangers_per_host: int
    handshakes_per_host: int
    backlog: int
    head_s: float = 8.0
    crowd_s: float = 0.0

    @property
    def connections(self) -> int:
        """Open at a time."""
        return connections_within(self.share, self.connections_cap)


PAGE = HttpLimits("dashboard", 0.15, 512, strangers_per_host=48, handshakes_per_host=16, backlog=128)
"""The dashboard."""
GATEWAY = HttpLimits(
    "gateway", 0.15, 8192, strangers_per_host=48, handshakes_per_host=512, backlog=1024, crowd_s=3.0
)  # fmt: skip
"""Agents' calls: hundreds of connections from one address, most of them waiting for a completion."""
RELAY_SHARE, RELAY_CONNECTIONS_MAX = 0.15, 2048
"""Limits of libp2p, which accepts connections itself."""
PIPES = PortLimits(
    message_bytes=64 << 10, reply_bytes=64 << 10, streams=1, window_bytes=WINDOW_BYTES_MIN, share=RELAY_SHARE,
    connections_cap=RELAY_CONNECTIONS_MAX, per_peer=4, in_flight_bytes=1 << 20,
)  # fmt: skip
"""A relay's byte-pipe port: callers until they have a pipe, and members that hold a place. A pipe counts as one connection."""


def merged(*tables: Mapping[str, int | str]) -> list[tuple[str, int | str]]:
    """Merges option tables; the last table that has a name wins."""
    options: dict[str, int | str] = {}
    for table in tables:
        options |= table
    return list(options.items())


def raise_descriptor_limit() -> None:
    """Raises the soft limit of descriptors to the hard limit; many systems start at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # the system rejects the number: keep the present limit
            return


def connections_within(share: float, cap: int) -> int:
    """How many connections a port may have open at a time."""
    return max(CONNECTIONS_MIN, min(cap, int(share * descriptors_for_ports())))


def descriptors_for_ports() -> int:
    """Descriptors that are left for incoming connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(4 * CONNECTIONS_MIN, limit - min(DESCRIPTORS_OWN, limit // 3))
