"""The capacity model's relations: when does the learner never wait for rollouts?

Symbols, as in docs/capacity-model.md: S staleness bound, kappa publication period (steps), T_train seconds per step, T_bcast
seconds from publication until a worker runs a version, L_roll seconds that a group is in flight, R rollouts per step, mu_pool
rollouts/s.

    (1) rate        mu_pool >= R/T_train                                     and as many rewards per second
    (2) links       the links are free again within kappa*T_train
    (3) staleness   T_bcast + L_roll + R/mu_pool <= (S - kappa + 1)*T_train
    (4) pace        max(R/mu_pool, transfer/kappa, (T_bcast + L_roll + R/mu_pool)/(S - kappa + 1)) seconds a step keep (1) to (3)

Each worker has its own T_bcast and L_roll. Those too late for (3) are left out of mu_pool, and nobody waits for them. Pure
numpy over a whole fleet; row i of every column is worker i.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from echo2.cost_model.snapshot import DownloadMode, FleetSnapshot, PlanConfig, WorkerState

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]
TOLERANCE = 1e-6  # of floating point sums
QUANTILES = 256  # the longest of 64 is then between two of them
TAIL_SHARE = 0.95  # workers report the 95th percentile
LONGEST_TAILS = 3.0  # the longest rollout if the token limit is unknown, in 95th percentiles
USUAL_SIGMA, AT_THE_CUT = 0.9, 0.995
IN_FLIGHT_HEADROOM = 1.1
"""Lengths fluctuate from step to step, so a tenth more than the mean is in flight at times; of few groups a deviation more."""
SLOTS_MAX = 65_536  # of one machine, whatever it claims: sixteen engines of 4096 sequences
NORMAL = NormalDist()  # for quantiles


# ---- lengths


def unit_lengths(mean: float, tail: float, longest: float = math.inf) -> Floats:
    """Quantiles at equal shares, with mean 1, of the log-normal clipped at `longest` with this mean and 95th percentile. `mean`
    is that of the clipped lengths, since that is what a run measures. Bisection finds sigma, with the median that the 95th
    percentile implies. If the 95th percentile is at the limit, it says nothing about the spread; then sigma is `USUAL_SIGMA`,
    and bisection finds the median that gives the mean."""
    longest = max(longest, tail) if math.isfinite(longest) else LONGEST_TAILS * tail
    return _unit_lengths(round(max(1.0, tail / mean), 3), round(longest / mean, 3))


@lru_cache(maxsize=64)
def _unit_lengths(tail: float, longest: float) -> Floats:
    normal = np.array([NORMAL.inv_cdf((index + 0.5) / QUANTILES) for index in range(QUANTILES)])
    z = NORMAL.inv_cdf(TAIL_SHARE)

    def cut(median: float, sigma: float) -> Floats:
        return np.minimum(median * np.exp(sigma * normal), max(longest, tail))

    is_cut = tail >= AT_THE_CUT * longest and tail > 1.0
    low, high = 0.0, tail if is_cut else z
    for _ in range(40):
        middle = (low + high) / 2
        lengths = cut(middle, USUAL_SIGMA) if is_cut else cut(tail * math.exp(-z * middle), middle)
        is_long = float(lengths.mean()) > 1.0
        low, high = (middle, high) if is_long != is_cut else (low, middle)
    lengths = cut(low, USUAL_SIGMA) if is_cut else cut(tail * math.exp(-z * low), low)
    return np.asarray(lengths / lengths.mean())


def longest_of(lengths: Floats, count: int) -> float:
    """Expected longest of `count` drawn lengths."""
    shares = np.arange(len(lengths) + 1) / len(lengths)
    return float(lengths @ np.diff(shares**count))


# ---- a fleet as columns


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The relations' numbers of a pool under one period. transfer_s: the version's time on the links; latency_s: encoding, round
    trips and applying on top of that; rollout_s: L_roll. They are the latest in-time worker's; `throughput` is that of the workers
    in time."""

    staleness_bound: int
    kappa: int
    rollouts_per_step: float
    train_s: float
    transfer_s: float
    latency_s: float
    rollout_s: float
    throughput: float
    rewards_per_s: float = math.inf

    @property
    def broadcast_s(self) -> float:
        return self.transfer_s + self.latency_s

    @property
    def batch_s(self) -> float:
        return self.rollouts_per_step / self.throughput if self.throughput > 0 else math.inf

    @property
    def staleness_use_s(self) -> float:
        return self.broadcast_s + self.rollout_s + self.batch_s

    @property
    def staleness_budget_s(self) -> float:
        """The right side of relation (3)."""
        return (self.staleness_bound - self.kappa + 1) * self.train_s

    @property
    def pace_s(self) -> float:
        """Relation (4), without T_train itself."""
        steps = self.staleness_bound - self.kappa + 1
        use_s = self.staleness_use_s / steps if steps > 0 else self.staleness_use_s + self.train_s
        return max(self.batch_s, self.transfer_s / self.kappa, use_s, self.rollouts_per_step / self.rewards_per_s)


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """A period and a pool. `utilisation`: by relation (4), or by rehearsals once `is_rehearsed`; `spread`: its standard deviation
    over time as machines are lost and replaced. `group_s`: L_roll, mean over the pool by rate."""

    chosen: Flags
    point: OperatingPoint
    usd_per_hour: float
    utilisation: float
    group_s: float
    spread: float = 0.0
    is_rehearsed: bool = False

    @property
    def kappa(self) -> int:
        return self.point.kappa

    @property
    def period_s(self) -> float:
        return self.point.kappa * self.point.train_s

    def keeps_relations(self, rate_needed: float, margin: float = TOLERANCE) -> bool:
        """Whether relations (1) to (3) hold, up to `margin`."""
        point = self.point
        return (
            point.throughput >= rate_needed * (1 - TOLERANCE)
            and point.transfer_s <= self.period_s * (1 + margin)
            and point.staleness_use_s <= point.staleness_budget_s * (1 + margin)
        )

    @property
    def keeps_up(self) -> bool:
        """Whether each version is through the links before the next is published; if not, versions queue. False for nobody."""
        return self.point.throughput > 0 and self.point.transfer_s <= self.period_s * (1 + TOLERANCE)

    @property
    def least_slack(self) -> float:
        """The smaller slack of links and staleness, as a share of its limit."""
        point = self.point
        if point.staleness_budget_s <= 0:
            return -math.inf
        return min(1 - point.transfer_s / self.period_s, 1 - point.staleness_use_s / point.staleness_budget_s)

    def in_flight_cap(self, rollouts_per_group: int) -> int:
        """Cap on rollouts offered and not yet trained on: enough to hide the longest of each group, few enough that none grows old.

        By Little's law, R/T_train rollouts per second that are each in flight as long as their group need R*L_roll/T_train, and up
        to R more wait for their batch. Beyond R*(S + 1), a rollout would be too stale by the time it is trained on."""
        point = self.point
        batch = point.rollouts_per_step
        flow = batch * (1 + self.group_s / point.train_s)
        flow *= max(IN_FLIGHT_HEADROOM, 1 + math.sqrt(rollouts_per_group / flow))
        cap = max(batch + rollouts_per_group, min(flow, batch * (point.staleness_bound + 1)))
        return math.ceil(cap / rollouts_per_group) * rollouts_per_group


