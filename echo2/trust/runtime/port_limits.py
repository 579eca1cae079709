"""What strangers and members may hold of a listening port, and the gRPC options that say so.

Guarantees: of options with the same name the specific one holds (gRPC takes the first it finds, so each name is given
once); the ports of a process together accept fewer connections than it may have descriptors, so that its database, its
journal and its own dials always find one. Leaves to others: what is held by each caller (doors), what messages cost to
parse (gate).
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass

DESCRIPTORS_OWN = 192
"""Kept from all ports: files, databases, pipes, connections that this process dials."""
CONNECTIONS_MIN = 16
HEAD_BYTES_MAX = 16 << 10
"""Of a call's metadata."""
# Bulk streams must see a dead peer within seconds, also while nothing is sent.
KEEPALIVE: Mapping[str, int] = {
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 8_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
}


@dataclass(frozen=True, slots=True)
class PortLimits:
    """`share`: of the process's descriptors. A stranger is a connection on which no caller has proven who it is; it has
    `stranger_s` for that. A connection without a call ends after `idle_s`: each keeps some 60 kB. `window_bytes`: of a
    stream, beyond the message that it is in the middle of. `in_flight_bytes`: of unfinished messages of one peer, unless it is
    the learner or an operator, whom all trust.
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
        """Accepted at a time; gRPC closes the next one at once."""
        return connections_within(self.share, self.connections_cap)

    @property
    def per_host(self) -> int:
        """Of one address: it cannot take the last places of others."""
        return max(CONNECTIONS_MIN // 2, self.connections // 2)

    def options(self) -> dict[str, int]:
        """For gRPC."""
        found = {
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
            found |= {"grpc.max_connection_age_ms": int(1000 * self.age_s), "grpc.max_connection_age_grace_ms": 10_000}
        if self.window_bytes <= WINDOW_BYTES_MIN:
            found["grpc.http2.bdp_probe"] = 0  # it would widen the window for whoever answers pings fast
        return found


WINDOW_BYTES_MIN = 64 << 10
STREAM_WINDOW_BYTES = 2 << 20  # the default of 64 KiB is 0.8 MB/s over 80 ms until gRPC has learned better
ENROLMENT = PortLimits(
    message_bytes=64 << 10, reply_bytes=1 << 20, streams=4, window_bytes=WINDOW_BYTES_MIN, share=0.15,
    connections_cap=512, stranger_s=15.0, idle_s=30.0, age_s=180.0,
)  # fmt: skip
"""Callers have no certificate yet."""
SERVICES = PortLimits(
    message_bytes=16 << 20, reply_bytes=64 << 20, streams=64, window_bytes=WINDOW_BYTES_MIN, share=0.5,
    connections_cap=24_000, per_peer=8, in_flight_bytes=4 << 20,
)  # fmt: skip
"""The coordinator's control streams, the operator's calls and renewals. The learner's hello may be of 16 MiB, a worker's messages
of 2."""
LEARNER = PortLimits(
    message_bytes=8 << 20, reply_bytes=256 << 20, streams=16, window_bytes=STREAM_WINDOW_BYTES, share=0.5,
    connections_cap=24_000, idle_s=30.0,
)  # fmt: skip
"""Reports of rollouts, and the learner's part of the broadcast."""
PEERS = PortLimits(
    message_bytes=8 << 20, reply_bytes=8 << 20, streams=8, window_bytes=STREAM_WINDOW_BYTES, share=0.5,
    connections_cap=4_096, idle_s=30.0,
)  # fmt: skip
"""A worker's part of the broadcast."""
BULK = PortLimits(
    message_bytes=8 << 20,
    reply_bytes=8 << 20,
    streams=1,
    window_bytes=STREAM_WINDOW_BYTES,
    share=0.2,
    connections_cap=1_024,
)
"""Chunks over plain sockets, beside the streams of the two above."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Of a port that speaks HTTP. `share`: of the process's descriptors. `head_s`: for the whole head of a request. Of one address
    `handshakes_per_host` are in their TLS handshake, and `strangers_per_host` connections that have shown no key are open:
    one more ends the longest idle one, or, with `crowd_s`, has so long for its first request, and half of the port's
    connections are the limit. Who opens many at once to ask something is not hurt by that."""

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
"""The operator's page."""
GATEWAY = HttpLimits(
    "gateway", 0.15, 8192, strangers_per_host=48, handshakes_per_host=512, backlog=1024, crowd_s=3.0
)  # fmt: skip
"""Agents' calls: hundreds of connections of one address, most of which wait for a completion."""
RELAY_SHARE, RELAY_CONNECTIONS_MAX = 0.15, 2048
"""Of libp2p, which accepts for itself."""


def merged(*tables: Mapping[str, int | str]) -> list[tuple[str, int | str]]:
    """One option of each name, of the last table that has it."""
    found: dict[str, int | str] = {}
    for table in tables:
        found |= table
    return list(found.items())


def raise_descriptor_limit() -> None:
    """Lets this process have as many descriptors as the machine's owner allows; many systems begin at 1024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # a system that allows no such number keeps the one it has
            return


def connections_within(share: float, cap: int) -> int:
    """That a port may have open at a time."""
    return max(CONNECTIONS_MIN, min(cap, int(share * descriptors_for_ports())))


def descriptors_for_ports() -> int:
    """What is left for those who dial us."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(4 * CONNECTIONS_MIN, limit - min(DESCRIPTORS_OWN, limit // 3))
