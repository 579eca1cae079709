"""The invariants of a simulated run, checked from outside: `Inspector` looks at the living daemons every few virtual seconds,
`Observer` at every message on the wires, every stored transaction and every trained step; `EventLog` keeps the run's record. No
daemon sees any of it. A `Violation` names the invariant:

1. No token with lag above S is ever trained on.
2. A rollout is trained at most once; a finished, admitted rollout is not lost.
3. A worker's weights are bit-identical to the version it claims, or it does not generate under that version.
4. Applying a version is atomic.
5. Any process can be killed at any moment and come back; the run goes on.
6. Once faults stop, every active worker reaches the newest version and the learner makes progress.
7. No wait is unbounded and none is silent.

Daemons that are frozen, dishonest or ended are skipped; a transient state counts only once it has lasted.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from echo2.base.ids import GroupId, LeaseId, PeerId, Step, Version
from echo2.base.rollout import Rollout, Verdict, VersionSpan
from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.node import BroadcastNode
from echo2.broadcast.route import FORGOTTEN_S
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.fleet.record import COMPLETE
from echo2.coordinator.leases.lease import Lease
from echo2.coordinator.planning.advice import lease_waits
from echo2.coordinator.store import StateChanges
from echo2.learner.learner import LearnerDaemon
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.groups import Batch, Insertion, TurnOf, evaluated_version, root_of
from echo2.sim.machine import Process
from echo2.sim.tiny_model import FINGERPRINT_KEY, logprobs_of
from echo2.sim.wires import End
from echo2.trust.identity import NodeCertificate
from echo2.weights import HostWeights
from echo2.wire.gen.echo2.v1 import coordinator_pb2, ingest_pb2, journal_pb2
from echo2.wire.rollout import segments_from_report, verdicts_from_message
from echo2.worker.worker import WorkerDaemon

if TYPE_CHECKING:
    from echo2.sim.world import World

VERDICT_WAIT_S = 50.0  # reconnects (15 s backoff), a restart of the learner and its replay
DEADLINE_SLACK_S = 10.0  # the coordinator looks once a second; it may be frozen for some
STALL_SLACK_S = 7.0  # a session's tick and the pauses of its peers
AGREE_S = 14.0  # how long the learner's and the coordinator's lists of groups may differ: three reminders
QUEUED_S = 1.0  # with a longer uplink backlog, a message larger than a packet may not have arrived yet
UNASKED_S = 9.0
UNKNOWN_S = 60.0
"""How long a paid machine may be missing from the coordinator's journal: a few polls of the cloud, which answers most of them."""
WORK_S = 60.0  # how long a learner may work on one step
CLAIMS = "it claims"  # how the reason begins with which a worker is barred whose claimed tokens never came
# Names in the counts of events: what happened to a malicious worker, and to an artifact that stalled.
SHUNNED, PAUSED = "malicious worker is shunned", "malicious worker is given no leases for a while"
STOPPED, AGAIN_CAME, AGAIN_TRIED, AGAIN_GONE = (  # how it began, and each way in which it can end
    "artifact stops coming",
    "stalled artifact: a chunk of it comes after all",
    "stalled artifact: tried again after a while",
    "stalled artifact: dropped or published anew",
)

Daemon = CoordinatorDaemon | LearnerDaemon | WorkerDaemon


