"""Versions out: encoded off the critical path, while the next step trains.

Guarantees: versions leave one at a time and in order; that a version may have left is on the disk before its first
byte does, so that a restart makes the same one again; deltas are taken from the last published weights, which nothing
changes in place; a merged delta that cannot be put together is left out. Waits for: the encoder's thread, never for the
network. Leaves to others: when (learner/publication), in which setting (learner/delta_setting), coding (coding;
weights), chunks, signatures and transport (broadcast/runtime).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from torch import Tensor

from echo2.base.errors import EchoError
from echo2.base.ids import Version
from echo2.base.units import format_bytes
from echo2.learner.delta_setting import SettingChoice
from echo2.learner.history import VersionPublished
from echo2.learner.publication import BaseSchedule, Merge, MergeSchedule, PublicationSchedule
from echo2.learner.runtime.broadcaster import Broadcaster
from echo2.learner.runtime.coding import LocalCoder, VersionCoder
from echo2.learner.runtime.journal import Journal
from echo2.outside import monotonic
from echo2.outside.under_way import far_text, under_way
from echo2.weights import CodecSetting, DeltaHeader, Encoding, compose

_log = logging.getLogger("echo2.learner")


@dataclass(frozen=True, slots=True)
class PublishedArtifact:
    """What left: `parent` None for a keyframe. `fingerprint` in hex, 16 digits."""

    version: Version
    parent: Version | None
    artifact_bytes: int
    full_snapshot_bytes: int
    encode_s: float
    fingerprint: str


@dataclass(slots=True)
class ByteCounts:
    """Since the run's folder was begun, of this process."""

    deltas: int = 0
    keyframes: int = 0
    merged: int = 0
    full_snapshots: int = 0  # what whole snapshots of the same versions would have been
    versions: int = 0


@dataclass(frozen=True, slots=True)
class PublisherCalls:
    """Who is told: that workers may name a version from now on, that an artifact left, that publishing failed."""

    left: Callable[[Version], None] = lambda version: None
    published: Callable[[PublishedArtifact], None] = lambda artifact: None
    failed: Callable[[BaseException], None] = lambda error: None


