"""Parts that daemons of the virtual world get instead of real ones: dashboard page, garbage collection pauses, watched store,
machine and engines. Also helpers to run and end a world."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from echo2.base.errors import DiskFull
from echo2.base.ids import RunId
from echo2.coordinator.runtime.commands import Commands
from echo2.coordinator.runtime.store import SqlStore
from echo2.coordinator.saved import SavedState, StoreChanges
from echo2.cost_model.sizing import Fit
from echo2.outside import here
from echo2.sim.made_up_engine import CONTEXT_TOKENS, EngineFaults, MadeUpEngine
from echo2.sim.tiny_picks import Picks, Says, honest_scores
from echo2.sim.virtual_loop import VirtualLoop
from echo2.trust.runtime.tls import Credentials
from echo2.worker.engine import Engine
from echo2.worker.findings import Finding
from echo2.worker.options import EngineChoice, WorkerOptions
from echo2.worker.runtime.machine import WorkerMachine

GIB = 1 << 30
CLOSE_S = 30.0


class NoPage:
    """A dashboard page that serves nothing."""

    url = address = "http://nowhere/"
    token_file: Path | None = None

    def __init__(self, host: str, port: int) -> None:
        self.port = port
        self._stopped = asyncio.Event()

    def page(self, commands: Commands, folder: Path, keys: Credentials) -> NoPage:
        return self

    def close(self) -> None:
        pass

    async def run(self) -> None:
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()


class NoPauses:
    """Replaces the daemon's control of garbage collection: all daemons share one interpreter here (see `uncollected`)."""

    def __enter__(self) -> NoPauses:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        pass

    def tick(self) -> None:
        pass


class WatchedStore:
    """The real store; calls `kept` with changes once they are stored."""

    def __init__(self, url: str, run_id: RunId, mark: Path, kept: Callable[[StoreChanges], None]) -> None:
        self._store, self._kept = SqlStore(url, run_id, mark), kept

    @classmethod
    def opener(cls, kept: Callable[[StoreChanges], None]) -> Callable[[str, RunId, Path], WatchedStore]:
        return lambda url, run_id, mark: cls(url, run_id, mark, kept)

    def load(self) -> SavedState:
        return self._store.load()

    def write(self, changes: StoreChanges) -> None:
        if not changes.is_empty() and here().files.free_bytes(Path()) == 0:
            raise DiskFull("expected room for the coordinator's state")
        self._store.write(changes)
        self._kept(changes)

    def prune(self, events_kept: int, samples_kept: int) -> None:
        self._store.prune(events_kept, samples_kept)

    def checkpoint(self) -> None:
        self._store.checkpoint()

    def close(self) -> None:
        self._store.close()


class VirtualEngines:
    """`Engines` of a virtual machine."""

    def __init__(
        self, picks: Picks, slot_count: int, step_s: float, faults: EngineFaults, says: Says = honest_scores
    ) -> None:
        self._picks, self._slot_count, self._step_s, self._faults = picks, slot_count, step_s, faults
        self._says = says

    def picking(self, picks: Picks) -> VirtualEngines:
        """The same machine, with engines that sample tokens by `picks`."""
        return VirtualEngines(picks, self._slot_count, self._step_s, self._faults, self._says)

    def saying(self, says: Says) -> VirtualEngines:
        """The same machine, with engines that score by `says`."""
        return VirtualEngines(self._picks, self._slot_count, self._step_s, self._faults, says)

    def look(self, folder: Path) -> WorkerMachine:
        return WorkerMachine((), 2, 8 * GIB, 100 * GIB, False, 4 * GIB)

    def memory_bytes(self) -> tuple[int, int]:
        return GIB, 8 * GIB

    def warm_up(self, choice: EngineChoice) -> None:
        pass

    def fit(
        self,
        choice: EngineChoice,
        config: dict[str, object],
        options: WorkerOptions,
        machine: WorkerMachine,
        longest_tokens: int = 0,
        published_bytes: int = 0,
        *,
        is_audited: bool = True,
    ) -> Fit:
        tokens = CONTEXT_TOKENS
        return Fit(
            1, 0, self._slot_count, tokens, self._slot_count * tokens, f"{self._slot_count} sequences as made up"
        )

    def make(self, choice: EngineChoice, config: dict[str, object], options: WorkerOptions, fit: Fit) -> Engine:
        return MadeUpEngine(self._picks, fit.sequences, self._step_s, self._faults, here().rng, self._says)

    async def reach(self, addresses: list[str]) -> Finding:
        return Finding("reach", "as virtual machines are reached", True)


@contextlib.contextmanager
def as_running(loop: VirtualLoop) -> Iterator[None]:
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Turns garbage collection off during a run, and collects once at the end: a run is short, and this saves time."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        if was_enabled:
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
