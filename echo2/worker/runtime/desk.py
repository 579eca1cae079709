"""Carries events to the assignments machine and its actions to the engine, the learner and the coordinator.

Guarantees: events are handled one at a time, in order, on the loop's thread; a request that the engine refuses becomes an event.
Waits for nothing itself; a timer that the machine requested wakes it. Leaves to others: all decisions (worker/assignments).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol

from echo2.base.clock import Clock
from echo2.base.errors import EngineError, LimitExceeded
from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import EndReason, RolloutSegment
from echo2.worker import duties
from echo2.worker.assignments import Assignments
from echo2.worker.engine import Engine, GenerateRequest
from echo2.worker.telemetry import RateWindow

_log = logging.getLogger("echo2.worker")


class LearnerPort(Protocol):
    """What the desk needs of the connection to the learner."""

    def report(self, lease_id: LeaseId, segments: tuple[RolloutSegment, ...]) -> None: ...

    def fetch_partials(self, lease_id: LeaseId) -> None: ...

    def forget(self, lease_id: LeaseId) -> None:
        """Drops what is kept for a lease that has ended."""
        ...


class CoordinatorPort(Protocol):
    """What the desk needs of the session with the coordinator; its methods do nothing while there is no session."""

    def end_lease(self, lease_id: LeaseId, reason: EndReason, message: str) -> None: ...

    def tell_progress(self, lease_id: LeaseId, finished_rollouts: int, tokens: int) -> None: ...

    def request_leases(self, free_rollouts: int, version: Version) -> None: ...


class Desk:
    """One per worker. Until `take` gives it the engine, requests are refused."""

    def __init__(
        self,
        machine: Assignments,
        clock: Clock,
        rates: RateWindow,
        learner: LearnerPort,
        coordinator: CoordinatorPort,
    ) -> None:
        self.machine = machine
        self.rates = rates
        self.drained = asyncio.Event()
        self.unheld_tokens = 0
        self._learner = learner
        self._coordinator = coordinator
        self.engine: Engine | None = None
        self._clock = clock
        self._version_let = asyncio.Event()
        self._events: deque[duties.Event] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, engine: Engine) -> None:
        self.engine = engine

    def send(self, event: duties.Event) -> None:
        """Handles `event` and all events that follow from it before this call, or the outermost nested `send`, returns."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                now = self._clock.now()
                for action in self.machine.handle(self._events.popleft(), now):
                    self._carry_out(action, now)
            self.rates.busy(self.machine.is_running, self._clock.now())
        finally:
            self._is_handling = False

    async def version_may_go_live(self, version: Version) -> None:
        """Returns once no lease needs the live version any more and `version` may replace it."""
        self._version_let.clear()
        self.send(duties.VersionCame(version))
        await self._version_let.wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _carry_out(self, action: duties.Action, now: float) -> None:
        match action:
            case duties.Submit(request):
                self._submit(request)
            case duties.Abort(request_id):
                if self.engine is not None:
                    self._in_background(self.engine.abort(request_id))
            case duties.FetchPartials(lease_id):
                self._learner.fetch_partials(lease_id)
            case duties.Report(lease_id, segments):
                self._learner.report(lease_id, segments)
            case duties.EndLease(lease_id, reason, message):
                self._ended(lease_id, reason, message)
            case duties.TellProgress(lease_id, finished_rollouts, tokens):
                self._coordinator.tell_progress(lease_id, finished_rollouts, tokens)
            case duties.RequestLeases(free_rollouts, version):
                self._coordinator.request_leases(free_rollouts, version)
            case duties.RolloutFinished(duration_s):
                self.rates.finished(duration_s, now)
            case duties.Drained(unheld_tokens):
                self.unheld_tokens = unheld_tokens
                self.drained.set()
            case duties.LetVersion():
                self._version_let.set()
            case duties.WakeAt(at):
                self._wake_in(max(0.0, at - now))

    def _submit(self, request: GenerateRequest) -> None:
        try:
            if self.engine is None:
                raise EngineError(f"request {request.request_id}: the engine has not started")
            self.engine.submit(request)
        except (EngineError, LimitExceeded) as error:
            self._events.append(duties.EngineRefused(request.request_id, str(error)))

    def _ended(self, lease_id: LeaseId, reason: EndReason, message: str) -> None:
        level = logging.WARNING if reason is EndReason.REFUSED else logging.DEBUG
        _log.log(level, "lease %s: %s%s", lease_id, reason.value, f" ({message})" if message else "")
        self._coordinator.end_lease(lease_id, reason, message)
        self._learner.forget(lease_id)

    def _wake_in(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.send, duties.DutyTick())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
