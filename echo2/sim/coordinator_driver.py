"""Drives the real cores of the coordinator on the virtual clock, as coordinator/runtime does on a real machine.

Lease book, membership, learner board, planner and broadcast plan decide; this keeps their state on a simulated disk
before anything that follows from it is sent, and signs tickets. Guarantees, as the runtime's: what came in one turn is
kept in one write, then told. Leaves to others: faults, what must hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from echo2.base.errors import EchoError
from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.topology import BroadcastPlan
from echo2.broadcast.weighting import is_fit, weighted_plan
from echo2.coordinator import accounts
from echo2.coordinator import lease_events as le
from echo2.coordinator.board import LearnerBoard
from echo2.coordinator.lease_book import LeaseBook, LeaseRules
from echo2.coordinator.lease_waits import waits
from echo2.coordinator.membership import Activation, Change, Liveness, LivenessRule, Membership, Setting
from echo2.coordinator.options import CoordinatorOptions
from echo2.coordinator.planner_input import broadcast_nodes, fleet_snapshot, mark_shunned, needs_of, plan_config
from echo2.coordinator.saved import Changes
from echo2.coordinator.telemetry import Heartbeat, LearnerHello, PublishedVersion, WorkerHello
from echo2.coordinator.trials import Trials
from echo2.cost_model.plan import Plan
from echo2.cost_model.planner import plan as pool_plan
from echo2.sim import messages as m
from echo2.sim.checkers import Truth
from echo2.sim.disk import CoordinatorDisk
from echo2.sim.host import Host
from echo2.sim.network import End, Network
from echo2.sim.scene import Sabotage, Scene

TICK_S = 0.5
SETTLE_S = 0.2
BROADCAST_BYTES = 1 << 20


@dataclass(slots=True)
class CoordinatorMachine:
    """What outlives the process: the disk. A broadcast plan's epoch never goes back."""

    disk: CoordinatorDisk
    epoch: int = 0


