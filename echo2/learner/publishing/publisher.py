"""Publishes versions, encoded off the critical path while the next step trains.

Guarantees: versions are published one at a time and in order; the journal records on disk that a version may have left before
its first byte is sent, so that a restart makes the same version again; deltas are computed from the last published weights,
which nothing changes in place; a merged delta that cannot be composed is skipped. Waits for: the encoder's thread, never for
the network.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from echo2.base.errors import EchoError
from echo2.base.ids import PeerId, Version
from echo2.base.units import format_bytes
from echo2.broadcast.artifact import ArtifactId, all_of
from echo2.broadcast.nat.reach import HostOptions
from echo2.broadcast.node import BroadcastNode, NodeCalls, NodeOptions, port_beside
from echo2.broadcast.plan import fluid_bound
from echo2.learner.options import LearnerOptions
from echo2.learner.publishing.schedule import BaseSchedule, Merge, MergeSchedule, PublicationSchedule, SettingChoice
from echo2.learner.rollouts.journal import Journal, published
from echo2.learner.training.shards import VersionCoder
from echo2.outside import monotonic
from echo2.outside.guard import ProgressLines, Tasks, shown
from echo2.trust.tls import Credentials
from echo2.weights import CodecSetting, DeltaHeader, Encoding, compose
from echo2.wire.broadcast import plan_from_message
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2 as pb


class SeedNode:
    """The learner's side of the broadcast: takes an artifact's frames as they are encoded and sends them to the fleet."""

    def __init__(self, credentials: Credentials, options: LearnerOptions, calls: NodeCalls) -> None:
        self.node = BroadcastNode(
            credentials,
            NodeOptions(
                folder=options.chunk_folder, uplink_limit_bytes_per_s=options.config.learner.uplink_limit,
                shape=options.config.learner.emulated_link, seed=options.config.run.seed, host=options.host,
                port=port_beside(options.config.learner.port),
            ),
            calls,
        )  # fmt: skip
        self.listen, self.start, self.stop = self.node.listen, self.node.start, self.node.stop

    async def publish(
        self, artifact: ArtifactId, frames: Iterator[bytes], fingerprint: Callable[[], str], full_snapshot_bytes: int,
        *, is_pushed: bool,
    ) -> int:  # fmt: skip
        """Encodes the frames in a thread; returns the artifact's size in bytes once it is sealed. It is pushed to all, or fetched
        by whoever needs it. If an earlier process of this run already sealed the artifact, no frames are encoded."""
        done = await self.node.publish(artifact, frames, fingerprint, full_snapshot_bytes, is_pushed=is_pushed)
        return done.total_bytes

    def frames(self, version: Version, parent: Version) -> Iterator[bytes] | None:
        """The frames of a delta as it was published; None if it is no longer stored."""
        return self.node.library.blocks_of(ArtifactId(version, parent))

    async def serve_relay(self, listen_host: str, port: int) -> int:
        return await self.node.nat.serve(HostOptions(listen_host, port))

    def hold_pipe_place(self, relay: PeerId, relay_address: str, local: tuple[str, int]) -> None:
        """Keeps a reservation at the relay, so that workers that cannot dial this learner reach it through the relay's byte pipes.
        `local`: host and port at which this machine itself can dial the learner's server."""
        self.node.nat.hold_pipe_place(relay, relay_address)
        self.node.serves_grpc_at(local)

    def apply_plan(self, plan: broadcast_pb2.BroadcastPlan) -> None:
        self.node.set_plan(plan_from_message(plan))

    def bar(self, peer_id: PeerId, *, is_lifted: bool) -> None:
        """Stops exchanging chunks with a banned worker; `is_lifted` allows it again."""
        self.node.bans.name(peer_id, is_lifted=is_lifted)
        self.node.drop_banned()

    @property
    def spread_bytes_per_s(self) -> float:
        """Fluid bound of the rate to all workers, from the plan and this node's uplink; 0 while the uplink is unknown. The
        uplink is the emulated one, else the one that the node has measured, else the planned one, within the configured limit.
        The workers' uplinks count too: a larger pool, or one with slower uplinks, gets an artifact later."""
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


