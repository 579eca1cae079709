"""A machine of the virtual world, its files, the processes that run on it one after another, and the cloud that rents machines out.

Guarantees: a process is the `Outside` of everything that its daemon starts; after its end, nothing it does reaches the network, and
it writes only to an abandoned copy of its files. These are real files in a folder of the machine's own: data synced through `Files`
survives a power cut; of other data only a part does, possibly torn; a file never synced may be gone, and a rename not synced with
its folder undone. SQLite syncs by itself: of its files, a power cut only shortens the write-ahead log. A full disk accepts no more.
A rented machine outlives every process of the coordinator, and costs money until
it is released or preempted; renting is idempotent per machine ID. The cloud is slow and sometimes refuses, and its answer may be
lost with the process that asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import os
import random
import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo2.base.errors import ResourceError, Unreachable
from echo2.base.rng import derived_rng
from echo2.coordinator.hub import CoordinatorOptions
from echo2.coordinator.money.provisioning import MachineOffer, MachineState, ObservedMachine, Provider
from echo2.outside import entered
from echo2.outside.net import Net
from echo2.sim.virtual_loop import VirtualLoop
from echo2.sim.wires import AccessLink

if TYPE_CHECKING:
    from echo2.sim.liars import Liar
    from echo2.sim.world import World

UNIX_EPOCH_S = 1_700_000_000.0  # a date after which certificates are valid; any would do
PEERS = "broadcast"
"""What a `Liar` knows connections between nodes as, where calls have the name of their method."""


@dataclass(slots=True)
class VirtualMachine:
    """A machine. `clock_offset_s`, `drift`: error of its wall clock, and its clock's seconds per true second. `sync_s`: seconds
    per file sync. `lives`: processes so far. `message_filter`: None for an honest machine."""

    name: str
    host: str
    link: AccessLink
    disk: VirtualDisk
    seed: int
    clock_offset_s: float = 0.0
    drift: float = 1.0
    sync_s: float = 0.0
    lives: int = 0
    message_filter: Liar | None = None
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

    since_boot = monotonic  # virtual machines do not sleep


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

    async def rent(self, machine_id: str, join_link: str, usd_per_hour: float) -> str:
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


PLENTY_BYTES = 1 << 40  # a disk that is never full
# SQLite syncs by itself, outside these files; locks and sockets need none.
SELF_SYNCED = (".sqlite", ".sqlite-wal", ".sqlite-shm", "lock", ".lock", ".sock", ".link")


class VirtualDisk:
    """The disk. `folder`: where the present process of the machine keeps its files."""

    def __init__(self, root: Path) -> None:
        self._root, self._lives = root, 0
        self.folder = root / "0"
        self.folder.mkdir(parents=True)
        self.is_full = False
        self._synced: dict[str, int] = {}  # path in the folder -> bytes that survive
        self._logs: dict[str, tuple[bytes, int]] = {}  # by path of a SQLite log: its salt and the frames that survive
        self._renamed: dict[str, bytes | None] = {}  # renamed files whose folder is not synced yet -> former content
        self._moved: list[tuple[str, str]] = []  # such folders, in order: former and new name

    def key(self, path: Path) -> str | None:
        with contextlib.suppress(ValueError):
            return str(path.relative_to(self.folder))
        return None  # written by a process that has ended

    def synced(self, path: Path) -> None:
        key = self.key(path)
        if key is None:
            return
        if path.is_dir():
            for name in [name for name in self._renamed if str(Path(name).parent) == (key or ".")]:
                del self._renamed[name]
            self._moved = [names for names in self._moved if str(Path(names[1]).parent) != (key or ".")]
            return
        self._synced[key] = path.stat().st_size
        if path.name.endswith("-wal"):
            self._logs[key] = _frames_of(path.read_bytes())

    def renamed(self, old: Path, new: Path, before: bytes | None) -> None:
        old_key, new_key = self.key(old), self.key(new)
        if old_key is None or new_key is None:
            return
        if new.is_dir():
            self._moved.append((old_key, new_key))
            self._move(old_key, new_key)
            return
        self._synced[new_key] = self._synced.pop(old_key, 0)
        self._renamed[new_key] = before

    def _move(self, old_key: str, new_key: str) -> None:
        for name in [name for name in self._synced if name.startswith(f"{old_key}/")]:
            self._synced[new_key + name.removeprefix(old_key)] = self._synced.pop(name)

    def crash(self) -> None:
        """Copies the files for the next process; whatever the ended process still writes goes to the old copy."""
        old, self._lives = self.folder, self._lives + 1
        self.folder = self._root / str(self._lives)
        shutil.copytree(old, self.folder, symlinks=True, ignore=_sockets)

    def power_cut(self, rng: random.Random) -> int:
        """Discards unsynced data, after `crash`; returns how many files lost something."""
        lost = 0
        for old_key, new_key in reversed(self._moved[rng.randint(0, len(self._moved)) :] if self._moved else ()):
            if (self.folder / new_key).is_dir():
                (self.folder / new_key).rename(self.folder / old_key)
                self._move(new_key, old_key)
                lost += 1
        self._moved.clear()
        for path in sorted(self.folder.rglob("*.sqlite-wal")):
            lost += _cut_log(path, rng, self._logs.get(str(path.relative_to(self.folder))))
        for path in sorted(self.folder.rglob("*")):
            key = str(path.relative_to(self.folder))
            if not path.is_file() or path.name.endswith(SELF_SYNCED) or "-wal" in path.name or "-shm" in path.name:
                continue
            if key in self._renamed and rng.random() < 0.5:
                lost += 1
                before = self._renamed[key]
                if before is None:
                    path.unlink()
                else:
                    path.write_bytes(before)
                continue
            size = path.stat().st_size
            synced = min(size, self._synced.get(key, 0))
            if synced < size:
                lost += 1
                dated = path.stat()
                os.truncate(path, rng.randint(synced, size))
                os.utime(path, ns=(dated.st_atime_ns, dated.st_mtime_ns))
                if key not in self._synced and rng.random() < 0.5:
                    path.unlink()
        self._renamed.clear()
        self._synced = {key: size for key, size in self._synced.items() if (self.folder / key).exists()}
        for path in self.folder.rglob("*"):  # whatever survived the power cut is on the disk
            if path.is_file():
                self._synced[str(path.relative_to(self.folder))] = path.stat().st_size
        return lost

    def wipe(self) -> None:
        """Empties the disk, as if it were a new one."""
        for path in list(self.folder.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._synced.clear()
        self._renamed.clear()
        self._moved.clear()

    def rot(self, rng: random.Random, pattern: str) -> str | None:
        """Flips one bit in a random file that matches; returns the place, or None if no file matches."""
        files = [path for path in sorted(self.folder.glob(pattern)) if path.is_file() and path.stat().st_size > 64]
        if not files:
            return None
        path = rng.choice(files)
        before = path.stat()
        place = rng.randrange(before.st_size)
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return f"byte {place} of {path.name}"


class VirtualFiles:
    """`Files` of one process. `now`: virtual time, for the files' timestamps. `synced`: called by each sync, to spend its time."""

    def __init__(self, disk: VirtualDisk, now: Callable[[], float], synced: Callable[[], None]) -> None:
        self._disk, self._now, self._synced = disk, now, synced

    def check_room(self) -> None:
        if self._disk.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, handle: int, data: bytes | memoryview) -> int:
        return self._dated(handle, lambda: os.write(handle, data))

    def write_at(self, handle: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        return self._dated(handle, lambda: os.pwritev(handle, list(parts), offset))

    def _dated(self, handle: int, write: Callable[[], int]) -> int:
        """A file that a full disk leaves empty has a virtual time, too: files are read in the order of their times."""
        try:
            self.check_room()
            return write()
        finally:
            os.utime(handle, (self._now(), self._now()))

    def sync(self, handle: int) -> None:
        self._synced()
        self._disk.synced(Path(f"/proc/self/fd/{handle}").readlink())

    def sync_path(self, path: Path) -> None:
        self._synced()
        self._disk.synced(path)

    def rename(self, old: Path, new: Path) -> None:
        before = new.read_bytes() if new.is_file() else None
        old.replace(new)
        self._disk.renamed(old, new, before)

    def free_bytes(self, folder: Path) -> int:
        return 0 if self._disk.is_full else PLENTY_BYTES


LOG_HEADER_BYTES, FRAME_HEADER_BYTES, BACKFILLED_AT = 32, 24, 96
"""Header sizes of SQLite's write-ahead log, and the offset in its index of the number of frames already in the database file."""


def _frame_bytes(log: bytes) -> int:
    return FRAME_HEADER_BYTES + int.from_bytes(log[8:12], "big")


def _frames_of(log: bytes) -> tuple[bytes, int]:
    """The log's salt, which changes when the log starts over, and its number of frames."""
    salt, size, count = log[16:24], _frame_bytes(log), 0
    while log[(at := LOG_HEADER_BYTES + count * size) + 8 : at + 16] == salt and at + size <= len(log):
        count += 1
    return salt, count


def _cut_log(path: Path, rng: random.Random, synced: tuple[bytes, int] | None) -> bool:
    """Truncates a log at a random place after the frames that the database file holds and those `synced`. False if nothing is
    lost."""
    log, index = path.read_bytes(), path.with_name(path.name.replace("-wal", "-shm"))
    if len(log) < LOG_HEADER_BYTES or not index.exists():
        return False
    salt, count = _frames_of(log)
    frame_bytes = _frame_bytes(log)
    with index.open("rb") as file:
        file.seek(BACKFILLED_AT)
        frames = int.from_bytes(file.read(4), sys.byteorder)
    if synced is not None and synced[0] == salt:
        frames = max(frames, synced[1])
    if frames >= count:
        return False
    end = LOG_HEADER_BYTES + rng.randint(frames, count) * frame_bytes
    os.truncate(path, min(len(log), end + rng.randrange(frame_bytes)))
    return True


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if stat.S_ISSOCK((Path(folder) / name).lstat().st_mode)]
