"""A machine of the virtual world, the processes that run on it one after another, and the cloud that rents machines out.

Guarantees: a process is the `Outside` of everything that its daemon starts; after its end, nothing it does reaches the network, and
it writes only to an abandoned copy of its files. A rented machine outlives every process of the coordinator, and costs money until
it is released or preempted; renting is idempotent per machine ID. The cloud is slow and sometimes refuses, and its answer may be
lost with the process that asked. Leaves to others: which daemon runs, restarts (`World`), when machines are preempted (storm).
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from echo2.base.errors import ResourceError, Unreachable
from echo2.base.rng import derived_rng
from echo2.coordinator.hub import CoordinatorOptions
from echo2.coordinator.money.provisioning import MachineOffer, MachineState, ObservedMachine, Provider
from echo2.outside import entered
from echo2.outside.net import Net
from echo2.sim.virtual_files import VirtualDisk, VirtualFiles
from echo2.sim.virtual_loop import VirtualLoop
from echo2.sim.wires import AccessLink

if TYPE_CHECKING:
    from echo2.sim.world import World

UNIX_EPOCH_S = 1_700_000_000.0  # a date after which certificates are valid; any would do
PEERS = "broadcast"
"""What a `MessageFilter` knows connections between nodes as, where calls have the name of their method."""


class MessageFilter(Protocol):
    """Alters a dishonest machine's messages. `side`: 0 for the calling side, 1 for the serving side."""

    def says(self, method: str, side: int, data: bytes) -> Sequence[bytes]:
        """The messages to send instead of `data`, any number of them."""

    def hears(self, method: str, side: int, data: bytes) -> bool:
        """Whether the daemon receives the message."""


@dataclass(slots=True)
class VirtualMachine:
    """A machine. `clock_offset_s`, `drift`: error of its wall clock, and its clock's seconds per true second.

    `sync_s`: seconds per file sync. `lives`: processes so far. `message_filter`: None for an honest machine.
    """

    name: str
    host: str
    link: AccessLink
    disk: VirtualDisk
    seed: int
    clock_offset_s: float = 0.0
    drift: float = 1.0
    sync_s: float = 0.0
    lives: int = 0
    message_filter: MessageFilter | None = None
    process: Process | None = field(default=None, repr=False)


class Process:
    """One life of a daemon: its clock, network, files and randomness."""

    def __init__(self, machine: VirtualMachine, loop: VirtualLoop, net: Any) -> None:
        machine.lives += 1
        self.machine, self.loop, self.life = machine, loop, machine.lives
        self.is_frozen = self.has_ended = False
        self.held: list[asyncio.Handle] = []
        self.clock = _Clock(machine, loop)
        self.files = VirtualFiles(machine.disk, loop.time, lambda: loop.spend(machine.sync_s))
        self.rng: random.Random = derived_rng(machine.seed, "process", machine.name, machine.lives)
        self.net: Net = net(self)
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        with entered(self):
            self.context = contextvars.copy_context()

    @property
    def name(self) -> str:
        return self.machine.name

    def began(self, task: asyncio.Task[Any]) -> None:
        """Registers a new task of this process."""
        number: int = task.number  # type: ignore[attr-defined]
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def end(self) -> None:
        """Ends the process as by SIGKILL. Nothing that its tasks do while being cancelled has an effect outside."""
        self.has_ended, self.is_frozen = True, False
        self.held.clear()
        for task in list(self._tasks.values()):
            task.cancel()

    def thaw(self) -> None:
        if self.is_frozen:
            self.is_frozen = False
            held, self.held = self.held, []
            self.loop.release(held)


class _Clock:
    def __init__(self, machine: VirtualMachine, loop: VirtualLoop) -> None:
        self._machine, self._loop = machine, loop

    def unix_now(self) -> float:
        return UNIX_EPOCH_S + self._loop.time() * self._machine.drift + self._machine.clock_offset_s

    def monotonic(self) -> float:
        return 1000.0 + self._loop.time() * self._machine.drift


ANSWER_S = (0.1, 6.0)  # shortest and longest answer time; the longest exceeds the caller's timeout
BOOT_S = (4.0, 15.0)  # short beside a storm, so that machines come and go within one
PRICE_USD_PER_HOUR = 0.5  # any price above 0: plans must count it
CLOUD_CAP_USD_PER_HOUR = 1000.0  # practically unlimited; without a cap, nothing is rented
NAME = "spot"  # of the one offer


@dataclass(slots=True)
class Rental:
    """One rented machine. `worker`: name of the virtual machine that boots on it."""

    worker: str
    observed: ObservedMachine


class VirtualCloud:
    """A `Provider` of a world's machines."""

    name = "command"

    def __init__(self, world: World, machines_max: int) -> None:
        self.offers_file = world.root / "offers.toml"
        self.offers_file.write_text(
            f'[[offer]]\nname = "{NAME}"\nprovider = "command"\nmachines_max = {machines_max}\n'
            f"usd_per_hour = {PRICE_USD_PER_HOUR}\nis_spot = true\n"
        )
        self.there: dict[str, Rental] = {}
        self._world, self._counts = world, world.faults
        self._rng: random.Random = derived_rng(world.scenario.seed, "answers of the cloud")

    def provider(self, offer: MachineOffer, run: CoordinatorOptions) -> Provider:
        """Called by the coordinator to get the provider of an offer."""
        return self

    # ---- the protocol

    async def rent(self, machine_id: str, join_link: str) -> str:
        await self._answer()
        if machine_id not in self.there:
            if self._rng.random() < 0.2:
                self._counts["cloud: no machine to be had"] += 1
                raise ResourceError("expected room for a machine, the zone has none now")
            rental = self.there[machine_id] = Rental(
                self._world.boot(join_link), ObservedMachine(MachineState.STARTING)
            )  # fmt: skip
            self._counts["cloud: machine rented"] += 1
            self._world.after(self._rng.uniform(*BOOT_S), lambda: self._up(machine_id, rental))
        await self._answer()  # if the process ends here, it has a machine without knowing
        return ""

    async def release(self, machine_id: str) -> None:
        await self._answer()
        rental = self.there.pop(machine_id, None)
        if rental is not None:
            self._counts["cloud: machine given back"] += 1
            self._world.after(0.0, lambda: self._world.take(rental.worker))
        await self._answer()

    async def observe(self) -> dict[str, ObservedMachine]:
        await self._answer()
        return {machine_id: rental.observed for machine_id, rental in self.there.items()}

    async def _answer(self) -> None:
        if self._rng.random() < 0.1:
            self._counts["cloud: does not answer"] += 1
            raise Unreachable("expected the cloud's answer, there is none")
        await asyncio.sleep(self._rng.uniform(*ANSWER_S) if self._rng.random() < 0.2 else ANSWER_S[0])

    # ---- life of a machine

    def _up(self, machine_id: str, rental: Rental) -> None:
        if self.there.get(machine_id) is rental:
            rental.observed = ObservedMachine(MachineState.RUNNING)
            self._world.start(rental.worker)

    def is_told(self, worker: str) -> None:
        """Gives notice that this worker's machine will be preempted."""
        for rental in self.there.values():
            if rental.worker == worker:
                rental.observed = ObservedMachine(MachineState.ENDING, "the cloud takes the machine")
                self._counts["cloud: preemption told"] += 1

    def is_taken(self, worker: str) -> None:
        """Removes this worker's machine: it was preempted."""
        for machine_id in [key for key, rental in self.there.items() if rental.worker == worker]:
            del self.there[machine_id]
            self._counts["cloud: machine taken"] += 1