class Inspector:
    """Inspects a world's daemons. Times are virtual seconds."""

    def __init__(self, world: World) -> None:
        self._world, self._truth, self._machines, self._counts = world, world.truth, world.machines, world.faults
        self.holds_training = False  # the world lets no step end, so a long step is no fault
        self._now = world.loop.time
        self._since: dict[Hashable, float] = {}
        self._bars: Counter[PeerId] = Counter()
        self._stalled: dict[tuple[Hashable, ArtifactKey], int] = {}  # chunks held when it stalled
        self._seen: set[Hashable] = set()

    def look(self) -> None:
        """Inspects all daemons once."""
        self._seen = set()
        self._world.judged(self._look)
        self._since = {key: since for key, since in self._since.items() if key in self._seen}

    def _look(self) -> None:
        for name, daemon in self._world.daemons.items():
            process = self._machines[name].process
            if process is not None and self._is_to_be_judged(name):
                process.context.copy().run(self._look_at, name, daemon)  # with its own clock
        self._look_at_agreement(self._world.daemons)

    def _is_to_be_judged(self, name: str) -> bool:
        process = self._machines[name].process
        is_up = process is not None and not process.has_ended and not process.is_frozen
        return is_up and name not in self._truth.liars

    def _look_at(self, name: str, daemon: Daemon) -> None:
        life = (name, self._machines[name].lives)
        if isinstance(daemon, WorkerDaemon):
            self._look_at_worker(name, life, daemon)
        elif isinstance(daemon, LearnerDaemon):
            self._look_at_learner(life, daemon)
        else:
            self._look_at_coordinator(life, daemon)

    def _lasts_s(self, *key: Hashable) -> float:
        """Seconds for which `key` has held at every inspection so far; 0 the first time."""
        self._seen.add(key)
        return self._now() - self._since.setdefault(key, self._now())

    # ---- workers

    def _look_at_worker(self, name: str, life: Hashable, daemon: WorkerDaemon) -> None:
        worker = daemon.worker
        if worker is None:
            return  # still enrolling; `daemon.waits` reports that
        if worker.weights is not None and worker.weights.host.version is not None:
            self._truth.committed(name, worker.weights.host)
        reports, truth = worker.reports, self._truth
        if reports._under_way and reports._stub is not None:  # otherwise it waits for the learner, and reports that
            first = reports._sequence - len(reports._under_way)
            truth.waits_since(name, self._lasts_s(life, "verdict", first), VERDICT_WAIT_S, "a verdict")
        self._look_at_way(name, life, worker.node)

    def _look_at_way(self, name: str, life: Hashable, node: BroadcastNode) -> None:
        """A worker must request every artifact that it lacks on its way, or have paused a stalled one for a limited time."""
        library, planner, wanted = node.library, node.planner, node.session.artifacts
        missing = [key for key in planner.path(node.reader.version) if not library.entries[key].is_complete]
        for key in missing:
            if key not in planner.stalled and (key not in wanted or not wanted[key].is_wanted):
                asks = self._lasts_s(life, "unasked", key) < UNASKED_S
                self._truth.check(7, asks, f"{name} lacks {library.entries[key].artifact} and does not ask for it")
        for key in planner.stalled & library.entries.keys():
            since_s = self._lasts_s(life, "stalled", key)
            self._truth.waits_since(name, since_s, FORGOTTEN_S + STALL_SLACK_S, "another try of what has stopped")
            if (life, key) not in self._stalled:
                self._stalled[(life, key)] = len(library.entries[key].digests)
                self._counts[STOPPED] += 1
        over = [key for owner, key in self._stalled if owner == life and key not in planner.stalled]
        for key in over:
            count, entry = self._stalled.pop((life, key)), library.entries.get(key)
            is_growing = entry is not None and len(entry.digests) > count
            self._counts[AGAIN_GONE if entry is None else AGAIN_CAME if is_growing else AGAIN_TRIED] += 1

    # ---- learner and coordinator

    def _look_at_learner(self, life: Hashable, daemon: LearnerDaemon) -> None:
        waits_for, _ = daemon.waits_for
        if daemon.learner is not None and not waits_for and not self.holds_training:
            works_s = self._lasts_s(life, "works", daemon.learner.loop.step)
            self._truth.waits_since("learner", works_s, WORK_S, "a step, and does not say what it waits for")

    def _look_at_coordinator(self, life: Hashable, daemon: CoordinatorDaemon) -> None:
        hub = daemon.hub
        if hub is None:
            return
        now = hub.clock.now()
        for lease in hub.book.leases.values():
            if now > max(lease.deadline, hub.started_at):
                late_s = self._lasts_s(life, "late", lease.lease_id, lease.deadline)
                self._truth.waits_since("coordinator", late_s, DEADLINE_SLACK_S, "a lease past its deadline")
        for machine_id in self._world.cloud.there if self._world.cloud is not None else ():
            known = hub.money.machines.get(machine_id)
            if known is None or not known.is_open:
                since_s, what = self._lasts_s(life, "rented", machine_id), f"machine {machine_id}, which costs money"
                self._truth.waits_since("coordinator", since_s, UNKNOWN_S, f"{what}, to be known")
        waits = lease_waits(hub.book, now)
        self._truth.waits("coordinator", hub.book.queued > 0, waits[0][0] if waits else "")
        for peer, record in hub.book.records.workers.items():
            if record.barred_until > now and peer in self._truth.liar_ids:
                self._counts[PAUSED] += self._lasts_s(life, "paused", peer, record.barred_until) == 0.0
            if record.bars > self._bars[peer] and record.why.startswith(CLAIMS):
                member = hub.membership.members.get(peer)
                who = member.name if member is not None else "a worker"
                self._truth.check(6, peer in self._truth.liar_ids, f"{who} is honest and shunned: {record.why}")
                self._counts[SHUNNED] += 1
            self._bars[peer] = record.bars

    def _look_at_agreement(self, daemons: Mapping[str, Daemon]) -> None:
        """While their session is up, the coordinator must know exactly the groups that the learner waits for."""
        learner, coordinator = daemons.get("learner"), daemons.get("coordinator")
        if not isinstance(learner, LearnerDaemon) or not isinstance(coordinator, CoordinatorDaemon):
            return
        if not self._is_to_be_judged("learner") or not self._is_to_be_judged("coordinator"):
            return
        wires = self._world.wires
        if wires.is_cut_off("learner", "coordinator"):
            return  # their session may still look open to both
        if any(self._machines[name].link.up_free_at - self._now() > QUEUED_S for name in ("learner", "coordinator")):
            return  # messages are queued behind chunks on an uplink
        running, hub = learner.learner, coordinator.hub
        if hub is None or hub.learner.session is None or running is None or not running.session.is_connected:
            return
        pool, booked = running.pool, set(hub.book.groups)
        lacking = {group.spec.group_id for group in pool.groups.lacking}
        held = booked & pool.groups.groups.keys()
        key = (self._machines["learner"].lives, self._machines["coordinator"].lives, hub.learner.session)
        self._truth.agree(self._lasting(lacking - booked, key, "unknown"), self._lasting(booked - held, key, "closed"))

    def _lasting(self, groups: Collection[GroupId], key: Hashable, what: str) -> set[GroupId]:
        return {group for group in groups if self._lasts_s(what, key, group) >= AGREE_S}


