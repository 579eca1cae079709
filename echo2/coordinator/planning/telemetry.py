"""What is known of learner, versions and plan, and from it the planner's snapshot and the nodes of the broadcast plan.

Guarantees: bounded memory. A version's measured broadcast time runs from the moment the coordinator hears of its publication until
every worker that was in the pool then, and still is, has reported it live. Plans start from measurements: while the learner's step
time is unknown, or no worker's rate is known, there is no snapshot. A worker that has not been measured starts from a prior for its
GPU and is pinned in the pool until then; its claims count only as far as its deliveries support them, and while any worker has
delivered, those that have not are left out.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median

from echo2.base.errors import NotAllowed, VersionMismatch
from echo2.base.ids import PeerId, Version
from echo2.broadcast.plan import (
    DEGREE_MAX,
    UNKNOWN_DOWNLINK_BYTES_PER_S,
    UNKNOWN_UPLINK_BYTES_PER_S,
    BroadcastPlan,
    NodeLink,
    Tree,
)
from echo2.broadcast.reachability import Access, LinkKind
from echo2.broadcast.trees import Needs
from echo2.config.run import RunConfig
from echo2.coordinator.fleet.members import WINDOW, Activation, Liveness, Member, OperatorSetting
from echo2.cost_model.machines import EGRESS_USD_PER_GIB, GpuType, kind_of_name
from echo2.cost_model.plan import Limit, Plan
from echo2.cost_model.relations import CHANGE_OBSERVATIONS, DELTA_PERIODS_MAX, DeltaSizeEstimator, RobustEstimator
from echo2.cost_model.snapshot import (
    BROADCAST_EFFICIENCY,
    DELTA_SHARE,
    DROPPED_SHARE_MAX,
    JOIN_S,
    SPOT_HAZARD_PER_HOUR,
    LearnerEstimate,
    LinkEstimate,
    PlanConfig,
    WorkerEstimate,
    WorkerState,
)
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

VERSIONS_KEPT = 64  # as many as S admits
# Below a quarter it is not the links that are slow; the median of 15 ignores 7 outliers.
EFFICIENCY_LEAST, EFFICIENCY_WINDOW = 0.25, 15
EFFICIENCY_PRIOR = (BROADCAST_EFFICIENCY,) * 2  # outweighed as soon as three broadcasts were measured


@dataclass(slots=True)
class VersionRow:
    """One published version and its broadcast. `waiting`: workers of the pool that have not reported it live yet."""

    published: pb.VersionPublished
    published_at: float
    predicted_s: float
    pool_size: int
    waiting: set[PeerId]
    has_links_alone: bool = True  # no earlier version was still being sent when this one was published
    live_after_s: dict[PeerId, float] = field(default_factory=dict)
    complete_s: float | None = None


@dataclass(slots=True)
class Totals:
    artifact_bytes: int = 0
    full_bytes: int = 0
    versions: int = 0


@dataclass(slots=True)
class LearnerBoard:
    """`hello`: without the open groups. `pipe_address`: of a relay's byte pipes; set if the learner cannot be reached at its own
    address."""

    peer_id: PeerId | None = None
    hello: pb.LearnerHello | None = None
    report: pb.LearnerReport = field(default_factory=lambda: pb.LearnerReport(eval_reward=-1))
    train_time: RobustEstimator = field(default_factory=RobustEstimator)
    discarded: RobustEstimator = field(default_factory=RobustEstimator)
    delta_size: DeltaSizeEstimator = field(default_factory=DeltaSizeEstimator)
    reached: RobustEstimator = field(default_factory=lambda: RobustEstimator(EFFICIENCY_WINDOW, [*EFFICIENCY_PRIOR]))
    pipe_address: str = ""
    is_connected: bool = False
    heard_at: float = 0.0
    changed_at: float = 0.0
    versions: OrderedDict[Version, VersionRow] = field(default_factory=OrderedDict)
    totals: Totals = field(default_factory=Totals)
    newest_complete: VersionRow | None = None

    def on_hello(self, peer_id: PeerId, hello: pb.LearnerHello, now: float) -> bool:
        """A session began. Returns whether the learner's identity, address or model has changed. NotAllowed for a second learner
        while the first is connected; VersionMismatch for another model."""
        if self.is_connected and self.peer_id != peer_id:
            raise NotAllowed(f"learner {peer_id}: this run has a learner already, {self.peer_id}, and it is connected")
        old, digest = self.hello, self.model_digest
        if digest and hello.model_digest != digest:
            raise VersionMismatch(
                f"learner {peer_id}: run {hello.run_id} trains the model {digest[:16]}…, "
                f"expected that digest, got {hello.model_digest[:16]}…; train another model under another run.name"
            )
        is_news = old is None or self.peer_id != peer_id or (
            old.address, old.chunk_address, old.relay_address, old.model_digest,
        ) != (
            hello.address, hello.chunk_address, hello.relay_address, hello.model_digest,
        )  # fmt: skip
        self.peer_id, self.hello, self.is_connected = peer_id, hello, True
        self.heard_at = self.changed_at = now
        return is_news

    def on_report(self, report: pb.LearnerReport, now: float) -> bool:
        """Takes a report; returns whether a step was made since the last one."""
        is_step = report.step != self.report.step
        if report.train_s > 0 and (is_step or not self.train_time.values):
            self.train_time.observe(report.train_s)
        steps, discarded = report.step - self.report.step, report.discarded_rollouts - self.report.discarded_rollouts
        if steps > 0 and discarded >= 0:  # fewer than before: another process
            self.discarded.observe(discarded / steps)
        self.report, self.heard_at = report, now
        return is_step

    def on_disconnect(self, now: float) -> None:
        self.is_connected, self.changed_at = False, now

    def on_publish(self, version: pb.VersionPublished, predicted_s: float, pool: Iterable[PeerId], now: float) -> None:
        """A version was published. Idempotent, because a reconnect repeats it."""
        number = Version(version.version)
        if number in self.versions:
            return
        if version.has_parent and 1 <= version.version - version.parent <= DELTA_PERIODS_MAX:
            self.delta_size.observe(version.artifact_bytes, version.version - version.parent)
        waiting, is_alone = set(pool), not any(row.waiting for row in self.versions.values())
        self.versions[number] = VersionRow(version, now, predicted_s, len(waiting), waiting, is_alone)
        self.totals.artifact_bytes += version.artifact_bytes
        self.totals.full_bytes += version.full_snapshot_bytes
        self.totals.versions += 1
        while len(self.versions) > VERSIONS_KEPT:
            self.versions.popitem(last=False)

    def on_live(self, peer_id: PeerId, version: Version | None, now: float) -> None:
        if version is None:
            return
        for row in self.versions.values():
            if row.published.version <= version and peer_id in row.waiting:
                row.waiting.discard(peer_id)
                row.live_after_s[peer_id] = now - row.published_at
                self._complete(row, now)

    def on_leave(self, peer_id: PeerId, now: float) -> None:
        """A worker left the pool: versions no longer wait for it."""
        for row in self.versions.values():
            if peer_id in row.waiting:
                row.waiting.discard(peer_id)
                self._complete(row, now)

    def _complete(self, row: VersionRow, now: float) -> None:
        if row.waiting or not row.live_after_s:
            return
        row.complete_s = now - row.published_at
        if row.published.has_parent and row.has_links_alone and row.predicted_s > 0 and row.complete_s > 0:
            self.reached.observe(min(1.0, row.predicted_s / row.complete_s))
        newest = self.newest_complete
        if newest is None or newest.published.version < row.published.version:
            self.newest_complete = row

    @property
    def model_digest(self) -> str:
        """Of the base model that the run trains; empty before the first learner."""
        return self.hello.model_digest if self.hello is not None else ""

    @property
    def address(self) -> str:
        return self.pipe_address or (self.hello.address if self.hello is not None else "")

    @property
    def chunk_address(self) -> str:
        return self.pipe_address or (self.hello.chunk_address if self.hello is not None else "")

    @property
    def train_s(self) -> float:
        """T_train in seconds: the median of the newest steps; 0 before the first."""
        return self.train_time.value_or(0.0)

    @property
    def broadcast_efficiency(self) -> float:
        """The share of the planned rate that broadcasts reach: a prior at first, then the median of the newest; at least
        `EFFICIENCY_LEAST`."""
        return max(EFFICIENCY_LEAST, self.reached.value_or(0.0))

    @property
    def reward_mean(self) -> float | None:
        """Of the last step; None before a learner's first, and of a run whose trainer computes its rewards itself."""
        has_rewards = self.report.train_s > 0 and self.hello is not None and self.hello.step_limit > 0
        return self.report.reward_mean if has_rewards else None

    @property
    def eval_reward(self) -> float | None:
        """The newest held-out evaluation; None before the first."""
        return None if self.report.eval_reward == -1 else self.report.eval_reward

    @property
    def newest(self) -> VersionRow | None:
        return next(reversed(self.versions.values()), None)

    @property
    def newest_version(self) -> Version:
        return Version(max(self.report.newest_version, self.hello.newest_version if self.hello else 0))

    @property
    def delta_kappa(self) -> int:
        for row in reversed(self.versions.values()):
            if row.published.has_parent:
                return max(1, row.published.version - row.published.parent)
        return 1

    @property
    def delta_bytes(self) -> int:
        """Bytes of a delta over `delta_kappa` steps, estimated from the published ones; 0 before the first."""
        return round(self.delta_size.at(self.delta_kappa))


