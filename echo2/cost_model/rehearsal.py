"""Predicts utilisation by rehearsing the run: groups are leased, generated, rewarded and trained on, with drawn lengths.

Each group is leased whole to one worker, and its rollouts run in that worker's slots as these come free. The links carry one
version at a time; a worker with a slow downlink has it later than the others, skips what it misses, and nobody waits for it. A
version that replaces a waiting one is larger. Rewards are computed by a limited number of processes. Pacing, the in-flight cap and
oldest-first batches match the live system. Deterministic: lengths are shuffled quantiles, so that every block of them has the
distribution's mean. Bounded work: a large pool is represented by a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush, heapreplace

import numpy as np

from echo2.cost_model.plan import UTILISATION_TOLERANCE
from echo2.cost_model.relations import NORMAL, Counts, Evaluation, FleetModel, Floats
from echo2.cost_model.snapshot import DownloadMode, LearnerEstimate, PlanConfig

STEPS_LEAST, STEPS_MAX, ROLLOUTS_IN_ALL = 20, 160, 16_000
"""Steps of a rehearsal: few of large batches, in which chance averages out; many of small ones."""
STEPS_OF_LATE_VERSIONS = 3  # late versions meet the steady state after two
ROLLOUTS_MAX, GROUPS_LEAST = 256, 16
"""A larger pool is shrunk to so many rollouts a step, but no fewer groups: with fewer, whole groups would wait for one another."""
ROLLOUTS_EVEN_MAX = 2048  # so many where the workers' sizes differ: 50 ms
WORKERS_KEPT, WORKERS_LEAST = 12, 4  # three of each of four kinds of links; 48 change nothing beyond 1 %
WARM_SHARE = 0.35  # the buffer is full after a third
TAKES, STEPS_OF_A_TAKE = 3, 80  # rehearsals that confirm a choice: the best of many is partly just the luckiest
LARGER, STEPS_OF_A_LARGER = 4, 24
"""Where a step is more than so many times the usual part, a choice is confirmed by one rehearsal of a part that is so many times
larger. If nearly all of S is used, a thousand groups a step lose 5 % of which 16 show nothing, and 64 two fifths."""
SEED = 20602  # any; fixed, so that plans are reproducible
# Quantiles of the normal distribution: an integral good to 0.1 %.
NORMAL_POINTS = np.array([NORMAL.inv_cdf((index + 0.5) / 65) for index in range(65)])
BATCHES_AHEAD = 2
FEW_MACHINES, AWAY_POINTS = 64, 256
"""Up to so many machines, losses are counted out, on a grid of so many shares of the rate: one of three that is rarely lost is
nothing like a normal distribution."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The run to rehearse. Per worker: `slots`, `rollout_s` (mean), `own_s` (a version of kappa steps over the links to it),
    `latency_s` (last byte to live), `swap_s`. lengths: quantiles of a rollout's length at equal shares, ascending, with mean 1.
    common_s: a version of kappa steps on the learner's and the swarm's links. `groups_per_step`, `rewards_per_s`: of the learner,
    or of the part of it that is rehearsed. take: seed of the order of lengths."""

    learner: LearnerEstimate
    config: PlanConfig
    kappa: int
    groups_per_step: int
    rewards_per_s: float
    cap_groups: int
    slots: Counts
    rollout_s: Floats
    own_s: Floats
    latency_s: Floats
    swap_s: Floats
    lengths: Floats
    common_s: float
    take: int = 0

    def growth(self, spans: int) -> float:
        """The size of a version that spans so many steps, over that of kappa steps."""
        return self.learner.artifact_bytes(spans) / self.learner.artifact_bytes(self.kappa)


def rehearsed(fleet: FleetModel, pool: Evaluation, takes: int = 0) -> Evaluation:
    """`pool` with its utilisation from a rehearsal, or the mean of it and `takes` longer ones with other draws (of a large pool,
    from a larger one), and with what losses of machines leave of it."""
    if not pool.chosen.any():
        return replace(pool, is_rehearsed=True)
    run = rehearsal_of(fleet, pool)
    if takes and _has_large_steps(fleet.snapshot.learner):
        values = [rehearse(run, STEPS_OF_A_LARGER, LARGER)]
    else:
        values = [] if pool.is_rehearsed and takes else [rehearse(run)]
        values += [rehearse(replace(run, take=take), STEPS_OF_A_TAKE) for take in range(1, takes + 1)]
    utilisation, spread = with_losses(fleet, pool, sum(values) / len(values))
    return replace(pool, utilisation=utilisation, spread=spread, is_rehearsed=True)


def confirmed(fleet: FleetModel, pool: Evaluation) -> Evaluation:
    """`pool`, rehearsed again unless its first rehearsal is sure, so that every pool is judged by the same measure."""
    first = pool if pool.is_rehearsed else rehearsed(fleet, pool)
    return first if first.utilisation >= 1.0 - UTILISATION_TOLERANCE else rehearsed(fleet, first, TAKES)


def _has_large_steps(learner: LearnerEstimate) -> bool:
    """Whether chance averages out in each step, so that the part's size matters more than its draws."""
    batch, group = learner.rollouts_per_step, learner.rollouts_per_group
    return batch > LARGER * ROLLOUTS_MAX and batch > LARGER * GROUPS_LEAST * group


