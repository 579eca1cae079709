"""Drives the real cores of a worker on the virtual clock, as worker/runtime does on a real machine.

Assignments (leases, reports), SwapMachine (versions), TokenGate, Backoff, RateWindow and the broadcast session decide;
the real codec decodes; this carries out their actions on the simulated network, disk and engine. Guarantees: nothing
is decided here that a core decides in the runtime. Leaves to others: faults (faults), what must hold (checkers).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2.base.errors import EchoError
from echo2.base.ids import LeaseId, PeerId, Version
from echo2.base.rng import derived_rng
from echo2.base.rollout import RolloutSegment
from echo2.broadcast.topology import BroadcastPlan
from echo2.control.backoff import Backoff
from echo2.coordinator import lease_events as le
from echo2.coordinator.telemetry import Heartbeat, LinkReport, WorkerHello
from echo2.sim import broadcast_driver as bd
from echo2.sim import messages as m
from echo2.sim.checkers import Truth
from echo2.sim.disk import ChunkDisk
from echo2.sim.host import Host
from echo2.sim.network import End, Network
from echo2.sim.scene import Sabotage, Scene
from echo2.sim.sim_engine import SimEngine, SwapFaults
from echo2.sim.tiny_model import Sampler
from echo2.sim.weight_driver import WeightKeeper
from echo2.trust.identity import Identity
from echo2.worker import duties, swap
from echo2.worker.assignments import Assignments
from echo2.worker.engine import TokenChunk
from echo2.worker.options import WorkerLimits
from echo2.worker.telemetry import RateWindow
from echo2.worker.token_gate import TokenGate

VERDICT_S = 30.0
WELCOME_S = 20.0
ENGINE_STARTS_S = 0.5


@dataclass(slots=True)
class WorkerMachine:
    """What outlives the process: identity, chunks, speed, price."""

    name: str
    identity: Identity
    disk: ChunkDisk
    slot_count: int = 8
    step_s: float = 0.25
    slowdown: float = 1.0
    price: float = 1.0
    is_spot: bool = True
    swap_faults: SwapFaults = field(default_factory=SwapFaults)


class WorkerDriver:
    """One process of a worker. `start` once."""

    def __init__(self, scene: Scene, truth: Truth, host: Host, machine: WorkerMachine, network: Network) -> None:
        self.scene, self.truth, self.host, self.machine, self.network = scene, truth, host, machine, network
        self.me = machine.identity.peer_id
        self.assignments = Assignments(WorkerLimits(finished_delay_s=0.02))
        self.rates = RateWindow()
        self.is_leaving = False
        self.has_left = False
        self.learner_address = ""
        self.engine: SimEngine | None = None
        self.weights: WeightKeeper | None = None
        self.gate = TokenGate(self._sampled, self._spoiled)
        self.broadcast = self.make_broadcast()
        self.broadcast.suffer(scene.sabotage)
        self._events: deque[duties.Event] = deque()
        self._is_handling = False
        self._wake_at = float("inf")
        self._coordinator: End | None = None
        self._is_welcome = False
        self._report_stream: End | None = None
        self._under_way: deque[tuple[int, LeaseId]] = deque()
        self._sequence = 0
        self._reported_at = 0.0
        self._fetching: set[LeaseId] = set()
        self._tickets: dict[LeaseId, m.Ticket] = {}
        self._backoffs = {
            name: Backoff(derived_rng(scene.seed, "backoff", machine.name, name, host.incarnation))
            for name in ("coordinator", "learner")
        }

    def make_broadcast(self) -> bd.BroadcastDriver:
        return bd.BroadcastDriver(
            self.host, self.network, self.machine.identity, self.machine.disk, self._address_of, self._weights_changed,
            self.scene.seed,
        )  # fmt: skip

    # ---- life

    def start(self) -> None:
        self.network.listen(self.host, self._accept)
        self.broadcast.start()
        self._reach_coordinator()

    def _accept(self, end: End, kind: str) -> None:
        if kind == "chunks":
            self.broadcast.accept(end)
        else:
            end.close("not served here")

    def preempt(self, within_s: float, reason: str) -> None:
        """Notice that the machine will be taken: drain, say good-bye."""
        self.is_leaving = True
        self.send(duties.Drain(within_s, reason))

    def _address_of(self, peer: PeerId) -> str | None:
        return self.scene.address_of(peer)

    @property
    def live(self) -> Version | None:
        return self.weights.machine.live if self.weights is not None else None

    @property
    def is_connected(self) -> bool:
        """To the coordinator and to the learner."""
        return self._is_welcome and self._report_stream is not None

    @property
    def waits_for(self) -> str:
        """What it waits for, in words; empty while it works."""
        if not self._is_welcome:
            return "the coordinator"
        if not self.learner_address:
            return "the learner to join the run"
        if self._report_stream is None:
            return "the learner"
        if self.live is None:
            return self.broadcast.waits_for or "the first weights"
        return "" if self.assignments.lease_ids else "a lease"

    @property
    def oldest_report_s(self) -> float:
        """For how long the oldest report has gone without a verdict."""
        is_asked = self._report_stream is not None and bool(self._under_way)
        return self.host.now() - self._reported_at if is_asked else 0.0

    # ---- the desk

    def send(self, event: duties.Event) -> None:
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                now = self.host.now()
                for action in self.assignments.handle(self._events.popleft(), now):
                    self._carry_out(action, now)
            self.rates.busy(self.assignments.running_rollouts > 0, self.host.now())
        finally:
            self._is_handling = False

    def _carry_out(self, action: duties.Action, now: float) -> None:
        match action:
            case duties.Submit(request):
                try:
                    assert self.engine is not None, "a lease is asked for once the engine has weights"
                    self.engine.submit(request)
                except EchoError as error:
                    self._events.append(duties.EngineRefused(request.request_id, str(error)))
            case duties.Abort(request_id):
                if self.engine is not None:
                    self.engine.abort(request_id)
            case duties.FetchPartials(lease_id):
                self._fetch(lease_id)
            case duties.Report(lease_id, segments):
                self.report(lease_id, segments)
            case duties.EndLease(lease_id, reason, message):
                self._end_lease(lease_id, reason, message)
            case duties.TellProgress(lease_id, finished, tokens):
                self._tell(le.Progressed(self.me, lease_id, finished, tokens))
            case duties.RequestLeases(free_rollouts, version):
                self._tell(le.Wanted(self.me, free_rollouts, version))
            case duties.RolloutFinished(duration_s):
                self.rates.finished(duration_s, now)
            case duties.Drained():
                self._drained()
            case duties.WakeAt(at):
                self._wake(at)

    def _wake(self, at: float) -> None:
        self._wake_at = at

        def tick() -> None:
            if self._wake_at == at:
                self._wake_at = float("inf")
                self.send(duties.Tick())

        self.host.after(at - self.host.now(), tick)

    def _drained(self) -> None:
        if self.is_leaving:
            self._tell(m.Leaving("drained"))
            self.has_left = True

    def _end_lease(self, lease_id: LeaseId, reason: duties.EndReason, message: str) -> None:
        if reason is duties.EndReason.REFUSED:
            self.host.story.tell(self.host.name, f"lease {lease_id} is refused: {message}")
        self._tell(le.Ended(self.me, lease_id, le.EndReason(reason.value), message))
        self._tickets.pop(lease_id, None)

    # ---- the coordinator

    def _reach_coordinator(self) -> None:
        self.network.dial(self.host, "coordinator", "worker", self._hello, lambda text: self._retry_coordinator())

    def _retry_coordinator(self) -> None:
        self.host.after(self._backoffs["coordinator"].next_pause_s(), self._reach_coordinator)

    def _hello(self, end: End) -> None:
        self._coordinator = end
        end.on_message = lambda message: self._ordered(end, message)
        end.on_closed = lambda reason: self._coordinator_lost(end)
        end.send(self.hello())

        def give_up() -> None:
            if self._coordinator is end and not self._is_welcome:
                end.close("no answer to the hello")
                self._coordinator_lost(end)

        self.host.after(WELCOME_S, give_up)

    def hello(self) -> WorkerHello:
        held = tuple(
            le.HeldLease(lease_id, ticket.group_id, ticket.attempt, ticket.deadline_unix_s)
            for lease_id in self.assignments.lease_ids
            if (ticket := self._tickets.get(lease_id)) is not None
        )
        return WorkerHello(
            protocol_version=1, name=self.machine.name, run_id=bd.RUN, addresses=(self.machine.name,),
            price_usd_per_hour=self.machine.price, is_spot=self.machine.is_spot, slot_count=self.machine.slot_count,
            link=self._link(), held_leases=held,
        )  # fmt: skip

    def _link(self) -> LinkReport:
        link = self.network.links[self.host.name]
        return LinkReport(link.up, link.down, link.rtt_s)

    def _coordinator_lost(self, end: End) -> None:
        if self._coordinator is not end:
            return
        self._coordinator = None
        if self._is_welcome:
            self._is_welcome = False
            self.send(duties.CoordinatorLost())
        self._retry_coordinator()

    def _tell(self, message: object) -> None:
        if self._coordinator is not None:  # the hello went first
            self._coordinator.send(message)

    def _ordered(self, end: End, order: object) -> None:
        if end is not self._coordinator:
            return
        match order:
            case m.Welcome():
                self._backoffs["coordinator"].succeeded()
                self._is_welcome = True
                if order.learner is not None:
                    self._learner_is_at(order.learner)
                self.send(duties.CoordinatorCame(order.report_interval_s))
                self._beat(end, order.heartbeat_interval_s)
            case m.LeaseGrant(ticket, group, is_continuation, is_renewal):
                self._tickets[ticket.lease_id] = ticket
                deadline = self.host.now() + ticket.deadline_unix_s - self.host.unix()
                self.send(duties.Granted(ticket.lease_id, group, deadline, is_continuation, is_renewal))
            case le.Revoke(_, lease_id, reason):
                self.send(duties.Revoked(lease_id, reason))
            case m.Activate(is_active):
                self.send(duties.Activated(is_active))
            case BroadcastPlan():
                self.broadcast.set_plan(order)
            case m.Whereabouts():
                self._learner_is_at(order)
            case m.Refusal(message):
                self.host.story.tell(self.host.name, f"is refused: {message}")
                self.has_left = True
                end.close("refused")

    def _beat(self, end: End, interval_s: float) -> None:
        if end is not self._coordinator or not end.is_open:
            return
        end.send(self.heartbeat())
        self.host.after(interval_s, lambda: self._beat(end, interval_s))

    def heartbeat(self) -> Heartbeat:
        rates = self.rates.rates(self.host.now())
        keeper = self.weights
        return Heartbeat(
            version=self.live, running_sequences=self.engine.running if self.engine else 0,
            rollouts_per_s=rates.rollouts_per_s, tokens_per_s=rates.tokens_per_s,
            rollout_s_mean=rates.rollout_s_mean, rollout_s_p95=rates.rollout_s_p95,
            swap_s=keeper.swap_s if keeper else 0.0, apply_s=keeper.apply_s if keeper else 0.0, link=self._link(),
            waits_for=self.waits_for,
        )  # fmt: skip

    # ---- the learner

    def _learner_is_at(self, whereabouts: m.Whereabouts) -> None:
        self.broadcast.set_publisher(whereabouts.peer_id)
        is_new = not self.learner_address
        self.learner_address = whereabouts.address
        if is_new:
            self._reach_learner()
            self.host.after(ENGINE_STARTS_S, self._start_engine)

    def _reach_learner(self) -> None:
        self.network.dial(
            self.host, self.learner_address, "report", self._report_to, lambda text: self._retry_learner()
        )

    def _retry_learner(self) -> None:
        if self.scene.sabotage is Sabotage.NO_REDIAL:
            return
        self.host.after(self._backoffs["learner"].next_pause_s(), self._reach_learner)

    def _report_to(self, end: End) -> None:
        self._report_stream = end
        self._under_way.clear()
        end.on_message = lambda message: self._answered(end, message)
        end.on_closed = lambda reason: self._learner_lost(end, None)
        self.send(duties.LearnerCame())

    def _learner_lost(self, end: End, refused: duties.ReportRefused | None) -> None:
        if self._report_stream is not end:
            return
        self._report_stream = None
        self.send(duties.LearnerLost())
        if refused is not None:
            self.send(refused)
        self._retry_learner()

    def report(self, lease_id: LeaseId, segments: tuple[RolloutSegment, ...]) -> None:
        end, ticket = self._report_stream, self._tickets.get(lease_id)
        assert end is not None and ticket is not None, "reports are made while the learner is there"
        self.truth.reported(self.host.name, segments)
        self._sequence += 1
        if not self._under_way:
            self._reported_at = self.host.now()
        sequence = self._sequence
        self._under_way.append((sequence, lease_id))
        size = sum(20 * len(segment.token_ids) for segment in segments) + 400
        end.send(m.WorkerReport(sequence, ticket, segments), size)

        def late() -> None:
            if self._report_stream is end and self._under_way and self._under_way[0][0] == sequence:
                end.close("no verdict")
                self._learner_lost(end, None)

        self.host.after(VERDICT_S, late)

    def ticket_of(self, lease_id: LeaseId) -> m.Ticket | None:
        return self._tickets.get(lease_id)

    def claim(self, message: object) -> None:
        """Something on the stream to the coordinator that no machine asked for."""
        self._tell(message)

    def send_raw(self, message: object) -> None:
        """Something on the stream to the learner that no machine asked for."""
        if self._report_stream is not None:
            self._report_stream.send(message)

    def _answered(self, end: End, message: object) -> None:
        if end is not self._report_stream:
            return
        match message:
            case m.ReportVerdict(sequence) if not self._under_way or sequence != self._under_way[0][0]:
                assert self.host.name in self.truth.liars, f"verdict {sequence} answers no report under way"
            case m.ReportVerdict(sequence, verdicts, refusal):
                _, lease_id = self._under_way[0]
                if refusal:
                    end.close("refused")
                    self._learner_lost(end, duties.ReportRefused(lease_id, refusal))
                    return
                self._under_way.popleft()
                self._reported_at = self.host.now()
                self._backoffs["learner"].succeeded()
                self.send(duties.Judged(lease_id, verdicts))
            case m.Partials(lease_id, rollouts, refusal):
                self._fetching.discard(lease_id)
                if refusal:
                    self.send(duties.PartialsRefused(lease_id, refusal))
                else:
                    self.send(duties.PartialsCame(lease_id, rollouts))

    def _fetch(self, lease_id: LeaseId) -> None:
        """Asks until answered, or until the lease has ended; an answer may come twice."""
        self._fetching.discard(lease_id)
        if lease_id not in self._tickets:
            return
        self._fetching.add(lease_id)
        if self._report_stream is not None:
            self._report_stream.send(m.AskPartials(self._tickets[lease_id]))
        self.host.after(2.0, lambda: self._fetch_again(lease_id))

    def _fetch_again(self, lease_id: LeaseId) -> None:
        if lease_id in self._fetching:
            self._fetch(lease_id)

    # ---- engine and weights

    def _start_engine(self) -> None:
        rng = derived_rng(self.scene.seed, "engine", self.machine.name, self.host.incarnation)
        sampler: Sampler = self.scene.sampler
        engine = SimEngine(self.host, sampler, self.machine.slot_count, self.machine.step_s, self.gate_take, rng)
        engine.faults = self.machine.swap_faults
        engine.slowdown = self.machine.slowdown
        self.engine = engine
        self.weights = WeightKeeper(self, engine)
        self._weights_changed()

    def gate_take(self, chunks: Sequence[TokenChunk]) -> None:
        self.gate.take(chunks)

    def _sampled(self, chunks: tuple[TokenChunk, ...]) -> None:
        self.rates.sampled(sum(len(chunk.token_ids) for chunk in chunks), self.host.now())
        self.send(duties.Sampled(chunks))

    def _spoiled(self, lease_id: LeaseId) -> None:
        self.send(duties.Revoked(lease_id, "its tokens were sampled by weights of no version"))

    def _weights_changed(self) -> None:
        if self.weights is not None:
            self.weights.pump()

    def went_live(self, live: swap.GoLive) -> None:
        assert self.engine is not None
        self.host.story.tell(self.host.name, f"version {live.version} is live")
        self.send(duties.Live(live.version, self.engine.slot_count))
        self._tell(self.heartbeat())
