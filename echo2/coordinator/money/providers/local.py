"""Runs workers as processes on the coordinator's machine, each with its output in its own folder.

Guarantees: a worker is a process group of its own, so that it survives the coordinator, and `release` ends the whole group:
SIGTERM, then SIGKILL `RELEASE_GRACE_S` later. A later coordinator finds it again by its pid and start time, which are in its
folder, so it never ends an unrelated process that got the same pid. Only `release` waits for processes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from echo2.base.errors import LimitExceeded, StateError
from echo2.coordinator.money.provisioning import MachineOffer, MachineState, ObservedMachine
from echo2.trust.tls import write_secret

RELEASE_GRACE_S = 10.0  # for its last reports
LOOK_S = 0.05  # between two looks for its end
PID_FILE = "process"  # in the machine's folder


def _worker_arguments(link_path: Path, folder: Path, machine_id: str) -> list[str]:
    beside = Path(sys.executable).with_name("echo-worker")
    program = str(beside) if beside.exists() else shutil.which("echo-worker")
    if program is None:
        raise StateError("local provider: expected echo-worker beside this Python or on the PATH, found none")
    return [program, "join", f"@{link_path}", "--folder", str(folder), "--name", machine_id]


def _started_at(pid: int) -> str:
    """Start time of a process in the kernel's clock ticks; empty if it does not exist or has ended (a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class LocalProvider:
    """`arguments(link_path, folder, machine_id)`: returns the command of one worker. `base`: arguments appended to it."""

    name = "local"

    def __init__(
        self,
        offer: MachineOffer,
        folder: Path,
        arguments: Callable[[Path, Path, str], list[str]] = _worker_arguments,
        base: Sequence[str] = (),
    ) -> None:
        offer.allow("arguments")
        self._offer, self._folder, self._arguments = offer, folder / offer.name, arguments
        self._more = [*base, *offer.setting("arguments", "").split()]
        self._reaping: dict[str, asyncio.Task[int]] = {}

    async def rent(self, machine_id: str, join_link: str) -> str:
        folder = self._folder / machine_id
        running = self._running()
        if machine_id in running:
            return ""
        if len(running) >= self._offer.machines_max:
            raise LimitExceeded(f"local provider: expected {self._offer.machines_max} workers at most on this machine")
        link_path = folder / "join.link"
        write_secret(link_path, join_link.encode())  # command lines are readable by all users
        with (folder / "worker.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._arguments(link_path, folder, machine_id), *self._more, stdin=DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        (folder / PID_FILE).write_text(f"{process.pid} {_started_at(process.pid)}")
        self._reaping[machine_id] = asyncio.create_task(process.wait())  # else it would stay a zombie
        return ""

    async def release(self, machine_id: str) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            pid = self._running().get(machine_id)
            if pid is None:
                break
            with suppress(ProcessLookupError):
                os.killpg(pid, number)
            for _ in range(round(RELEASE_GRACE_S / LOOK_S)):
                if machine_id not in self._running():
                    break
                await asyncio.sleep(LOOK_S)
        if machine_id in self._reaping and machine_id not in self._running():
            await self._reaping.pop(machine_id)

    async def observe(self) -> dict[str, ObservedMachine]:
        return {machine_id: ObservedMachine(MachineState.RUNNING) for machine_id in self._running()}

    def _running(self) -> dict[str, int]:
        """Pids of the workers whose process is running, by machine."""
        found = {}
        for path in sorted(self._folder.glob(f"*/{PID_FILE}")):
            pid, _, started = path.read_text().partition(" ")
            if pid.isdigit() and started and _started_at(int(pid)) == started:
                found[path.parent.name] = int(pid)
        return found
