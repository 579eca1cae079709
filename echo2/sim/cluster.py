"""The whole of echo2 in one process: coordinator, learner and workers on a virtual clock, from a seed.

`Cluster(Scene.of(seed)).run()` gives an `Outcome`. Guarantees: same seed, same sabotage, same events in the same order
(`Outcome.digest`). Machines live longer than processes: a process that ends is started again by whoever looks after the
machine, with its disk or without. Leaves to others: what goes wrong (faults), what must hold (checkers).
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from echo2.base.errors import DiskFull, EchoError
from echo2.base.ids import PeerId, Version
from echo2.base.rng import derived_rng, derived_seed
from echo2.broadcast.stalls import FORGOTTEN_S
from echo2.sim.broadcast_driver import BroadcastDriver
from echo2.sim.checkers import Truth, Violation
from echo2.sim.clock import VirtualClock
from echo2.sim.coordinator_driver import CoordinatorDriver, CoordinatorMachine
from echo2.sim.disk import ChunkDisk, CoordinatorDisk, LearnerDisk
from echo2.sim.host import Host
from echo2.sim.learner_driver import LearnerDriver, LearnerMachine
from echo2.sim.malice import Malice, MaliciousWorker
from echo2.sim.network import AccessLink, Network
from echo2.sim.scene import Sabotage, Scene
from echo2.sim.story import Story
from echo2.sim.worker_driver import WorkerDriver, WorkerMachine
from echo2.trust.identity import Identity

MBIT = 125_000.0
LOOK_S = 5.0
PROGRESS_STEPS = 4
PROGRESS_S = 400.0
CATCH_UP_S = 150.0
REPORT_WAIT_S = 50.0
LEASE_SLACK_S = 5.0
STALL_SLACK_S = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`failure` is empty when everything held."""

    seed: int
    digest: str
    failure: str
    invariant: int
    steps: int
    version: Version
    virtual_s: float
    faults: Counter[str]
    checks: Counter[int]
    restarts: Counter[str]
    story: tuple[str, ...] = field(repr=False, default=())


