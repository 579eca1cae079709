"""The planner's input: the fleet, the learner and the user's settings, as frozen values that are checked when created.

Guarantees: every number is finite and in its stated range, so the planner need not check again; a bad one raises `ConfigError`
naming the field, the value and the range.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import TypeVar

from echo2.base.errors import ConfigError
from echo2.base.ids import PeerId

STALENESS_BOUND_MAX = 64  # bounds the periods that a plan tries, and the versions that nodes keep
WORKERS_MAX = 100_000  # ten times the largest fleet that echo2 is tested with
SPOT_HAZARD_PER_HOUR = 0.05  # assumed preemptions per hour of a spot machine
JOIN_S = 300.0
"""Assumed seconds from renting a machine to its first rollout (image, model, first weights), until joins have been timed."""
GIB = float(1 << 30)  # bytes
DELTA_SHARE = 0.01  # bytes of a step's delta per byte of bf16 weights; 0.7 % to 0.9 % measured, plus the container
IDLE_SHARE_MAX = 0.99  # a learner trains at least now and then
DROPPED_SHARE_MAX = 2 / 3  # dynamic sampling discards at most twice the groups of a step
BROADCAST_EFFICIENCY = 0.8  # prior until a broadcast is measured: share of the planned rate that weighted trees reached


NUMBER_MAX = 1e15  # bytes, USD, seconds: no run has more, nor less than its inverse; products of such stay finite
ROLLOUTS_MAX = 1_000_000  # of a step; a rehearsal holds some steps of them in memory


def checked(owner: str, name: str, value: float, least: float, most: float = NUMBER_MAX) -> None:
    """Raises unless `least <= value <= most`, which is so of no NaN."""
    if not least <= value <= most:
        raise ConfigError(f"{owner}: {name}: expected a finite number, {least:g} to {most:g}, got {value}")


def checked_positive(owner: str, name: str, value: float) -> None:
    if not 1 / NUMBER_MAX <= value <= NUMBER_MAX:
        raise ConfigError(f"{owner}: {name}: expected a finite number above 0, up to {NUMBER_MAX:g}, got {value}")


def check_fields(of: object, owner: str, positive: str = "", least_0: str = "") -> None:
    """Raises unless these fields, by names with spaces between them, are finite and above 0, or at least 0."""
    for name in positive.split():
        checked_positive(owner, name, getattr(of, name))
    for name in least_0.split():
        checked(owner, name, getattr(of, name), 0.0)


Row = TypeVar("Row")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "float": (int, float), "bool": (bool,), "dict[str, str]": (dict,)
}  # fmt: skip


def read_as(kind: Callable[..., Row], table: object, owner: str, **more: object) -> Row:
    """The dataclass `kind` from a table of TOML or JSON and `more` fields. `ConfigError` names a field that is unknown,
    missing or of another type."""
    known, values = {field.name: field for field in fields(kind)}, dict[str, object]()  # type: ignore[arg-type]
    if not isinstance(table, Mapping):
        raise ConfigError(f"{owner}: expected a table with the fields {', '.join(known)}, got {table!r}")
    table = {**table, **more}
    if unknown := sorted(set(table) - set(known)):
        raise ConfigError(f"{owner}: expected fields among {', '.join(sorted(known))}, got {unknown[0]!r}")
    for name, field in known.items():
        if name in table:
            value = table[name]
            if not isinstance(value, _TYPES[field.type]) or (isinstance(value, bool) and field.type != "bool"):  # type: ignore[index]
                raise ConfigError(f"{owner}: {name}: expected {field.type}, got {value!r}")
            values[name] = float(value) if field.type == "float" else value  # type: ignore[arg-type]
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{owner}: expected a field {name!r}, it is missing")
    return kind(**values)


def is_spent(usd: float, budget_usd: float) -> bool:
    """Whether what was spent is all of the budget; a budget of 0 is spent by the first cent."""
    return 0 < usd >= budget_usd


class WorkerState(enum.Enum):
    """A worker's state as the planner sees it. UNAVAILABLE (suspect, gone, banned, held back by the operator) is never chosen."""

    ACTIVE = "active"
    STANDBY = "standby"
    UNAVAILABLE = "unavailable"


class DownloadMode(enum.Enum):
    """Whether workers generate while a version arrives (as in echo2) or pause (as in the paper)."""

    BACKGROUND = "background"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """One node's access link: bytes/s up and down, round-trip seconds to the other nodes."""

    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    rtt_s: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "link", "uplink_bytes_per_s downlink_bytes_per_s")
        checked("link", "rtt_s", self.rtt_s, 0.0, 60.0)


