"""Takes weights from the broadcast to the engine: decodes while receiving, swaps, checks, commits.

Guarantees: carries out SwapMachine's decisions in order, one artifact at a time; decoding and hashing run in a thread of their own,
so the event loop stays responsive; the token gate holds what unproven weights sample. Waits for the next artifact, its chunks, the
engine. Leaves to others: decisions (worker/swap), fetching (broadcast node).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from echo2.base.clock import Clock
from echo2.base.errors import EchoError, EngineError, IntegrityError
from echo2.base.ids import Version
from echo2.base.staged import StagedVersion, TensorUpdate
from echo2.broadcast.runtime.spill import FileSpill
from echo2.weights import ContainerDecoder, FrameReader, HostWeights, StagedDelta
from echo2.worker import swap
from echo2.worker.engine import Engine
from echo2.worker.swap import SwapMachine
from echo2.worker.token_gate import TokenGate

_log = logging.getLogger("echo2.worker")
_T = TypeVar("_T")


class HostSnapshot:
    """All of the host's weights as a staged version. Read it before the next commit."""

    def __init__(self, host: HostWeights) -> None:
        assert host.version is not None, "a host without weights has no version"
        self._host = host
        self._version = host.version

    @property
    def version(self) -> Version:
        return self._version

    @property
    def parent(self) -> Version | None:
        return None

    def updates(self) -> Iterator[TensorUpdate]:
        assert self._host.version == self._version, "the host moved on"
        for spec in self._host.table.specs:
            yield TensorUpdate(spec.name, spec.element.name, spec.shape, None, self._host.bits(spec.name))


@dataclass(frozen=True, slots=True)
class WeightsHooks:
    """Callbacks into the rest of the worker, on the loop's thread."""

    check_model: Callable[[Iterable[tuple[str, tuple[int, ...], str]]], None]  # raises for another model's weights
    live: Callable[[swap.GoLive], None]
    start_over: Callable[[Version | None, str], None]  # the artifact was bad: fetch again, from this version on
    # an artifact was decoded: whether it is a keyframe, bytes of the whole weights, seconds on the decoder's thread
    decoded: Callable[[bool, int, float], None] = lambda is_keyframe, weights_bytes, seconds: None