@dataclass(frozen=True)
class FleetModel:
    """A snapshot's workers as columns, in SI units. `rate`: rollouts/s less the expected losses; `away`: that share; `away_s`:
    what a loss costs. `latency_s`: encoding, the round trips of two hops, applying. `group_s`: seconds that a group is in
    flight. `price`: without traffic; `egress`: USD/GiB sent. `kind`: equal for equal machines."""

    snapshot: FleetSnapshot
    config: PlanConfig
    lengths: Floats
    rate: Floats
    away: Floats
    away_s: Floats
    price: Floats
    egress: Floats
    uplink: Floats
    downlink: Floats
    latency_s: Floats
    group_s: Floats
    swap_s: Floats
    slots: Counts
    is_available: Flags
    is_must: Flags

    @classmethod
    def of(cls, snapshot: FleetSnapshot, config: PlanConfig) -> FleetModel:
        workers, learner = snapshot.workers, snapshot.learner
        table = np.array(
            [
                (
                    worker.join_s, worker.price_usd_per_hour,
                    worker.link.uplink_bytes_per_s, worker.link.downlink_bytes_per_s,
                    worker.link.rtt_s + worker.apply_s, worker.rollout_s_tail, worker.rollout_s_mean, worker.swap_s,
                    worker.rollout_s_max or np.inf, worker.rollouts_per_s, worker.hazard_per_hour, worker.egress_usd_per_gib,
                )
                for worker in workers
            ]
        ).T  # fmt: skip
        away_s, full, mean_s = table[0] + config.preemption_loss_s, table[9], table[6]
        lost = table[10] * away_s / 3600.0  # a join and the work since the last report each
        away = lost / (1.0 + lost)
        is_available = np.array([worker.state is not WorkerState.UNAVAILABLE for worker in workers])
        slots = np.clip(np.round(full * mean_s), 1, SLOTS_MAX).astype(np.int64)
        if learner.lengths:
            shares, given = ((np.arange(count) + 0.5) / count for count in (QUANTILES, len(learner.lengths)))
            lengths = np.interp(shares, given, learner.lengths)
            lengths = np.asarray(lengths / lengths.mean())
        else:  # lengths are the task's, so all workers' measurements of them are of the same
            weights = full * is_available if is_available.any() else full
            weights = weights / weights.sum()
            longest_s = float(weights @ table[8]) if np.isfinite(table[8]).all() else math.inf
            lengths = unit_lengths(float(weights @ mean_s), float(weights @ table[5]), longest_s)
        group = learner.rollouts_per_group
        # A group that finds its worker busy starts as slots come free: over n/slots mean rollouts, half of that on average.
        turns = np.maximum(group / slots - 1.0, 0.5 * np.minimum(1.0, group / slots))
        reward_s = learner.reward_s + (group / learner.rewards_per_s if learner.reward_processes else 0.0)
        return cls(
            snapshot, config, lengths,
            rate=full * (1.0 - away), away=away, away_s=np.maximum(away_s, 1e-9), price=table[1],
            egress=table[11], uplink=table[2], downlink=table[3],
            latency_s=table[4] + learner.encode_s + learner.link.rtt_s,
            group_s=mean_s * (longest_of(lengths, group) + turns) + reward_s, swap_s=table[7], slots=slots,
            is_available=is_available,
            is_must=np.array([worker.is_pinned for worker in workers]) & is_available,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.price)

    @cached_property
    def rate_needed(self) -> float:
        """Rollouts/s that a new pool must give: the target's, and the margin that keeps it from changing at once."""
        learner, config = self.snapshot.learner, self.config
        return config.target_utilisation * (1 + config.add_margin) * learner.rollouts_per_step / learner.train_s

    @cached_property
    def usd_per_hour_most(self) -> float:
        """The cap, within rounding; infinite without one."""
        return self.config.usd_per_hour_cap * (1 + TOLERANCE)

    @cached_property
    def kind(self) -> Counts:
        """Machines that the relations cannot tell apart have the same number."""
        columns = (
            self.rate, self.price, self.egress, self.uplink, self.downlink, self.latency_s, self.group_s, self.swap_s,
        )  # fmt: skip
        order = np.lexsort(columns)
        is_new = np.zeros(len(self), dtype=np.bool_)
        for column in columns:
            is_new[1:] |= np.diff(column[order]) != 0
        kinds = np.empty(len(self), dtype=np.int64)
        kinds[order] = np.cumsum(is_new)
        return kinds

    @cached_property
    def _periods(self) -> dict[int, Period]:
        return {}

    def period(self, kappa: int) -> Period:
        if kappa not in self._periods:
            learner = self.snapshot.learner
            size, efficiency = learner.artifact_bytes(kappa), self.config.broadcast_efficiency
            seed_s = size / (learner.link.uplink_bytes_per_s * efficiency)
            own_s = np.maximum(seed_s, size / (self.downlink * efficiency))
            price = self.price + learner.sent_gib_per_hour(kappa) * self.egress
            self._periods[kappa] = Period(kappa, kappa * learner.train_s, size, efficiency, seed_s, own_s, price)
        return self._periods[kappa]

    def links_s(self, kappa: int, rows: npt.NDArray[np.int64]) -> tuple[float, Floats]:
        """Seconds that a version of `kappa` steps takes the learner's and the swarm's uplinks, by the fluid bound over the
        efficiency that broadcasts reach, and until each of these workers has it: those with a slow downlink later than the others.

        T* = max(F/u_s, F/d_i, N*F/(u_s + sum u_i)): F bytes, seed uplink u_s, N workers' uplinks u_i and downlinks d_i."""
        period = self.period(kappa)
        uplinks = self.snapshot.learner.link.uplink_bytes_per_s + float(self.uplink[rows].sum())
        common_s = max(period.seed_s, len(rows) * period.artifact_bytes / (uplinks * period.efficiency))
        return common_s, np.maximum(common_s, period.own_s[rows])

    def still_s(self, transfer_s: Floats, rows: npt.NDArray[np.int64] | slice) -> Floats:
        """Seconds of each period in which these workers pause to swap, and to download where that stalls them."""
        is_stalled = self.config.download is DownloadMode.STALLED
        return self.swap_s[rows] + transfer_s if is_stalled else self.swap_s[rows]

    def working_rate(self, transfer_s: Floats, period_s: float) -> Floats:
        """Rollouts/s of all workers, less their pauses, where versions are published every `period_s`."""
        return self.rate * np.maximum(0.0, 1.0 - self.still_s(transfer_s, slice(None)) / period_s)

    def evaluate(self, kappa: int, chosen: Flags) -> Evaluation:
        """The relations' numbers for a pool, which may violate them. It counts on those workers, in the order in which they deliver
        a version's first group, that together make the best pace (the most, of equals)."""
        learner, rows = self.snapshot.learner, np.flatnonzero(chosen)
        point = OperatingPoint(
            self.config.staleness_bound, kappa, learner.rollouts_per_step, learner.train_s, 0.0, 0.0, 0.0, 0.0,
            learner.rewards_per_s,
        )  # fmt: skip
        usd_per_hour = float(self.period(kappa).price[chosen].sum())
        if not len(rows):
            return Evaluation(chosen, point, usd_per_hour, 0.0, 0.0)
        _, transfer_s = self.links_s(kappa, rows)
        live_s = transfer_s + self.latency_s[rows]
        order = np.argsort(live_s + self.group_s[rows], kind="stable")
        lasts_s, batches = (live_s + self.group_s[rows])[order], kappa * learner.rollouts_per_step
        # What pauses cost is shared by the period, which is longer than kappa*T_train where too little is generated.
        full = np.cumsum(self.rate[rows][order])
        lost = np.cumsum((self.rate[rows] * self.still_s(transfer_s, rows))[order])
        periods_s = np.maximum(kappa * learner.train_s, (batches + lost) / full)
        rising = full - lost / periods_s
        slowest_s = np.maximum.accumulate(transfer_s[order])
        batch_s = learner.rollouts_per_step / np.maximum(rising, 1e-12)
        steps = self.config.staleness_bound - kappa + 1
        use_s = (lasts_s + batch_s) / steps if steps > 0 else lasts_s + batch_s + learner.train_s
        paces_s = np.maximum(np.maximum(batch_s, slowest_s / kappa), np.maximum(use_s, learner.train_s))
        best = len(paces_s) - 1 - int(np.argmin(paces_s[::-1]))
        in_time = order[: best + 1]
        broadcast_s = float(live_s[in_time].max())
        point = replace(
            point, transfer_s=float(slowest_s[best]), latency_s=broadcast_s - float(slowest_s[best]),
            rollout_s=float(lasts_s[best]) - broadcast_s, throughput=float(rising[best]),
        )  # fmt: skip
        weights = self.rate[rows] / self.rate[rows].sum()
        utilisation = min(1.0, learner.train_s / point.pace_s)
        return Evaluation(chosen, point, usd_per_hour, utilisation, float(weights @ self.group_s[rows]))


