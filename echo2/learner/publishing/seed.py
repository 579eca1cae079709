"""The learner's node in the broadcast: the seed, from which every version starts.

Guarantees: deltas are pushed to the fleet according to the plan; keyframes and merged deltas go to the workers that ask. Leaves to
others: chunks, signatures, trees, repair (broadcast/node).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from echo2.base.ids import PeerId, Version
from echo2.broadcast.artifact import ArtifactId, all_of
from echo2.broadcast.nat.reach import HostOptions
from echo2.broadcast.node import BroadcastNode, NodeCalls, NodeOptions, port_beside
from echo2.broadcast.plan import fluid_bound
from echo2.learner.options import LearnerOptions, chunk_folder
from echo2.trust.tls import Credentials
from echo2.weights import Encoding
from echo2.wire.broadcast import plan_from_message
from echo2.wire.gen.echo2.v1 import broadcast_pb2


class SeedNode:
    """The learner's side of the broadcast: takes an artifact's frames as they are encoded and sends them to the fleet."""

    def __init__(self, credentials: Credentials, options: LearnerOptions, calls: NodeCalls) -> None:
        self.node = BroadcastNode(
            credentials,
            NodeOptions(
                folder=chunk_folder(options),
                uplink_limit_bytes_per_s=options.config.learner.uplink_limit,
                shape=options.config.learner.emulated_link,
                seed=options.config.run.seed,
                host=options.host,
                port=port_beside(options.config.learner.port),
            ),
            calls,
        )

    async def publish(
        self, version: Version, parent: Version | None, encoding: Encoding, full_snapshot_bytes: int
    ) -> int:
        """Encodes the frames in a thread; returns the artifact's size in bytes once it is sealed. A delta is pushed to all, a
        keyframe is fetched. If an earlier process of this run already sealed the artifact, no frames are encoded."""
        done = await self.node.publish(
            ArtifactId(version, parent), encoding, lambda: f"{encoding.fingerprint:016x}", full_snapshot_bytes,
            is_pushed=parent is not None,
        )  # fmt: skip
        return done.total_bytes

    def frames(self, version: Version, parent: Version) -> Iterator[bytes] | None:
        """The frames of a delta as it was published; None if it is no longer stored."""
        return self.node.library.blocks_of(ArtifactId(version, parent))

    async def publish_merged(
        self, version: Version, parent: Version, frames: Iterator[bytes], fingerprint: str, full_snapshot_bytes: int
    ) -> int:
        """Offers a merged delta, which workers fetch if they need it; returns its size in bytes."""
        artifact = ArtifactId(version, parent)
        done = await self.node.publish(artifact, frames, lambda: fingerprint, full_snapshot_bytes, is_pushed=False)
        return done.total_bytes

    def listen(self) -> int:
        return self.node.listen()

    async def start(self) -> None:
        await self.node.start()

    async def serve_relay(self, listen_host: str, port: int) -> int:
        """Starts a relay for workers behind NATs; returns its port."""
        return await self.node.nat.serve(HostOptions(listen_host, port))

    def hold_pipe_place(self, relay: PeerId, relay_address: str, own: tuple[str, int]) -> None:
        """Keeps a reservation at the relay, so that workers that cannot dial this learner reach it through the relay's byte pipes.
        `own`: host and port at which this machine itself can dial the learner's server."""
        self.node.nat.hold_pipe_place(relay, relay_address)
        self.node.serves_grpc_at(own)

    async def stop(self) -> None:
        await self.node.stop()

    def apply_plan(self, plan: broadcast_pb2.BroadcastPlan) -> None:
        self.node.set_plan(plan_from_message(plan))

    def bar(self, peer_id: PeerId, *, is_lifted: bool) -> None:
        """Stops exchanging chunks with a banned worker; `is_lifted` allows it again."""
        self.node.bans.name(peer_id, is_lifted=is_lifted)
        self.node.drop_banned()

    @property
    def spread_bytes_per_s(self) -> float:
        """Fluid bound of the rate to all workers, from the plan and this node's uplink; 0 while the uplink is unknown.

        The uplink is the emulated one, else the one that the node has measured, else the planned one, within the configured limit.
        The workers' uplinks count too: a larger pool, or one with slower uplinks, gets an artifact later.
        """
        plan, options = self.node.session.plan, self.node.options
        planned = plan.nodes[0].uplink_bytes_per_s if plan is not None and plan.nodes else 0.0
        known = options.shape.uplink_bytes_per_s or self.node.session.governor.capacity_bytes_per_s or planned
        limit = options.uplink_limit_bytes_per_s
        uplink = min(known, limit) if known and limit else known or limit
        if not uplink or plan is None or len(plan.nodes) < 2:
            return uplink
        seed, *workers = plan.needed_nodes
        return fluid_bound([replace(seed, uplink_bytes_per_s=uplink), *workers]).rate_bytes_per_s

    def is_needed(self) -> bool:
        """Whether a connected worker is still fetching or lacks part of the newest version."""
        entries = self.node.library.entries
        newest = max((entry.header.artifact.version for entry in entries.values()), default=None)
        wholes = {
            key: all_of(entry.seal.chunk_count)
            for key, entry in entries.items()
            if entry.header.artifact.version == newest and entry.seal is not None
        }
        return any(peer.needs(wholes) for peer in self.node.session.peers.values())

    @property
    def sent_bytes(self) -> int:
        return self.node.stats().sent_chunk_bytes
