"""Inspects the living daemons every few virtual seconds: waits, agreement, weights in memory, shunned workers.

Guarantees: skips daemons that are frozen, dishonest or ended; a transient state counts only once it has lasted. Leaves to
others: observing messages (observer), the invariants (checkers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping

from echo2.base.ids import GroupId, PeerId
from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.node import BroadcastNode
from echo2.broadcast.route import FORGOTTEN_S
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.leases.waits import waits
from echo2.learner.learner import LearnerDaemon
from echo2.sim.checkers import Truth, Violation
from echo2.sim.process import VirtualMachine
from echo2.sim.wires import Wires
from echo2.worker.worker import WorkerDaemon

VERDICT_WAIT_S = 50.0  # reconnects (15 s backoff), a restart of the learner and its replay
DEADLINE_SLACK_S = 10.0  # the coordinator looks once a second; it may be frozen for some
STALL_SLACK_S = 7.0  # a session's tick and the pauses of its peers
AGREE_S = 14.0
"""How long the learner's and the coordinator's lists of groups may differ: three reminders."""
QUEUED_S = 1.0
"""With a longer uplink backlog, a message larger than a packet may not have arrived yet."""
UNASKED_S = 9.0
UNKNOWN_S = 60.0
"""How long a paid machine may be missing from the coordinator's journal: a few polls of the cloud, which answers most of them."""
WORK_S = 60.0
"""How long a learner may work on one step."""
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
    """Inspects the daemons. Times are virtual seconds of `wires`."""

    def __init__(
        self, truth: Truth, machines: Mapping[str, VirtualMachine], wires: Wires, counts: Counter[str]
    ) -> None:
        self._truth, self._machines, self._wires, self._counts = truth, machines, wires, counts
        self.holds_training = False  # the world lets no step end, so a long step is no fault
        self._now = wires.loop.time
        self._since: dict[Hashable, float] = {}
        self._bars: Counter[PeerId] = Counter()
        self._stalled: dict[tuple[Hashable, ArtifactKey], int] = {}  # chunks held when it stalled
        self._seen: set[Hashable] = set()
        self._rented: Collection[str] = ()

    def look(
        self, daemons: Mapping[str, Daemon], failed: Callable[[Violation], None], rented: Collection[str] = ()
    ) -> None:
        """Inspects all daemons once. `rented`: IDs of the machines that cost money, from the provider."""
        self._seen, self._rented = set(), rented
        try:
            for name, daemon in daemons.items():
                process = self._machines[name].process
                if process is not None and self._is_to_be_judged(name):
                    process.context.copy().run(self._look_at, name, daemon)  # with its own clock
            self._look_at_agreement(daemons)
        except Violation as violation:
            failed(violation)
        self._since = {key: since for key, since in self._since.items() if key in self._seen}

    def _is_to_be_judged(self, name: str) -> bool:
        process = self._machines[name].process
        is_up = process is not None and not process.has_ended and not process.is_frozen
        return is_up and name not in self._truth.liars

    def _look_at(self, name: str, daemon: Daemon) -> None:
        life = (name, self._machines[name].lives)
        match daemon:
            case WorkerDaemon():
                self._look_at_worker(name, life, daemon)
            case LearnerDaemon():
                self._look_at_learner(life, daemon)
            case CoordinatorDaemon():
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
                self._truth.asks(name, [key] if self._lasts_s(life, "unasked", key) >= UNASKED_S else [])
        for key in planner.stalled & library.entries.keys():
            since_s = self._lasts_s(life, "stalled", key)
            self._truth.waits_since(name, since_s, FORGOTTEN_S + STALL_SLACK_S, "another try of what has stopped")
            if (life, key) not in self._stalled:
                self._stalled[(life, key)] = len(library.entries[key].digests)
                self._counts[STOPPED] += 1
        over = [key for owner, key in self._stalled if owner == life and key not in planner.stalled]
        for key in over:
            count, entry = self._stalled.pop((life, key)), library.entries.get(key)
            came = entry is not None and len(entry.digests) > count
            self._counts[AGAIN_GONE if entry is None else AGAIN_CAME if came else AGAIN_TRIED] += 1

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
        for machine_id in self._rented:
            known = hub.money.machines.get(machine_id)
            if known is None or not known.is_open:
                since_s = self._lasts_s(life, "rented", machine_id)
                self._truth.waits_since(
                    "coordinator", since_s, UNKNOWN_S, f"machine {machine_id}, which costs money, to be known"
                )
        told = waits(hub.book, now)
        self._truth.waits("coordinator", hub.book.queued > 0, told[0][0] if told else "")
        for peer, record in hub.book.records.workers.items():
            if record.barred_until > now and peer in self._truth.liar_ids:
                self._counts[PAUSED] += self._lasts_s(life, "paused", peer, record.barred_until) == 0.0
            if record.bars > self._bars[peer] and record.why.startswith(CLAIMS):
                member = hub.membership.members.get(peer)
                self._truth.shunned(member.name if member is not None else "a worker", peer)
                self._counts[SHUNNED] += 1
            self._bars[peer] = record.bars

    def _look_at_agreement(self, daemons: Mapping[str, Daemon]) -> None:
        """While their session is up, the coordinator must know exactly the groups that the learner waits for."""
        learner, coordinator = daemons.get("learner"), daemons.get("coordinator")
        if not isinstance(learner, LearnerDaemon) or not isinstance(coordinator, CoordinatorDaemon):
            return
        if not self._is_to_be_judged("learner") or not self._is_to_be_judged("coordinator"):
            return
        if self._wires.is_blocked("learner", "coordinator") or self._wires.is_blocked("coordinator", "learner"):
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
