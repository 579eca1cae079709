"""A day on a market whose prices move and whose spot machines are taken away: what policies pay for a million useful tokens.

Pure and seeded. Each offering has a price (a mean-reverting logarithm, spot ones with spikes), a number of machines to be had and a
hazard that rises with its price; each kind and each machine has a speed that only work shows. A machine is paid from the moment it
is rented and works `JOIN_S` later. The learner is paid all day and trains as much as the pool's rate allows. Policies: a pool
fixed at the start, an autoscaler of one kind by the queue of rollouts (it grows or dries up with the pool's rate), the planner
over its machines and all that is on offer, and the best in hindsight: a linear program that knows all prices, speeds and losses.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from echo2.base.ids import PeerId
from echo2.coordinator.money.market import built_in_catalogue, built_in_models
from echo2.cost_model.machines import worker_prior
from echo2.cost_model.plan import Plan
from echo2.cost_model.planner import plan
from echo2.cost_model.sizing import RunLengths
from echo2.cost_model.snapshot import (
    JOIN_S,
    FleetSnapshot,
    LearnerEstimate,
    LinkEstimate,
    PlanConfig,
    WorkerEstimate,
    WorkerState,
)

TICK_S, DAY_TICKS, LOOK_TICKS = 300.0, 288, 2
MODEL, LENGTHS, MEAN_TOKENS = "qwen3-8b", RunLengths(2560), 900.0
KINDS = ("RTX4090", "RTX3090", "L40S", "A100-80G", "H100")
NEED_OF = ("RTX4090", 14.0)
"""The learner needs as much as so many machines of this kind are expected to make."""
LEARNER_USD_PER_HOUR = 9.6
LINK = LinkEstimate(2e7, 1e8, 0.05)
KIND_SPREAD, MACHINE_SPREAD = 0.2, 0.12
JOIN_TICKS = math.ceil(JOIN_S / TICK_S)


@dataclass(frozen=True)
class Offering:
    """`rate`: expected rollouts/s by the data sheet; `true_rate`: of its kind. By tick: price, machines there, losses an hour."""

    name: str
    kind: str
    is_spot: bool
    rate: float
    true_rate: float
    price: tuple[float, ...]
    room: tuple[int, ...]
    hazard: tuple[float, ...]


@dataclass
class Machine:
    offering: int
    rented_at: int
    speed: float
    price: float
    name: str


@dataclass
class Account:
    usd: float = 0.0
    rollouts: float = 0.0
    rented: int = 0
    lost: int = 0

    @property
    def usd_per_million_tokens(self) -> float:
        return self.usd / (self.rollouts * MEAN_TOKENS / 1e6)


def market(seed: int) -> tuple[Offering, ...]:
    """Two ways of renting each kind."""
    rng, catalogue, size = random.Random(seed), built_in_catalogue(), built_in_models()[MODEL]
    found = []
    for kind in KINDS:
        prior = worker_prior(catalogue[kind], size, LENGTHS)
        rate = prior.tokens_per_s / MEAN_TOKENS
        true_rate = rate * math.exp(rng.gauss(0.0, KIND_SPREAD))
        for is_spot in (False, True):
            base = catalogue[kind].usd_per_hour * prior.gpu_count * (rng.uniform(0.45, 0.7) if is_spot else 1.0)
            level, spike, price, room, hazard = rng.gauss(0.0, 0.1), 0.0, [], [], []
            for _ in range(DAY_TICKS):
                level += -0.02 * level + rng.gauss(0.0, 0.03 if is_spot else 0.006)
                if is_spot and rng.random() < 0.004:
                    spike = rng.uniform(0.3, 1.2)
                spike *= 0.97
                price.append(base * math.exp(level + spike))
                room.append(max(0, round(rng.gauss(14 if is_spot else 10, 3) * (1 - 0.6 * min(1.0, spike)))))
                hazard.append(0.05 * (1 + 6 * spike) if is_spot else 0.0)
            name = f"{kind} {'spot' if is_spot else 'on demand'}"
            found.append(Offering(name, kind, is_spot, rate, true_rate, tuple(price), tuple(room), tuple(hazard)))
    return tuple(found)


def need_per_s() -> float:
    prior = worker_prior(built_in_catalogue()[NEED_OF[0]], built_in_models()[MODEL], LENGTHS)
    return NEED_OF[1] * prior.tokens_per_s / MEAN_TOKENS


@dataclass
class Day:
    """One policy's day. `act(day, tick)` rents and releases."""

    offerings: tuple[Offering, ...]
    act: Callable[[Day, int], None]
    rng: random.Random
    machines: list[Machine] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    measured: dict[str, list[float]] = field(default_factory=dict)
    previous: Plan | None = None

    def rent(self, offering: int, tick: int, count: int) -> None:
        """As many as are to be had."""
        told = self.offerings[offering]
        owned = sum(one.offering == offering for one in self.machines)
        for _ in range(min(count, max(0, told.room[tick] - owned))):
            self.account.rented += 1
            speed = told.true_rate * math.exp(self.rng.gauss(0.0, MACHINE_SPREAD))
            name = f"m{self.account.rented:04d}"
            self.machines.append(Machine(offering, tick, speed, told.price[tick], name))

    def rate(self, tick: int) -> float:
        return sum(one.speed for one in self.machines if tick - one.rented_at >= JOIN_TICKS)

    def play(self) -> Account:
        need, hours = need_per_s(), TICK_S / 3600
        for tick in range(DAY_TICKS):
            self.act(self, tick)
            for one in self.machines:
                told = self.offerings[one.offering]
                self.account.usd += hours * (told.price[tick] if told.is_spot else one.price)
                if tick - one.rented_at == JOIN_TICKS:
                    self.measured.setdefault(told.kind, []).append(one.speed / told.rate)
            made = min(need, self.rate(tick))
            self.account.usd += hours * LEARNER_USD_PER_HOUR
            self.account.rollouts += made * TICK_S
            kept = [one for one in self.machines if not self._is_lost(one, tick)]
            self.account.lost += len(self.machines) - len(kept)
            self.machines = kept
        return self.account

    def _is_lost(self, machine: Machine, tick: int) -> bool:
        hazard = self.offerings[machine.offering].hazard[tick]
        return self.rng.random() < 1 - math.exp(-hazard * TICK_S / 3600)


