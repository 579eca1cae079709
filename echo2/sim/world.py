"""All of echo2 in one process: the real coordinator, learner and worker daemons in a virtual world, from a seed.

`World(Scenario.of(seed)).run()` returns a `WorldOutcome`. Guarantees: same seed, same events in the same order
(`WorldOutcome.digest`), under any hash seed. Machines outlive processes: a process that fails or is killed is restarted on the
same machine, on the same disk or a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from echo2.base.errors import DiskFull, EchoError
from echo2.base.ids import RunId, Version
from echo2.base.rng import derived_rng
from echo2.broadcast.node import BroadcastNode, NodeCalls
from echo2.config.run import LearnerSection, RunConfig, RunSection, StalenessSection
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.hub import CoordinatorOptions, timed_section
from echo2.coordinator.money.provisioner import make_provider
from echo2.coordinator.store import SqlStore, StateChanges
from echo2.learner.learner import LearnerDaemon
from echo2.learner.options import LearnerLimits, LearnerOptions, RunFolder
from echo2.learner.publishing.publisher import SeedNode
from echo2.learner.rollouts.groups import Batch
from echo2.learner.startup import Prepared, prepare_with
from echo2.outside import here
from echo2.sim.inspector import Daemon, EventLog, Inspector, Observer, Truth, Violation
from echo2.sim.liars import Liar
from echo2.sim.machine import (
    CLOUD_CAP_USD_PER_HOUR,
    PRICE_USD_PER_HOUR,
    Process,
    VirtualCloud,
    VirtualDisk,
    VirtualMachine,
)
from echo2.sim.memory_net import MemoryNet
from echo2.sim.scenario import Scenario
from echo2.sim.simulated_engine import EngineFaults, VirtualEngines
from echo2.sim.tiny_model import TinyTrainer, base_weights, copied, fingerprint_of, tiny_source
from echo2.sim.virtual_loop import VirtualLoop
from echo2.sim.wires import AccessLink, Wires
from echo2.trust.tls import Credentials
from echo2.weights.fingerprint import fingerprint, key_of_run
from echo2.wire.gen.echo2.v1.journal_pb2 import JournalRecord
from echo2.worker.options import WorkerOptions
from echo2.worker.worker import WorkerDaemon

RUN = RunId("simulated")  # every world's
STEPS_MAX = 100_000  # more than a world ever trains: runs end by time
MBIT = 125_000.0  # bytes per second
LOOK_S = 5.0  # rarer would miss waits, oftener costs computing
# Invariant 6: a restart's replay, a lease's 120 s and a version fit several times.
PROGRESS_STEPS, PROGRESS_S = 3, 400.0
CATCH_UP_S = 150.0  # a keyframe over the slowest link after a refused peer's pause
RESTART_S = 3.0  # as an init system's delay
CLOSE_S = 30.0  # beyond every grace of the daemons
LEARNER_PORT, WORKER_PORT = 9100, 9000  # any; machines have addresses of their own


@dataclass(frozen=True, slots=True)
class WorldOutcome:
    """Result of one run. `failure`: the first violation; empty if there was none. `invariant`: its number, or 0."""

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
    events: tuple[str, ...] = field(repr=False, default=())


@dataclass(slots=True)
class WorkerTraits:
    """Properties of a worker's machine. `step_s`: seconds per decode step. `price`: USD/h."""

    slot_count: int
    step_s: float
    price: float
    faults: EngineFaults = field(default_factory=EngineFaults)
    liar: Liar | None = None