class VersionPublisher:
    """`newest_tensors` are the weights of the version published last; of a sharded learner, this rank's rows of them."""

    def __init__(
        self,
        broadcaster: Broadcaster,
        journal: Journal,
        schedule: PublicationSchedule,
        calls: PublisherCalls,
        key: int,
        choice: SettingChoice | None = None,
        executor: Executor | None = None,
        coder: VersionCoder | None = None,
    ) -> None:
        self.broadcaster = broadcaster
        self.journal = journal
        self.schedule = schedule
        self.calls = calls
        self.key = key
        self.choice = choice or SettingChoice()
        self.merges = MergeSchedule()
        self.of_base = BaseSchedule()
        self._executor = executor
        self._coder = coder or LocalCoder()
        self._plain: dict[tuple[Version, Version], list[bytes]] = {}  # what left coded densely, as it can be merged
        self.newest: Version | None = None
        self.newest_tensors: Mapping[str, Tensor] = {}
        self.newest_fingerprint = 0
        self.bytes = ByteCounts()
        self.last: PublishedArtifact | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_taken_up = self._is_something_lost = False

    @property
    def newest_version(self) -> Version:
        """The version published last; one on its way out does not count yet."""
        assert self.newest is not None, "hold comes first"
        return self.newest

    def hold(self, tensors: Mapping[str, Tensor], version: Version) -> str:
        """Takes `tensors` as the newest published weights without sending; returns their fingerprint in hex."""
        self.newest, self.newest_tensors = version, tensors
        self.newest_fingerprint = self._coder.fingerprint(version, tensors, self.key)
        self._coder.forget_before(version)
        return f"{self.newest_fingerprint:016x}"

    async def publish_keyframe(self) -> None:
        """Sends the newest weights whole: at the start, after a restart, and when the chain behind it is heavy."""
        self._is_something_lost = False
        header = DeltaHeader(target_version=self.newest_version, fingerprint_key=self.key)
        encoding = self._coder.keyframe(self.newest_tensors, header)
        artifact = await self._send(encoding, self.newest_version, self.newest_tensors, None)
        self.bytes.keyframes += artifact.artifact_bytes
        self.schedule.keyframe_published(artifact.version, artifact.artifact_bytes)

    async def take_up(
        self,
        tensors: Mapping[str, Tensor],
        version: Version,
        cut_off: tuple[Version, Mapping[str, Tensor]] | None,
        base: Mapping[str, Tensor] | None = None,
    ) -> None:
        """At a start: sends the newest version again where a kill cut its delta off, and for newcomers whole, and as a
        delta from version 0, whose weights are `base` and which the coder keeps until then.
        """
        self.of_base.at = Version(0) if version == 0 else None
        if cut_off is None:
            self.hold(tensors, version)
        else:
            self.hold(cut_off[1], cut_off[0])
            await self._publish(version, tensors)
        self._is_taken_up = True
        if not self.schedule.keyframe_bytes or self._is_something_lost:
            await self.publish_keyframe()
        if base is not None:
            self._begin(self._publish_of_base(base))

    async def _publish_of_base(self, base: Mapping[str, Tensor]) -> None:
        """The newest version as a delta from the base, so that newcomers who have that fetch no keyframe. Beside the
        training; the next version waits for it."""
        version, tensors = self.newest_version, self.newest_tensors
        fingerprint = f"{self.newest_fingerprint:016x}"
        self.of_base.at = version
        try:
            parent = await asyncio.to_thread(self._coder.fingerprint, Version(0), base, self.key)
            header = DeltaHeader(version, Version(0), parent, fingerprint_key=self.key, setting=CodecSetting.FAST)
            encoding = self._coder.delta(base, tensors, header, self._executor)
            size = await self.broadcaster.publish_merged(
                version, Version(0), iter(encoding), fingerprint, _bytes_of(tensors)
            )
        except EchoError as error:
            _log.warning("no delta from the base to %d: %s", version, error)
            self.of_base.at = None
            return
        finally:
            self._coder.keep(None)
            await asyncio.to_thread(self._coder.forget_before, version)
        self.bytes.merged += size
        _log.info("newcomers who have the base fetch %d bytes to version %s", size, self.of_base.at)
        self.of_base.left(size, self.schedule.keyframe_bytes)

    def replace_lost(self, what: str) -> None:
        """A keyframe takes the place of what the disk lost: whoever waits for that goes on from the newest version."""
        _log.error("%s of what was published is lost: the disk changed it; a keyframe takes its place", what)
        self._is_something_lost = True
        if self._is_taken_up and (self._task is None or self._task.done()):
            self._begin(self.publish_keyframe())

    async def publish_soon(self, version: Version, tensors: Mapping[str, Tensor]) -> float:
        """Publishes `version` beside the next step. Returns the seconds that it waited for the version before."""
        began = monotonic()
        await self.settled()
        waited_s = monotonic() - began
        self.calls.left(version)
        self.schedule.begin(version)
        self._begin(self._publish(version, tensors))
        return waited_s

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._done)

    async def settled(self) -> None:
        """Returns once no version is on its way out."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.calls.failed(error)

    async def _publish(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        self.journal.append(VersionPublished(version, ""))
        await self.journal.commit()
        header = DeltaHeader(
            target_version=version,
            parent_version=self.newest_version,
            parent_fingerprint=self.newest_fingerprint,
            fingerprint_key=self.key,
            setting=self._choose_setting(tensors),
        )
        encoding = self._coder.delta(self.newest_tensors, tensors, header, self._executor)
        artifact = await self._send(encoding, version, tensors, self.newest_version)
        if encoding.stats.encoded_bytes:
            self.choice.encoded(
                header.setting, artifact.full_snapshot_bytes, artifact.artifact_bytes, artifact.encode_s
            )
        await self._merge(tensors, header, artifact)
        self.newest, self.newest_tensors, self.newest_fingerprint = version, tensors, int(artifact.fingerprint, 16)
        await asyncio.to_thread(self._coder.forget_before, version)
        self.journal.append(VersionPublished(version, artifact.fingerprint))
        self.bytes.deltas += artifact.artifact_bytes
        self.bytes.full_snapshots += artifact.full_snapshot_bytes
        self.bytes.versions += 1
        self.schedule.delta_published(version, artifact.artifact_bytes)
        if self.schedule.is_keyframe_due or self._is_something_lost:
            await self.publish_keyframe()

    def _choose_setting(self, tensors: Mapping[str, Tensor]) -> CodecSetting:
        has_changed = self.choice.choose(_bytes_of(tensors), self.broadcaster.spread_bytes_per_s)
        if has_changed or not self.bytes.versions:
            _log.info("deltas are coded %s", self.choice.reason)
        return self.choice.setting

    async def _merge(self, tensors: Mapping[str, Tensor], header: DeltaHeader, artifact: PublishedArtifact) -> None:
        """Offers what this version's delta can be merged to with earlier ones."""
        assert artifact.parent is not None, "a delta has a parent"
        merges = self.merges.published(artifact.version, artifact.parent)
        if header.setting is CodecSetting.DENSE:  # positions that depend on the weights do not merge
            fast = replace(header, setting=CodecSetting.FAST)
            plain = self._coder.delta(self.newest_tensors, tensors, fast, self._executor)
            self._plain[artifact.parent, artifact.version] = await asyncio.to_thread(list, plain)
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

    async def _publish_merge(self, merge: Merge, artifact: PublishedArtifact) -> bool:
        halves = [self._frames(merge.parent, merge.middle), self._frames(merge.middle, merge.version)]
        if None in halves:
            _log.debug("no delta from %d to %d: a part of it is no longer kept", merge.parent, merge.version)
            return False
        frames = compose(*(half for half in halves if half is not None))
        try:
            self.bytes.merged += await self.broadcaster.publish_merged(
                merge.version, merge.parent, frames, artifact.fingerprint, artifact.full_snapshot_bytes
            )
        except EchoError as error:
            _log.warning("no delta from %d to %d: %s", merge.parent, merge.version, error)
            return False
        return True

    def _frames(self, parent: Version, version: Version) -> Iterator[bytes] | None:
        plain = self._plain.get((parent, version))
        return iter(plain) if plain is not None else self.broadcaster.frames(version, parent)

    async def _send(
        self, encoding: Encoding, version: Version, tensors: Mapping[str, Tensor], parent: Version | None
    ) -> PublishedArtifact:
        began = monotonic()
        full_bytes = _bytes_of(tensors)
        kind = "keyframe" if parent is None else f"delta from {parent}"

        def far() -> str:
            return far_text(encoding.stats.encoded_bytes, 0, monotonic() - began)

        sending = self.broadcaster.publish(version, parent, encoding, full_bytes)
        size = await under_way(
            _log, f"{kind} of version {version}, {format_bytes(full_bytes)} of weights", sending, far
        )
        # Frames that were not drawn, because the artifact lay sealed in the store, give no fingerprint.
        if encoding.stats.encoded_bytes:
            found = encoding.fingerprint
        else:
            found = await asyncio.to_thread(self._coder.fingerprint, version, tensors, self.key)
        artifact = PublishedArtifact(version, parent, size, full_bytes, monotonic() - began, f"{found:016x}")
        self.last = artifact
        self.calls.published(artifact)
        _log.info(
            "published version %d (%s): %d bytes, %.2f %% of %d, in %.3f s",
            version, kind, size, 100 * size / full_bytes, full_bytes, artifact.encode_s,
        )  # fmt: skip
        return artifact


def _bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Of all ranks' rows."""
    return sum(t.numel() * t.element_size() for t in tensors.values())
