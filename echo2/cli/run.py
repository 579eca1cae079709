"""Runs a whole run on this machine: coordinator, learner and workers as processes, with the live screen.

`echo2 run RUN.toml --workers N` runs a user's config; `echo2 demo` (demo/run) another one, with emulated machines.
Guarantees: every process has ended when `LocalRun.run` returns; the same command continues from what was saved. Waits for: the
learner's end, or its last version at every worker.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from echo2.base.errors import ConfigError, EchoError, StateError
from echo2.base.units import counted
from echo2.cli.learner import check_start
from echo2.cli.live import LiveRun
from echo2.cli.options import config_of
from echo2.cli.process import stop_on_signals
from echo2.cli.processes import ChildFailed, Children, RunLock
from echo2.cli.report import RunReport, write_report
from echo2.config.load import to_toml
from echo2.config.run import RunConfig
from echo2.wire.gen.echo2.v1 import coordinator_pb2

FINAL_VERSION_WITHIN_S = 30.0  # a last version needs seconds on the demo's emulated links
WORKERS_MAX = 64  # beyond it one machine's memory and ports are the limit


class StoppedByUser(EchoError):
    exit_code = 130


@dataclass(frozen=True, slots=True)
class LocalRun:
    """`workers`: arguments of each `echo-worker`, by name. `learner`: those of `echo-learner`. `environment`: added to every
    process's own. `worker_python`: the interpreter of the workers' environment. `still_s`: seconds without progress that end the
    run with an error. `again`: what goes on with a run that was stopped."""

    config: RunConfig
    workers: Mapping[str, Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    worker_python: str = sys.executable
    still_s: float = math.inf
    learner: Sequence[str] = ("join",)
    again: str = "the same command"

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder) / self.config.run.name

    def commands(self) -> dict[str, list[str]]:
        """The commands by process name, as a person would type them."""
        config, links = ["--config", str(self.folder / "run.toml")], self.folder / "links"
        join = ["echo-worker", "join", f"@{links / 'worker.link'}", *config, "--name"]
        return {
            "coordinator": ["echo-coordinator", *config, "--free-ports"],
            "learner": ["echo-learner", *self.learner, f"@{links / 'learner.link'}", *config],
            **{name: [*join, name, *arguments] for name, arguments in self.workers.items()},
        }

    async def run(self, console: Console, is_plain: bool, lock: RunLock) -> RunReport:
        """Runs until the learner has ended, or is finished and every live worker has its weights; writes and prints the report. A
        config that the run refuses leaves that of before in the folder."""
        file = self.folder / "run.toml"
        try:
            before = file.read_bytes() if file.exists() else None
            file.write_text(to_toml(self.config, with_descriptions=True), encoding="utf-8")
        except OSError as error:
            raise StateError(f"{self.folder}: expected a folder that can be written, got: {error.strerror}") from None
        children = Children(self.folder, self.commands(), self.worker_python, self.environment, lock)
        live = LiveRun(children, console, is_plain or not console.is_terminal, final_version(), self.still_s)
        task = asyncio.current_task()
        assert task is not None, "a task runs this"

        def stop(_: object) -> None:
            console.print("stopping: the learner ends its step and saves; Ctrl-C again ends everything at once")
            task.cancel()

        def end() -> None:
            children.kill_all()
            console.show_cursor(True)
            tell_rented()

        def tell_rented() -> None:
            if count := live.newest.open_machines:
                rented = f"{counted(count, 'machine')} at {live.newest.rented_usd_per_hour:.2f} USD/h"
                text = f"still rented: {rented}; {self.again} looks after them, else end them where you rent"
                console.print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)

        stop_on_signals(stop, end)
        try:
            await live.run(list(self.workers))
        except asyncio.CancelledError:
            text = f"what was trained is saved in {self.folder}: {self.again} goes on from there"
            if "learner" in children.processes and (words := children.last_words("learner")).startswith("error:"):
                text = f"its learner could not save all: {words}"
            raise StoppedByUser(f"stopped; {text}") from None
        finally:
            children.kill_all()
            tell_rented()
            if before is not None and not live.has_joined:
                with contextlib.suppress(OSError):  # a full disk
                    file.write_bytes(before)
        code = children.processes["learner"].returncode
        if not (live.has_seen_the_end or (code == 0 and live.newest.finished)):  # above 0 has been raised already
            how = f"ended by signal {-code}" if code else "told to stop, not by this command"
            kind = ChildFailed if code else StoppedByUser
            raise kind(f"the learner was {how}; {self.again} goes on from what it saved")
        report = write_report(self.folder, live.state.status or live.newest, live.state.elapsed_s)
        console.print(report.text, markup=False, highlight=False, soft_wrap=True)
        return report


def final_version() -> Callable[[coordinator_pb2.RunStatus], bool]:
    """Whether the learner is finished and every live worker has its weights, or FINAL_VERSION_WITHIN_S has passed."""
    finished_at = 0.0

    def is_over(status: coordinator_pb2.RunStatus) -> bool:
        nonlocal finished_at
        if not status.learner.is_finished:
            return False
        finished_at = finished_at or time.monotonic()
        alive = [worker for worker in status.workers if worker.state == "alive"]
        is_everywhere = all(worker.heartbeat.fingerprint == status.learner.fingerprint for worker in alive)
        return is_everywhere or time.monotonic() - finished_at > FINAL_VERSION_WITHIN_S

    return is_over


def run_here(args: argparse.Namespace, rest: Sequence[str]) -> int:
    config = config_of([args.file], args.preset, rest)
    least = 0 if args.is_served else 1
    if not least <= args.workers <= WORKERS_MAX:
        raise ConfigError(f"--workers: expected {least} to {WORKERS_MAX}, got {args.workers}")
    check_start(config, trains=not args.is_served)
    paths = [str(args.file.resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # for a user's own task
    how = ["serve", *(["--trains"] if args.trains else [])] if args.is_served else ["join"]
    workers: dict[str, list[str]] = {f"w{number}": [] for number in range(1, args.workers + 1)}
    run = LocalRun(config, workers, {"PYTHONPATH": os.pathsep.join(paths)}, learner=how)
    lock, console = RunLock(run.folder), Console()  # before anything is written
    console.print(f"run folder {run.folder}, logs in {run.folder / 'logs'}", highlight=False, soft_wrap=True)
    asyncio.run(run.run(console, args.plain, lock))
    return 0
