"""The worker process: inspects its machine, enrols, works a shift, and answers its owner's commands.

`WorkerDaemon(options).run()` works until it is stopped or refused, or its engine fails; `stop(reason)` drains: it hands partial
rollouts back within `limits.drain_s`. Guarantees: whatever it waits for is in the log, the heartbeat and `echo-worker status`.
Waits for the coordinator to enrol it, then for its shift to end. Leaves to others: the parts and their order (shift), decisions
(worker/).
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path

from echo2.base.errors import DiskFull, ProtocolError, ResourceError
from echo2.control.runtime.joining import unless
from echo2.control.waits import Waits
from echo2.outside import SteadyClock
from echo2.trust.identity import JoinLink
from echo2.worker.options import WorkerOptions
from echo2.worker.price import Price, price_of
from echo2.worker.runtime import machine as machine_check
from echo2.worker.runtime.addresses import listen_host
from echo2.worker.runtime.control import CommandAnswer, ControlServer
from echo2.worker.runtime.join import join
from echo2.worker.runtime.log_tail import LogTail
from echo2.worker.runtime.make_engine import ENGINES, Engines
from echo2.worker.runtime.preemption import source_of
from echo2.worker.runtime.progress import ProgressLines, ShowsProgress
from echo2.worker.runtime.provider import tagged_price
from echo2.worker.runtime.shift import Equipment, Shift, worker_backoff

_log = logging.getLogger("echo2.worker")


class WorkerDaemon:
    """One worker. Make it on the loop that runs it."""

    def __init__(
        self,
        options: WorkerOptions,
        progress: ShowsProgress | None = None,
        engines: Engines = ENGINES,
        log: LogTail | None = None,
    ) -> None:
        link = JoinLink.parse(options.join_link)
        self.options = replace(options, listen_host=listen_host(options, link))
        self.waits = Waits(SteadyClock())
        self.shift: Shift | None = None  # None until it has enrolled
        self._engines = engines
        self._progress: ShowsProgress = progress or ProgressLines()
        self._link = link
        self._log = log
        if options.preemption_notice:
            source_of(options.preemption_notice)  # refuses a wrong one before anything starts
        self._stopped = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None

    def stop(self, reason: str = "asked to") -> None:
        """Asks for a drain and a clean end."""
        self._stopped.set()
        if self.shift is not None:
            self.shift.stop(reason)

    async def run(self) -> None:
        """Works until stopped. Raises the `EchoError` that ended it otherwise."""
        self._prepare_folder()
        control = ControlServer(self.options.folder, self.options.name, self._answer)
        await control.start()
        try:
            equipment = await self._looked_at()
            backoff = worker_backoff(self.options, "enrol")
            joining = asyncio.create_task(join(self._link, self.options.folder, self.waits, backoff))
            credentials = await unless(self._stopped, joining)
            if credentials is not None:
                self.shift = Shift(
                    self.options, self._link, credentials, equipment, self._engines, self.waits, self._progress
                )
                self.shift.telling.log = self._log
                await self.shift.run()
        finally:
            if self.shift is not None:
                self.shift.desk.close()
            await control.stop()

    async def _looked_at(self) -> Equipment:
        machine = await asyncio.to_thread(self._engines.look, self.options.folder)
        choice = machine_check.chosen_engine(self.options.engine, machine)
        _log.info("this machine: %s; engine: %s", machine.describe(), choice.value)
        price = await asyncio.to_thread(self._priced)
        warm_up = asyncio.create_task(asyncio.to_thread(self._engines.warm_up, choice))
        return Equipment(machine, choice, price, warm_up)

    def _prepare_folder(self) -> None:
        try:
            self.options.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            kind = DiskFull if error.errno == 28 else ResourceError
            raise kind(f"{self.options.folder}: expected to make this worker's folder, got {error.strerror}") from None

    def _priced(self) -> Price:
        """What this machine costs; asks the provider only if no price was given and `preemption_notice` names a cloud."""
        known = price_of(self.options.price_usd_per_hour, os.environ)
        if known.source == "none given" and self.options.preemption_notice:
            known = price_of(0.0, os.environ, tagged_price(self.options.preemption_notice))
        _log.info("price: %g USD/h (%s)", known.usd_per_hour, known.source)
        return known

    # -- the owner's commands

    async def _answer(self, command: str) -> CommandAnswer:
        if command == "leave":
            self.stop("asked to leave")
            return {"text": "handing back what is held, then leaving"}
        if command == "drain":
            self._leaving = asyncio.create_task(self._stop_once_drained())
            held = len(self.shift.desk.machine.lease_ids) if self.shift is not None else 0
            return {"text": f"finishing {held} leases, then leaving"}
        if command != "status":
            raise ProtocolError(f"command: expected status, drain or leave, got {command[:40]}")
        return self.shift.status() if self.shift is not None else {"waits_for": self.waits.longest()[0]}

    async def _stop_once_drained(self) -> None:
        if self.shift is not None:
            await self.shift.drained()
        self.stop("drained")

    @property
    def folder(self) -> Path:
        return self.options.folder
