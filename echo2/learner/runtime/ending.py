"""Ends a learner.

    stopped  -------------------------------------------------------> leaves: "stopped"
    finished --> exported --> last version fetched --> coordinator heard --> leaves: "finished"

Guarantees: `waits_for` always names what it waits for; the waits after the export are bounded, and `stop` ends them at once. Leaves
to others: how long a version is served (learner/lingering), the clean disconnect (shift).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from echo2.base.ids import Version
from echo2.learner.lingering import Lingering
from echo2.learner.runtime.broadcaster import FleetBroadcaster
from echo2.learner.runtime.loop import TrainingLoop
from echo2.learner.runtime.options import LearnerOptions
from echo2.learner.runtime.session import LearnerSession
from echo2.learner.runtime.startup import export
from echo2.outside import monotonic

LOOK_S = 0.25
HEARD_S = 120.0
_log = logging.getLogger("echo2.learner")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """State of the run at the end. `evaluations`: held-out reward by step."""

    steps: int
    is_finished: bool
    version: Version
    fingerprint: str
    evaluations: dict[int, float]
    utilisation: float
    trained_rollouts: int
    trained_tokens: int
    dropped_stale_rollouts: int
    over_stale_tokens: int
    delta_bytes: int
    keyframe_bytes: int
    full_snapshot_bytes: int
    export_folder: Path | None


class LearnerEnding:
    """The steps from the end of training to the disconnect. `waits_for` is None while training runs."""

    def __init__(
        self,
        options: LearnerOptions,
        loop: TrainingLoop,
        broadcaster: FleetBroadcaster,
        session: LearnerSession,
        stopped: asyncio.Event,
    ) -> None:
        self._options, self._loop, self._stopped = options, loop, stopped
        self._broadcaster, self._session = broadcaster, session
        self._waits: tuple[str, float] | None = None

    @property
    def waits_for(self) -> tuple[str, float] | None:
        """What it waits for, and for how many seconds."""
        return None if self._waits is None else (self._waits[0], monotonic() - self._waits[1])

    def waits(self, what: str) -> None:
        """Records that from now on it waits for `what`."""
        self._waits = (what, monotonic())

    async def exported(self, trainer: Executor) -> RunSummary:
        """Writes the last published version to the model folder if the run is complete; returns the summary."""
        self.waits("the finished model to be written")
        loop, publisher, folder = self._loop, self._loop.publisher, None
        if loop.is_finished:
            folder = self._options.folder / "model"
            assert publisher.newest_version == loop.step, "the last step is always published"
            held = publisher.newest_tensors, publisher.newest_version
            policy = await asyncio.get_running_loop().run_in_executor(trainer, lambda: loop.p.team.whole(*held))
            await asyncio.to_thread(export, loop.p.model, policy, loop.p.prompts.tokenizer, folder)
            _log.info("finished after %d steps; the model lies in %s", loop.step, folder)
        else:
            at = self._options.folder / "checkpoints"
            _log.info(
                "stopped after step %d of %d; saved in %s: the same command goes on from there",
                loop.step, self._options.steps, at,
            )  # fmt: skip
        return self._summary(folder)

    def _summary(self, folder: Path | None) -> RunSummary:
        loop, publisher = self._loop, self._loop.publisher
        counts, sent = loop.intake.held.counts, publisher.bytes
        return RunSummary(
            loop.step, loop.is_finished, publisher.newest_version, f"{publisher.newest_fingerprint:016x}",
            loop.exams.rewards, loop.utilisation.overall, counts.trained, counts.trained_tokens, counts.dropped_stale,
            loop.intake.held.ledger.over_stale_tokens(), sent.deltas, sent.keyframes, sent.full_snapshots, folder,
        )  # fmt: skip

    async def fetched(self) -> None:
        """Serves the last version of a finished run while workers fetch it, for at most `linger_s`."""
        self.waits(f"workers to fetch version {self._loop.publisher.newest_version}")
        if not self._loop.is_finished or self._options.linger_s <= 0:
            return
        _log.info("finished; serving the last version while it is fetched, up to %.0f s", self._options.linger_s)
        lingering = Lingering(monotonic(), self._options.linger_s)
        while not self._stopped.is_set() and not lingering.is_over(self._broadcaster.is_needed(), monotonic()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), LOOK_S)

    async def heard(self) -> None:
        """Waits up to `HEARD_S` for a connection to the coordinator, which must learn that the run is finished: until then
        workers cost money."""
        self.waits("the coordinator, to tell it that the run is finished")
        until = monotonic() + HEARD_S
        while not self._session.is_connected and not self._stopped.is_set() and monotonic() < until:
            await asyncio.sleep(LOOK_S)
        if not self._session.is_connected:
            _log.warning(
                "the coordinator was not told that the run is finished: workers go on waiting. Start this learner again "
                "with the same command once the coordinator is back"
            )
