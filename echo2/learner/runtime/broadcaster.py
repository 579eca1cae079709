"""What the learner needs from the broadcast: sending artifacts to the fleet. The real implementation is in `seed`.

Guarantees: nothing; this module only defines interfaces.
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
    """Takes an artifact's frames as they are encoded and sends them to the fleet."""

    @property
    def sent_bytes(self) -> int:
        """Chunk bytes that this machine has sent."""
        ...

    async def publish(
        self, version: Version, parent: Version | None, encoding: Encoding, full_snapshot_bytes: int
    ) -> int:
        """Encodes the frames in a thread; returns the artifact's size in bytes once it is sealed.

        Workers that need a keyframe fetch it; a delta is pushed to all. If an earlier process of this run already sealed the
        artifact, an implementation may keep that one and encode no frames.
        """
        ...

    def frames(self, version: Version, parent: Version) -> Iterator[bytes] | None:
        """The frames of a delta as it was published; None if it is no longer stored."""
        ...

    async def publish_merged(
        self, version: Version, parent: Version, frames: Iterator[bytes], fingerprint: str, full_snapshot_bytes: int
    ) -> int:
        """Offers a merged delta, which workers fetch if they need it; encodes the frames in a thread. Returns its size in bytes."""
        ...

    @property
    def spread_bytes_per_s(self) -> float:
        """Bytes per second at which an artifact reaches all workers; 0 while unknown."""
        ...


class FleetBroadcaster(Broadcaster, Protocol):
    """What the learner daemon needs besides publishing."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def serve_relay(self, listen_host: str, port: int) -> int:
        """Starts a relay for workers behind NATs; returns its port."""
        ...

    def hold_pipe_place(self, relay: PeerId, relay_address: str, own: tuple[str, int]) -> None:
        """Keeps a reservation at the relay at `relay_address`, so that workers that cannot dial this learner reach it through the
        relay's byte pipes. `own`: host and port at which this machine itself can dial the learner's server."""
        ...

    def apply_plan(self, plan: broadcast_pb2.BroadcastPlan) -> None: ...

    def bar(self, peer_id: PeerId, *, is_lifted: bool) -> None:
        """Stops exchanging chunks with a banned worker; `is_lifted` allows it again."""
        ...

    def is_needed(self) -> bool:
        """Whether a connected worker is still fetching or lacks the newest version."""
        ...


BroadcasterFactory = Callable[[GatedServer, Credentials, LearnerOptions, NodeCalls], FleetBroadcaster]
"""Makes the broadcast node and registers its service with the learner's server, before the server starts."""
