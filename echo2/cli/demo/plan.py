"""Defines what the demo runs: config, processes and their commands. Pure; `launch` starts them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from echo2.cli.demo.llm import LINK_FACTOR, SETTINGS
from echo2.cli.demo.model import ModelRecipe
from echo2.config.load import load_config
from echo2.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class DemoWorker:
    """One emulated rented machine."""

    name: str
    price_usd_per_hour: float
    is_spot: bool
    slowdown: float
    uplink: str
    downlink: str
    rtt: str


WORKERS = (
    DemoWorker("berlin", 0.40, False, 2.0, "20mbit/s", "60mbit/s", "30ms"),
    DemoWorker("oregon", 0.22, True, 3.0, "12mbit/s", "40mbit/s", "90ms"),
    DemoWorker("mumbai", 0.15, True, 4.5, "10mbit/s", "30mbit/s", "140ms"),
)
# Enrolment, services, dashboard, learner; busy ones are replaced.
PORTS = (8418, 8419, 8420, 8421)
LEARNER_LINK = {"emulated_uplink": "10mbit/s", "emulated_downlink": "100mbit/s", "emulated_rtt": "20ms"}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of `echo2 demo`. `worker_python`: the interpreter of the workers' environment."""

    name: str
    seed: int = 0
    steps: int = 120
    staleness_bound: int = 4
    engine: str = "embedded"
    worker_python: str = sys.executable
    model: str = "made"  # made here, a hundred thousand parameters; or smollm2, pretrained
    overrides: dict[str, str] = field(default_factory=dict)

    @property
    def workers(self) -> tuple[DemoWorker, ...]:
        """The emulated workers; only two with vLLM, since three vLLM engines start too slowly on a laptop."""
        chosen = WORKERS[:2] if self.engine == "vllm" else WORKERS
        return tuple(faster(worker) for worker in chosen) if self.is_llm else chosen

    @property
    def is_llm(self) -> bool:
        return self.model == "smollm2"


def demo_config(options: DemoOptions, model_folder: Path, recipe: ModelRecipe, ports: tuple[int, ...]) -> RunConfig:
    """Resolves the demo's config: preset `local` with settings under which the model learns. `ports`: as in PORTS."""
    dotted = {
        "run.name": options.name,
        "run.seed": str(options.seed),
        "model.path": str(model_folder),
        "task.name": "sort_digits",
        "task.args": f"{{digit_count = {recipe.digits}}}",
        "task.eval_prompts": "128",
        "task.eval_every_steps": "20",
        "sampling.max_new_tokens": str(recipe.digits + 2),
        "staleness.bound": str(options.staleness_bound),
        "learner.steps": str(options.steps),
        "learner.prompts_per_step": "24",
        "learner.rollouts_per_prompt": "8",
        "learner.lr": "5e-4",
        "learner.correction": "behaviour",
        "learner.threads": "1",  # the model is so small that more threads would only wait for each other
        "learner.checkpoint_every_steps": "10",
        "worker.engine": options.engine,
        "worker.slots": "64",
        "coordinator.enrol_port": str(ports[0]),
        "coordinator.port": str(ports[1]),
        "coordinator.dashboard_port": str(ports[2]),
        "learner.port": str(ports[3]),
        **{f"broadcast.{name}": value for name, value in LEARNER_LINK.items()},
    }
    if options.is_llm:
        del dotted["task.args"]
        dotted |= SETTINGS | {"broadcast.emulated_uplink": _faster(LEARNER_LINK["emulated_uplink"])}
    return load_config((), "local", dotted | options.overrides)


def faster(worker: DemoWorker) -> DemoWorker:
    """Returns the same machine on a link fast enough for a pretrained model's versions."""
    return replace(worker, uplink=_faster(worker.uplink), downlink=_faster(worker.downlink))


def _faster(rate: str) -> str:
    return f"{LINK_FACTOR * int(rate.removesuffix('mbit/s'))}mbit/s"


def commands(run_folder: Path, workers: Sequence[DemoWorker] = WORKERS) -> dict[str, list[str]]:
    """Returns the commands by process name, as a person would type them."""
    config = str(run_folder / "run.toml")
    links = run_folder / "links"
    found = {
        "coordinator": ["echo-coordinator", "--config", config],
        "learner": ["echo-learner", "join", f"@{links / 'learner.link'}", "--config", config],
    }
    for worker in workers:
        found[worker.name] = [
            "echo-worker", "join", f"@{links / 'worker.link'}", "--config", config, "--name", worker.name,
            "--worker.price_usd_per_hour", str(worker.price_usd_per_hour), "--worker.is_spot", str(worker.is_spot).lower(),
            "--worker.slowdown", str(worker.slowdown), "--worker.emulated_uplink", worker.uplink,
            "--worker.emulated_downlink", worker.downlink, "--worker.emulated_rtt", worker.rtt,
        ]  # fmt: skip
    return found


def executable(command: list[str], worker_python: str = sys.executable) -> list[str]:
    """Returns the same command run by this interpreter, or the workers' own, regardless of PATH."""
    module = {"echo-coordinator": "coordinator", "echo-learner": "learner", "echo-worker": "worker"}[command[0]]
    python = worker_python if module == "worker" else sys.executable
    return [python, "-m", f"echo2.cli.{module}", *command[1:]]


def shown(command: list[str]) -> str:
    return shlex.join(command)
