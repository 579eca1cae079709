"""Lists the workers that run on this machine, by the control sockets that the kernel reports as listening.

Guarantees: uses no state on disk, so nothing can be stale: a killed worker is not listed. Lists the caller's own workers (for root:
all users') in the same network namespace. Waits up to WHO_S for each to identify itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from echo2.base.errors import ConfigError, EchoError, Unreachable
from echo2.worker.runtime.control import DEEP_SOCKET_NAME, SOCKET_NAME, ask_at

TABLE = Path("/proc/net/unix")
WHO_S = 10.0
WORKERS_MAX = 256
_LISTENS = 0x10000  # __SO_ACCEPTCON in the table's column of flags


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """One worker. If it did not answer, `name` is empty and `trouble` says why."""

    name: str
    folder: Path
    socket: Path
    trouble: str = ""

    def __str__(self) -> str:
        return f"{self.name or '?'} in {self.folder}" + (f" ({self.trouble})" if self.trouble else "")


def listening_sockets(table: bytes) -> Iterator[Path]:
    """The workers' sockets in the kernel's table: `Num: RefCount Protocol Flags Type St Inode Path`."""
    for line in table.splitlines():
        columns = line.split(maxsplit=7)
        if len(columns) == 8 and columns[7].startswith(b"/") and int(columns[3], 16) & _LISTENS:
            path = Path(os.fsdecode(columns[7]))
            if path.name == SOCKET_NAME or DEEP_SOCKET_NAME.fullmatch(path.name):
                yield path


async def running_workers() -> list[RunningWorker]:
    """The running workers, sorted by name and folder, at most WORKERS_MAX. Unreachable if the system has no such table."""
    try:
        table = TABLE.read_bytes()
    except OSError as error:
        raise Unreachable(f"{TABLE}: expected the list of sockets, got: {error}; name the worker's --folder") from None
    mine = [path for path in sorted(set(listening_sockets(table))) if os.access(path, os.W_OK)]
    found = await asyncio.gather(*(_who(path) for path in mine[:WORKERS_MAX]))
    return sorted(found, key=lambda worker: (worker.name, worker.folder))


async def _who(path: Path) -> RunningWorker:
    try:
        said = await ask_at(path, "who", f"worker at {path}", WHO_S)
    except EchoError as error:
        return RunningWorker("", path.parent, path, str(error))
    return RunningWorker(str(said["name"]), Path(str(said["folder"])), path)


def the_one(workers: list[RunningWorker], name: str) -> RunningWorker:
    """The only worker, or the only one named `name` (empty: any). Unreachable if there is none, ConfigError if several."""
    meant = [worker for worker in workers if name in ("", worker.name)]
    if len(meant) == 1:
        return meant[0]
    called = f" named {name}" if name else ""
    if not meant:
        others = f"; others run: {_listed(workers)}" if workers else ""
        raise Unreachable(f"worker: expected one{called} that runs on this machine, found none{others}")
    raise ConfigError(
        f"worker: expected one{called}, found {len(meant)}: {_listed(meant)}; choose by --name or --folder"
    )


def _listed(workers: list[RunningWorker]) -> str:
    return "; ".join(map(str, workers))
