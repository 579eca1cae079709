"""Utilisation predicted with the distribution of rollout lengths: rollouts as a fluid, in cells of time.

The relations of `capacity` know one rollout time. Here rollouts begin, run and finish as a fluid with the given
distributions, under the same rules as the live system: slots, the in-flight cap, pacing by the staleness bound,
oldest first, one version on the links at a time and the newest next. Guarantees: deterministic, bounded work
(`cells`). Leaves to others: chance; with few groups a step the real learner waits a little more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from echo2.cost_model.capacity import OperatingPoint
from echo2.cost_model.columns import Floats

CELLS_PER_STEP = 24
STEPS = 48
JITTERED_STEPS = 32
TAIL_SHARE = 0.95
LONGEST_TAILS = 3.0
CELLS_OF_TAIL_MAX = 4096
TRANSFER_JITTER = (0.94, 0.97, 1.0, 1.03, 1.06)


@dataclass(frozen=True, slots=True)
class FluidInputs:
    """`rollout_s`: quantiles of one rollout's seconds at equal shares, rising. `slots`: rollouts at a time."""

    point: OperatingPoint
    rollout_s: Floats
    rollouts_per_group: int
    slots: float
    in_flight_cap: float


@dataclass(frozen=True, slots=True)
class FluidOutcome:
    """`dropped`: share of finished rollouts that were too old when their turn came."""

    utilisation: float
    dropped: float
    steps: int


def log_normal_quantiles(mean_s: float, tail_s: float, longest_s: float = math.inf, points: int = 200) -> Floats:
    """Quantiles of the log-normal with this mean and 95th percentile (narrowest that fits), cut at `longest_s`.

    Where the longest is not known it is taken to be `LONGEST_TAILS` tails.

    ln tail = ln mean - sigma^2/2 + z*sigma; where the tail is below the mean's reach the distribution is a point.
    """
    z = NormalDist().inv_cdf(TAIL_SHARE)
    ratio = math.log(max(tail_s, mean_s * (1 + 1e-9)) / mean_s)
    inside = z * z - 2 * ratio
    sigma = float(z - math.sqrt(inside)) if inside > 0 else float(z)
    shares = (np.arange(points) + 0.5) / points
    quantiles: Floats = mean_s * np.exp(-sigma * sigma / 2 + sigma * _normal_quantile(shares))
    return np.minimum(quantiles, longest_of(tail_s, longest_s))


def longest_of(tail_s: float, longest_s: float) -> float:
    """The longest rollout to reckon with; where it is not known, `LONGEST_TAILS` tails."""
    return max(longest_s, tail_s) if math.isfinite(longest_s) else LONGEST_TAILS * tail_s


def _normal_quantile(shares: Floats) -> Floats:
    normal = NormalDist()
    return np.array([normal.inv_cdf(float(share)) for share in shares])


def predict(inputs: FluidInputs, steps: int = STEPS) -> FluidOutcome:
    """Runs the fluid for `steps` steps (or four times as long when it starves) and measures the later half.

    Where a transfer outlasts the period, which version the links take next hangs on a hair: the mean of slightly
    faster and slower transfers stands for the chance in it.
    """
    point = inputs.point
    if point.throughput <= 0 or inputs.slots <= 0:
        return FluidOutcome(0.0, 0.0, 0)
    if point.transfer_s <= point.kappa * point.train_s:
        return _predicted(inputs, steps)
    made = [
        _predicted(replace(inputs, point=replace(point, transfer_s=point.transfer_s * factor)), JITTERED_STEPS)
        for factor in TRANSFER_JITTER
    ]
    count = len(made)
    return FluidOutcome(
        sum(one.utilisation for one in made) / count, sum(one.dropped for one in made) / count, made[0].steps
    )


def _predicted(inputs: FluidInputs, steps: int) -> FluidOutcome:
    run = _Run.of(inputs, steps)
    for cell in range(run.cells):
        if not run.advance(cell):
            break
    return run.outcome()


def _kernel(quantiles: Floats, cell_s: float, cells: int) -> Floats:
    """Share of a beginning fluid that ends in each cell, its mean kept by splitting between neighbours."""
    # A beginning is booked at the end of its cell and an end counted at the end of its own: half a cell each.
    place = np.clip(quantiles / cell_s - 1.0, 0.0, cells - 1.001)
    low = place.astype(np.int64)
    kernel = np.zeros(cells + 1)
    np.add.at(kernel, low, 1 - (place - low))
    np.add.at(kernel, low + 1, place - low)
    return kernel / len(quantiles)