# The pool's plan, what happened against what it predicted, and the correction of the estimates that follows. It ends with the run.
#
# Every `STEPS_A_LOOK` steps of one plan, the share of the time in which the learner trained, by its own reports, is compared with
# what the plan promised. The workers' rates that plans are made of are multiplied by `rate_ratio`. A look moves it half of the way
# (in the logarithm) from the ratio that the plan was made with, within `RATIO_LEAST` and `RATIO_MOST`: what the model leaves out is
# so learned within some plans, one bad stretch moves it by little, and several looks at one plan move it no further than one.
# Waiting for rewards or prompts is no fault of the workers and corrects nothing. Guarantees: bounded memory.

STEPS_A_LOOK = 5  # ten steps are two looks
RATIO_LEAST, RATIO_MOST = 0.5, 1.1  # rates are too high rather than too low: nothing is added twice
CLOSE = 0.01  # a utilisation this near to the promised one says that the estimates are right


ERRORS_KEPT = 512  # the newest, of which the page shows the mean
PREDICTED = ("utilisation", "broadcast_s", "usd_per_hour")  # as metrics are named


@dataclass(slots=True)
class CurrentPlan:
    """The one keeper of the pool's plan. `now`: the newest; `carried_out`: the newest that workers were activated by; `waits_for`:
    what a plan lacks, since `waits_since`. `reason`: why the rates are corrected, in words; empty while they are not."""

    board: LearnerBoard
    now: Plan | None = None
    carried_out: Plan | None = None
    waits_for: str = "the learner"
    waits_since: float = 0.0
    predicted: dict[str, float] = field(default_factory=dict)  # the newest prediction of each of `PREDICTED`
    errors: dict[str, deque[float]] = field(default_factory=dict)  # measured minus predicted, the newest
    rate_ratio: float = 1.0
    reason: str = ""
    _ratio_carried_out: float = 1.0  # `rate_ratio` as `carried_out` was made with it
    _began: int | None = None  # the step since which it has been looked at
    _busy_s: float = 0.0
    _whole_s: float = 0.0
    _spent: tuple[float, float] | None = None  # when a step was last reported, and the USD spent by then
    _compared: VersionRow | None = None

    def wait_for(self, what: str, now: float) -> None:
        if what != self.waits_for:
            self.waits_for, self.waits_since = what, now

    def _measure(self, what: str, value: float) -> None:
        if what in self.predicted:
            self.errors.setdefault(what, deque(maxlen=ERRORS_KEPT)).append(value - self.predicted[what])

    def mean_error(self, what: str) -> float:
        """Mean distance of measured from predicted; 0 before the first comparison."""
        return statistics.fmean(map(abs, self.errors[what])) if what in self.errors else 0.0

    @property
    def message(self) -> pb.PlanUpdate | None:
        """The plan as the learner is told it; None before the first."""
        if (plan := self.now) is None:
            return None
        return pb.PlanUpdate(
            kappa=plan.kappa, in_flight_cap_rollouts=min(plan.in_flight_cap_rollouts, (1 << 31) - 1),
            predicted_utilisation=self.predicted_utilisation, predicted_broadcast_s=plan.broadcast_s,
            usd_per_hour=plan.usd_per_hour, reason=plan.reason,
        )  # fmt: skip

    @property
    def is_settled(self) -> bool:
        """Whether enough was measured for what the newest plan says to be told."""
        return "utilisation" in self.predicted

    @property
    def predicted_utilisation(self) -> float:
        """0 while too little was measured for a prediction."""
        return self.predicted.get("utilisation", 0.0)

    def adopt(self, plan: Plan, is_acted_on: bool, rate_ratio: float = 1.0, is_settled: bool = True) -> None:
        """The same pool and period as before leave the comparison as it is. `rate_ratio`: as the plan was made with it.
        `is_settled`: enough was measured for its prediction to be told."""
        self.now, self.waits_for = plan, ""
        self.predicted.pop("utilisation", None)
        if is_settled:
            self.predicted["utilisation"] = plan.predicted_utilisation
        if not is_acted_on:
            return
        self._ratio_carried_out = rate_ratio
        # The meter counts machines only: no provider reports here what the traffic costs.
        self.predicted["usd_per_hour"] = plan.usd_per_hour - plan.egress_usd_per_hour
        before, self.carried_out = self.carried_out, plan
        if before is None or (before.kappa, before.pool) != (plan.kappa, plan.pool):
            self._began = None

    def on_step(self, report: pb.LearnerReport, spent_usd: float, now: float) -> None:
        """The learner made a step. `spent_usd`: spent on all workers so far."""
        if report.utilisation > 0:
            self._measure("utilisation", report.utilisation)
        if self._spent is not None and now > self._spent[0]:
            per_hour = max(0.0, spent_usd - self._spent[1]) / (now - self._spent[0]) * 3600
            self._measure("usd_per_hour", per_hour)
        self._spent = now, spent_usd
        if self.carried_out is None:
            return
        is_begun = self._began is not None and report.step >= self._began
        if not is_begun or report.rewards_due or report.prompts_exhausted:
            self._began, self._busy_s, self._whole_s = report.step, 0.0, 0.0
            return
        self._busy_s += report.train_s
        self._whole_s += report.train_s + report.wait_s + report.idle_s
        if self._began is not None and report.step - self._began >= STEPS_A_LOOK and self._whole_s > 0:
            self._correct(self._busy_s / self._whole_s, self.carried_out.predicted_utilisation)
            self._began, self._busy_s, self._whole_s = report.step, 0.0, 0.0

    def _correct(self, measured: float, promised: float) -> None:
        if promised <= 0 or abs(measured - promised) <= CLOSE:
            return
        ratio = self._ratio_carried_out * math.sqrt(max(measured, 1e-3) / promised)
        self.rate_ratio = min(RATIO_MOST, max(RATIO_LEAST, ratio))
        self.reason = (
            f"workers' rates are taken {self.rate_ratio:.2f} times as measured: plans predict better so (last {promised:.0%}, "
            f"and the learner trained {measured:.0%} of the time)"
        )

    def on_spread(self, row: VersionRow | None) -> None:
        """A version is live on its whole pool. `row`: the newest such version. Idempotent."""
        if row is None or row is self._compared:
            return
        self._compared = row
        if row.complete_s is not None and row.predicted_s > 0:
            self.predicted["broadcast_s"] = row.predicted_s
            self._measure("broadcast_s", row.complete_s)