def with_losses(fleet: FleetModel, pool: Evaluation, utilisation: float) -> tuple[float, float]:
    """Mean and standard deviation of the utilisation as machines are lost and replaced, from that with everybody at work. While
    a share of the rate is away the learner gets what is left, and it never catches up above 1."""
    rows = np.flatnonzero(pool.chosen)
    away = fleet.away[rows]
    if not away.any():
        return utilisation, 0.0
    learner = fleet.snapshot.learner
    full = fleet.rate[rows] / (1.0 - away)
    have = float(full.sum()) * learner.train_s / learner.rollouts_per_step
    reached = max(have, 1.0) * utilisation if utilisation < 1.0 else have
    # One batch is trained on and one is ready: of a machine that is away for a part of that time only the part is missed.
    stock_s = learner.train_s * min(BATCHES_AHEAD, fleet.config.staleness_bound + 1)
    often = np.minimum(1.0, away * np.maximum(1.0, stock_s / fleet.away_s[rows]))
    parts = np.divide(away, often, out=np.zeros_like(away), where=often > 0)
    shares, chances = _rate_away(full / full.sum() * parts, often)
    left = np.minimum(utilisation, reached * (1.0 - shares))
    mean = float(chances @ left)
    return mean, math.sqrt(max(0.0, float(chances @ left**2) - mean**2))


def _rate_away(weights: Floats, away: Floats) -> tuple[Floats, Floats]:
    """Shares of the pool's rate that may be away, and their probabilities, where each of `weights` is away for its share of time:
    of few machines counted out, of many a normal distribution."""
    if len(weights) > FEW_MACHINES:
        mean, deviation = float(weights @ away), math.sqrt(float((weights**2) @ (away * (1.0 - away))))
        shares = np.clip(mean + deviation * NORMAL_POINTS, 0.0, 1.0)
        return shares, np.full(len(shares), 1.0 / len(shares))
    chances = np.zeros(AWAY_POINTS + 1)
    chances[0] = 1.0
    for weight, share in zip(weights.tolist(), away.tolist(), strict=True):
        if share > 0.0:
            moved, (part, whole) = np.zeros_like(chances), math.modf(weight * AWAY_POINTS)
            at = int(whole)
            moved[at:] += (1.0 - part) * chances[: len(chances) - at]
            moved[at + 1 :] += part * chances[: len(chances) - at - 1]
            chances = (1.0 - share) * chances + share * moved
    return np.arange(len(chances)) / AWAY_POINTS, chances


def rehearsal_of(fleet: FleetModel, pool: Evaluation, of_each: int = 1) -> Rehearsal:
    """The run to rehearse for `pool`, with so many of each of its machines. A worker's slots are those that its rate keeps full
    (Little's law)."""
    learner, kappa, rows = fleet.snapshot.learner, pool.kappa, np.repeat(np.flatnonzero(pool.chosen), of_each)
    common_s, own_s = fleet.links_s(kappa, rows)
    group, slots = learner.rollouts_per_group, fleet.slots[rows]
    return Rehearsal(
        learner=learner,
        config=fleet.config,
        kappa=kappa,
        groups_per_step=math.ceil(learner.rollouts_per_step / group),
        rewards_per_s=learner.rewards_per_s,
        cap_groups=pool.in_flight_cap(group) // group,
        slots=slots,
        rollout_s=slots * (1.0 - fleet.away[rows]) / fleet.rate[rows],
        own_s=own_s,
        latency_s=fleet.latency_s[rows] - learner.encode_s,
        swap_s=fleet.swap_s[rows],
        lengths=fleet.lengths,
        common_s=common_s,
    )


