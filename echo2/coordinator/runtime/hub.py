"""Connects the parts: streams bring events, the cores decide, the keeper saves, then orders are sent.

    event --> core decides --> noted (keeper) and queued (_outgoing) --once in this turn of the loop--> saved --> sent
                                                              cannot be saved: nothing is sent, the daemon stops
    a worker's stream:  came --> [ welcome, activation, broadcast plan ] --> beats, lease events --> left (clean) --> cut
                          '-- came again: the newer stream takes the older one's place

Runs only on the event loop's thread. Guarantees: an order that follows from a change is sent only after that change is
saved (`_flush`); all changes of one turn of the loop are saved in one transaction. Waits for nothing: the streams, the page and
`tick` call it. Leaves to others: decisions (lease_book, membership, board), the learner's stream (learner_side), planning
(planning), gRPC (services).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

from echo2.base.clock import Clock
from echo2.base.errors import EchoError, NotAllowed
from echo2.base.ids import PeerId, Version
from echo2.broadcast.dialable import MetAddresses
from echo2.broadcast.topology import BroadcastPlan
from echo2.coordinator import accounts
from echo2.coordinator import lease_events as le
from echo2.coordinator.board import LearnerBoard
from echo2.coordinator.lease_book import LeaseBook
from echo2.coordinator.lease_seekers import LeaseRules
from echo2.coordinator.membership import (
    Activation,
    Change,
    Liveness,
    LivenessRule,
    Member,
    Membership,
    OperatorSetting,
)
from echo2.coordinator.options import CoordinatorOptions, PlannerMode
from echo2.coordinator.plan_parts import PlanParts
from echo2.coordinator.reckoning import Reckoning
from echo2.coordinator.runtime.aside import Aside
from echo2.coordinator.runtime.barring import barring_of, tell_ban
from echo2.coordinator.runtime.ending import RunEnding
from echo2.coordinator.runtime.granting import order_of, whereabouts_of
from echo2.coordinator.runtime.keeper import Keeper
from echo2.coordinator.runtime.learner_side import LearnerSide
from echo2.coordinator.runtime.money import Money
from echo2.coordinator.runtime.restoring import restore_board
from echo2.coordinator.runtime.session import StreamSession, check_hello, check_quantisation
from echo2.coordinator.saved import LoggedEvent, PaidAction, SavedState, StateStore
from echo2.coordinator.telemetry import Heartbeat as HeartbeatFacts
from echo2.coordinator.telemetry import WorkerHello
from echo2.coordinator.tokens import TokenBook
from echo2.coordinator.trials import ON_TRIAL
from echo2.cost_model.plan import Plan
from echo2.trust.identity import Identity
from echo2.wire.broadcast import plan_to_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from echo2.coordinator.runtime.relay import Relay

WorkerSession = StreamSession[pb.WorkerOrder]
MEMBERS_KEPT_TICKS = 60
"""The telemetry of a sixtieth of the workers is saved at each tick: saving all at once would delay leases, and telemetry that is
half a minute old is good enough after a restart. What must not be lost (joins, operator commands, money) is saved at once."""
LINK_CHANGE = 0.2
PREEMPTION_WORD = "preemption"
"""Marks the reason of a worker that leaves because its cloud preempts it."""
_log = logging.getLogger("echo2.coordinator")


class Hub:
    """`saved`: what `store` held at the start. `failed`: called when the state can no longer be saved; the daemon must then
    stop."""

    def __init__(
        self,
        options: CoordinatorOptions,
        identity: Identity,
        store: StateStore,
        saved: SavedState,
        clock: Clock,
        failed: Callable[[EchoError], None],
    ) -> None:
        self.options, self.identity, self.clock, self._failed = options, identity, clock, failed
        self.membership = Membership(
            LivenessRule(options.suspect_after_s, options.gone_after_s), options.limits.workers_max
        )
        self.book = LeaseBook(LeaseRules(options.staleness_bound, options.lease_timeout_s))
        self.tokens = TokenBook(options.limits.tokens_max)
        self.money = Money(self.membership, self.tokens, clock)
        self.board = LearnerBoard()
        self.keeper = Keeper(store, self.book, self.membership, self.tokens, options.limits.events_kept)
        self.workers: dict[PeerId, WorkerSession] = {}
        self.reckoning = Reckoning(self.board)
        self.proven = MetAddresses()
        self.aside = Aside()
        self.plan: Plan | None = None
        self.plan_update: pb.PlanUpdate | None = None
        self.plan_waits_for = "the learner"
        self.relay_address = ""  # host:port of this coordinator's libp2p relay; empty: none
        self.relay: Relay | None = None  # set once it serves
        self.broadcast_plan: BroadcastPlan | None = None
        self._plan_parts: PlanParts | None = None
        self.started_at = clock.now()
        self.plan_needed = asyncio.Event()
        self.broadcast_needed = asyncio.Event()
        self._outgoing: list[tuple[PeerId, pb.WorkerOrder]] = []
        self._is_flushing = self._is_closed = False
        self._ticks = 0
        self.ending = RunEnding(self, saved.meta)
        self.learner = LearnerSide(self, saved.meta)
        self._restore(saved)

    def _restore(self, saved: SavedState) -> None:
        now = self.clock.now()
        self.tokens.restore(list(saved.tokens))
        self.money.machines.update({machine.machine_id: machine for machine in saved.machines})
        self.membership.restore(list(saved.members), now)
        self.book.restore(saved.groups, saved.leases)
        self.keeper.events.extend(saved.events)
        self.keeper.samples.extend(saved.samples)
        self.keeper.paid.extend(saved.paid)
        self.money.standby_before = float(saved.meta.get("usd_standby", "0"))
        restore_board(self.board, saved.meta, now)
        if saved.members or saved.groups:
            self.note("start", f"state restored: {len(saved.members)} workers, {len(saved.leases)} leases, "
                      f"{len(saved.groups)} groups, {len(saved.tokens)} tokens")  # fmt: skip
        else:
            self.note("start", f"run {self.options.run_id} begins")

    # ---- saving and sending

    def note(self, kind: str, text: str) -> None:
        """Writes one line in the event log."""
        _log.info("%s: %s", kind, text)
        self.keeper.event(LoggedEvent(self.clock.now(), kind, text))

    def apply(self, actions: Iterable[le.Action]) -> None:
        """Carries out the lease book's actions."""
        for action in actions:
            match action:
                case le.SaveGroup(group_id) | le.DropGroup(group_id):
                    self.keeper.group(group_id)
                case le.SaveLease(lease_id) | le.DropLease(lease_id):
                    self.keeper.lease(lease_id)
                case le.Note(kind, text):
                    self.note(kind, text)
                case le.Grant():
                    self._outgoing.append((action.worker_id, order_of(action, self.options.run_id, self.identity)))
                case le.Revoke(worker_id, lease_id, reason):
                    revoke = pb.LeaseRevoke(lease_id=lease_id, reason=reason)
                    self._outgoing.append((worker_id, pb.WorkerOrder(lease_revoke=revoke)))
        self.flush_soon()

    def flush_soon(self) -> None:
        """Schedules one flush, after everything that is ready in this turn of the loop has been handled."""
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self._is_closed:
            return
        try:
            self.keeper.flush()
        except EchoError as error:
            self._failed(error)
            return
        outgoing, self._outgoing = self._outgoing, []
        for peer_id, order in outgoing:
            session = self.workers.get(peer_id)
            if session is not None and not self._is_dropped(order):
                session.send(order)

    def _is_dropped(self, order: pb.WorkerOrder) -> bool:
        """Whether to drop a grant whose lease has ended in the same turn (as after a long pause of this process): it was never
        saved, so it must not be sent."""
        return order.WhichOneof("kind") == "lease_grant" and order.lease_grant.ticket.lease_id not in self.book.leases

    def flush_now(self) -> None:
        """Saves everything before it returns; for enrolment and operators' commands."""
        self.keeper.flush()

    def send(self, peer_id: PeerId, order: pb.WorkerOrder) -> None:
        """Sends an order to a worker once all earlier changes are saved."""
        self._outgoing.append((peer_id, order))
        self.flush_soon()

    def handle(self, event: le.Event) -> None:
        """Passes an event to the lease book and carries out its actions."""
        self.apply(self.book.handle(event, self.clock.now()))

    # ---- workers

    def worker_came(self, peer_id: PeerId, hello: WorkerHello, session: WorkerSession) -> None:
        """Starts a worker's session. Raises an EchoError, before any change, if the worker is refused."""
        check_hello(self.options.run_id, f"worker {hello.name or peer_id}", hello.protocol_version, hello.run_id)
        self.learner.check_model(peer_id, hello)
        check_quantisation(hello, self.options.quantised_workers)
        self.ending.check_open()
        now = self.clock.now()
        is_new = peer_id not in self.membership.members
        member = self.membership.came(peer_id, hello, now)
        member.price_limit = self.money.limit_of(member, self.options)
        member.is_wanted &= not (is_new and self.plan is not None and self.options.planner_mode is PlannerMode.AUTO)
        old = self.workers.pop(peer_id, None)
        if old is not None:
            old.end()
        self.workers[peer_id] = session
        self.note("worker", f"{member.name} {'joined' if is_new else 'is back'}: {hello.gpu or 'cpu'}, "
                  f"{hello.slot_count} slots, {hello.price_usd_per_hour:g} USD/h, "
                  f"{len(hello.held_leases)} leases held")  # fmt: skip
        session.send(pb.WorkerOrder(welcome=self._welcome()))
        activation = pb.Activation(is_active=member.activation is Activation.ACTIVE, reason=member.activation_reason)
        session.send(pb.WorkerOrder(activation=activation))
        if self.broadcast_plan is not None:
            self.send_broadcast_plan(session)
        self.handle(le.WorkerCame(peer_id, hello.held_leases))  # before it may lease: discards its old lease request
        self._review(self.membership.change_of(member, now))
        self._allow(peer_id)
        self.keeper.member(peer_id)
        self.broadcast_needed.set()
        self.plan_needed.set()

    def _welcome(self) -> pb.WorkerWelcome:
        return pb.WorkerWelcome(
            run_id=self.options.run_id,
            staleness_bound=self.options.staleness_bound,
            heartbeat_interval_s=self.options.heartbeat_interval_s,
            report_interval_s=self.options.report_interval_s,
            learner=whereabouts_of(self.board),
            relay_address=self.relay_address,
            unix_s=self.clock.now(),
            banned_peer_ids=self.membership.banned,
        )

    def worker_beat(self, peer_id: PeerId, heartbeat: HeartbeatFacts) -> None:
        before, access = self.membership.members[peer_id].link, self.membership.members[peer_id].access
        member = self.membership.heard(peer_id, heartbeat, self.clock.now())
        self.board.live(peer_id, heartbeat.version, self.clock.now())
        self.reckoning.spread(self.board.newest_complete, self.clock.now())
        self._review(self.membership.change_of(member, self.clock.now()))
        self.book.handle(le.Rated(peer_id, heartbeat.rollouts_per_s), self.clock.now())
        if heartbeat.links is not None or member.access != access:
            self.broadcast_needed.set()
        after = member.link
        for old, new in zip(asdict(before).values(), asdict(after).values(), strict=True):
            if abs(new - old) > LINK_CHANGE * max(new, old, 1e-3):
                self.broadcast_needed.set()

    def worker_event(self, peer_id: PeerId, event: le.Event) -> None:
        """Takes a lease request, progress or the end of a lease."""
        self.membership.heard(peer_id, None, self.clock.now())
        self.handle(event)

    def worker_left(self, peer_id: PeerId, reason: str) -> None:
        self.membership.left(peer_id, self.clock.now())
        member = self.membership.members[peer_id]
        self.note("worker", f"{member.name} leaves: {reason or 'no reason given'}")
        if PREEMPTION_WORD in reason:
            self.journal_worker("preempted", member, reason)
        self._review(self.membership.change_of(member, self.clock.now()))

    def worker_cut(self, peer_id: PeerId, session: WorkerSession) -> None:
        """The worker's stream ended; ignored if a newer stream has replaced it."""
        if self.workers.get(peer_id) is not session:
            return
        del self.workers[peer_id]
        self.handle(le.RolloutsWanted(peer_id, 0, Version(0)))
        self.membership.cut(peer_id, self.clock.now())
        self._review(self.membership.change_of(self.membership.members[peer_id], self.clock.now()))

    def _allow(self, peer_id: PeerId) -> None:
        member = self.membership.members[peer_id]
        may = member.last_liveness is Liveness.ALIVE and member.last_activation is Activation.ACTIVE
        self.handle(le.WorkerAllowed(peer_id, may))

    def _review(self, change: Change | None) -> None:
        """Reacts to a change of a worker's liveness or activation: leases, money, plans, and a message to the worker."""
        if change is None:
            return
        member, now = change.member, self.clock.now()
        accounts.meter([member], now)
        self.keeper.member(member.peer_id)
        if change.after is not change.before and change.after is not Liveness.ALIVE:
            silent_s = now - member.heard_at
            self.note("worker", f"{member.name} is {change.after.value}: last heard {silent_s:.1f} s ago")
        if change.activation is not change.worked and change.worked is not None:
            if change.activation.is_barred or change.worked.is_barred:
                self.keeper.lasting()
            self._tell_activation(change)
        if change.after is Liveness.GONE or change.activation.is_barred:
            why = change.after if change.after is Liveness.GONE else change.activation
            self.handle(le.WorkerLost(member.peer_id, why.value))
            self.board.left(member.peer_id, now)
        else:
            self.handle(le.WorkerAllowed(member.peer_id, change.may_lease))
            if change.activation is not Activation.ACTIVE:
                self.board.left(member.peer_id, now)
        self.plan_needed.set()
        self.broadcast_needed.set()

    def _tell_activation(self, change: Change) -> None:
        member = change.member
        self.note("activation", f"{member.name} is {change.activation.value} now: {member.activation_reason}")
        self.journal_worker(change.activation.value, member, member.activation_reason)
        was_barred = change.worked is not None and change.worked.is_barred
        if change.activation.is_barred or was_barred:
            self.learner.tell(barring_of(member))
        tell_ban(change, list(self.workers.values()))
        if change.activation is Activation.BANNED:
            session = self.workers.get(member.peer_id)
            if session is not None:
                session.refuse(
                    NotAllowed(f"worker {member.name} is banned: {member.setting_reason or 'no reason given'}")
                )
            return
        order = pb.Activation(is_active=change.activation is Activation.ACTIVE, reason=member.activation_reason)
        self.send(member.peer_id, pb.WorkerOrder(activation=order))

    def set_worker(self, peer_id: PeerId, setting: OperatorSetting, reason: str) -> None:
        """Applies the operator's setting for a worker, and saves it."""
        member = self.membership.set(peer_id, setting, reason, self.clock.now())
        if setting is OperatorSetting.AUTOMATIC and self.plan is not None:
            member.is_wanted = member.peer_id in self.plan.pool or member.is_on_trial
        self.keeper.member(peer_id)
        self.keeper.lasting()
        self._review(self.membership.change_of(member, self.clock.now()))
        self.flush_now()

    # ---- plans

    def adopt_plan(self, plan: Plan, choosable: Iterable[PeerId], is_acted_on: bool) -> None:
        """Adopts a plan of the pool. The learner always gets it; workers are activated by it only if `is_acted_on`.

        `choosable`: the workers that were alive when the plan was requested. Those that came or fell silent since keep their state.
        """
        self.plan, self.plan_waits_for = plan, ""
        cap = min(round(plan.in_flight_cap_rollouts * self.options.over_provision), (1 << 31) - 1)
        self.reckoning.planned(plan, is_acted_on, self.clock.now())
        pool = set(plan.pool)
        if is_acted_on:
            for member in [self.membership.members[peer_id] for peer_id in choosable]:
                member.is_wanted = member.peer_id in pool or member.is_on_trial
                member.wanted_reason = ON_TRIAL if member.is_on_trial else plan.reason
                self._review(self.membership.change_of(member, self.clock.now()))
        update = pb.PlanUpdate(
            kappa=plan.kappa, in_flight_cap_rollouts=cap,
            predicted_utilisation=self.reckoning.expected(plan), predicted_broadcast_s=plan.broadcast_s,
            usd_per_hour=plan.usd_per_hour, reason=plan.reason,
        )  # fmt: skip
        if update != self.plan_update:
            self.learner.tell(pb.LearnerOrder(plan=update))
        if self.plan_update is None or self.plan_update.kappa != plan.kappa:
            self.note("plan", plan.reason)
        self.plan_update = update

    def try_out(self, members: Iterable[Member]) -> None:
        """Activates the newcomers on trial, which work beside the plan or without one."""
        for member in members:
            if member.is_on_trial and not member.is_wanted:
                member.is_wanted, member.wanted_reason = True, ON_TRIAL
                self._review(self.membership.change_of(member, self.clock.now()))

    def adopt_broadcast_plan(self, plan: BroadcastPlan) -> list[WorkerSession]:
        """Sends the plan to the learner now. Returns the workers' sessions, to which the caller sends it at its own pace."""
        self.broadcast_plan, self._plan_parts = plan, PlanParts(plan)
        self.learner.tell(pb.LearnerOrder(broadcast_plan=plan_to_message(plan)))
        _log.debug("broadcast plan %d: %s over %d nodes: %s", plan.epoch, plan.topology, len(plan.nodes), plan.reason)
        return list(self.workers.values())

    def send_broadcast_plan(self, session: WorkerSession) -> None:
        """Sends one worker its part of the newest broadcast plan."""
        assert self._plan_parts is not None, "there is a plan to send"
        part = self._plan_parts.part_of(session.peer_id)
        session.send(pb.WorkerOrder(broadcast_plan=plan_to_message(part)))

    def journal_worker(self, action: str, member: Member, reason: str) -> None:
        """Journals an action that changes what a worker costs."""
        price, spent = member.hello.price_usd_per_hour, member.usd_spent
        self.keeper.paid_action(PaidAction(self.clock.now(), action, member.peer_id, reason, price, spent))

    # ---- time

    def tick(self) -> None:
        """Checks liveness and deadlines, meters money and saves telemetry; called twice a second."""
        now = self.clock.now()
        for change in list(self.membership.changes(now)):
            self._review(change)
        self.handle(le.Tick())
        accounts.meter(self.membership.members.values(), now)
        self._ticks += 1
        members = self.membership.members
        if self._ticks % MEMBERS_KEPT_TICKS == 0:
            self.keeper.meta("usd_standby", f"{self.money.standby_usd():.6f}")
        for peer_id in islice(members, self._ticks % MEMBERS_KEPT_TICKS, None, MEMBERS_KEPT_TICKS):
            if members[peer_id].last_liveness is not Liveness.GONE:
                self.keeper.member(peer_id)
        self.flush_soon()

    def close(self) -> None:
        """Ends all streams and saves what is left; nothing is saved after this."""
        self.aside.close()
        for session in self.workers.values():
            session.end()
        self.learner.close()
        accounts.meter(self.membership.members.values(), self.clock.now())
        self.keeper.meta("usd_standby", f"{self.money.standby_usd():.6f}")
        for member in self.membership.living():
            self.keeper.member(member.peer_id)
        self.note("stop", "the coordinator stops; workers and learner go on and wait for it")
        try:
            self.keeper.flush()
        except EchoError as error:
            self._failed(error)
        self._is_closed = True
