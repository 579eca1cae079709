"""Parts that daemons of the virtual world get instead of real ones: garbage collection, watched store,
machine and engines. Also helpers to run and end a world."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

from echo2.base.errors import DiskFull
from echo2.base.ids import RunId
from echo2.coordinator.persistence import StateChanges
from echo2.coordinator.store import SqlStore
from echo2.cost_model.sizing import Fit
from echo2.outside import here
from echo2.sim.simulated_engine import CONTEXT_TOKENS, EngineFaults, SimulatedEngine
from echo2.sim.tiny_model import Pick, seeded_pick
from echo2.sim.virtual_loop import VirtualLoop
from echo2.worker.engines.engine import Engine
from echo2.worker.machine import Finding, WorkerMachine
from echo2.worker.options import WorkerOptions

GIB = 1 << 30  # bytes
CLOSE_S = 30.0  # beyond every grace of the daemons


def no_collection() -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Replaces the daemon's control of garbage collection: all daemons share one interpreter here (see `uncollected`)."""
    return contextlib.nullcontext(lambda: None)


def watched_store(kept: Callable[[StateChanges], None]) -> Callable[[str, RunId, Path], SqlStore]:
    """Opens the real store, which then calls `kept` with changes once they are stored."""

    def opened(url: str, run_id: RunId, mark: Path) -> SqlStore:
        store = SqlStore(url, run_id, mark)
        write = store.write

        def watched(changes: StateChanges) -> None:
            if not changes.is_empty() and here().files.free_bytes(Path()) == 0:
                raise DiskFull("expected room for the coordinator's state")
            write(changes)
            kept(changes)

        store.write = watched  # type: ignore[method-assign]
        return store

    return opened


class VirtualEngines:
    """`Engines` of a virtual machine, which sample tokens by `pick` and claim to draw by the leases' seeds, or not."""

    def __init__(self, slot_count: int, step_s: float, faults: EngineFaults) -> None:
        self._slot_count, self._step_s, self._faults = slot_count, step_s, faults
        self.pick: Pick = seeded_pick
        self.draws_by_seed = True

    def look(self, folder: Path) -> WorkerMachine:
        return WorkerMachine((), 2, 8 * GIB, 100 * GIB, False, 4 * GIB)

    def memory_bytes(self) -> tuple[int, int]:
        return GIB, 8 * GIB

    def warm_up(self, choice: str) -> None:
        pass

    def fit(
        self,
        choice: str,
        config: dict[str, object],
        options: WorkerOptions,
        machine: WorkerMachine,
        longest_tokens: int = 0,
        published_bytes: int = 0,
    ) -> Fit:
        tokens = CONTEXT_TOKENS
        return Fit(
            1, 0, self._slot_count, tokens, self._slot_count * tokens, f"{self._slot_count} sequences as made up"
        )

    def make(self, choice: str, config: dict[str, object], options: WorkerOptions, fit: Fit) -> Engine:
        return SimulatedEngine(self.pick, self.draws_by_seed, fit.sequences, self._step_s, self._faults, here().rng)

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