@dataclass(frozen=True, slots=True)
class Period:
    """What depends on kappa alone. seed_s: a version's time over the learner's uplink; own_s: per worker, also over its
    downlink. price: per worker, with its traffic."""

    kappa: int
    period_s: float
    artifact_bytes: float
    efficiency: float
    seed_s: float
    own_s: Floats
    price: Floats


# Online estimates from telemetry, robust against outliers.
#
# Each estimator keeps a bounded window and uses the median and the median absolute deviation (MAD) as centre and spread,
# so one frozen machine or one wrong clock does not move the estimate. `CHANGE_OBSERVATIONS` in a row far on one side are a change,
# and what came before them is forgotten.

WINDOW = 31  # odd, so the median is an observation; its error is a fifth of one observation's
MAD_TO_SIGMA = 1.4826  # of a normal distribution
CHANGE_OBSERVATIONS, CHANGE_SIGMAS, CHANGE_SHARE = 3, 4.0, 0.15
"""So many observations in a row, further from the median than so many standard deviations and than this share of it: one outlier is
none, two are rare, three by chance happen once in 30,000 observations."""
DELTA_GROWTH_PRIOR = 0.75  # measured: bytes of a delta grow so with the steps it spans
DELTA_PERIODS_MAX = 64  # kappa is at most S, which is at most 64