_log = logging.getLogger("echo2.learner")


@dataclass(slots=True)
class ByteCounts:
    deltas: int = 0
    keyframes: int = 0
    merged: int = 0
    full_snapshots: int = 0  # size of full snapshots of the same versions
    versions: int = 0


class PublisherPort(Protocol):
    """`on_version`: workers may sample with it from now on. `on_artifact`: it is out. `fail`: publishing failed."""

    def on_version(self, version: Version) -> None: ...
    def on_artifact(self, artifact: pb.VersionPublished) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class VersionPublisher:
    """Publishes versions one after another. `newest_tensors`: weights of the last published version; in a sharded learner, this
    rank's rows."""

    def __init__(
        self, broadcaster: SeedNode, journal: Journal, schedule: PublicationSchedule, port: PublisherPort, key: int,
        choice: SettingChoice | None = None, executor: Executor | None = None, coder: VersionCoder | None = None,
    ) -> None:  # fmt: skip
        self.broadcaster = broadcaster
        self.journal = journal
        self.schedule = schedule
        self.port = port
        self.key = key
        self.choice = choice or SettingChoice()
        self.merges = MergeSchedule()
        self.of_base = BaseSchedule()
        self._executor = executor
        self._coder = coder or VersionCoder()
        self._plain: dict[tuple[Version, Version], list[bytes]] = {}  # mergeable copies of densely coded deltas
        self.newest: Version | None = None
        self.newest_tensors: Mapping[str, Tensor] = {}
        self.newest_fingerprint = 0
        self.bytes = ByteCounts()
        self.encode_s = 0.0  # of the newest artifact
        self._tasks = Tasks(port.fail)
        self._task: asyncio.Task[None] | None = None
        self._is_taken_up = self._is_something_lost = False

    @property
    def newest_version(self) -> Version:
        """The last published version; one that is still being published does not count."""
        assert self.newest is not None, "hold comes first"
        return self.newest

    def hold(self, tensors: Mapping[str, Tensor], version: Version) -> str:
        """Sets `tensors` as the newest published weights without sending them; returns their fingerprint in hex."""
        self.newest, self.newest_tensors = version, tensors
        self.newest_fingerprint = self._coder.fingerprint(version, tensors, self.key)
        self._coder.forget_before(version)
        return f"{self.newest_fingerprint:016x}"

    async def publish_keyframe(self) -> None:
        """Publishes the newest weights as a keyframe: at the start, after a restart, and when the chain of deltas since the last
        keyframe has grown long."""
        self._is_something_lost = True
        while self._is_something_lost:  # also what is lost meanwhile
            self._is_something_lost = False
            header = DeltaHeader(target_version=self.newest_version, fingerprint_key=self.key)
            encoding = self._coder.encode(None, self.newest_tensors, header)
            artifact = await self._send(encoding, self.newest_version, self.newest_tensors, None)
            self.bytes.keyframes += artifact.artifact_bytes
            self.schedule.keyframe_published(artifact.artifact_bytes)

    async def take_up(
        self, tensors: Mapping[str, Tensor], version: Version, cut_off: tuple[Version, Mapping[str, Tensor]] | None,
        base: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Publishes the newest version at a start. `cut_off`: the previous version and its weights, if a kill may have cut off
        the delta from it; that delta is then sent again. A keyframe follows for newcomers if none was sent, and, with `base`,
        the weights of version 0, a delta from that version; the coder keeps version 0 until then."""
        if cut_off is None:
            self.hold(tensors, version)
        else:
            self.hold(cut_off[1], cut_off[0])
            await self._publish(version, tensors)
        if not self.schedule.keyframe_bytes:
            await self.publish_keyframe()
        self._is_taken_up = True  # from now on what is lost is replaced at once
        if base is not None:
            self._begin(self._publish_of_base(base))

    async def _publish_of_base(self, base: Mapping[str, Tensor]) -> None:
        """Publishes the newest version as a delta from the base, so that newcomers that have the base need no keyframe. Runs while
        training continues; the next version waits for it."""
        version, tensors = self.newest_version, self.newest_tensors
        fingerprint = f"{self.newest_fingerprint:016x}"
        # Merges are counted from here, so that one continues this delta.
        self.of_base.at, self.merges = version, MergeSchedule()
        try:
            parent = await asyncio.to_thread(self._coder.fingerprint, Version(0), base, self.key)
            header = DeltaHeader(version, Version(0), parent, fingerprint_key=self.key, setting=CodecSetting.FAST)
            encoding = self._coder.encode(base, tensors, header, self._executor)
            size = await self.broadcaster.publish(
                ArtifactId(version, Version(0)), encoding, lambda: fingerprint, _bytes_of(tensors), is_pushed=False
            )
        except EchoError as error:
            _log.warning("no delta from the base to %d: %s", version, error)
        else:
            self.bytes.merged += size
            _log.info("newcomers who have the base fetch %d bytes to version %s", size, self.of_base.at)
            self.of_base.left(size, self.schedule.keyframe_bytes)
        finally:
            self._coder.keep(None)
            await asyncio.to_thread(self._coder.forget_before, version)
        if self._is_something_lost:  # meanwhile: the next version may wait for newcomers who wait for that
            await self.publish_keyframe()

    def replace_lost(self, what: str) -> None:
        """Publishes a keyframe to replace an artifact that the disk damaged; workers waiting for it take the newest version."""
        _log.error("%s of what was published is lost: the disk changed it; a keyframe takes its place", what)
        self._is_something_lost = True
        if self._is_taken_up and (self._task is None or self._task.done()):
            self._begin(self.publish_keyframe())

    async def publish_soon(self, version: Version, tensors: Mapping[str, Tensor]) -> float:
        """Starts publishing `version` while the next step trains. Returns the seconds it waited for the previous version."""
        began = monotonic()
        await self.settled()
        waited_s = monotonic() - began
        self.port.on_version(version)
        self.schedule.begin(version)
        self._begin(self._publish(version, tensors))
        return waited_s

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        self._task = self._tasks.start(work)

    async def settled(self) -> None:
        while self._task is not None and not self._task.done():  # a lost one may be replaced as the last one ends
            await asyncio.gather(self._task, return_exceptions=True)

    async def _publish(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        self.journal.append(published(version))
        await self.journal.commit()
        has_changed = self.choice.choose(_bytes_of(tensors), self.broadcaster.spread_bytes_per_s)
        if has_changed or not self.bytes.versions:
            _log.info("deltas are coded %s", self.choice.reason)
        header = DeltaHeader(
            target_version=version, parent_version=self.newest_version, parent_fingerprint=self.newest_fingerprint,
            fingerprint_key=self.key, setting=self.choice.setting,
        )  # fmt: skip
        encoding = self._coder.encode(self.newest_tensors, tensors, header, self._executor)
        artifact = await self._send(encoding, version, tensors, self.newest_version)
        if encoding.encoded_bytes:
            self.choice.encoded(
                header.setting, artifact.full_snapshot_bytes, artifact.artifact_bytes, artifact.encode_s
            )
        await self._merge(tensors, header, artifact)
        self.newest, self.newest_tensors, self.newest_fingerprint = version, tensors, int(artifact.fingerprint, 16)
        await asyncio.to_thread(self._coder.forget_before, version)
        self.journal.append(published(version, artifact.fingerprint))
        self.bytes.deltas += artifact.artifact_bytes
        self.bytes.full_snapshots += artifact.full_snapshot_bytes
        self.bytes.versions += 1
        self.schedule.delta_published(version, artifact.artifact_bytes, artifact.full_snapshot_bytes)
        if self.schedule.is_keyframe_due or self._is_something_lost:
            await self.publish_keyframe()

    async def _merge(self, tensors: Mapping[str, Tensor], header: DeltaHeader, artifact: pb.VersionPublished) -> None:
        """Publishes the merged deltas that this version's delta completes."""
        parent, version = Version(artifact.parent), Version(artifact.version)
        merges = self.merges.published(version, parent)
        if header.setting is CodecSetting.DENSE:  # its positions depend on the weights, so it cannot be merged
            fast = replace(header, setting=CodecSetting.FAST)
            plain = self._coder.encode(self.newest_tensors, tensors, fast, self._executor)
            self._plain[parent, version] = await asyncio.to_thread(list, plain)
        for merge in merges:
            if not await self._publish_merge(merge, artifact):
                break
        if (due := self.of_base.step(merges)) is not None:
            before, self.of_base.at = self.bytes.merged, due.version
            if due.middle > 0 and not await self._publish_merge(due, artifact):
                self.of_base.at = None
            elif due.middle > 0:
                self.of_base.left(self.bytes.merged - before, self.schedule.keyframe_bytes)
        if merges:
            self._plain.clear()

    async def _publish_merge(self, merge: Merge, artifact: pb.VersionPublished) -> bool:
        halves = [self._frames(merge.parent, merge.middle), self._frames(merge.middle, merge.version)]
        if None in halves:
            _log.debug("no delta from %d to %d: a part of it is no longer kept", merge.parent, merge.version)
            return False
        frames = compose(*(half for half in halves if half is not None))
        try:
            self.bytes.merged += await self.broadcaster.publish(
                ArtifactId(merge.version, merge.parent), frames, lambda: artifact.fingerprint,
                artifact.full_snapshot_bytes, is_pushed=False,
            )  # fmt: skip
        except EchoError as error:
            _log.warning("no delta from %d to %d: %s", merge.parent, merge.version, error)
            return False
        return True

    def _frames(self, parent: Version, version: Version) -> Iterator[bytes] | None:
        plain = self._plain.get((parent, version))
        return iter(plain) if plain is not None else self.broadcaster.frames(version, parent)

    async def _send(
        self, encoding: Encoding, version: Version, tensors: Mapping[str, Tensor], parent: Version | None
    ) -> pb.VersionPublished:
        began = monotonic()
        full_bytes = _bytes_of(tensors)
        kind = "keyframe" if parent is None else f"delta from {parent}"

        sending = self.broadcaster.publish(
            ArtifactId(version, parent), encoding, lambda: f"{encoding.fingerprint:016x}", full_bytes,
            is_pushed=parent is not None,
        )  # fmt: skip
        what = f"{kind} of version {version}, {format_bytes(full_bytes)} of weights"
        size = await shown(ProgressLines(_log), what, sending, lambda: (encoding.encoded_bytes, 0))
        # If the artifact was already sealed in the store, no frames were encoded and the encoding has no fingerprint.
        if encoding.encoded_bytes:
            digest = encoding.fingerprint
        else:
            digest = await asyncio.to_thread(self._coder.fingerprint, version, tensors, self.key)
        self.encode_s = monotonic() - began
        artifact = pb.VersionPublished(
            version=version, parent=parent or 0, has_parent=parent is not None, artifact_bytes=size,
            full_snapshot_bytes=full_bytes, encode_s=self.encode_s, fingerprint=f"{digest:016x}",
        )  # fmt: skip
        self.port.on_artifact(artifact)
        _log.info(
            "published version %d (%s): %d bytes, %.2f %% of %d, in %.3f s",
            version, kind, size, 100 * size / full_bytes, full_bytes, artifact.encode_s,
        )  # fmt: skip
        return artifact


def _bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
