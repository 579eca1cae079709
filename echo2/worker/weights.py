"""Takes versions from the broadcast to the engine: decode while receiving, swap, check, commit.

Guarantees: a version goes live only if its bits have the fingerprint that the learner signed and the engine's own fingerprint
agrees; until then the tokens that it samples are held, and they are discarded if it does not. One artifact at a time, each on top
of the host's version. If a later version is already here, a version is only committed to the host and skips the engine, at most
`SKIPS_MAX` times in a row. `FAILURES_MAX` failures in a row end the worker with the last reason. Decoding and hashing run in a
thread of their own. Waits for the next artifact, its chunks, leases that only the live version may sample, the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)  # fmt: skip

from echo2.base.clock import Waits
from echo2.base.errors import EchoError, EngineError, FingerprintMismatch, IntegrityError, VersionMismatch
from echo2.base.ids import Version
from echo2.base.staged import TensorUpdate
from echo2.base.units import format_bytes
from echo2.broadcast.artifact import ArtifactId
from echo2.broadcast.catch_up import ArtifactBegun, ArtifactDropped, ArtifactSealed, BlockArrived
from echo2.broadcast.node import BroadcastNode
from echo2.outside import monotonic
from echo2.outside.guard import ProgressLines, ShowsProgress
from echo2.weights import ContainerDecoder, FrameReader, HostWeights, StagedDelta
from echo2.worker.base_checkpoint import BaseCheckpointLoader
from echo2.worker.engines.engine import Engine, SwapMode
from echo2.worker.generation import Generation
from echo2.worker.rollouts import TokenGate

_T = TypeVar("_T")


class ProgressBars:
    """Progress as bars on a terminal, which disappear when done and above which log lines appear: while a bar is
    drawn, echo2's log handlers for that terminal write through rich's console."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        self._moved: list[logging.StreamHandler[TextIO]] = []

    def at(self, what: str, done_bytes: int, whole_bytes: int) -> None:
        progress = self._progress or self._begin()
        if what not in self._bars:
            self._bars[what] = progress.add_task(what, total=None)
        progress.update(self._bars[what], completed=done_bytes, total=whole_bytes or None)

    def ended(self, what: str) -> None:
        bar = self._bars.pop(what, None)
        if bar is None or self._progress is None:
            return
        self._progress.remove_task(bar)
        if not self._bars:
            self._progress.stop()
            self._progress = None
            for handler in self._moved:
                handler.setStream(self._stream)
            self._moved.clear()

    def _begin(self) -> Progress:
        columns = (
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn(),
            TextColumn("left:"), TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=Console(file=self._stream), transient=True)
        self._progress.start()
        for handler in logging.getLogger("echo2").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream:
                handler.setStream(sys.stderr)  # which rich has redirected, so log lines appear above the bar
                self._moved.append(handler)
        return self._progress


def progress_for(stream: TextIO | None, as_json: bool) -> ShowsProgress:
    """Bars on a terminal, unless the log is for machines. `stream`: None if it was closed from the start."""
    return ProgressBars(stream) if stream is not None and stream.isatty() and not as_json else ProgressLines(_log)


SKIPS_MAX = 8  # each skip makes the live weights a version older
FAILURES_MAX = 5  # one may be a damaged artifact; five in a row are this machine's fault
Tensors = Iterable[tuple[str, tuple[int, ...], str]]
_log = logging.getLogger("echo2.worker")


def model_digest(config_json: bytes, tensors: Tensors) -> str:
    """What the learner announces: SHA-256, in hex, of the transformers config and the tensors' names, shapes and dtypes."""
    table = sorted([name, list(shape), dtype] for name, shape, dtype in tensors)
    return hashlib.sha256(config_json + json.dumps(table).encode()).hexdigest()


class HostSnapshot:
    """All of the host's weights as a staged version. Read it before the next commit."""

    parent = None

    def __init__(self, host: HostWeights) -> None:
        assert host.version is not None, "a host without weights has no version"
        self._host = host
        self.version = host.version

    def updates(self) -> Iterator[TensorUpdate]:
        assert self._host.version == self.version, "the host moved on"
        for spec in self._host.table.specs:
            yield TensorUpdate(spec.name, spec.element.name, spec.shape, None, self._host.bits(spec.name))