class WeightKeeper:
    """One per worker. The reader of the broadcast's deliveries calls its methods one at a time. Staged data that exceeds its share
    of memory spills to `folder`."""

    def __init__(
        self, engine: Engine, machine: SwapMachine, gate: TokenGate, clock: Clock, hooks: WeightsHooks, folder: Path
    ) -> None:
        self.machine = machine
        self.host = HostWeights.empty()
        self.live_fingerprint = ""
        self.swap_s = 0.0
        self.apply_s = 0.0
        self._engine = engine
        self._gate = gate
        self._clock = clock
        self._hooks = hooks
        self._folder = folder
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="echo2-decode")
        self._decoder: ContainerDecoder | None = None
        self._reader = FrameReader()
        self._staged: StagedDelta | None = None
        self._decode_s = 0.0

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _new_decoder(self) -> ContainerDecoder:
        return ContainerDecoder(self.host, spill=FileSpill(self._folder))

    async def began(self, version: Version, parent: Version | None) -> None:
        await self._send(swap.ArtifactBegan(version, parent))

    async def chunk(self, payload: bytes) -> None:
        """Takes the next bytes of the current artifact; they are decoded before this returns."""
        if self._decoder is None:
            return  # decoding failed earlier: ignore the rest of the artifact
        try:
            await self._in_thread(lambda: self._timed(lambda: self._feed(payload)))
        except EchoError as error:
            await self._send(swap.DecodeFailed(str(error)))

    async def ended(self, more_is_here: bool) -> None:
        """The artifact is complete. Returns when its version is live, committed or given up."""
        decoder = self._decoder
        if decoder is None:
            return
        try:
            self._staged = await self._in_thread(lambda: self._timed(decoder.finish))
        except EchoError as error:
            await self._send(swap.DecodeFailed(str(error)))
            return
        if self._staged.parent is None or self.machine.host is None:
            self._hooks.check_model((s.name, s.shape, s.element.name) for s in self._staged.table.specs)
        weights_bytes = sum(s.element_count * s.element.bits_dtype.itemsize for s in self._staged.table.specs)
        self._hooks.decoded(self._staged.parent is None, weights_bytes, self._decode_s)
        await self._send(swap.Decoded(self._staged.version, more_is_here))

    async def adopt(self, weights: HostWeights) -> None:
        """Adopts weights that are already proven to be a version. Returns when it is live or given up."""
        assert weights.version is not None, "what is adopted is a version"
        await self.dropped()
        self._hooks.check_model((s.name, s.shape, s.element.name) for s in weights.table.specs)
        self.host = weights
        await self._send(swap.Adopted(weights.version))

    async def dropped(self) -> None:
        await self._send(swap.ArtifactGivenUp())

    # -- carrying out

    async def _send(self, first: swap.Event) -> None:
        event: swap.Event | None = first
        while event is not None:
            outcome: swap.Event | None = None
            for action in self.machine.handle(event, self._clock.now()):
                outcome = await self._carry_out(action) or outcome
            event = outcome

    async def _carry_out(self, action: swap.Action) -> swap.Event | None:
        match action:
            case swap.StartDecoder():
                self._decoder, self._reader, self._staged = self._new_decoder(), FrameReader(), None
                self._decode_s = 0.0
            case swap.DropDecoder():
                self._decoder = self._staged = None
            case swap.SwapEngine():
                return await self._swap(action)
            case swap.Check(version):
                return await self._check(version)
            case swap.Commit():
                staged = self._staged
                assert staged is not None, "what is committed was decoded"
                await self._in_thread(lambda: self.host.commit(staged))
                self._decoder = None
            case swap.HoldTokens(version):
                self._gate.hold(version)
            case swap.ReleaseTokens():
                self._gate.release()
            case swap.DiscardTokens():
                self._gate.discard()
            case swap.GoLive():
                self._staged = None
                self.live_fingerprint = f"{self.host.fingerprint():016x}"
                self.swap_s, self.apply_s = action.stood_still_s, action.apply_s
                self._hooks.live(action)
            case swap.StartOver(version, reason):
                _log.warning("a version was bad, fetching it another way: %s", reason)
                if version is None:  # the host copy is not trusted any more; the engine keeps its proven version
                    self.host = HostWeights.empty()
                self._hooks.start_over(version, reason)
            case swap.GiveUp(reason):
                raise IntegrityError(reason)
        return None

    async def _swap(self, action: swap.SwapEngine) -> swap.Event:
        staged: StagedVersion | None = (
            self._staged if action.source is swap.SwapSource.DELTA else HostSnapshot(self.host)
        )
        assert staged is not None, "what is swapped in was decoded"
        try:
            stood_still_s = await self._engine.swap(staged, action.mode)
        except EngineError as error:
            _log.warning("the engine kept version %s: %s", self._engine.version, error)
            return swap.SwapFailed(str(error))
        return swap.Swapped(action.version, stood_still_s)

    async def _check(self, version: Version) -> swap.Event:
        """Compares the engine's fingerprint, computed from its live weights, with the host's, which equals the learner's."""
        found = await self._engine.fingerprint(self.host.key)
        expected = await self._in_thread(self.host.fingerprint)
        if found != expected:
            _log.error("version %d: expected fingerprint %016x of the engine, got %016x", version, expected, found)
        return swap.Checked(version, found == expected)

    def _feed(self, payload: bytes) -> None:
        assert self._decoder is not None, "only chunks of an artifact under way are fed"
        for frame in self._reader.feed(payload):
            self._decoder.feed(frame)

    def _timed(self, work: Callable[[], _T]) -> _T:
        """Runs `work` and adds its duration to the decoding time. On the decoder's thread."""
        began = self._clock.now()
        try:
            return work()
        finally:
            self._decode_s += self._clock.now() - began

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