KEPT_MAX = 20_000  # some MB of text; the hash covers all


class EventLog:
    """A hash over all events, which two runs share only if the same happened at the same virtual times in the same order, and lines
    for the important ones. `left_out`: text to mask because it differs without meaning, such as a folder's random name."""

    def __init__(self, now: Callable[[], float], left_out: str) -> None:
        self._now, self._left_out = now, left_out
        self._hash = hashlib.blake2b(digest_size=16)
        self._lines: deque[str] = deque(maxlen=KEPT_MAX)

    def trace(self, who: str, text: str) -> None:
        """Adds an event to the hash only."""
        for name in (self._left_out, self._left_out.encode().hex()):  # frames are traced in hex
            text = text.replace(name, "~")
        self._hash.update(f"{self._now():.9f} {who} {text}\n".encode())

    def tell(self, who: str, text: str) -> None:
        """Adds an event to the hash and to the readable lines."""
        text = text.replace(self._left_out, "~")
        self.trace(who, text)
        self._lines.append(f"{self._now():9.3f} s  {who:<12} {text}")

    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


_SAID: dict[tuple[str, int], type[Message]] = {
    ("/echo2.v1.Coordinator/WorkerSession", 0): coordinator_pb2.WorkerMessage,
    ("/echo2.v1.Coordinator/WorkerSession", 1): coordinator_pb2.WorkerOrder,
    ("/echo2.v1.Coordinator/LearnerSession", 0): coordinator_pb2.LearnerMessage,
    ("/echo2.v1.Coordinator/LearnerSession", 1): coordinator_pb2.LearnerOrder,
    ("/echo2.v1.Ingest/Report", 0): ingest_pb2.RolloutReport,
    ("/echo2.v1.Ingest/Report", 1): ingest_pb2.RolloutVerdict,
}
"""Message type by method and sending side: 0 the caller, 1 the server."""