class Weights:
    """The host's copy and the engine's live version; one caller calls its methods one at a time. `model`: digest and config of
    the learner's model. `on_decoded` is told of each artifact whether it is a keyframe, the bytes of the whole weights, and the
    seconds on the decoder's thread.

    `version`: committed on the host; `live`: proven on the engine; `pause_s` and `apply_s`: how long generation paused for the
    last swap, and the time from decoded to proven; `state`: in words, for the status; `has_wrong_parent`: the artifact refused
    last is a delta from other weights than the host's."""

    def __init__(
        self,
        engine: Engine,
        mode: SwapMode,
        gate: TokenGate,
        model: tuple[str, bytes],
        on_decoded: Callable[[bool, int, float], None],
    ) -> None:
        self.host = HostWeights.empty()
        self.version: Version | None = None
        self.live: Version | None = None
        self.fingerprint = ""
        self.pause_s = self.apply_s = 0.0
        self.state = "waits for a version"
        self._engine, self._mode, self._gate, self._model = engine, mode, gate, model
        self._on_decoded = on_decoded
        self._went_live = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="echo2-decode")
        self._decoder: ContainerDecoder | None = None
        self._reader = FrameReader()
        self._decode_s = 0.0
        self._skips = self._failures = 0
        self.has_wrong_parent = False

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(self) -> None:
        """The next artifact begins."""
        self._decoder, self._reader = ContainerDecoder(self.host), FrameReader()
        self._decode_s, self.state = 0.0, "receives and decodes"

    async def next_live(self) -> Version:
        """Waits for a version that has gone live since the last call, and returns the newest."""
        await self._went_live.wait()
        self._went_live.clear()
        assert self.live is not None, "a version went live"
        return self.live

    async def chunk(self, payload: bytes) -> bool:
        """Takes the next bytes of the artifact; they are decoded before this returns. False: the artifact has turned out bad; fetch
        one that applies to `version` (None: a keyframe)."""
        decoder = self._decoder
        if decoder is None:
            return True  # decoding failed earlier: ignore the rest of the artifact

        def feed() -> None:
            for frame in self._reader.feed(payload):
                decoder.feed(frame)

        try:
            await self._decoded(feed)
        except EchoError as error:
            self._refuse(error, is_of_other_weights=isinstance(error, FingerprintMismatch))
            return False
        return True

    async def finish(self, more_is_here: bool) -> bool:
        """The artifact is complete. Returns once its version is live or committed; False: it is bad, as from `chunk`.
        `more_is_here`: a complete artifact of a later version can follow at once."""
        if self._decoder is None:
            return True
        try:
            staged = await self._decoded(self._decoder.finish)
        except EchoError as error:
            self._refuse(error)
            return False
        if staged.parent is None:  # a delta names its parent's tensors
            self._check_model((s.name, s.shape, s.element.name) for s in staged.table.specs)
        weights_bytes = sum(s.element_count * s.element.bits_dtype.itemsize for s in staged.table.specs)
        self._on_decoded(staged.parent is None, weights_bytes, self._decode_s)
        if more_is_here and self._skips < SKIPS_MAX and self.live is not None:
            self._skips += 1
            await self._commit(staged)
            self.state = "waits for a version"
            return True
        self._skips = 0
        await self._go_live(staged.version, staged)
        return True

    async def adopt(self, weights: HostWeights) -> None:
        """Takes weights that already have the fingerprint of a version. Returns when it is live."""
        assert weights.version is not None, "what is adopted is a version"
        self.drop()
        self._check_model((s.name, s.shape, s.element.name) for s in weights.table.specs)
        self.host, self.version = weights, weights.version
        await self._go_live(weights.version, None)

    def drop(self) -> None:
        """The artifact will not be completed."""
        self._decoder, self.state = None, "waits for a version"

    # -- to the engine

    async def _go_live(self, version: Version, staged: StagedDelta | None) -> None:
        """Swaps until the engine's fingerprint proves the version: first by `staged`, if the engine is at its parent, then by the
        host's whole weights, whose bits are verified."""
        began = monotonic()
        delta = staged if staged is not None and staged.parent in (None, self.live) else None
        if staged is not None and delta is None:
            await self._commit(staged)
        while True:
            self.state = "swaps"
            self._gate.hold(version)
            try:
                self.pause_s = await self._engine.swap(HostSnapshot(self.host) if delta is None else delta, self._mode)
                failure = ""
            except EngineError as error:
                failure = str(error)
                _log.warning("the engine kept version %s: %s", self._engine.version, error)
            if delta is not None:
                await self._commit(delta)
                delta = None
            if not failure:
                self.state = "checks the engine's weights"
                if await self._is_proven(version):
                    break
                failure = f"the engine's weights differ from version {version} after the swap"
                self._gate.discard()
            self._count_failure(failure)
        self._failures, self.live = 0, version
        self.fingerprint, self.apply_s = f"{self.host.fingerprint():016x}", monotonic() - began
        self.state = "waits for a version"
        self._gate.release()
        text = "version %d is live: paused for %.0f ms, %.0f ms after arrival"
        _log.info(text, version, 1e3 * self.pause_s, 1e3 * self.apply_s)
        self._went_live.set()

    async def _is_proven(self, version: Version) -> bool:
        """Compares the engine's fingerprint, computed from its live weights, with the host's, which equals the learner's."""
        actual = await self._engine.fingerprint(self.host.key)
        expected = await self._in_thread(self.host.fingerprint)
        if actual != expected:
            _log.error("version %d: expected fingerprint %016x of the engine, got %016x", version, expected, actual)
        return actual == expected

    async def _commit(self, staged: StagedDelta) -> None:
        await self._in_thread(lambda: self.host.commit(staged))
        self.version, self._decoder = staged.version, None

    def _refuse(self, error: EchoError, *, is_of_other_weights: bool = False) -> None:
        """The artifact does not decode, or not to its fingerprint."""
        self.drop()
        # A base checkpoint that no version proved yet is doubted at once.
        self.has_wrong_parent = is_of_other_weights or (self.version is None and self.host.version is not None)
        self._count_failure(str(error))
        _log.warning("a version was bad, fetching it another way: %s", error)
        # One failure may be a bad copy. After a second, the delta or the host copy may be wrong; a keyframe needs neither. The
        # engine keeps its proven version.
        if self._failures > 1 or self.has_wrong_parent:
            self.host, self.version = HostWeights.empty(), None

    def _count_failure(self, message: str) -> None:
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            self._gate.discard()
            raise IntegrityError(f"no version went live, {self._failures} times in a row; the last time: {message}")

    def _check_model(self, tensors: Tensors) -> None:
        """VersionMismatch unless the received weights belong to the model that the learner announced."""
        expected, config_json = self._model
        digest = model_digest(config_json, tensors)
        if digest != expected:
            raise VersionMismatch(
                f"the learner's model: expected weights of digest {expected[:16]}, as it announced, those that came have "
                f"{digest[:16]}: names, shapes or types of its tensors differ"
            )

    async def _decoded(self, work: Callable[[], _T]) -> _T:
        """Runs `work` on the decoder's thread and adds its duration to the decoding time."""

        def timed() -> _T:
            began = monotonic()
            try:
                return work()
            finally:
                self._decode_s += monotonic() - began

        return await self._in_thread(timed)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class WeightReceiver:
    """Passes the broadcast node's deliveries to the weights, and shows how much has arrived; `run` is its loop. `base`: a local
    checkpoint that may turn out to be the required version."""

    def __init__(
        self,
        weights: Weights,
        node: BroadcastNode,
        generation: Generation,
        waits: Waits,
        base: BaseCheckpointLoader,
        progress: ShowsProgress,
    ) -> None:
        self._weights, self._node, self._generation, self._waits = weights, node, generation, waits
        self._base, self._progress, self._lines = base, progress, ProgressLines(_log)
        self._received_bytes = 0
        self._without_parent: ArtifactId | None = None  # the last delta whose parent was not what the host held

    async def run(self) -> None:
        """Runs until the node stops; raises IntegrityError if no version can be put live."""
        weights = self._weights
        self._waits.begin("weights", "the first weights")
        async for step in self._node.progress():
            match step:
                case ArtifactBegun(header):
                    self._received_bytes = 0
                    _log.debug("receiving %s", header.artifact)
                    await self._stand_on_base(header.artifact)
                    weights.begin()
                    await self._adopt(header.artifact)
                case BlockArrived(artifact, payload):
                    self._show(artifact, len(payload))
                    if not await self._adopt(artifact) and not await weights.chunk(payload):
                        self._refetch(artifact)
                case ArtifactSealed(artifact, _, total_bytes):
                    _log.debug("received %s, %s", artifact, format_bytes(total_bytes))
                    self._end_show(artifact)
                    exact = len(self._generation.leases.exact_leases)
                    if exact:  # only the live version may sample those, which bound the wait
                        text = f"{exact} evaluation leases to end before version {artifact.version} goes live"
                        self._waits.begin("version", text)
                    await self._generation.version_may_go_live()
                    self._waits.end("version")
                    if not await weights.finish(self._more_is_here(artifact.version)):
                        self._refetch(artifact)
                    if weights.version is not None:
                        self._base.end()
                    if weights.live is not None:
                        self._waits.end("weights")
                case ArtifactDropped(artifact, reason):
                    _log.info("%s is not needed: %s", artifact, reason)
                    self._end_show(artifact)
                    weights.drop()

    async def _stand_on_base(self, artifact: ArtifactId) -> None:
        """If the first artifact is a delta, takes the base checkpoint as its parent. Decoding fails if the parent's fingerprint,
        which the delta names, is another."""
        if artifact.parent is None or self._weights.version is not None:
            return
        candidate = await self._base.candidate()
        if candidate is not None:
            self._weights.host = candidate
            _log.info("this machine's base checkpoint and %s lead to version %d", artifact, artifact.version)

    async def _adopt(self, artifact: ArtifactId) -> bool:
        """Uses the base checkpoint instead of a keyframe if their fingerprints are equal; returns whether it did."""
        if artifact.parent is not None or self._weights.version is not None:
            return False
        fingerprint = self._node.library.fingerprint_of(artifact)
        base = self._base.proven(artifact.version, fingerprint) if fingerprint else None
        if base is None:
            return False
        _log.info("version %d is this machine's base checkpoint: nothing to fetch", artifact.version)
        self._end_show(artifact)
        self._node.adopted(artifact)
        self._base.end()
        await self._weights.adopt(base)
        self._waits.end("weights")
        return True

    def _refetch(self, artifact: ArtifactId) -> None:
        """Another way to the version. A delta from other weights than ours is good as it is, once we hold its parent: it is fetched
        anew only if it is refused again, because peers do not send the same chunks twice within a while."""
        if not self._weights.has_wrong_parent or artifact == self._without_parent:
            self._node.refetch(artifact)
        self._without_parent = artifact if self._weights.has_wrong_parent else None
        if self._weights.version is None:
            self._node.set_base(None)  # the base checkpoint may not be what the delta was made from
            self._node.set_live(None)

    def _more_is_here(self, version: Version) -> bool:
        return any(
            offered.is_complete and offered.artifact.version > version and offered.artifact.parent in (None, version)
            for offered in self._node.artifacts_available()
        )

    def _show(self, artifact: ArtifactId, more_bytes: int) -> None:
        self._received_bytes += more_bytes
        sizes = [offered.total_bytes for offered in self._node.artifacts_available() if offered.artifact == artifact]
        # Bars only until the first version is live; later a version that takes long gets log lines.
        progress = self._progress if self._weights.live is None else self._lines
        progress.at(_name_of(artifact), self._received_bytes, max(sizes, default=0))

    def _end_show(self, artifact: ArtifactId) -> None:
        for progress in (self._progress, self._lines):
            progress.ended(_name_of(artifact))


def _name_of(artifact: ArtifactId) -> str:
    """The artifact's name on screen and in the log."""
    return f"{'download' if artifact.parent is None else 'catch-up'} of version {artifact.version}"
