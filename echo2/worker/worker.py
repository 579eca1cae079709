"""The worker: `WorkerDaemon` is its process, which inspects the machine, enrols and answers the owner's commands; `Worker` is the
enrolled worker, which generates rollouts until it is stopped, dismissed, or a part fails.

Guarantees: the end of any part ends the worker with that part's error; a stop drains: it hands partial rollouts back within
`DRAIN_S`; whatever the worker waits for is in the log, the heartbeat and `echo-worker status`.

      run                 model known            first version live        stop, or a part failed
    [joined, no model] -> [engine starts] -> [measures its rate] -> [works] -> [drains] -> closed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from echo2.base.clock import Backoff, Waits
from echo2.base.errors import NO_ROOM, DiskFull, Dismissed, EchoError, ProtocolError, ResourceError
from echo2.base.rng import derived_rng
from echo2.broadcast.nat.reach import HostFacts, HostOptions
from echo2.broadcast.node import BroadcastNode, NodeCalls, NodeOptions
from echo2.control.session import ControlSession, unless
from echo2.outside import SteadyClock, monotonic
from echo2.outside.guard import ProgressLines, ShowsProgress, cancel_all, shown
from echo2.trust.enrolment import find_coordinator, keep_renewed
from echo2.trust.identity import JoinLink
from echo2.trust.tls import Credentials, save_credentials
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from echo2.worker.base_checkpoint import BaseCheckpointLoader
from echo2.worker.control import CommandAnswer, ControlServer
from echo2.worker.engines.adapter import CONFIG_KEY
from echo2.worker.engines.engine import Engine, SwapMode
from echo2.worker.engines.making import ENGINES, Engines, parse_model_config
from echo2.worker.generation import Generation
from echo2.worker.heartbeat import LogTail, WorkerStatus, dialled_port, listen_host
from echo2.worker.links import CoordinatorCommands, CoordinatorLink, Reports, join
from echo2.worker.machine import Hardware, chosen_engine, findings, place_of, price_of, rate_finding, source_of, watch
from echo2.worker.options import WorkerOptions
from echo2.worker.weights import WeightReceiver, Weights

DRAIN_S = 2.0  # from SIGTERM to the last partial rollout handed back
CONNECT_S = 10.0  # timeout of one attempt to reach a peer
RECONNECT_S_MAX = 15.0  # longest backoff between two attempts
LEAVE_S = 0.5  # the farewell is one message; without it the coordinator waits out its own limit
_log = logging.getLogger("echo2.worker")


class WorkerDaemon:
    """One worker's process. Make it on the loop that runs it. `worker` is None until it has enrolled."""

    def __init__(
        self,
        options: WorkerOptions,
        progress: ShowsProgress | None = None,
        engines: Engines = ENGINES,
        log: LogTail | None = None,
    ) -> None:
        self._link = JoinLink.parse(options.join_link)
        if options.preemption_notice:
            source_of(options.preemption_notice)  # refuses a wrong one before anything starts
        self.options = replace(options, listen_host=listen_host(options, self._link))
        self.waits = Waits(SteadyClock())
        self.worker: Worker | None = None
        self._engines, self._progress, self._log = engines, progress or ProgressLines(_log), log
        self._stopped = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None

    @property
    def folder(self) -> Path:
        return self.options.folder

    def stop(self, reason: str = "asked to") -> None:
        """Asks for a drain and a clean end."""
        self._stopped.set()
        if self.worker is not None:
            self.worker.stop(reason)

    async def run(self) -> None:
        """Works until stopped. Raises the `EchoError` that ended it otherwise."""
        self._make_folder()
        control = ControlServer(self.folder, self._answer)
        await control.start()
        try:
            hardware = await self._inspect()
            warm_up = asyncio.create_task(asyncio.to_thread(self._engines.warm_up, hardware.engine))
            backoff = _backoff(self.options, "enrol")
            joining = asyncio.create_task(join(self._link, self.folder, self.waits, backoff))
            credentials = await unless(self._stopped, joining)
            if credentials is not None:
                shared = (self.waits, self._progress, self._log)
                self.worker = Worker(self.options, self._link, credentials, hardware, self._engines, *shared)
                await self.worker.run(warm_up)
        finally:
            await control.stop()

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            kind = DiskFull if error.errno in NO_ROOM else ResourceError
            raise kind(f"{self.folder}: expected to make this worker's folder, got {error.strerror}") from None

    async def _inspect(self) -> Hardware:
        machine = await asyncio.to_thread(self._engines.look, self.folder)
        section = self.options.config.worker
        engine, price = chosen_engine(section.engine, machine), price_of(section.price_usd_per_hour, os.environ)
        _log.info("this machine: %s; engine: %s", machine.describe(), engine)
        return Hardware(machine, engine, price, *place_of(section.place, os.environ), self._engines.memory_bytes)

    async def _answer(self, command: str) -> CommandAnswer:
        """The owner's commands."""
        worker = self.worker
        match command:
            case "leave":
                self.stop("asked to leave")
                return {"text": "handing back what is held, then leaving"}
            case "drain":
                self._leaving = asyncio.create_task(self._stop_once_drained())
                held = len(worker.leases.lease_ids) if worker is not None else 0
                return {"text": f"finishing {held} leases, then leaving"}
            case "status":
                return worker.status.answer() if worker is not None else {"waits_for": self.waits.longest()[0]}
            case _:
                raise ProtocolError(f"command: expected status, drain or leave, got {command[:40]}")

    async def _stop_once_drained(self) -> None:
        if self.worker is not None:
            self.worker.leases.finish_up()
            await self.worker.generation.drained.wait()
        self.stop("drained")


