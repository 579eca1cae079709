"""Starts, checks and stops a run's child processes; `echo2 samples`, `echo2 tail` and `echo2 stop` of a run's folder.

Guarantees: `kill_all` leaves no child process, and none outlives this process, whatever ends it (process.die_with_parent);
`raise_if_failed` reports a child that ended with an error by the last error in its log. Waits for: the coordinator, at most
READY_WITHIN_S; the end of a child told to stop, at most STOP_WITHIN_S, and SAVE_WITHIN_S for the learner.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from echo2.base.errors import ConfigError, EchoError, ResourceError, StateError, Unreachable
from echo2.cli.process import PARENT, wrapped
from echo2.cli.report import samples_of

READY_WITHIN_S = 60.0  # imports on a cold disk
STOP_WITHIN_S = 10.0  # a daemon's own graceful end
SAVE_WITHIN_S = 120.0  # a learner's: the step in progress and a checkpoint, as in deploy/
LEARNER_ALONE_S = 30.0  # how long a learner may go on after the last worker has ended: it exports its model meanwhile
LAST_WORDS_LINES = 8  # the end of a traceback


class ChildFailed(EchoError):
    """A child process ended with an error; its exit code is then that of the command."""

    def __init__(self, text: str, exit_code: int = EchoError.exit_code) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Children:
    """A run's processes by name, each with its log file. `environment`: variables added to this process's own. `lock`: of the run's
    folder; the processes inherit it."""

    def __init__(
        self,
        run_folder: Path,
        commands: Mapping[str, list[str]],
        worker_python: str,
        environment: Mapping[str, str],
        lock: RunLock,
    ) -> None:
        self.run_folder, self.commands, self.worker_python = run_folder, commands, worker_python
        ours = {"TOKENIZERS_PARALLELISM": "false", PARENT: str(os.getpid())}
        self.environment = {**os.environ, **ours, **environment}
        self._lock = lock
        self._alone_since: float | None = None
        self._begun: dict[str, int] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        (run_folder / "logs").mkdir(parents=True, exist_ok=True)

    async def start(self, name: str) -> None:
        """Starts one process by this interpreter, or the workers' own, regardless of PATH; its output goes to logs/NAME.log."""
        program, *words = self.commands[name]
        module = program.removeprefix("echo-")
        python = self.worker_python if module == "worker" else sys.executable
        with self.log_path(name).open("ab") as log:
            self._begun[name] = log.tell()
            self.processes[name] = await asyncio.create_subprocess_exec(
                python, "-m", f"echo2.cli.{module}", *words, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL,
                env=self.environment, start_new_session=True, pass_fds=(self._lock.descriptor,),
            )  # fmt: skip
        self._lock.note(name, self.processes[name].pid)

    def log_path(self, name: str) -> Path:
        return self.run_folder / "logs" / f"{name}.log"

    def is_running(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.returncode is None

    def raise_if_failed(self) -> None:
        """Raises ChildFailed if a process exited with an error, or the coordinator at all: nobody starts it again. Others do the
        work of a worker that a signal ended; LiveRun tells of such a learner."""
        for name, process in self.processes.items():
            if (code := process.returncode) is not None and (code > 0 or name == "coordinator"):
                raise ChildFailed(self._end_of(name), max(1, code))

    def raise_if_learner_is_alone(self, now: float) -> None:
        """Raises ChildFailed if every worker ended LEARNER_ALONE_S ago and the learner still waits: nothing more will come."""
        workers = self._workers()
        if not workers or any(map(self.is_running, workers)) or not self.is_running("learner"):
            self._alone_since = None
            return
        self._alone_since = self._alone_since or now
        if now - self._alone_since > LEARNER_ALONE_S:
            raise ChildFailed(f"every worker has ended and the learner still waits; {self._end_of(workers[-1])}")

    def _end_of(self, name: str) -> str:
        code = self.processes[name].returncode or 0
        how = f"was ended by signal {-code}, and said last" if code < 0 else f"ended with code {code}"
        return f"{name} {how}: {self.last_words(name)}"

    def _workers(self) -> list[str]:
        return [name for name in self.processes if name not in ("coordinator", "learner")]

    def last_words(self, name: str) -> str:
        with self.log_path(name).open("rb") as log:
            log.seek(self._begun.get(name, 0))  # what an earlier start said is over
            lines = log.read().decode(errors="replace").splitlines()[-LAST_WORDS_LINES:]
        errors = [line for line in lines if line.startswith("error:")]
        return (errors or lines or ["no output"])[-1]

    async def stop(self, name: str) -> int | None:
        """Sends SIGTERM, then SIGKILL if that takes too long. Returns the exit code."""
        process = self.processes[name]
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(SAVE_WITHIN_S if name == "learner" else STOP_WITHIN_S):
                    await process.wait()
            except TimeoutError:
                self._kill(process)
                await process.wait()
        return process.returncode

    async def stop_nodes(self) -> None:
        """Stops the workers, then the learner; not the coordinator, which still receives their clean disconnects."""
        with contextlib.suppress(OSError):  # a full disk
            self._lock.note(STOPPING, os.getpid())
        await asyncio.gather(*(self.stop(name) for name in self._workers()))
        if "learner" in self.processes:
            await self.stop("learner")

    def kill_all(self) -> None:
        for name in filter(self.is_running, self.processes):
            self._kill(self.processes[name])

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    async def start_coordinator(self) -> str:
        """Starts the coordinator; returns the address of its page once it serves. Raises Unreachable after READY_WITHIN_S."""
        page = self.run_folder / "links" / "dashboard.url"
        page.unlink(missing_ok=True)
        await self.start("coordinator")
        deadline = time.monotonic() + READY_WITHIN_S
        while not page.exists():
            self.raise_if_failed()
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"coordinator: expected it to serve within {READY_WITHIN_S:.0f} s, it does not; its last words: "
                    f"{self.last_words('coordinator')}"
                )
            await asyncio.sleep(0.05)
        return page.read_text().strip()


