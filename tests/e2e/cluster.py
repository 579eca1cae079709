"""Real daemons on loopback for tests: started, killed, frozen and restarted by name, all gone at the end."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fork_server import OWNER, ROOT, SETTINGS, ForkedProcess
from tests.patience import WAIT_S
from tests.ports import choose_ports

MODULES = {"echo-coordinator": "coordinator", "echo-learner": "learner", "echo-worker": "worker"}


def words_of(program: str) -> list[str]:
    """What Python is given to run one of our commands, a script, or a module that is named as such."""
    if program.endswith(".py"):
        return [program]
    return ["-m", f"echo2.cli.{MODULES[program]}" if program in MODULES else program]


def environment_of(home: Path) -> dict[str, str]:
    """For processes of this checkout: an empty home folder, one thread, no hub."""
    return {**os.environ, **SETTINGS, "HOME": str(home), "PYTHONPATH": str(ROOT)}


def made_models() -> Path:
    """Where models that tests have made are kept for the next tests of this checkout: a folder for each source that makes them."""
    source = (ROOT / "echo2" / "cli" / "demo" / "model.py").read_bytes()
    return ROOT / "build" / "models" / hashlib.sha256(source).hexdigest()[:12]


def error_line(code: int, stderr: str) -> str:
    """The one line that a command ends with which cannot go on."""
    lines = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and code != 0 and "Traceback" not in stderr, stderr[-4000:]
    return lines[0]


def small_run(
    folder: Path, base: Path, *, steps: int = 30, prompts: int = 12, rollouts: int = 8, eval_prompts: int = 32,
    eval_every_steps: int = 10, checkpoint_every_steps: int = 5,
) -> str:  # fmt: skip
    """The configuration of a run below `folder`, on free ports; tests add their own options at the end."""
    enrol, services, page, learner = choose_ports((0, 0, 0, 0))
    return f"""
preset = "local"
[run]
name = "trial"
folder = "{folder}/runs"
[model]
path = "{base}"
[task]
name = "sort_digits"
args = {{ digit_count = 5 }}
eval_prompts = {eval_prompts}
eval_every_steps = {eval_every_steps}
[sampling]
max_new_tokens = 7
[coordinator]
enrol_port = {enrol}
port = {services}
dashboard_port = {page}
[learner]
port = {learner}
steps = {steps}
prompts_per_step = {prompts}
rollouts_per_prompt = {rollouts}
lr = 1e-3
correction = "behaviour"
checkpoint_every_steps = {checkpoint_every_steps}
"""


class Cluster:
    """Use as a context manager; every process that it started is killed at the end."""

    def __init__(self, folder: Path, config: str, workers: int = 2) -> None:
        self.folder = folder
        self.run_folder = folder / "runs" / "trial"
        self.run_folder.mkdir(parents=True)
        (self.run_folder / "run.toml").write_text(config)
        links = self.run_folder / "links"
        common = ["--config", str(self.run_folder / "run.toml")]
        self.commands: dict[str, list[str]] = {
            "coordinator": ["echo-coordinator", *common],
            "learner": ["echo-learner", "join", f"@{links / 'learner.link'}", *common],
        }
        for number in range(workers):
            name = f"w{number}"
            self.commands[name] = ["echo-worker", "join", f"@{links / 'worker.link'}", *common, "--name", name]
        self.processes: dict[str, ForkedProcess | subprocess.Popen[bytes]] = {}
        self.placed: Callable[[str, list[str]], list[str]] = lambda name, argv: argv
        """How a process is started where it belongs, for instance in a network namespace."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(WAIT_S)
        if error is not None:
            for name in self.processes:
                print(f"--- {name}\n{self.log(name)[-3000:]}")

    def start(self, name: str) -> None:
        program, *arguments = self.commands[name]
        log = (self.folder / f"{name}.log").open("ab")
        environment = environment_of(self.folder)
        words = [*words_of(program), *arguments]
        command = self.placed(name, [sys.executable, *words])
        if command[0] == sys.executable and OWNER in os.environ:  # a benchmark's daemons are started as a user's
            self.processes[name] = ForkedProcess(words, environment, self.folder, log.fileno())
        else:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        log.close()

    def start_all(self) -> None:
        self.start_all_but_learner()
        self.start("learner")

    def start_all_but_learner(self) -> None:
        self.start("coordinator")
        links = self.run_folder / "links"
        self.wait_until(lambda: all((links / f"{r}.link").exists() for r in ("learner", "worker")), "join links")
        for name in self.commands:
            if name not in ("coordinator", "learner"):
                self.start(name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.killpg(self.processes[name].pid, number)
        if number == signal.SIGKILL:
            self.processes[name].wait(WAIT_S)

    def wait(self, name: str) -> int:
        return self.processes[name].wait(WAIT_S)

    def wait_until(self, condition: Any, what: str, timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            for name, process in self.processes.items():
                code = process.poll()
                assert code is None or code <= 0, f"{name} ended with code {code}:\n{self.log(name)[-2000:]}"
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
            time.sleep(0.05)  # a real process has no virtual clock

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of the learner's metrics.jsonl that are whole."""
        return self._lines("metrics.jsonl")

    def evaluations(self) -> list[dict[str, Any]]:
        return self._lines("evaluations.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_folder / "learner" / name
        if not path.exists():
            return []
        text = path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def step(self) -> int:
        return max((int(row["step"]) for row in self.metrics()), default=0)


def trained_groups(cluster: Cluster) -> dict[str, int]:
    """The ledger of the last checkpoint: each group that the model's history trained on, with its step."""
    newest = max((cluster.run_folder / "learner" / "checkpoints").glob("step-*"))
    trained: dict[str, int] = json.loads((newest / "state.json").read_text())["groups"]["trained"]
    return trained