class World:
    """One run. `daemons`: the living ones, by machine name."""

    def __init__(self, scene: Scenario, workers: int | None = None, steps: int = STEPS_MAX) -> None:
        self.scenario, self.steps = scene, steps
        self.loop = VirtualLoop()
        in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.root = Path(tempfile.mkdtemp(prefix="echo2-sim-", dir=in_memory))
        self.events = EventLog(self.loop.time, self.root.name)
        self.truth = Truth(scene.staleness_bound)
        self.wires = Wires(self.loop, derived_rng(scene.seed, "network"))
        self.wires.chunk_scale = scene.chunk_scale
        self.failure: Violation | None = None
        self.observer = Observer(self)
        self.wires.tap = self.observer.tap
        self.rng: random.Random = derived_rng(scene.seed, "cluster")
        self.faults: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self.machines: dict[str, VirtualMachine] = {}
        self.traits: dict[str, WorkerTraits] = {}
        self.daemons: dict[str, Daemon] = {}
        self.inspector = Inspector(self)
        self.seed: BroadcastNode | None = None
        self.gone: set[str] = set()
        self.join_links: dict[str, str] = {}  # by role, and by name of a rented machine
        self.cloud = VirtualCloud(self, scene.offers_max) if scene.offers_max else None
        self._key = key_of_run(RUN)
        self.train_s = scene.train_s
        learner_up = 200 if scene.chunk_scale == 1 else 40  # slow enough that workers must relay chunks
        for name, up, down, rtt_s in (("coordinator", 400, 400, 0.02), ("learner", learner_up, 400, 0.04)):
            self._add_machine(name, AccessLink(up * MBIT, down * MBIT, rtt_s))
        for _ in range(workers or self.rng.randint(2, 4)):
            self.add_worker()

    # ---- machines

    def _add_machine(self, name: str, link: AccessLink) -> VirtualMachine:
        host = f"127.1.0.{len(self.machines) + 1}"
        machine = VirtualMachine(name, host, link, VirtualDisk(self.root / name), self.scenario.seed)
        machine.sync_s = self.scenario.sync_s
        self.machines[name] = machine
        self.wires.names[host] = name
        return machine

    def add_worker(self, liar: Liar | None = None) -> str:
        """Adds a machine and returns its name; `start` starts its process."""
        name = f"w{len(self.traits)}"
        rng = derived_rng(self.scenario.seed, "machine", name)
        up = rng.choice((50, 100, 200)) * MBIT
        self._add_machine(name, AccessLink(up, 2 * up, rng.choice((0.02, 0.08, 0.16))))
        self.traits[name] = WorkerTraits(
            rng.choice((4, 8, 12)), rng.uniform(0.1, 0.3), rng.uniform(0.2, 2.0), liar=liar
        )
        if liar is not None:
            self.machines[name].message_filter = liar
            self.truth.liars.add(name)
            self.faults[f"malicious worker: {liar.name}"] += 1
        return name

    def boot(self, join_link: str) -> str:
        """Adds a machine that the coordinator rents and returns its name."""
        name = self.add_worker()
        self.join_links[name], self.traits[name].price = join_link, PRICE_USD_PER_HOUR
        return name

    def take(self, name: str) -> None:
        """Removes the machine for good."""
        self.kill(name)
        self.gone.add(name)
        if self.cloud is not None:
            self.cloud.is_taken(name)

    @property
    def workers(self) -> list[str]:
        """Worker machines that have not been removed."""
        return [name for name in self.traits if name not in self.gone]

    def is_up(self, name: str) -> bool:
        process = self.machines[name].process
        return process is not None and not process.has_ended

    # ---- processes

    def start(self, name: str) -> None:
        if self.is_up(name) or name in self.gone or self.failure is not None:
            return
        machine = self.machines[name]
        machine.process = process = Process(machine, self.loop, lambda p: MemoryNet(p, self.wires, self._broke))
        self.events.tell(name, "starts")
        task = process.context.run(lambda: self.loop.create_task(self._life(name, process)))
        task.add_done_callback(lambda done: self._ended(name, process, done))

    async def _life(self, name: str, process: Process) -> None:
        daemon = self.daemons[name] = self._daemon(name, process)
        await daemon.run()

    def _daemon(self, name: str, process: Process) -> Daemon:
        if name == "coordinator":
            provider = self.cloud.provider if self.cloud is not None else make_provider
            return CoordinatorDaemon(
                self._coordinator_options(process), has_page=False, open_store=watched_store(self.observer.kept),
                garbage=lambda: contextlib.nullcontext(lambda: None),  # all daemons share one interpreter: see `uncollected`
                provider=provider,
            )  # fmt: skip
        if name == "learner":
            options, prepared = self._learner_options(process), self._preparer(process)
            return LearnerDaemon(options, make_broadcaster=self._seed_node, make_prepared=prepared)
        traits = self.traits[name]
        engines = VirtualEngines(traits.slot_count, traits.step_s, traits.faults)
        if traits.liar is not None:
            engines = traits.liar.engines(engines)
        return WorkerDaemon(self._worker_options(name, process), engines=engines)

    def _coordinator_options(self, process: Process) -> CoordinatorOptions:
        scene = self.scenario
        section = timed_section(
            host=process.machine.host, heartbeat_interval=2.0, suspect_after=6.0, gone_after=15.0, lease_timeout=25.0,
            report_interval=2.0, plan_interval=scene.plan_interval_s,
            offers=str(self.cloud.offers_file) if self.cloud is not None else "",
            usd_per_hour_cap=CLOUD_CAP_USD_PER_HOUR if self.cloud is not None else math.inf,
        )  # fmt: skip
        config = RunConfig(
            learner=LearnerSection(steps=self.steps),
            run=RunSection(name=RUN),
            staleness=StalenessSection(bound=scene.staleness_bound),
            coordinator=section,
        )
        return CoordinatorOptions(process.machine.disk.folder, config)

    def _learner_options(self, process: Process) -> LearnerOptions:
        scene, host = self.scenario, process.machine.host
        learner = {
            "steps": self.steps, "prompts_per_step": scene.groups_per_step, "rollouts_per_prompt": scene.rollouts_per_group,
            "checkpoint_every_steps": scene.checkpoint_every_steps, "drop_equal_groups": scene.drops_equal_rewards,
            "audit_share": scene.audit_share, "port": LEARNER_PORT, "advertise": f"{host}:{LEARNER_PORT}",
            "uplink_limit": f"{process.machine.link.up / scene.chunk_scale}B/s",
        }  # fmt: skip
        sections = {
            "run": {"name": RUN, "seed": scene.seed},
            "model": {"path": "tiny"},
            "learner": learner,
            "staleness": {"bound": scene.staleness_bound},
            "sampling": {"max_new_tokens": 96},
            "worker": {"draft_tokens": 1},  # engines that do not draw by their seeds are audited, not refused
            "task": {"eval_prompts": 4, "eval_every_steps": 3, "eval_samples": 2},
        }
        chain_max = scene.keyframe_chain_max
        limits = LearnerLimits(free_bytes_min=1, keyframe_chain_max=chain_max, evaluation_patience_s=20.0)
        return LearnerOptions(
            process.machine.disk.folder / "run", RunConfig.model_validate(sections), host=host,
            join_link=self.join_links["learner"], limits=limits,
        )  # fmt: skip

    def _worker_options(self, name: str, process: Process) -> WorkerOptions:
        host, limit = process.machine.host, process.machine.link.up / self.scenario.chunk_scale
        worker = {
            "engine": "embedded", "price_usd_per_hour": self.traits[name].price, "port": WORKER_PORT,
            "swap_mode": self.scenario.swap_mode.value, "uplink_limit": f"{limit}B/s",
        }  # fmt: skip
        return WorkerOptions(
            self.join_links.get(name) or self.join_links["worker"], process.machine.disk.folder / "worker",
            RunConfig.model_validate({"run": {"seed": self.scenario.seed}, "worker": worker}), name, listen_host=host,
            advertised_addresses=(f"{host}:{WORKER_PORT}",),
        )  # fmt: skip

    def _seed_node(self, credentials: Credentials, options: LearnerOptions, calls: NodeCalls) -> SeedNode:
        seed = SeedNode(credentials, options, calls)
        self.seed = seed.node
        return seed

    def node_of(self, name: str) -> BroadcastNode | None:
        """The broadcast node of a daemon; None if it has none yet."""
        daemon = self.daemons.get(name)
        if isinstance(daemon, LearnerDaemon):
            return self.seed
        worker = daemon.worker if isinstance(daemon, WorkerDaemon) else None
        return worker.node if worker is not None else None

    def _preparer(self, process: Process) -> Callable[[LearnerOptions, RunFolder], Prepared]:
        def make(options: LearnerOptions, folder: RunFolder) -> Prepared:
            scene, weights = self.scenario, base_weights(self.scenario.seed)
            self.truth.published(Version(0), fingerprint_of(weights))
            self.observer.run_fingerprints[Version(0)] = f"{fingerprint(weights, self._key):016x}"
            trainer = TinyTrainer(scene.seed, lambda: self.train_s, lambda *step: self._on_step(process, *step))
            prepared = prepare_with(trainer, options, folder, tiny_source(scene.seed, scene.turns))
            append = prepared.journal.append

            def watched(record: JournalRecord) -> None:
                append(record)
                self.observer.noted(process, record)

            prepared.journal.append = watched  # type: ignore[method-assign]
            self.observer.learner_prepared(process, prepared.groups)
            return prepared

        return make

    def _on_step(self, process: Process, batch: Batch, weights: dict[str, Tensor]) -> None:
        if not process.has_ended:
            version, bits = Version(batch.step + 1), fingerprint_of(weights)
            self.truth.fingerprints.setdefault(version, bits)
            self.observer.run_fingerprints[version] = f"{fingerprint(copied(weights), self._key):016x}"
            self.judged(lambda: self.truth.trained(batch, bits))

    def _ended(self, name: str, process: Process, done: asyncio.Task[None]) -> None:
        if process.has_ended:
            return  # killed by the simulation
        error = None if done.cancelled() else done.exception()
        text = f"{type(error).__name__}: {error}" if error is not None else "in order"
        self.events.tell(name, f"ends: {text}")
        if error is not None and not isinstance(error, EchoError):
            self._broke(name, error)
        self.restarts[f"{name.rstrip('0123456789')} {type(error).__name__ if error else 'ended'}"] += 1
        self._bury(name, process)
        if error is not None:
            self.after(RESTART_S, lambda: self.start(name))

    def kill(self, name: str) -> bool:
        """Kills the process as by SIGKILL; False if none is running."""
        process = self.machines[name].process
        if process is None or process.has_ended:
            return False
        self._bury(name, process)
        return True

    def _bury(self, name: str, process: Process) -> None:
        process.machine.disk.crash()
        self.wires.process_ended(process)
        self.daemons.pop(name, None)
        process.end()

    def _broke(self, name: str, error: BaseException) -> None:
        """Records a violation: a daemon raised an error that it should not."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(where.filename).name}:{where.lineno}"
        self.failed(Violation(5, f"{name}: {type(error).__name__} in {where.name} ({at}): {error}"))

    def failed(self, violation: Violation) -> None:
        if self.failure is None:
            self.failure = violation
            self.events.tell("checker", str(violation))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.wires.after(delay_s, act)

    # ---- the run

    def run(self, faults_until_s: float = 0.0) -> WorldOutcome:
        """Starts all daemons, runs through the faults, then waits for progress and for the newest version everywhere."""
        with _heard(self), uncollected():
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(self._play(faults_until_s))
                error = next(iter(self.loop.errors), "")
                if error and self.failure is None:
                    self.failed(Violation(5, error))
            finally:
                self._finish()
                asyncio.set_event_loop(None)
        failure, invariant = (str(self.failure), self.failure.invariant) if self.failure is not None else ("", 0)
        return WorldOutcome(
            self.scenario.seed, self.events.digest, failure, invariant, self.truth.step,
            max(self.observer.run_fingerprints, default=Version(0)), self.loop.time(),
            self.faults + self.wires.counts + self.observer.counts, self.truth.checks, self.restarts,
            self.events.lines(),
        )  # fmt: skip

    def _finish(self) -> None:
        for machine in self.machines.values():
            if machine.process is not None and not machine.process.has_ended:
                machine.process.end()
        with contextlib.suppress(RuntimeError):
            self.loop.run_until_complete(all_ended(self.loop))
        self.loop.close()
        shutil.rmtree(self.root, ignore_errors=True)

    async def _begin(self) -> None:
        self.start("coordinator")
        await self._until(lambda: bool(self._links_written()), 30.0)
        for delay_s, name in enumerate(("learner", *self.workers)):
            self.after(0.2 * delay_s, lambda name=name: self.start(name))  # type: ignore[misc]
        self.after(LOOK_S, self._look)

    async def _play(self, faults_until_s: float) -> None:
        await self._begin()
        while self.loop.time() < faults_until_s and self.failure is None:
            await asyncio.sleep(1.0)
        wanted = self.truth.step + PROGRESS_STEPS
        is_there = await self._until(lambda: self.truth.step >= wanted, PROGRESS_S)
        late = f"no {PROGRESS_STEPS} steps within {PROGRESS_S:.0f} s"
        self._check(is_there, f"{late}: at step {self.truth.step}, {self._waits()}")
        await self._await_newest()

    def _links_written(self) -> dict[str, str]:
        folder = self.machines["coordinator"].disk.folder / "links"
        for role in ("worker", "learner"):
            if (path := folder / f"{role}.link").exists():
                self.join_links[role] = path.read_text().strip()
        return self.join_links if len(self.join_links) >= 2 else {}

    async def _until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        until = self.loop.time() + limit_s
        while not holds() and self.loop.time() < until and self.failure is None:
            await asyncio.sleep(0.5)
        return holds() or self.failure is not None

    async def _await_newest(self) -> None:
        """Pauses training; then every worker must reach the newest version, and no admitted rollout may be lost."""
        self.train_s, self.inspector.holds_training = 10_000.0, True
        is_there = await self._until(lambda: not self._behind(), CATCH_UP_S)
        self._check(is_there, f"{self._behind()} are not back at the newest version: {self._waits()}")
        if self.observer.groups is not None:
            await self._until(self._has_all, LOOK_S)
            self.judged(lambda: self.truth.nothing_is_lost(self.observer.groups))  # type: ignore[arg-type]

    def _has_all(self) -> bool:
        with contextlib.suppress(Violation):  # a batch is briefly held by nobody between its draw and its step
            self.truth.nothing_is_lost(self.observer.groups)  # type: ignore[arg-type]
            return True
        return False

    def _check(self, holds: bool, text: str) -> None:
        self.judged(lambda: self.truth.check(6, holds, text))

    def judged(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Violation as violation:
            self.failed(violation)

    def _behind(self) -> list[str]:
        learner = self.daemons.get("learner")
        if not isinstance(learner, LearnerDaemon) or learner.learner is None:
            return ["learner"]
        newest = learner.learner.publisher.newest_version
        honest = [name for name in self.workers if name not in self.truth.liars]
        return [name for name in honest if self._version_of(name) != newest]

    def _version_of(self, name: str) -> Version | None:
        daemon = self.daemons.get(name)
        worker = daemon.worker if isinstance(daemon, WorkerDaemon) else None
        return worker.weights.live if worker is not None and worker.weights is not None else None

    def _waits(self) -> str:
        parts = []
        for name, daemon in self.daemons.items():
            if isinstance(daemon, WorkerDaemon):
                parts.append(f"{name} waits for {daemon.waits.longest()[0] or 'nothing'}")
            elif isinstance(daemon, LearnerDaemon):
                parts.append(f"learner waits for {daemon.waits_for[0] or 'nothing'}")
        return "; ".join(parts)

    def _look(self) -> None:
        """Checks the daemons every `LOOK_S`."""
        self.inspector.look()
        self.after(LOOK_S, self._look)

    def holds_leases(self, name: str) -> bool:
        daemon = self.daemons.get(name)
        return isinstance(daemon, WorkerDaemon) and daemon.worker is not None and bool(daemon.worker.leases.lease_ids)


def watched_store(on_write: Callable[[StateChanges], None]) -> Callable[[str, RunId, Path], SqlStore]:
    """Opens the real store, which then calls `on_write` with changes once they are stored."""

    def opened(url: str, run_id: RunId, mark: Path) -> SqlStore:
        store = SqlStore(url, run_id, mark)
        write = store.write

        def watched(changes: StateChanges) -> None:
            if (changes.rows or changes.log) and here().files.free_bytes(Path()) == 0:
                raise DiskFull("expected room for the coordinator's state")
            write(changes)
            on_write(changes)

        store.write = watched  # type: ignore[method-assign]
        return store

    return opened


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Turns garbage collection off during a run, and collects once at the end: a run is short, and this saves time."""
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        gc.enable()


