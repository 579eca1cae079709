"""Assembles the parts of an enrolled worker in one place, and runs them until they end.

Guarantees: the constructor gives every part all that it calls, so no part is ever half connected; the end of any part ends the
shift with that part's error; a drain hands partial rollouts back within `limits.drain_s`. Waits for the learner's address and
model, weights, tokens, a stop. Leaves to others: decisions (worker/), each stream (its own module), enrolling and the owner's
commands (daemon).

      Shift(...)          run                 model known            first version live        stop, or a part failed
    [assembled] -> [joined, no model] -> [engine starts] -> [measures its rate] -> [works] -> [drains] -> closed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from echo2.base.errors import Dismissed, EchoError, VersionMismatch
from echo2.base.hosts import joined
from echo2.base.ids import LeaseId, PeerId
from echo2.base.rng import derived_rng
from echo2.broadcast.runtime.node import BroadcastNode
from echo2.broadcast.runtime.node_options import NodeOptions, bulk_port_beside
from echo2.broadcast.runtime.p2p.host_facts import HostFacts
from echo2.broadcast.runtime.transport import Connection
from echo2.broadcast.runtime.transport_mixed import MixedTransport, P2pSettings
from echo2.control.backoff import Backoff
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
from echo2.worker.options import EngineChoice, WorkerOptions
from echo2.worker.price import Price
from echo2.worker.runtime import machine as machine_check
from echo2.worker.runtime.addresses import advertised_addresses, dialled_port, own_addresses
from echo2.worker.runtime.base_checkpoint import BaseCheckpointLoader
from echo2.worker.runtime.control import CommandAnswer
from echo2.worker.runtime.desk import Desk
from echo2.worker.runtime.engines.adapter import CONFIG_KEY
from echo2.worker.runtime.machine import WorkerMachine
from echo2.worker.runtime.make_engine import Engines, parse_model_config
from echo2.worker.runtime.orders import OrderCalls, Orders
from echo2.worker.runtime.preemption import source_of, watch
from echo2.worker.runtime.progress import ShowsProgress, shown
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
"""Pause between two reads of the engine's tokens, so that tokens of several steps pass through the state machine together."""
LEAVE_S = 0.5
_log = logging.getLogger("echo2.worker")


@dataclass(frozen=True, slots=True)
class Equipment:
    """What was determined about this machine before the worker joined. `warm_up` compiles kernels in the background."""

    machine: WorkerMachine
    choice: EngineChoice
    price: Price
    warm_up: asyncio.Task[None]


