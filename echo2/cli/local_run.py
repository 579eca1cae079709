"""`echo2 run RUN.toml --workers N`: runs coordinator, learner and workers of a user's config here, with the live screen.

Guarantees: every process has ended when it returns; the same command continues from what was saved. Waits for: the learner's end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from echo2.base.errors import ConfigError, EchoError, StateError
from echo2.base.hosts import joined
from echo2.cli.demo.launch import Children
from echo2.cli.demo.live import LiveRun, results_of
from echo2.cli.demo.ports import choose_ports
from echo2.cli.options import make_importable
from echo2.config.load import load_config, parse_overrides, to_toml
from echo2.config.run import RunConfig

WORKERS_MAX = 64
LEARNER_PORT = 8421


class StoppedByUser(EchoError):
    """The user stopped the run."""

    exit_code = 130


def run_here(own: argparse.Namespace, rest: Sequence[str]) -> int:
    """Runs the whole run; returns the exit code."""
    make_importable([own.file])
    config = load_config([own.file], own.preset, parse_overrides(rest))
    if not 1 <= own.workers <= WORKERS_MAX:
        raise ConfigError(f"--workers: expected 1 to {WORKERS_MAX}, got {own.workers}")
    if not config.model.path:
        raise ConfigError("model.path: expected a model folder or hub id, got nothing")
    folder = Path(config.run.folder) / config.run.name
    return asyncio.run(_run(_with_ports(config), folder, own, Console()))


def _with_ports(config: RunConfig) -> RunConfig:
    """Replaces ports of the config that are taken by free ones."""
    c = config.coordinator
    wanted = (c.enrol_port, c.port, c.dashboard_port, config.learner.port or LEARNER_PORT)
    enrol, services, page, learner = choose_ports(wanted)
    return config.model_copy(
        update={
            "coordinator": c.model_copy(update={"enrol_port": enrol, "port": services, "dashboard_port": page}),
            "learner": config.learner.model_copy(update={"port": learner}),
        }
    )


def commands_of(folder: Path, workers: int) -> dict[str, list[str]]:
    """Returns the commands as a person would type them, by process name."""
    config, links = str(folder / "run.toml"), folder / "links"
    found = {
        "coordinator": ["echo-coordinator", "--config", config],
        "learner": ["echo-learner", "join", f"@{links / 'learner.link'}", "--config", config],
    }
    for number in range(1, workers + 1):
        name = f"w{number}"
        found[name] = ["echo-worker", "join", f"@{links / 'worker.link'}", "--config", config, "--name", name]
    return found


async def _run(config: RunConfig, folder: Path, own: argparse.Namespace, console: Console) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.toml").write_text(to_toml(config, with_descriptions=True))
    except OSError as error:
        raise StateError(f"{folder}: expected a folder that can be written, got: {error.strerror}") from None
    commands = commands_of(folder, own.workers)
    paths = [str(own.file.resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # for a user's own task
    children = Children(folder, commands, sys.executable, {"PYTHONPATH": os.pathsep.join(paths)})

    def is_over(status: object) -> bool:
        return not children.is_running("learner")

    live = LiveRun(children, console, own.plain or not console.is_terminal, is_over)
    page = f"http://{joined(config.coordinator.host, config.coordinator.dashboard_port)}"
    console.print(f"run folder {folder}, logs in {folder / 'logs'}, dashboard {page}", highlight=False, soft_wrap=True)
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, task, children)
    try:
        await live.run([name for name in commands if name != "coordinator"])
    except asyncio.CancelledError:
        raise StoppedByUser(
            f"stopped; what was trained is saved in {folder}: the same command goes on from there"
        ) from None
    finally:
        children.kill_all()
    console.print(results_of(folder), highlight=False, soft_wrap=True)
    return 0


def _on_signal(task: asyncio.Task[Any], children: Children) -> None:
    """The first signal asks for a clean end; the second kills the processes and exits at once."""
    if task.cancelling():
        children.kill_all()
        raise SystemExit(StoppedByUser.exit_code)
    task.cancel()
