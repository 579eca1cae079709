"""Rents machines by the operator's own commands: one that starts a machine, one that ends it, one that lists those that exist.

Each runs in a shell with `ECHO2_MACHINE_ID`, a name that clouds accept. `start` gets on its standard input the script that the
machine has to run; it holds the join link, which is therefore on no command line. `list` prints a machine a line: its id, then
optionally `starting`, `running` or `ending` and why; ids of other machines are ignored. Guarantees: `start` is not called for a
machine that is listed, nor `stop` for one that is not; a command that takes longer than its limit is killed with its children.

Settings: `start`, `stop`, `list`, and those of machine_setup.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from echo2.base.errors import ConfigError, LimitExceeded, ResourceError, StateError, Unreachable
from echo2.base.ids import RunId
from echo2.coordinator.money.providers.machine_setup import (
    KEYS,
    LINK_VARIABLE,
    base_arguments,
    install_script,
    join_script,
)
from echo2.coordinator.money.provisioning import MachineOffer, MachineState, ObservedMachine, machine_prefix
from echo2.trust.tls import write_secret

LIMITS_S = {"start": 900.0, "stop": 300.0, "list": 60.0}  # clouds take minutes
OUTPUT_BYTES_MAX = 1 << 20  # 20,000 machines
ERROR_CHARS_MAX = 300  # its end says why
STATES = {state.value: state for state in (MachineState.STARTING, MachineState.RUNNING, MachineState.ENDING)}


class CommandProvider:
    def __init__(self, offer: MachineOffer, run_id: RunId, model_path: str = "") -> None:
        offer.allow(*LIMITS_S, *KEYS)
        self._offer, self._prefix, self._base = offer, machine_prefix(run_id, offer.name), base_arguments(model_path)
        self._commands = {what: offer.setting(what) for what in LIMITS_S}
        self._install = install_script(offer)  # wrong settings are refused now, not at the first rent

    def script(self, machine_id: str, join_link: str) -> str:
        """What the machine has to run, as root or as a user that may install packages."""
        link = f"export {LINK_VARIABLE}={shlex.quote(join_link)}\n"
        return f"#!/bin/bash\n{link}{self._install}{join_script(self._offer, machine_id, self._base)}"

    async def rent(self, machine_id: str, join_link: str, usd_per_hour: float) -> str:
        if machine_id not in await self._listed():
            await self._run("start", machine_id, self.script(machine_id, join_link))
        return ""

    async def release(self, machine_id: str) -> None:
        if machine_id in await self._listed():
            await self._run("stop", machine_id)

    async def observe(self) -> dict[str, ObservedMachine]:
        return {machine_id: self._sighting(words) for machine_id, words in (await self._listed()).items()}

    async def _listed(self) -> dict[str, list[str]]:
        """Each machine's line, whatever it says of its state. Of two lines of a name, the one of a machine that goes on."""
        listed: dict[str, list[str]] = {}
        for line in (await self._run("list")).splitlines():
            words = line.split(maxsplit=2)
            is_ending = len(words) > 1 and words[1].lower() == MachineState.ENDING.value
            if words and words[0].startswith(self._prefix) and not (is_ending and words[0] in listed):
                listed[words[0]] = words
        return listed

    def _sighting(self, words: list[str]) -> ObservedMachine:
        state = STATES.get(words[1].lower()) if len(words) > 1 else MachineState.RUNNING
        if state is None:
            raise ConfigError(
                f"offer {self._offer.name}: list: expected one of {', '.join(STATES)} after {words[0]}, got {words[1][:40]!r}"
            )
        is_ending = state is MachineState.ENDING
        return ObservedMachine(state, (words[2] if len(words) > 2 else "its list says so") if is_ending else "")

    async def _run(self, what: str, machine_id: str = "", text: str = "") -> str:
        """What the command prints. ResourceError if it fails, Unreachable if it takes too long or `list` fails."""
        call = f"offer {self._offer.name}, command {what}{f' for {machine_id}' if machine_id else ''}"
        # Files, not pipes: what a command leaves running in the background may hold them open.
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            stdin.write(text.encode())
            stdin.seek(0)
            process = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", self._commands[what], stdin=stdin, stdout=output, stderr=errors, start_new_session=True,
                env=os.environ | {"ECHO2_MACHINE_ID": machine_id},
            )  # fmt: skip
            try:
                async with asyncio.timeout(LIMITS_S[what]):
                    code = await process.wait()
            except TimeoutError:
                raise Unreachable(f"{call}: expected it to end within {LIMITS_S[what]:.0f} s") from None
            finally:
                await _end(process)
            for file in (output, errors):
                file.seek(0)
            if code == 0:
                text = output.read(OUTPUT_BYTES_MAX).decode(errors="replace")
                if what == "list" and output.read(1):  # machines that stand in the rest would count as lost
                    raise Unreachable(f"{call}: expected at most {OUTPUT_BYTES_MAX} bytes, got more")
                return text
            problem = (errors.read(OUTPUT_BYTES_MAX) or output.read(OUTPUT_BYTES_MAX)).decode(errors="replace")
        kind = Unreachable if what == "list" else ResourceError
        raise kind(f"{call}: expected exit code 0, got {code}: {problem.strip()[-ERROR_CHARS_MAX:]}")


async def _end(process: Process) -> None:
    """Kills a command that has not ended by itself, with its children."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


# Runs workers as processes on the coordinator's machine, each with its output in its own folder.
#
# Guarantees: a worker is a process group of its own, so that it survives the coordinator, and `release` ends the whole group:
# SIGTERM, then SIGKILL `RELEASE_GRACE_S` later. A later coordinator finds it again by its pid and start time, which are in its
# folder, so it never ends an unrelated process that got the same pid. Only `release` waits for processes.

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
    """`arguments(link_path, folder, machine_id)`: returns the command of one worker."""

    def __init__(
        self,
        offer: MachineOffer,
        folder: Path,
        arguments: Callable[[Path, Path, str], list[str]] = _worker_arguments,
        model_path: str = "",
    ) -> None:
        offer.allow("arguments")
        self._offer, self._folder, self._arguments = offer, folder / offer.name, arguments
        self._more = [*base_arguments(model_path), *offer.setting("arguments", "").split()]
        self._reaping: dict[str, asyncio.Task[int]] = {}

    async def rent(self, machine_id: str, join_link: str, usd_per_hour: float) -> str:
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
        if machine_id not in self._running():
            if machine_id in self._reaping:
                await self._reaping.pop(machine_id)
            # Of the size of the model, or twice that; another machine has another name and folder.
            await asyncio.to_thread(shutil.rmtree, self._folder / machine_id / "chunks", ignore_errors=True)

    async def observe(self) -> dict[str, ObservedMachine]:
        return {machine_id: ObservedMachine(MachineState.RUNNING) for machine_id in self._running()}

    def _running(self) -> dict[str, int]:
        pids = {}
        for path in sorted(self._folder.glob(f"*/{PID_FILE}")):
            pid, _, started = path.read_text().partition(" ")
            if pid.isdigit() and started and _started_at(int(pid)) == started:
                pids[path.parent.name] = int(pid)
        return pids
