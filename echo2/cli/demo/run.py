"""`echo2 demo`: prepares a base model, runs the daemons, draws the screen, checks the end and writes the summary.

Waits for: the learner to finish its steps; gives up after `STILL_S` without progress; polls twice a second. Guarantees: every
process has ended when it returns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from echo2.base.errors import EchoError, IntegrityError
from echo2.cli.demo import llm
from echo2.cli.demo.launch import ChildFailed, Children, prepare_run_folder
from echo2.cli.demo.live import LiveRun
from echo2.cli.demo.model import ModelRecipe, cached_model_folder
from echo2.cli.demo.plan import PORTS, DemoOptions, commands, demo_config, shown
from echo2.cli.demo.ports import choose_ports
from echo2.cli.demo.warm import is_warm, warm_once
from echo2.config.load import to_toml
from echo2.wire.gen.echo2.v1 import coordinator_pb2

STEPS = 120
STILL_S = 300.0
LLM_STILL_S = 900.0
"""Limit for the larger model: on a busy machine its start, or one step, may take minutes."""
LOOK_EVERY_S = 0.5
PLAIN_LINE_EVERY_S = 10.0
FINAL_VERSION_WITHIN_S = 30.0
CACHE = Path("~/.cache/echo2/demo")


class Interrupted(EchoError):
    """The user stopped the demo."""

    exit_code = 130


def run_demo(own: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    """Runs the whole demo; returns the exit code."""
    if own.model == "smollm2":
        llm.require_package()
    options = DemoOptions(
        name=own.name or time.strftime("demo-%Y%m%d-%H%M%S"),
        seed=own.seed,
        steps=own.steps or (llm.STEPS if own.model == "smollm2" else STEPS),
        staleness_bound=own.staleness,
        engine=own.engine,
        worker_python=own.worker_python,
        model=own.model,
        overrides=dict(overrides),
    )
    return asyncio.run(_Demo(options, Console(), own.plain).run())


class _Demo:
    def __init__(self, options: DemoOptions, console: Console, is_plain: bool) -> None:
        self.options = options
        self.console = console
        self.is_plain = is_plain or not console.is_terminal
        self.recipe = ModelRecipe()
        cache = CACHE.expanduser()
        model_folder = cache / llm.FOLDER if options.is_llm else cached_model_folder(cache, self.recipe)
        self.config = demo_config(options, model_folder, self.recipe, choose_ports(PORTS))
        self.run_folder = Path(self.config.run.folder) / self.config.run.name
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        lines = commands(self.run_folder, options.workers)
        still_s = LLM_STILL_S if options.is_llm else STILL_S
        children = Children(self.run_folder, lines, options.worker_python, environment)
        self.live = LiveRun(children, console, self.is_plain, self._is_over, still_s)
        self.finished_at: float | None = None

    async def run(self) -> int:
        prepare_run_folder(self.run_folder)
        await self._make_base_model()
        await self._compile_codec()
        (self.run_folder / "run.toml").write_text(to_toml(self.config, with_descriptions=True))
        children = self.live.children
        self._print_commands()
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, task, children)
        try:
            await self.live.run(["learner", *(worker.name for worker in self.options.workers)])
        except asyncio.CancelledError:
            raise Interrupted(f"stopped by the user; the run is in {self.run_folder}") from None
        finally:
            children.kill_all()
        return self._summarise()

    def _on_signal(self, task: asyncio.Task[Any], children: Children) -> None:
        if task.cancelling():
            children.kill_all()
            sys.stdout.flush()
            raise SystemExit(130)
        task.cancel()

    async def _make_base_model(self) -> None:
        folder = Path(self.config.model.path)
        if (folder / "config.json").exists():
            return
        if self.options.is_llm:
            self.console.print(
                "making the base model: SmolLM2-135M-Instruct in bf16 from its package (once, then cached) …"
            )
            folder.parent.mkdir(parents=True, exist_ok=True)
            arguments = ["-m", "echo2.cli.demo.llm", str(folder)]
        else:
            self.console.print(
                "making the base model: a small Qwen3 taught the answer format only (once, then cached) …"
            )
            arguments = ["-m", "echo2.cli.demo.model", str(folder), "--recipe", json.dumps(asdict(self.recipe))]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, start_new_session=True)
        try:
            code = await process.wait()
        finally:  # the child has its own session, so Ctrl-C reaches only us
            if process.returncode is None:
                process.kill()
        if code != 0:
            raise ChildFailed(f"the base model in {folder} could not be made; its output is above")

    async def _compile_codec(self) -> None:
        if is_warm():
            return
        self.console.print("compiling the delta codec (once, then cached) …")
        try:
            await asyncio.to_thread(warm_once)
        except subprocess.SubprocessError as error:
            raise ChildFailed(f"the delta codec could not be compiled: {error}") from None

    def _print_commands(self) -> None:
        self.console.print(f"run folder {self.run_folder}; the same run by hand, in five terminals:\n", highlight=False)
        for command in commands(self.run_folder, self.options.workers).values():
            self.console.print(f"  {shown(command)}", highlight=False, soft_wrap=True)
        page = f"http://{self.config.coordinator.host}:{self.config.coordinator.dashboard_port}"
        self.console.print(f"\nthe operator's page is at {page} while it runs\n", highlight=False)

    def _is_over(self, status: coordinator_pb2.RunStatus | None) -> bool:
        """Whether the learner is finished and every live worker has the final version, or FINAL_VERSION_WITHIN_S has passed.

        Also true once the learner's process has ended and the model is written.
        """
        if status is not None and status.learner.is_finished:
            self.finished_at = self.finished_at or time.monotonic()
            waited_s = time.monotonic() - self.finished_at
            return self._final_version_is_everywhere(status) or waited_s > FINAL_VERSION_WITHIN_S
        return not self.live.children.is_running("learner") and self._learner_is_done()

    def _learner_is_done(self) -> bool:
        return (self.run_folder / "learner" / "model" / "config.json").exists()

    def _final_version_is_everywhere(self, status: coordinator_pb2.RunStatus) -> bool:
        return all(
            worker.heartbeat.fingerprint == status.learner.fingerprint
            for worker in status.workers
            if worker.state == "alive"
        )

    def _summarise(self) -> int:
        from echo2.cli.demo.summary import write_summary  # imports matplotlib, needed only here

        status = self.live.state.status
        assert status is not None
        summary = write_summary(self.run_folder, self.config, status, time.monotonic() - self.live.began)
        self.console.print(summary.text, highlight=False, soft_wrap=True)
        if summary.problems:
            raise IntegrityError("; ".join(summary.problems))
        return 0