# ---- a large pool by a part of it


def reduced(run: Rehearsal, larger: int = 1) -> Rehearsal:
    """Shrinks a pool in proportion to at most about `larger` times `ROLLOUTS_MAX` rollouts a step: fewer workers, then fewer
    slots. Rates are corrected for rounding. A worker with room for a whole group keeps room for one."""
    batch = run.groups_per_step * run.learner.rollouts_per_group
    factor = min(batch / ROLLOUTS_MAX, run.groups_per_step / GROUPS_LEAST) / larger
    if factor <= 1.0:
        return run
    count = len(run.slots)
    each = np.minimum(run.slots, run.learner.rollouts_per_group)  # fewest slots that a worker keeps
    floor = batch * float((each / run.rollout_s).sum()) / float((run.slots / run.rollout_s).sum())
    share = ROLLOUTS_MAX * count / (floor * WORKERS_KEPT)
    size = min(count, max(WORKERS_LEAST, math.ceil(count / factor), int(larger * WORKERS_KEPT * min(1.0, share))))
    # Sorted by what decides most, so every part of the pool is represented.
    late = np.round((run.latency_s + run.own_s) / run.learner.train_s, 2)
    order = np.lexsort((run.rollout_s, run.slots, late))
    rows = order[((np.arange(size) + 0.5) * count / size).astype(np.int64)]
    thinner = max(1.0, factor * size / count)
    # All alike, or those that keep a group's slots would make up more of the pool than they do.
    thinner = max(min(thinner, float((run.slots[rows] / each[rows]).min())), batch * size / count / ROLLOUTS_EVEN_MAX)
    slots = np.maximum(np.round(run.slots[rows] / thinner), each[rows]).astype(np.int64)
    before, after = float((run.slots / run.rollout_s).sum()), float((slots / run.rollout_s[rows]).sum())
    groups = max(GROUPS_LEAST * larger, round(run.groups_per_step * after / before))
    slower = (after / groups) / (before / run.groups_per_step)
    part = groups / run.groups_per_step
    return replace(
        run, groups_per_step=groups, cap_groups=max(groups + 1, round(run.cap_groups * part)), slots=slots,
        rollout_s=run.rollout_s[rows] * slower, own_s=run.own_s[rows], latency_s=run.latency_s[rows],
        swap_s=run.swap_s[rows], rewards_per_s=run.rewards_per_s * part,
    )  # fmt: skip


# ---- the rehearsal


