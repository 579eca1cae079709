"""A fleet under the staleness rule, simulated rollout by rollout: what predictions and plans are judged by.

Written from the rules alone; it imports nothing of the planner's. One worker has slots and a speed; a group is leased whole
to one worker, its rollouts wait in that worker's queue for a slot; lengths are log-normal, cut; versions cross the links one at
a time, the newest first, and a version that spans more steps is larger; a worker begins a group only if the version it holds is
within S of the step that the group is meant for; no more groups are in flight than the cap allows.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass


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


@dataclass(frozen=True)
class World:
    """Lengths are `exp(sigma * normal)`, cut at `cut`, then scaled to mean 1. `delta` bytes span one step."""

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

    def mean_length(self) -> float:
        """Of the cut log-normal, in closed form."""
        from statistics import NormalDist

        phi, s, at = NormalDist().cdf, self.sigma, math.log(self.cut)
        if s == 0:
            return min(1.0, self.cut)
        return math.exp(s * s / 2) * phi((at - s * s) / s) + self.cut * (1 - phi(at / s))

    def transfer_s(self, pool: list[Machine], spans: int) -> float:
        """Seconds until all hold a version that spans so many steps."""
        size = min(self.delta * spans**self.growth, max(self.whole, self.delta))
        swarm = len(pool) / (self.up + sum(one.up for one in pool))
        return size * max(1 / self.up, 1 / min(one.down for one in pool), swarm) / self.efficiency


@dataclass
class Rollout:
    seconds: float
    group: Group
    begun_at: float = 0.0


@dataclass
class Group:
    version: int
    left: int


class Host:
    """One machine at work: a queue, slots, and a clock that stops while it stands still."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.version, self.busy, self.still_until = machine, 0, 0, 0.0
        self.queue: deque[Rollout] = deque()
        self.running: set[int] = set()

    @property
    def has_room(self) -> bool:
        return self.machine.slots - self.busy - len(self.queue) > 0


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
        self.transfer = {}
        self.pool = pool
        self.heap: list[tuple[float, int, str, object]] = []
        self.count = 0
        self.due: dict[int, tuple[float, Host, Rollout]] = {}
        self.now, self.step, self.done, self.published, self.sent = 0.0, 0, 0, 0, 0
        self.in_flight, self.is_training, self.link_busy = 0, False, False
        self.buffer: list[int] = []  # versions of finished groups
        self.starts: list[float] = []

    def at(self, when: float, what: str, whose: object) -> None:
        self.count += 1
        heapq.heappush(self.heap, (when, self.count, what, whose))

    def until(self, steps: int) -> float:
        self.hand_out()
        while self.heap and len(self.starts) <= steps:
            self.now, number, what, whose = heapq.heappop(self.heap)
            getattr(self, "on_" + what)(number, whose)
        if len(self.starts) < 2 * self.kappa + 2:
            return 0.0
        last = len(self.starts) - 1
        first = last - max(1, (2 * last // 3) // self.kappa) * self.kappa
        return min(1.0, (last - first) * self.w.train_s / (self.starts[last] - self.starts[first]))

    # generation

    def hand_out(self) -> None:
        while self.in_flight < self.cap:
            meant_for = self.step + self.in_flight // self.need
            able = [h for h in self.hosts if h.has_room and h.version >= meant_for - self.w.bound]
            if not able:
                return
            host = min(able, key=lambda h: (h.busy + len(h.queue)) * h.machine.mean_s / h.machine.slots)
            group = Group(host.version, self.w.group)
            self.in_flight += 1
            for _ in range(self.w.group):
                length = min(self.w.cut, math.exp(self.w.sigma * self.rng.gauss(0, 1))) * self.scale
                host.queue.append(Rollout(length * host.machine.mean_s, group))
            self.fill(host)

    def fill(self, host: Host) -> None:
        while host.queue and host.busy < host.machine.slots:
            rollout = host.queue.popleft()
            host.busy += 1
            begin = max(self.now, host.still_until)
            self.at(begin + rollout.seconds, "rollout", (host, rollout))
            self.due[self.count] = (begin + rollout.seconds, host, rollout)
            host.running.add(self.count)

    def on_rollout(self, number: int, whose: tuple[Host, Rollout]) -> None:
        host, rollout = whose
        when, _, _ = self.due[number]
        if when > self.now + 1e-12:  # it stood still meanwhile
            del self.due[number]
            host.running.discard(number)
            self.at(when, "rollout", whose)
            self.due[self.count] = (when, host, rollout)
            host.running.add(self.count)
            return
        del self.due[number]
        host.running.discard(number)
        host.busy -= 1
        rollout.group.left -= 1
        self.fill(host)
        if rollout.group.left == 0:
            self.buffer.append(rollout.group.version)
            self.train()
        self.hand_out()

    def stand_still(self, host: Host, seconds: float) -> None:
        for number in host.running:
            when, whose, rollout = self.due[number]
            self.due[number] = (when + seconds, whose, rollout)
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
            self.at(self.now + self.w.train_s, "step", None)
        self.hand_out()

    def on_step(self, _: int, __: object) -> None:
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
        spans = self.published - self.sent
        if spans not in self.transfer:
            self.transfer[spans] = self.w.transfer_s(self.pool, spans)
        takes = self.transfer[spans]
        self.sent, self.link_busy = self.published, True
        for host in self.hosts:
            if self.w.is_stalled:
                self.stand_still(host, takes)
            self.at(self.now + takes + host.machine.apply_s, "live", (host, self.sent))
        self.at(self.now + takes, "through", None)

    def on_through(self, _: int, __: object) -> None:
        self.link_busy = False
        self.send()

    def on_live(self, _: int, whose: tuple[Host, int]) -> None:
        host, version = whose
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
