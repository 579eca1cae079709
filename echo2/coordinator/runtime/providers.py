"""The providers that need nobody's account: processes on this machine, and commands for a person to paste.

Guarantees: a local worker is a process group of its own, so that it outlives the coordinator's death and a release ends
all of it: SIGTERM, and SIGKILL `RELEASE_GRACE_S` later. Waits for processes only in `release` and `close`.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from echo2.base.errors import LimitExceeded, StateError
from echo2.broadcast.runtime.tls import write_secret
from echo2.coordinator.provisioning import Machine

MACHINES_MAX = 64
RELEASE_GRACE_S = 10.0


def join_command(join_link: str) -> str:
    """What makes a machine a worker of the run."""
    return f"echo-worker join {shlex.quote(join_link)}"


def _local_arguments(link_path: Path, folder: Path) -> list[str]:
    beside = Path(sys.executable).with_name("echo-worker")
    program = str(beside) if beside.exists() else shutil.which("echo-worker")
    if program is None:
        raise StateError("local provider: expected echo-worker beside this Python or on the PATH, found none")
    return [program, "join", f"@{link_path}", "--folder", str(folder)]


class ManualProvider:
    """Prints the command to paste on a machine that somebody rents; it cannot end such a machine."""

    name = "manual"

    def __init__(self) -> None:
        self._machines: dict[str, Machine] = {}
        self._count = 0

    async def rent(self, label: str, join_link: str) -> Machine:
        if len(self._machines) >= MACHINES_MAX:
            raise LimitExceeded(f"manual provider: expected {MACHINES_MAX} open requests at most")
        self._count += 1
        machine = Machine(f"manual-{self._count}", self.name, label, join_command(join_link))
        self._machines[machine.machine_id] = machine
        return machine

    async def release(self, machine_id: str) -> None:
        self._machines.pop(machine_id, None)

    def machines(self) -> list[Machine]:
        return list(self._machines.values())


class LocalProvider:
    """Workers as processes on the coordinator's machine, their output in `folder`."""

    name = "local"

    def __init__(
        self, folder: Path, arguments: Callable[[Path, Path], list[str]] = _local_arguments, machines_max: int = 8
    ) -> None:
        self._folder, self._arguments, self._machines_max = folder, arguments, machines_max
        self._processes: dict[str, tuple[Machine, Process]] = {}
        self._count = 0

    async def rent(self, label: str, join_link: str) -> Machine:
        if len(self.machines()) >= self._machines_max:
            raise LimitExceeded(f"local provider: expected {self._machines_max} workers at most on this machine")
        self._count += 1
        machine = Machine(f"local-{os.getpid()}-{self._count}", self.name, label)
        folder = self._folder / machine.machine_id
        link_path = folder / "join.link"
        write_secret(link_path, join_link.encode())  # not on the command line, which all users can read
        with (folder / "worker.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._arguments(link_path, folder), stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._processes[machine.machine_id] = (machine, process)
        return machine

    async def release(self, machine_id: str) -> None:
        known = self._processes.pop(machine_id, None)
        if known is None:
            return
        process = known[1]
        for number, grace_s in ((signal.SIGTERM, RELEASE_GRACE_S), (signal.SIGKILL, RELEASE_GRACE_S)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
                return

    def machines(self) -> list[Machine]:
        return [machine for machine, process in self._processes.values() if process.returncode is None]