# ---- the planner's input

DWELL_HEARTBEATS = 30  # two and a half minutes at the usual interval of 5 s
IDLE_MOST = 10.0
"""Limit on the idle seconds that a learner may claim per step (checkpoints, publications), in multiples of a step's training."""
RATE_MIN = 1e-9  # a positive rate, which has been measured
OVERDUE, OVERDUE_S_MIN = 3.0, 10.0  # times the prediction: the version hangs and holds no worker back any longer
RATE_MARGIN = 1.1  # times the needed rate gets a version first: measured rates fluctuate, and swaps cost some


def plan_config(config: RunConfig, board: LearnerBoard) -> PlanConfig:
    """The planner's config from the run's; a period that the learner fixes overrides the option."""
    hello, section, bound = board.hello, config.coordinator, config.staleness.bound
    fixed = hello.kappa if hello is not None and hello.kappa_is_fixed else config.staleness.kappa
    return PlanConfig(
        staleness_bound=bound,
        fixed_kappa=min(fixed, bound),
        usd_per_hour_cap=section.usd_per_hour_cap,
        usd_budget=section.usd_budget,
        dwell_s=DWELL_HEARTBEATS * section.heartbeat_interval,
        broadcast_efficiency=board.broadcast_efficiency,
        preemption_loss_s=section.report_interval,
    )


