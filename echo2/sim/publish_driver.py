"""Versions out of the simulated learner, as learner/runtime/publisher.py sends them.

One at a time and in order; that a version may have left is synced before its first byte leaves; the real codec encodes.
Leaves to others: when (learner/publication), training (learner_driver).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from echo2.base.ids import Version
from echo2.broadcast.manifest import ArtifactId
from echo2.coordinator.telemetry import PublishedVersion
from echo2.learner.history import Published
from echo2.learner.publication import PublicationSchedule
from echo2.learner.shelf import Shelf
from echo2.sim.broadcast_driver import WIRE_SCALE, BroadcastDriver
from echo2.sim.checkers import Truth
from echo2.sim.disk import LearnerDisk
from echo2.sim.host import Host
from echo2.sim.scene import Scene
from echo2.sim.tiny_model import BLOCK_ELEMENTS, FINGERPRINT_KEY
from echo2.weights import DeltaHeader, HostWeights, encode_delta, encode_keyframe, join_frames


class PublishDriver:
    """`weights`: of the version published last; `cut_off`: the version before it, if a kill may have cut it off."""

    def __init__(
        self,
        scene: Scene,
        truth: Truth,
        host: Host,
        disk: LearnerDisk,
        batcher: Shelf,
        schedule: PublicationSchedule,
        broadcast: BroadcastDriver,
        weights: dict[str, Tensor],
    ) -> None:
        self._scene, self._truth, self._host, self._disk = scene, truth, host, disk
        self._batcher, self.schedule, self._broadcast = batcher, schedule, broadcast
        self.weights = weights
        self.cut_off: tuple[Version, dict[str, Tensor]] | None = None
        self.tell: Callable[[object], None] = lambda message: None
        self._newest: HostWeights | None = None
        self._publishing: list[Callable[[], None]] | None = None  # who waits for the version that is on its way out
        self._is_taken_up = self._is_something_lost = False
        broadcast.on_lost = self._replace_lost

    def _commit(self, then: Callable[[], None]) -> None:
        def synced() -> None:
            self._disk.sync()
            then()

        self._host.after(self._scene.fsync_s, synced)

    def begun(self, version: Version, then: Callable[[], None]) -> None:
        """`then` once `version` has begun to leave (the loop waits for the one before it)."""
        if self.schedule.newest == version:
            then()
        else:
            assert self._publishing is not None, "a version that cannot begin waits for another"
            self._publishing.append(then)

    @property
    def newest_version(self) -> Version:
        assert self._newest is not None and self._newest.version is not None, "a version is held from the start on"
        return self._newest.version

    def settled(self, then: Callable[[], None]) -> None:
        """`then` once no version is on its way out."""
        if self._publishing is None:
            then()
        else:
            self._publishing.append(then)

    def _left(self) -> None:
        waiting, self._publishing = self._publishing or [], None
        for then in waiting:
            then()

    def take_up(self) -> None:
        self._is_taken_up = True
        if self.cut_off is None:
            self._hold(self.weights, self.schedule.newest)
            if not self.schedule.keyframe_bytes or self._is_something_lost:
                self._publish_keyframe()
            return
        version, weights = self.schedule.newest, self.weights
        self._hold(self.cut_off[1], self.cut_off[0])
        self._publish(version, weights)

    def _hold(self, weights: dict[str, Tensor], version: Version) -> None:
        self.weights = weights
        self._newest = HostWeights.from_tensors(dict(weights), version, FINGERPRINT_KEY, copy=False)

    def publish_soon(self, version: Version, weights: dict[str, Tensor]) -> None:
        self._batcher.publish(version)
        self.schedule.begin(version)
        self._publish(version, weights)

    def _publish(self, version: Version, weights: dict[str, Tensor]) -> None:
        self._publishing = []
        self._disk.append(Published(version, ""))
        self._commit(lambda: self._host.after(self._scene.encode_s, lambda: self._send_delta(version, weights)))

    def _send_delta(self, version: Version, weights: dict[str, Tensor]) -> None:
        parent = self._newest
        assert parent is not None and parent.version is not None
        target = HostWeights.from_tensors(dict(weights), version, FINGERPRINT_KEY, copy=False)
        header = DeltaHeader(
            target_version=version, parent_version=parent.version, parent_fingerprint=parent.fingerprint(),
            fingerprint_key=FINGERPRINT_KEY, block_elements=BLOCK_ELEMENTS,
        )  # fmt: skip
        data = join_frames(encode_delta(parent, target, header))
        size = self._send_artifact(ArtifactId(version, parent.version), data, target.fingerprint())
        self._hold(weights, version)
        self._disk.append(Published(version, f"{target.fingerprint():016x}"))
        self.schedule.delta_published(version, size)
        if self.schedule.is_keyframe_due or not self.schedule.keyframe_bytes or self._is_something_lost:
            self._publish_keyframe()
        self._left()

    def _replace_lost(self) -> None:
        self._is_something_lost = True
        if self._is_taken_up and self._publishing is None:
            self._publish_keyframe()

    def _publish_keyframe(self) -> None:
        self._is_something_lost = False
        newest = self._newest
        assert newest is not None and newest.version is not None
        header = DeltaHeader(
            target_version=newest.version, fingerprint_key=FINGERPRINT_KEY, block_elements=BLOCK_ELEMENTS
        )
        data = join_frames(encode_keyframe(newest, header))
        size = self._send_artifact(ArtifactId(newest.version), data, newest.fingerprint())
        self.schedule.keyframe_published(newest.version, size)

    def _send_artifact(self, artifact: ArtifactId, data: bytes, fingerprint: int) -> int:
        self._truth.published(artifact.version, fingerprint)
        is_pushed = not artifact.is_keyframe
        size = self._broadcast.publish(artifact, data, f"{fingerprint:016x}", self.full_bytes, is_pushed)
        self._host.story.tell("learner", f"publishes {artifact}")
        wire_bytes = size * WIRE_SCALE
        self.tell(
            PublishedVersion(
                artifact.version, artifact.parent, wire_bytes, self.full_bytes * WIRE_SCALE, self._scene.encode_s,
                f"{fingerprint:016x}",
            )
        )  # fmt: skip
        return size

    @property
    def full_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.weights.values())