@dataclass(frozen=True, slots=True)
class WorkerEstimate:
    """One known worker. rollouts_per_s, tokens_per_s: while it generates with all slots full. rollout_s_mean, rollout_s_tail:
    seconds of one rollout, mean and 95th percentile; rollout_s_max: seconds of the longest rollout that the token limit allows,
    0 if unknown. join_s: from activation until the first rollout starts. hazard_per_hour: expected losses per hour (spot).
    apply_s: from the last byte received until the version is live. swap_s: pause of generation per version. egress_usd_per_gib:
    price of what it sends, by the period (`LearnerEstimate.sent_gib_per_hour`)."""

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
    egress_usd_per_gib: float = 0.0
    state: WorkerState = WorkerState.STANDBY
    state_since_s: float = 0.0  # on the snapshot's clock
    is_relaying: bool = False
    is_pinned: bool = False  # the operator wants it in the pool

    def __post_init__(self) -> None:
        owner = f"worker {self.worker_id}"
        check_fields(
            self, owner, "rollouts_per_s rollout_s_mean rollout_s_tail",
            "price_usd_per_hour tokens_per_s rollout_s_max join_s hazard_per_hour apply_s swap_s egress_usd_per_gib",
        )  # fmt: skip
        if not math.isfinite(self.state_since_s):
            raise ConfigError(f"{owner}: state_since_s: expected a finite number, got {self.state_since_s}")