# ---- policies


def fixed_pool(day: Day, tick: int) -> None:
    """On demand, cheapest first as of the start, a tenth more than is expected to do; nothing is lost, nothing changes."""
    if tick:
        return
    order = sorted(
        range(len(day.offerings)), key=lambda index: day.offerings[index].price[0] / day.offerings[index].rate
    )
    left = 1.1 * need_per_s()
    for index in order:
        told = day.offerings[index]
        count = min(math.ceil(left / told.rate), told.room[0])
        if not told.is_spot and count > 0:
            day.rent(index, 0, count)
            left -= count * told.rate


def autoscaler(day: Day, tick: int) -> None:
    """One kind of spot machine: two more while the learner's queue runs dry, one fewer while it overflows."""
    kind = min(
        (index for index, one in enumerate(day.offerings) if one.is_spot),
        key=lambda index: day.offerings[index].price[0] / day.offerings[index].rate,
    )
    need, coming = need_per_s(), sum(tick - one.rented_at < JOIN_TICKS for one in day.machines)
    if tick == 0:
        day.rent(kind, 0, math.ceil(need / day.offerings[kind].rate))
    elif day.rate(tick) < need and not coming:
        day.rent(kind, tick, 2)
    elif day.rate(tick) > 1.15 * need and day.machines:
        day.machines.pop()


def planned(day: Day, tick: int) -> None:
    """The product's planner, with its hysteresis, over the machines that are there and all on offer, every ten minutes."""
    if tick % LOOK_TICKS:
        return
    newest = {kind: [math.log(one) for one in day.measured.get(kind, ())[-8:]] for kind in KINDS}
    ratios = {
        kind: math.exp(sum(logs) / (0.25 + len(logs))) for kind, logs in newest.items()
    }  # the roofline weighs a quarter
    workers = [_owned(day, one, tick, ratios) for one in day.machines]
    owned = {index: sum(one.offering == index for one in day.machines) for index in range(len(day.offerings))}
    for index, told in enumerate(day.offerings):
        first = _estimate(
            told, f"o{index:02d}", told.rate * ratios[told.kind], told.price[tick], tick, WorkerState.STANDBY
        )
        for number in range(max(0, told.room[tick] - owned[index])):
            workers.append(replace(first, worker_id=PeerId(f"o{index:02d}-{number:02d}")))
    need = need_per_s()
    train_s = 60.0
    batch = round(need * train_s / 16) * 16
    learner = LearnerEstimate(
        batch, batch / need, LinkEstimate(1e8, 1e8, 0.02), 1.2e8, 1.6e10, 16, price_usd_per_hour=LEARNER_USD_PER_HOUR
    )
    made = plan(FleetSnapshot(tick * TICK_S, learner, tuple(workers)), PlanConfig(4), day.previous)
    day.previous = made
    pool = set(made.pool)
    day.machines = [one for one in day.machines if one.name in pool]
    for index in range(len(day.offerings)):
        day.rent(index, tick, sum(name.startswith(f"o{index:02d}-") for name in pool))
    names = tuple(sorted(one.name for one in day.machines))
    day.previous = replace(made, pool=tuple(PeerId(name) for name in names))