@dataclass(slots=True)
class RobustEstimator:
    """Estimates one quantity from the newest `window` observations, `values`. A prior is as many of them as it shall weigh."""

    window: int = WINDOW
    values: list[float] = field(default_factory=list)

    def observe(self, value: float) -> None:
        self.values = [*self.values, value][-self.window :]
        if self._has_changed():
            self.values = self.values[-CHANGE_OBSERVATIONS:]

    def _has_changed(self) -> bool:
        before, newest = self.values[:-CHANGE_OBSERVATIONS], self.values[-CHANGE_OBSERVATIONS:]
        if len(before) < CHANGE_OBSERVATIONS:
            return False
        centre = statistics.median(before)
        spread = MAD_TO_SIGMA * statistics.median(abs(value - centre) for value in before)
        far = max(CHANGE_SIGMAS * spread, CHANGE_SHARE * abs(centre))
        return all(value > centre + far for value in newest) or all(value < centre - far for value in newest)

    def value_or(self, default: float) -> float:
        """The median, or `default` before the first observation."""
        return statistics.median(self.values) if self.values else default


@dataclass(slots=True)
class DeltaSizeEstimator:
    """Artifact bytes as a function of the steps covered; fits the growth exponent once two periods have been observed."""

    _by_steps: dict[int, RobustEstimator] = field(default_factory=dict)

    def observe(self, artifact_bytes: float, steps: int) -> None:
        """Adds the size of a version that covers `steps` steps since its parent."""
        self._by_steps.setdefault(steps, RobustEstimator()).observe(artifact_bytes)

    @property
    def growth(self) -> float:
        """Exponent g of bytes ~ steps ** g, between 0 and 1."""
        points = [
            (math.log(steps), math.log(size))
            for steps, sizes in self._by_steps.items()
            if (size := sizes.value_or(0.0)) > 0
        ]
        if len(points) < 2:
            return DELTA_GROWTH_PRIOR
        slope = statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope
        return min(1.0, max(0.0, slope))

    def at(self, steps: int) -> float:
        """Estimated bytes of a version that covers `steps` steps, scaled from the nearest measured period; 0 before the first."""
        if not self._by_steps:
            return 0.0
        nearest = min(self._by_steps, key=lambda known: (abs(math.log(known / steps)), known))
        return self._by_steps[nearest].value_or(0.0) * math.pow(steps / nearest, self.growth)
