"""The learner's work from prepared weights to the clean disconnect; all its parts are made here.

    made --run--> serves --> trains --+--> last step, prompts' end, stop --> LearnerEnding --> left
                                      '--> a part failed, or the coordinator refused --> left, with that error

Guarantees: each part is complete once constructed and gets its callbacks in the constructor; the first failure of any part ends
the run with that failure; however the run ends, the coordinator is told and everything is closed. Waits for: the training loop,
the coordinator's stream, or a failure, whichever comes first. Leaves to others: joining (join), loading (startup), steps (loop),
the end (ending).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from echo2.base.hosts import joined
from echo2.base.ids import GroupId, PeerId, RunId, Version
from echo2.broadcast.runtime.addresses import is_loopback, loopback_of, outward_host
from echo2.broadcast.runtime.node_options import NodeCalls
from echo2.control.backoff import Backoff
from echo2.control.runtime.session import ControlSession
from echo2.control.waits import Waits
from echo2.learner import batcher_events as batcher
from echo2.learner.batch import TrainGroup
from echo2.learner.deliveries import NEWS_S
from echo2.learner.delta_setting import SettingChoice, encode_cores
from echo2.learner.exam import ExamResult
from echo2.learner.offers import OfferConfig, Reminders
from echo2.learner.runtime.agents import Agents
from echo2.learner.runtime.auditor import AuditCalls, Auditor, auditor_of
from echo2.learner.runtime.broadcaster import BroadcasterFactory
from echo2.learner.runtime.ending import LearnerEnding, RunSummary
from echo2.learner.runtime.exams import Exams
from echo2.learner.runtime.ingest import IngestService
from echo2.learner.runtime.intake import Intake, IntakeCalls
from echo2.learner.runtime.join import keep, look_for_coordinator
from echo2.learner.runtime.loop import EVALUATION, LoopParts, TrainingLoop
from echo2.learner.runtime.metrics import open_sinks
from echo2.learner.runtime.options import LearnerOptions
from echo2.learner.runtime.orders import LearnerOrders
from echo2.learner.runtime.prometheus import PrometheusEndpoint
from echo2.learner.runtime.publisher import PublishedArtifact, PublisherCalls, VersionPublisher
from echo2.learner.runtime.reports import delivered_message, hello_of, published_message, report_of
from echo2.learner.runtime.scoring import ScoringStreams
from echo2.learner.runtime.session import LearnerSession
from echo2.learner.runtime.startup import Prepared
from echo2.learner.scorings import Event as ScoringEvent
from echo2.learner.scorings import ScoringTick
from echo2.learner.suspicion import Accusation
from echo2.outside import here, monotonic, unix_now
from echo2.trust.runtime.enrolling import keep_renewed
from echo2.trust.runtime.port_limits import LEARNER
from echo2.trust.runtime.tls import Credentials, bind_server, new_server, server_credentials
from echo2.wire.coordinator import FINISHED
from echo2.wire.gen.echo2.v1 import ingest_pb2_grpc
from echo2.wire.gen.echo2.v1.coordinator_pb2 import LearnerWelcome

STOP_GRACE_S = 0.5
REMIND_LOOK_S = 1.0
_log = logging.getLogger("echo2.learner")


class Threads:
    """The trainer's thread, and a pool of encoder threads, made once their number is known."""

    def __init__(self) -> None:
        self.trainer = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._encoders: ThreadPoolExecutor | None = None

    def encoders(self, cores: int) -> Executor | None:
        """A pool of `cores` threads; None for one core: the caller's own thread then encodes."""
        if cores > 1:
            self._encoders = ThreadPoolExecutor(cores, thread_name_prefix="encoder")
        return self._encoders

    def close(self) -> None:
        """Waits for running work, cancels queued work and ends the threads."""
        self.trainer.shutdown(wait=True, cancel_futures=True)
        if self._encoders is not None:
            self._encoders.shutdown(wait=True, cancel_futures=True)


