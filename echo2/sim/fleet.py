"""Fleet simulation: the real planner and the real staleness rule and ledger over a virtual clock.

Rollouts are drawn one by one, run in slots, may be cut off by a preemption and go on elsewhere. The learner offers
groups up to the plan's cap, workers begin what the staleness rule lets them begin, finished groups wait in a buffer,
oldest version first. Versions cross the links one at a time, and a newer one replaces one that waits. Guarantees: no
token over the bound is trained on (the ledger asserts it); the same scenario gives the same report. Leaves to others:
chunks and trees (their time is the fluid estimate's), message loss.

A step waits for R admissible rollouts and is woken by a finished group; a worker waits for an offer that it may begin
and is woken by a batch that is drawn, a version that goes live, or a rollout that ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from echo2.base.ids import GroupId, Step, Version
from echo2.base.rng import derived_rng
from echo2.base.rollout import VersionSpan
from echo2.cost_model.plan import Plan
from echo2.cost_model.snapshot import DownloadMode
from echo2.sim.clock import VirtualClock
from echo2.sim.fleet_scenario import FleetScenario, WorkerTruth
from echo2.staleness.ledger import Ledger
from echo2.staleness.rule import is_admissible, may_begin

NO_VERSION = Version(-1)
Planner = Callable[["FleetSim", str], Plan]


@dataclass(slots=True)
class SimGroup:
    """One prompt's rollouts under way or finished."""

    group_id: GroupId
    open_count: int
    oldest: Version
    tokens: float = 0.0


@dataclass(slots=True)
class RolloutRun:
    """One rollout being made: tokens still to come."""

    group: SimGroup
    tokens_left: float
    began_s: float = 0.0
    stalled_s: float = 0.0  # its worker's standstill when it began


@dataclass(slots=True)
class SimWorker:
    """A machine of the fleet. `is_active`: in the pool and joined; `paid_since_s`: None while it costs nothing."""

    truth: WorkerTruth
    index: int
    price: float
    version: Version = NO_VERSION
    is_wanted: bool = False
    is_active: bool = False
    is_lost: bool = False
    state_since_s: float = -1e9
    paid_since_s: float | None = None
    usd: float = 0.0
    paid_s: float = 0.0
    stalled_s: float = 0.0
    stands_until_s: float = 0.0
    life: int = 0  # rises with each loss, so that events of an earlier life are void
    running: dict[int, RolloutRun] = field(default_factory=dict)
    waiting: deque[RolloutRun] = field(default_factory=deque)

    def pay(self, now: float) -> None:
        """Brings the bill up to `now`."""
        if self.paid_since_s is not None:
            self.usd += self.price * (now - self.paid_since_s) / 3600
            self.paid_s += now - self.paid_since_s
            self.paid_since_s = now


@dataclass(slots=True)
class SimCounters:
    """What happened."""

    step_started_s: list[float] = field(default_factory=list)
    usd_at_step: list[float] = field(default_factory=list)
    dropped_rollouts: int = 0
    trained_rollouts: int = 0
    generated_tokens: float = 0.0
    preemptions: int = 0
    activations: int = 0
    drains: int = 0
    plans: int = 0
    broadcasts_s: list[float] = field(default_factory=list)
    plan_log: list[tuple[float, int, str, float, str]] = field(default_factory=list)


