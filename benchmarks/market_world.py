"""A fleet under the staleness rule, simulated rollout by rollout: what predictions and plans are judged by.

Written from the rules alone; it imports nothing of the planner's. One worker has slots and a speed; a group is leased whole
to one worker, its rollouts wait in that worker's queue for a slot; lengths have one of three shapes; versions cross the learner's
and the swarm's links one at a time, the newest first, and a version that spans more steps is larger; a worker with a slow downlink
has it later and skips what it misses; a worker begins a group only if the version it holds is within S of the step that the group
is meant for; rewards wait for one of some processes; spot machines go and are replaced after a while, and their groups begin again;
no more groups are in flight than the cap allows.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any


@dataclass(frozen=True)
class Machine:
    """Seconds of a mean rollout in one of `slots`, bytes/s up and down, seconds from the last byte to live."""

    slots: int
    mean_s: float
    usd_per_hour: float
    up: float
    down: float
    apply_s: float = 0.0
    swap_s: float = 0.0
    losses_per_hour: float = 0.0
    join_s: float = 600.0


@dataclass(frozen=True)
class World:
    """Lengths are `exp(sigma * normal)`, cut at `cut`, then scaled to mean 1. `delta` bytes span one step. shape: "log-normal", or
    "two kinds" (a fifth of the rollouts five times as long), or "rare" (one in fifty at the cut). train_times: (step, T_train from
    there on)."""

    bound: int
    batch: int
    group: int
    train_s: float
    up: float
    delta: float
    whole: float
    sigma: float
    cut: float
    is_stalled: bool = False
    growth: float = 0.75
    efficiency: float = 0.8
    shape: str = "log-normal"
    reward_s: float = 0.0
    reward_processes: int = 1
    train_times: tuple[tuple[int, float], ...] = ()

    def length(self, rng: random.Random) -> float:
        """One rollout's length, before it is scaled to mean 1."""
        plain = math.exp(self.sigma * rng.gauss(0, 1))
        if self.shape == "two kinds":
            plain = math.exp(0.25 * rng.gauss(0, 1)) * (5.0 if rng.random() < 0.2 else 1.0)
        if self.shape == "rare" and rng.random() < 0.02:
            plain = self.cut
        return min(self.cut, plain)

    @lru_cache(maxsize=64)  # noqa: B019 - a frozen value, asked for at each of hundreds of simulations
    def mean_length(self) -> float:
        """Of the cut log-normal, in closed form."""
        if self.shape != "log-normal":
            rng = random.Random(5)
            return sum(self.length(rng) for _ in range(40_000)) / 40_000
        phi, s, at = NormalDist().cdf, self.sigma, math.log(self.cut)
        if s == 0:
            return min(1.0, self.cut)
        return math.exp(s * s / 2) * phi((at - s * s) / s) + self.cut * (1 - phi(at / s))

    def bytes_of(self, spans: int) -> float:
        """Bytes of a version that spans so many steps."""
        return min(self.delta * spans**self.growth, max(self.whole, self.delta))

    def links_s(self, pool: list[Machine], spans: int) -> float:
        """Seconds that it takes the uplinks of the learner and of the pool."""
        swarm = len(pool) / (self.up + sum(one.up for one in pool))
        return self.bytes_of(spans) * max(1 / self.up, swarm) / self.efficiency


@dataclass(slots=True, eq=False)
class Group:
    version: int
    left: int
    is_lost: bool = False


@dataclass(slots=True, eq=False)
class Rollout:
    """`ends_at`: later than its event says if its host stood still meanwhile, infinite if that was lost."""

    seconds: float
    group: Group
    host: Host
    ends_at: float = 0.0


class Host:
    """One machine at work: a queue, slots, and a clock that stops while it stands still."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.version, self.busy, self.still_until = machine, 0, 0, 0.0
        self.queue: deque[Rollout] = deque()
        self.running: set[Rollout] = set()
        self.fetching, self.fetching_until, self.is_away = 0, 0.0, False


def simulate(world: World, pool: list[Machine], kappa: int, cap: int, steps: int = 90, seed: int = 1) -> float:
    """The learner's utilisation over the later two thirds of `steps`."""
    if not pool:
        return 0.0
    return _Run(world, pool, kappa, cap, seed).until(steps)