class CoordinatorDriver:
    """One process of the coordinator. `start` once."""

    def __init__(self, scene: Scene, truth: Truth, host: Host, machine: CoordinatorMachine, network: Network) -> None:
        self.scene, self.truth, self.host, self.machine, self.network = scene, truth, host, machine, network
        self.membership = Membership(LivenessRule(scene.suspect_after_s, scene.gone_after_s), 64)
        self.book = LeaseBook(LeaseRules(scene.staleness_bound, scene.lease_timeout_s))
        if scene.sabotage is Sabotage.SHUNS_THE_HONEST:
            self.book.hearsay.lease_timeout_s = 0.5
        self.board = LearnerBoard()
        self.options = CoordinatorOptions(
            RunId("simulated"), folder=Path("nowhere"), staleness_bound=scene.staleness_bound,
            heartbeat_interval_s=scene.heartbeat_s, suspect_after_s=scene.suspect_after_s,
            gone_after_s=scene.gone_after_s, lease_timeout_s=scene.lease_timeout_s,
            report_interval_s=scene.report_interval_s, plan_interval_s=scene.plan_interval_s,
        )  # fmt: skip
        self.plan: Plan | None = None
        self.workers: dict[PeerId, End] = {}
        self.learner: End | None = None
        self._broadcast: BroadcastPlan | None = None
        self._update: m.PlanUpdate | None = None
        self._outgoing: list[tuple[PeerId, object]] = []
        self._dirty_groups: set[str] = set()
        self._dirty_leases: set[str] = set()
        self._dirty_members: set[PeerId] = set()
        self._meta: dict[str, str] = {}
        self._is_flushing = False
        self._last_now = self.started_at = 0.0
        self._is_planning = self._is_spreading = False
        self._kept_at = 0.0
        self._shunned: dict[PeerId, int] = {}
        self._trials = Trials()

    def now(self) -> float:
        """Unix time that never goes back within the process."""
        self._last_now = max(self._last_now, self.host.unix())
        return self._last_now

    # ---- life

    def start(self) -> None:
        saved, now = self.machine.disk.load(), self.now()
        self.started_at = now
        self.membership.restore(list(saved.members), now)
        self.book.restore(saved.groups, saved.leases)
        if "learner" in saved.meta:
            self.board.peer_id = PeerId(saved.meta["learner"])
        self.network.listen(self.host, self._accept)
        self.host.after(TICK_S, self._tick)
        self.host.after(self.scene.plan_interval_s, self._plan_again)

    def _accept(self, end: End, kind: str) -> None:
        peer = self.network.peer_ids.get(end.peer.host.name)
        if peer is None:
            end.close("unknown")
        elif kind == "worker":
            end.on_message = lambda message: self._from_worker(peer, end, message)
            end.on_closed = lambda reason: self._worker_cut(peer, end)
        elif kind == "learner":
            end.on_message = lambda message: self._from_learner(peer, end, message)
            end.on_closed = lambda reason: self._learner_cut(end)

    # ---- keeping and telling

    def _handle(self, event: le.Event) -> None:
        for action in self.book.handle(event, self.now()):
            match action:
                case le.SaveGroup(group_id) | le.DropGroup(group_id):
                    self._dirty_groups.add(group_id)
                case le.SaveLease(lease_id) | le.DropLease(lease_id):
                    self._dirty_leases.add(lease_id)
                case le.Note(_, text):
                    self.host.story.trace("coordinator", text)
                case le.Grant():
                    ticket = m.Ticket(
                        action.lease_id, action.group.group_id, action.worker_id, action.attempt, action.deadline
                    )
                    self.truth.signed(ticket)
                    grant = m.LeaseGrant(ticket, action.group, action.is_continuation, action.is_renewal)
                    self._outgoing.append((action.worker_id, grant))
                case le.Revoke(worker_id, _, _):
                    self._outgoing.append((worker_id, action))
        self._look_at_shunned()
        self._flush_soon()

    def _look_at_shunned(self) -> None:
        for peer, (times, _) in self.book.hearsay.shunned.items():
            if times > self._shunned.get(peer, 0):
                self._shunned[peer] = times
                self.truth.shunned(self.membership.members[peer].name, peer)
                self.network.counts["malicious worker is shunned"] += 1

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self.host.after(0.0, self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        groups, leases = self.book.groups, self.book.leases
        changes = Changes(
            groups=[group for name, group in groups.items() if name in self._dirty_groups],
            groups_dropped=sorted(name for name in self._dirty_groups if name not in groups),
            leases=[lease for name, lease in leases.items() if name in self._dirty_leases],
            leases_dropped=sorted(name for name in self._dirty_leases if name not in leases),
            members=[self.membership.members[peer] for peer in sorted(self._dirty_members)],
            meta=dict(self._meta),
        )
        for dirty in (self._dirty_groups, self._dirty_leases, self._dirty_members, self._meta):
            dirty.clear()
        self.machine.disk.write(changes)
        outgoing, self._outgoing = self._outgoing, []
        for peer, order in outgoing:
            end = self.workers.get(peer)
            if end is not None:
                end.send(order)

    # ---- workers

    def _from_worker(self, peer: PeerId, end: End, message: object) -> None:
        if isinstance(message, WorkerHello):
            self._worker_came(peer, message, end)
            return
        if peer not in self.membership.members or not (self.workers.get(peer) is end or isinstance(message, m.Leaving)):
            return  # of a stream that another has replaced
        match message:
            case Heartbeat():
                self._beat(peer, message)
            case le.Wanted() | le.Progressed() | le.Ended():
                self.membership.heard(peer, None, self.now())
                self._handle(message)
            case m.Leaving():
                self.membership.left(peer, self.now())
                self._review(self.membership.change_of(self.membership.members[peer], self.now()))

    def _worker_came(self, peer: PeerId, hello: WorkerHello, end: End) -> None:
        try:
            is_new = peer not in self.membership.members
            member = self.membership.came(peer, hello, self.now())
            member.is_wanted &= not (is_new and self.plan is not None)
        except EchoError as error:
            end.send(m.Refusal(str(error)))
            return
        old = self.workers.pop(peer, None)
        if old is not None and old is not end:
            old.close("another stream of this worker")
        self.workers[peer] = end
        self.host.story.tell("coordinator", f"{member.name} is here with {len(hello.held_leases)} leases")
        end.send(m.Welcome(self.scene.heartbeat_s, self.scene.report_interval_s, self._whereabouts()))
        end.send(m.Activate(member.activation is Activation.ACTIVE))
        if self._broadcast is not None:
            end.send(self._broadcast)
        self._handle(le.WorkerCame(peer, hello.held_leases))
        self._review(self.membership.change_of(member, self.now()))
        may = member.last_liveness is Liveness.ALIVE and member.last_activation is Activation.ACTIVE
        self._handle(le.WorkerAllowed(peer, may))
        self._dirty_members.add(peer)
        self._plans_needed()

    def _whereabouts(self) -> m.Whereabouts | None:
        return m.Whereabouts(self.board.peer_id, "learner") if self.board.peer_id is not None else None

    def _beat(self, peer: PeerId, heartbeat: Heartbeat) -> None:
        member = self.membership.heard(peer, heartbeat, self.now())
        self.board.live(peer, heartbeat.version, self.now())
        self._review(self.membership.change_of(member, self.now()))
        self.book.handle(le.Rated(peer, heartbeat.rollouts_per_s), self.now())

    def _worker_cut(self, peer: PeerId, end: End) -> None:
        if self.workers.get(peer) is not end:
            return
        del self.workers[peer]
        self._handle(le.Wanted(peer, 0, Version(0)))
        self.membership.cut(peer, self.now())
        self._review(self.membership.change_of(self.membership.members[peer], self.now()))

    def _review(self, change: Change | None) -> None:
        if change is None:
            return
        member, now = change.member, self.now()
        accounts.meter([member], now)
        self._dirty_members.add(member.peer_id)
        if change.after is not change.before:
            self.host.story.tell("coordinator", f"{member.name} is {change.after.value}")
        if change.activation is not change.worked and change.worked is not None:
            self._tell_activation(change)
        if change.after is Liveness.GONE or change.activation is Activation.BANNED:
            self._handle(le.WorkerLost(member.peer_id, change.after.value))
            self.board.left(member.peer_id, now)
        else:
            self._handle(le.WorkerAllowed(member.peer_id, change.may_lease))
            if change.activation is not Activation.ACTIVE:
                self.board.left(member.peer_id, now)
        self._plans_needed()

    def _tell_activation(self, change: Change) -> None:
        peer = change.member.peer_id
        if change.activation is Activation.BANNED:
            end = self.workers.get(peer)
            if end is not None:
                end.send(m.Refusal(f"{change.member.name} is banned"))
            return
        self._outgoing.append((peer, m.Activate(change.activation is Activation.ACTIVE)))
        self._flush_soon()

    def ban(self, peer: PeerId, reason: str) -> None:
        """The operator's word."""
        member = self.membership.set(peer, Setting.BANNED, reason, self.now())
        self._review(self.membership.change_of(member, self.now()))

    # ---- the learner

    def _from_learner(self, peer: PeerId, end: End, message: object) -> None:
        if isinstance(message, LearnerHello):
            self._learner_came(peer, message, end)
            return
        if self.learner is not end:
            return
        match message:
            case m.LearnerBeat(report, held, lacking):
                self.truth.agree(self.book.groups, held, lacking)
                self.board.heard(report, self.now())
            case le.Delivered() if self.scene.sabotage is Sabotage.BELIEVES_PROGRESS:
                pass
            case le.GroupsOffered() | le.GroupsClosed() | le.Delivered():
                self.board.heard_at = self.now()
                if self.scene.sabotage is Sabotage.BELIEVES_PROGRESS and isinstance(message, le.GroupsOffered):
                    message = replace(message, held_tokens=())
                self._handle(message)
            case m.Accused(worker_id, reason):
                if worker_id in self.membership.members:
                    self.ban(worker_id, reason)
            case PublishedVersion():
                pool = [member.peer_id for member in self.membership.pool()]
                self.board.published(message, 0.0, pool, self.now())

    def _learner_came(self, peer: PeerId, hello: LearnerHello, end: End) -> None:
        is_news = self.board.came(peer, hello, "", self.now())
        if self.learner is not None and self.learner is not end:
            self.learner.close("another stream of the learner")
        self.learner = end
        self._meta["learner"] = peer
        self.host.story.tell("coordinator", f"the learner is here at step {hello.step}")
        end.send(m.Welcome(self.scene.heartbeat_s, self.scene.report_interval_s, None))
        if self._update is not None:
            end.send(self._update)
        if self._broadcast is not None:
            end.send(self._broadcast)
        if is_news:
            for worker in self.workers:
                self._outgoing.append((worker, self._whereabouts()))
        self._handle(le.GroupsSynced(hello.open_groups))
        self._plans_needed()

    def _learner_cut(self, end: End) -> None:
        if self.learner is end:
            self.learner = None
            self.board.cut(self.now())

    # ---- plans

    def _plans_needed(self) -> None:
        if not self._is_spreading:
            self._is_spreading = True
            self.host.after(SETTLE_S, self._plan_broadcast)

    def _plan_again(self) -> None:
        self._plan_pool()
        self.host.after(self.scene.plan_interval_s, self._plan_again)

    def _plan_pool(self) -> None:
        members = list(self.membership.members.values())
        choosable = [member for member in members if member.last_liveness is Liveness.ALIVE]
        mark_shunned(members, self.book.hearsay, self.book.given_up, self.now())
        self._trials.appraise(members, self.book.worth, 0.0, self.now())
        for member in members:
            if member.is_on_trial and not member.is_wanted:
                member.is_wanted = True
                self._review(self.membership.change_of(member, self.now()))
        snapshot = fleet_snapshot(self.board, members, self.now(), {})
        if snapshot is None or not choosable:
            return
        try:
            self.plan = pool_plan(snapshot, plan_config(self.options, self.board), self.plan)
        except EchoError as error:
            self.host.story.tell("coordinator", f"no plan: {error}")
            return
        pool = set(self.plan.pool)
        for member in choosable:
            member.is_wanted = member.peer_id in pool or member.is_on_trial
            self._review(self.membership.change_of(member, self.now()))
        update = m.PlanUpdate(self.plan.kappa, self.plan.in_flight_cap_rollouts)
        if update != self._update and self.learner is not None:
            self.learner.send(update)
        self._update = update
        self.host.story.trace(
            "coordinator", f"plan: kappa {update.kappa}, cap {update.in_flight_cap_rollouts}, {len(pool)} workers"
        )

    def _plan_broadcast(self) -> None:
        self._is_spreading = False
        nodes = broadcast_nodes(self.board, list(self.membership.members.values()))
        needs = needs_of(nodes, self.membership.members, self.plan)
        if len(nodes) < 2 or (self._broadcast is not None and is_fit(self._broadcast, nodes, needs)):
            return
        self.machine.epoch += 1
        self._broadcast = weighted_plan(nodes, needs, self.machine.epoch, BROADCAST_BYTES)
        self.network.counts["broadcast plan with late workers"] += bool(self._broadcast.late)
        if self.learner is not None:
            self.learner.send(self._broadcast)
        for end in list(self.workers.values()):
            end.send(self._broadcast)

    # ---- time

    def _tick(self) -> None:
        now = self.now()
        for change in list(self.membership.changes(now)):
            self._review(change)
        self._handle(le.Tick())
        accounts.meter(self.membership.members.values(), now)
        if now - self._kept_at >= 5.0:
            self._kept_at = now
            self._dirty_members |= {member.peer_id for member in self.membership.living()}
            self._flush_soon()
        self.host.after(TICK_S, self._tick)

    def waits(self) -> list[tuple[str, float]]:
        return waits(self.book, self.now())
