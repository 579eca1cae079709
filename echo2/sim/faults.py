"""What goes wrong in a simulated run, when, and for how long: a schedule drawn from the seed, and its carrying out.

Guarantees: same seed, same faults; every fault ends (`healed` says what is left at the end of the stormy time), but a
machine that was taken stays away, and another takes its place. Leaves to others: the processes' answer (drivers).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from echo2.base.rng import derived_rng
from echo2.sim.cluster import Cluster
from echo2.sim.disk import Disk
from echo2.sim.fault_plan import STORM_S, Planned, long_outage, storm
from echo2.sim.malice import CLAIMS, LATER_KINDS, Malice
from echo2.sim.scene import Sabotage, Scene
from echo2.sim.worker_driver import WorkerDriver

LONG_STORM_S = 250.0
"""Longer than what has stopped coming counts as stalled before it is tried again, with the learner still away."""
NOTICE_S = 2.0


class Storm:
    """Lets the planned faults happen to a cluster."""

    def __init__(self, cluster: Cluster, planned: list[Planned], until_s: float = STORM_S) -> None:
        self.cluster, cluster.stormy_s = cluster, until_s
        self.rng: random.Random = derived_rng(cluster.scene.seed, "storm")
        self._undo: list[Callable[[], None]] = []
        for one in planned:
            cluster.clock.at(one.at_s, lambda one=one: self._strike(one))  # type: ignore[misc]
        cluster.clock.at(until_s, self._heal)

    # ---- bookkeeping

    def _strike(self, planned: Planned) -> None:
        whom = planned.whom
        if whom not in self.cluster.hosts or whom in self.cluster.gone:
            workers = self.cluster.workers
            if not workers:
                return
            whom = self.rng.choice(workers)
        if getattr(self, f"_{planned.fault.name.lower()}")(whom, planned.for_s):
            self.cluster.faults[planned.fault.value] += 1
            self.cluster.story.tell(whom, f"FAULT {planned.fault.value} ({planned.for_s:.1f} s)")

    def _for(self, seconds: float, undo: Callable[[], None]) -> None:
        """Undoes a fault after a while, or when the storm ends."""
        is_done = False

        def once() -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                undo()

        self._undo.append(once)
        self.cluster.clock.after(seconds, once)

    def _heal(self) -> None:
        for undo in self._undo:
            undo()
        self.cluster.story.tell("faults", "stop")

    def _others(self, whom: str) -> list[str]:
        return [name for name in ("coordinator", "learner", *self.cluster.workers) if name != whom]

    def _is_worker(self, whom: str) -> bool:
        return whom in self.cluster.machines

    # ---- processes

    def _kill(self, whom: str, seconds: float) -> bool:
        if not self.cluster.hosts[whom].is_up:
            return False
        self.cluster.fall(whom)
        self._for(seconds, lambda: self.cluster.start(whom))
        return True

    def _lose_disk(self, whom: str, seconds: float) -> bool:
        if not self._is_worker(whom):
            return False
        self.cluster.machines[whom].disk.artifacts.clear()
        return self._kill(whom, seconds)

    def _power_cut(self, whom: str, seconds: float) -> bool:
        cluster = self.cluster
        if not self._kill(whom, seconds):
            return False
        if whom == "learner":
            cluster.learner.disk.power_cut(self.rng)
            cluster.learner.chunks.tear(self.rng)
            if cluster.scene.sabotage is Sabotage.TORN_JOURNAL:
                cluster.learner.disk.tear_badly()
        elif self._is_worker(whom):
            cluster.machines[whom].disk.tear(self.rng)
        return True

    def _freeze(self, whom: str, seconds: float) -> bool:
        host = self.cluster.hosts[whom]
        if not host.is_up or host.is_frozen:
            return False
        self.cluster.network.freeze(host)
        self._for(seconds, lambda: self.cluster.network.thaw(host))
        return True

    def _preempt(self, whom: str, seconds: float) -> bool:
        """The machine is gone at once; another is rented a while later."""
        if not self._is_worker(whom) or len(self.cluster.workers) < 2:
            return False
        self.cluster.fall(whom)
        self.cluster.gone.add(whom)
        self._for(seconds, self._rent)
        return True

    def _preempt_notice(self, whom: str, seconds: float) -> bool:
        driver = self.cluster.drivers.get(whom)
        if not isinstance(driver, WorkerDriver) or len(self.cluster.workers) < 2:
            return False
        driver.preempt(NOTICE_S, "the cloud takes the machine")
        self.cluster.gone.add(whom)
        self.cluster.clock.after(NOTICE_S + 1.0, lambda: self.cluster.fall(whom))
        self._for(seconds, self._rent)
        return True

    def _join(self, whom: str, seconds: float) -> bool:
        if len(self.cluster.workers) >= 8:
            return False
        self._rent()
        return True

    def _rent(self) -> None:
        self.cluster.start(self.cluster.add_worker())

    # ---- the network

    def _partition(self, whom: str, seconds: float) -> bool:
        others = self.rng.sample(self._others(whom), self.rng.randint(1, len(self._others(whom))))
        for other in others:
            self._block(whom, other, seconds)
            self._block(other, whom, seconds)
        return True

    def _one_way(self, whom: str, seconds: float) -> bool:
        for other in self.rng.sample(self._others(whom), self.rng.randint(1, len(self._others(whom)))):
            self._block(whom, other, seconds)
        return True

    def _block(self, sender: str, receiver: str, seconds: float) -> None:
        network = self.cluster.network
        network.block(sender, receiver)
        self._for(seconds, lambda: network.unblock(sender, receiver))

    def _cut(self, whom: str, seconds: float) -> bool:
        return self.cluster.network.cut(whom, self.rng.choice(self._others(whom))) > 0

    def _clog(self, whom: str, seconds: float) -> bool:
        link = self.cluster.network.links[whom]
        link.clog = self.rng.choice((0.3, 0.05, 0.01))

        def undo() -> None:
            link.clog = 1.0

        self._for(seconds, undo)
        return True

    def _loss(self, whom: str, seconds: float) -> bool:
        network = self.cluster.network
        network.loss = self.rng.choice((0.02, 0.1, 0.3))

        def undo() -> None:
            network.loss = 0.0

        self._for(seconds, undo)
        return True

    # ---- disks, clocks, engines

    def _disk_full(self, whom: str, seconds: float) -> bool:
        disks: dict[str, list[Disk]] = {
            "coordinator": [self.cluster.coordinator.disk],
            "learner": [self.cluster.learner.disk, self.cluster.learner.chunks],
        }
        for disk in disks.get(whom) or [self.cluster.machines[whom].disk]:
            self._fill(disk, seconds)
        return True

    def _fill(self, disk: Disk, seconds: float) -> None:
        disk.is_full = True

        def undo() -> None:
            disk.is_full = False

        self._for(seconds, undo)

    def _bit_rot(self, whom: str, seconds: float) -> bool:
        disk = self.cluster.learner.chunks if whom == "learner" else None
        disk = self.cluster.machines[whom].disk if self._is_worker(whom) else disk
        return disk is not None and disk.rot(self.rng) is not None

    def _slow(self, whom: str, seconds: float) -> bool:
        if not self._is_worker(whom):
            return False
        machine = self.cluster.machines[whom]
        machine.slowdown = self.rng.choice((3.0, 20.0))
        self._set_speed(whom)

        def undo() -> None:
            machine.slowdown = 1.0
            self._set_speed(whom)

        self._for(seconds, undo)
        return True

    def _set_speed(self, whom: str) -> None:
        driver = self.cluster.drivers.get(whom)
        if isinstance(driver, WorkerDriver) and driver.engine is not None:
            driver.engine.slowdown = self.cluster.machines[whom].slowdown

    def _clock_jump(self, whom: str, seconds: float) -> bool:
        """Wall clocks are wrong by up to a few seconds, in either direction, and stay so."""
        self.cluster.hosts[whom].clock_offset_s = self.rng.uniform(-4.0, 4.0)
        return True

    def _drift(self, whom: str, seconds: float) -> bool:
        """Takes effect with the next process."""
        host = self.cluster.hosts[whom]
        if not self._kill(whom, seconds):
            return False
        host.drift = self.rng.uniform(0.98, 1.02)
        return True

    def _swap_refused(self, whom: str, seconds: float) -> bool:
        return self._engine_fault(whom, seconds, "refused")

    def _swap_wrong(self, whom: str, seconds: float) -> bool:
        return self._engine_fault(whom, seconds, "wrong")

    def _engine_fault(self, whom: str, seconds: float, kind: str) -> bool:
        if not self._is_worker(whom):
            return False
        faults = self.cluster.machines[whom].swap_faults
        setattr(faults, kind, self.rng.choice((0.2, 0.6)))
        self._for(seconds, lambda: setattr(faults, kind, 0.0))
        return True


def stormy_cluster(seed: int, sabotage: Sabotage = Sabotage.NONE) -> Cluster:
    """The cluster of a seed with its storm, and in two of five seeds with a malicious worker."""
    rng = derived_rng(seed, "storm of")
    malice = (
        rng.choice([kind for kind in Malice if kind not in (*LATER_KINDS, *CLAIMS)]) if rng.random() < 0.4 else None
    )
    later = derived_rng(seed, "kinds of malice that came later")
    if malice is None and later.random() < 0.2:
        malice = later.choice(LATER_KINDS)
    cluster = Cluster(Scene.of(seed, sabotage), malice=malice)
    if malice is not None:
        cluster.faults[f"malicious worker: {malice.value}"] += 1
        if len(cluster.workers) < 3:
            cluster.add_worker()
    workers = len(cluster.workers)
    outage = long_outage(seed, workers)
    Storm(cluster, storm(seed, workers) + outage, LONG_STORM_S if outage else STORM_S)
    return cluster