@dataclass(frozen=True, slots=True)
class LearnerEstimate:
    """The learner. `delta_bytes`: size of the artifact published if kappa is `delta_kappa`. A longer period changes more
    weights (bytes ~ kappa ** delta_growth, measured 0.75), but never more than a full snapshot. lengths: quantiles of the run's
    own rollout lengths at equal shares, ascending, in any unit; empty: a log-normal through the workers' mean, 95th percentile
    and longest. reward_s: process seconds of one reward; reward_processes: how many are computed at once; 0: rewards never
    wait. start_s: from the plan until the first step, apart from the workers' joins. evaluation_rollouts: the part of
    `rollouts_per_step` that is for evaluation (spread over the steps between evaluations) and not trained on. dropped_rollouts:
    the part in groups that dynamic sampling discards. idle_s: the part of `train_s` in which the learner neither trains nor
    waits for rollouts: it copies checkpoints or waits for a publication."""

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
    lengths: tuple[float, ...] = ()
    reward_s: float = 0.0
    reward_processes: int = 0
    start_s: float = 0.0

    def __post_init__(self) -> None:
        checked("learner", "rollouts_per_step", self.rollouts_per_step, 1, ROLLOUTS_MAX)
        checked("learner", "rollouts_per_group", self.rollouts_per_group, 1, self.rollouts_per_step)
        check_fields(
            self, "learner", "train_s delta_bytes full_snapshot_bytes",
            "encode_s price_usd_per_hour reward_s reward_processes start_s",
        )  # fmt: skip
        checked("learner", "delta_kappa", self.delta_kappa, 1, STALENESS_BOUND_MAX)
        checked("learner", "delta_growth", self.delta_growth, 0.0, 1.0)
        checked("learner", "evaluation_rollouts", self.evaluation_rollouts, 0, self.rollouts_per_step - 1)
        rest = self.rollouts_per_step - self.evaluation_rollouts
        checked("learner", "dropped_rollouts", self.dropped_rollouts, 0, rest - 1)
        checked("learner", "idle_s", self.idle_s, 0.0, self.train_s * IDLE_SHARE_MAX)
        is_ascending = list(self.lengths) == sorted(self.lengths)
        if self.lengths and not (self.lengths[0] >= 0 and self.lengths[-1] > 0 and is_ascending):
            raise ConfigError(f"learner: lengths: expected ascending quantiles that are not all 0, got {self.lengths}")

    @property
    def rewards_per_s(self) -> float:
        """Rewards that all processes compute per second; infinite if they never wait."""
        return self.reward_processes / self.reward_s if self.reward_s and self.reward_processes else math.inf

    @property
    def training_share(self) -> float:
        """Share of a step's time spent training, if the step waits for no rollout."""
        return 1.0 - self.idle_s / self.train_s

    @property
    def trained_rollouts(self) -> int:
        return self.rollouts_per_step - self.evaluation_rollouts - self.dropped_rollouts

    @property
    def dropped_share(self) -> float:
        """Share of the rollouts for training that dynamic sampling discards."""
        return self.dropped_rollouts / (self.trained_rollouts + self.dropped_rollouts)

    def training(self, rollouts: int) -> LearnerEstimate:
        """This learner with `rollouts` trained on per step and the same share discarded."""
        return self._of(rollouts, self.dropped_share)

    def dropping(self, share: float) -> LearnerEstimate:
        """This learner with `share` of the training groups discarded, in addition to those it trains on."""
        checked("learner", "dropped groups", share, 0.0, DROPPED_SHARE_MAX)
        return self._of(self.trained_rollouts, share)

    def _of(self, trained: int, dropped_share: float) -> LearnerEstimate:
        dropped = round(trained * dropped_share / (1.0 - dropped_share))
        total = trained + self.evaluation_rollouts + dropped
        return replace(self, rollouts_per_step=total, dropped_rollouts=dropped)

    def artifact_bytes(self, kappa: int) -> float:
        grown = self.delta_bytes * math.pow(kappa / self.delta_kappa, self.delta_growth)
        return min(grown, max(self.full_snapshot_bytes, self.delta_bytes))

    def sent_gib_per_hour(self, kappa: int) -> float:
        """GiB that one worker sends per hour: a version per period to one other; its rollouts are small in comparison."""
        return self.artifact_bytes(kappa) / GIB * 3600 / (kappa * self.train_s)


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Everything known at `now_s` (any monotonic clock). `steps_left`: 0 if unknown."""

    now_s: float
    learner: LearnerEstimate
    workers: tuple[WorkerEstimate, ...]
    spent_usd: float = 0.0
    steps_left: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.now_s):
            raise ConfigError(f"snapshot: now_s: expected a finite number, got {self.now_s}")
        check_fields(self, "snapshot", least_0="spent_usd steps_left")
        if not 1 <= len(self.workers) <= WORKERS_MAX:
            raise ConfigError(f"snapshot: workers: expected 1 to {WORKERS_MAX} workers, got {len(self.workers)}")
        if len({worker.worker_id for worker in self.workers}) != len(self.workers):
            raise ConfigError("snapshot: workers: worker_id: expected each once, got one twice")


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What the user wants. fixed_kappa: 0 lets the planner choose; cap and budget: infinite means none. preemption_loss_s: work
    lost with a worker, which is one report interval. add_margin: a chosen pool has so much more rate than needed, and grows
    only when that is used up. dwell_s: a worker stays at least so long, and never less than its join time."""

    staleness_bound: int
    fixed_kappa: int = 0
    target_utilisation: float = 0.98
    usd_per_hour_cap: float = math.inf
    usd_budget: float = math.inf
    download: DownloadMode = DownloadMode.BACKGROUND
    broadcast_efficiency: float = BROADCAST_EFFICIENCY
    preemption_loss_s: float = 5.0
    add_margin: float = 0.05
    dwell_s: float = 300.0

    def __post_init__(self) -> None:
        checked("plan", "staleness_bound S", self.staleness_bound, 0, STALENESS_BOUND_MAX)
        if not 0 <= self.fixed_kappa <= max(1, self.staleness_bound):
            raise ConfigError(
                f"plan: fixed_kappa: expected 0 (choose) to S = {self.staleness_bound}, at least 1, got {self.fixed_kappa}"
            )
        checked("plan", "target_utilisation", self.target_utilisation, 0.01, 1.0)
        if not (self.usd_per_hour_cap >= 0 and self.usd_budget >= 0):
            raise ConfigError(
                f"plan: cap and budget: expected 0 or more, got {self.usd_per_hour_cap}, {self.usd_budget}"
            )
        checked("plan", "broadcast_efficiency", self.broadcast_efficiency, 0.01, 1.0)
        checked("plan", "add_margin", self.add_margin, 0.0, 1.0)
        check_fields(self, "plan", least_0="preemption_loss_s dwell_s")

    @property
    def kappas(self) -> tuple[int, ...]:
        """The publication periods to try, ascending: each up to 12, then in steps of an eighth, which is less than sizes of deltas
        are known to, and the longest."""
        if self.fixed_kappa:
            return (self.fixed_kappa,)
        kappas, longest = [1], max(1, self.staleness_bound)
        while kappas[-1] < longest:
            kappas.append(min(longest, max(kappas[-1] + 1, round(kappas[-1] * 1.125))))
        return tuple(kappas)

    def allows(self, kappa: int) -> bool:
        return self.kappas[0] <= kappa <= self.kappas[-1]