def _link(link: pb.Link) -> LinkEstimate:
    return LinkEstimate(
        link.uplink_bytes_per_s or UNKNOWN_UPLINK_BYTES_PER_S,
        link.downlink_bytes_per_s or UNKNOWN_DOWNLINK_BYTES_PER_S,
        min(link.rtt_s, 60.0),
    )


def is_measured(member: Member) -> bool:
    return member.measures.value("rollouts_per_s") > RATE_MIN and member.measures.value("rollout_s_mean") > 0


def is_settled(board: LearnerBoard, pool: Sequence[Member]) -> bool:
    """Whether a prediction rests on more than the first measurements, which a start or a swap falsifies: on a few steps, on the
    window of heartbeats of most of the pool, and on a delta, unless none is published."""
    well_known = sum(member.measures.count("rollouts_per_s") >= WINDOW for member in pool)
    has_size = bool(board.delta_bytes) or len(board.versions) >= CHANGE_OBSERVATIONS
    return has_size and len(board.train_time.values) >= CHANGE_OBSERVATIONS and 2 * well_known > len(pool)


def _state(member: Member) -> WorkerState:
    if member.last_liveness is not Liveness.ALIVE or member.activation.is_barred or member.is_barred_by_record:
        return WorkerState.UNAVAILABLE
    if member.setting in (OperatorSetting.STANDBY, OperatorSetting.DRAINING) or member.asks_too_much:
        return WorkerState.UNAVAILABLE
    if member.is_newcomer and not member.is_on_trial and member.setting is OperatorSetting.AUTOMATIC:
        return WorkerState.UNAVAILABLE
    return WorkerState.ACTIVE if member.last_activation is Activation.ACTIVE else WorkerState.STANDBY


