"""`echo-learner`: everything of the learner put together and kept alive.

Guarantees: a clean stop leaves a checkpoint, a kill loses nothing that was acknowledged; an error of any part ends the
run with that error, never silently; the coordinator may go and come back without the training noticing. Waits for: the
training loop, the coordinator's stream, a failure; whichever comes first. Leaves to others: command line and signals
(cli).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from echo2.base.errors import ConfigError, Unreachable
from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.runtime.addresses import is_loopback, joined, outward_host
from echo2.control.backoff import Backoff
from echo2.control.runtime.joining import enrolled, unless
from echo2.control.runtime.session import ControlSession
from echo2.control.waits import Waits
from echo2.learner import batcher_events as batcher
from echo2.learner.deliveries import NEWS_S
from echo2.learner.delta_setting import SettingChoice, encode_cores
from echo2.learner.lingering import Lingering
from echo2.learner.offers import OfferConfig, Reminders
from echo2.learner.runtime.ingest import IngestService
from echo2.learner.runtime.intake import Intake
from echo2.learner.runtime.loop import EVALUATION, TrainingLoop
from echo2.learner.runtime.metrics import Sink, open_sinks
from echo2.learner.runtime.options import LearnerOptions
from echo2.learner.runtime.prometheus import PrometheusEndpoint
from echo2.learner.runtime.publisher import Broadcaster, VersionPublisher
from echo2.learner.runtime.ranks import world_size
from echo2.learner.runtime.record import peak_flops_of
from echo2.learner.runtime.reports import delivered_message, hello_of, published_message, report_of
from echo2.learner.runtime.run_folder import RunFolder
from echo2.learner.runtime.seed import SeedNode
from echo2.learner.runtime.session import LearnerSession
from echo2.learner.runtime.startup import Prepared, export, prepare_here
from echo2.learner.scorings import ScoringTick
from echo2.outside import SteadyClock, here, monotonic
from echo2.trust.identity import JoinLink, Role
from echo2.trust.runtime.enrolling import find_coordinator, keep_renewed
from echo2.trust.runtime.gate import GatedServer
from echo2.trust.runtime.port_limits import LEARNER
from echo2.trust.runtime.tls import (
    Credentials,
    bind_server,
    load_credentials,
    load_or_create_identity,
    new_server,
    save_credentials,
    server_credentials,
)
from echo2.wire.coordinator import FINISHED
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2, ingest_pb2_grpc

ENROL_PAUSE_S_MAX = 4.0
STOP_GRACE_S = 0.5
REMIND_LOOK_S = 1.0
LINGER_LOOK_S = 0.25
FINISHED_HEARD_S = 120.0
_log = logging.getLogger("echo2.learner")


class FleetBroadcaster(Broadcaster, Protocol):
    """What the daemon needs of the broadcast beside publishing."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def serve_relay(self, listen_host: str, port: int) -> int:
        """Begins to serve as a relay for workers behind NATs; returns the port."""
        ...

    def apply_plan(self, plan: broadcast_pb2.BroadcastPlan) -> None: ...

    def bar(self, peer_id: PeerId, *, is_lifted: bool) -> None:
        """No chunks are exchanged with a banned worker."""
        ...

    def keep_places(self, is_proven: Callable[[PeerId], bool]) -> None:
        """Of those that the plan does not name, proven workers keep their places."""
        ...

    def is_needed(self) -> bool:
        """Whether a worker that is connected still fetches, or lacks the newest version."""
        ...


BroadcasterFactory = Callable[[GatedServer, Credentials, LearnerOptions], FleetBroadcaster]
"""Makes the broadcast node and registers its service with the learner's server, before that starts."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How the run stands at the end. `evaluations`: held-out reward by step."""

    steps: int
    is_finished: bool
    version: Version
    fingerprint: str
    evaluations: dict[int, float]
    utilisation: float
    trained_rollouts: int
    trained_tokens: int
    dropped_stale_rollouts: int
    over_stale_tokens: int
    delta_bytes: int
    keyframe_bytes: int
    full_snapshot_bytes: int
    export_folder: Path | None


