"""From the broadcast to a simulated engine, one artifact at a time, as worker/runtime/weights.py does it.

The swap machine decides, the real codec decodes, the truth looks at the bits. Leaves to others: fetching
(broadcast_driver), where the bits go (sim_engine), leases (worker_driver).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from echo2.base.errors import EchoError, IntegrityError
from echo2.base.ids import Version
from echo2.base.staged import StagedVersion, TensorUpdate
from echo2.broadcast.manifest import ArtifactId
from echo2.sim.artifact_reader import Abandoned, Begun, Block, Sealed
from echo2.sim.scene import Sabotage
from echo2.sim.sim_engine import SimEngine
from echo2.weights import Decoder, FrameReader, HostWeights, StagedDelta
from echo2.worker import swap
from echo2.worker.engine import SwapMode
from echo2.worker.swap import SwapMachine

if TYPE_CHECKING:
    from echo2.sim.worker_driver import WorkerDriver

CHECK_S = 0.01


class HostSnapshot:
    """All of the host's weights as a staged version, as worker/runtime/weights.py has it."""

    def __init__(self, host: HostWeights) -> None:
        assert host.version is not None, "a host without weights has no version"
        self._host, self._version = host, host.version

    @property
    def version(self) -> Version:
        return self._version

    @property
    def parent(self) -> Version | None:
        return None

    def updates(self) -> Iterator[TensorUpdate]:
        for spec in self._host.table.specs:
            yield TensorUpdate(spec.name, spec.element.name, spec.shape, None, self._host.bits(spec.name))


class WeightKeeper:
    """From the broadcast to the engine, one artifact at a time, as the swap machine says."""

    def __init__(self, worker: WorkerDriver, engine: SimEngine) -> None:
        self.worker, self.engine = worker, engine
        self.machine = SwapMachine(worker.scene.swap_mode)
        self.host = HostWeights.empty()
        self.swap_s = self.apply_s = 0.0
        self._artifact: ArtifactId | None = None
        self._decoder: Decoder | None = None
        self._frames = FrameReader()
        self._staged: StagedDelta | None = None
        self._is_busy = False

    def pump(self) -> None:
        """Takes what the broadcast hands out, until the engine must be waited for."""
        while not self._is_busy:
            step = self.worker.broadcast.next_step()
            match step:
                case None:
                    return
                case Begun(artifact):
                    self._artifact = artifact
                    self._send(swap.Began(artifact.version, artifact.parent))
                case Block(payload):
                    self._feed(payload)
                case Sealed(artifact, _):
                    self.worker.broadcast.update_wants()
                    self._ended(artifact.version)
                case Abandoned():
                    self._send(swap.Dropped())

    def _feed(self, payload: bytes) -> None:
        if self._decoder is None:
            return
        try:
            for frame in self._frames.feed(payload):
                self._decoder.feed(frame)
        except EchoError as error:
            self._send(swap.DecodeFailed(str(error)))

    def _ended(self, version: Version) -> None:
        if self._decoder is None:
            return
        try:
            self._staged = self._decoder.finish()
        except EchoError as error:
            self._send(swap.DecodeFailed(str(error)))
            return
        node = self.worker.broadcast
        more = any(
            entry.is_complete and entry.header.artifact.version > version
            and entry.header.artifact.parent in (None, version)
            for entry in node.entries.values()
        )  # fmt: skip
        self._send(swap.Decoded(self._staged.version, more))

    def _send(self, event: swap.Event) -> None:
        for action in self.machine.handle(event, self.worker.host.now()):
            self._carry_out(action)

    def _later(self, event: swap.Event) -> None:
        self._is_busy = False
        self._send(event)
        self.pump()

    def _carry_out(self, action: swap.Action) -> None:
        worker, gate = self.worker, self.worker.gate
        match action:
            case swap.StartDecoder():
                self._decoder, self._frames, self._staged = Decoder(self.host), FrameReader(), None
            case swap.DropDecoder():
                self._decoder = self._staged = None
            case swap.Swap(version, source, mode):
                self._swap(version, source, mode)
            case swap.Check(version):
                self._is_busy = True
                is_equal = worker.scene.sees_wrong_weights(self.engine.fingerprint() == self.host.fingerprint())
                checked = swap.Checked(version, is_equal)
                worker.host.after(CHECK_S, lambda: self._later(checked))
            case swap.Commit():
                assert self._staged is not None, "what is committed was decoded"
                self.host.commit(self._staged)
                if worker.scene.sabotage is Sabotage.TORN_COMMIT:
                    self.host.bits("norm.weight")[0] ^= 1
                self._decoder = None
                worker.truth.committed(worker.host.name, self.host)
            case swap.HoldTokens(version):
                gate.hold(version)
            case swap.ReleaseTokens():
                gate.release()
            case swap.DiscardTokens():
                worker.host.story.tell(worker.host.name, "discards tokens of weights that were not the version's")
                gate.discard()
            case swap.GoLive():
                self._staged = None
                self.swap_s, self.apply_s = action.stood_still_s, action.apply_s
                worker.truth.live(worker.host.name, action.version, self.engine.fingerprint())
                worker.went_live(action)
            case swap.StartOver(version, reason):
                worker.host.story.tell(worker.host.name, f"starts over from {version}: {reason}")
                if version is None:
                    self.host = HostWeights.empty()
                assert self._artifact is not None, "an artifact was under way"
                worker.broadcast.refetch(self._artifact)
                if version is None:
                    worker.broadcast.set_live(None)
            case swap.GiveUp(reason):
                raise IntegrityError(reason)

    def _swap(self, version: Version, source: swap.Source, mode: SwapMode) -> None:
        staged: StagedVersion | None = self._staged if source is swap.Source.DELTA else HostSnapshot(self.host)
        assert staged is not None, "what is swapped in was decoded"
        self._is_busy = True
        self.engine.swap(
            staged,
            mode,
            lambda stood_still_s: self._later(swap.Swapped(version, stood_still_s)),
            lambda text: self._later(swap.SwapFailed(text)),
        )