class Observer:
    """Observes a world, and tells it of each violation."""

    def __init__(self, world: World) -> None:
        self._world, self.truth, self._judge = world, world.truth, world.judged
        self.counts: Counter[str] = Counter()
        self.said: set[str] = set()  # `message.field` of all fields ever set in a message
        self.kept_leases: set[tuple[LeaseId, int]] = set()  # (lease, attempt) ever stored by the coordinator
        self.run_fingerprints: dict[Version, str] = {}
        self.groups: OpenGroups | None = None
        self._methods: dict[tuple[int, int], str] = {}
        self._silent: Counter[str] = Counter()  # consecutive heartbeats of an idle worker that name no wait

    # ---- the wires

    def tap(self, end: End, frame: Any) -> None:
        """Called with every frame as it leaves its sender: of a call, or of a stream between nodes."""
        number, kind, payload = frame if len(frame) == 3 else (0, "frame", frame[0])
        key = (end.wire.number, number)
        if kind == "frame":
            self._called(end)
        elif kind == "open":
            self._methods[key] = payload[0]
            self._called(end)
        text = payload.hex() if isinstance(payload, bytes) else str(payload[0]) if isinstance(payload, tuple) else ""
        self._world.events.trace(end.process.name, f"{end.peer.process.name} {number} {kind} {text}")
        if kind != "message":
            return
        kind_of = _SAID.get((self._methods.get(key, ""), end.side))
        if kind_of is not None:
            message = kind_of.FromString(payload)
            self._note_fields(message)
            self._judge(lambda: self._said(end.process.name, message))

    def _called(self, end: End) -> None:
        """Learns a liar's peer ID from the certificate with which it calls."""
        pair = end.wire.caller_pair
        if end.side == 0 and pair is not None and end.process.name in self.truth.liars:
            self.truth.liar_ids.add(NodeCertificate.parse(pair[1], "a liar's").peer_id)

    def _note_fields(self, message: Any) -> None:
        for field, value in message.ListFields():
            self.said.add(f"{message.DESCRIPTOR.name}.{field.name}")
            if field.message_type is not None:
                for part in value if field.is_repeated else (value,):
                    self._note_fields(part)

    def _said(self, sender: str, message: Any) -> None:
        match message:
            case coordinator_pb2.WorkerMessage() if message.HasField("heartbeat"):
                self._beat(sender, message.heartbeat)
            case coordinator_pb2.WorkerOrder() if message.HasField("lease_grant"):
                self._granted(message.lease_grant)
            case coordinator_pb2.LearnerMessage():
                self._learner_said(message)
            case ingest_pb2.RolloutReport():
                self.truth.reported(sender, segments_from_report(message))
            case ingest_pb2.RolloutVerdict():
                self._judged(message)

    def _beat(self, who: str, beat: coordinator_pb2.Heartbeat) -> None:
        if who in self.truth.liars:
            return
        is_idle = not (beat.running_sequences or beat.waiting_sequences or self._world.holds_leases(who))
        self._silent[who] = self._silent[who] + 1 if is_idle and not beat.waits_for else 0
        is_idle = self._silent[who] > 1  # a lease may have ended after the heartbeat was composed
        self._judge(lambda: self.truth.waits(who, is_idle, beat.waits_for))
        if beat.has_version:
            expected = self.run_fingerprints.get(Version(beat.version))
            holds = beat.fingerprint == expected
            self.truth.check(3, holds, f"{who} is at version {beat.version} with {beat.fingerprint}, not {expected}")

    def _granted(self, grant: coordinator_pb2.LeaseGrant) -> None:
        ticket = grant.ticket
        self.counts["leases granted"] += not grant.is_renewal
        is_kept = (LeaseId(ticket.lease_id), ticket.attempt) in self.kept_leases
        self.truth.check(5, is_kept, f"lease {ticket.lease_id} is told before it is kept")
        if ticket.worker_peer_id in self.truth.liar_ids:
            self.truth.tainted.add(GroupId(ticket.group_id))  # its tokens are not checked from now on

    def _learner_said(self, message: coordinator_pb2.LearnerMessage) -> None:
        match message.WhichOneof("kind"):
            case "accused":
                who, reason = message.accused.peer_id, message.accused.reason
                self.truth.check(2, who in self.truth.liar_ids, f"{who} is honest and accused: {reason}")
            case "close":
                answered = message.close.group_ids if message.close.reason == COMPLETE else ()
                self.counts["questions answered"] += sum(evaluated_version(GroupId(n)) is not None for n in answered)
            case "published":
                kind = "keyframes" if not message.published.has_parent else "deltas"
                self.counts[f"{kind} published"] += 1

    def _judged(self, message: ingest_pb2.RolloutVerdict) -> None:
        for verdict in verdicts_from_message(message):
            self.counts[f"segments answered: {verdict.verdict.value}"] += 1
            if verdict.verdict is Verdict.ADMITTED:
                self.truth.acknowledged(verdict.group_id, verdict.index)

    # ---- what daemons store and train

    def kept(self, changes: StateChanges) -> None:
        """The coordinator's store has committed `changes`."""
        leases = (row for row in changes.rows.values() if isinstance(row, Lease))
        self.kept_leases.update((lease.lease_id, lease.attempt) for lease in leases)

    def learner_prepared(self, process: Process, groups: OpenGroups) -> None:
        """A learner has restored its state."""
        if process.has_ended:
            return
        self.groups = groups
        # Groups that became stale during the outage; the learner reports and journals them when it first settles.
        for closure in groups.closures:
            self.truth.dropped(closure.group_id)
        self._judge(lambda: self.truth.learner_restored(groups))

    def noted(self, process: Process, record: journal_pb2.JournalRecord) -> None:
        """The learner has appended `record` to its journal."""
        if record.HasField("closed") and not process.has_ended:
            self.truth.dropped(GroupId(record.closed.group_id))


