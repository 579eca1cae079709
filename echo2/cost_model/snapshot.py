"""What the planner is told: the fleet, the learner and the wishes, as frozen values checked where they are made.

Guarantees: every number is finite and in its stated range, so the planner need not look again; a bad one raises
`ConfigError` naming the field, the value and the range. Leaves to others: measuring (calibration).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace

from echo2.base.errors import ConfigError
from echo2.base.ids import PeerId
from echo2.cost_model.experience import JOIN_S

STALENESS_BOUND_MAX = 64
WORKERS_MAX = 100_000
IDLE_SHARE_MAX = 0.99
DROPPED_SHARE_MAX = 2 / 3
"""Dynamic sampling throws away twice the groups of a step at most."""
BROADCAST_EFFICIENCY = 0.8  # until broadcasts were measured: the share of the planned rate that weighted trees reached


def checked(whose: str, name: str, value: float, least: float, most: float = math.inf) -> None:
    """Raises unless `least <= value <= most` and value is finite."""
    if not (math.isfinite(value) and least <= value <= most):
        range_text = f"at least {least:g}" if math.isinf(most) else f"{least:g} to {most:g}"
        raise ConfigError(f"{whose}: {name}: expected a finite number, {range_text}, got {value}")


def checked_positive(whose: str, name: str, value: float) -> None:
    """Raises unless `value` is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{whose}: {name}: expected a finite number above 0, got {value}")


class WorkerState(enum.Enum):
    """As the planner sees it. UNAVAILABLE (suspect, gone, banned, held back by the operator) is never chosen."""

    ACTIVE = "active"
    STANDBY = "standby"
    DRAINING = "draining"
    UNAVAILABLE = "unavailable"


class DownloadMode(enum.Enum):
    """Whether workers generate while a version arrives (echo2's do) or stand still (the paper's rule)."""

    BACKGROUND = "background"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """One node's access link: bytes/s up and down, seconds of round trip to the others."""

    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    rtt_s: float = 0.0

    def __post_init__(self) -> None:
        checked_positive("link", "uplink_bytes_per_s", self.uplink_bytes_per_s)
        checked_positive("link", "downlink_bytes_per_s", self.downlink_bytes_per_s)
        checked("link", "rtt_s", self.rtt_s, 0.0, 60.0)


@dataclass(frozen=True, slots=True)
class WorkerEstimate:
    """One known worker.

    rollouts_per_s, tokens_per_s: while it generates, all slots full. rollout_s_mean, rollout_s_tail: seconds of one
    rollout, mean and 95th percentile; rollout_s_max: of the longest that the token limit allows, 0 if not known.
    join_s: from activation to the first rollout begun. hazard_per_hour: expected losses per hour (spot). apply_s:
    last byte held to live. swap_s: generation stands still per version. egress_usd_per_gib: of what it sends; counted by
    `egress.plan_with_egress` alone.
    """

    worker_id: PeerId
    rollouts_per_s: float
    price_usd_per_hour: float
    link: LinkEstimate
    rollout_s_mean: float
    rollout_s_tail: float
    tokens_per_s: float = 0.0
    rollout_s_max: float = 0.0
    join_s: float = JOIN_S
    hazard_per_hour: float = 0.0
    apply_s: float = 0.0
    swap_s: float = 0.0
    provider: str = ""
    egress_usd_per_gib: float = 0.0
    state: WorkerState = WorkerState.STANDBY
    state_since_s: float = 0.0  # on the snapshot's clock
    is_relaying: bool = False
    is_pinned: bool = False  # the operator wants it in the pool

    def __post_init__(self) -> None:
        whose = f"worker {self.worker_id}"
        checked_positive(whose, "rollouts_per_s", self.rollouts_per_s)
        checked(whose, "price_usd_per_hour", self.price_usd_per_hour, 0.0)
        checked_positive(whose, "rollout_s_mean", self.rollout_s_mean)
        checked_positive(whose, "rollout_s_tail", self.rollout_s_tail)
        for name in (
            "tokens_per_s",
            "rollout_s_max",
            "join_s",
            "hazard_per_hour",
            "apply_s",
            "swap_s",
            "egress_usd_per_gib",
        ):
            checked(whose, name, getattr(self, name), 0.0)
        if not math.isfinite(self.state_since_s):
            raise ConfigError(f"{whose}: state_since_s: expected a finite number, got {self.state_since_s}")