class Cluster:
    def __init__(self, scene: Scene, workers: int | None = None, malice: Malice | None = None) -> None:
        self.scene = scene
        self.clock = VirtualClock()
        self.story = Story(self.clock.now)
        self.truth = Truth(scene.staleness_bound)
        self.network = Network(self.clock, derived_rng(scene.seed, "network"))
        self.rng: random.Random = derived_rng(scene.seed, "cluster")
        self.faults: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self.hosts: dict[str, Host] = {}
        self.drivers: dict[str, CoordinatorDriver | LearnerDriver | WorkerDriver] = {}
        self.machines: dict[str, WorkerMachine] = {}
        self.malice: dict[str, Malice] = {}
        self.gone: set[str] = set()
        self.stormy_s = 0.0
        self._numbers = 0
        scene.address_of = self._address_of
        self.coordinator = CoordinatorMachine(CoordinatorDisk("coordinator"))
        self.learner = LearnerMachine(self._identity("learner"), LearnerDisk("learner"), ChunkDisk("learner"))
        self._add_host("coordinator", AccessLink(400 * MBIT, 400 * MBIT, 0.02), self._identity("coordinator"))
        self._add_host("learner", AccessLink(200 * MBIT, 400 * MBIT, 0.04), self.learner.identity)
        for number in range(workers or self.rng.randint(2, 5)):
            self.add_worker(malice if number == 0 else None)

    # ---- machines

    def _identity(self, name: str) -> Identity:
        raw = b"".join(derived_seed(self.scene.seed, "identity", name, i).to_bytes(8, "big") for i in range(4))
        return Identity.from_private_bytes(raw)

    def _add_host(self, name: str, link: AccessLink, identity: Identity) -> Host:
        host = Host(name, self.clock, self.story)
        self.hosts[name] = host
        self.network.links[name] = link
        self.network.peer_ids[name] = identity.peer_id
        return host

    def add_worker(self, malice: Malice | None = None) -> str:
        """One more machine; its process is started by `start`."""
        name = f"w{self._numbers}"
        self._numbers += 1
        rng = derived_rng(self.scene.seed, "machine", name)
        identity = self._identity(name)
        up = rng.choice((50, 100, 200)) * MBIT
        self._add_host(name, AccessLink(up, 2 * up, rng.choice((0.02, 0.08, 0.16))), identity)
        machine = WorkerMachine(
            name, identity, ChunkDisk(name), rng.choice((4, 8, 12)), rng.uniform(0.1, 0.3), price=rng.uniform(0.2, 2.0)
        )
        if self.scene.sabotage is Sabotage.NO_FINGERPRINT_CHECK:
            machine.swap_faults.wrong = 0.3
        self.machines[name] = machine
        if malice is not None:
            self.malice[name] = malice
            self.truth.liars.add(name)
            self.truth.liar_ids.add(identity.peer_id)
        return name

    def _address_of(self, peer: PeerId) -> str | None:
        return next((name for name, known in self.network.peer_ids.items() if known == peer), None)

    @property
    def workers(self) -> list[str]:
        """Machines that are still there."""
        return [name for name in self.machines if name not in self.gone]

    # ---- processes

    def start(self, name: str) -> None:
        host = self.hosts[name]
        if host.is_up or name in self.gone:
            return
        host.rise()
        host.on_error = lambda error: self._ended(name, error)
        self.story.tell(name, "starts")
        driver = self._driver(name, host)
        self.drivers[name] = driver
        try:
            driver.start()
        except EchoError as error:
            self._ended(name, error, is_start=True)
            return
        self.truth.came_back(name, "")

    def _driver(self, name: str, host: Host) -> CoordinatorDriver | LearnerDriver | WorkerDriver:
        if name == "coordinator":
            return CoordinatorDriver(self.scene, self.truth, host, self.coordinator, self.network)
        if name == "learner":
            return LearnerDriver(self.scene, self.truth, host, self.learner, self.network)
        if name in self.malice:
            return MaliciousWorker(self.scene, self.truth, host, self.machines[name], self.network, self.malice[name])
        return WorkerDriver(self.scene, self.truth, host, self.machines[name], self.network)

    def _ended(self, name: str, error: EchoError, is_start: bool = False) -> None:
        """An error that nobody caught ended the process: whoever looks after the machine starts it again."""
        self.story.tell(name, f"ends: {type(error).__name__}: {error}")
        self.restarts[f"{name.rstrip('0123456789')} {type(error).__name__}"] += 1
        if is_start and not isinstance(error, DiskFull):
            self.truth.came_back(name, f"{type(error).__name__}: {error}")
        self.fall(name)
        self.clock.after(3.0, lambda: self.start(name))

    def fall(self, name: str) -> None:
        """The process ends; its sockets are closed."""
        host = self.hosts[name]
        if not host.is_up:
            return
        self.network.process_ended(host)
        host.fall()
        self.drivers.pop(name, None)

    # ---- looking

    def learner_driver(self) -> LearnerDriver | None:
        driver = self.drivers.get("learner")
        return driver if isinstance(driver, LearnerDriver) else None

    def worker_drivers(self) -> dict[str, WorkerDriver]:
        return {name: d for name, d in self.drivers.items() if isinstance(d, WorkerDriver)}

    def _look(self) -> None:
        """Every `LOOK_S`: nobody waits silently or without end."""
        for name, worker in self.worker_drivers().items():
            if name in self.malice or self.hosts[name].is_frozen or worker.has_left:
                continue
            text = "" if self.scene.sabotage is Sabotage.SILENT_WAIT else worker.waits_for
            self.truth.waits(name, not worker.assignments.lease_ids, text)
            self.truth.waits_since(name, worker.oldest_report_s, REPORT_WAIT_S, "a verdict")
            self._look_at_way(name, worker.broadcast)
        learner = self.learner_driver()
        if learner is not None:
            self.truth.waits("learner", not learner.is_busy and learner.is_drawing, learner.waits_for)
        coordinator = self.drivers.get("coordinator")
        if isinstance(coordinator, CoordinatorDriver) and not self.hosts["coordinator"].is_frozen:
            late_s = max(
                (
                    coordinator.now() - max(lease.deadline, coordinator.started_at)
                    for lease in coordinator.book.leases.values()
                ),
                default=0.0,
            )
            self.truth.waits_since("coordinator", late_s, LEASE_SLACK_S, "a lease past its deadline")
            self.truth.waits(
                "coordinator", coordinator.book.queued > 0, coordinator.waits()[0][0] if coordinator.waits() else ""
            )
        self.clock.after(LOOK_S, self._look)

    def _look_at_way(self, name: str, node: BroadcastDriver) -> None:
        self.truth.asks(name, node.unasked)
        stalled_s = node.stalls.longest_s(node.entries, node.host.now())
        self.truth.waits_since(name, stalled_s, FORGOTTEN_S + STALL_SLACK_S, "another try of what has stopped coming")

    # ---- the run

    def run(self, faults_until_s: float = 0.0) -> Outcome:
        """Starts everything, lets faults happen, lets them stop, waits for progress and for the newest version."""
        failure, invariant = "", 0
        try:
            for delay_s, name in enumerate(("coordinator", "learner", *self.workers)):
                self.clock.after(0.2 * delay_s, lambda name=name: self.start(name))  # type: ignore[misc]
            self.clock.after(LOOK_S, self._look)
            self.clock.run(faults_until_s)
            self._await_progress()
            self._await_newest()
        except Violation as violation:
            failure, invariant = str(violation), violation.invariant
        except (AssertionError, LookupError, TypeError, ValueError) as error:  # a core broke: as bad as a violation
            where = traceback.extract_tb(error.__traceback__)[-1]
            failure = f"{type(error).__name__} in {where.name} ({Path(where.filename).name}:{where.lineno}): {error}"
        if failure:
            self.story.tell("checker", failure)
        return Outcome(
            self.scene.seed, self.story.digest, failure, invariant, self.truth.step,
            max(self.truth.fingerprints, default=Version(0)), self.clock.now(), self.faults + self.network.counts,
            self.truth.checks, self.restarts, tuple(self.story.lines()),
        )  # fmt: skip

    def _wait(self, holds, limit_s: float) -> bool:  # type: ignore[no-untyped-def]
        until = self.clock.now() + limit_s
        while not holds() and self.clock.now() < until:
            self.clock.run(self.clock.now() + 1.0)
        return bool(holds())

    def _await_progress(self) -> None:
        wanted = self.truth.step + PROGRESS_STEPS
        is_there = self._wait(lambda: self.truth.step >= wanted, PROGRESS_S)
        self.truth.progress(
            is_there, f"no {PROGRESS_STEPS} steps within {PROGRESS_S:.0f} s: at step {self.truth.step}, {self._waits()}"
        )

    def _await_newest(self) -> None:
        """Training stops: every honest worker must be back and at the newest version, nothing admitted may be lost."""
        learner = self.learner_driver()
        self.truth.progress(learner is not None, "the learner does not run")
        assert learner is not None
        learner.is_drawing = False
        is_there = self._wait(lambda: not self._behind(), CATCH_UP_S)
        self.truth.progress(is_there, f"{self._behind()} are not back at the newest version: {self._waits()}")
        self.truth.nothing_is_lost(learner.batcher, learner.drawn)

    def _behind(self) -> list[str]:
        learner = self.learner_driver()
        if learner is None:
            return ["learner"]
        behind = []
        for name in self.workers:
            driver = self.drivers.get(name)
            if name in self.malice or (isinstance(driver, WorkerDriver) and driver.has_left):
                continue
            if not isinstance(driver, WorkerDriver) or driver.live != learner.newest_version or not driver.is_connected:
                behind.append(name)
        return behind

    def _waits(self) -> str:
        parts = [f"{name} waits for {worker.waits_for or 'nothing'}" for name, worker in self.worker_drivers().items()]
        learner = self.learner_driver()
        parts.append(f"learner waits for {learner.waits_for or 'nothing'}" if learner else "no learner")
        return "; ".join(parts)
