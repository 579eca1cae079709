"""The learner's node in the broadcast: the seed that every version starts from.

Guarantees: deltas are pushed to the fleet by the plan, keyframes go to those who ask. Leaves to others: chunks,
signatures, trees, repair (broadcast/runtime/node).
"""

from __future__ import annotations

import grpc

from echo2.base.ids import Version
from echo2.broadcast.delta import Encoding
from echo2.broadcast.manifest import ArtifactId
from echo2.broadcast.relay_book import RelayBook, RelayLimits
from echo2.broadcast.runtime.node import BroadcastNode, NodeOptions
from echo2.broadcast.runtime.tls import Credentials
from echo2.broadcast.runtime.transport_mixed import MixedTransport, P2pSettings
from echo2.learner.runtime.options import LearnerOptions
from echo2.wire.broadcast import plan_from_message
from echo2.wire.gen.echo2.v1 import broadcast_pb2


class SeedNode:
    """A `FleetBroadcaster` over the real node."""

    def __init__(self, server: grpc.aio.Server, credentials: Credentials, options: LearnerOptions) -> None:
        self._transport = MixedTransport(credentials)
        self.node = BroadcastNode(
            credentials,
            NodeOptions(
                folder=options.folder / "chunks",
                chunk_bytes=options.chunk_bytes,
                store_bytes=options.store_bytes,
                uplink_limit_bytes_per_s=options.uplink_limit_bytes_per_s,
                shape=options.link,
                seed=options.seed,
            ),
            self._transport,
        )
        self._transport.accept = self.node.accept
        self.node.add_to_server(server)

    async def publish(
        self, version: Version, parent: Version | None, encoding: Encoding, full_snapshot_bytes: int
    ) -> int:
        done = await self.node.publish(
            ArtifactId(version, parent),
            encoding,
            lambda: f"{encoding.fingerprint:016x}",
            full_snapshot_bytes,
            is_pushed=parent is not None,
        )
        return done.total_bytes

    async def start(self) -> None:
        await self.node.start()

    async def serve_relay(self, listen_host: str, port: int) -> int:
        self._transport.settings = P2pSettings(listen_host, port, book=RelayBook(RelayLimits()))
        return await self._transport.serve()

    async def stop(self) -> None:
        await self.node.stop()

    def apply_plan(self, plan: broadcast_pb2.BroadcastPlan) -> None:
        self.node.set_plan(plan_from_message(plan))

    @property
    def sent_bytes(self) -> int:
        return self.node.stats().sent_chunk_bytes
