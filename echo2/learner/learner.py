"""`echo-learner`: joins the run, loads the model, trains, serves the last version, and releases everything.

    joins --> loads, trains again on recorded batches --> trains --+--> last step, prompts' end, stop --> exports --> left
                                                                   '--> a part failed, or it is refused --> left, with that error

Guarantees: a clean stop leaves a checkpoint, a kill loses nothing that was acknowledged; the first failure of any part ends the
run with that failure; however the run ends, the coordinator is told and everything is closed; the coordinator may disappear and
return without disturbing training. Waits for: the coordinator before the first start, then the training loop, the coordinator's
stream, or a failure, whichever comes first; `waits_for` names it. The waits after the export are bounded, and `stop` ends them at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from echo2.base.clock import Backoff, Waits
from echo2.base.errors import ConfigError, Dismissed, EchoError, TaskError, Unreachable
from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import GroupSpec
from echo2.base.units import address_of, is_loopback, one_line
from echo2.broadcast.node import NodeCalls
from echo2.control.session import ControlSession, Party, enrolled, unless
from echo2.learner.audit import Auditor
from echo2.learner.loop import EVALUATION, TrainingLoop
from echo2.learner.metrics import PrometheusEndpoint, number_in, open_sinks
from echo2.learner.options import LearnerOptions, RunFolder
from echo2.learner.publishing.publisher import SeedNode, VersionPublisher
from echo2.learner.publishing.schedule import SettingChoice, encode_cores
from echo2.learner.recent import answer, keep
from echo2.learner.rollouts.agents import Agents
from echo2.learner.rollouts.groups import TrainGroup
from echo2.learner.rollouts.ingest import IngestPort
from echo2.learner.rollouts.pool import RolloutPool
from echo2.learner.rollouts.request_pool import RequestPool
from echo2.learner.rollouts.workers import NEWS_S
from echo2.learner.serve import VersionServer
from echo2.learner.startup import Prepared, export, prepare
from echo2.outside import SteadyClock, here, monotonic
from echo2.outside.guard import ProgressLines, Tasks, cancel_all, shown
from echo2.trust.enrolment import find_coordinator, keep_renewed
from echo2.trust.identity import JoinLink, Role
from echo2.trust.tls import PROTOCOL_VERSION, Credentials, load_credentials, load_or_create_identity, save_credentials
from echo2.wire.bounds import REASON_CHARS_MAX, WAITS_CHARS_MAX
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb, coordinator_pb2_grpc, rollout_pb2
from echo2.wire.rollout import FINISHED, STOPPED, cause_of_end, group_to_message, leaving_reason

LEAVE_S, LAST_WORD_S = 1.0, 15.0
"""A farewell is one message. Without it a coordinator takes the learner for away, and of a run that is over it goes on paying for
workers: so that one may wait as long as the coordinator lets a stream wait that took much of its time (outside/guard)."""
STOP_GRACE_S = 0.5  # for a call that is being answered; report streams never end by themselves
LOOK_S = 0.25  # four looks a second cost nothing and delay an end by as little
QUIET_S = 3.0
"""A finished learner stays so long after no connected worker lacks its last version: one whose link is down can reconnect."""
HEARD_S = 120.0
"""A finished learner waits so long for a coordinator that must learn of it: until then workers cost money."""
NOT_EVALUATED = -1.0  # in a report
PART_BYTES = 512 << 10
"""Of the groups in one message, unless one alone is larger: each later turn has all before it as its prompt, and the coordinator
takes 16 MiB. Stop strings make thousands of fields a group, of two bytes or more, of which it takes 262,144."""
REMIND_FIRST_S, REMIND_EVERY_S = 3.0, 30.0  # a wait for rollouts is reported after 3 s, 9 s, 27 s, and then every 30 s
NodeFactory = Callable[[Credentials, LearnerOptions, NodeCalls], SeedNode]
ServerFactory = Callable[[TrainingLoop], VersionServer]
"""Of a learner that publishes what other trainers hand in, and answers their requests."""
_log = logging.getLogger("echo2.learner")


def as_reported(evaluation: float) -> float:
    """The next number towards 0 in place of -1, which stands for no evaluation: some tasks give -1 for a failure."""
    return math.nextafter(evaluation, 0.0) if evaluation == NOT_EVALUATED else evaluation


def parts_of(specs: Iterable[GroupSpec]) -> Iterator[list[rollout_pb2.GroupSpec]]:
    """The groups as messages, in parts of `PART_BYTES`."""
    part: list[rollout_pb2.GroupSpec] = []
    room = PART_BYTES
    for message in map(group_to_message, specs):
        size = message.ByteSize()
        if part and size > room:
            yield part
            part, room = [], PART_BYTES
        part.append(message)
        room -= size
    if part:
        yield part


class LearnerDaemon:
    """One run of one learner. Call `run` once, and `stop` on the same event loop. `learner` is None until everything is loaded."""

    def __init__(
        self,
        options: LearnerOptions,
        make_broadcaster: NodeFactory = SeedNode,
        make_prepared: Callable[[LearnerOptions, RunFolder], Prepared] = prepare,
        make_server: ServerFactory | None = None,
    ) -> None:
        self.options = options
        self.learner: Learner | None = None
        self._make_broadcaster, self._make_prepared, self._make_server = make_broadcaster, make_prepared, make_server
        self._waits = Waits(SteadyClock())
        self._stopped = asyncio.Event()
        self._starting = "its run folder"

    def stop(self) -> None:
        """Ends the run after the step in progress; `run` then returns."""
        self._stopped.set()
        if self.learner is not None:
            self.learner.stop()

    @property
    def waits_for(self) -> tuple[str, float]:
        """What the learner waits for, and for how many seconds; an empty text while it works."""
        if self.learner is None:
            return self._waits.longest()[0] or self._starting, 0.0
        return self.learner.waits_for

    async def run(self) -> None:
        folder, trainer = RunFolder(self.options.folder), ThreadPoolExecutor(1, thread_name_prefix="trainer")
        in_trainer = asyncio.get_running_loop().run_in_executor
        try:
            self._starting = "the coordinator"
            credentials = await self._join()
            self._starting = "the model and what was recorded to be trained again"
            loading = in_trainer(trainer, lambda: self._make_prepared(self.options, folder))
            what = "loading the model, restoring what the run has recorded"
            prepared = await shown(ProgressLines(_log), what, loading)
            session: ControlSession[pb.LearnerMessage] = ControlSession(credentials, self._waits, Backoff(here().rng))
            self.learner = Learner(
                self.options, prepared, credentials, trainer, session, self._stopped, self._make_broadcaster,
                self._make_server,
            )  # fmt: skip
            await self.learner.run()
            await in_trainer(trainer, prepared.team.stop)
        finally:
            if self.learner is not None:
                self.learner.begin_wait("the step or the encoding under way to end")
            trainer.shutdown(wait=True, cancel_futures=True)
            folder.release()

    async def _join(self) -> Credentials:
        """Returns the credentials of an earlier start of this run, or enrols for new ones, also where the link names another
        coordinator: the one before has lost its folder. Retries an unreachable coordinator until it answers; raises `ConfigError`
        without a join link of this run on the first start, `Unreachable` if stopped before."""
        options = self.options
        identity = load_or_create_identity(options.folder / "node")
        stored = load_credentials(options.folder / "node", identity)
        link = JoinLink.parse(options.join_link) if options.join_link else None
        if stored is not None and link is not None and link.peer_id != stored.coordinator_peer_id:
            stored = None
        if stored is not None and stored.run_id == options.config.run.name:
            return stored
        if link is None:
            raise ConfigError(
                f"run {options.config.run.name}: expected a join link on the learner's first start, and once its certificate has "
                "expired, got none"
            )
        self._waits.begin("coordinator", f"the coordinator at {link.address}")
        backoff = Backoff(here().rng, longest_s=4.0)  # a person watches the first start
        enrolling = asyncio.create_task(enrolled(link, identity, Role.LEARNER, self._waits, backoff))
        credentials = await unless(self._stopped, enrolling)
        if credentials is None:
            raise Unreachable(f"coordinator at {link.address}: stopped before it answered")
        if credentials.run_id != options.config.run.name:
            raise ConfigError(
                f"run {options.config.run.name}: expected a join link of this run, the one given is of run "
                f"{credentials.run_id}; take the learner's link that this run's coordinator wrote"
            )
        save_credentials(options.folder / "node", credentials)
        return credentials


class Learner:
    """One prepared learner: set up from its parts, run to its end, closed. Construct it on the event loop that runs it."""

    def __init__(
        self, options: LearnerOptions, prepared: Prepared, credentials: Credentials, trainer: ThreadPoolExecutor,
        session: ControlSession[pb.LearnerMessage], stopped: asyncio.Event, make_broadcaster: NodeFactory,
        make_server: ServerFactory | None,
    ) -> None:  # fmt: skip
        self.options, self._prepared, self._credentials = options, prepared, credentials
        config = options.config
        self.session, self._stopped = session, stopped
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ending: tuple[str, float] | None = None  # what it waits for after training, and since when
        self._accusations: dict[PeerId, pb.WorkerAccused] = {}  # that the coordinator has not answered
        self._later_groups = frozenset[GroupId]()  # that the hello had no room for
        make_pool = RolloutPool if make_server is None else RequestPool
        self.pool = make_pool(
            prepared.groups, prepared.journal, prepared.history, prepared.prompts, prepared.evaluations, self
        )
        self.agents = Agents(config, options.folder, self.pool, self.fail) if config.agent.is_on else None
        self.pool.agents = self.agents
        self.auditor = Auditor(config, here().rng, self.pool, self.fail)
        self._ingest = IngestPort(self.pool, options, credentials, self.fail)
        self.address = self._ingest.address
        calls = NodeCalls(self.pool.groups.workers.is_proven, self._on_lost_chunks)
        self._broadcaster = make_broadcaster(credentials, options, calls)
        self.chunk_address = address_of(self.address.rpartition(":")[0].strip("[]"), self._broadcaster.listen())
        self.relay_address = ""
        cores = encode_cores(prepared.model.device.type, os.cpu_count() or 1)
        # With one core, the caller's own thread encodes.
        self._encoders = ThreadPoolExecutor(cores, thread_name_prefix="encoder") if cores > 1 else None
        self.publisher = VersionPublisher(
            self._broadcaster, prepared.journal, prepared.schedule, self, prepared.fingerprint_key,
            SettingChoice(cores), self._encoders, prepared.team.coder,
        )  # fmt: skip
        self._sinks = open_sinks(options.folder, config.run.name, config.learner.sinks, prepared.team.step_count)
        self._prometheus: PrometheusEndpoint | None = None
        if options.metrics_port:
            self._prometheus = PrometheusEndpoint(options.metrics_port, self._numbers_now)
            self._sinks.append(self._prometheus)
        self.loop = TrainingLoop(
            options, prepared, self.pool, self.publisher, self.auditor, self._sinks, trainer, self._on_step
        )
        self.server = None if make_server is None else make_server(self.loop)
        if stopped.is_set():
            self.stop()

    # ---- life

    async def run(self) -> None:
        await self._ingest.server.start()
        await self._broadcaster.start()
        prepared = self._prepared
        try:
            if not is_loopback(self.address):
                port = await self._broadcaster.serve_relay(self.options.host, self.options.config.learner.relay_port)
                self.relay_address = f"{self.address.rpartition(':')[0]}:{port}"
            _log.info("learner of run %s listens on %s", self.options.config.run.name, self.address)
            await self.publisher.take_up(prepared.published, prepared.schedule.newest, prepared.cut_off, prepared.base)
            prepared.base = prepared.cut_off = None
            if self.agents is not None:
                await self.agents.start()
                _log.info("agents ask %s; the key of outside harnesses is in %s", self.agents.url, self.agents.key_file)
            if not self.loop.is_supervised:  # else after it
                self.pool.resume()
            await self._work()
        finally:
            await self._close()

    async def _work(self) -> None:
        begin = asyncio.get_running_loop().create_task
        talking, training = begin(self.talk()), begin((self.server or self.loop).run())
        beside = (self._remind(), self._report_deliveries(), keep_renewed(self._credentials, self._save))
        tasks = (training, talking, *map(Tasks(self.fail).start, beside))
        reason = STOPPED
        try:
            await asyncio.wait({talking, training, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if talking.done() and isinstance(talking.exception(), Dismissed) and self.loop.p.team.starts_from_base:
                self.stop()  # the operator ended the run: as on a signal, what was trained is kept
                await asyncio.wait({training, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if training.done() and self.pool.exhausted is not None and not self.loop.is_finished:
                reason = FINISHED  # the prompts ran out before the last step
            if self._failure.done() and isinstance(self._failure.exception(), TaskError):
                reason = FINISHED  # a person must mend the task: nobody is paid to wait for that
            for ended in (self._failure, talking, training):
                if ended.done():
                    ended.result()
            await self._export()
            self.loop.is_exported = self.loop.is_finished
            self._on_step()
            if self.loop.is_finished:
                await self._serve_last_version()
                reason = FINISHED
                await self._await_coordinator()
        except EchoError as error:
            reason = leaving_reason(str(error), is_over=reason == FINISHED)
            raise
        finally:
            self.begin_wait("the coordinator to be told that the learner leaves")
            leaving, is_over = pb.LearnerLeaving(reason=reason), cause_of_end(reason) is not None
            # After all queued messages.
            is_told = await self.session.leave(pb.LearnerMessage(leaving=leaving), LAST_WORD_S if is_over else LEAVE_S)
            if is_over and not is_told:
                _log.warning(
                    "the coordinator was not told that the run is over: workers go on waiting. Start this learner again with the "
                    "same command once the coordinator is back"
                )
            await cancel_all(tasks)

    async def _close(self) -> None:
        self.begin_wait("rewards, broadcast and journal to close")
        prepared = self._prepared
        async with contextlib.AsyncExitStack() as rest:  # in reverse order, even if some of them raise
            if self._encoders is not None:
                rest.callback(self._encoders.shutdown, wait=True, cancel_futures=True)
            for close in (
                *(sink.close for sink in self._sinks), prepared.journal.close, prepared.prompts.close,
                prepared.evaluations.close,
            ):  # fmt: skip
                rest.callback(close)
            if self._prometheus is not None:
                rest.push_async_callback(self._prometheus.stop)
            rest.push_async_callback(self.auditor.close)
            if self.agents is not None:
                rest.push_async_callback(self.agents.close)
            rest.push_async_callback(self._ingest.server.stop, STOP_GRACE_S)
            rest.push_async_callback(self._broadcaster.stop)
            await self.pool.close()

    def stop(self) -> None:
        """Ends the run after the step in progress."""
        self.loop.stop()
        if self.server is not None:
            self.server.stop()

    def fail(self, error: BaseException) -> None:
        """The first failure of any part ends the run."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # mark as retrieved: the run may be ending for another reason

    def begin_wait(self, what: str) -> None:
        """Notes that from now on it waits for `what`, after training."""
        self._ending = what, monotonic()

    @property
    def waits_for(self) -> tuple[str, float]:
        if self._ending is not None:
            return self._ending[0], monotonic() - self._ending[1]
        if self.loop.warm_start:
            return self.loop.warm_start, 0.0
        text, since = self.loop.waiting
        what = self.pool.evaluation_waits_for if text == EVALUATION else self.pool.waits_for
        if self.agents is not None and self.agents.lacks:
            what += f"; {self.agents.lacks}"
        return (what, monotonic() - since) if text else ("", 0.0)

    # ---- the end

    async def _export(self) -> None:
        """Writes the last published version to the model folder if the run is complete."""
        self.begin_wait("the finished model to be written")
        loop, publisher = self.loop, self.publisher
        if loop.is_finished:
            folder = self.options.folder / "model"
            assert publisher.newest_version == loop.step, "the last step is always published"
            held = publisher.newest_tensors, publisher.newest_version
            policy = await loop.in_trainer(lambda: loop.p.team.whole(*held))
            await asyncio.to_thread(export, loop.p.model, policy, loop.p.prompts.tokenizer, folder)
            _log.info("finished after %d steps; the model lies in %s", loop.step, folder)
        else:
            _log.info(
                "stopped after step %d of %d; saved in %s: the same command goes on from there",
                loop.step, self.options.config.learner.steps, self.options.folder / "checkpoints",
            )  # fmt: skip
        await asyncio.to_thread(keep, loop.recent, loop.p.prompts.tokenizer, self.options.folder)

    async def _serve_last_version(self) -> None:
        """Serves the last version of a finished run while a connected worker lacks part of it, for at most `linger_s`. Later
        workers fetch it from other workers."""
        linger_s = self.options.limits.linger_s
        if linger_s <= 0:
            return
        self.begin_wait(f"workers to fetch version {self.publisher.newest_version}")
        _log.info("finished; serving the last version while it is fetched, up to %.0f s", linger_s)
        began = needed_at = monotonic()
        while not self._stopped.is_set() and monotonic() - began < linger_s:
            if self._broadcaster.is_needed():
                needed_at = monotonic()
            elif monotonic() - needed_at >= QUIET_S:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stopped.wait()

    async def _await_coordinator(self) -> None:
        self.begin_wait("the coordinator, to tell it that the run is finished")
        until = monotonic() + HEARD_S
        while not self.session.is_connected and not self._stopped.is_set() and monotonic() < until:
            await asyncio.sleep(LOOK_S)

    # ---- while training runs

    async def talk(self) -> None:
        """Keeps the stream to the coordinator open until it is refused or cancelled. What is sent while there is none is dropped:
        the next hello, which carries every open group, makes up for it."""
        await self.session.run(
            Party(
                dial=lambda channel: coordinator_pb2_grpc.CoordinatorStub(channel).LearnerSession(),
                hello=lambda: pb.LearnerMessage(hello=self.hello()),
                beat=lambda: pb.LearnerMessage(report=self.report()),
                on_welcome=self.on_welcome,
                on_order=self.on_order,
                find=self.find_coordinator,
            )
        )

    def tell(self, **message: Any) -> None:
        """Sends the coordinator a message by its name among those of `LearnerMessage`."""
        self.session.send(pb.LearnerMessage(**message))

    def hello(self) -> pb.LearnerHello:
        """The first message of a stream: the learner's identity, its progress, and every group that still needs a worker, of the
        later ones the names alone."""
        loop, config = self.loop, self.options.config
        model, lacking = loop.p.model, [group.spec for group in self.pool.groups.lacking]
        first = next(parts_of(lacking), [])
        self._later_groups = frozenset(spec.group_id for spec in lacking[len(first) :])
        return pb.LearnerHello(
            protocol_version=PROTOCOL_VERSION,
            run_id=config.run.name,
            address=self.address,
            chunk_address=self.chunk_address,
            relay_address=self.relay_address,
            model_name=config.model.path.rstrip("/").rpartition("/")[2],
            model_config_json=model.config_json(),
            model_digest=model.digest(),
            staleness_bound=config.staleness.bound,
            rollouts_per_step=config.learner.rollouts_per_step,
            rollouts_per_group=config.learner.rollouts_per_prompt,
            step=self.pool.groups.next_step,
            newest_version=loop.publisher.newest_version,
            open_groups=first,
            later_group_ids=sorted(self._later_groups),
            barred_peer_ids=sorted(self.pool.barred.keys() - self._accusations),
            full_snapshot_bytes=model.snapshot_bytes,
            link=pb.Link(
                uplink_bytes_per_s=config.learner.emulated_link.uplink_bytes_per_s or config.learner.uplink_limit,
                downlink_bytes_per_s=config.learner.emulated_link.downlink_bytes_per_s,
                rtt_s=config.learner.emulated_link.rtt_s,
            ),
            step_limit=0 if self.server is not None else config.learner.steps,  # who hands in the last version decides
            kappa_is_fixed=config.staleness.kappa > 0,
            kappa=config.staleness.kappa,
            longest_sequence_tokens=loop.p.prompts.context_tokens,
        )

    def report(self) -> pb.LearnerReport:
        loop, pool, publisher, waits_for = self.loop, self.pool, self.publisher, self.waits_for
        row = loop.last_row
        groups, rewards = pool.groups, pool.evaluations.rewards
        counts, ledger, audited = groups.counts, groups.ledger, loop.auditor.counts
        histogram = ledger.histogram()
        return pb.LearnerReport(
            step=loop.step,
            newest_version=publisher.newest_version,
            train_s=number_in(row, "step_s"),
            wait_s=number_in(row, "phase/wait_s"),
            reward_mean=number_in(row, "reward/mean"),
            buffered_rollouts=groups.buffered_rollouts,
            open_rollouts=groups.open_rollouts,
            trained_rollouts=counts.trained,
            trained_tokens=counts.trained_tokens,
            dropped_stale_rollouts=counts.dropped_stale,
            duplicate_rollouts=counts.duplicate,
            refused_rollouts=counts.refused,
            over_stale_tokens_trained=ledger.over_stale_tokens(),
            lag_histogram=[histogram.get(lag, 0) for lag in range(max(histogram, default=-1) + 1)],
            utilisation=loop.utilisation.window,
            sent_chunk_bytes=publisher.broadcaster.sent_bytes,
            waits_for=one_line(waits_for[0], WAITS_CHARS_MAX),  # an agent's error has lines
            waits_since_s=waits_for[1],
            is_finished=loop.is_exported,  # a local run ends its learner then
            eval_reward=as_reported(rewards[max(rewards)]) if rewards else NOT_EVALUATED,
            evaluation_rollouts=pool.evaluations.rollouts_per_step,
            idle_s=loop.idle_s,
            fingerprint=f"{publisher.newest_fingerprint:016x}",
            rewards_due=pool.rewards_due,
            prompts_exhausted=pool.exhausted is not None and not pool.fills(loop.steps),
            audit_s=audited.s / max(1, audited.steps),
            reward_s=pool.rewards.seconds_each,
            reward_processes=pool.prompts.reward_processes,
            lengths=loop.recent.lengths(),
            discarded_rollouts=counts.dropped_equal_rewards + counts.dropped_reward_failed,
            equal_reward_steps=loop.equal_reward_steps,
        )

    def on_welcome(self, welcome: pb.LearnerWelcome) -> None:
        self._broadcaster.hold_pipe_place(
            self._credentials.coordinator_peer_id, welcome.relay_address, self._ingest.local
        )
        self.offer([group.spec for group in self.pool.groups.lacking if group.spec.group_id in self._later_groups])
        for accused in self._accusations.values():
            self.tell(accused=accused)

    def on_order(self, order: pb.LearnerOrder) -> None:
        match order.WhichOneof("kind"):
            case "plan":
                self._prepared.schedule.planned_kappa = order.plan.kappa or None
                self.loop.facts.predicted_utilisation = order.plan.predicted_utilisation
                self.pool.on_plan(order.plan.in_flight_cap_rollouts or None)
            case "broadcast_plan":
                self._broadcaster.apply_plan(order.broadcast_plan)
            case "banned":
                self._on_ban(PeerId(order.banned.peer_id), order.banned)
            case "wanted":
                self.tell(shown=answer(self.loop.recent, self._prepared.prompts.tokenizer, order.wanted))
            case _:
                pass  # from a newer release

    def _on_ban(self, peer_id: PeerId, order: pb.WorkerBanned) -> None:
        """Nothing is accepted from a worker that the coordinator bars or this learner accuses, until the coordinator takes it back;
        then it starts with a clean slate."""
        self._broadcaster.bar(peer_id, is_lifted=not order.is_banned)
        self._accusations.pop(peer_id, None)
        if not order.is_lifted:
            self.pool.barred[peer_id] = order.reason
            _log.warning("nothing is taken from worker %s: %s", peer_id, order.reason)
            return
        self.auditor.release(peer_id)
        self.pool.release(peer_id)
        _log.info("worker %s is taken back", peer_id)

    async def find_coordinator(self) -> None:
        if self.options.join_link:
            link = JoinLink.parse(self.options.join_link)
            await find_coordinator(link, self.options.link_file, self._credentials, self._save)

    def _save(self, credentials: Credentials) -> None:
        save_credentials(self.options.folder / "node", credentials)

    async def _remind(self) -> None:
        """If a batch stays incomplete for long, offers every group that lacks rollouts again. The coordinator ignores the
        groups that it still knows and leases again a group that it believed to be produced."""
        reminded_s = 0.0  # how long the wait had lasted at the last reminder
        while True:
            await asyncio.sleep(1.0)
            self.pool.tick(monotonic())
            what, waited_s = self.waits_for
            if waited_s < reminded_s:
                reminded_s = 0.0  # a new wait began
            if waited_s >= reminded_s + min(REMIND_EVERY_S, max(REMIND_FIRST_S, 2 * reminded_s)):
                reminded_s = waited_s
                _log.info("waiting for %.0f s for %s", waited_s, what)
                lacking = self.pool.groups.lacking
                self.offer([group.spec for group in lacking], [group.token_count for group in lacking])

    async def _report_deliveries(self) -> None:
        """Reports what workers have delivered, every `NEWS_S` while the coordinator is connected."""
        while True:
            if self.session.is_connected:
                deliveries = self.pool.groups.workers.take_deliveries(monotonic())
                if deliveries is not None:
                    self.tell(delivered=pb.WorkersDelivered(workers=deliveries))
            await asyncio.sleep(NEWS_S)

    # ---- for the parts

    def offer(self, specs: Sequence[GroupSpec], held_tokens: Sequence[int] = ()) -> None:
        """Offers groups. `held_tokens`: in a reminder, the tokens of each group received so far."""
        begin = 0
        for part in parts_of(specs):
            self.tell(offer=pb.OfferGroups(groups=part, held_tokens=held_tokens[begin : begin + len(part)]))
            begin += len(part)

    def close(self, group_ids: Sequence[GroupId], reason: str) -> None:
        self.tell(close=pb.CloseGroups(group_ids=group_ids, reason=reason))

    def accuse(self, peer_id: PeerId, reason: str, *, is_certain: bool) -> None:
        accused = pb.WorkerAccused(peer_id=peer_id, reason=one_line(reason, REASON_CHARS_MAX), is_certain=is_certain)
        self._accusations[peer_id] = accused  # until the coordinator, which may be away, bars the worker
        self.tell(accused=accused)

    def on_answer(self, group: TrainGroup) -> None:
        """Answers of evaluations are audited like rollouts for training."""
        self.auditor.consider((group,))

    def on_evaluation(self, row: Mapping[str, object]) -> None:
        for sink in self.loop.sinks[1:]:  # metrics.jsonl, the first, has only rows of steps
            sink.write({**row, "step": self.loop.step, "eval/version": row["step"]})

    def _on_step(self) -> None:
        self.tell(report=self.report())

    def on_version(self, version: Version) -> None:
        self.pool.on_published(version)

    def _on_lost_chunks(self, what: str) -> None:
        self.publisher.replace_lost(what)

    def on_artifact(self, artifact: pb.VersionPublished) -> None:
        self.tell(published=artifact)

    def _numbers_now(self) -> Mapping[str, float]:
        """Numbers for Prometheus, at each of its requests."""
        text, since = self.loop.waiting
        return {"step": self.loop.step, "waiting_s": monotonic() - since if text else 0.0}
