"""Ends the run: once the learner has finished, nothing that costs money continues.

Guarantees: a run ends only when the learner reports that it has finished, so killing or stopping a learner does not end it; the end
is saved before any node is told; workers leave and are told why, and one that connects later is refused before anything changes.
A learner that comes back with steps left reopens the run. Leaves to others: rented machines (provisioner), the
process itself (daemon).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from echo2.base.errors import Dismissed, RunFinished
from echo2.base.ids import PeerId
from echo2.coordinator import lease_events as le
from echo2.coordinator.telemetry import LearnerHello

if TYPE_CHECKING:
    from echo2.coordinator.runtime.hub import Hub

META = "finished"


@dataclass(frozen=True, slots=True)
class RunEnd:
    """When the learner reported the end, and after how many steps."""

    unix_s: float
    step: int


class RunEnding:
    """The state of the run's end. `finish`: None while the run goes on."""

    def __init__(self, hub: Hub, meta: Mapping[str, str]) -> None:
        self._hub = hub
        self.finish = RunEnd(**json.loads(meta[META])) if meta.get(META) else None

    @property
    def text(self) -> str:
        """A sentence for people; empty while the run goes on."""
        if self.finish is None:
            return ""
        return f"run {self._hub.options.run_id} is finished after {self.finish.step} steps"

    @property
    def _refusal(self) -> RunFinished:
        return RunFinished(f"{self.text}; no work is left for workers")

    def check_open(self) -> None:
        """Raises RunFinished if the run is finished."""
        if self.finish is not None:
            raise self._refusal

    def learner_came(self, hello: LearnerHello) -> None:
        """Reopens a finished run if the learner that came has steps left."""
        if self.finish is None or hello.step >= hello.step_limit:
            return
        self.finish = None
        self._hub.keeper.meta(META, "")
        self._hub.note("run", f"goes on: step {hello.step} of {hello.step_limit}; workers may join again")

    def learner_finished(self) -> None:
        """Saves the end, closes all groups, and dismisses every worker. Idempotent."""
        hub = self._hub
        if self.finish is not None:
            return
        self.finish = RunEnd(hub.clock.now(), int(hub.board.report.step))
        hub.keeper.meta(META, json.dumps(asdict(self.finish)))
        hub.note("run", f"{self.text}: workers are sent home, rented machines are given back")
        hub.apply(hub.book.handle(le.GroupsSynced(()), hub.clock.now()))
        for member in list(hub.membership.living()):
            dismiss(hub, member.peer_id, "the run is finished", self._refusal)
        hub.keeper.meta("usd_standby", f"{hub.money.standby_usd():.6f}")
        hub.flush_now()

    @property
    def is_settled(self) -> bool:
        """Whether the run is finished, no worker is connected and no machine is rented."""
        is_idle = not self._hub.workers and not any(one.is_open for one in self._hub.money.machines.values())
        return self.finish is not None and is_idle


def dismiss(hub: Hub, peer_id: PeerId, reason: str, why: Dismissed | None = None) -> None:
    """Dismisses a worker: its process then exits. It may join again."""
    session = hub.workers.get(peer_id)
    hub.worker_left(peer_id, reason)
    if session is not None:
        session.refuse(why or Dismissed(reason))


async def until_settled(hub: Hub, look_s: float = 1.0) -> None:
    """Waits until the run is finished, every worker has gone and every rented machine is released."""
    while not hub.ending.is_settled:
        await asyncio.sleep(look_s)
