"""Drives the real cores of the learner on the virtual clock, as learner/runtime does on a real machine.

Shelf, ledger, offers, publication schedule, history and segments decide; the real codec encodes; this keeps the
journal and checkpoints on a simulated disk and carries the rest over the simulated network. Guarantees, as the
runtime's: ADMITTED is answered only once the rollout is synced, a batch is trained only once its composition is.
Leaves to others: faults, what must hold.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, field

from echo2.base.errors import FingerprintMismatch, StateError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rng import derived_rng, derived_seed
from echo2.base.rollout import GroupSpec, Rollout, SamplingParams, SegmentVerdict, Verdict
from echo2.broadcast.topology import BroadcastPlan
from echo2.coordinator import lease_events as le
from echo2.coordinator.telemetry import LearnerHello, LearnerReport, LinkReport
from echo2.learner.batch import Batch
from echo2.learner.deliveries import NEWS_S
from echo2.learner.group import Draw
from echo2.learner.history import Began, Drawn, Dropped, Finished, History, Opened, drawn_of
from echo2.learner.offers import OfferConfig, Reminders, consume_step, groups_wanted
from echo2.learner.publication import PublicationConfig, PublicationSchedule
from echo2.learner.shelf import Shelf, ShelfConfig
from echo2.sim import messages as m
from echo2.sim.broadcast_driver import RUN, WIRE_SCALE, BroadcastDriver
from echo2.sim.checkers import Truth
from echo2.sim.disk import ChunkDisk, KeptCheckpoint, LearnerDisk
from echo2.sim.host import Host
from echo2.sim.network import End, Network
from echo2.sim.publish_driver import PublishDriver
from echo2.sim.scene import Sabotage, Scene
from echo2.sim.tiny_model import (
    FINGERPRINT_KEY,
    STOP_TOKEN,
    VOCABULARY,
    base_weights,
    copied,
    reward_of,
    trained,
)
from echo2.staleness.ledger import Ledger
from echo2.trust.identity import Identity
from echo2.weights import HostWeights

REMIND_LOOK_S = 1.0


@dataclass(slots=True)
class LearnerMachine:
    """What outlives the process."""

    identity: Identity
    disk: LearnerDisk
    chunks: ChunkDisk


@dataclass(slots=True)
class ReportStream:
    """A worker's stream: its reports are answered in order, one at a time."""

    end: End
    peer: PeerId
    waiting: deque[object] = field(default_factory=deque)
    is_busy: bool = False


