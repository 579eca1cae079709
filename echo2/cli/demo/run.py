"""`echo2 demo`: `echo2 run` with a preset under which a small model learns, over three emulated rented machines, and a summary.

Guarantees: the base model is made once and cached; the commands that it shows are those that run; a broken promise (a step short, a
token over S, unequal weights) ends it with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from echo2.base.errors import IntegrityError, StateError
from echo2.cli.demo import model
from echo2.cli.process import PARENT
from echo2.cli.processes import ChildFailed, RunLock
from echo2.cli.run import LocalRun
from echo2.config.load import load_config, parse_overrides
from echo2.config.run import RunConfig

# After so many the held-out reward of either model has risen (docs/demos.json, docs/demo-llm.json).
STEPS, LLM_STEPS = 120, 18
STILL_S, LLM_STILL_S = 300.0, 900.0  # the larger model's start, or one step, may take minutes on a busy machine
CACHE = Path("~/.cache/echo2/demo")  # beside pip's and Hugging Face's
LEARNER_LINK = "10mbit/s 100mbit/s 20ms"  # a home's uplink, so that versions must be relayed
LINK_FACTOR = 4
"""How many times faster the links are with the pretrained model, whose versions are megabytes instead of kilobytes."""
LLM_SETTINGS = {
    "task.name": "sums",
    "task.eval_prompts": "32",
    "task.eval_every_steps": "6",
    "sampling.max_prompt_tokens": "68",
    "sampling.max_new_tokens": "12",
    "learner.prompts_per_step": "8",
    "learner.rollouts_per_prompt": "8",
    "learner.lr": "3e-5",
    "learner.token_budget": "2048",
    "learner.checkpoint_every_steps": "100",
    "worker.slots": "32",
}
"""What differs with it. A checkpoint takes 1.6 GB here, so one at the end is enough."""


_TRAITS = ("price_usd_per_hour", "is_spot", "slowdown", "emulated_link")
# By name; how `echo-worker join` emulates three kinds of rented machine: near and dear, middling, far and cheap.
WORKERS = {
    "berlin": dict(zip(_TRAITS, ("0.4", "false", "2", "20mbit/s 60mbit/s 30ms"), strict=True)),
    "oregon": dict(zip(_TRAITS, ("0.22", "true", "3", "12mbit/s 40mbit/s 90ms"), strict=True)),
    "mumbai": dict(zip(_TRAITS, ("0.15", "true", "4.5", "10mbit/s 30mbit/s 140ms"), strict=True)),
}


def demo_run(args: argparse.Namespace, overrides: Mapping[str, str]) -> LocalRun:
    is_llm, recipe, cache = args.model == "smollm2", model.ModelRecipe(), CACHE.expanduser()
    folder = cache / model.LLM_FOLDER if is_llm else cache / f"sort-digits-{recipe.digest()}"
    settings = {
        "run.name": args.name or time.strftime("demo-%Y%m%d-%H%M%S"),
        "run.seed": str(args.seed),
        "model.path": str(folder),
        "task.eval_prompts": "128",
        "task.eval_every_steps": "20",
        "sampling.max_new_tokens": str(recipe.digits + 2),
        "staleness.bound": str(args.staleness),
        "learner.steps": str(args.steps or (LLM_STEPS if is_llm else STEPS)),
        "learner.prompts_per_step": "24",
        "learner.rollouts_per_prompt": "8",
        "learner.lr": "5e-4",
        "learner.checkpoint_every_steps": "10",
        "learner.emulated_link": faster(LEARNER_LINK) if is_llm else LEARNER_LINK,
        "worker.engine": args.engine,
        "worker.slots": "64",
    }
    settings |= LLM_SETTINGS if is_llm else {"task.args": f"{{digit_count = {recipe.digits}}}"}
    config = load_config((), "local", {**settings, **overrides})
    names = list(WORKERS)[: 2 if args.engine == "vllm" else 3]  # three vLLM engines start too slowly on a laptop
    workers = {name: worker_arguments(WORKERS[name], is_llm) for name in names}
    # More threads than one would only wait for each other in so small a model.
    threads = {} if is_llm else {"OMP_NUM_THREADS": "1"}
    still_s = LLM_STILL_S if is_llm else STILL_S
    again = f"the same command with --name {config.run.name}"
    return LocalRun(config, workers, {"HF_HUB_OFFLINE": "1", **threads}, args.worker_python, still_s, again=again)


def worker_arguments(options: dict[str, str], is_llm: bool = False) -> list[str]:
    settings = options | {"emulated_link": faster(options["emulated_link"])} if is_llm else options
    return [word for name, value in settings.items() for word in (f"--worker.{name}", value)]


def faster(link: str) -> str:
    """The link with LINK_FACTOR times the rates."""
    *rates, rtt = link.split()
    return " ".join([*(f"{LINK_FACTOR * int(rate.removesuffix('mbit/s'))}mbit/s" for rate in rates), rtt])


def run_demo(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if args.model == "smollm2":
        model.require_package()
    run, console = demo_run(args, parse_overrides(rest)), Console()
    lock = RunLock(run.folder)
    begun = run.folder / "run.toml"
    if begun.exists() and (model_path := load_config([begun]).model.path) != run.config.model.path:
        raise StateError(
            f"run folder {run.folder}: expected none or a demo's, found a run of {model_path}; choose --name"
        )
    _make_base_model(run.config, args.model == "smollm2", console)
    if not model.codec_stamp().exists():
        console.print("compiling the delta codec (once, then cached) …")
        try:
            model.warm_once()
        except subprocess.SubprocessError as error:
            raise ChildFailed(f"the delta codec could not be compiled: {error}") from None
    console.print(f"run folder {run.folder}; the same run by hand, in five terminals:\n", highlight=False)
    for command in run.commands().values():
        console.print(f"  {shlex.join(command)}", highlight=False, soft_wrap=True)
    console.print("")
    if problems := asyncio.run(run.run(console, args.plain, lock)).problems:
        raise IntegrityError("; ".join(problems))
    return 0


def _make_base_model(config: RunConfig, is_llm: bool, console: Console) -> None:
    folder = Path(config.model.path)
    if (folder / "config.json").exists():
        return
    what = "SmolLM2-135M-Instruct in bf16 from its package" if is_llm else "a small Qwen3 taught the answer format only"
    console.print(f"making the base model: {what} (once, then cached) …")
    how = ["--smollm2"] if is_llm else ["--recipe", json.dumps(asdict(model.ModelRecipe()))]
    done = subprocess.run(
        [sys.executable, "-m", "echo2.cli.demo.model", str(folder), *how], check=False,
        start_new_session=True, env={**os.environ, PARENT: str(os.getpid())},  # Ctrl-C reaches us, who kill it
    )  # fmt: skip
    if done.returncode != 0:
        raise ChildFailed(f"the base model in {folder} could not be made; its output is above")