class Shift:
    """One per worker, once it holds credentials. Make it on the loop that runs it."""

    def __init__(
        self,
        options: WorkerOptions,
        link: JoinLink,
        credentials: Credentials,
        equipment: Equipment,
        engines: Engines,
        waits: Waits,
        progress: ShowsProgress,
    ) -> None:
        self.options, self.waits = options, waits
        self._link, self._credentials, self._equipment = link, credentials, equipment
        self._engines, self._progress, self._clock = engines, progress, SteadyClock()
        self._stop_reason: str | None = None
        self._ending = asyncio.Event()
        self._failure: BaseException | None = None
        self._is_dismissed = False
        self._model_came = asyncio.Event()
        self._whereabouts: coordinator_pb2.LearnerWhereabouts | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._measuring: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self.keeper: WeightKeeper | None = None  # None until the engine has started
        self._server = new_server()
        port = bind_server(
            self._server, joined(options.listen_host, options.listen_port), server_credentials(credentials)
        )
        outer_port, is_told = dialled_port(options, port), bool(options.advertised_addresses)
        settings = P2pSettings(options.listen_host, grpc_port=outer_port)
        transport = MixedTransport(credentials, self._accept, settings, self._met_as)
        self.node = BroadcastNode(credentials, _node_options(options, port), transport)
        self.node.add_to_server(self._server)
        connect_s = options.limits.connect_s
        self.session = WorkerSession(
            ControlSession[coordinator_pb2.WorkerMessage](
                credentials, waits, worker_backoff(options, "coordinator"), connect_s
            )
        )
        self._gate = TokenGate(self._sampled, self._spoiled)
        self._scoring = Scoring(self._gate, self._clock)
        self.reporting = Reporting(
            credentials, self._send, waits, worker_backoff(options, "learner"), connect_s, self._scoring
        )
        assignments = Assignments(options.limits, options.report_interval_s)
        self.desk = Desk(assignments, self._clock, RateWindow(), self.reporting, self.session)
        advertised, own = advertised_addresses(options, link, port), own_addresses(options, link, port)
        self.telling = Telling(
            options, self.desk, waits, self.node, self.reporting,
            Whereabouts(advertised, own, outer_port, is_told, transport, credentials.coordinator_peer_id),
            credentials.run_id,
            (equipment.machine.gpu_text, equipment.choice, equipment.price, engines.memory_bytes),
        )  # fmt: skip
        self._orders = Orders(
            self.desk, self.reporting, self.node, credentials,
            OrderCalls(
                learner_is_at=self._learner_is_at,
                skew_is=lambda skew_s: self.telling.found(clock_finding(skew_s)),
                refuse=self.session.end_lease,
                use_relay=transport.use_relay,
            ),
            self._clock,
        )  # fmt: skip

    # -- life

    def stop(self, reason: str) -> None:
        """Asks for a drain and a clean end."""
        if self._stop_reason is None:
            _log.info("stopping: %s", reason)
            self._stop_reason = reason
            self._ending.set()

    async def run(self) -> None:
        """Works until stopped. Raises the error of the first part that failed."""
        for finding in machine_check.findings(self._equipment.machine, self.options.folder, self.options.store_bytes):
            self.telling.found(finding)
        self.waits.begin("learner", "the learner to join the run")
        await self._server.start()
        try:
            await self.node.start()
            self._start(self._talk(), "session")
            self._start(self.reporting.run(), "reporting")
            self._start(self._generate(self.node), "generation")
            self._start(keep_renewed(self._credentials, self._keep), "certificate")
            if self.options.preemption_notice:
                self._start(watch(source_of(self.options.preemption_notice), self.stop), "preemption")
            await self._until_the_end()
        finally:
            await self._close(self.node, self._server)

    async def drained(self) -> None:
        """Takes no new leases, finishes those held, and returns once none is left."""
        self.desk.send(duties.FinishUp())
        await self.desk.drained.wait()

    async def _accept(self, connection: Connection) -> None:
        await self.node.accept(connection)

    def _send(self, event: duties.Event) -> None:
        self.desk.send(event)

    async def _talk(self) -> None:
        """Keeps the session with the coordinator until that refuses this worker. A dismissal ends the worker without an error."""
        try:
            await self.session.run(self._hooks())
        except Dismissed as end:
            self._is_dismissed = True
            self.stop(str(end))

    async def _until_the_end(self) -> None:
        """Returns after a requested drain or a dismissal; raises the error of a part that ended."""
        await self._ending.wait()
        if self._failure is not None:
            raise self._failure
        if self._is_dismissed:  # the session has ended, so leases can no longer be handed back
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
        for beside in (self._measuring, self._looking):
            if beside is not None:
                beside.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.keeper is not None:
            self.keeper.close()
        if self._engine is not None:
            with contextlib.suppress(EchoError):
                await self._engine.stop()
        await node.stop()
        await server.stop(0)

    def _keep(self, credentials: Credentials) -> None:
        save_credentials(self.options.folder, credentials)

    def _hooks(self) -> SessionHooks:
        return SessionHooks(
            hello=self.telling.hello,
            heartbeat=self._heartbeat,
            welcomed=self._orders.welcomed,
            lost=lambda: self.desk.send(duties.CoordinatorLost()),
            ordered=self._orders.ordered,
            find=lambda: find_coordinator(self._link, self.options.link_file, self._credentials, self._keep),
        )

    def _heartbeat(self) -> coordinator_pb2.Heartbeat:
        return self.telling.heartbeat(self._engine, self.keeper)

    def _met_as(self, facts: HostFacts) -> None:
        self.telling.met_as(facts)
        self._tell_heartbeat()

    def _tell_heartbeat(self) -> None:
        self.session.tell_heartbeat(self._heartbeat())

    def status(self) -> CommandAnswer:
        return self.telling.status(self._engine, self.keeper)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._part_ended)

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        """Ends the shift: a part that ends before the shift does has failed."""
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
        # 0: the learner had not said, so memory is laid out for the model's whole context.
        known_tokens = known.longest_sequence_tokens if known is not None else 0
        if 0 < known_tokens < whereabouts.longest_sequence_tokens:
            raise VersionMismatch(
                f"the run's longest sequence: expected {known_tokens} tokens, for which this worker's "
                f"memory is laid out, it is now {whereabouts.longest_sequence_tokens}; start this worker anew"
            )
        self._whereabouts = whereabouts
        self._model_came.set()

    async def _generate(self, node: BroadcastNode) -> None:
        """Once the model is known: makes the engine, starts receiving weights, and passes tokens to the desk."""
        await self._model_came.wait()
        whereabouts = self._whereabouts
        assert whereabouts is not None, "it came"
        config = parse_model_config(whereabouts.model_config_json)
        node.set_publisher(PeerId(whereabouts.peer_id), whereabouts.address)
        # If the learner publishes an adapter, the base is not a version; the engine loads it itself.
        names = ("", "") if CONFIG_KEY in config else (self.options.model_path, whereabouts.model_name)
        lengths = whereabouts.longest_sequence_tokens, whereabouts.full_snapshot_bytes
        fit = self._engines.fit(
            self._equipment.choice, config, self.options, self._equipment.machine, *lengths,
            is_audited=not whereabouts.audits_nothing,
        )  # fmt: skip
        has_version = any(one.is_complete and one.artifact.is_keyframe for one in node.artifacts_available())
        base = BaseCheckpointLoader(
            self.telling.run_id, *names,
            keyframe_s=None if has_version else lambda: node.following.keyframe_s(whereabouts.full_snapshot_bytes),
            loads_ahead=fit.loads_base and not has_version,
        )  # fmt: skip
        self._looking = asyncio.create_task(base.offer_to(node), name="base checkpoint")
        _log.info("engine: %s", fit.reason)
        await shown(self._progress, "compilation of kernels (kept for the next start)", self._equipment.warm_up)
        engine = await asyncio.to_thread(self._engines.make, self._equipment.choice, config, self.options, fit)
        self.telling.slot_count = engine.slot_count
        probe = RateProbe(engine)
        self.telling.found(await self._engines.reach(self.telling.where.own))
        await shown(self._progress, f"load of the {self._equipment.choice.value} engine", engine.start())
        self._engine = self._scoring.engine = engine
        self.desk.take(engine)
        self.reporting.tell_habits(engine.draws_by_seed, keeps_cache=self.options.swap_mode is SwapMode.KEEP_KV)

        def check(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> None:
            check_model(whereabouts.model_digest, whereabouts.model_config_json, tensors)

        hooks = WeightsHooks(
            check_model=check, live=lambda live: self._live(live, engine, probe),
            start_over=lambda version, _: receiving.start_over(version),
            decoded=node.following.decoded,
        )  # fmt: skip
        machine = SwapMachine(self.options.swap_mode)
        self.keeper = WeightKeeper(engine, machine, self._gate, self._clock, hooks, self.options.folder)
        receiving = Receiving(node, self.keeper, self.desk, self.waits, base, self._progress)
        self._start(receiving.run(), "weights")
        await self._pump(engine, probe)

    async def _pump(self, engine: Engine, probe: RateProbe) -> None:
        while chunks := await engine.next_chunks():
            self._gate.take(probe.without_probe(chunks))
            await asyncio.sleep(PUMP_PAUSE_S)

    def _sampled(self, chunks: tuple[TokenChunk, ...]) -> None:
        self.desk.rates.sampled(sum(len(chunk.token_ids) for chunk in chunks), self._clock.now())
        self.desk.send(duties.Sampled(chunks))

    def _spoiled(self, lease_id: LeaseId) -> None:
        self.desk.send(duties.Revoked(lease_id, "its tokens were sampled by weights of no version"))

    def _live(self, live: swap.GoLive, engine: Engine, probe: RateProbe) -> None:
        _log.info(
            "version %d is live: paused for %.0f ms, %.0f ms after arrival",
            live.version, 1e3 * live.stood_still_s, 1e3 * live.apply_s,
        )  # fmt: skip
        self._scoring.live(live.version)
        if self._measuring is None:
            self._measuring = asyncio.create_task(self._measure_rate(engine, probe))
        elif self._measuring.done():
            self._offer_work(engine)

    async def _measure_rate(self, engine: Engine, probe: RateProbe) -> None:
        """Measures the generation rate before the first lease, then requests work."""
        tokens_per_s = await shown(self._progress, "measurement of this machine's rate", probe.run())
        self.desk.rates.declare(tokens_per_s)
        self.telling.found(rate_finding(tokens_per_s, engine.slot_count))
        self._offer_work(engine)

    def _offer_work(self, engine: Engine) -> None:
        assert self.keeper is not None, "weights are live on an engine"
        live = self.keeper.machine.live
        assert live is not None, "a version is live"
        self._tell_heartbeat()
        self.desk.send(duties.Live(live, engine.slot_count))


def _node_options(options: WorkerOptions, port: int) -> NodeOptions:
    """`port`: the broadcast service's; the bulk port for chunks is the next one if that is free. Behind a mapped port there is no
    bulk port: nothing maps it, so peers could not dial it."""
    return NodeOptions(
        folder=options.folder / "chunks",
        store_bytes=options.store_bytes,
        uplink_limit_bytes_per_s=options.uplink_limit_bytes_per_s,
        shape=options.link,
        seed=options.seed,
        bulk_host="" if options.advertised_addresses else options.listen_host,
        bulk_port=bulk_port_beside(port),
    )


def worker_backoff(options: WorkerOptions, name: str) -> Backoff:
    """The pauses between attempts; `name` says at what, and separates the random streams."""
    return Backoff(derived_rng(options.seed, "worker", options.name, name), longest_s=options.limits.reconnect_s_max)