class FleetSim:
    """State and transitions; `run` drives it to the scenario's last step."""

    def __init__(self, scenario: FleetScenario, planner: Planner) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        self.planner = planner
        self.learner = scenario.learner
        self.bound = scenario.config.staleness_bound
        self.workers = [SimWorker(truth, i, truth.price_usd_per_hour) for i, truth in enumerate(scenario.workers)]
        self.counters = SimCounters()
        self.ledger = Ledger(self.bound)
        self.step = 0  # batches started
        self.completed = 0
        self.is_training = False
        self.outstanding = 0  # rollouts offered and not trained or dropped
        self.finished: list[SimGroup] = []
        self.handed_back: deque[RolloutRun] = deque()
        self.newest = Version(0)
        self.link_busy = False
        self.sent = Version(0)
        self.idle: deque[int] = deque()
        self.is_idle = [False] * len(self.workers)
        self._lengths_rng = derived_rng(scenario.seed, "lengths")
        self._loss_rng = derived_rng(scenario.seed, "losses")
        self._train_rng = derived_rng(scenario.seed, "train")
        self._group_count = 0
        self._sequence_count = 0
        self.plan = planner(self, "start")
        self._carry_out(self.plan, is_start=True)
        for change in scenario.price_changes:
            self.clock.at(change.at_s, partial(self._change_price, change.gpu, change.factor))

    def run(self, until_s: float = 1e12) -> SimCounters:
        """Lets the scenario happen; returns what did."""
        self._dispatch()
        self.clock.run(until_s)
        now = self.clock.now()
        for worker in self.workers:
            worker.pay(now)
        return self.counters

    @property
    def usd_spent(self) -> float:
        """By all workers, up to now."""
        for worker in self.workers:
            worker.pay(self.clock.now())
        return sum(worker.usd for worker in self.workers)

    @property
    def worker_hours(self) -> float:
        """Hours paid for, over all workers."""
        return sum(worker.paid_s for worker in self.workers) / 3600

    # ---- plans

    def replan(self, why: str) -> None:
        """Asks the planner and carries out what changed."""
        plan = self.planner(self, why)
        if plan is not self.plan:
            self.plan = plan
            self._carry_out(plan, is_start=False)

    def _carry_out(self, plan: Plan, is_start: bool) -> None:
        pool = set(plan.pool)
        counters = self.counters
        counters.plans += 1
        counters.plan_log.append(
            (self.clock.now(), plan.kappa, plan.reason, plan.predicted_utilisation, plan.binding.value)
        )
        for worker in self.workers:
            is_wanted = worker.truth.name in pool
            if is_wanted and not worker.is_wanted and not worker.is_lost:
                counters.activations += not is_start
                self._activate(worker, 0.0 if is_start else worker.truth.join_s)
            elif worker.is_wanted and not is_wanted:
                counters.drains += 1
                self._drain(worker)

    def _activate(self, worker: SimWorker, join_s: float) -> None:
        worker.is_wanted = True
        worker.state_since_s = self.clock.now()
        worker.pay(self.clock.now())
        worker.paid_since_s = self.clock.now()
        self.clock.after(join_s, partial(self._joined, worker, worker.life))

    def _joined(self, worker: SimWorker, life: int) -> None:
        if worker.life != life or not worker.is_wanted or worker.is_active:
            return
        worker.is_active = True
        worker.version = max(worker.version, self.sent)
        if worker.truth.hazard_per_hour > 0:
            lifetime_s = self._loss_rng.expovariate(worker.truth.hazard_per_hour / 3600)
            self.clock.after(lifetime_s, partial(self._lose, worker, worker.life))
        self._offer_to(worker)

    def _drain(self, worker: SimWorker) -> None:
        """No new rollouts; what runs ends, then the machine is no longer paid for."""
        worker.is_wanted = False
        worker.is_active = False
        worker.state_since_s = self.clock.now()
        self.handed_back.extend(worker.waiting)
        worker.waiting.clear()
        if not worker.running:
            self._stop_paying(worker)

    def _stop_paying(self, worker: SimWorker) -> None:
        worker.pay(self.clock.now())
        worker.paid_since_s = None

    def _lose(self, worker: SimWorker, life: int) -> None:
        """A preemption: rollouts go on elsewhere from the last report; the machine comes back after its join time."""
        if worker.life != life or not worker.is_active:
            return
        self.counters.preemptions += 1
        worker.life += 1
        worker.is_lost, worker.is_active, worker.is_wanted = True, False, False
        self._stop_paying(worker)
        loss_s = self.scenario.config.preemption_loss_s
        for sequence in worker.running.values():
            worked_s = self.clock.now() - sequence.began_s - (worker.stalled_s - sequence.stalled_s) - loss_s
            sequence.tokens_left -= max(0.0, worked_s) * worker.truth.sequence_tokens_per_s
            sequence.tokens_left = max(1.0, sequence.tokens_left)
        self.handed_back.extend([*worker.running.values(), *worker.waiting])
        worker.running.clear()
        worker.waiting.clear()
        self.clock.after(max(worker.truth.join_s, 1.0), partial(self._found, worker))
        self.replan(f"{worker.truth.name} was lost")
        self._dispatch()

    def _found(self, worker: SimWorker) -> None:
        worker.is_lost = False
        worker.version = NO_VERSION
        self.replan(f"{worker.truth.name} can be had again")

    def _change_price(self, gpu: str, factor: float) -> None:
        for worker in self.workers:
            if worker.truth.gpu == gpu:
                worker.pay(self.clock.now())
                worker.price = worker.truth.price_usd_per_hour * factor
        self.replan(f"{gpu} costs {factor:g} times as much")

    # ---- generation

    def _dispatch(self) -> None:
        """Offers what may be begun to the workers that wait, in the order in which they began to wait."""
        for _ in range(len(self.idle)):
            worker = self.workers[self.idle.popleft()]
            if self.is_idle[worker.index] and not self._offer_to(worker):
                break

    def _offer_to(self, worker: SimWorker) -> bool:
        """Fills its slots; the worker waits when it may begin nothing. False when the cap is reached."""
        self.is_idle[worker.index] = False
        while worker.is_active and len(worker.running) < worker.truth.slots:
            if not worker.waiting and not self._lease(worker):
                self.is_idle[worker.index] = True
                self.idle.append(worker.index)
                return self._has_room()
            self._begin(worker, worker.waiting.popleft())
        return True

    def _has_room(self) -> bool:
        return self.outstanding + self.learner.rollouts_per_group <= self.plan.in_flight_cap_rollouts

    def _lease(self, worker: SimWorker) -> bool:
        """One more group, or rollouts handed back by others, for `worker`."""
        if self.handed_back:
            worker.waiting.append(self.handed_back.popleft())
            return True
        consume_step = self.step + self.outstanding // self.learner.rollouts_per_step
        if not self._has_room() or not may_begin(worker.version, consume_step, self.bound):
            return False
        count = self.learner.rollouts_per_group
        group = SimGroup(GroupId(str(self._group_count)), count, worker.version)
        self._group_count += 1
        self.outstanding += count
        draw, rng = self.scenario.lengths.draw, self._lengths_rng
        for _ in range(count):
            tokens = draw(rng)
            group.tokens += tokens
            worker.waiting.append(RolloutRun(group, tokens))
        return True

    def _begin(self, worker: SimWorker, sequence: RolloutRun) -> None:
        number = self._sequence_count
        self._sequence_count += 1
        sequence.began_s, sequence.stalled_s = self.clock.now(), worker.stalled_s
        worker.running[number] = sequence
        duration_s = sequence.tokens_left / worker.truth.sequence_tokens_per_s
        duration_s += max(0.0, worker.stands_until_s - self.clock.now())
        self.clock.after(duration_s, partial(self._sequence_due, worker, worker.life, number, worker.stalled_s))

    def _sequence_due(self, worker: SimWorker, life: int, number: int, stalled_s: float) -> None:
        if worker.life != life:
            return
        if worker.stalled_s > stalled_s:  # it stood still meanwhile: that much later
            late_s = worker.stalled_s - stalled_s
            self.clock.after(late_s, partial(self._sequence_due, worker, life, number, worker.stalled_s))
            return
        sequence = worker.running.pop(number)
        group = sequence.group
        group.open_count -= 1
        if worker.is_active:
            self._offer_to(worker)
        if not worker.is_wanted and not worker.running:
            self._stop_paying(worker)
        if group.open_count == 0:
            self.counters.generated_tokens += group.tokens
            self.finished.append(group)
            self._try_step()

    # ---- learning

    def _try_step(self) -> None:
        """Starts a step when the learner is free and R admissible rollouts wait."""
        if self.is_training:
            return
        size = self.learner.rollouts_per_group
        fresh = [g for g in self.finished if is_admissible(Step(self.step), g.oldest, self.bound)]
        stale = len(self.finished) - len(fresh)
        if stale:
            self.finished = fresh
            self.counters.dropped_rollouts += stale * size
            self.outstanding -= stale * size
        need = -(-self.learner.rollouts_per_step // size)
        if len(self.finished) < need:
            if stale:
                self._dispatch()
            return
        self.finished.sort(key=lambda group: group.oldest)
        batch, self.finished = self.finished[:need], self.finished[need:]
        self._start_step(batch)

    def _start_step(self, batch: Sequence[SimGroup]) -> None:
        now, counters = self.clock.now(), self.counters
        counters.step_started_s.append(now)
        counters.usd_at_step.append(self.usd_spent)
        if self.step == self.scenario.steps:
            self.clock.stop()
            return
        for group in batch:
            self.ledger.record(group.group_id, Step(self.step), [VersionSpan(group.oldest, max(1, int(group.tokens)))])
        self.ledger.forget_before(Step(self.step - self.bound))
        self.outstanding -= len(batch) * self.learner.rollouts_per_group
        counters.trained_rollouts += len(batch) * self.learner.rollouts_per_group
        self.step += 1
        self.is_training = True
        cv = self.scenario.train_cv
        factor = max(0.1, self._train_rng.gauss(1.0, cv)) if cv else 1.0
        self.clock.after(self.learner.train_s * factor, self._step_done)
        self._dispatch()

    def _step_done(self) -> None:
        self.is_training = False
        self.completed += 1
        if self.completed - self.newest >= self.plan.kappa:
            self.newest = Version(self.completed)
            self.clock.after(self.learner.encode_s, self._try_send)
            self.replan(f"version {self.newest}")
        self._try_step()

    # ---- dissemination

    def _try_send(self) -> None:
        """Sends the newest version when the links are free."""
        if self.link_busy or self.newest <= self.sent:
            return
        version, self.sent, self.link_busy = self.newest, self.newest, True
        receivers = [worker for worker in self.workers if worker.is_wanted]
        self._send(version, receivers)

    def _send(self, version: Version, receivers: Sequence[SimWorker]) -> None:
        """Each worker holds the version when the slowest of seed, swarm and its own downlink is through."""
        learner, efficiency = self.learner, self.scenario.config.broadcast_efficiency
        size = learner.artifact_bytes(self.plan.kappa) / efficiency
        uplinks = learner.link.uplink_bytes_per_s + sum(worker.truth.link.uplink_bytes_per_s for worker in receivers)
        shared_s = size * max(1 / learner.link.uplink_bytes_per_s, len(receivers) / uplinks)
        longest_s = live_s = 0.0
        for worker in receivers:
            link = worker.truth.link
            transfer_s = max(shared_s, size / link.downlink_bytes_per_s)
            longest_s = max(longest_s, transfer_s)
            live_after_s = transfer_s + learner.link.rtt_s + link.rtt_s + worker.truth.apply_s
            live_s = max(live_s, live_after_s)
            if self.scenario.config.download is DownloadMode.STALLED:
                self._stand_still(worker, transfer_s)
            self.clock.after(live_after_s, partial(self._live, worker, worker.life, version))
        self.counters.broadcasts_s.append(live_s + learner.encode_s)
        self.clock.after(longest_s, self._sent)

    def _sent(self) -> None:
        self.link_busy = False
        self._try_send()

    def _stand_still(self, worker: SimWorker, seconds: float) -> None:
        """What runs is that much later, what begins meanwhile waits for the end."""
        worker.stalled_s += seconds
        worker.stands_until_s = max(worker.stands_until_s, self.clock.now() + seconds)

    def _live(self, worker: SimWorker, life: int, version: Version) -> None:
        if worker.life != life:
            return
        worker.version = max(worker.version, version)
        self._stand_still(worker, worker.truth.swap_s)
        if self.is_idle[worker.index]:
            self._offer_to(worker)
