"""The worker process: joins, receives weights, generates what it is given leases for, reports, and leaves in order.

`WorkerDaemon(options).run()` works until it is stopped, refused, or its engine fails; `stop(reason)` drains: partial
rollouts are handed back within `limits.drain_s`. Guarantees: whatever it waits for is in the log, the heartbeat and
`echo-worker status`; the end of any part ends the whole with that part's error. Waits for the coordinator, the
learner's whereabouts, weights, tokens, a stop. Leaves to others: decisions (worker/), each stream (its own module).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo2.base.errors import DiskFull, Dismissed, EchoError, ProtocolError, ResourceError, VersionMismatch
from echo2.base.ids import LeaseId, PeerId
from echo2.base.rng import derived_rng
from echo2.broadcast.runtime.node import BroadcastNode
from echo2.broadcast.runtime.node_options import NodeOptions
from echo2.broadcast.runtime.shaper import LinkShape
from echo2.broadcast.runtime.transport_mixed import MixedTransport, P2pSettings
from echo2.control.backoff import Backoff
from echo2.control.runtime.joining import unless
from echo2.control.runtime.session import ControlSession
from echo2.control.waits import Waits
from echo2.outside import SteadyClock
from echo2.trust.identity import JoinLink
from echo2.trust.runtime.enrolling import find_coordinator, keep_renewed
from echo2.trust.runtime.gate import GatedServer
from echo2.trust.runtime.tls import Credentials, bind_server, new_server, save_credentials, server_credentials
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from echo2.worker import duties, swap
from echo2.worker.assignments import Assignments
from echo2.worker.engine import Engine, SwapMode, TokenChunk
from echo2.worker.findings import clock_finding, rate_finding
from echo2.worker.model_digest import check_model
from echo2.worker.options import WorkerOptions
from echo2.worker.price import Price, price_of
from echo2.worker.runtime import machine as machine_check
from echo2.worker.runtime.addresses import advertised_addresses, listen_host
from echo2.worker.runtime.base_checkpoint import BaseCheckpointLoader
from echo2.worker.runtime.control import CommandAnswer, ControlServer
from echo2.worker.runtime.desk import Desk
from echo2.worker.runtime.engines.adapter import CONFIG_KEY
from echo2.worker.runtime.join import join
from echo2.worker.runtime.make_engine import ENGINES, Engines, parse_model_config
from echo2.worker.runtime.orders import Orders
from echo2.worker.runtime.preemption import source_of, watch
from echo2.worker.runtime.progress import ProgressLines, ShowsProgress
from echo2.worker.runtime.provider import tagged_price
from echo2.worker.runtime.rate import RateProbe
from echo2.worker.runtime.receiving import Receiving
from echo2.worker.runtime.reporting import Reporting
from echo2.worker.runtime.scoring import Scoring
from echo2.worker.runtime.session import SessionHooks, WorkerSession
from echo2.worker.runtime.telling import Telling, Whereabouts
from echo2.worker.runtime.weights import WeightKeeper, WeightsHooks
from echo2.worker.swap import SwapMachine
from echo2.worker.telemetry import RateWindow
from echo2.worker.token_gate import TokenGate

PUMP_PAUSE_S = 0.02
"""Between two looks for tokens: those of several steps then travel through the machine together."""
LEAVE_S = 0.5
_log = logging.getLogger("echo2.worker")


class WorkerDaemon:
    """One worker. Make it on the loop that runs it."""

    def __init__(
        self, options: WorkerOptions, progress: ShowsProgress | None = None, engines: Engines = ENGINES
    ) -> None:
        self._engines = engines
        link = JoinLink.parse(options.join_link)
        self.options = replace(options, listen_host=listen_host(options, link))
        self._progress: ShowsProgress = progress or ProgressLines()
        self.waits = Waits(SteadyClock())
        self._clock = SteadyClock()
        self._link = link
        if options.preemption_notice:
            source_of(options.preemption_notice)  # a wrong one is refused before anything starts
        self._stop_reason: str | None = None
        self._ending = asyncio.Event()
        self._failure: BaseException | None = None
        self._model_came = asyncio.Event()
        self._whereabouts: coordinator_pb2.LearnerWhereabouts | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.desk = Desk(Assignments(options.limits, options.report_interval_s), self._clock, RateWindow())
        self._gate = TokenGate(self._sampled, self._spoiled)
        self._scoring = Scoring(self._gate, self._clock)
        self._engine: Engine | None = None
        self._keeper: WeightKeeper | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._is_dismissed = False

    # -- life

    def stop(self, reason: str = "asked to") -> None:
        """Asks for a drain and a clean end."""
        if self._stop_reason is None:
            _log.info("stopping: %s", reason)
            self._stop_reason = reason
            self._ending.set()

    async def run(self) -> None:
        """Works until stopped. Raises the `EchoError` that ended it otherwise."""
        self._prepare_folder()
        control = ControlServer(self.options.folder, self.options.name, self._answer)
        await control.start()
        try:
            self._machine = await asyncio.to_thread(self._engines.look, self.options.folder)
            self._choice = machine_check.chosen_engine(self.options.engine, self._machine)
            _log.info("this machine: %s; engine: %s", self._machine.describe(), self._choice.value)
            self._price = await asyncio.to_thread(self._priced)
            self._warm_up = asyncio.create_task(asyncio.to_thread(self._engines.warm_up, self._choice))
            joining = asyncio.create_task(join(self._link, self.options.folder, self.waits, self._backoff("enrol")))
            credentials = await unless(self._ending, joining)
            if credentials is not None:
                await self._work(credentials)
        finally:
            self.desk.close()
            await control.stop()

    async def _work(self, credentials: Credentials) -> None:
        transport = MixedTransport(credentials)
        node = BroadcastNode(credentials, self._node_options(), transport)
        server = new_server()
        node.add_to_server(server)
        listen = f"{self.options.listen_host}:{self.options.listen_port}"
        port = bind_server(server, listen, server_credentials(credentials))
        transport.accept = node.accept
        if not self.options.advertised_addresses:  # told ones are not doubted
            transport.settings = P2pSettings(self.options.listen_host, grpc_port=port)
        await server.start()
        try:
            await node.start()
            orders = self._assemble(credentials, node, transport, port)
            self._start(self._talk(self._hooks(credentials, orders)), "session")
            self._start(self.reporting.run(), "reporting")
            self._start(self._generate(node), "generation")
            self._start(keep_renewed(credentials, self._keep), "certificate")
            if self.options.preemption_notice:
                self._start(watch(source_of(self.options.preemption_notice), self.stop), "preemption")
            await self._until_the_end()
        finally:
            await self._close(node, server)

    async def _talk(self, hooks: SessionHooks) -> None:
        """With the coordinator, until it refuses this worker. A worker that is sent home ends without an error."""
        try:
            await self.session.run(hooks)
        except Dismissed as end:
            self._is_dismissed = True
            self.stop(str(end))

    async def _until_the_end(self) -> None:
        """Returns after a drain that was asked for, or when it is sent home; raises what ended a part."""
        await self._ending.wait()
        if self._failure is not None:
            raise self._failure
        if self._is_dismissed:  # nobody is left to hand leases back to
            return
        await self._drain(self._stop_reason or "stopped")

    async def _drain(self, reason: str) -> None:
        begun = self._clock.now()
        within_s = self.options.limits.drain_s
        held = len(self.desk.machine.lease_ids)
        self.desk.send(duties.Drain(within_s, reason))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.desk.drained.wait(), within_s + LEAVE_S)
        if held:
            took_s = self._clock.now() - begun
            _log.info(
                "handed back %d leases in %.2f s; %d tokens were not delivered", held, took_s, self.desk.unheld_tokens
            )
        await self.session.leave(reason, LEAVE_S)

    async def _close(self, node: BroadcastNode, server: GatedServer) -> None:
        for task in self._tasks:
            task.cancel()
        if self._measuring is not None:
            self._measuring.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._keeper is not None:
            self._keeper.close()
        if self._engine is not None:
            with contextlib.suppress(EchoError):
                await self._engine.stop()
        await node.stop()
        await server.stop(0)

    # -- parts

    def _prepare_folder(self) -> None:
        try:
            self.options.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            kind = DiskFull if error.errno == 28 else ResourceError
            raise kind(f"{self.options.folder}: expected to make this worker's folder, got {error.strerror}") from None

    def _priced(self) -> Price:
        """What this machine costs; asks the provider only where nobody said it and a cloud was named."""
        known = price_of(self.options.price_usd_per_hour, os.environ)
        if known.source == "none given" and self.options.preemption_notice:
            known = price_of(0.0, os.environ, tagged_price(self.options.preemption_notice))
        _log.info("price: %g USD/h (%s)", known.usd_per_hour, known.source)
        return known

    def _node_options(self) -> NodeOptions:
        link = self.options.link
        return NodeOptions(
            folder=self.options.folder / "chunks",
            store_bytes=self.options.store_bytes,
            uplink_limit_bytes_per_s=self.options.uplink_limit_bytes_per_s,
            shape=LinkShape(link.uplink_bytes_per_s, link.downlink_bytes_per_s, link.rtt_s),
            seed=self.options.seed,
        )

    def _backoff(self, name: str) -> Backoff:
        rng = derived_rng(self.options.seed, "worker", self.options.name, name)
        return Backoff(rng, longest_s=self.options.limits.reconnect_s_max)

    def _keep(self, credentials: Credentials) -> None:
        save_credentials(self.options.folder, credentials)

    def _assemble(self, credentials: Credentials, node: BroadcastNode, transport: MixedTransport, port: int) -> Orders:
        connect_s = self.options.limits.connect_s
        self.reporting = Reporting(credentials, self.desk, self.waits, self._backoff("learner"), connect_s)
        self.reporting.scoring = self._scoring
        self.telling = Telling(
            self.options, self.desk, self.waits, node, self.reporting,
            Whereabouts(
                advertised_addresses(self.options, self._link, port), port, transport, credentials.coordinator_peer_id
            ),
            credentials.run_id, (self._machine.gpu_text, self._choice, self._price, self._engines.memory_bytes),
        )  # fmt: skip
        for finding in machine_check.findings(self._machine, self.options.folder, self.options.store_bytes):
            self.telling.found(finding)
        control = ControlSession[coordinator_pb2.WorkerMessage](
            credentials, self.waits, self._backoff("coordinator"), connect_s
        )
        self.session = WorkerSession(control)
        orders = Orders(
            self.desk, self.reporting, node, self._learner_is_at, credentials.peer_id, self._clock,
            lambda skew_s: self.telling.found(clock_finding(skew_s)), self.session.end_lease,
        )  # fmt: skip
        orders.use_relay = transport.use_relay
        orders.coordinator = credentials.coordinator_peer_id
        transport.changed = lambda _: self._tell_heartbeat()
        self.desk.learner = self.reporting
        self.desk.coordinator = self.session
        self.waits.begin("learner", "the learner to join the run")
        return orders

    def _hooks(self, credentials: Credentials, orders: Orders) -> SessionHooks:
        return SessionHooks(
            hello=self.telling.hello,
            heartbeat=lambda: self.telling.heartbeat(self._engine, self._keeper),
            welcomed=orders.welcomed,
            lost=lambda: self.desk.send(duties.CoordinatorLost()),
            ordered=orders.ordered,
            find=lambda: find_coordinator(self._link, self.options.link_file, credentials, self._keep),
        )

    def _tell_heartbeat(self) -> None:
        self.session.tell_heartbeat(self.telling.heartbeat(self._engine, self._keeper))

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._part_ended)

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        """No part ends before the whole does, but by a failure."""
        if not task.cancelled() and not self._ending.is_set():
            self._failure = task.exception() or AssertionError(f"{task.get_name()} ended without a reason")
            self._ending.set()

    # -- the learner and its model

    def _learner_is_at(self, whereabouts: coordinator_pb2.LearnerWhereabouts) -> None:
        known = self._whereabouts
        if known is not None and known.model_digest != whereabouts.model_digest:
            raise VersionMismatch(
                f"the learner's model: expected {known.model_name} (digest {known.model_digest[:16]}), it now trains "
                f"{whereabouts.model_name} ({whereabouts.model_digest[:16]}); start this worker anew"
            )
        if known is not None and known.longest_sequence_tokens < whereabouts.longest_sequence_tokens:
            raise VersionMismatch(
                f"the run's longest sequence: expected {known.longest_sequence_tokens} tokens, for which this worker's "
                f"memory is laid out, it is now {whereabouts.longest_sequence_tokens}; start this worker anew"
            )
        self._whereabouts = whereabouts
        self._model_came.set()

    async def _generate(self, node: BroadcastNode) -> None:
        """Once the model is known: an engine, weights for it, and its tokens to the desk."""
        await self._model_came.wait()
        whereabouts = self._whereabouts
        assert whereabouts is not None, "it came"
        config = parse_model_config(whereabouts.model_config_json)
        node.set_publisher(PeerId(whereabouts.peer_id), whereabouts.address)
        # Where an adapter is published, the base is no version; the engine loads it itself.
        names = ("", "") if CONFIG_KEY in config else (self.options.model_path, whereabouts.model_name)
        base = BaseCheckpointLoader(self.telling.run_id, *names)
        self._looking = asyncio.create_task(base.offer_to(node), name="base checkpoint")
        lengths = whereabouts.longest_sequence_tokens, whereabouts.full_snapshot_bytes
        fit = self._engines.fit(self._choice, config, self.options, self._machine, *lengths)
        _log.info("engine: %s", fit.reason)
        await self._warm_up
        engine = await asyncio.to_thread(self._engines.make, self._choice, config, self.options, fit)
        self.telling.slot_count = engine.slot_count
        self._probe = RateProbe(engine)
        self.telling.found(await self._engines.reach(self.telling.where.advertised))
        self._progress.at(f"load of the {self._choice.value} engine", 0, 0)
        await engine.start()
        self._progress.ended(f"load of the {self._choice.value} engine")
        self._engine = self.desk.engine = self._scoring.engine = engine
        self.reporting.draws_by_seed = engine.draws_by_seed
        self.reporting.keeps_cache = self.options.swap_mode is SwapMode.KEEP_KV

        def check(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> None:
            check_model(whereabouts.model_digest, whereabouts.model_config_json, tensors)

        hooks = WeightsHooks(
            check_model=check, live=self._live, start_over=lambda version, _: receiving.start_over(version),
            decoded=node.following.decoded,
        )  # fmt: skip
        machine = SwapMachine(self.options.swap_mode)
        self._keeper = WeightKeeper(engine, machine, self._gate, self._clock, hooks, self.options.folder)
        receiving = Receiving(node, self._keeper, self.desk, self.waits, base, self._progress)
        self._start(receiving.run(), "weights")
        await self._pump(engine)

    async def _pump(self, engine: Engine) -> None:
        while chunks := await engine.next_chunks():
            self._gate.take(self._probe.without_probe(chunks))
            await asyncio.sleep(PUMP_PAUSE_S)

    def _sampled(self, chunks: tuple[TokenChunk, ...]) -> None:
        self.desk.rates.sampled(sum(len(chunk.token_ids) for chunk in chunks), self._clock.now())
        self.desk.send(duties.Sampled(chunks))

    def _spoiled(self, lease_id: LeaseId) -> None:
        self.desk.send(duties.Revoked(lease_id, "its tokens were sampled by weights of no version"))

    def _live(self, live: swap.GoLive) -> None:
        assert self._engine is not None, "weights are live on an engine"
        _log.info(
            "version %d is live: paused for %.0f ms, %.0f ms after arrival",
            live.version, 1e3 * live.stood_still_s, 1e3 * live.apply_s,
        )  # fmt: skip
        self._scoring.live(live.version)
        if self._measuring is None:
            self._measuring = asyncio.create_task(self._measure_rate())
        elif self._measuring.done():
            self._offer_work()

    async def _measure_rate(self) -> None:
        """Before the first lease: how fast this machine is. Then it offers itself."""
        tokens_per_s = await self._probe.run()
        self.desk.rates.declare(tokens_per_s)
        assert self._engine is not None, "it was measured"
        self.telling.found(rate_finding(tokens_per_s, self._engine.slot_count))
        self._offer_work()

    def _offer_work(self) -> None:
        assert self._engine is not None and self._keeper is not None, "weights are live on an engine"
        live = self._keeper.machine.live
        assert live is not None, "a version is live"
        self._tell_heartbeat()
        self.desk.send(duties.Live(live, self._engine.slot_count))

    # -- the owner's commands

    async def _answer(self, command: str) -> CommandAnswer:
        if command == "leave":
            self.stop("asked to leave")
            return {"text": "handing back what is held, then leaving"}
        if command == "drain":
            self.desk.send(duties.FinishUp())
            self._leaving = asyncio.create_task(self._stop_once_drained())
            return {"text": f"finishing {len(self.desk.machine.lease_ids)} leases, then leaving"}
        if command != "status":
            raise ProtocolError(f"command: expected status, drain or leave, got {command[:40]}")
        if not hasattr(self, "telling"):
            return {"waits_for": self.waits.longest()[0]}
        return self.telling.status(self._engine, self._keeper)

    async def _stop_once_drained(self) -> None:
        await self.desk.drained.wait()
        self.stop("drained")

    @property
    def keeper(self) -> WeightKeeper | None:
        """None until the engine is here."""
        return self._keeper

    @property
    def folder(self) -> Path:
        return self.options.folder