class LearnerDaemon:
    """One run of one learner. `run` once; `stop` from the same event loop."""

    def __init__(
        self,
        options: LearnerOptions,
        make_broadcaster: BroadcasterFactory = SeedNode,
        make_prepared: Callable[[LearnerOptions, RunFolder], Prepared] = prepare_here,
    ) -> None:
        self.options = options
        self._make_broadcaster = make_broadcaster
        self._make_prepared = make_prepared
        self._stop = asyncio.Event()
        self._failure: asyncio.Future[None] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._encoders: ThreadPoolExecutor | None = None
        self.loop: TrainingLoop | None = None
        self.session: LearnerSession | None = None
        self.waits = Waits(SteadyClock())
        self.address = self.relay_address = ""
        self.starting = "its run folder"
        self._ending: tuple[str, float] | None = None

    def stop(self) -> None:
        """Ends the run after the step in progress; `run` then returns its summary."""
        self._stop.set()
        if self.loop is not None:
            self.loop.stop()

    @property
    def waits_for(self) -> tuple[str, float]:
        """What the learner waits for and for how many seconds; empty text when it works."""
        if self._ending is not None:
            return self._ending[0], monotonic() - self._ending[1]
        if self.loop is None:
            return self.starting, 0.0
        text, since = self.loop.waiting
        what = self.loop.intake.exam_waits_for if text == EVALUATION else self.loop.intake.waits_for
        return (what, monotonic() - since) if text else ("", 0.0)

    async def run(self) -> RunSummary:
        """Until the last step, `stop`, or an error."""
        self._failure = asyncio.get_running_loop().create_future()
        folder = RunFolder(self.options.folder)
        in_trainer = asyncio.get_running_loop().run_in_executor
        try:
            credentials = await self._credentials()
            self.starting = "the model and what was recorded to be trained again"
            prepared = await in_trainer(self._executor, lambda: self._make_prepared(self.options, folder))
            summary = await self._serve(prepared, credentials)
            await in_trainer(self._executor, prepared.team.stop)
            return summary
        finally:
            if self.loop is not None:
                self._end_waits_for("the step or the encoding under way to end")
            self._executor.shutdown(wait=True, cancel_futures=True)
            if self._encoders is not None:
                self._encoders.shutdown(wait=True, cancel_futures=True)
            folder.release()

    # ---- joining

    async def _credentials(self) -> Credentials:
        folder = self.options.folder / "node"
        identity = load_or_create_identity(folder)
        kept = load_credentials(folder, identity)
        if kept is not None and kept.run_id == self.options.run_id:
            return kept
        if not self.options.join_link:
            raise ConfigError(f"run {self.options.run_id}: expected a join link on the learner's first start, got none")
        link = JoinLink.parse(self.options.join_link)
        self.starting = f"the coordinator at {link.address}"
        backoff = Backoff(here().rng, longest_s=ENROL_PAUSE_S_MAX)
        joining = asyncio.create_task(enrolled(link, identity, Role.LEARNER, self.waits, backoff))
        credentials = await unless(self._stop, joining)
        if credentials is None:
            raise Unreachable(f"coordinator at {link.address}: stopped before it answered")
        self._keep(credentials)
        return credentials

    def _keep(self, credentials: Credentials) -> None:
        save_credentials(self.options.folder / "node", credentials)

    async def _find_coordinator(self, credentials: Credentials) -> None:
        if self.options.join_link:
            link = JoinLink.parse(self.options.join_link)
            await find_coordinator(link, self.options.link_file, credentials, self._keep)

    # ---- serving

    async def _serve(self, prepared: Prepared, credentials: Credentials) -> RunSummary:
        options = self.options
        server = new_server(LEARNER)
        offers = OfferConfig(options.rollouts_per_step, options.rollouts_per_group, options.staleness_bound)
        intake = Intake(
            prepared.shelf, prepared.journal, prepared.prompts, offers, prepared.history.cursor, prepared.examination
        )
        intake.restore(prepared.history)
        coordinator = credentials.coordinator_peer_id
        ingest = IngestService(intake, RunId(options.run_id), coordinator, requires_seeds=options.requires_seeds)
        ingest_pb2_grpc.add_IngestServicer_to_server(ingest, server)
        broadcaster = self._make_broadcaster(server, credentials, options)
        publisher = self._publisher(prepared, broadcaster, intake)
        port = bind_server(server, f"{options.host}:{options.port}", server_credentials(credentials))
        self.address = options.advertise or joined(outward_host(options.host, credentials.coordinator_address), port)
        sinks = open_sinks(options.folder, options.run_id, options.sinks)
        loop = TrainingLoop(options, prepared, intake, publisher, sinks, self._executor)
        if options.metrics_port:
            sinks.append(PrometheusEndpoint(options.metrics_port, lambda: self._numbers_now(loop)))
        loop.facts.peak_flops = _peak_flops(prepared)
        self.session = LearnerSession(ControlSession(credentials, self.waits, Backoff(here().rng)))
        talk = functools.partial(
            self.session.run,
            hello=lambda: hello_of(options, loop, self.address, self.relay_address),
            report=self._report,
            ordered=lambda order: self._take_order(order, ingest, broadcaster),
            find=lambda: self._find_coordinator(credentials),
        )
        self._connect(loop, ingest, publisher)
        await server.start()
        await broadcaster.start()
        if not is_loopback(self.address):
            relay_port = await broadcaster.serve_relay(options.host, options.relay_port)
            self.relay_address = f"{self.address.rpartition(':')[0]}:{relay_port}"
        _log.info("learner of run %s listens on %s", options.run_id, self.address)
        try:
            return await self._train(loop, publisher, broadcaster, talk, credentials)
        finally:
            await self._close(loop, server, broadcaster, sinks)

    def _publisher(self, prepared: Prepared, broadcaster: Broadcaster, intake: Intake) -> VersionPublisher:
        cores = encode_cores(prepared.model.device.type, os.cpu_count() or 1)
        if cores > 1:
            self._encoders = ThreadPoolExecutor(cores, thread_name_prefix="encoder")
        return VersionPublisher(
            broadcaster, prepared.journal, prepared.schedule, intake.published, prepared.fingerprint_key,
            SettingChoice(self.options.delta_setting, cores), self._encoders, prepared.team.coder,
        )  # fmt: skip

    def _connect(self, loop: TrainingLoop, ingest: IngestService, publisher: VersionPublisher) -> None:
        """Who tells whom."""
        self.loop = loop
        loop.on_step = self._send_report
        loop.intake.on_offer = self._said.offer
        loop.intake.on_close = self._said.close
        publisher.on_published = lambda artifact: self._said.published(published_message(artifact))
        loop.auditor.on_accused = lambda peer_id, accusation: self._accuse(
            peer_id, f"audit: {accusation.text}", accusation.is_certain, ingest
        )
        loop.intake.on_held = lambda peer_id, text: self._accuse(peer_id, f"rewards: {text}", False, ingest)
        loop.auditor.habits_of = ingest.habits_of
        loop.auditor.on_lease = ingest.scoring.lease
        ingest.scoring.tell = loop.auditor.tell
        loop.intake.on_untruth = lambda peer_id, text: self._accuse(peer_id, text, True, ingest)
        for part in (loop, loop.intake, loop.auditor, ingest, publisher):
            part.on_failure = self._fail
        if self._stop.is_set():
            loop.stop()

    async def _train(
        self,
        loop: TrainingLoop,
        publisher: VersionPublisher,
        broadcaster: FleetBroadcaster,
        talk: Callable[[], Coroutine[Any, Any, None]],
        credentials: Credentials,
    ) -> RunSummary:
        assert self.session is not None and self._failure is not None
        broadcaster.keep_places(loop.intake.deliveries.is_proven)
        await publisher.take_up(loop.p.published, loop.p.schedule.newest, loop.p.cut_off, loop.p.base)
        loop.p.base = None
        loop.intake.resume(map(Version, loop.exams.rewards))
        session = asyncio.get_running_loop().create_task(talk())
        training = asyncio.get_running_loop().create_task(loop.run())
        reminding = asyncio.get_running_loop().create_task(self._remind(loop))
        telling = asyncio.get_running_loop().create_task(self._tell_deliveries(loop))
        renewing = asyncio.get_running_loop().create_task(keep_renewed(credentials, self._keep))
        reason = "stopped"
        try:
            await asyncio.wait({session, training, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if training.done() and loop.intake.exhausted is not None and not loop.is_finished:
                reason = FINISHED  # its prompts have ended before its steps
            for done in (self._failure, session, training):
                if done.done():
                    done.result()
            self._end_waits_for("the finished model to be written")
            summary = await self._finish(loop, publisher)
            self._end_waits_for(f"workers to fetch version {publisher.newest_version}")
            await self._linger(loop, broadcaster)
            if loop.is_finished:
                reason = FINISHED
                await self._until_heard()
            return summary
        finally:
            self._end_waits_for("the coordinator to be told that the learner leaves")
            await self.session.leave(reason)
            for task in (training, session, reminding, telling, renewing):
                task.cancel()
            await asyncio.gather(training, session, reminding, telling, renewing, return_exceptions=True)

    async def _until_heard(self) -> None:
        """Until the coordinator is there to hear that the run is finished, for a while: workers cost money until then."""
        assert self.session is not None, "it leaves by its session"
        self._end_waits_for("the coordinator, to tell it that the run is finished")
        until = monotonic() + FINISHED_HEARD_S
        while not self.session.is_connected and not self._stop.is_set() and monotonic() < until:
            await asyncio.sleep(LINGER_LOOK_S)
        if not self.session.is_connected:
            _log.warning(
                "the coordinator was not told that the run is finished: workers go on waiting. Start this learner again "
                "with the same command once the coordinator is back"
            )

    def _end_waits_for(self, what: str) -> None:
        self._ending = (what, monotonic())

    async def _remind(self, loop: TrainingLoop) -> None:
        """A batch that does not fill for long: every group that lacks rollouts is offered again.

        The coordinator knows most of them and lets those be; one that it took for produced goes to a worker again.
        """
        reminders = Reminders()
        while True:
            await asyncio.sleep(REMIND_LOOK_S)
            loop.intake.tell(batcher.ExamTick(monotonic()))
            loop.auditor.tell(ScoringTick())
            if reminders.is_due(self.waits_for[1]):
                _log.info("waiting for %.0f s for %s", self.waits_for[1], self.waits_for[0])
                lacking = loop.intake.lacking()
                self._said.offer([spec for spec, _ in lacking], [tokens for _, tokens in lacking])

    async def _tell_deliveries(self, loop: TrainingLoop) -> None:
        """What workers have delivered, for as long as the coordinator is there to hear it."""
        while True:
            if self.session is not None and self.session.is_connected:
                told = loop.intake.deliveries.take(monotonic())
                if told is not None:
                    self.session.delivered(delivered_message(told))
            await asyncio.sleep(NEWS_S)

    async def _finish(self, loop: TrainingLoop, publisher: VersionPublisher) -> RunSummary:
        """Exports the model if the run is complete: the version published last."""
        folder: Path | None = None
        if loop.is_finished:
            folder = self.options.folder / "model"
            assert publisher.newest_version == loop.step, "the last step is always published"
            held = publisher.newest_tensors, publisher.newest_version
            policy = await asyncio.get_running_loop().run_in_executor(self._executor, lambda: loop.p.team.whole(*held))
            await asyncio.to_thread(export, loop.p.model, policy, loop.p.prompts.tokenizer, folder)
        self._send_report()
        if folder is not None:
            _log.info("finished after %d steps; the model lies in %s", loop.step, folder)
        else:
            at = self.options.folder / "checkpoints"
            _log.info(
                "stopped after step %d of %d; saved in %s: the same command goes on from there",
                loop.step, self.options.steps, at,
            )  # fmt: skip
        counts, sent = loop.intake.held.counts, publisher.bytes
        return RunSummary(
            loop.step, loop.is_finished, publisher.newest_version, f"{publisher.newest_fingerprint:016x}",
            loop.exams.rewards, loop.utilisation.overall, counts.trained, counts.trained_tokens, counts.dropped_stale,
            loop.intake.held.ledger.over_stale_tokens(), sent.deltas, sent.keyframes, sent.full_snapshots, folder,
        )  # fmt: skip

    async def _linger(self, loop: TrainingLoop, broadcaster: FleetBroadcaster) -> None:
        """A finished learner serves its last version while workers fetch it."""
        if not loop.is_finished or self.options.linger_s <= 0:
            return
        _log.info("finished; serving the last version while it is fetched, up to %.0f s", self.options.linger_s)
        lingering = Lingering(monotonic(), self.options.linger_s)
        while not self._stop.is_set() and not lingering.is_over(broadcaster.is_needed(), monotonic()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), LINGER_LOOK_S)

    async def _close(
        self, loop: TrainingLoop, server: GatedServer, broadcaster: FleetBroadcaster, sinks: Sequence[Sink]
    ) -> None:
        self._end_waits_for("rewards, broadcast and journal to close")
        async with contextlib.AsyncExitStack() as rest:  # from the last to the first, whatever any of them raises
            for sink in sinks:
                rest.callback(sink.close)
            rest.callback(loop.p.journal.close)
            rest.callback(loop.p.prompts.close)
            rest.callback(loop.p.examination.close)
            rest.callback(loop.auditor.close)
            rest.push_async_callback(server.stop, STOP_GRACE_S)
            rest.push_async_callback(broadcaster.stop)
            await loop.intake.close()

    def _fail(self, error: BaseException) -> None:
        """The first failure of any part ends the run."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # it may come when the run ends for another reason; that is no lost error

    def _numbers_now(self, loop: TrainingLoop) -> dict[str, float]:
        """For Prometheus, from its own thread."""
        text, since = loop.waiting
        return {"step": loop.step, "waiting_s": monotonic() - since if text else 0.0}

    # ---- talking to the coordinator

    def _take_order(
        self, order: coordinator_pb2.LearnerOrder, ingest: IngestService, broadcaster: FleetBroadcaster
    ) -> None:
        assert self.loop is not None, "orders come while the loop runs"
        match order.WhichOneof("kind"):
            case "plan":
                plan = order.plan
                self.loop.p.schedule.planned_kappa = plan.kappa or None
                self.loop.facts.predicted_utilisation = plan.predicted_utilisation
                self.loop.intake.tell(batcher.CapPlanned(plan.in_flight_cap_rollouts or None))
            case "broadcast_plan":
                broadcaster.apply_plan(order.broadcast_plan)
            case "banned":
                broadcaster.bar(PeerId(order.banned.peer_id), is_lifted=not order.banned.is_banned)
                self._bar(order.banned, ingest)
            case _:
                pass

    def _bar(self, order: coordinator_pb2.WorkerBanned, ingest: IngestService) -> None:
        """The coordinator's word on whose rollouts are taken; a worker that is taken back begins with a clean slate."""
        assert self.loop is not None, "orders come while the loop runs"
        peer_id = PeerId(order.peer_id)
        if not order.is_lifted:
            ingest.barred[peer_id] = order.reason
            _log.warning("nothing is taken from worker %s: %s", peer_id, order.reason)
            return
        ingest.barred.pop(peer_id, None)
        self.loop.auditor.release(peer_id)
        self.loop.intake.tell(batcher.WorkerReleased(peer_id))
        self.loop.intake.holding.forget(peer_id)
        _log.info("worker %s is taken back", peer_id)

    def _accuse(self, peer_id: PeerId, reason: str, is_certain: bool, ingest: IngestService) -> None:
        """Nothing more is taken from the worker, what it sent and was not trained on is dropped, the operator is told."""
        assert self.loop is not None, "audits run while the loop does"
        ingest.barred[peer_id] = reason
        self.loop.intake.tell(batcher.WorkerBarred(peer_id))
        self._said.accuse(peer_id, reason, is_certain=is_certain)

    @property
    def _said(self) -> LearnerSession:
        assert self.session is not None, "parts talk while they run"
        return self.session

    def _report(self) -> coordinator_pb2.LearnerReport:
        assert self.loop is not None, "reports are sent while the loop runs"
        return report_of(self.loop, self.waits_for)

    def _send_report(self) -> None:
        self._said.report(self._report())


def _peak_flops(prepared: Prepared) -> float:
    device = prepared.model.device
    peak = peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else 0.0
    return peak * world_size()