class Worker:
    """One worker, once it holds credentials. Make it on the loop that runs it. `weights` is None until the engine has started."""

    def __init__(
        self,
        options: WorkerOptions,
        link: JoinLink,
        credentials: Credentials,
        hardware: Hardware,
        engines: Engines,
        waits: Waits,
        progress: ShowsProgress,
        log: LogTail | None,
    ) -> None:
        self.weights: Weights | None = None
        self._options, self._link, self._credentials, self._hardware = options, link, credentials, hardware
        self._engines, self._waits, self._progress = engines, waits, progress
        self._ending, self._stop_reason, self._is_dismissed = asyncio.Event(), "", False
        self._failure: BaseException | None = None
        self._parts: list[asyncio.Task[None]] = []
        clock = SteadyClock()
        self.node = BroadcastNode(credentials, _node_options(options), NodeCalls(met=self._on_host_facts))
        backoff = _backoff(options, "coordinator")
        self.coordinator = CoordinatorLink(ControlSession(credentials, waits, backoff, CONNECT_S))
        self.reports = Reports(credentials, waits, _backoff(options, "learner"), CONNECT_S)
        self.generation = Generation(clock, self.reports, self.coordinator)
        self.leases = self.generation.leases
        port = self.node.listen()
        self.status = WorkerStatus(options, hardware, self.generation, self.reports, self.node, port, waits, log)
        told = (clock, self.status.add_finding)
        self._commands = CoordinatorCommands(self.coordinator, self.leases, self.reports, self.node, *told)

    async def run(self, warm_up: asyncio.Task[None]) -> None:
        """Works until stopped or dismissed; raises the error of the first part that failed. `warm_up` compiles kernels."""
        for finding in findings(self._hardware.machine, self._options.folder):
            self.status.add_finding(finding)
        self._waits.begin("learner", "the learner to join the run")
        try:
            await unless(self._ending, asyncio.create_task(self.node.start()))  # it reads all chunks of the run before
            if self._ending.is_set():
                return
            self._start(self._talk(), "session")
            self._start(self.reports.run(self.leases), "reports")
            self._start(self._generate(warm_up), "generation")
            self._start(keep_renewed(self._credentials, self._save), "certificate")
            if self._options.preemption_notice:
                self._start(watch(source_of(self._options.preemption_notice), self.stop), "preemption")
            await self._ending.wait()
            if self._failure is not None:
                raise self._failure
            if not self._is_dismissed:  # else the session has ended, so leases can no longer be handed back
                await self._drain()
        finally:
            await self.close()

    def stop(self, reason: str) -> None:
        """Asks for a drain and a clean end."""
        if not self._stop_reason:
            _log.info("stopping: %s", reason)
            self._stop_reason = reason
            self._ending.set()

    async def close(self) -> None:
        await cancel_all(self._parts)
        if self.weights is not None:
            self.weights.close()
        if self.generation.engine is not None:
            with contextlib.suppress(EchoError, TimeoutError):
                await self.generation.engine.stop()
        self.generation.close()
        await self.node.stop()

    def _start(self, work: Coroutine[Any, Any, None], name: str, *, may_end: bool = False) -> None:
        task = asyncio.create_task(work, name=name)
        self._parts.append(task)
        task.add_done_callback(partial(self._on_part_ended, may_end=may_end))

    def _on_part_ended(self, task: asyncio.Task[None], *, may_end: bool) -> None:
        """Ends the worker: a part that fails, or ends before the worker does, has failed."""
        if task.cancelled() or self._ending.is_set() or (may_end and task.exception() is None):
            return
        self._failure = task.exception() or AssertionError(f"{task.get_name()} ended without a reason")
        self._ending.set()

    async def _drain(self) -> None:
        began, held = monotonic(), len(self.leases.lease_ids)
        self.leases.drain(DRAIN_S, self._stop_reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S + LEAVE_S):
                await self.generation.drained.wait()
        if held:
            took_s, lost = monotonic() - began, self.generation.unheld_tokens
            _log.info("handed back %d leases in %.2f s; %d tokens were not delivered", held, took_s, lost)
        await self.coordinator.leave(self._stop_reason, LEAVE_S)

    async def _talk(self) -> None:
        """Keeps the session with the coordinator until that refuses this worker. A dismissal ends the worker without an error."""
        try:
            find = partial(find_coordinator, self._link, self._options.link_file, self._credentials, self._save)
            await self.coordinator.run(self.status, self._commands, find)
        except Dismissed as end:
            self._is_dismissed = True
            self.stop(str(end))

    def _save(self, credentials: Credentials) -> None:
        self.reports.reopen()
        save_credentials(self._options.folder, credentials)

    def _on_host_facts(self, facts: HostFacts) -> None:
        self.status.on_host_facts(facts)
        self.coordinator.send_heartbeat(self.status.heartbeat())

    async def _generate(self, warm_up: asyncio.Task[None]) -> None:
        """Once the model is known: makes the engine, starts receiving weights, and passes tokens to the leases."""
        await self._commands.learner_known.wait()
        learner, name = self._commands.learner, self._hardware.engine
        assert learner is not None, "the model is known"
        config, section = parse_model_config(learner.model_config_json), self._options.config.worker
        fit = self._engines.fit(
            name, config, self._options, self._hardware.machine, learner.longest_sequence_tokens,
            learner.full_snapshot_bytes,
        )  # fmt: skip
        base = self._base_checkpoint(learner, is_adapter=CONFIG_KEY in config, loads=fit.loads_base)
        self._start(base.offer_to(self.node), "base checkpoint", may_end=True)
        _log.info("engine: %s", fit.reason)
        self._waits.begin("engine", f"its {name} engine to start")
        await shown(self._progress, "compilation of kernels (kept for the next start)", warm_up)
        engine = await asyncio.to_thread(self._engines.make, name, config, self._options, fit)
        self.status.slot_count = engine.slot_count
        self.status.add_finding(await self._engines.reach(self.status.own_addresses))
        await shown(self._progress, f"load of the {name} engine", engine.start())
        self._waits.end("engine")
        swap_mode = SwapMode(section.swap_mode)
        kind, keeps_cache = f"{name} {section.quantisation}", swap_mode is SwapMode.KEEP_KV
        self.reports.set_engine(engine.draws_by_seed, keeps_cache=keeps_cache, kind=kind)
        model, on_decoded = (learner.model_digest, learner.model_config_json), self.node.planner.on_decoded
        self.weights = self.status.weights = Weights(engine, swap_mode, self.generation.gate, model, on_decoded)
        receiver = WeightReceiver(self.weights, self.node, self.generation, self._waits, base, self._progress)
        self._start(receiver.run(), "weights")
        self._start(self._request_work(engine, self.weights), "requests")
        await self.generation.run(engine)

    def _base_checkpoint(
        self, learner: coordinator_pb2.LearnerWhereabouts, *, is_adapter: bool, loads: bool
    ) -> BaseCheckpointLoader:
        """Looks for the base checkpoint, unless the store has a version already or the learner publishes an adapter: then the base
        is not a version, and the engine loads it itself."""
        names = ("", "") if is_adapter else (self._options.config.model.path, learner.model_name)
        has_version = any(held.is_complete and held.artifact.is_keyframe for held in self.node.artifacts_available())
        return BaseCheckpointLoader(
            self._credentials.run_id, *names, self._progress,
            keyframe_s=None if has_version else lambda: self.node.planner.keyframe_s(learner.full_snapshot_bytes),
            loads_ahead=loads and not has_version,
        )  # fmt: skip

    async def _request_work(self, engine: Engine, weights: Weights) -> None:
        """Measures the rate under the first version, before the first lease; then asks for work under each that goes live."""
        await weights.next_live()
        measurement = self.generation.measure_rate(engine)
        tokens_per_s = await shown(self._progress, "measurement of this machine's rate", measurement)
        self.leases.rates.declare(tokens_per_s)
        self.status.add_finding(rate_finding(tokens_per_s, engine.slot_count))
        while weights.live is not None:  # another version may have gone live during the measurement
            self.coordinator.send_heartbeat(self.status.heartbeat())
            self.leases.on_version_live(weights.live, engine.slot_count)
            await weights.next_live()


def _node_options(options: WorkerOptions) -> NodeOptions:
    return NodeOptions(
        folder=options.folder / "chunks",
        uplink_limit_bytes_per_s=options.config.worker.uplink_limit,
        shape=options.config.worker.emulated_link,
        seed=options.config.run.seed,
        host=options.listen_host,
        port=options.config.worker.port,
        nat=HostOptions(options.listen_host, own_port=dialled_port(options, 0)),
    )


def _backoff(options: WorkerOptions, name: str) -> Backoff:
    """The pauses between attempts; `name` says at what, and separates the random streams."""
    return Backoff(derived_rng(options.config.run.seed, "worker", options.name, name), longest_s=RECONNECT_S_MAX)
