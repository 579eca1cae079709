"""Connects the parts: streams bring events, the cores decide, the changes are saved, then orders are sent.

    event --> core decides --> noted (state) and queued (_outgoing) --once in this turn of the loop--> saved --> sent
                                                              cannot be saved: nothing is sent, the daemon stops

Runs only on the event loop's thread. Guarantees: an order that follows from a change is sent only after that change is saved
(`_flush`); all changes of one turn of the loop are saved in one transaction. Waits for nothing: the streams, the page and
`tick` call it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from echo2.base.clock import Clock
from echo2.base.errors import Dismissed, EchoError, MalformedMessage, NotAllowed, RunFinished
from echo2.base.ids import PeerId, RunId
from echo2.base.rollout import Ticket
from echo2.base.units import counted, format_seconds
from echo2.broadcast.plan import BroadcastPlan
from echo2.broadcast.reachability import MetAddresses
from echo2.config.run import CoordinatorSection, RunConfig
from echo2.coordinator.fleet.members import (
    ON_TRIAL,
    Activation,
    Liveness,
    Member,
    Membership,
    OperatorSetting,
)
from echo2.coordinator.fleet.tokens import TokenBook
from echo2.coordinator.learner import LearnerStream, restore_board
from echo2.coordinator.leases import lease as le
from echo2.coordinator.leases.book import LeaseBook
from echo2.coordinator.leases.lease import Lease, LeaseRules, OpenGroup
from echo2.coordinator.money.costs import Money, meter
from echo2.coordinator.planning.pool_plan import PlanProcess
from echo2.coordinator.planning.telemetry import CurrentPlan, LearnerBoard, PlanParts
from echo2.coordinator.store import LoggedEvent, PaidAction, SqlStore, StateSnapshot, StateWriter
from echo2.cost_model.plan import Plan
from echo2.cost_model.snapshot import is_spent
from echo2.outside.guard import PeerLines
from echo2.trust.identity import Identity
from echo2.wire.broadcast import plan_to_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.rollout import group_to_message, sign_ticket

if TYPE_CHECKING:
    from echo2.broadcast.nat.reach import Nat
    from echo2.coordinator.streams import WorkerSession


# The section's rules of timing, which `timed_section` overrides.
TIMING = ("heartbeat_interval", "suspect_after", "gone_after", "lease_timeout", "report_interval", "plan_interval")


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """`folder`: the run's folder, for state and join links. `config`: a coordinator reads its sections coordinator, run, staleness,
    model, worker (whether weights may be rounded) and learner (steps). `exit_when_finished`: the process exits once the learner has
    finished, all workers have gone and all rented machines are released; else the page stays up. `takes_free_ports`: a port that is
    taken is replaced by any free one."""

    folder: Path
    config: RunConfig = field(default_factory=RunConfig)
    exit_when_finished: bool = False
    takes_free_ports: bool = False

    @property
    def run_id(self) -> RunId:
        return RunId(self.config.run.name)

    @property
    def link_host(self) -> str:
        """The host named in join links and in the replies that carry certificates."""
        host = (self.config.coordinator.advertise or self.config.coordinator.host).strip("[]")
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)


def timed_section(**values: Any) -> CoordinatorSection:
    """A section with these options and `TIMING`, for simulated time, benchmarks and tests."""
    timing = {name: values.pop(name) for name in TIMING if name in values}
    fixed = {"__annotations__": dict.fromkeys(timing, ClassVar[float]), "__module__": __name__, **timing}
    section: CoordinatorSection = type("TimedSection", (CoordinatorSection,), fixed)(**values)
    return section


MEMBERS_KEPT_TICKS = 60
"""The telemetry of a sixtieth of the workers is saved at each tick: saving all at once would delay leases, and telemetry that is
half a minute old is good enough after a restart. What must not be lost (joins, operator commands, money) is saved at once."""
WORKERS_MAX = 20_000  # 4,000 heartbeats a second; measured are 2,000 workers, by make bench-coordinator
TOKENS_MAX = 30_000  # revoked and expired ones count; one for each machine that was ever rented (provisioner)
BUDGET_TICKS = 10  # five seconds: a fleet of 1,000 USD an hour spends a dollar beyond the budget
PREEMPTION_WORD = "preemption"  # marks the reason of a worker that leaves because its cloud preempts it
_log = logging.getLogger("echo2.coordinator")


class Hub:
    """`saved`: what `store` held at the start. `failed`: called when the state can no longer be saved; the daemon must then
    stop."""

    def __init__(
        self,
        options: CoordinatorOptions,
        identity: Identity,
        store: SqlStore,
        saved: StateSnapshot,
        clock: Clock,
        failed: Callable[[EchoError], None],
    ) -> None:
        self.options, self.identity, self.clock, self._failed = options, identity, clock, failed
        self.config = options.config  # with what the operator has changed since
        self.learner_bound = self.config.staleness.bound  # which the learner enforces; the operator may set a lower one
        self.settings: dict[str, Any] = {}  # what the operator changed while the run went on
        self.paused = ""  # by the operator: why; empty while the run goes on
        self._spent = ""  # likewise by its budget
        self.awaits_plan = bool(saved.meta.get("awaits_plan"))  # since its budget was spent, in any mode of the planner
        self.book = LeaseBook(LeaseRules(self.learner_bound, self.config.coordinator.lease_timeout))
        section = self.config.coordinator
        self.membership = Membership(section.suspect_after, section.gone_after, WORKERS_MAX, self.book.records)
        self.tokens = TokenBook(TOKENS_MAX)
        self.money = Money(self.membership, self.tokens, clock)
        self.board = LearnerBoard()
        self.state = StateWriter(store, self.tokens)
        self.workers: dict[PeerId, WorkerSession] = {}
        self.plan = CurrentPlan(self.board, waits_since=clock.now())
        self.proven = MetAddresses()
        self.plan_process = PlanProcess()
        self.relay_address = ""  # host:port of this coordinator's libp2p relay; empty: none
        self.relay: Nat | None = None  # set once it serves
        self._plan_parts: PlanParts | None = None
        self.started_at = clock.now()
        self.peer_lines = PeerLines()
        self.plan_needed = asyncio.Event()
        self.broadcast_needed = asyncio.Event()
        self._outgoing: list[tuple[PeerId, pb.WorkerOrder]] = []
        self._is_flushing = self._is_closed = False
        self._save_error: EchoError | None = None
        self._ticks = 0
        self.ending = RunEnding(self, saved.meta)
        self.learner = LearnerStream(self)
        self._restore(saved)

    def _restore(self, saved: StateSnapshot) -> None:
        now = self.clock.now()
        self.tokens.restore(list(saved.tokens))
        for machine in saved.machines:
            if machine.is_open:
                machine.rented_at = min(machine.rented_at, now)  # the clock may have been set back
            self.money.machines[machine.machine_id] = machine
        self.membership.restore(list(saved.members), now)
        self.book.records.restore(json.loads(saved.meta.get("admitted", "{}")))
        self._extend(saved.leases, now)
        self.book.restore(saved.groups, saved.leases)
        self.state.restore(saved)
        self.money.standby_before = float(saved.meta.get("usd_standby", "0"))
        restore_board(self.board, saved.meta, now)
        self.board.report.is_finished &= self.ending.finish is not None  # else its learner says so again
        self.paused = saved.meta.get("paused", "")
        for member in self.membership.members.values():
            member.paused = self.paused
        if "settings" in saved.meta:
            settings = json.loads(saved.meta["settings"])
            if settings.get("staleness_bound", 0) > self.learner_bound:
                del settings["staleness_bound"]  # the run goes on with a lower one of its own
            for name, before in json.loads(saved.meta.get("configured", "{}")).items():
                now_usd = getattr(self.config.coordinator, name)
                if now_usd != before and name in settings:
                    text = f"{name} = {now_usd:g} by the config, changed since the operator set {settings.pop(name):g}"
                    self.note("operator", text)
            self.change_settings(settings)
        if saved.members or saved.groups:
            self.note("start", f"state restored: {counted(len(saved.members), 'worker')}, {counted(len(saved.leases), 'lease')}, "
                      f"{counted(len(saved.groups), 'group')}, {counted(len(saved.tokens), 'token')}")  # fmt: skip
        else:
            self.note("start", f"run {self.options.run_id} begins")

    def _extend(self, leases: Iterable[Lease], now: float) -> None:
        """After a time in which nobody could be heard: a lease's worker has as long to come back as any."""
        for lease in leases:
            lease.deadline = max(lease.deadline, now + self.config.coordinator.gone_after)

    # ---- saving and sending

    def note(self, kind: str, text: str, peer: str = "", subject: str = "") -> bool:
        """Writes one line in the event log. `peer`: the peer that can cause it as often as it likes; of lines with the same
        `subject` about it, one a minute is written. Returns whether it was."""
        more = self.peer_lines.more(peer, subject) if peer else ""
        if more is not None:
            _log.info("%s: %s%s", kind, text, more)
            self.state.event(LoggedEvent(self.clock.now(), kind, text + more))
        return more is not None

    def handle(self, method: le.BookMethod[le.P], *args: le.P.args, **kwargs: le.P.kwargs) -> None:
        for action in method(self.clock.now(), *args, **kwargs):
            match action:
                case le.Save(kind, key):
                    rows: Mapping[Any, OpenGroup | Lease] = self.book.groups if kind == "groups" else self.book.leases
                    self.state.save(kind, key, rows.get(key))
                case le.Note(kind, text):
                    self.note(kind, text)
                case le.Grant():
                    self._outgoing.append((action.worker_id, _order_of(action, self.options.run_id, self.identity)))
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
            self.flush_now()
        except EchoError:
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
        """Saves everything before it returns. If that fails, nothing is saved or sent any more, because what failed is missing: the
        process ends."""
        if self._save_error is not None:
            raise self._save_error
        try:
            self.state.flush()
        except EchoError as error:
            self._save_error = error
            self._failed(error)
            raise

    def send(self, peer_id: PeerId, order: pb.WorkerOrder) -> None:
        self._outgoing.append((peer_id, order))
        self.flush_soon()

    # ---- workers

    def part_with(self, peer_id: PeerId, reason: str) -> None:
        """A worker leaves, or is sent home: its leases go to others at once."""
        self.membership.on_leave(peer_id, self.clock.now())
        member = self.membership.members[peer_id]
        is_taken = PREEMPTION_WORD in reason
        text = f"{member.name} leaves: {reason or 'no reason given'}"
        if self.note("worker", text, peer_id, "is taken" if is_taken else "leaves") and is_taken:
            self.journal_worker("preempted", member, reason)
        self.review(member)

    def dismiss(self, peer_id: PeerId, reason: str, why: Dismissed | None = None) -> None:
        """Dismisses a worker: its process then exits. It may join again."""
        session = self.workers.get(peer_id)
        self.part_with(peer_id, reason)
        if session is not None:
            session.refuse(why or Dismissed(reason))

    def drain(self, peer_id: PeerId, reason: str) -> None:
        """Gives the worker no more leases, and recalls those that it holds now, with all their tokens."""
        if not self.membership.members[peer_id].activation.is_barred:
            self.set_worker(peer_id, OperatorSetting.DRAINING, reason)
        for lease in self.book.leases_of(peer_id):
            self.handle(self.book.recall, lease.lease_id, reason)

    def preempt(self, peer_id: PeerId, notice: str) -> None:
        """Handles a preemption notice that came from a provider or the operator, not from the worker itself."""
        member = self.membership.members[peer_id]
        self.note("worker", f"{member.name} will lose its machine: {notice}")
        self.journal_worker("preemption notice", member, notice)
        self.drain(peer_id, f"preemption: {notice}")

    def allow(self, member: Member) -> None:
        self.handle(self.book.allow, member.peer_id, member.may_lease)

    def review(self, member: Member) -> None:
        """Reacts to a change of a worker's liveness or activation: leases, money, plans, and a message to the worker."""
        now = self.clock.now()
        change = self.membership.change_of(member, now)
        if change is None:
            return
        (state_before, before), state, activation = change, member.last_liveness, member.activation
        meter([member], now)
        self.state.save("members", member.peer_id, member)
        if state is not state_before and state is not Liveness.ALIVE:
            silent_s = now - member.heard_at
            text = f"{member.name} is {state.value}: last heard {silent_s:.1f} s ago"
            self.note("worker", text, member.peer_id, state.value)
        if before not in (activation, None):
            self._send_activation(member, before)
        if state is Liveness.GONE or activation.is_barred:
            self.handle(self.book.lose, member.peer_id, (state if state is Liveness.GONE else activation).value)
        else:
            self.allow(member)
        if state is Liveness.GONE or activation is not Activation.ACTIVE:
            self.board.on_leave(member.peer_id, now)
        self.plan_needed.set()
        self.broadcast_needed.set()

    def _send_activation(self, member: Member, before: Activation) -> None:
        activation = member.activation
        self.note("activation", f"{member.name} is {activation.value} now: {member.activation_reason}")
        self.journal_worker(activation.value, member, member.activation_reason)
        if activation.is_barred or before.is_barred:
            self.state.require_sync()
            self.learner.send_barring(member)
        if Activation.BANNED in (activation, before):
            is_lifted = activation is not Activation.BANNED
            ban = pb.WorkerOrder(banned=pb.BannedPeer(peer_id=member.peer_id, is_lifted=is_lifted))
            for worker in list(self.workers.values()):
                worker.send(ban)
        if activation is not Activation.BANNED:
            order = pb.Activation(is_active=activation is Activation.ACTIVE, reason=member.activation_reason)
            self.send(member.peer_id, pb.WorkerOrder(activation=order))
        elif (session := self.workers.get(member.peer_id)) is not None:
            session.refuse(NotAllowed(f"worker {member.name} is banned: {member.setting_reason or 'no reason given'}"))

    def set_worker(self, peer_id: PeerId, setting: OperatorSetting, reason: str) -> None:
        self.set_workers([peer_id], setting, reason)

    def set_workers(self, peer_ids: Iterable[PeerId], setting: OperatorSetting, reason: str) -> None:
        """Sets them all and syncs once: the disk would hold up a fleet that was set one by one."""
        members = [self.membership.set(peer_id, setting, reason) for peer_id in peer_ids]
        if setting is OperatorSetting.AUTOMATIC and (plan := self.plan.now) is not None:
            self.want(members, plan.pool, plan.reason)
        for member in members:
            self.state.save("members", member.peer_id, member)
            self.review(member)
        self.state.require_sync()
        self.flush_now()

    def accuse(self, peer_id: PeerId, reason: str, is_certain: bool) -> None:
        """Bans the worker, or quarantines it if the finding is not certain. A worker that is already banned stays banned, and the
        learner is told, which would accuse it again otherwise."""
        member = self.membership.members.get(peer_id)
        if member is not None and member.setting is OperatorSetting.BANNED:
            self.learner.send_barring(member)
        elif member is not None:
            self.note("audit", f"{member.name}: {reason}")
            self.set_worker(peer_id, OperatorSetting.BANNED if is_certain else OperatorSetting.QUARANTINED, reason)

    # ---- what the operator changes

    def change_settings(self, settings: dict[str, Any]) -> None:
        """Applies the operator's settings: `usd_budget`, `usd_per_hour_cap`, `staleness_bound`, `prices` by offer. ConfigError or
        MalformedMessage, before any change, for one out of range."""
        bound, prices = settings.get("staleness_bound", self.learner_bound), settings.get("prices", {})
        if bound != int(bound) or not min(1, self.learner_bound) <= bound <= self.learner_bound:
            raise MalformedMessage(
                f"staleness_bound: expected 1 to {self.learner_bound}, which the learner enforces, got {bound:g}"
            )
        section = self.config.coordinator
        money = {name: settings.get(name, getattr(section, name)) for name in ("usd_budget", "usd_per_hour_cap")}
        budget, cap = money.values()
        if not (budget >= 0 and cap >= 0):
            raise MalformedMessage(f"usd_budget, usd_per_hour_cap: expected 0 or more, got {budget:g}, {cap:g}")
        self.money.reprice(prices)
        changed = {
            "coordinator": section.model_copy(update=money),
            "staleness": self.config.staleness.model_copy(update={"bound": int(bound)}),
        }
        self.config = self.config.model_copy(update=changed)
        if bound > self.book.rules.staleness_bound:
            self.book.set_staleness_bound(int(bound))
        self.settings = settings
        self.state.meta("settings", json.dumps(settings))
        configured = {name: getattr(self.options.config.coordinator, name) for name in money}
        self.state.meta("configured", json.dumps(configured))  # whose change is a later word than the operator's
        for member in self.membership.members.values():
            member.price_limit = self.money.limit_of(member, self.config.coordinator)
        self.plan_needed.set()

    def pace_by_bound(self) -> None:
        """A version was published: from now on workers begin groups by a bound that the operator has lowered since the last, if the
        plan publishes as often. Before, groups of the step at hand might need a version that only this step leads to."""
        if self.plan.now is not None and self.plan.now.kappa <= self.config.staleness.bound:
            self.book.set_staleness_bound(self.config.staleness.bound)

    @property
    def halted(self) -> str:
        """Why nobody works now, not even whom the operator has activated; empty while workers may."""
        return self.paused or self._spent

    def pause(self, why: str) -> None:
        """Puts every worker on standby because of `why`, or, if it is empty, lets them work again."""
        if why == self.paused:
            return
        self.paused = why
        self.state.meta("paused", why)
        self.state.require_sync()
        self.note("run", why or "resumed by the operator")
        for member in self.membership.members.values():
            member.paused = self.halted
            self.review(member)
        self.flush_now()

    # ---- plans

    def want(self, members: Iterable[Member], pool: Collection[PeerId], reason: str) -> None:
        """Lets those of `members` work that are in `pool` or on trial, as far as cap and budget allow, whatever the plan says."""
        members = list(members)
        wanted = [member for member in members if member.peer_id in pool or member.is_on_trial]
        over = self.money.beyond_limits(wanted, self.config.coordinator)
        for member in members:
            member.is_wanted = (member.peer_id in pool or member.is_on_trial) and member.peer_id not in over
            member.wanted_reason = ON_TRIAL if member.is_on_trial else reason
            if member.peer_id in over:
                member.wanted_reason = "beyond the cap or the budget"
            self.review(member)

    def adopt_plan(
        self,
        plan: Plan,
        choosable: Iterable[PeerId],
        is_acted_on: bool,
        rate_ratio: float = 1.0,
        is_settled: bool = True,
    ) -> None:
        """Adopts a plan of the pool. The learner always gets it; workers are activated by it only if `is_acted_on`.
        `choosable`: the workers that were alive when the plan was requested. Those that came or fell silent since keep their
        state."""
        before = self.plan.message
        self.plan.adopt(plan, is_acted_on, rate_ratio, is_settled)
        if is_acted_on:
            self.want([self.membership.members[peer_id] for peer_id in choosable], set(plan.pool), plan.reason)
        if before != (update := self.plan.message):
            self.learner.send(pb.LearnerOrder(plan=update))
        if before is None or before.kappa != plan.kappa:
            self.note("plan", plan.reason)

    def go_on_without_plan(self) -> None:
        """Lets everybody work if there is no plan yet and nobody does whom the last one chose: without a step none is made."""
        living = list(self.membership.living())
        if self.plan.now is None and not any(member.activation is Activation.ACTIVE for member in living):
            self.want(living, {member.peer_id for member in living}, "there is no plan yet")

    def adopt_broadcast_plan(self, plan: BroadcastPlan) -> list[WorkerSession]:
        """Sends the plan to the learner now. Returns the workers' sessions, to which the caller sends it at its own pace."""
        self._plan_parts = PlanParts(plan)
        self.learner.send(pb.LearnerOrder(broadcast_plan=plan_to_message(plan)))
        _log.debug("broadcast plan %d: %s over %d nodes: %s", plan.epoch, plan.topology, len(plan.nodes), plan.reason)
        return list(self.workers.values())

    @property
    def broadcast_plan(self) -> BroadcastPlan | None:
        return self._plan_parts.plan if self._plan_parts is not None else None

    def send_broadcast_plan(self, session: WorkerSession) -> None:
        assert self._plan_parts is not None, "there is a plan to send"
        part = self._plan_parts.part_of(session.peer_id)
        session.send(pb.WorkerOrder(broadcast_plan=plan_to_message(part)))

    def journal_worker(self, action: str, member: Member, reason: str) -> None:
        price, spent = member.hello.price_usd_per_hour, member.usd_spent
        self.state.paid_action(PaidAction(self.clock.now(), action, member.peer_id, reason, price, spent))

    # ---- time

    def stood_still(self, seconds: float) -> None:
        """This process, or its machine, did nothing for so long. Those who were not heard were not silent, and cost money."""
        if seconds >= self.config.coordinator.suspect_after:
            self.note("start", f"the coordinator stood still for {format_seconds(seconds)}, or its machine slept")
            now = self.clock.now()
            # Not as if they were heard now: one that is gone is found however often this happens.
            for member in self.membership.living():
                member.heard_at = min(now, member.heard_at + seconds)
            self._extend(self.book.leases.values(), now)

    def tick(self) -> None:
        """Checks liveness and deadlines, meters money and saves telemetry; called twice a second."""
        now = self.clock.now()
        for member in list(self.membership.members.values()):
            self.review(member)
        self.handle(self.book.tick)
        meter(self.membership.members.values(), now)
        if self._ticks % BUDGET_TICKS == 0:
            self._check_budget()
        self._ticks += 1
        members = self.membership.members
        if self._ticks % MEMBERS_KEPT_TICKS == 0:
            self._keep_totals()
        for peer_id in islice(members, self._ticks % MEMBERS_KEPT_TICKS, None, MEMBERS_KEPT_TICKS):
            if members[peer_id].last_liveness is not Liveness.GONE:
                self.state.save("members", peer_id, members[peer_id])
        self.flush_soon()

    def _check_budget(self) -> None:
        """Puts all workers on standby once the budget is spent, in any mode of the planner and without any plan. Once the operator
        raises it, a plan says who works."""
        budget, living = self.config.coordinator.usd_budget, list(self.membership.living())
        before, is_over = self._spent, is_spent(self.money.sums().usd_chosen, budget)
        self._spent = f"the budget of {budget:g} USD is spent" if is_over else ""
        if before != self._spent:
            for member in living:
                member.paused = self.halted
                self.review(member)
        if self._spent:
            self.want([member for member in living if member.is_wanted], (), self._spent)
            self.await_plan(True)

    def await_plan(self, awaits: bool) -> None:
        if awaits is not self.awaits_plan:
            self.awaits_plan = awaits
            self.state.meta("awaits_plan", "1" if awaits else "")

    def _keep_totals(self) -> None:
        self.state.meta("usd_standby", f"{self.money.standby_usd():.6f}")
        records = self.book.records.workers.items()
        admitted = {peer_id: round(record.admitted, 2) for peer_id, record in records if record.admitted}
        self.state.meta("admitted", json.dumps(admitted))

    def close(self) -> None:
        """Ends all streams and saves what is left; nothing is saved after this."""
        self.plan_process.close()
        for session in self.workers.values():
            session.end()
        if self.learner.session is not None:
            self.learner.session.end()
        meter(self.membership.members.values(), self.clock.now())
        self._keep_totals()
        for member in self.membership.living():
            self.state.save("members", member.peer_id, member)
        self.note("stop", "the coordinator stops; workers and learner go on and wait for it")
        with suppress(EchoError):
            self.flush_now()
        self._is_closed = True


