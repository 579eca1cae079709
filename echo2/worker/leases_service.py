"""Carries events to the leases and their actions to the engine, the learner and the coordinator.

Guarantees: events are handled one at a time, in order, on the loop's thread; a request that the engine refuses costs its lease.
Waits for nothing itself; a timer that the leases requested wakes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Protocol

from echo2.base.clock import Clock
from echo2.base.errors import EngineError, LimitExceeded
from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import EndReason, RolloutSegment
from echo2.worker import leases
from echo2.worker.engines.engine import Engine, GenerateRequest
from echo2.worker.leases import Leases
from echo2.worker.rates import RateWindow

_log = logging.getLogger("echo2.worker")


class LearnerPort(Protocol):
    """What the leases need of the connection to the learner."""

    def report(self, lease_id: LeaseId, segments: tuple[RolloutSegment, ...]) -> None: ...

    def fetch_partials(self, lease_id: LeaseId) -> None: ...

    def forget(self, lease_id: LeaseId) -> None:
        """Drops what is kept for a lease that has ended."""
        ...


class CoordinatorPort(Protocol):
    """What the leases need of the session with the coordinator; its methods do nothing while there is no session."""

    def end_lease(self, lease_id: LeaseId, reason: EndReason, message: str) -> None: ...

    def report_progress(self, lease_id: LeaseId, finished_rollouts: int, tokens: int) -> None: ...

    def request_leases(self, free_rollouts: int, version: Version) -> None: ...


class LeaseService:
    """One per worker. Until `engine` is set, requests are refused. `unheld_tokens`: lost by the drain."""

    def __init__(self, machine: Leases, clock: Clock, learner: LearnerPort, coordinator: CoordinatorPort) -> None:
        self.machine = machine
        self.rates = RateWindow()
        self.engine: Engine | None = None
        self.drained = asyncio.Event()
        self.unheld_tokens = 0
        self._clock, self._learner, self._coordinator = clock, learner, coordinator
        self._version_admitted = asyncio.Event()
        self._events: deque[leases.Event] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    def send(self, event: leases.Event) -> None:
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
        self._version_admitted.clear()
        self.send(leases.VersionArrived(version))
        await self._version_admitted.wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._aborts:
            task.cancel()

    def _carry_out(self, action: leases.Action, now: float) -> None:
        match action:
            case leases.Submit(request):
                self._submit(request)
            case leases.Abort(request_id):
                if self.engine is not None:
                    task = asyncio.get_running_loop().create_task(self.engine.abort(request_id))
                    self._aborts.add(task)
                    task.add_done_callback(self._aborts.discard)
            case leases.FetchPartials(lease_id):
                self._learner.fetch_partials(lease_id)
            case leases.Report(lease_id, segments):
                self._learner.report(lease_id, segments)
            case leases.EndLease(lease_id, reason, message):
                level = logging.WARNING if reason is EndReason.REFUSED else logging.DEBUG
                _log.log(level, "lease %s: %s%s", lease_id, reason.value, f" ({message})" if message else "")
                self._coordinator.end_lease(lease_id, reason, message)
                self._learner.forget(lease_id)
            case leases.ReportProgress(lease_id, finished_rollouts, tokens):
                self._coordinator.report_progress(lease_id, finished_rollouts, tokens)
            case leases.RequestLeases(free_rollouts, version):
                self._coordinator.request_leases(free_rollouts, version)
            case leases.RolloutFinished(duration_s):
                self.rates.finished(duration_s, now)
            case leases.Drained(unheld_tokens):
                self.unheld_tokens = unheld_tokens
                self.drained.set()
            case leases.AdmitVersion():
                self._version_admitted.set()
            case leases.WakeAt(at):
                if self._timer is not None:
                    self._timer.cancel()
                delay_s = max(0.0, at - now)
                self._timer = asyncio.get_running_loop().call_later(delay_s, self.send, leases.WakeUp())

    def _submit(self, request: GenerateRequest) -> None:
        try:
            if self.engine is None:
                raise EngineError(f"request {request.request_id}: the engine has not started")
            self.engine.submit(request)
        except (EngineError, LimitExceeded) as error:
            self._events.append(leases.LeaseRefused(leases.lease_of(request.request_id), str(error)))
