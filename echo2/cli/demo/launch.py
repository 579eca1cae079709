"""Starts, checks and stops a run's child processes.

Guarantees: `kill_all` leaves no child process; `raise_if_failed` reports a child that ended with an error by the last error in its
log. Waits for: the coordinator's links, at most LINKS_WITHIN_S; the end of a child told to stop, at most STOP_WITHIN_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from echo2.base.errors import EchoError, StateError, Unreachable
from echo2.cli.demo.plan import executable

LINKS_WITHIN_S = 20.0
STOP_WITHIN_S = 10.0
LAST_WORDS_LINES = 8


class ChildFailed(EchoError):
    """A child process ended with an error."""


class Children:
    """A run's processes by name, each with its log file. `environment`: variables added to this process's own."""

    def __init__(
        self, run_folder: Path, commands: Mapping[str, list[str]], worker_python: str, environment: Mapping[str, str]
    ) -> None:
        self.run_folder, self.commands, self.worker_python = run_folder, commands, worker_python
        self.environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        (run_folder / "logs").mkdir(parents=True, exist_ok=True)

    async def start(self, name: str) -> None:
        """Starts one process; its output goes to logs/NAME.log."""
        with self.log_path(name).open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *executable(self.commands[name], self.worker_python), stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL,
                env=self.environment, start_new_session=True,
            )  # fmt: skip

    def log_path(self, name: str) -> Path:
        return self.run_folder / "logs" / f"{name}.log"

    def is_running(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.returncode is None

    def raise_if_failed(self) -> None:
        """Raises ChildFailed if a process exited with an error. Ignores one killed by a signal: it may be restarted."""
        for name, process in self.processes.items():
            if process.returncode is not None and process.returncode > 0:
                raise ChildFailed(f"{name} ended with code {process.returncode}: {self.last_words(name)}")

    def last_words(self, name: str) -> str:
        lines = self.log_path(name).read_text(errors="replace").splitlines()[-LAST_WORDS_LINES:]
        errors = [line for line in lines if line.startswith("error:")]
        return (errors or lines or ["no output"])[-1]

    async def stop(self, name: str) -> int | None:
        """Sends SIGTERM, then SIGKILL after STOP_WITHIN_S. Returns the exit code."""
        process = self.processes[name]
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_WITHIN_S)
            except TimeoutError:
                self._kill(process)
                await process.wait()
        return process.returncode

    async def stop_all(self) -> None:
        """Stops the workers first and the coordinator last, so that it still receives their clean disconnects."""
        names = list(self.processes)
        workers = [name for name in names if name not in ("coordinator", "learner")]
        await asyncio.gather(*(self.stop(name) for name in workers))
        for name in ("learner", "coordinator"):
            if name in self.processes:
                await self.stop(name)

    def kill_all(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                self._kill(process)

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    async def wait_for_links(self) -> None:
        """Waits until the coordinator has written its join links. Raises Unreachable after LINKS_WITHIN_S."""
        links = self.run_folder / "links"
        deadline = time.monotonic() + LINKS_WITHIN_S
        while not all((links / f"{role}.link").exists() for role in ("worker", "learner", "operator")):
            self.raise_if_failed()
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"coordinator: expected join links in {links} within {LINKS_WITHIN_S:.0f} s, got none; "
                    f"its last words: {self.last_words('coordinator')}"
                )
            await asyncio.sleep(0.05)


def prepare_run_folder(folder: Path) -> None:
    """Makes a fresh run folder. Raises StateError for one that holds a run, so that nothing is overwritten."""
    if (folder / "run.toml").exists():
        raise StateError(f"run folder {folder}: expected an empty folder for a new demo, found a run; choose --name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"run folder {folder}: cannot be made: {error}") from None