@dataclass(frozen=True, slots=True)
class Speed:
    rollouts_per_s: float
    rollout_s_mean: float
    rollout_s_tail: float


def measured_speed(member: Member) -> Speed:
    """The speed from the worker's heartbeats, but no faster than its deliveries support."""
    mean_s = member.measures.value("rollout_s_mean")
    return Speed(believed_rate(member), mean_s, max(member.measures.value("rollout_s_p95"), mean_s))


def believed_rate(member: Member) -> float:
    """Rollouts per second. For a newcomer this is its bare claim, which must not displace any worker."""
    claimed = member.measures.value("rollouts_per_s")
    return member.record.believed_per_s(claimed) or claimed


def prior_speed(gpu: str, measured: Sequence[tuple[str, Speed]], catalogue: Mapping[str, GpuType]) -> Speed:
    """The assumed speed of an unmeasured worker with this GPU, from the measured ones, each with its GPU's name. The median
    over workers with the same GPU; else over all workers whose GPU the catalogue knows, each scaled to this GPU
    (`_brought_over`); else over all workers, unscaled."""
    gpu_kind = kind_of_name(gpu, catalogue)
    named = [(kind_of_name(name, catalogue), speed) for name, speed in measured]
    kin = [
        speed
        for (name, _), (kind, speed) in zip(measured, named, strict=True)
        if name == gpu or kind == gpu_kind != ("", 1)
    ]
    if not kin and gpu_kind[0]:
        kin = [_brought_over(speed, kind, gpu_kind, catalogue) for kind, speed in named if kind[0]]
    speeds = kin or [speed for _, speed in measured]
    return Speed(
        median(speed.rollouts_per_s for speed in speeds),
        median(speed.rollout_s_mean for speed in speeds),
        median(speed.rollout_s_tail for speed in speeds),
    )


def _brought_over(speed: Speed, of: tuple[str, int], to: tuple[str, int], catalogue: Mapping[str, GpuType]) -> Speed:
    """Scales a speed from one GPU to another. `of` and `to`: a kind and the number of GPUs. If reading the KV cache dominates a
    decode step, tokens/s scale with the bandwidth. If reading the weights dominates, they also scale with the memory, because
    more memory holds more sequences per read of the weights. The square root of the memory ratio is a compromise between the
    two."""
    source, target = catalogue[of[0]], catalogue[to[0]]
    quicker = target.bandwidth_gb_per_s / source.bandwidth_gb_per_s
    faster = quicker * (target.memory_gib / source.memory_gib) ** 0.5 * to[1] / of[1]
    return Speed(speed.rollouts_per_s * faster, speed.rollout_s_mean / quicker, speed.rollout_s_tail / quicker)