ENDING_WITHIN_S = 20.0  # twice what they give themselves: children of a run whose starter is gone
LOOK_S = 0.1  # a person does not notice
STARTER = "echo2"  # the command's own name among the holders of a folder
STOPPING = "stopping"  # noted once all are told to end: a further signal would end them without saving
_BY_HAND = {"learner": "learner/learner.lock", "coordinator": "coordinator/lock"}
"""Locks that daemons hold which a person started in this folder."""


class RunLock:
    """Held from construction to the end of this process and of all that inherit `descriptor`. Raises StateError if others work in
    the folder, or it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StateError(f"{folder}: expected a folder that can be written, got: {error.strerror}") from None
        until = time.monotonic() + ENDING_WITHIN_S
        while not _is_locked(self.descriptor, fcntl.LOCK_EX):
            holders = holders_of(folder)
            if STARTER in holders or time.monotonic() > until:
                raise self._refusal({STARTER: holders[STARTER]} if STARTER in holders else holders)
            time.sleep(LOOK_S)
        if by_hand := dict(held_by_hand(folder)):
            raise self._refusal(by_hand)
        os.ftruncate(self.descriptor, 0)
        self.note(STARTER, os.getpid())

    def note(self, name: str, pid: int) -> None:
        os.write(self.descriptor, f"{name} {pid}\n".encode())

    def _refusal(self, holders: dict[str, int]) -> StateError:
        os.close(self.descriptor)
        who = ", ".join(f"{name} (process {pid})" for name, pid in holders.items()) or "a process that cannot be named"
        pids = list(holders.values())  # 0: it has not written its own yet
        end = f"; to end it: kill {' '.join(map(str, pids))}" if pids and all(pids) else ""
        return StateError(f"run folder {self._folder}: expected no other process in it, found {who}{end}")


def _is_locked(descriptor: int, how: int = fcntl.LOCK_SH) -> bool:
    """Locks the file, unless another process holds it."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def holders_of(folder: Path) -> dict[str, int]:
    """Processes of `echo2 run` in this folder that are alive, by name; none if nobody holds the lock: others may have the ids of
    processes that ended."""
    path = folder / "run.lock"
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        if _is_locked(file.fileno()):
            return {}
        rows = [line.partition(" ") for line in file.read().decode(errors="replace").splitlines()]
        return {name: int(pid) for name, _, pid in rows if pid.isdigit() and _is_alive(int(pid))}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def held_by_hand(folder: Path) -> Iterator[tuple[str, int]]:
    for name, place in _BY_HAND.items():
        path = folder / place
        with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:
            if file is not None and not _is_locked(file.fileno()):
                text = file.read(32).decode(errors="replace").strip()
                yield name, int(text) if text.isdigit() else 0


