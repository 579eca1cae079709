"""What the learner needs of the broadcast: artifacts out to the fleet. Its own node is one (seed).

Guarantees: nothing; these are the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from echo2.base.ids import PeerId, Version
from echo2.broadcast.runtime.node_options import NodeCalls
from echo2.learner.runtime.options import LearnerOptions
from echo2.trust.runtime.gate import GatedServer
from echo2.trust.runtime.tls import Credentials
from echo2.weights import Encoding
from echo2.wire.gen.echo2.v1 import broadcast_pb2


class Broadcaster(Protocol):
    """Takes an artifact's frames as they are encoded and moves them to the fleet."""

    @property
    def sent_bytes(self) -> int:
        """Chunk bytes that left this machine."""
        ...

    async def publish(
        self, version: Version, parent: Version | None, encoding: Encoding, full_snapshot_bytes: int
    ) -> int:
        """Returns the artifact's size in bytes once it is sealed; draws the frames in a thread.

        A keyframe is fetched by those who need it, a delta is pushed to all. One that is sealed already, because an
        earlier process of this run published it, may be left as it is: then no frame is drawn.
        """
        ...

    def frames(self, version: Version, parent: Version) -> Iterator[bytes] | None:
        """A delta that left before, as it was published; None where it is no longer kept."""
        ...

    async def publish_merged(
        self, version: Version, parent: Version, frames: Iterator[bytes], fingerprint: str, full_snapshot_bytes: int
    ) -> int:
        """Offers a delta of several versions to those who ask; draws the frames in a thread. Returns its size."""
        ...

    @property
    def spread_bytes_per_s(self) -> float:
        """How fast one artifact gets to all workers; 0 while it is not known."""
        ...


class FleetBroadcaster(Broadcaster, Protocol):
    """What the daemon needs beside publishing."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def serve_relay(self, listen_host: str, port: int) -> int:
        """Begins to serve as a relay for workers behind NATs; returns the port."""
        ...

    def hold_pipe_place(self, relay: PeerId, relay_address: str, own: tuple[str, int]) -> None:
        """At the relay at `relay_address`, so that workers reach this learner through its byte pipes where they cannot dial it.
        `own`: host and port of the learner's server, as this machine dials them."""
        ...

    def apply_plan(self, plan: broadcast_pb2.BroadcastPlan) -> None: ...

    def bar(self, peer_id: PeerId, *, is_lifted: bool) -> None:
        """No chunks are exchanged with a banned worker."""
        ...

    def is_needed(self) -> bool:
        """Whether a worker that is connected still fetches, or lacks the newest version."""
        ...


BroadcasterFactory = Callable[[GatedServer, Credentials, LearnerOptions, NodeCalls], FleetBroadcaster]
"""Makes the broadcast node and registers its service with the learner's server, before that starts."""