def _worker(member: Member, speed: Speed, has_own_speed: bool, swap_s_max: float, spreads: bool) -> WorkerEstimate:
    return WorkerEstimate(
        worker_id=member.peer_id,
        rollouts_per_s=speed.rollouts_per_s,
        price_usd_per_hour=member.hello.price_usd_per_hour,
        link=_link(member.link),
        rollout_s_mean=speed.rollout_s_mean,
        rollout_s_tail=speed.rollout_s_tail,
        join_s=0.0 if member.heartbeat.has_version else JOIN_S,
        hazard_per_hour=SPOT_HAZARD_PER_HOUR if member.hello.is_spot else 0.0,
        apply_s=member.measures.value("apply_s"),
        swap_s=min(member.measures.value("swap_s"), swap_s_max),
        egress_usd_per_gib=EGRESS_USD_PER_GIB.get(member.hello.provider.lower(), 0.0),
        state=_state(member),
        state_since_s=member.activation_since,
        is_relaying=spreads and _state(member) is WorkerState.ACTIVE,
        is_pinned=_state(member) is not WorkerState.UNAVAILABLE
        and (member.setting is OperatorSetting.ACTIVE or not has_own_speed or member.is_on_trial),
    )


def is_spreading(board: LearnerBoard, now: float) -> bool:
    """Whether a broadcast is under way, in which active workers relay chunks. One that is far overdue no longer counts."""
    newest = board.newest
    if newest is None or not newest.waiting:
        return False
    return now - newest.published_at <= max(OVERDUE * newest.predicted_s, OVERDUE_S_MIN)


def worker_estimates(
    board: LearnerBoard,
    members: Sequence[Member],
    now: float,
    catalogue: Mapping[str, GpuType],
    rate_ratio: float = 1.0,
) -> Iterator[WorkerEstimate] | None:
    """The workers as the planner sees them; None while too little is known: the learner, its step time, one worker's rate. Made one
    at a time, so that a large fleet does not block the event loop: each is told as it is when its turn comes, with the rate that it
    had at the call. `catalogue`: data sheets for priors; `rate_ratio`: by which rates are corrected (board)."""
    there = [m for m in members if m.last_liveness is not Liveness.GONE and not m.activation.is_barred]
    proven = [m for m in there if not m.is_newcomer or m.setting is OperatorSetting.ACTIVE]
    has_proven = any(is_measured(m) and m.last_liveness is Liveness.ALIVE for m in proven)
    living = proven if has_proven else there
    measured = {m.peer_id: (m.hello.gpu, measured_speed(m)) for m in living if is_measured(m)}
    if board.hello is None or board.train_s <= 0 or not measured:
        return None
    spreads, swap_s_max = is_spreading(board, now), board.train_s
    priors: dict[str, Speed] = {}

    def estimate(member: Member) -> WorkerEstimate:
        gpu, speed = measured.get(member.peer_id, (member.hello.gpu, None))
        if speed is None:
            if gpu not in priors:
                priors[gpu] = prior_speed(gpu, list(measured.values()), catalogue)
            speed = priors[gpu]
        corrected = replace(speed, rollouts_per_s=speed.rollouts_per_s * rate_ratio)
        return _worker(member, corrected, member.peer_id in measured, swap_s_max, spreads)

    return map(estimate, living)