TAIL_BYTES = 2000  # of each log at first: some twenty lines


def samples(args: argparse.Namespace, _: Sequence[str]) -> int:
    shared, rows = samples_of(_folder(args.run))
    if not rows:
        raise StateError(
            f"{args.run}: expected completions of held-out prompts, found none yet: task.eval_prompts asks for some"
        )
    if shared:
        print(wrapped(f"each prompt begins {shared!r}", 4), end="\n\n")
    print("\n\n".join("\n".join(wrapped(line, 4) for line in sample.lines()) for sample in rows))
    return 0


def tail(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`echo2 tail`: follows the logs until Ctrl-C, or until no process of the run is left; returns the exit code."""
    folder = _folder(args.run)
    if not (folder / "logs").is_dir():
        raise StateError(
            f"{folder}: expected logs of `echo2 run`, found none: programs started by hand log to their own terminals"
        )
    read: dict[Path, int] = {}
    while True:
        goes_on = bool(holders_of(folder))
        for path in sorted((folder / "logs").glob("*.log")):
            with path.open("rb") as file:
                file.seek(read.get(path, max(0, path.stat().st_size - TAIL_BYTES)))
                if path not in read and file.tell():
                    file.readline()  # the rest of a line that began before
                begun, data = file.tell(), file.read()
                if goes_on:  # a line that is under way comes once it is whole
                    data = data[: data.rfind(b"\n") + 1]
                read[path] = begun + len(data)
            for line in data.decode(errors="replace").splitlines():
                print(f"{path.stem:<11} {line}", flush=True)
        if not goes_on:
            return 0
        time.sleep(LOOK_S)


def stop(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`echo2 stop`: returns the exit code once every process of the run has ended."""
    from echo2.cli.operator import still_rented  # which asks for the holders here

    holders = holders_of(_folder(args.run))
    if STARTER not in holders:
        raise StateError(
            f"{args.run}: expected `echo2 run` at work in it, found none; `echo2 ctl {args.run} stop` ends a run elsewhere"
        )
    try:
        if STOPPING not in holders:
            os.kill(holders[STARTER], signal.SIGINT)
    except OSError as error:
        if isinstance(error, PermissionError):  # else it has just ended
            starter = f"the user who started it (process {holders[STARTER]})"
            raise ResourceError(f"{args.run}: expected {starter} to stop it, got another user") from None
    while holders_of(args.run):
        time.sleep(LOOK_S)
    print(f"{args.run}: stopped; {still_rented(args.run)}the same `echo2 run` goes on from what it saved")
    return 0


def _folder(folder: Path) -> Path:
    """`echo2 run` keeps run.toml in it; programs started by hand have folders of their own there."""
    if not any((folder / part).exists() for part in ("run.toml", "coordinator", "learner")):
        problem = "neither run.toml nor coordinator nor learner in it" if folder.is_dir() else "no such folder"
        raise ConfigError(f"{folder}: expected a run's folder (RUNS/NAME), found {problem}")
    return folder
