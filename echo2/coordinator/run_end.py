"""Ends the run: once the learner has finished, nothing that costs money continues.

Guarantees: a run ends only when the learner reports that it has finished, so killing or stopping a learner does not end it; the
end is saved before any node is told; workers leave and are told why, and one that connects later is refused before anything
changes. A learner that comes back with steps left reopens the run, and so does a coordinator started for more steps than the
learner had: else workers that come before their learner would be sent home.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from echo2.base.errors import RunFinished
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from echo2.coordinator.hub import Hub

META = "finished"  # key of the end in the saved state


@dataclass(frozen=True, slots=True)
class RunEnd:
    """When the learner reported the end, after how many steps, what ended it before the last one (empty if nothing did), and how
    many steps it was to make (0: not recorded). `is_stopped`: the operator ended it."""

    unix_s: float
    step: int
    cause: str = ""
    step_limit: int = 0
    is_stopped: bool = False


class RunEnding:
    """The state of the run's end. `finish`: None while the run goes on."""

    def __init__(self, hub: Hub, meta: Mapping[str, str]) -> None:
        self._hub = hub
        self.finish = RunEnd(**json.loads(meta[META])) if meta.get(META) else None
        steps = hub.config.learner.steps
        if self.finish is not None and steps > max(self.finish.step, self.finish.step_limit):
            self._reopen(f"{steps} steps are asked for, {self.finish.step} were made")

    @property
    def text(self) -> str:
        """A sentence for people; empty while the run goes on."""
        if self.finish is None:
            return ""
        if self.finish.cause:
            return f"run {self._hub.options.run_id} ended at step {self.finish.step}: {self.finish.cause}"
        return f"run {self._hub.options.run_id} is finished after {self.finish.step} steps"

    @property
    def _refusal(self) -> RunFinished:
        return RunFinished(f"{self.text}; no work is left for workers")

    def check_open(self) -> None:
        if self.finish is not None:
            raise self._refusal

    def check_learner(self) -> None:
        """Raises RunFinished while the operator's word ends the run: only that can reopen it."""
        if self.finish is not None and self.finish.is_stopped:
            raise self._refusal

    def resume(self) -> None:
        if self.finish is not None and self.finish.is_stopped:
            self._reopen("resumed by the operator")

    def reopen_for(self, hello: pb.LearnerHello) -> None:
        """Reopens a finished run if the learner that came has steps left."""
        if self.finish is None or hello.step >= hello.step_limit:
            return
        self._reopen(f"step {hello.step} of {hello.step_limit}")

    def _reopen(self, why: str) -> None:
        self.finish = None
        self._hub.state.meta(META, "")
        self._hub.state.require_sync()
        self._hub.note("run", f"goes on: {why}; workers may join again")

    def finish_run(self, cause: str = "", is_stopped: bool = False) -> None:
        """Saves the end and its cause, closes all groups, and dismisses every worker. Idempotent."""
        hub = self._hub
        if self.finish is not None:
            return
        limit = hub.board.hello.step_limit if hub.board.hello is not None else 0
        self.finish = RunEnd(hub.clock.now(), int(hub.board.report.step), cause, limit, is_stopped)
        hub.state.meta(META, json.dumps(asdict(self.finish)))
        hub.state.require_sync()  # no node would report it again
        hub.note("run", f"{self.text}: workers are sent home, rented machines are given back")
        hub.handle(hub.book.sync, ())
        for member in list(hub.membership.living()):
            hub.dismiss(member.peer_id, "the run is finished", self._refusal)
        hub.state.meta("usd_standby", f"{hub.money.standby_usd():.6f}")
        hub.flush_now()

    @property
    def is_settled(self) -> bool:
        """Whether the run is finished, no worker is connected and no machine is rented."""
        is_idle = not self._hub.workers and not any(one.is_open for one in self._hub.money.machines.values())
        return self.finish is not None and is_idle