def learner_estimate(board: LearnerBoard) -> LearnerEstimate:
    """The learner as the planner sees it, once it has said hello."""
    hello = board.hello
    assert hello is not None, "there is no snapshot without a learner"
    full, newest = float(max(hello.full_snapshot_bytes, 1)), board.newest
    report = board.report
    idle_s = min(report.idle_s, IDLE_MOST * board.train_s)  # the learner's own claim, so it is bounded
    trained, evaluation = hello.rollouts_per_step, round(report.evaluation_rollouts)
    discarded = min(
        round(board.discarded.value_or(0.0)), math.floor(trained * DROPPED_SHARE_MAX / (1 - DROPPED_SHARE_MAX))
    )
    return LearnerEstimate(
        # Workers also answer evaluations and what is discarded; the learner makes no step while it copies a checkpoint.
        rollouts_per_step=trained + evaluation + discarded,
        evaluation_rollouts=evaluation,
        dropped_rollouts=discarded,
        train_s=board.train_s + idle_s,
        idle_s=idle_s,
        link=_link(hello.link),
        delta_bytes=board.delta_bytes or max(1.0, DELTA_SHARE * full),
        full_snapshot_bytes=full,
        rollouts_per_group=hello.rollouts_per_group,
        delta_kappa=min(board.delta_kappa, 64),
        delta_growth=board.delta_size.growth,
        encode_s=newest.published.encode_s if newest else 0.0,
        lengths=tuple(map(float, report.lengths)) if any(report.lengths) else (),
        reward_s=report.reward_s,
        reward_processes=report.reward_processes,
    )


def broadcast_nodes(board: LearnerBoard, members: Iterable[Member]) -> list[NodeLink]:
    """The seed (the learner), then all connected workers, by peer ID. Workers whose links would slow the pool become late in the
    plan if they are not needed (`needs_of`)."""
    hello, seed = board.hello, board.peer_id
    if hello is None or seed is None:
        return []
    there = [m for m in members if m.cut_at is None and m.last_liveness is not Liveness.GONE]
    there = [m for m in there if m.setting is not OperatorSetting.BANNED]
    hidden = {m.peer_id for m in there if not m.access.addresses}
    # A learner that is reachable only through byte pipes dials the workers that it can. Pipes are used only if no worker
    # can be dialled.
    is_dialling = bool(board.pipe_address) and len(hidden) < len(there)
    access = Access() if is_dialling else Access(addresses=(board.chunk_address,))
    workers = [
        replace(
            _node(m.peer_id, m.name, _access(m, hidden), m.link),
            region=region_of(m),
            egress_usd_per_gib=EGRESS_USD_PER_GIB.get(m.hello.provider.lower(), 0.0),
        )
        for m in sorted(there, key=lambda m: m.peer_id)
    ]
    return [_node(seed, "learner", access, hello.link), *workers]


def region_of(member: Member) -> str:
    """A label of the worker's provider and region, within which traffic is free: a digest, since plans carry it to nodes, which
    bound it. Empty if either is not known, because traffic between regions of one provider is charged."""
    hello = member.hello
    place = f"{hello.provider}/{hello.region}".lower().encode()
    return hashlib.blake2s(place, digest_size=8).hexdigest() if hello.provider and hello.region else ""


def pool_usd_per_s(members: Iterable[Member]) -> float:
    """What a second of the active pool costs: a second less of waiting for a version is worth at most this."""
    return sum(m.hello.price_usd_per_hour for m in members if m.last_activation is Activation.ACTIVE) / 3600


def needs_of(nodes: Sequence[NodeLink], members: Mapping[PeerId, Member], plan: Plan | None) -> Needs:
    """Weights of the workers in `nodes`, and the share of the total that needs a version first. An active worker's weight is
    its measured rate, or the median rate before it is measured; other workers weigh 0. The share is what the plan's throughput
    term needs plus a margin (`RATE_MARGIN`); 1 without a plan."""
    active = [m for node in nodes[1:] if (m := members[node.peer_id]).last_activation is Activation.ACTIVE]
    rates = {m.peer_id: believed_rate(m) for m in active if is_measured(m) and not m.is_newcomer}
    usual = median(rates.values()) if rates else 1.0
    rates = {m.peer_id: rates.get(m.peer_id, usual) for m in active}
    needed = next((term.limit for term in plan.terms if term.limit_kind is Limit.THROUGHPUT), None) if plan else None
    total = sum(rates.values())
    share = 1.0 if needed is None or total <= 0 else min(1.0, RATE_MARGIN * needed / total)
    return Needs(tuple(rates.get(node.peer_id, 0.0) for node in nodes[1:]), share)


def _access(member: Member, hidden: set[PeerId]) -> Access:
    """How to reach the worker. A hidden one also gets the hidden peers that it has met without a relay: trees may use these
    links."""
    if member.peer_id not in hidden:
        return Access(addresses=member.access.addresses)
    met = {PeerId(link.peer_id) for link in member.heartbeat.links.links if link.kind != LinkKind.RELAYED}
    return replace(member.access, met=tuple(sorted(met & hidden)))