def _order_of(grant: le.Grant, run_id: RunId, identity: Identity) -> pb.WorkerOrder:
    """The order for a grant. `identity`: the coordinator's, which signs the ticket."""
    ticket = Ticket(grant.lease_id, grant.group.group_id, grant.worker_id, grant.attempt, grant.deadline, run_id)
    return pb.WorkerOrder(
        lease_grant=pb.LeaseGrant(
            ticket=sign_ticket(ticket, identity),
            group=group_to_message(grant.group),
            is_continuation=grant.is_continuation,
            is_renewal=grant.is_renewal,
        )
    )


@dataclass(frozen=True, slots=True)
class RunEnd:
    """When the learner reported the end, after how many steps, what ended it before the last one (empty if nothing did), and how
    many steps it was to make (0: not recorded). `is_stopped`: the operator ended it."""

    unix_s: float
    step: int
    cause: str = ""
    step_limit: int = 0
    is_stopped: bool = False


class RunEnding:
    """Ends the run: once the learner has finished, nothing that costs money continues. `finish`: None while the run goes on.
    Guarantees: a run ends only when the learner reports that it has finished, so killing or stopping a learner does not end it;
    the end is saved before any node is told; workers leave and are told why, and one that connects later is refused before
    anything changes. A learner that comes back with steps left reopens the run, and so does a coordinator started for more
    steps than the learner had: else workers that come before their learner would be sent home."""

    def __init__(self, hub: Hub, meta: Mapping[str, str]) -> None:
        self._hub = hub
        self.finish = RunEnd(**json.loads(meta["finished"])) if meta.get("finished") else None
        steps = hub.config.learner.steps
        end = self.finish
        if end is not None and not end.is_stopped and steps > max(end.step, end.step_limit):
            self._reopen(f"{steps} steps are asked for, {end.step} were made")

    @property
    def text(self) -> str:
        """A sentence for people; empty while the run goes on."""
        if self.finish is None:
            return ""
        if self.finish.cause:
            return f"run {self._hub.options.run_id} ended at step {self.finish.step}: {self.finish.cause}"
        return f"run {self._hub.options.run_id} is finished after {self.finish.step} steps"

    @property
    def _refusal(self) -> RunFinished:
        return RunFinished(f"{self.text}; no work is left for workers")

    def check_open(self) -> None:
        if self.finish is not None:
            raise self._refusal

    def check_learner(self) -> None:
        """Raises RunFinished while the operator's word ends the run: only that can reopen it."""
        if self.finish is not None and self.finish.is_stopped:
            raise self._refusal

    def resume(self) -> None:
        if self.finish is not None and self.finish.is_stopped:
            self._reopen("resumed by the operator")

    def reopen_for(self, hello: pb.LearnerHello) -> None:
        if self.finish is not None and not 0 < hello.step_limit <= hello.step:
            self._reopen(f"step {hello.step} of {hello.step_limit or 'as many as its trainer makes'}")

    def _reopen(self, why: str) -> None:
        self.finish, self._hub.board.report.is_finished = None, False
        self._hub.state.meta("finished", "")
        self._hub.state.require_sync()
        self._hub.note("run", f"goes on: {why}; workers may join again")

    def finish_run(self, cause: str = "", is_stopped: bool = False) -> None:
        """Saves the end and its cause, closes all groups, and dismisses every worker. Idempotent."""
        hub = self._hub
        if self.finish is not None:
            return
        limit = (hub.board.hello.step_limit if hub.board.hello is not None else 0) or hub.config.learner.steps
        self.finish = RunEnd(hub.clock.now(), int(hub.board.report.step), cause, limit, is_stopped)
        hub.state.meta("finished", json.dumps(asdict(self.finish)))
        hub.state.require_sync()  # no node would report it again
        hub.note("run", f"{self.text}: workers are sent home, rented machines are given back")
        hub.handle(hub.book.sync, ())
        for member in list(hub.membership.living()):
            hub.dismiss(member.peer_id, "the run is finished", self._refusal)
        hub.state.meta("usd_standby", f"{hub.money.standby_usd():.6f}")
        hub.flush_now()

    @property
    def is_settled(self) -> bool:
        """Whether the run is finished, no worker is connected and no machine is rented."""
        return self.finish is not None and not self._hub.workers and not self._hub.money.open_machines