def _owned(day: Day, one: Machine, tick: int, ratios: dict[str, float]) -> WorkerEstimate:
    told = day.offerings[one.offering]
    is_measured = tick - one.rented_at > JOIN_TICKS
    rate = one.speed if is_measured else told.rate * ratios[told.kind]
    price = told.price[tick] if told.is_spot else one.price
    made = _estimate(told, one.name, rate, price, tick, WorkerState.ACTIVE)
    left_s = max(0.0, JOIN_S - (tick - one.rented_at) * TICK_S)
    return replace(made, join_s=left_s, state_since_s=one.rented_at * TICK_S, is_pinned=not is_measured)


def _estimate(told: Offering, name: str, rate: float, price: float, tick: int, state: WorkerState) -> WorkerEstimate:
    mean_s = 16 / rate
    return WorkerEstimate(
        PeerId(name), rate, price, LINK, mean_s, 2.0 * mean_s, rollout_s_max=2.6 * mean_s,
        hazard_per_hour=0.06 if told.is_spot else 0.0, state=state,
    )  # fmt: skip


# ---- hindsight


def hindsight(offerings: tuple[Offering, ...]) -> float:
    """USD per million useful tokens of the best fluid plan that knows everything: a lower bound on what any policy pays.

    Variables: machines held and rented, by offering and tick, and rollouts made, by tick. The ratio of two sums is minimised by
    Dinkelbach's method: the price of a rollout is raised until the program gains nothing at it.
    """
    price = 12.0 * MEAN_TOKENS / 1e6
    for _ in range(8):
        usd, rollouts = _hindsight(offerings, price)
        if abs(usd / rollouts - price) < 1e-6 * price:
            break
        price = usd / rollouts
    return usd / (rollouts * MEAN_TOKENS / 1e6)


def _hindsight(offerings: tuple[Offering, ...], usd_per_rollout: float) -> tuple[float, float]:
    from scipy.optimize import linprog
    from scipy.sparse import lil_matrix

    count, hours, need = len(offerings), TICK_S / 3600, need_per_s()
    size = DAY_TICKS * count

    def held(index: int, tick: int) -> int:
        return tick * count + index

    cost = np.concatenate([
        [hours * one.price[tick] for tick in range(DAY_TICKS) for one in offerings], np.zeros(size),
        np.full(DAY_TICKS, -usd_per_rollout * TICK_S),
    ])  # fmt: skip
    keeps, caps = lil_matrix((size, 2 * size + DAY_TICKS)), lil_matrix((DAY_TICKS, 2 * size + DAY_TICKS))
    for tick in range(DAY_TICKS):
        caps[tick, 2 * size + tick] = 1.0
        for index, one in enumerate(offerings):
            row = held(index, tick)
            keeps[row, row], keeps[row, size + row] = 1.0, -1.0
            if tick:
                keeps[row, held(index, tick - 1)] = -math.exp(-one.hazard[tick - 1] * hours)
            caps[tick, row] = -one.true_rate * math.exp(MACHINE_SPREAD**2 / 2)
            for since in range(JOIN_TICKS):  # what was rented lately is paid and does not work yet
                if tick >= since:
                    caps[tick, size + held(index, tick - since)] = one.true_rate * math.exp(MACHINE_SPREAD**2 / 2)
    bounds = [(0.0, float(one.room[tick])) for tick in range(DAY_TICKS) for one in offerings]
    bounds += [(0.0, None)] * size + [(0.0, need)] * DAY_TICKS
    rows = lil_matrix((size + DAY_TICKS, 2 * size + DAY_TICKS))
    rows[:size], rows[size:] = keeps, caps
    found = linprog(cost, A_ub=rows.tocsr(), b_ub=np.zeros(size + DAY_TICKS), bounds=bounds, method="highs")
    made = float(found.x[2 * size :].sum()) * TICK_S
    usd = float(cost[:size] @ found.x[:size]) + LEARNER_USD_PER_HOUR * 24
    return usd, made


# ---- all of them


def days(seeds: int) -> dict[str, list[float]]:
    """USD per million useful tokens by policy, over what is best in hindsight, one number a day."""
    found: dict[str, list[float]] = {"fixed pool": [], "autoscaler": [], "planner": []}
    for seed in range(seeds):
        offerings = market(seed)
        best = hindsight(offerings)
        for name, act in (("fixed pool", fixed_pool), ("autoscaler", autoscaler), ("planner", planned)):
            account = Day(offerings, act, random.Random(seed * 31 + 7)).play()
            found[name].append(account.usd_per_million_tokens / best)
            useful = account.rollouts / (need_per_s() * 24 * 3600)
            print(
                f"day {seed}, {name}: {account.usd:.0f} USD, {useful:.1%} useful, {account.rented} rented, {account.lost} lost, "
                f"{account.usd_per_million_tokens:.4f} USD per million tokens, hindsight {best:.4f}"
            )
    for name, ratios in found.items():
        print(f"{name}: {statistics.fmean(ratios):.3f} times hindsight, worst {max(ratios):.3f}")
    return found


if __name__ == "__main__":
    days(3)
