"""A machine of the virtual world, and the processes that run on it one after another.

Guarantees: a process is the `Outside` of everything that its daemon starts; after its end, nothing it does reaches the
network, and it writes only to an abandoned copy of its files. Leaves to others: which daemon runs, restarts (`World`).
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from echo2.base.rng import derived_rng
from echo2.outside import entered
from echo2.outside.net import Net
from echo2.sim.virtual_files import VirtualDisk, VirtualFiles
from echo2.sim.virtual_loop import VirtualLoop
from echo2.sim.wires import AccessLink

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