@dataclass(frozen=True, slots=True)
class LearnerEstimate:
    """The learner. `delta_bytes` is the artifact published when kappa is `delta_kappa`; a longer period changes more
    weights, by `delta_growth` (bytes ~ kappa ** delta_growth, measured 0.75), and never more than a whole snapshot.

    evaluation_rollouts: of `rollouts_per_step`, spread over the steps between evaluations; nothing is trained on them.
    dropped_rollouts: of them too, those of groups that dynamic sampling throws away. idle_s: of
    `train_s`, in which nothing is trained, though no rollout is waited for: checkpoints copied, publications waited for."""

    rollouts_per_step: int
    train_s: float
    link: LinkEstimate
    delta_bytes: float
    full_snapshot_bytes: float
    rollouts_per_group: int = 1
    delta_kappa: int = 1
    delta_growth: float = 0.75
    encode_s: float = 0.0
    price_usd_per_hour: float = 0.0
    evaluation_rollouts: int = 0
    idle_s: float = 0.0
    dropped_rollouts: int = 0

    def __post_init__(self) -> None:
        checked("learner", "rollouts_per_step", self.rollouts_per_step, 1)
        checked("learner", "rollouts_per_group", self.rollouts_per_group, 1, self.rollouts_per_step)
        checked_positive("learner", "train_s", self.train_s)
        checked_positive("learner", "delta_bytes", self.delta_bytes)
        checked_positive("learner", "full_snapshot_bytes", self.full_snapshot_bytes)
        checked("learner", "delta_kappa", self.delta_kappa, 1, STALENESS_BOUND_MAX)
        checked("learner", "delta_growth", self.delta_growth, 0.0, 1.0)
        checked("learner", "encode_s", self.encode_s, 0.0)
        checked("learner", "price_usd_per_hour", self.price_usd_per_hour, 0.0)
        checked("learner", "evaluation_rollouts", self.evaluation_rollouts, 0, self.rollouts_per_step - 1)
        rest = self.rollouts_per_step - self.evaluation_rollouts
        checked("learner", "dropped_rollouts", self.dropped_rollouts, 0, rest - 1)
        checked("learner", "idle_s", self.idle_s, 0.0, self.train_s * IDLE_SHARE_MAX)

    @property
    def training_share(self) -> float:
        """Of a step that waits for no rollout: what it trains."""
        return 1.0 - self.idle_s / self.train_s

    @property
    def trained_rollouts(self) -> int:
        """Of those of a step."""
        return self.rollouts_per_step - self.evaluation_rollouts - self.dropped_rollouts

    @property
    def dropped_share(self) -> float:
        """Of the training's rollouts, those that are thrown away."""
        return self.dropped_rollouts / (self.trained_rollouts + self.dropped_rollouts)

    def training(self, rollouts: int) -> LearnerEstimate:
        """This learner with so many rollouts trained on a step, and as large a share thrown away."""
        dropped = round(rollouts * self.dropped_share / (1.0 - self.dropped_share))
        total = rollouts + self.evaluation_rollouts + dropped
        return replace(self, rollouts_per_step=total, dropped_rollouts=dropped)

    def dropping(self, share: float) -> LearnerEstimate:
        """This learner with this share of the training's groups thrown away, on top of what it trains on."""
        checked("learner", "dropped groups", share, 0.0, DROPPED_SHARE_MAX)
        dropped = round(self.trained_rollouts * share / (1.0 - share))
        total = self.trained_rollouts + self.evaluation_rollouts + dropped
        return replace(self, rollouts_per_step=total, dropped_rollouts=dropped)

    def artifact_bytes(self, kappa: int) -> float:
        """Predicted bytes of one published version."""
        grown = self.delta_bytes * math.pow(kappa / self.delta_kappa, self.delta_growth)
        return min(grown, max(self.full_snapshot_bytes, self.delta_bytes))


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All that is known at `now_s` (any monotonic clock). `steps_left` 0: not known."""

    now_s: float
    learner: LearnerEstimate
    workers: tuple[WorkerEstimate, ...]
    spent_usd: float = 0.0
    steps_left: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.now_s):
            raise ConfigError(f"snapshot: now_s: expected a finite number, got {self.now_s}")
        checked("snapshot", "spent_usd", self.spent_usd, 0.0)
        checked("snapshot", "steps_left", self.steps_left, 0)
        if not 1 <= len(self.workers) <= WORKERS_MAX:
            raise ConfigError(f"snapshot: workers: expected 1 to {WORKERS_MAX} workers, got {len(self.workers)}")
        if len({worker.worker_id for worker in self.workers}) != len(self.workers):
            raise ConfigError("snapshot: workers: worker_id: expected each once, got one twice")


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """How the pool resists noise. Chosen pools carry `add_margin` more rate than needed and are added to only when
    that is used up; they shrink or change only when it saves more than `drain_margin` of the price. A worker stays
    at least `dwell_s`, and never less than its join time."""

    add_margin: float = 0.05
    drain_margin: float = 0.15
    dwell_s: float = 300.0

    def __post_init__(self) -> None:
        checked("hysteresis", "add_margin", self.add_margin, 0.0, 1.0)
        checked("hysteresis", "drain_margin", self.drain_margin, 0.0, 10.0)
        checked("hysteresis", "dwell_s", self.dwell_s, 0.0)


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What the user wants. fixed_kappa 0: choose; caps and budgets 0: none.

    `preemption_loss_s` is the work lost with a worker: one report interval. `exhaustive_workers_max`: up to this many
    free workers every pool is weighed; `exact_workers_max`: up to this many the exact solver is used.
    """

    staleness_bound: int
    fixed_kappa: int = 0
    target_utilisation: float = 0.98
    usd_per_hour_cap: float = 0.0
    usd_budget: float = 0.0
    provider_workers_max: tuple[tuple[str, int], ...] = ()
    download: DownloadMode = DownloadMode.BACKGROUND
    hysteresis: Hysteresis = field(default_factory=Hysteresis)
    broadcast_efficiency: float = BROADCAST_EFFICIENCY
    preemption_loss_s: float = 5.0
    exact_workers_max: int = 300
    exhaustive_workers_max: int = 14

    def __post_init__(self) -> None:
        checked("plan", "staleness_bound S", self.staleness_bound, 0, STALENESS_BOUND_MAX)
        if not 0 <= self.fixed_kappa <= max(1, self.staleness_bound):
            raise ConfigError(
                f"plan: fixed_kappa: expected 0 (choose) to S = {self.staleness_bound}, at least 1, got {self.fixed_kappa}"
            )
        checked("plan", "target_utilisation", self.target_utilisation, 0.01, 1.0)
        checked("plan", "usd_per_hour_cap", self.usd_per_hour_cap, 0.0)
        checked("plan", "usd_budget", self.usd_budget, 0.0)
        checked("plan", "broadcast_efficiency", self.broadcast_efficiency, 0.01, 1.0)
        checked("plan", "preemption_loss_s", self.preemption_loss_s, 0.0)
        checked("plan", "exact_workers_max", self.exact_workers_max, 0, 1000)
        checked("plan", "exhaustive_workers_max", self.exhaustive_workers_max, 0, 16)
        for provider, count in self.provider_workers_max:
            checked("plan", f"provider_workers_max of {provider!r}", count, 0)

    @property
    def kappas(self) -> range:
        """The publication periods to try."""
        if self.fixed_kappa:
            return range(self.fixed_kappa, self.fixed_kappa + 1)
        return range(1, max(1, self.staleness_bound) + 1)