def _node(peer_id: PeerId, name: str, access: Access, link: pb.Link) -> NodeLink:
    return NodeLink(
        peer_id, name, access.addresses, link.uplink_bytes_per_s, link.downlink_bytes_per_s, link.rtt_s,
        replace(access, addresses=()),
    )  # fmt: skip


# Cuts one node's part out of a large broadcast plan. The part is itself a plan, which the node reads like a whole one.
#
# A node needs only its own place: its parent and children in each tree, which of its children pass chunks on, and the addresses
# of all of these. Guarantees: from its part a node derives exactly what it would derive from the whole plan: the same seed,
# neighbours and children in each tree, and the same children acting as relays. In a small plan all nodes connect to each other; a
# part always has more nodes than that limit, so it is never taken for a small plan, and plans up to the limit are not cut.
# A part shows nodes that are not neighbours of its owner as children of the seed; the owner does not use that.
# The seed acts in every tree, so it gets the whole plan.

PART_NODES_MIN = DEGREE_MAX + 2  # one more than the largest plan whose nodes all connect to each other


class PlanParts:
    """Cuts parts out of one plan; what all parts need is computed once."""

    def __init__(self, plan: BroadcastPlan) -> None:
        self.plan = plan
        self._children = [tree.children() for tree in plan.trees]
        self._pushed = [plan.pushed_to(number) for number in range(len(plan.trees))]

    def part_of(self, peer_id: PeerId) -> BroadcastPlan:
        """The part that this node needs; the plan itself if it is small."""
        plan = self.plan
        if len(plan.nodes) <= PART_NODES_MIN or not plan.nodes or peer_id == plan.nodes[0].peer_id:
            return plan
        node = plan.index_of(peer_id)
        if node is None:
            return self._for_outsider(peer_id)
        indices = self._kept(node)
        place = {index: at for at, index in enumerate(indices)}
        trees = [
            Tree(planned.weight, tuple(self._parent(number, index, node, place) for index in indices[1:]))
            for number, planned in enumerate(plan.trees)
        ]
        return self._cut(indices, tuple(trees))

    def _kept(self, node: int) -> list[int]:
        """Indices of the nodes in the part: the seed, the node, its neighbours, and one child of each child that passes chunks
        on; then any others up to the minimum size."""
        indices = dict.fromkeys((0, node))
        for tree, children, pushed in zip(self.plan.trees, self._children, self._pushed, strict=True):
            indices[tree.parents[node - 1]] = None
            for child in children.get(node, ()):
                indices[child] = None
                indices.update(dict.fromkeys(pushed.get(child, ())[:1]))
        filler = (index for index in range(1, len(self.plan.nodes)) if index not in indices)
        return [*indices, *islice(filler, max(0, PART_NODES_MIN - len(indices)))]

    def _parent(self, number: int, index: int, node: int, place: dict[int, int]) -> int:
        """Index in the part of this node's parent: the real parent if `index` is the owner, a child of the owner, or a kept
        child of one of its children; else the seed."""
        parent = self.plan.trees[number].parents[index - 1]
        is_mine = node in (index, parent)
        is_relayed = parent in self._children[number].get(node, ())
        return place[parent] if is_mine or (is_relayed and parent in place) else 0

    def _for_outsider(self, peer_id: PeerId) -> BroadcastPlan:
        """The part of a node that is not in the plan: it pulls from a window of the plan's nodes, chosen by its peer ID so that
        outsiders spread over the fleet."""
        workers = len(self.plan.nodes) - 1
        start = sum(peer_id.encode()) % workers
        window = (1 + (start + offset) % workers for offset in range(PART_NODES_MIN - 1))
        return self._cut([0, *sorted(window)], ())

    def _cut(self, indices: list[int], trees: tuple[Tree, ...]) -> BroadcastPlan:
        plan = self.plan
        nodes: tuple[NodeLink, ...] = tuple(plan.nodes[index] for index in indices)
        predicted = tuple(plan.predicted_s[index - 1] for index in indices[1:]) if plan.predicted_s else ()
        return replace(plan, nodes=nodes, trees=trees, predicted_s=predicted, _index={})