class LearnerDriver:
    """One process of the learner. `start` once."""

    def __init__(self, scene: Scene, truth: Truth, host: Host, machine: LearnerMachine, network: Network) -> None:
        self.scene, self.truth, self.host, self.machine, self.network = scene, truth, host, machine, network
        self.disk = machine.disk
        bound = scene.learner_bound
        rollouts = scene.groups_per_step * scene.rollouts_per_group
        config = ShelfConfig(
            bound, rollouts, scene.rollouts_per_group, VOCABULARY, drops_equal_rewards=scene.drops_equal_rewards
        )
        self.batcher = Shelf(config, Ledger(bound))
        self.offers = OfferConfig(rollouts, scene.rollouts_per_group, bound)
        self.schedule = PublicationSchedule(PublicationConfig(bound, chain_max=4))
        self.history = History()
        self.weights = base_weights(scene.seed)
        self.step = Step(0)
        self.is_drawing = True
        self.drawn: tuple[GroupId, ...] = ()
        self.banned: set[PeerId] = set()
        self.cursor = 0
        self.planned_cap: int | None = None
        self.broadcast = BroadcastDriver(
            host, network, machine.identity, machine.chunks, scene.address_of, lambda: None, scene.seed
        )
        self.broadcast.suffer(scene.sabotage)
        self.broadcast.publisher = machine.identity.peer_id
        self.publisher = PublishDriver(
            scene, truth, host, machine.disk, self.batcher, self.schedule, self.broadcast, self.weights
        )
        self.publisher.tell = self._send
        self._opened_in: dict[GroupId, Step] = {}
        self._retries: deque[Draw] = deque()
        self._is_training = False
        self._waits_since: float | None = None
        self._reminders = Reminders()
        self._coordinator: End | None = None
        self._failures = 0
        self._rng = derived_rng(scene.seed, "learner", host.incarnation)

    # ---- start

    def start(self) -> None:
        self._prepare()
        self.network.listen(self.host, self._accept)
        self.broadcast.start()
        self.publisher.take_up()
        for group in list(self.batcher.groups.values()):
            for rollout in group.rollouts:
                if rollout.is_finished and rollout.index not in group.scored:
                    self._begin_scoring(rollout)
        self._settle()
        self.truth.learner_restored(self.batcher, self.step)
        self._reach_coordinator()
        if self.schedule.is_due(self.step):
            version, snapshot = Version(self.step), copied(self.weights)
            self.publisher.settled(lambda: self.publisher.publish_soon(version, snapshot))
        self._next_batch()
        self.host.after(REMIND_LOOK_S, self._remind)
        self.host.after(NEWS_S, self._tell_deliveries)

    def _prepare(self) -> None:
        disk = self.disk
        checkpoint = disk.checkpoints[-1] if disk.checkpoints else None
        journal_from = Step(0)
        if checkpoint is not None:
            self._put_back(checkpoint)
            journal_from = checkpoint.journal_from
        elif not disk.records:
            disk.begin(Began(RUN, Step(0), 0, (Version(0),)))
            self.truth.published(
                Version(0), HostWeights.from_tensors(self.weights, Version(0), FINGERPRINT_KEY).fingerprint()
            )
            return
        if disk.is_unreadable:
            raise StateError("journal: broken record at its end")
        if not any(segment == journal_from for segment, _ in disk.records):
            raise StateError(f"journal: expected a segment of step {journal_from}, the checkpoint's, found none")
        for segment, record in disk.records:
            if segment >= journal_from and not self._is_forgotten(record):
                self.history.apply(record, segment)
        self.history.restore(self.batcher)
        disk.segment = disk.records[-1][0]
        self.cursor = max(self.cursor, self.history.cursor)
        self._opened_in = dict(self.history.opened_in)
        self._train_again()
        self.batcher.move_up()

    def _is_forgotten(self, record: object) -> bool:
        return self.scene.sabotage is Sabotage.LEDGER_FORGETS and isinstance(record, Drawn)

    def _put_back(self, checkpoint: KeptCheckpoint) -> None:
        self.weights, self.step = copied(checkpoint.weights), checkpoint.step
        self.publisher.weights = checkpoint.published
        self.schedule.newest = checkpoint.published_version
        state = copy.deepcopy(checkpoint.batcher)
        self.batcher.next_step = checkpoint.step
        self.batcher.ledger.trained = state["trained"]
        self.batcher.ledger.tokens_by_lag = state["tokens_by_lag"]
        self.batcher.counts = state["counts"]
        self.batcher.published = state["published"]

    def _train_again(self) -> None:
        while (batch := self.history.next_batch(self.batcher)) is not None:
            self._train(batch)
            version = Version(self.step)
            if version not in self.history.published:
                continue
            recorded = self.history.published[version]
            self.publisher.cut_off = None if recorded else (self.schedule.newest, dict(self.publisher.weights))
            self.publisher.weights = copied(self.weights)
            self.schedule.newest = version
            found = f"{HostWeights.from_tensors(self.weights, version, FINGERPRINT_KEY).fingerprint():016x}"
            if recorded and recorded != found:
                raise FingerprintMismatch(f"version {version}: expected {recorded}, got {found} after training again")
        self.batcher.take_closures()
        self.batcher.drop_stale()

    # ---- groups out

    def _settle(self) -> None:
        closures = self.batcher.take_closures()
        for closure in closures:
            if closure.reason != "complete":
                self.disk.append(Dropped(closure.group_id))
                self.truth.dropped(closure.group_id, closure.reason)
            if closure.retry is not None:
                self._retries.append(closure.retry)
        for reason in dict.fromkeys(closure.reason for closure in closures):
            ids = tuple(closure.group_id for closure in closures if closure.reason == reason)
            self._send(le.GroupsClosed(ids, reason))
        if any(closure.reason != "complete" for closure in closures) and (moved := self.batcher.move_up()):
            self._send(le.GroupsOffered(tuple(moved)))
        if self.is_drawing:
            wanted = groups_wanted(self.offers, self.planned_cap, self.batcher.in_flight_groups)
            specs = tuple(self._open_next() for _ in range(wanted))
            if specs:
                self._send(le.GroupsOffered(specs))

    def _open_next(self) -> GroupSpec:
        if self._retries:
            draw = self._retries.popleft()
        else:
            draw = self._draw(self.cursor)
            self.cursor = draw.cursor + 1
        step = consume_step(self.offers, self.batcher.next_step, self.batcher.in_flight_groups)
        spec = self.batcher.open_group(draw, step)
        self.disk.append(Opened(draw, spec))
        self._opened_in[spec.group_id] = self.disk.segment
        return spec

    def _draw(self, cursor: int) -> Draw:
        seed = derived_seed(self.scene.seed, "group", cursor)
        sampling = SamplingParams(max_new_tokens=self.scene.max_new_tokens, stop_token_ids=(STOP_TOKEN,), seed=seed)
        prompt = tuple(3 + (seed >> shift) % (VOCABULARY - 3) for shift in range(0, 24, 4))
        return Draw(cursor, 0, prompt, sampling)

    # ---- segments in

    def _accept(self, end: End, kind: str) -> None:
        peer = self.network.peer_ids.get(end.peer.host.name)
        if kind == "chunks":
            self.broadcast.accept(end)
        elif kind == "report" and peer is not None:
            stream = ReportStream(end, peer)
            end.on_message = lambda message: self._queue(stream, message)
        else:
            end.close("not served here")

    def _queue(self, stream: ReportStream, message: object) -> None:
        stream.waiting.append(message)
        self._serve(stream)

    def _serve(self, stream: ReportStream) -> None:
        while stream.waiting and not stream.is_busy:
            message = stream.waiting.popleft()
            if isinstance(message, m.AskPartials):
                stream.end.send(self._partials(stream, message.ticket))
            elif isinstance(message, m.WorkerReport):
                self._take_report(stream, message)

    def _refusal(self, stream: ReportStream, ticket: m.Ticket) -> str:
        if stream.peer in self.banned:
            return f"{stream.peer} is banned"
        if not self.truth.is_signed(ticket):
            return "the ticket is not signed by the coordinator"
        return "" if ticket.worker_id == stream.peer else f"the ticket is another worker's, not of {stream.peer}"

    def _partials(self, stream: ReportStream, ticket: m.Ticket) -> m.Partials:
        refusal = self._refusal(stream, ticket)
        held = None if refusal else self.batcher.held_rollouts(ticket.group_id, ticket.attempt)
        if held is None:
            return m.Partials(ticket.lease_id, (), refusal or f"group {ticket.group_id} is closed or was taken over")
        return m.Partials(ticket.lease_id, tuple(rollout for rollout in held if rollout.token_ids))

    def _take_report(self, stream: ReportStream, report: m.WorkerReport) -> None:
        ticket = report.ticket
        refusal = self._refusal(stream, ticket)
        if refusal:
            stream.end.send(m.ReportVerdict(report.sequence, (), refusal))
            return
        verdicts: list[SegmentVerdict] = []
        for segment in report.segments:
            if segment.group_id != ticket.group_id:
                verdicts.append(SegmentVerdict(segment.group_id, segment.index, Verdict.REFUSED, 0, "another group"))
                continue
            verdicts.append(self.batcher.receive(segment, ticket.attempt, stream.peer))
        for peer, reason in self.batcher.untruths.take():
            self._accuse(peer, reason)
        for verdict in verdicts:
            self.network.counts[f"segments answered: {verdict.verdict.value}"] += 1
            group = self.batcher.groups.get(verdict.group_id)
            if verdict.verdict is Verdict.ADMITTED and group is not None:
                rollout = group.rollouts[verdict.index]
                if self.scene.sabotage is not Sabotage.ADMITTED_LOST:
                    self.disk.append(Finished(rollout))
                self._begin_scoring(rollout)
        self._settle()
        answer = m.ReportVerdict(report.sequence, tuple(verdicts))
        if not any(v.verdict in (Verdict.ADMITTED, Verdict.DUPLICATE) for v in verdicts):
            stream.end.send(answer)
            return
        stream.is_busy = True
        self._commit(lambda: self._acknowledge(stream, answer))

    def _accuse(self, peer: PeerId, reason: str) -> None:
        self.truth.accused(peer, reason)
        self.host.story.tell("learner", f"accuses {self.network.name_of(peer)}: {reason}")
        self.banned.add(peer)
        self.batcher.drop_sent_by(peer)
        self._send(m.Accused(peer, reason))

    def _acknowledge(self, stream: ReportStream, answer: m.ReportVerdict) -> None:
        for verdict in answer.verdicts:
            if verdict.verdict in (Verdict.ADMITTED, Verdict.DUPLICATE):
                self.truth.acknowledged(verdict.group_id, verdict.index)
        stream.is_busy = False
        stream.end.send(answer)
        self._serve(stream)

    def _commit(self, then: Callable[[], None]) -> None:
        """`then` once everything appended so far is synced."""

        def synced() -> None:
            self.disk.sync()
            then()

        self.host.after(self.scene.fsync_s, synced)

    def _begin_scoring(self, rollout: Rollout) -> None:
        self.host.after(self._rng.uniform(0.05, 0.5), lambda: self._scored(rollout))

    def _scored(self, rollout: Rollout) -> None:
        fails = (
            derived_rng(self.scene.seed, "reward", rollout.group_id, rollout.index).random() < self.scene.reward_fails
        )
        self.batcher.reward(rollout.group_id, rollout.index, None if fails else reward_of(rollout.token_ids))
        self._settle()
        if self.batcher.is_batch_ready:
            self._next_batch()

    # ---- training

    def _next_batch(self) -> None:
        if self._is_training or not self.is_drawing:
            return
        batch = self.batcher.draw_batch()
        self._settle()
        if batch is None:
            self._waits_since = self._waits_since if self._waits_since is not None else self.host.now()
            return
        self._waits_since = None
        self._is_training = True
        self.drawn = tuple(group.spec.group_id for group in batch.groups)
        self.disk.append(drawn_of(batch))
        self._commit(lambda: self.host.after(self.scene.train_s, lambda: self._trained(batch)))

    def _train(self, batch: Batch) -> None:
        assert batch.step == self.step, f"a batch of step {batch.step} at step {self.step}"
        self.weights = trained(self.weights, batch)
        self.step = Step(self.step + 1)
        self.truth.trained(batch, HostWeights.from_tensors(self.weights, Version(0), FINGERPRINT_KEY).fingerprint())

    def _trained(self, batch: Batch) -> None:
        self._train(batch)
        self.host.story.trace("learner", f"step {self.step}")
        if self.schedule.is_due(self.step):
            snapshot = copied(self.weights)
            version = Version(self.step)
            self.publisher.settled(lambda: self.publisher.publish_soon(version, snapshot))
            self.publisher.begun(version, self._checkpoint_if_due)
        else:
            self._checkpoint_if_due()

    def _checkpoint_if_due(self) -> None:
        if self.step % self.scene.checkpoint_every_steps == 0:
            self.publisher.settled(self._checkpoint)
        else:
            self._step_done()

    def _checkpoint(self) -> None:
        step = self.step
        live = {group: opened for group, opened in self._opened_in.items() if group in self.batcher.groups}
        self._opened_in = live
        self.disk.begin(Began(RUN, step, self.cursor, tuple(self.batcher.published)))
        ledger = self.batcher.ledger
        state = {
            "trained": ledger.trained, "tokens_by_lag": ledger.tokens_by_lag, "counts": self.batcher.counts,
            "published": self.batcher.published,
        }  # fmt: skip
        kept = KeptCheckpoint(
            step, copied(self.weights), self.publisher.weights, self.newest_version,
            min(live.values(), default=step), copy.deepcopy(state),
        )  # fmt: skip
        self.host.after(self.scene.checkpoint_s, lambda: self.disk.keep(kept))
        self._step_done()

    def _step_done(self) -> None:
        self._is_training, self.drawn = False, ()
        self._send(self._beat_message())
        self._next_batch()

    @property
    def is_busy(self) -> bool:
        """Whether a batch is being trained on or on its way to the disk."""
        return self._is_training

    @property
    def newest_version(self) -> Version:
        return self.publisher.newest_version

    # ---- the coordinator

    def _reach_coordinator(self) -> None:
        stale = self._hello_message() if self.scene.sabotage is Sabotage.HELLO_GAP else None
        self.network.dial(
            self.host, "coordinator", "learner", lambda end: self._hello(end, stale), lambda text: self._retry()
        )

    def _retry(self) -> None:
        self._failures += 1
        pause_s = min(15.0, 0.25 * 2 ** min(self._failures, 10)) * self._rng.uniform(0.5, 1.0)
        self.host.after(pause_s, self._reach_coordinator)

    def _hello(self, end: End, stale: LearnerHello | None) -> None:
        self._coordinator = end
        end.on_message = lambda message: self._ordered(end, message)
        end.on_closed = lambda reason: self._lost(end)
        end.send(stale or self._hello_message())

    def _hello_message(self) -> LearnerHello:
        link = self.network.links[self.host.name]
        return LearnerHello(
            protocol_version=1, run_id=RUN, address="learner", model_name="tiny", model_config_json=b"{}",
            model_digest="d", staleness_bound=self.scene.staleness_bound,
            rollouts_per_step=self.offers.rollouts_per_step, rollouts_per_group=self.offers.rollouts_per_group,
            step=self.batcher.next_step, newest_version=self.newest_version,
            open_groups=tuple(self.batcher.incomplete_specs()), full_snapshot_bytes=self.publisher.full_bytes * WIRE_SCALE,
            link=LinkReport(link.up, link.down, link.rtt_s),
        )  # fmt: skip

    def _lost(self, end: End) -> None:
        if self._coordinator is end:
            self._coordinator = None
            self._retry()

    def _send(self, message: object) -> None:
        if self._coordinator is not None:
            self._coordinator.send(message)

    def _ordered(self, end: End, order: object) -> None:
        if end is not self._coordinator:
            return
        match order:
            case m.Welcome():
                self._failures = 0
                self._beat(end, order.heartbeat_interval_s)
            case m.PlanUpdate(kappa, cap):
                self.planned_cap, self.schedule.planned_kappa = cap or None, kappa or None
                self._settle()
            case BroadcastPlan():
                self.broadcast.set_plan(order)
            case m.Refusal(message):
                raise StateError(f"the coordinator refused this learner: {message}")

    def _beat(self, end: End, interval_s: float) -> None:
        if end is self._coordinator and end.is_open:
            end.send(self._beat_message())
            self.host.after(interval_s, lambda: self._beat(end, interval_s))

    def _beat_message(self) -> m.LearnerBeat:
        lacking = frozenset(spec.group_id for spec in self.batcher.incomplete_specs())
        return m.LearnerBeat(self._report(), frozenset(self.batcher.groups), lacking)

    def _report(self) -> LearnerReport:
        counts = self.batcher.counts
        return LearnerReport(
            step=self.step, newest_version=self.newest_version, train_s=self.scene.train_s,
            buffered_rollouts=self.batcher.buffered_rollouts, open_rollouts=self.batcher.open_rollouts,
            trained_rollouts=counts.trained, waits_for=self.waits_for,
        )  # fmt: skip

    @property
    def waits_for(self) -> str:
        if self._waits_since is None:
            return ""
        ready = sum(group.is_ready for group in self.batcher.groups.values())
        return f"rollouts: {ready} of {self.offers.groups_per_step} groups complete"

    def _tell_deliveries(self) -> None:
        told = None if self._coordinator is None else self.batcher.deliveries.take(self.host.now())
        if told is not None:
            self._send(le.Delivered(tuple(le.WorkerDelivered(*astuple(one)) for one in told)))
        self.host.after(NEWS_S, self._tell_deliveries)

    def _remind(self) -> None:
        waited_s = 0.0 if self._waits_since is None else self.host.now() - self._waits_since
        if self._reminders.is_due(waited_s):
            lacking = tuple(self.batcher.incomplete_specs())
            held = tuple(self.batcher.held_tokens(spec.group_id) for spec in lacking)
            self._send(le.GroupsOffered(lacking, held))
        self.host.after(REMIND_LOOK_S, self._remind)