RolloutName = tuple[GroupId, int]


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: int, text: str) -> None:
        super().__init__(f"invariant {invariant}: {text}")
        self.invariant = invariant


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """The sampled tokens of one turn, under the group ID with which it was leased."""

    group_id: GroupId
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]


def turns_of(rollout: Rollout, insertions: Sequence[Insertion]) -> list[SampledTurn]:
    """Splits a multi-turn rollout into its turns: each insertion by the task world begins a new one."""
    versions = [span.version for span in rollout.version_spans for _ in range(span.count)]
    cuts = [0, *(insertion.position for insertion in insertions), len(versions)]
    turns = []
    for number, (begin, end) in enumerate(pairwise(cuts)):
        spans = tuple(VersionSpan(version, 1) for version in versions[begin:end])
        name, index = TurnOf(rollout.group_id, rollout.index, number).group_id, 0 if number else rollout.index
        turns.append(SampledTurn(name, index, rollout.token_ids[begin:end], rollout.logprobs[begin:end], spans))
    return turns


class Truth:
    """State and checks of the invariants. Every check counts in `checks` and raises `Violation` if it fails. `liars`: dishonest
    machines, whose reports are not checked; `liar_ids`: their peer IDs; `tainted`: groups ever leased to one of them."""

    def __init__(self, staleness_bound: int) -> None:
        self.staleness_bound = staleness_bound
        self.fingerprints: dict[Version, int] = {}
        self.liars: set[str] = set()
        self.liar_ids: set[str] = set()
        self.tainted: set[GroupId] = set()
        self.checks: Counter[int] = Counter()
        self.step = Step(0)
        self._trained_at: dict[GroupId, Step] = {}
        self._models: dict[Step, tuple[tuple[GroupId, ...], int]] = {}
        self._acknowledged: set[RolloutName] = set()
        self._dropped: set[GroupId] = set()

    def check(self, invariant: int, holds: bool, text: str) -> None:
        """Counts a check of an invariant."""
        self.checks[invariant] += 1
        if not holds:
            raise Violation(invariant, text)

    # ---- versions

    def published(self, version: Version, fingerprint: int) -> None:
        """The learner has published a version: its fingerprint must never change."""
        known = self.fingerprints.setdefault(version, fingerprint)
        self.check(5, known == fingerprint, f"version {version} was {known:016x} and is {fingerprint:016x} now")

    def committed(self, who: str, host: HostWeights) -> None:
        """A worker's host copy has moved to another version: checks its bits, not what it reports."""
        version = host.version
        assert version is not None, "what was committed has a version"
        bits = HostWeights.from_tensors(host.tensors(), version, FINGERPRINT_KEY, copy=False).fingerprint()
        expected = self.fingerprints.get(version)
        self.check(4, bits == expected, f"the host copy of {who} at version {version} has fingerprint {bits:016x}")

    def reported(self, who: str, segments: Sequence[Rollout]) -> None:
        """A worker has sent tokens: each must have been sampled by the version that its span names."""
        if who in self.liars:
            return
        for segment in segments:
            if segment.group_id in self.tainted:
                continue
            self._check_tokens(who, segment.group_id, segment.index, segment.offset, segment)
            exact = evaluated_version(segment.group_id)
            others = {span.version for span in segment.version_spans} - {exact}
            self.check(3, exact is None or not others, f"{who} evaluates version {exact} by tokens of {others}")

    def _check_tokens(
        self, who: str, group_id: GroupId, index: int, offset: int, tokens: Rollout | SampledTurn
    ) -> None:
        position = 0
        for span in tokens.version_spans:
            fingerprint = self.fingerprints.get(span.version)
            self.check(3, fingerprint is not None, f"{who}: version {span.version} was never published")
            for _ in range(span.count):
                token = tokens.token_ids[position]
                expected = logprobs_of(fingerprint or 0, group_id, offset + position)[token]
                where = f"{who}: token {offset + position} of rollout {index} of {group_id}"
                text = f"{where} was not sampled by version {span.version}"
                self.check(3, tokens.logprobs[position] == expected, text)
                position += 1

    # ---- training

    def acknowledged(self, group_id: GroupId, index: int) -> None:
        """The learner has acknowledged to a worker that it durably holds this finished rollout."""
        self._acknowledged.add((group_id, index))

    def dropped(self, group_id: GroupId) -> None:
        """The learner has closed a group without training on it."""
        self._dropped.add(group_id)

    def trained(self, batch: Batch, fingerprint: int) -> None:
        """The learner has trained a step, possibly again after a restart."""
        groups = tuple(group.spec.group_id for group in batch.groups)
        known = self._models.get(batch.step)
        if known is not None:
            self.check(2, known[0] == groups, f"step {batch.step} trained {known[0]} and now trains {groups}")
            self.check(5, known[1] == fingerprint, f"step {batch.step} gave other weights when trained again")
        self._models[batch.step] = (groups, fingerprint)
        for group in batch.groups:
            name = group.spec.group_id
            at = self._trained_at.setdefault(name, batch.step)
            self.check(2, at == batch.step, f"group {name} was trained at step {at} and again at step {batch.step}")
            is_evaluation = evaluated_version(name) is not None
            self.check(2, not is_evaluation, f"group {name} of an evaluation is trained at step {batch.step}")
            for span in (span for rollout in group.rollouts for span in rollout.version_spans):
                text = f"a token of version {span.version} is trained at step {batch.step}, S = {self.staleness_bound}"
                self.check(1, batch.step - span.version <= self.staleness_bound, text)
            for number, rollout in enumerate(group.rollouts):
                for turn in turns_of(rollout, group.insertions[number] if group.insertions else ()):
                    if turn.group_id not in self.tainted:
                        self._check_tokens("the learner", turn.group_id, turn.index, 0, turn)
        self.step = max(self.step, Step(batch.step + 1))

    def learner_restored(self, groups: OpenGroups) -> None:
        """A learner has restarted: every rollout that it acknowledged must be trained on, dropped for a reason, or still held."""
        step = groups.next_step
        self.check(2, step >= self.step, f"the learner comes back at step {step}, it had reached {self.step}")
        self.nothing_is_lost(groups, with_evaluations=True)

    def nothing_is_lost(self, groups: OpenGroups, *, with_evaluations: bool = False) -> None:
        """Checks that every acknowledged rollout is trained on, dropped or held. Evaluations' are held until they are complete."""
        for group_id, index in sorted(self._acknowledged):
            root = root_of(group_id)
            if evaluated_version(group_id) is not None and not with_evaluations:
                continue
            if root in self._trained_at or not self._dropped.isdisjoint((group_id, root)):
                continue
            group = groups.groups.get(group_id)
            is_there = group is not None and group.rollouts[index].is_finished
            self.check(2, is_there, f"rollout {index} of {group_id} was admitted and is not there any more")

    # ---- processes and waits

    def waits(self, who: str, is_idle: bool, text: str) -> None:
        """An idle daemon must say what it waits for."""
        self.check(7, bool(text) or not is_idle, f"{who} does nothing and does not say what it waits for")

    def waits_since(self, who: str, seconds: float, limit_s: float, what: str) -> None:
        self.check(7, seconds <= limit_s, f"{who} has waited {seconds:.1f} s for {what}; the limit is {limit_s} s")

    def agree(self, unknown: Collection[GroupId], closed: Collection[GroupId]) -> None:
        """Learner and coordinator must agree. `unknown`: groups the learner waits for that the coordinator does not know;
        `closed`: groups the learner has closed that the coordinator still has."""
        self.check(7, not unknown, f"the learner waits for {sorted(unknown)}, of which the coordinator does not know")
        self.check(7, not closed, f"the coordinator still gives out {sorted(closed)}, which the learner has closed")