class LearnerShift:
    """Runs one prepared learner. Construct it on the event loop that runs it."""

    def __init__(
        self,
        options: LearnerOptions,
        prepared: Prepared,
        credentials: Credentials,
        threads: Threads,
        waits: Waits,
        stopped: asyncio.Event,
        make_broadcaster: BroadcasterFactory,
    ) -> None:
        self.options, self._credentials, self._threads = options, credentials, threads
        self._prepared = prepared
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = new_server(LEARNER)
        self.session = LearnerSession(ControlSession(credentials, waits, Backoff(here().rng)))
        self.intake = self._made_intake()
        self.agents = self._made_agents()
        self._scoring = ScoringStreams(self._scorer_said)
        self._ingest = IngestService(
            self.intake, RunId(options.run_id), credentials.coordinator_peer_id, self._scoring, self._fail,
            requires_seeds=options.requires_seeds,
        )  # fmt: skip
        ingest_pb2_grpc.add_IngestServicer_to_server(self._ingest, self._server)
        self.auditor = self._made_auditor()
        calls = NodeCalls(self.intake.deliveries.is_proven, self._lost)
        self._broadcaster = make_broadcaster(self._server, credentials, options, calls)
        self.publisher = self._made_publisher()
        port = bind_server(self._server, joined(options.host, options.port), server_credentials(credentials))
        self._own = loopback_of(options.host), port
        self.address = options.advertise or joined(outward_host(options.host, credentials.coordinator_address), port)
        self.relay_address = ""
        exams = Exams(
            prepared.folder.path, options.evaluation, prepared.examination, self.intake,
            lambda row: self.loop.evaluated(row),  # noqa: PLW0108 - the loop does not exist yet
        )  # fmt: skip
        further: Callable[[], Mapping[str, float]] = dict if self.agents is None else self.agents.numbers
        self._sinks = open_sinks(options.folder, options.run_id, options.sinks)
        parts = LoopParts(self.intake, self.publisher, self.auditor, exams, self._sinks, self._report, further)
        self.loop = TrainingLoop(options, prepared, parts, threads.trainer)
        if options.metrics_port:
            self._sinks.append(PrometheusEndpoint(options.metrics_port, self._numbers_now))
        self._orders = LearnerOrders(self.loop, self._ingest, self._broadcaster, self.session)
        self.ending = LearnerEnding(options, self.loop, self._broadcaster, self.session, stopped)
        if stopped.is_set():
            self.loop.stop()

    def _made_intake(self) -> Intake:
        options, prepared = self.options, self._prepared
        offers = OfferConfig(options.rollouts_per_step, options.rollouts_per_group, options.staleness_bound)
        calls = IntakeCalls(
            offer=self.session.offer,
            close=self._closed,
            untruth=lambda peer_id, text: self._orders.accuse(peer_id, text, is_certain=True),
            held=lambda peer_id, text: self._orders.accuse(peer_id, f"rewards: {text}", is_certain=False),
            answered=self._answered,
            examined=self._examined,
            drive=lambda spec, draw: self.agents.drive(spec, draw) if self.agents is not None else None,
            sampled=lambda rollout: self.agents.sampled(rollout) if self.agents is not None else None,
            grown=lambda rollout: self.agents.grown(rollout) if self.agents is not None else None,
            failed=self._fail,
        )
        made = Intake(
            prepared.shelf, prepared.journal, prepared.prompts, offers, prepared.history.cursor, prepared.examination,
            calls,
        )  # fmt: skip
        made.restore(prepared.history)
        return made

    def _made_agents(self) -> Agents | None:
        options = self.options
        if options.agent is None:
            return None
        prepared = self._prepared
        return Agents(
            options.agent, options.folder, prepared.prompts, prepared.examination, self.intake.tell, self._fail
        )

    def _made_auditor(self) -> Auditor:
        calls = AuditCalls(self._found_false, self._scoring.lease, self._fail, self._ingest.habits_of)
        return auditor_of(self.options, here().rng, calls)

    def _made_publisher(self) -> VersionPublisher:
        prepared = self._prepared
        cores = encode_cores(prepared.model.device.type, os.cpu_count() or 1)
        return VersionPublisher(
            self._broadcaster, prepared.journal, prepared.schedule,
            PublisherCalls(self.intake.published, self._published, self._fail), prepared.fingerprint_key,
            SettingChoice(self.options.delta_setting, cores), self._threads.encoders(cores), prepared.team.coder,
        )  # fmt: skip

    # ---- life

    def stop(self) -> None:
        """Ends the run after the step in progress."""
        self.loop.stop()

    @property
    def waits_for(self) -> tuple[str, float]:
        """What the learner waits for, and for how many seconds; an empty text while it works."""
        if (ending := self.ending.waits_for) is not None:
            return ending
        text, since = self.loop.waiting
        what = self.intake.exam_waits_for if text == EVALUATION else self.intake.waits_for
        return (what, monotonic() - since) if text else ("", 0.0)

    async def run(self) -> RunSummary:
        """Runs until the last step, `stop` or an error."""
        await self._server.start()
        await self._broadcaster.start()
        if not is_loopback(self.address):
            relay_port = await self._broadcaster.serve_relay(self.options.host, self.options.relay_port)
            self.relay_address = f"{self.address.rpartition(':')[0]}:{relay_port}"
        _log.info("learner of run %s listens on %s", self.options.run_id, self.address)
        try:
            await self.publisher.take_up(
                self._prepared.published, self._prepared.schedule.newest, self._prepared.cut_off, self._prepared.base
            )
            self._prepared.base = self._prepared.cut_off = None
            if self.agents is not None:
                await self.agents.start()
                _log.info("agents ask %s; the key of outside harnesses is in %s", self.agents.url, self.agents.key_file)
            self.intake.resume(map(Version, self.loop.exams.rewards))
            return await self._work()
        finally:
            await self._close()

    async def _work(self) -> RunSummary:
        begin = asyncio.get_running_loop().create_task
        session, training = begin(self._talk()), begin(self.loop.run())
        beside = [begin(self._remind()), begin(self._tell_deliveries()), begin(self._renew())]
        reason = "stopped"
        try:
            await asyncio.wait({session, training, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if training.done() and self.intake.exhausted is not None and not self.loop.is_finished:
                reason = FINISHED  # the prompts ran out before the last step
            for done in (self._failure, session, training):
                if done.done():
                    done.result()
            summary = await self.ending.exported(self._threads.trainer)
            self._report()
            await self.ending.fetched()
            if self.loop.is_finished:
                reason = FINISHED
                await self.ending.heard()
            return summary
        finally:
            self.ending.waits("the coordinator to be told that the learner leaves")
            await self.session.leave(reason)
            for task in (training, session, *beside):
                task.cancel()
            await asyncio.gather(training, session, *beside, return_exceptions=True)

    async def _close(self) -> None:
        self.ending.waits("rewards, broadcast and journal to close")
        async with contextlib.AsyncExitStack() as rest:  # in reverse order, even if some of them raise
            for sink in self._sinks:
                rest.callback(sink.close)
            rest.callback(self._prepared.journal.close)
            rest.callback(self._prepared.prompts.close)
            rest.callback(self._prepared.examination.close)
            rest.callback(self.auditor.close)
            if self.agents is not None:
                rest.push_async_callback(self.agents.close)
            rest.push_async_callback(self._server.stop, STOP_GRACE_S)
            rest.push_async_callback(self._broadcaster.stop)
            await self.intake.close()

    def _fail(self, error: BaseException) -> None:
        """The first failure of any part ends the run."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # mark as retrieved: the run may be ending for another reason

    # ---- while training runs

    async def _talk(self) -> None:
        """Talks to the coordinator until it refuses this learner."""
        await self.session.run(
            hello=lambda: hello_of(self.options, self.loop, self.address, self.relay_address),
            report=lambda: report_of(self.loop, self.waits_for),
            ordered=self._orders.ordered,
            find=lambda: look_for_coordinator(self.options, self._credentials),
            welcomed=self._welcomed,
        )

    def _welcomed(self, welcome: LearnerWelcome) -> None:
        self._broadcaster.hold_pipe_place(self._credentials.coordinator_peer_id, welcome.relay_address, self._own)

    async def _renew(self) -> None:
        await keep_renewed(self._credentials, lambda credentials: keep(self.options, credentials))

    async def _remind(self) -> None:
        """If a batch stays incomplete for long, offers every group that lacks rollouts again.

        The coordinator ignores the groups that it still knows and leases again a group that it believed to be produced.
        """
        reminders = Reminders()
        while True:
            await asyncio.sleep(REMIND_LOOK_S)
            self.intake.tell(batcher.ExamTick(monotonic()))
            self.auditor.tell(ScoringTick())
            if reminders.is_due(self.waits_for[1]):
                _log.info("waiting for %.0f s for %s", self.waits_for[1], self.waits_for[0])
                lacking = self.intake.lacking()
                self.session.offer([spec for spec, _ in lacking], [tokens for _, tokens in lacking])

    async def _tell_deliveries(self) -> None:
        """Reports what workers have delivered, every `NEWS_S` while the coordinator is connected."""
        while True:
            if self.session.is_connected:
                told = self.intake.deliveries.take(monotonic())
                if told is not None:
                    self.session.delivered(delivered_message(told))
            await asyncio.sleep(NEWS_S)

    # ---- callbacks of the parts

    def _report(self) -> None:
        self.session.report(report_of(self.loop, self.waits_for))

    def _published(self, artifact: PublishedArtifact) -> None:
        self.session.published(published_message(artifact))

    def _lost(self, what: str) -> None:
        self.publisher.replace_lost(what)

    def _closed(self, group_ids: Sequence[GroupId], reason: str) -> None:
        self.session.close(group_ids, reason)
        if self.agents is not None:
            self.agents.closed(group_ids, reason)

    def _answered(self, group: TrainGroup) -> None:
        self.auditor.consider((group,), unix_now())
        self.loop.exams.answered(group)

    def _examined(self, result: ExamResult) -> None:
        self.loop.exams.examined(result)

    def _scorer_said(self, event: ScoringEvent) -> None:
        self.auditor.tell(event)

    def _found_false(self, peer_id: PeerId, accusation: Accusation) -> None:
        self._orders.accuse(peer_id, f"audit: {accusation.text}", is_certain=accusation.is_certain)

    def _numbers_now(self) -> Mapping[str, float]:
        """Numbers for Prometheus, which calls this from its own thread."""
        text, since = self.loop.waiting
        return {"step": self.loop.step, "waiting_s": monotonic() - since if text else 0.0}