async def all_ended(loop: VirtualLoop) -> None:
    """Waits until all tasks have ended. Tasks of ended processes are still closing their resources; cancelling them again would
    interrupt that, so it does so only after `CLOSE_S`."""
    for _ in range(10):
        rest = asyncio.all_tasks(loop) - {asyncio.current_task()}
        if not rest:
            return
        _, pending = await asyncio.wait(rest, timeout=CLOSE_S)
        for task in pending:
            task.cancel()


class _LogListener(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        owner = here()
        name = owner.name if isinstance(owner, Process) and not owner.has_ended else ""
        if name:
            self._world.events.tell(name, f"{record.levelname.lower()}: {record.getMessage()}")
            error = record.exc_info[1] if record.exc_info and record.name == "echo2.guard" else None
            if error is not None and not isinstance(error, EchoError):
                self._world._broke(name, error)


@contextlib.contextmanager
def _heard(world: World) -> Iterator[None]:
    """Adds the daemons' log messages to the event log."""
    root, handler = logging.getLogger("echo2"), _LogListener(world)
    before = (root.level, root.propagate, root.handlers[:])
    root.setLevel(logging.INFO)
    root.propagate, root.handlers[:] = False, [handler]
    try:
        yield
    finally:
        root.setLevel(before[0])
        root.propagate, root.handlers[:] = before[1], before[2]
