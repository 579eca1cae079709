"""The capacity model: when does the learner never wait for rollouts, and how busy is it otherwise?

Symbols, as in docs/capacity-model.md: S staleness bound, kappa publication period (steps), T_train seconds per step,
T_bcast seconds from publication until the pool holds a version, L_roll seconds of the longest rollout worth waiting
for, R rollouts per step, mu_pool rollouts per second of the pool.

    (1) stalled download      T_bcast + kappa*R/mu_pool <= kappa*T_train
    (2) background download   mu_pool >= R/T_train  and  T_bcast <= kappa*T_train
    (3) staleness             T_bcast + L_roll + R/mu_pool <= (S - kappa + 1)*T_train
    (4) utilisation           U = kappa*T_train / max(kappa*T_train, T_bcast + kappa*R/mu_pool)      in case (1)
    (5) utilisation           of a learner that waits for (3): the slowest cycle of the step recurrence

(1), (4) and the default kappa = S - 1 come from the ECHO-2 paper; (2), (3) and (5) are derived in the docs page.
Guarantees: pure functions, exact for a fluid model (rollouts infinitely divisible). Leaves to others: the source of the
numbers (calibration), which pool to rent (planner), whole rollouts, groups and queues (rehearsal, the simulator).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def default_kappa(staleness_bound: int) -> int:
    """The paper's default: as rarely as the staleness bound allows with one step to spare."""
    return max(1, staleness_bound - 1)


def broadcast_budget_s(kappa: int, train_s: float) -> float:
    """Right side of the second half of relation (2): a broadcast must finish before the next version is published."""
    return kappa * train_s


def staleness_budget_s(staleness_bound: int, kappa: int, train_s: float) -> float:
    """The right side of relation (3), in seconds."""
    return (staleness_bound - kappa + 1) * train_s


def staleness_use_s(broadcast_s: float, rollout_s: float, rollouts_per_step: float, throughput: float) -> float:
    """The left side of relation (3), in seconds; infinite if the pool has no throughput."""
    return broadcast_s + rollout_s + (rollouts_per_step / throughput if throughput > 0 else math.inf)


def utilisation_stalled(
    rollouts_per_step: float, train_s: float, kappa: int, broadcast_s: float, throughput: float
) -> float:
    """Utilisation with stalled download: relation (4)."""
    if throughput <= 0:
        return 0.0
    period_s = kappa * train_s
    return period_s / max(period_s, broadcast_s + kappa * rollouts_per_step / throughput)


def utilisation_of_throughput(rollouts_per_step: float, train_s: float, throughput: float) -> float:
    """Utilisation if only the pool's rate limits the learner."""
    return min(1.0, throughput * train_s / rollouts_per_step)


def utilisation_of_staleness(staleness_bound: int, kappa: int, train_s: float, use_s: float) -> float:
    """Utilisation limited by staleness: relation (5). `use_s`: the left side of (3).

    Version v = j*kappa is published when step v - 1 ends, and unlocks step v + m, m = S - kappa + 1, which therefore
    starts at least T_train + `use_s` after step v - 1 did. All other steps take T_train. From the unlocked step to the
    next one that ends in a publication r more pass, so one such cycle is m + 1 + r steps and lasts
    use_s + (r + 1)*T_train if (3) is violated.
    """
    if math.isinf(use_s):
        return 0.0
    unlocked_after = staleness_bound - kappa + 1
    rest = -(unlocked_after + 1) % kappa
    turn_s = (unlocked_after + 1 + rest) * train_s
    return turn_s / max(turn_s, use_s + (rest + 1) * train_s)


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The relations' inputs for one choice of kappa and pool.

    transfer_s: how long one version occupies the links. latency_s: encoding, round trips and applying on top of that;
    the next version does not wait for them. T_bcast is the sum of both.
    """

    staleness_bound: int
    kappa: int
    rollouts_per_step: float
    train_s: float
    transfer_s: float
    latency_s: float
    rollout_s: float
    throughput: float

    @property
    def broadcast_s(self) -> float:
        return self.transfer_s + self.latency_s

    @property
    def staleness_use_s(self) -> float:
        return staleness_use_s(self.broadcast_s, self.rollout_s, self.rollouts_per_step, self.throughput)

    @property
    def staleness_budget_s(self) -> float:
        return staleness_budget_s(self.staleness_bound, self.kappa, self.train_s)


def utilisation_background(point: OperatingPoint) -> float:
    """Utilisation with background download: the least of what rate, links and staleness allow.

    Uses the closed form if each broadcast finishes before the next version is published, else the step recurrence.
    """
    rate = utilisation_of_throughput(point.rollouts_per_step, point.train_s, point.throughput)
    if rate == 0.0:
        return 0.0
    if point.transfer_s > broadcast_budget_s(point.kappa, point.train_s):
        return min(rate, utilisation_of_steps(point))
    return min(rate, utilisation_of_staleness(point.staleness_bound, point.kappa, point.train_s, point.staleness_use_s))


def utilisation_of_steps(point: OperatingPoint, steps: int = 120) -> float:
    """Utilisation from the recurrence of step start times, for any transfer time; (5) is its cycle mean if transfers fit.

    The links carry one version at a time, then the newest one published. Step c waits until version c - S, or the
    first newer one, is live, then for L_roll and for R rollouts at the pool's rate. Measured over the second half.
    """
    train_s, batch_s = point.train_s, point.rollouts_per_step / point.throughput
    published: list[tuple[int, float]] = [(0, 0.0)]  # (version, time published)
    live: list[tuple[int, float]] = [(0, point.latency_s)]
    link_free_s, ready_s, start_s, needed = 0.0, 0.0, 0.0, 0
    starts: list[float] = []
    for step in range(steps):
        while live[needed][0] < step - point.staleness_bound:
            if needed + 1 == len(live):
                waiting = [one for one in published if one[0] > live[-1][0]]
                newest = max((one for one in waiting if one[1] <= link_free_s), default=waiting[0])
                link_free_s = max(link_free_s, newest[1]) + point.transfer_s
                live.append((newest[0], link_free_s + point.latency_s))
                published = [one for one in published if one[0] > newest[0]]
            needed += 1
        ready_s = max(live[needed][1] + point.rollout_s, ready_s) + batch_s
        start_s = max(starts[-1] + train_s if starts else 0.0, ready_s)
        starts.append(start_s)
        if (step + 1) % point.kappa == 0:
            published.append((step + 1, start_s + train_s))
    # Nearly whole cycles: by default the window is 60 steps less one, to within one step a multiple of most small kappas.
    half = steps // 2
    return min(1.0, (steps - 1 - half) * train_s / (starts[-1] - starts[half]))
