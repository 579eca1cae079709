"""`echo-learner`: joins the run, loads the model, works, and releases everything.

    joins --> loads, trains again on recorded batches --> LearnerShift --> threads end, the folder is unlocked

Guarantees: a clean stop leaves a checkpoint, a kill loses nothing that was acknowledged; an error in any part ends the run with
that error, never silently; the coordinator may disappear and return without disturbing training. Waits for: the coordinator before
the first start, then what its shift waits for. Leaves to others: the work (shift), command line and signals (cli).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from echo2.control.waits import Waits
from echo2.learner.runtime.broadcaster import BroadcasterFactory
from echo2.learner.runtime.ending import RunSummary
from echo2.learner.runtime.join import join
from echo2.learner.runtime.options import LearnerOptions
from echo2.learner.runtime.run_folder import RunFolder
from echo2.learner.runtime.seed import SeedNode
from echo2.learner.runtime.shift import LearnerShift, Threads
from echo2.learner.runtime.startup import Prepared, prepare_here
from echo2.outside import SteadyClock
from echo2.outside.under_way import under_way

_log = logging.getLogger("echo2.learner")
Prepare = Callable[[LearnerOptions, RunFolder], Prepared]


class LearnerDaemon:
    """One run of one learner. Call `run` once, and `stop` on the same event loop. `shift` is None until everything is loaded."""

    def __init__(
        self,
        options: LearnerOptions,
        make_broadcaster: BroadcasterFactory = SeedNode,
        make_prepared: Prepare = prepare_here,
    ) -> None:
        self.options = options
        self.shift: LearnerShift | None = None
        self._waits = Waits(SteadyClock())
        self._make_broadcaster = make_broadcaster
        self._make_prepared = make_prepared
        self._stopped = asyncio.Event()
        self._starting = "its run folder"

    def stop(self) -> None:
        """Ends the run after the step in progress; `run` then returns its summary."""
        self._stopped.set()
        if self.shift is not None:
            self.shift.stop()

    @property
    def waits_for(self) -> tuple[str, float]:
        """What the learner waits for, and for how many seconds; an empty text while it works."""
        if self.shift is None:
            return self._waits.longest()[0] or self._starting, 0.0
        return self.shift.waits_for

    async def run(self) -> RunSummary:
        """Runs until the last step, `stop` or an error."""
        folder, threads = RunFolder(self.options.folder), Threads()
        in_trainer = asyncio.get_running_loop().run_in_executor
        try:
            self._starting = "the coordinator"
            credentials = await join(self.options, self._waits, self._stopped)
            self._starting = "the model and what was recorded to be trained again"
            loading = in_trainer(threads.trainer, lambda: self._make_prepared(self.options, folder))
            prepared = await under_way(_log, "loading the model, restoring what the run has recorded", loading)
            self.shift = LearnerShift(
                self.options, prepared, credentials, threads, self._waits, self._stopped, self._make_broadcaster
            )
            summary = await self.shift.run()
            await in_trainer(threads.trainer, prepared.team.stop)
            return summary
        finally:
            if self.shift is not None:
                self.shift.ending.waits("the step or the encoding under way to end")
            threads.close()
            folder.release()
