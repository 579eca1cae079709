"""The worker: `WorkerDaemon` is its process, which inspects the machine, enrols and answers the owner's commands; `Worker` is the
enrolled worker, which generates rollouts until it is stopped, dismissed, or a part fails.

Guarantees: the end of any part ends the worker with that part's error; a stop drains: it hands partial rollouts back within
`limits.drain_s`; whatever the worker waits for is in the log, the heartbeat and `echo-worker status`.

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

from echo2.base.errors import DiskFull, Dismissed, EchoError, ProtocolError, ResourceError, VersionMismatch
from echo2.base.ids import LeaseId, PeerId, Version
from echo2.base.rng import derived_rng
from echo2.broadcast.nat.facts import HostFacts, HostOptions
from echo2.broadcast.node import BroadcastNode, NodeCalls, NodeOptions
from echo2.control.session import ControlSession, unless
from echo2.control.waits import Backoff, Waits
from echo2.outside import SteadyClock
from echo2.outside.ending import cancel_all
from echo2.trust.enrolment import find_coordinator, keep_renewed
from echo2.trust.identity import JoinLink
from echo2.trust.tls import Credentials, save_credentials
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from echo2.worker import leases
from echo2.worker.base_checkpoint import BaseCheckpointLoader
from echo2.worker.control import CommandAnswer, ControlServer
from echo2.worker.engines.adapter import CONFIG_KEY
from echo2.worker.engines.engine import Engine, SwapMode, TokenChunk
from echo2.worker.engines.making import ENGINES, Engines, parse_model_config
from echo2.worker.heartbeat import LogTail, Reach, WorkerStatus
from echo2.worker.leases import Leases
from echo2.worker.leases_service import LeaseService
from echo2.worker.links import CoordinatorCommands, CoordinatorLink, dialled_port, join, listen_host, own_addresses
from echo2.worker.machine import (
    Hardware,
    MachinePlace,
    chosen_engine,
    clock_finding,
    findings,
    place_of,
    price_of,
    rate_finding,
    source_of,
    watch,
)
from echo2.worker.options import WorkerOptions
from echo2.worker.progress import ProgressLines, ShowsProgress, shown
from echo2.worker.rates import RateProbe
from echo2.worker.reports import Reports
from echo2.worker.rollouts import TokenGate
from echo2.worker.weights import WeightReceiver, Weights

PUMP_PAUSE_S = 0.02
"""Pause between two reads of the engine's tokens, so that tokens of several steps pass through the leases together."""
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
        self._engines, self._progress, self._log = engines, progress or ProgressLines(), log
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
        control = ControlServer(self.folder, self.options.name, self._answer)
        await control.start()
        try:
            hardware = await self._inspect()
            warm_up = asyncio.create_task(asyncio.to_thread(self._engines.warm_up, hardware.engine))
            backoff = _backoff(self.options, "enrol")
            joining = asyncio.create_task(join(self._link, self.folder, self.waits, backoff))
            credentials = await unless(self._stopped, joining)
            if credentials is not None:
                self.worker = Worker(
                    self.options,
                    self._link,
                    credentials,
                    hardware,
                    self._engines,
                    self.waits,
                    self._progress,
                    self._log,
                )
                await self.worker.run(warm_up)
        finally:
            await control.stop()

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            kind = DiskFull if error.errno == 28 else ResourceError
            raise kind(f"{self.folder}: expected to make this worker's folder, got {error.strerror}") from None

    async def _inspect(self) -> Hardware:
        machine = await asyncio.to_thread(self._engines.look, self.folder)
        section = self.options.config.worker
        engine, price = chosen_engine(section.engine, machine), price_of(section.price_usd_per_hour, os.environ)
        _log.info("this machine: %s; engine: %s", machine.describe(), engine)
        _log.info("price: %g USD/h (%s)", price.usd_per_hour, price.source)
        return Hardware(machine, engine, price, place_of(MachinePlace(section.provider, section.region), os.environ))

    async def _answer(self, command: str) -> CommandAnswer:
        """The owner's commands."""
        worker = self.worker
        match command:
            case "leave":
                self.stop("asked to leave")
                return {"text": "handing back what is held, then leaving"}
            case "drain":
                self._leaving = asyncio.create_task(self._stop_once_drained())
                held = len(worker.leases.machine.lease_ids) if worker is not None else 0
                return {"text": f"finishing {held} leases, then leaving"}
            case "status":
                return worker.status.answer() if worker is not None else {"waits_for": self.waits.longest()[0]}
            case _:
                raise ProtocolError(f"command: expected status, drain or leave, got {command[:40]}")

    async def _stop_once_drained(self) -> None:
        if self.worker is not None:
            self.worker.leases.send(leases.FinishUp())
            await self.worker.leases.drained.wait()
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
        self.options, self.waits = options, waits
        self.weights: Weights | None = None
        self._link, self._credentials, self._hardware = link, credentials, hardware
        self._engines, self._progress, self._clock = engines, progress, SteadyClock()
        self._learner: coordinator_pb2.LearnerWhereabouts | None = None
        self._model_known, self._ending = asyncio.Event(), asyncio.Event()
        self._stop_reason, self._is_dismissed = "", False
        self._failure: BaseException | None = None
        self._parts: list[asyncio.Task[None]] = []
        self._base: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[None] | None = None
        self.node = BroadcastNode(credentials, _node_options(options), NodeCalls(met=self._on_host_facts))
        port = self.node.listen()
        connect_s = options.limits.connect_s
        self.coordinator = CoordinatorLink(
            ControlSession[coordinator_pb2.WorkerMessage](
                credentials, waits, _backoff(options, "coordinator"), connect_s
            )
        )
        self.reports = Reports(credentials, waits, _backoff(options, "learner"), connect_s)
        self.leases = LeaseService(Leases(options.limits), self._clock, self.reports, self.coordinator)
        self._gate = TokenGate(self._on_tokens, self._on_spoiled)
        own = own_addresses(options, link, port)
        self.status = WorkerStatus(
            options, credentials, hardware, (self.leases, self.reports, self.node, waits),
            Reach(
                list(options.advertised_addresses) or own, own, dialled_port(options, port),
                bool(options.advertised_addresses), self.node.nat, credentials.coordinator_peer_id,
            ),
            engines.memory_bytes, log,
        )  # fmt: skip
        self._commands = CoordinatorCommands(
            credentials, self.coordinator, self.leases, self.reports, self.node, self, self._clock
        )

    # -- life

    def stop(self, reason: str) -> None:
        """Asks for a drain and a clean end."""
        if not self._stop_reason:
            _log.info("stopping: %s", reason)
            self._stop_reason = reason
            self._ending.set()

    async def run(self, warm_up: asyncio.Task[None]) -> None:
        """Works until stopped or dismissed; raises the error of the first part that failed. `warm_up` compiles kernels."""
        for finding in findings(self._hardware.machine, self.options.folder):
            self.status.add_finding(finding)
        self.waits.begin("learner", "the learner to join the run")
        try:
            await self.node.start()
            self._start(self._talk(), "session")
            self._start(self.reports.run(self.leases.send), "reports")
            self._start(self._generate(warm_up), "generation")
            self._start(keep_renewed(self._credentials, self._save), "certificate")
            if self.options.preemption_notice:
                self._start(watch(source_of(self.options.preemption_notice), self.stop), "preemption")
            await self._ending.wait()
            if self._failure is not None:
                raise self._failure
            if not self._is_dismissed:  # else the session has ended, so leases can no longer be handed back
                await self._drain()
        finally:
            await self.close()

    async def close(self) -> None:
        await cancel_all([*self._parts, *(task for task in (self._base, self._measuring) if task is not None)])
        if self.weights is not None:
            self.weights.close()
        if self.leases.engine is not None:
            with contextlib.suppress(EchoError):
                await self.leases.engine.stop()
        self.leases.close()
        await self.node.stop()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._parts.append(task)
        task.add_done_callback(self._on_part_ended)

    def _on_part_ended(self, task: asyncio.Task[None]) -> None:
        """Ends the worker: a part that ends before the worker does has failed."""
        if not task.cancelled() and not self._ending.is_set():
            self._failure = task.exception() or AssertionError(f"{task.get_name()} ended without a reason")
            self._ending.set()

    async def _drain(self) -> None:
        began, within_s = self._clock.now(), self.options.limits.drain_s
        held = len(self.leases.machine.lease_ids)
        self.leases.send(leases.Drain(within_s, self._stop_reason))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.leases.drained.wait(), within_s + LEAVE_S)
        if held:
            took_s, lost = self._clock.now() - began, self.leases.unheld_tokens
            _log.info("handed back %d leases in %.2f s; %d tokens were not delivered", held, took_s, lost)
        await self.coordinator.leave(self._stop_reason, LEAVE_S)

    # -- the coordinator

    async def _talk(self) -> None:
        """Keeps the session with the coordinator until that refuses this worker. A dismissal ends the worker without an error."""
        try:
            await self.coordinator.run(self.status, self._commands, self._find)
        except Dismissed as end:
            self._is_dismissed = True
            self.stop(str(end))

    async def _find(self) -> None:
        await find_coordinator(self._link, self.options.link_file, self._credentials, self._save)

    def _save(self, credentials: Credentials) -> None:
        save_credentials(self.options.folder, credentials)

    def _on_host_facts(self, facts: HostFacts) -> None:
        self.status.on_host_facts(facts)
        self.coordinator.send_heartbeat(self.status.heartbeat())

    def on_skew(self, skew_s: float) -> None:
        self.status.add_finding(clock_finding(skew_s))

    def use_relay(self, peer_id: PeerId, address: str) -> None:
        self.node.nat.use_relay(peer_id, address)

    def on_learner(self, learner: coordinator_pb2.LearnerWhereabouts) -> None:
        known = self._learner
        if known is not None and known.model_digest != learner.model_digest:
            raise VersionMismatch(
                f"the learner's model: expected {known.model_name} (digest {known.model_digest[:16]}), it now trains "
                f"{learner.model_name} ({learner.model_digest[:16]}); start this worker anew"
            )
        # 0: the learner had not said, so memory is laid out for the model's whole context.
        known_tokens = known.longest_sequence_tokens if known is not None else 0
        if 0 < known_tokens < learner.longest_sequence_tokens:
            raise VersionMismatch(
                f"the run's longest sequence: expected {known_tokens} tokens, for which this worker's "
                f"memory is laid out, it is now {learner.longest_sequence_tokens}; start this worker anew"
            )
        self._learner = learner
        self._model_known.set()

    # -- engine and weights

    async def _generate(self, warm_up: asyncio.Task[None]) -> None:
        """Once the model is known: makes the engine, starts receiving weights, and passes tokens to the leases."""
        await self._model_known.wait()
        learner = self._learner
        assert learner is not None, "the model is known"
        config, engine_name = parse_model_config(learner.model_config_json), self._hardware.engine
        swap_mode = SwapMode(self.options.config.worker.swap_mode)
        self.node.set_publisher(PeerId(learner.peer_id), learner.chunk_address)
        fit = self._engines.fit(
            self._hardware.engine, config, self.options, self._hardware.machine, learner.longest_sequence_tokens,
            learner.full_snapshot_bytes,
        )  # fmt: skip
        base = self._seek_base(learner, is_adapter=CONFIG_KEY in config, loads=fit.loads_base)
        _log.info("engine: %s", fit.reason)
        await shown(self._progress, "compilation of kernels (kept for the next start)", warm_up)
        engine = await asyncio.to_thread(self._engines.make, self._hardware.engine, config, self.options, fit)
        self.status.slot_count = engine.slot_count
        self.status.add_finding(await self._engines.reach(self.status.reach.own))
        await shown(self._progress, f"load of the {engine_name} engine", engine.start())
        self.leases.engine = engine
        self.reports.set_engine(
            engine.draws_by_seed,
            keeps_cache=swap_mode is SwapMode.KEEP_KV,
            kind=f"{engine_name} {self.options.config.worker.quantisation}",
        )
        probe = RateProbe(engine)
        receiver = WeightReceiver(
            self.node, self.leases, self.waits, base, self._progress, partial(self._on_live, engine, probe)
        )
        model = learner.model_digest, learner.model_config_json
        weights = Weights(engine, swap_mode, self._gate, self._clock, receiver, model, self.options.folder)
        self.weights = self.status.weights = weights
        self._start(receiver.run(weights), "weights")
        while chunks := await engine.next_chunks():
            self._gate.take(probe.without_probe(chunks))
            await asyncio.sleep(PUMP_PAUSE_S)

    def _seek_base(
        self, learner: coordinator_pb2.LearnerWhereabouts, *, is_adapter: bool, loads: bool
    ) -> BaseCheckpointLoader:
        """Looks for the base checkpoint, unless the store has a version already or the learner publishes an adapter: then the base
        is not a version, and the engine loads it itself."""
        planner, names = (
            self.node.planner,
            ("", "") if is_adapter else (self.options.config.model.path, learner.model_name),
        )
        has_version = any(held.is_complete and held.artifact.is_keyframe for held in self.node.artifacts_available())
        base = BaseCheckpointLoader(
            self._credentials.run_id, *names,
            keyframe_s=None if has_version else lambda: planner.keyframe_s(learner.full_snapshot_bytes),
            loads_ahead=loads and not has_version,
        )  # fmt: skip
        self._base = asyncio.create_task(base.offer_to(self.node), name="base checkpoint")
        return base

    def _on_tokens(self, chunks: tuple[TokenChunk, ...]) -> None:
        self.leases.rates.sampled(sum(len(chunk.token_ids) for chunk in chunks), self._clock.now())
        self.leases.send(leases.Sampled(chunks))

    def _on_spoiled(self, lease_id: LeaseId) -> None:
        self.leases.send(leases.Revoked(lease_id, "its tokens were sampled by weights of no version"))

    def _on_live(self, engine: Engine, probe: RateProbe, version: Version) -> None:
        """The first version: measures the rate before the first lease. Then asks for work."""
        if self._measuring is None:
            self._measuring = asyncio.create_task(self._measure_rate(engine, probe))
        elif self._measuring.done():
            self._request_work(version, engine)

    async def _measure_rate(self, engine: Engine, probe: RateProbe) -> None:
        tokens_per_s = await shown(self._progress, "measurement of this machine's rate", probe.run())
        self.leases.rates.declare(tokens_per_s)
        self.status.add_finding(rate_finding(tokens_per_s, engine.slot_count))
        assert self.weights is not None and self.weights.live is not None, "a version is live"
        self._request_work(self.weights.live, engine)

    def _request_work(self, version: Version, engine: Engine) -> None:
        self.coordinator.send_heartbeat(self.status.heartbeat())
        self.leases.send(leases.VersionLive(version, engine.slot_count))


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
    return Backoff(
        derived_rng(options.config.run.seed, "worker", options.name, name), longest_s=options.limits.reconnect_s_max
    )
