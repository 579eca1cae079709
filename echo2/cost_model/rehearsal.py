"""Predicts utilisation by rehearsing the run: groups are leased, generated and trained on, with drawn lengths.

The relations of `capacity` have one rollout time and no groups. Here each group is leased whole to one worker, and its
rollouts run in that worker's slots (in rounds, if the group is larger). Versions cross the links one at a time, and a
version that replaces a waiting one is larger. Pacing, the in-flight cap and oldest-first batches match the live system.
Guarantees: deterministic (lengths are shuffled quantiles, so that every block of them has the distribution's mean);
bounded work (`STEPS` steps of about `ROLLOUTS_MAX` rollouts: a large pool is represented by a part of it).
Leaves to others: which pool to rehearse (planner); preemptions, which only appear here as the discount on rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush, heapreplace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from echo2.cost_model.columns import Floats

STEPS = 40
STEPS_OF_LATE_VERSIONS = 3
STEPS_MAX, STEPS_LEAST = 160, 16
ROLLOUTS_IN_ALL = 16_000
ROLLOUTS_MAX = 192
WORKERS_KEPT, WORKERS_LEAST = 12, 4
GROUPS_LEAST = 6
WARM_SHARE = 0.35
QUANTILES = 256
TAIL_SHARE = 0.95
LONGEST_TAILS = 3.0
USUAL_SIGMA, AT_THE_CUT = 0.9, 0.995
SEED = 20602
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The run to rehearse. Per worker: `slots`, `rollout_s` (mean), `latency_s` (last byte to live), `swap_s`.

    lengths: quantiles of a rollout's length at equal shares, ascending, with mean 1. transfer_s: seconds on the links of a
    version, as a function of the steps it spans. is_stalled: workers pause while a version is on the links. take: seed of
    the order of lengths.
    """

    staleness_bound: int
    kappa: int
    train_s: float
    encode_s: float
    groups_per_step: int
    rollouts_per_group: int
    cap_groups: int
    slots: npt.NDArray[np.int64]
    rollout_s: Floats
    latency_s: Floats
    swap_s: Floats
    lengths: Floats
    transfer_s: Callable[[int], float]
    is_stalled: bool = False
    take: int = 0


@dataclass(frozen=True, slots=True)
class RehearsalOutcome:
    """What a rehearsal measured. `dropped`: share of finished groups that were too stale when their turn came."""

    utilisation: float
    dropped: float
    steps: int


# ---- lengths


def unit_lengths(mean: float, tail: float, longest: float = math.inf, points: int = QUANTILES) -> Floats:
    """Quantiles, divided by the mean, of the log-normal clipped at `longest` with this mean and 95th percentile.

    `mean` is that of the clipped lengths, since that is what a run measures: clipping a log-normal of that mean would lower
    its mean by up to a seventh. With `median = tail / exp(z * sigma)` the clipped mean falls as sigma grows, so
    bisection finds sigma. If the 95th percentile is at the limit, it says nothing about the spread; then sigma is
    `USUAL_SIGMA`, and bisection finds the median that gives the mean.
    """
    return _unit_lengths(round(max(1.0, tail / mean), 3), round(longest_of(tail, longest) / mean, 3), points)


def longest_of(tail_s: float, longest_s: float) -> float:
    """The longest rollout to assume: `longest_s`, or `LONGEST_TAILS` times the tail if that is unknown (infinite)."""
    return max(longest_s, tail_s) if math.isfinite(longest_s) else LONGEST_TAILS * tail_s


@lru_cache(maxsize=64)
def _unit_lengths(tail: float, longest: float, points: int) -> Floats:
    normal = np.array([_NORMAL.inv_cdf((index + 0.5) / points) for index in range(points)])
    z = _NORMAL.inv_cdf(TAIL_SHARE)

    def cut(median: float, sigma: float) -> Floats:
        return np.minimum(median * np.exp(sigma * normal), max(longest, tail))

    is_cut = tail >= AT_THE_CUT * longest and tail > 1.0
    low, high = 0.0, tail if is_cut else z
    for _ in range(40):
        middle = (low + high) / 2
        made = cut(middle, USUAL_SIGMA) if is_cut else cut(tail * math.exp(-z * middle), middle)
        is_long = float(made.mean()) > 1.0
        low, high = (middle, high) if is_long != is_cut else (low, middle)
    found = cut(low, USUAL_SIGMA) if is_cut else cut(tail * math.exp(-z * low), low)
    return np.asarray(found / found.mean())


@lru_cache(maxsize=16)
def _order(points: int, blocks: int, take: int) -> np.ndarray:
    """Indices of quantiles: each block of `points` contains every index once, in its own random order, seeded by `take`."""
    rng = np.random.default_rng(SEED + take)
    return np.concatenate([rng.permutation(points) for _ in range(blocks)])


def _drawn(lengths: Floats, count: int, take: int) -> list[float]:
    blocks = 1 << max(0, math.ceil(count / len(lengths)) - 1).bit_length()
    found: list[float] = lengths[_order(len(lengths), blocks, take)[:count]].tolist()
    return found