def rehearse(run: Rehearsal, steps: int = 0, larger: int = 1) -> float:
    """Simulates `steps` steps (0: as many as this pool needs to settle); the utilisation over the later ones."""
    part = reduced(run, larger)
    late = math.ceil(part.common_s / part.learner.train_s)
    wanted = max(STEPS_LEAST, ROLLOUTS_IN_ALL // (part.groups_per_step * part.learner.rollouts_per_group))
    least = max(3 * part.kappa, STEPS_OF_LATE_VERSIONS * late if late > part.kappa else 0)  # whole periods are measured
    return _Stage(part, min(max(STEPS_MAX, 3 * part.kappa), max(steps or min(wanted, STEPS_MAX // 2), least))).play()


@lru_cache(maxsize=16)
def _order(points: int, blocks: int, take: int) -> np.ndarray:
    """Indices of quantiles: each block of `points` contains every index once, in its own random order, seeded by `take`."""
    rng = np.random.default_rng(SEED + take)
    return np.concatenate([rng.permutation(points) for _ in range(blocks)])


@dataclass(slots=True)
class _Worker:
    """`ends`: when each slot finishes its work, on the worker's own clock, which stops while the worker is paused.
    `stalled_s`: how far that clock is behind. `sent`: the newest version on its way to it, or held."""

    ends: list[float]
    rollout_s: float
    slot_s: float
    own_s: float
    latency_s: float
    swap_s: float
    version: int = 0
    sent: int = 0
    link_free_s: float = 0.0
    leases: int = 0
    stalled_s: float = 0.0
    stands_until_s: float = 0.0


@dataclass(slots=True)
class _Stage:
    """State of one rehearsal. Events are (time, order, action, worker index, the worker's `stalled_s` when the event was
    scheduled, version); a `stalled_s` of -1 marks an event that pauses do not delay."""

    run: Rehearsal
    steps: int
    workers: list[_Worker] = field(default_factory=list)
    events: list[tuple[float, int, Callable[[int, int], None], int, float, int]] = field(default_factory=list)
    free: dict[int, None] = field(default_factory=dict)  # workers with a slot to fill, longest waiting first
    lengths: list[float] = field(default_factory=list)
    now: float = 0.0
    scheduled: int = 0
    drawn: int = 0
    step: int = 0
    completed: int = 0
    is_training: bool = False
    outstanding: int = 0
    finished: dict[int, int] = field(default_factory=dict)  # finished groups waiting for their batch, by version
    rewards_free_s: float = 0.0
    newest: int = 0
    sent: int = 0
    is_sending: bool = False
    starts: list[float] = field(default_factory=list)

    def play(self) -> float:
        run = self.run
        points = len(run.lengths)
        blocks = math.ceil((self.steps + 2) * run.groups_per_step * run.learner.rollouts_per_group / points)
        self.lengths = run.lengths[_order(points, 1 << (blocks - 1).bit_length(), run.take)].tolist()
        columns = (run.slots, run.rollout_s, run.own_s, run.latency_s, run.swap_s)
        for slots, rollout_s, *links in zip(*(column.tolist() for column in columns), strict=True):
            self.workers.append(_Worker([0.0] * slots, rollout_s, rollout_s / slots, *links))
        self.free = dict.fromkeys(range(len(self.workers)))
        self._lease()
        while self.events and len(self.starts) <= self.steps:
            self.now, _, act, index, stalled_s, version = heappop(self.events)
            if stalled_s >= 0.0 and (late_s := self.workers[index].stalled_s - stalled_s) > 0.0:
                self._schedule(self.now + late_s, act, index, version, stalled_s + late_s)
            else:
                act(index, version)
        self.events.clear()  # breaks reference cycles with this object, so that it is freed without the garbage collector
        return self._utilisation()

    def _schedule(
        self, when: float, act: Callable[[int, int], None], index: int, version: int = 0, stalled_s: float = -1.0
    ) -> None:
        self.scheduled += 1
        heappush(self.events, (when, self.scheduled, act, index, stalled_s, version))

    # ---- generation

    def _lease(self) -> None:
        """Gives groups to workers with a free slot, the least loaded first, while the cap and pacing allow."""
        run, workers = self.run, self.workers
        while self.free and self.outstanding < run.cap_groups:
            oldest = self.step + self.outstanding // run.groups_per_step - run.config.staleness_bound
            best, least = -1, math.inf
            for index in self.free:
                worker = workers[index]
                if worker.version >= oldest and worker.leases * worker.slot_s < least:
                    best, least = index, worker.leases * worker.slot_s
            if best < 0:
                return
            self._give(best)

    def _give(self, index: int) -> None:
        worker, size = self.workers[index], self.run.learner.rollouts_per_group
        stalled_s, ends, rollout_s = worker.stalled_s, worker.ends, worker.rollout_s
        own_now = max(self.now, worker.stands_until_s) - stalled_s
        if self.drawn + size > len(self.lengths):
            self.drawn = 0
        last = 0.0
        for length in self.lengths[self.drawn : self.drawn + size]:  # most of a rehearsal's time is spent here
            begin = ends[0]
            end = (begin if begin > own_now else own_now) + length * rollout_s
            heapreplace(ends, end)
            if end > last:  # noqa: PLR1730 - a call of max is a third of the loop's time
                last = end
        self.drawn += size
        worker.leases += 1
        self.outstanding += 1
        self._schedule(last + stalled_s, self._group_done, index, worker.version, stalled_s)
        if ends[0] > own_now:
            del self.free[index]
            self._schedule(ends[0] + stalled_s, self._slot_free, index, 0, stalled_s)

    def _slot_free(self, index: int, _: int) -> None:
        self.free[index] = None
        self._lease()

    def _group_done(self, index: int, version: int) -> None:
        """All rollouts have ended; most of their rewards were computed while the longest was still generated."""
        self.workers[index].leases -= 1
        run = self.run
        if run.learner.reward_s <= 0.0:
            self._rewarded(0, version)
            return
        alone_s = run.learner.rollouts_per_group / run.rewards_per_s
        self.rewards_free_s = max(self.rewards_free_s, self.now - alone_s) + alone_s
        self._schedule(self.rewards_free_s + run.learner.reward_s, self._rewarded, 0, version)

    def _rewarded(self, _: int, version: int) -> None:
        self.finished[version] = self.finished.get(version, 0) + 1
        self._try_step()

    # ---- training

    def _try_step(self) -> None:
        if self.is_training:
            return
        run = self.run
        oldest = self.step - run.config.staleness_bound
        for version in [version for version in self.finished if version < oldest]:
            self.outstanding -= self.finished.pop(version)
        if sum(self.finished.values()) >= run.groups_per_step:
            left = run.groups_per_step
            for version in sorted(self.finished):
                groups = min(left, self.finished[version])
                left -= groups
                self.finished[version] -= groups
                if not self.finished[version]:
                    del self.finished[version]
            self.outstanding -= run.groups_per_step
            self.starts.append(self.now)
            self.step += 1
            self.is_training = True
            self._schedule(self.now + run.learner.train_s, self._step_done, 0)
        self._lease()

    def _step_done(self, _: int, __: int) -> None:
        self.is_training = False
        self.completed += 1
        if self.completed - self.newest >= self.run.kappa:
            self.newest = self.completed
            self._schedule(self.now + self.run.learner.encode_s, self._published, 0)
        self._try_step()

    # ---- versions

    def _published(self, _: int, __: int) -> None:
        """Puts the newest version onto the links if they are free. It spans all steps since the version sent before."""
        if self.is_sending or self.newest <= self.sent:
            return
        common_s = self.run.common_s * self.run.growth(self.newest - self.sent)
        self.sent, self.is_sending = self.newest, True
        for index, worker in enumerate(self.workers):
            if worker.link_free_s <= self.now + 1e-9:
                self._download(index)
        self._schedule(self.now + common_s, self._through, 0)

    def _download(self, index: int) -> None:
        """Begins the newest version on a worker's own link, which spans all steps since the version that it has."""
        worker = self.workers[index]
        own_s = worker.own_s * self.run.growth(self.sent - worker.sent)
        worker.sent, worker.link_free_s = self.sent, self.now + own_s
        if self.run.config.download is DownloadMode.STALLED:
            self._stand_still(worker, own_s)
        self._schedule(self.now + own_s + worker.latency_s, self._live, index, self.sent)
        if worker.own_s > self.run.common_s * (1 + 1e-9):
            self._schedule(self.now + own_s, self._link_free, index)

    def _link_free(self, index: int, _: int) -> None:
        if self.workers[index].sent < self.sent and self.workers[index].link_free_s <= self.now + 1e-9:
            self._download(index)

    def _through(self, _: int, __: int) -> None:
        self.is_sending = False
        self._published(0, 0)

    def _live(self, index: int, version: int) -> None:
        worker = self.workers[index]
        worker.version = version
        if worker.swap_s > 0:
            self._stand_still(worker, worker.swap_s)
        self._lease()

    def _stand_still(self, worker: _Worker, seconds: float) -> None:
        worker.stalled_s += seconds
        worker.stands_until_s = max(worker.stands_until_s, self.now) + seconds

    def _utilisation(self) -> float:
        """Over whole publication periods, after the warm-up."""
        count, kappa = len(self.starts), self.run.kappa
        if count < 2 * kappa + 2:
            return 0.0
        periods = max(1, int((count - 1) * (1 - WARM_SHARE)) // kappa)
        span_s = self.starts[-1] - self.starts[count - 1 - periods * kappa]
        return min(1.0, periods * kappa * self.run.learner.train_s / span_s)
