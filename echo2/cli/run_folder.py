"""What a run's folder on this machine answers: `echo2 samples`, `echo2 tail`, `echo2 stop`."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from echo2.base.errors import StateError
from echo2.cli.process import wrapped
from echo2.cli.processes import LOOK_S, STARTER, holders_of
from echo2.cli.report import samples_of

TAIL_BYTES = 2000  # of each log at first: some twenty lines


def samples(own: argparse.Namespace, _: Sequence[str]) -> int:
    """`echo2 samples`; returns the exit code."""
    found = samples_of(_folder(own.run))
    if not found:
        raise StateError(
            f"{own.run}: expected completions of held-out prompts, found none: task.eval_prompts asks for some"
        )
    print("\n\n".join("\n".join(wrapped(line, 4) for line in one.lines()) for one in found))
    return 0


def tail(own: argparse.Namespace, _: Sequence[str]) -> int:
    """`echo2 tail`: follows the logs until Ctrl-C, or until no process of the run is left; returns the exit code."""
    folder = _folder(own.run)
    read: dict[Path, int] = {}
    while True:
        goes_on = bool(holders_of(folder))
        for path in sorted((folder / "logs").glob("*.log")):
            with path.open("rb") as file:
                file.seek(read.get(path, max(0, path.stat().st_size - TAIL_BYTES)))
                if path not in read and file.tell():
                    file.readline()  # the rest of a line that began before
                data = file.read()
                read[path] = file.tell()
            for line in data.decode(errors="replace").splitlines():
                print(f"{path.stem:<11} {line}", flush=True)
        if not goes_on:
            return 0
        time.sleep(LOOK_S)


def stop(own: argparse.Namespace, _: Sequence[str]) -> int:
    """`echo2 stop`: returns the exit code once every process of the run has ended."""
    holders = holders_of(_folder(own.run))
    if STARTER not in holders:
        raise StateError(
            f"{own.run}: expected `echo2 run` at work in it, found none; `echo2 ctl {own.run} stop` ends one that goes on elsewhere"
        )
    os.kill(holders[STARTER], signal.SIGINT)
    while holders_of(own.run):
        time.sleep(LOOK_S)
    print(f"{own.run}: stopped; the same `echo2 run` goes on from what it saved")
    return 0


def _folder(folder: Path) -> Path:
    if not (folder / "run.toml").is_file():
        raise StateError(f"{folder}: expected a run's folder (RUNS/NAME), found no run.toml in it")
    return folder