@dataclass(slots=True)
class _Run:
    """The fluid's state. Times in cells' seconds; `begun_of[k]` is the finish schedule of the k-th live version."""

    inputs: FluidInputs
    cell_s: float
    cells: int
    steps: int
    slot_kernel: Floats
    group_kernel: Floats
    slot_ends: Floats
    group_ends: dict[int, Floats]
    buffer: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    busy: float = 0.0
    outstanding: float = 0.0
    step: int = 0
    free_at_s: float = 0.0
    starts: list[float] = field(default_factory=list)
    published: list[tuple[int, float]] = field(default_factory=list)
    live: list[tuple[int, float]] = field(default_factory=list)
    version: int = 0
    link_free_s: float = 0.0
    dropped: float = 0.0

    @classmethod
    def of(cls, inputs: FluidInputs, steps: int) -> _Run:
        point = inputs.point
        cell_s = min(point.train_s, max(float(inputs.rollout_s[-1]), point.train_s / 4)) / CELLS_PER_STEP
        tail_cells = min(math.ceil(float(inputs.rollout_s[-1]) / cell_s) + 2, CELLS_OF_TAIL_MAX)
        cells = math.ceil(steps * point.train_s / cell_s) * 4
        slot_kernel = _kernel(inputs.rollout_s, cell_s, tail_cells)
        cumulative = np.minimum(np.cumsum(slot_kernel), 1.0) ** inputs.rollouts_per_group
        group_kernel = np.diff(cumulative, prepend=0.0)
        return cls(
            inputs, cell_s, cells, steps, slot_kernel, group_kernel, np.zeros(cells + tail_cells + 2), {}
        )  # fmt: skip

    def advance(self, cell: int) -> bool:
        """One cell of time; False when the last step has begun."""
        now = (cell + 1) * self.cell_s
        self.busy -= self.slot_ends[cell]
        arrived = 0.0
        for version, ends in self.group_ends.items():
            if ends[cell] > 0:
                self.buffer[version] += ends[cell]
                arrived += ends[cell]
        self._broadcast(now)
        while self._try_step(now, arrived):
            pass
        self._begin(cell, now)
        return len(self.starts) <= self.steps

    def _try_step(self, now: float, arrived: float) -> bool:
        point = self.inputs.point
        if self.free_at_s > now:
            return False
        oldest = self.step - point.staleness_bound
        for version in [one for one in self.buffer if one < oldest and self.buffer[one] > 0]:
            self.dropped += self.buffer[version]
            self.outstanding -= self.buffer[version]
            self.buffer[version] = 0.0
        have = sum(self.buffer.values())
        # The k-th of N groups ends, on average, where the fluid has k - 1/2 of them.
        need = point.rollouts_per_step - 0.5 * self.inputs.rollouts_per_group
        if have < need:
            return False
        over = min(1.0, (have - need) / arrived) if arrived > 0 else 1.0
        start = max(self.free_at_s, now - over * self.cell_s)
        left = point.rollouts_per_step
        for version in sorted(self.buffer):
            taken = max(0.0, min(left, self.buffer[version]))
            self.buffer[version] -= taken
            left -= taken
        self.buffer[max(self.buffer)] -= left  # the half group that is still to come
        self.outstanding -= point.rollouts_per_step
        self.starts.append(start)
        self.step += 1
        self.free_at_s = start + point.train_s
        if self.step % point.kappa == 0:
            self.published.append((self.step, self.free_at_s))
        return True

    def _broadcast(self, now: float) -> None:
        """Versions that are through go live; the links take the newest that is published by then."""
        point = self.inputs.point
        while self.live and self.live[0][1] <= now:
            self.version = self.live.pop(0)[0]
        while self.published and max(self.published[0][1], self.link_free_s) <= now:
            begin = max(self.published[0][1], self.link_free_s)
            newest = max(one for one in self.published if one[1] <= begin)
            self.published = [one for one in self.published if one[0] > newest[0]]
            self.link_free_s = begin + point.transfer_s
            self.live.append((newest[0], self.link_free_s + point.latency_s))

    def _begin(self, cell: int, now: float) -> None:
        point, inputs = self.inputs.point, self.inputs
        paced = point.rollouts_per_step * (self.version + point.staleness_bound + 1 - self.step)
        amount = min(inputs.in_flight_cap - self.outstanding, paced - self.outstanding, inputs.slots - self.busy)
        if amount <= 1e-12:
            return
        self.outstanding += amount
        self.busy += amount
        self.slot_ends[cell + 1 : cell + 1 + len(self.slot_kernel)] += amount * self.slot_kernel
        ends = self.group_ends.get(self.version)
        if ends is None:
            self._forget_old()
            ends = self.group_ends[self.version] = np.zeros(len(self.slot_ends))
            self.buffer.setdefault(self.version, 0.0)
        ends[cell + 1 : cell + 1 + len(self.group_kernel)] += amount * self.group_kernel

    def _forget_old(self) -> None:
        oldest = self.step - 2 * self.inputs.point.staleness_bound - 8
        for version in [one for one in self.group_ends if one < oldest and self.buffer[one] <= 0]:
            del self.group_ends[version], self.buffer[version]

    def outcome(self) -> FluidOutcome:
        """Over the later half of the steps made, in whole periods."""
        made = len(self.starts)
        if made < 2 * self.inputs.point.kappa + 2:
            return FluidOutcome(0.0, 0.0, made)
        half = made - 1 - (made - 1) // 2 // self.inputs.point.kappa * self.inputs.point.kappa
        span_s = self.starts[-1] - self.starts[half]
        busy_s = (made - 1 - half) * self.inputs.point.train_s
        trained = made * self.inputs.point.rollouts_per_step
        return FluidOutcome(min(1.0, busy_s / span_s), self.dropped / (self.dropped + trained), made)