# ---- a large pool by a part of it


def reduced(told: Rehearsal) -> Rehearsal:
    """Shrinks a pool in proportion to at most about `ROLLOUTS_MAX` rollouts a step: fewer workers, then fewer slots.

    Rates are corrected for rounding. A worker with room for a whole group keeps room for one.
    """
    batch = told.groups_per_step * told.rollouts_per_group
    factor = min(batch / ROLLOUTS_MAX, told.groups_per_step / GROUPS_LEAST)
    if factor <= 1.0:
        return told
    count, least = len(told.slots), told.rollouts_per_group
    each = np.minimum(told.slots, least)  # fewest slots that a worker keeps
    floor = batch * float((each / told.rollout_s).sum()) / float((told.slots / told.rollout_s).sum())
    kept = min(count, max(WORKERS_LEAST, math.ceil(count / factor), int(WORKERS_KEPT * min(1.0, _share(floor, count)))))
    order = np.lexsort((told.latency_s, told.slots, told.rollout_s))
    rows = order[((np.arange(kept) + 0.5) * count / kept).astype(np.int64)]
    thinner = max(1.0, factor * kept / count)
    slots = np.maximum(np.round(told.slots[rows] / thinner), each[rows]).astype(np.int64)
    before, after = float((told.slots / told.rollout_s).sum()), float((slots / told.rollout_s[rows]).sum())
    groups = max(GROUPS_LEAST, round(told.groups_per_step * after / before))
    slower = (after / groups) / (before / told.groups_per_step)
    return replace(
        told, groups_per_step=groups, cap_groups=max(groups + 1, round(told.cap_groups * groups / told.groups_per_step)),
        slots=slots, rollout_s=told.rollout_s[rows] * slower, latency_s=told.latency_s[rows], swap_s=told.swap_s[rows],
    )  # fmt: skip


def _share(floor: float, count: int) -> float:
    """`ROLLOUTS_MAX` over the rollouts a step that `WORKERS_KEPT` workers with the fewest slots would produce."""
    return ROLLOUTS_MAX * count / (floor * WORKERS_KEPT)


# ---- the rehearsal