class _Run:
    def __init__(self, world: World, pool: list[Machine], kappa: int, cap: int, seed: int) -> None:
        self.w, self.kappa, self.rng = world, kappa, random.Random(seed)
        self.need = -(-world.batch // world.group)
        self.cap = max(self.need, min(cap // world.group, (world.bound + 1) * self.need))
        self.hosts = [Host(one) for one in pool]
        self.scale = 1 / world.mean_length()
        self.pool = pool
        self.rewarding: list[float] = [0.0] * world.reward_processes  # when each process is free
        self.heap: list[tuple[float, int, Callable[[Any], None], object]] = []
        self.count = 0
        self.now, self.step, self.done, self.published, self.sent = 0.0, 0, 0, 0, 0
        self.in_flight, self.is_training, self.link_busy = 0, False, False
        self.buffer: list[int] = []  # versions of finished groups
        self.starts: list[float] = []

    def at(self, when: float, act: Callable[[Any], None], whose: object) -> None:
        self.count += 1
        heapq.heappush(self.heap, (when, self.count, act, whose))

    def run(self, steps: int) -> None:
        for host in self.hosts:
            self.next_loss(host)
        self.hand_out()
        while self.heap and len(self.starts) <= steps:
            self.now, _, act, whose = heapq.heappop(self.heap)
            act(whose)

    def until(self, steps: int) -> float:
        self.run(steps)
        if len(self.starts) < 2 * self.kappa + 2:
            return 0.0
        last = len(self.starts) - 1
        first = last - max(1, (2 * last // 3) // self.kappa) * self.kappa
        return min(1.0, (last - first) * self.w.train_s / (self.starts[last] - self.starts[first]))

    # generation

    def hand_out(self) -> None:
        while self.in_flight < self.cap:
            oldest = self.step + self.in_flight // self.need - self.w.bound
            host, least = None, math.inf
            for other in self.hosts:
                taken, slots = other.busy + len(other.queue), other.machine.slots
                if taken < slots and other.version >= oldest and not other.is_away:
                    load = taken * other.machine.mean_s / slots
                    if load < least:
                        host, least = other, load
            if host is None:
                return
            group = Group(host.version, self.w.group)
            self.in_flight += 1
            for _ in range(self.w.group):
                length = self.w.length(self.rng) * self.scale
                host.queue.append(Rollout(length * host.machine.mean_s, group, host))
            self.fill(host)

    def fill(self, host: Host) -> None:
        while host.queue and host.busy < host.machine.slots:
            rollout = host.queue.popleft()
            host.busy += 1
            rollout.ends_at = max(self.now, host.still_until) + rollout.seconds
            self.at(rollout.ends_at, self.on_rollout, rollout)
            host.running.add(rollout)

    def on_rollout(self, rollout: Rollout) -> None:
        if rollout.ends_at == math.inf:  # its machine was lost
            return
        if rollout.ends_at > self.now + 1e-12:  # it stood still meanwhile
            self.at(rollout.ends_at, self.on_rollout, rollout)
            return
        host = rollout.host
        host.running.discard(rollout)
        host.busy -= 1
        self.fill(host)
        if self.w.reward_s:
            begin = max(self.now, heapq.heappop(self.rewarding))
            heapq.heappush(self.rewarding, begin + self.w.reward_s)
            self.at(begin + self.w.reward_s, self.on_reward, rollout.group)
        else:
            self.on_reward(rollout.group)
        self.hand_out()

    def on_reward(self, group: Group) -> None:
        group.left -= 1
        if group.left == 0 and not group.is_lost:
            self.buffer.append(group.version)
            self.train()

    # losses

    def on_lost(self, host: Host) -> None:
        """The machine is gone: what it had begun is begun again elsewhere."""
        groups = {rollout.group for rollout in (*host.queue, *host.running)}
        for rollout in host.running:
            rollout.ends_at = math.inf
        for group in groups:
            group.is_lost = True
        self.in_flight -= len(groups)
        host.queue.clear()
        host.running.clear()
        host.busy, host.is_away = 0, True
        self.at(self.now + host.machine.join_s, self.on_joined, host)
        self.hand_out()

    def on_joined(self, host: Host) -> None:
        """Another machine in its place. Its first weights came while it joined, over a link like that of the lost one."""
        host.is_away = False
        self.next_loss(host)
        self.hand_out()

    def next_loss(self, host: Host) -> None:
        if host.machine.losses_per_hour:
            self.at(self.now + self.rng.expovariate(host.machine.losses_per_hour / 3600), self.on_lost, host)

    def stand_still(self, host: Host, seconds: float) -> None:
        for rollout in host.running:
            rollout.ends_at += seconds
        host.still_until = max(host.still_until, self.now) + seconds

    # training

    def train(self) -> None:
        if self.is_training:
            return
        fresh = [version for version in self.buffer if version >= self.step - self.w.bound]
        self.in_flight -= len(self.buffer) - len(fresh)
        self.buffer = sorted(fresh)
        if len(self.buffer) >= self.need:
            self.buffer = self.buffer[self.need :]
            self.in_flight -= self.need
            self.step += 1
            self.is_training = True
            self.starts.append(self.now)
            self.at(self.now + self.train_s(), self.on_step, None)
        self.hand_out()

    def train_s(self) -> float:
        return next((s for step, s in reversed(self.w.train_times) if self.step >= step), self.w.train_s)

    def on_step(self, _: object) -> None:
        self.is_training = False
        self.done += 1
        if self.done - self.published >= self.kappa:
            self.published = self.done
            self.send()
        self.train()

    # versions

    def send(self) -> None:
        if self.link_busy or self.published <= self.sent:
            return
        takes = self.w.links_s(self.pool, self.published - self.sent)
        self.sent, self.link_busy = self.published, True
        for host in self.hosts:
            if host.fetching_until <= self.now + 1e-9:
                self.fetch(host)
        self.at(self.now + takes, self.on_through, None)

    def fetch(self, host: Host) -> None:
        """The newest version, over the host's own link: no sooner than the seed's and the swarm's links bring it."""
        spans = self.sent - host.fetching
        own = self.w.bytes_of(spans) / host.machine.down / self.w.efficiency
        takes = max(own, self.w.links_s(self.pool, spans))
        host.fetching, host.fetching_until = self.sent, self.now + takes
        if self.w.is_stalled:
            self.stand_still(host, takes)
        self.at(self.now + takes + host.machine.apply_s, self.on_live, (host, self.sent))
        self.at(self.now + takes, self.on_fetched, host)

    def on_fetched(self, host: Host) -> None:
        if host.fetching < self.sent and host.fetching_until <= self.now + 1e-9:
            self.fetch(host)

    def on_through(self, _: object) -> None:
        self.link_busy = False
        self.send()

    def on_live(self, whose: tuple[Host, int]) -> None:
        host, version = whose
        if version < host.version:
            return
        host.version = version
        if host.machine.swap_s:
            self.stand_still(host, host.machine.swap_s)
        self.hand_out()


def usual_cap(world: World, pool: list[Machine]) -> int:
    """Rollouts in flight by Little's law: a batch, what is generated while a long group lasts, and a tenth more."""
    tail = min(world.cut, math.exp(1.645 * world.sigma)) / world.mean_length()
    lasts = [one.mean_s * (max(1.0, tail) + max(0.0, world.group / one.slots - 1)) for one in pool]
    rates = [one.slots / one.mean_s for one in pool]
    group_s = sum(s * r for s, r in zip(lasts, rates, strict=True)) / sum(rates)
    flow = world.batch * (1 + group_s / world.train_s) * 1.1
    cap = max(world.batch + world.group, min(flow, world.batch * (world.bound + 1)))
    return math.ceil(cap / world.group) * world.group