def rehearse(told: Rehearsal, steps: int = 0) -> RehearsalOutcome:
    """Simulates `steps` steps (0: as many as this pool needs to settle) and measures the later ones."""
    if not len(told.slots):
        return RehearsalOutcome(0.0, 0.0, 0)
    part = reduced(told)
    late = math.ceil(part.transfer_s(part.kappa) / part.train_s)
    batch = part.groups_per_step * part.rollouts_per_group
    wanted = max(STEPS, STEPS_OF_LATE_VERSIONS * max(part.kappa, late if late > part.kappa else 0))
    wanted = max(STEPS_LEAST, min(wanted, ROLLOUTS_IN_ALL // batch))
    return _Stage(part, min(STEPS_MAX, steps or wanted)).played()


@dataclass(slots=True)
class _Worker:
    """`ends`: when each slot finishes its work, on the worker's own clock, which stops while the worker is paused.
    `stalled_s`: how far that clock is behind."""

    ends: list[float]
    rollout_s: float
    rate: float
    version: int = 0
    leases: int = 0
    stalled_s: float = 0.0
    stands_until_s: float = 0.0


@dataclass(slots=True)
class _Stage:
    """State of one rehearsal. Events are (time, order, action, worker index, the worker's `stalled_s` when the event was
    scheduled, version); a `stalled_s` of -1 marks an event that pauses do not delay."""

    told: Rehearsal
    steps: int
    workers: list[_Worker] = field(default_factory=list)
    events: list[tuple[float, int, Callable[[int, int], None], int, float, int]] = field(default_factory=list)
    free: dict[int, None] = field(default_factory=dict)  # workers with a slot to fill, longest waiting first
    lengths: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    swap_s: list[float] = field(default_factory=list)
    now: float = 0.0
    foreseen: int = 0
    drawn: int = 0
    step: int = 0
    completed: int = 0
    is_training: bool = False
    outstanding: int = 0
    finished: dict[int, int] = field(default_factory=dict)  # finished groups waiting for their batch, by version
    newest: int = 0
    sent: int = 0
    is_sending: bool = False
    dropped: int = 0
    starts: list[float] = field(default_factory=list)

    def played(self) -> RehearsalOutcome:
        told = self.told
        batch = told.groups_per_step * told.rollouts_per_group
        self.lengths = _drawn(told.lengths, QUANTILES * math.ceil((self.steps + 2) * batch / QUANTILES), told.take)
        for slots, rollout_s in zip(told.slots.tolist(), told.rollout_s.tolist(), strict=True):
            self.workers.append(_Worker([0.0] * slots, rollout_s, slots / rollout_s))
        self.latency_s, self.swap_s = told.latency_s.tolist(), told.swap_s.tolist()
        self.free = dict.fromkeys(range(len(self.workers)))
        self._lease()
        while self.events and len(self.starts) <= self.steps:
            self.now, _, act, index, stalled_s, version = heappop(self.events)
            if stalled_s >= 0.0 and (late_s := self.workers[index].stalled_s - stalled_s) > 0.0:
                self._foresee(self.now + late_s, act, index, version, stalled_s + late_s)
            else:
                act(index, version)
        self.events.clear()  # breaks reference cycles with this object, so that it is freed without the garbage collector
        return self._outcome()

    def _foresee(
        self, when: float, act: Callable[[int, int], None], index: int, version: int = 0, stalled_s: float = -1.0
    ) -> None:
        self.foreseen += 1
        heappush(self.events, (when, self.foreseen, act, index, stalled_s, version))

    # ---- generation

    def _lease(self) -> None:
        """Gives groups to workers with a free slot, the least loaded first, while the cap and pacing allow."""
        told = self.told
        while self.free and self.outstanding < told.cap_groups:
            oldest = self.step + self.outstanding // told.groups_per_step - told.staleness_bound
            fit = [index for index in self.free if self.workers[index].version >= oldest]
            if not fit:
                return
            self._give(min(fit, key=lambda index: self.workers[index].leases / self.workers[index].rate))

    def _give(self, index: int) -> None:
        worker, told = self.workers[index], self.told
        own_now = max(self.now, worker.stands_until_s) - worker.stalled_s
        ends, last, rollout_s = worker.ends, 0.0, worker.rollout_s
        if self.drawn + told.rollouts_per_group > len(self.lengths):
            self.drawn = 0
        for length in self.lengths[self.drawn : self.drawn + told.rollouts_per_group]:
            begin = ends[0]
            end = (begin if begin > own_now else own_now) + length * rollout_s
            heapreplace(ends, end)
            last = max(last, end)
        self.drawn += told.rollouts_per_group
        worker.leases += 1
        self.outstanding += 1
        self._foresee(last + worker.stalled_s, self._group_done, index, worker.version, worker.stalled_s)
        if ends[0] > own_now:
            del self.free[index]
            self._foresee(ends[0] + worker.stalled_s, self._slot_free, index, 0, worker.stalled_s)

    def _slot_free(self, index: int, _: int) -> None:
        self.free[index] = None
        self._lease()

    def _group_done(self, index: int, version: int) -> None:
        self.workers[index].leases -= 1
        self.finished[version] = self.finished.get(version, 0) + 1
        self._try_step()

    # ---- training

    def _try_step(self) -> None:
        if self.is_training:
            return
        told = self.told
        for version in [one for one in self.finished if one < self.step - told.staleness_bound]:
            stale = self.finished.pop(version)
            self.dropped += stale
            self.outstanding -= stale
        if sum(self.finished.values()) >= told.groups_per_step:
            left = told.groups_per_step
            for version in sorted(self.finished):
                taken = min(left, self.finished[version])
                left -= taken
                self.finished[version] -= taken
                if not self.finished[version]:
                    del self.finished[version]
            self.outstanding -= told.groups_per_step
            self.starts.append(self.now)
            self.step += 1
            self.is_training = True
            self._foresee(self.now + told.train_s, self._step_done, 0)
        self._lease()

    def _step_done(self, _: int, __: int) -> None:
        self.is_training = False
        self.completed += 1
        if self.completed - self.newest >= self.told.kappa:
            self.newest = self.completed
            self._foresee(self.now + self.told.encode_s, self._published, 0)
        self._try_step()

    # ---- versions

    def _published(self, _: int, __: int) -> None:
        if not self.is_sending and self.newest > self.sent:
            self._send()

    def _send(self) -> None:
        """Puts the newest version onto the links. It spans all steps since the version sent before."""
        told = self.told
        transfer_s = told.transfer_s(self.newest - self.sent)
        self.sent, self.is_sending = self.newest, True
        for index, latency_s in enumerate(self.latency_s):
            if told.is_stalled:
                self._stand_still(index, transfer_s)
            self._foresee(self.now + transfer_s + latency_s, self._live, index, self.sent)
        self._foresee(self.now + transfer_s, self._through, 0)

    def _through(self, _: int, __: int) -> None:
        self.is_sending = False
        self._published(0, 0)

    def _live(self, index: int, version: int) -> None:
        self.workers[index].version = version
        if self.swap_s[index] > 0:
            self._stand_still(index, self.swap_s[index])
        self._lease()

    def _stand_still(self, index: int, seconds: float) -> None:
        worker = self.workers[index]
        worker.stalled_s += seconds
        worker.stands_until_s = max(worker.stands_until_s, self.now) + seconds

    def _outcome(self) -> RehearsalOutcome:
        """Measures over whole publication periods, after the warm-up."""
        made, kappa = len(self.starts), self.told.kappa
        if made < 2 * kappa + 2:
            return RehearsalOutcome(0.0, 0.0, made)
        periods = max(1, int((made - 1) * (1 - WARM_SHARE)) // kappa)
        first = made - 1 - periods * kappa
        span_s = self.starts[-1] - self.starts[first]
        trained = made * self.told.groups_per_step
        busy_s = periods * kappa * self.told.train_s
        return RehearsalOutcome(min(1.0, busy_s / span_s), self.dropped / (self.dropped + trained), made)
