"""`echo2`: the command for operators and newcomers."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeAlias

import echo2
from echo2.base.errors import EchoError, ResourceError, StateError
from echo2.cli.options import Parser, add_config_arguments, check_options, config_of, require_extra, with_values
from echo2.cli.process import FORCED_EXIT_CODE, ended_by_interrupt, report_error

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
# Help that several commands share.
CONFIG = "the run's config; --model.path does as well"
RUN = "the run's folder (RUNS/NAME), an operator's link, or @FILE with one"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = make_parser()
    own, rest = parser.parse_known_args(with_values(arguments))
    if rest and not own.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        check_options(rest, parser)
        if own.needs_learner:
            require_extra("learner", own.needs_learner)
        with ended_by_interrupt():
            command = resolve_name(own.command)
        code = int(command(own, rest))
        sys.stdout.flush()
        return code
    except EchoError as error:
        return report_error(error)
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return report_error(ResourceError(f"{error.filename or 'this machine'}: {error.strerror or error}"))
    except KeyboardInterrupt:
        return FORCED_EXIT_CODE


def make_parser() -> argparse.ArgumentParser:
    """All commands with their arguments; what a command needs is imported when it runs, for most of it loads slowly."""
    parser: argparse.ArgumentParser = Parser(
        prog="echo2", description="RL post-training of LLMs over a wide-area network."
    )
    parser.add_argument("--version", action="version", version=f"echo2 {echo2.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_config(commands)
    _add_demo(commands)
    _add_run(commands)
    _add_publish(commands)
    _add_doctor(commands)
    _add_export(commands)
    _add_status(commands)
    _add_folder(commands)
    _add_token(commands)
    _add_plan(commands)
    _add_offers(commands)
    _add_ctl(commands)
    return parser


def add_command(commands: Commands, name: str, command: str, text: str, **more: object) -> argparse.ArgumentParser:
    """Adds a subcommand. `command`: the MODULE:FUNCTION of echo2.cli that takes the parsed arguments and the unrecognised ones and
    returns the exit code. `takes_overrides` is set: it accepts `--section.option VALUE`. `needs_learner`: the command's name, if it
    needs the packages of the extra `learner`."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=f"echo2.cli.{command}", **{"takes_overrides": False, "needs_learner": "", **more})
    return parser


def _add_config(commands: Commands) -> None:
    config = commands.add_parser("config", help="look at the configuration")
    inner = config.add_subparsers(required=True, metavar="COMMAND")
    show = add_command(
        inner,
        "show",
        "main:show_config",
        "print the resolved config as TOML, each option explained",
        takes_overrides=True,
    )
    show.add_argument("files", nargs="*", type=Path, metavar="FILE", help="run files in TOML; the later one wins")
    show.add_argument("--preset", help="local, lan or wan")
    show.add_argument("--plain", action="store_true", help="without the explanations")


def show_config(own: argparse.Namespace, rest: Sequence[str]) -> int:
    """`echo2 config show`; returns the exit code."""
    from echo2.cli.sizing import resolved
    from echo2.config.load import to_toml  # imports pydantic, as slow as all the rest
    from echo2.tasks.built_in import trusted_text

    config = config_of(own.files, own.preset, rest)
    notes = {name: f"here: {found.value} ({found.why})" for name, found in resolved(config).items()}
    print(to_toml(config, with_descriptions=not own.plain, notes={} if own.plain else notes))
    if config.task.trusted_rewards:
        for name, args in config.task.asked:
            print(f"# WARNING: {trusted_text(name, args)}", file=sys.stderr)
    return 0


def _add_doctor(commands: Commands) -> None:
    text = "check this machine and, with a join link, how it is reached and how fast its link is; say what to do about each problem"
    doctor = add_command(commands, "doctor", "doctor:run_doctor", text, takes_overrides=True)
    add_config_arguments(doctor)
    doctor.add_argument(
        "--link", "--join", default="", help="join link, or @FILE that holds it; checking does not use it up"
    )
    doctor.add_argument("--folder", type=Path, help="where the daemon would keep its files (default: here)")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")


def _add_demo(commands: Commands) -> None:
    demo = add_command(
        commands,
        "demo",
        "demo.run:run_demo",
        "train a small model over three emulated rented machines",
        takes_overrides=True,
        needs_learner="echo2 demo",
    )
    demo.add_argument("--name", help="names the run folder (default: demo-DATE-TIME)")
    demo.add_argument("--seed", type=int, default=0, help="of prompts, sampling and links (default: 0)")
    demo.add_argument(
        "--model", choices=["made", "smollm2"], default="made",
        help="made: a tiny one, made here; smollm2: SmolLM2-135M-Instruct on sums as a chat, needs echo2[llm]",
    )  # fmt: skip
    demo.add_argument(
        "--steps", type=int, default=0, help="optimiser steps; 0: as many as it takes to learn (default: 0)"
    )
    demo.add_argument(
        "--staleness",
        type=int,
        default=4,
        metavar="S",
        help="no token older than S steps is trained on; 0: synchronous (default: 4)",
    )
    demo.add_argument(
        "--engine",
        choices=["embedded", "vllm"],
        default="embedded",
        help="what workers generate with (default: embedded)",
    )
    demo.add_argument(
        "--worker-python", default=sys.executable, metavar="PATH", help="Python of the workers' environment, for vLLM"
    )
    demo.add_argument("--plain", action="store_true", help="print lines instead of the live screen")


def _add_run(commands: Commands) -> None:
    texts = {
        "run": "run a config on this machine: coordinator, learner and workers",
        "serve": "serve a fleet to a trainer of another project (docs/doors.md)",
    }
    for name, text in texts.items():
        run = add_command(
            commands, name, "run:run_here", text,
            takes_overrides=True, needs_learner=f"echo2 {name}", is_served=name == "serve",
        )  # fmt: skip
        run.add_argument("file", type=Path, metavar="RUN.toml", help="the run file")
        few = 0 if name == "serve" else 1
        run.add_argument(
            "--workers", type=int, default=few, metavar="N", help=f"worker processes on this machine (default: {few})"
        )
        if name == "serve":
            run.add_argument("--trains", action="store_true", help="a client of Tinker's API trains the model here")
        run.add_argument("--preset", default=None, help="local, lan or wan")
        run.add_argument("--plain", action="store_true", help="print lines instead of the live screen")


def _add_publish(commands: Commands) -> None:
    text = "hand a model folder to the fleet that echo2 serve serves, as its newest version"
    publish = add_command(commands, "publish", "publish:publish", text)
    publish.add_argument("folder", help="a model folder with safetensors, or the URL of one")
    publish.add_argument("--version", type=int, required=True, metavar="N", help="above the newest, such as your step")
    publish.add_argument("--run", type=Path, required=True, metavar="FOLDER", help="the run's folder, RUNS/NAME")
    publish.add_argument("--last", action="store_true", help="end the run once workers could fetch it")


def _add_export(commands: Commands) -> None:
    export = add_command(
        commands,
        "export",
        "main:export",
        "write a run's newest checkpoint as a Hugging Face folder",
        needs_learner="echo2 export",
    )
    export.add_argument("run", type=Path, help="the run's folder (RUNS/NAME), finished or not")
    export.add_argument("target", type=Path, help="folder to write; new or empty")
    export.add_argument("--model", default="", help="the base model, if it has moved since the run began")


def export(own: argparse.Namespace, _: Sequence[str]) -> int:
    """`echo2 export`; returns the exit code."""
    inner = own.run / "learner"
    if not (inner if inner.is_dir() else own.run).joinpath("checkpoints").is_dir():
        raise StateError(f"{own.run}: expected a run's folder (RUNS/NAME) with checkpoints, found none")
    from echo2.learner.startup import export_run  # imports torch

    step = export_run(inner if inner.is_dir() else own.run, own.target, own.model)
    print(f"{own.target}: the policy after step {step}")
    return 0


def _add_status(commands: Commands) -> None:
    status = add_command(
        commands, "status", "operator:show_status", "show a run: learner, plan, workers; of a finished one, its report"
    )
    status.add_argument("run", metavar="RUN", help=RUN)
    status.add_argument("--json", action="store_true", help="print the status message as JSON")


def _add_folder(commands: Commands) -> None:
    """What a run's folder on this machine answers."""
    for name, text in (
        ("samples", "show completions of held-out prompts: the first and the newest, with the expected answer"),
        ("tail", "show what the run's processes log, from now on"),
        ("stop", "stop a run that `echo2 run` runs, as Ctrl-C does: it saves, and the same command goes on"),
    ):
        parser = add_command(commands, name, f"run_folder:{name}", text)
        parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder (RUNS/NAME)")


def _add_ctl(commands: Commands) -> None:
    parser = add_command(
        commands, "ctl", "operator:control", "change a run that goes on: budget, cap, S, pause, stop, workers"
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument(
        "words", metavar="WORD", nargs="+",
        help="advice | set budget=USD cap=USD S=STEPS price.OFFER=USD | pause | resume | stop | worker NAME STATE | do ACTION JSON",
    )  # fmt: skip


def _add_token(commands: Commands) -> None:
    token = add_command(
        commands, "link", "operator:make_link", "make a join link for a worker, a learner or another operator"
    )
    token.add_argument("run", metavar="RUN", help=RUN)
    token.add_argument(
        "--role",
        choices=["worker", "learner", "operator"],
        default="worker",
        help="who may join with it (default: worker)",
    )
    token.add_argument("--lifetime", default="7d", help="how long it lets anyone join, such as 12h (default: 7d)")
    token.add_argument(
        "--uses", type=int, default=0, help="how many machines may join with it; 0: up to 10,000 (default: 0)"
    )
    token.add_argument("--label", default="", help="a note for the list of tokens")


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="RUN.toml", help=CONFIG)
    parser.add_argument("--preset", help="local, lan or wan")
    parser.add_argument(
        "--billions", type=float, metavar="N", help="the model's parameters, if its config.json is not here"
    )
    parser.add_argument("--catalogue", type=Path, metavar="GPUS.toml", help="data sheets instead of the built-in ones")


def _add_plan(commands: Commands) -> None:
    text = "how many of which machines a run needs, what they cost and what limits it"
    parser = add_command(commands, "plan", "plan:run_plan", text, takes_overrides=True)
    _add_model_arguments(parser)
    parser.add_argument("--fleet", type=Path, metavar="FLEET.toml", help="machines on offer, learner and lengths")
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="NAME=VALUE,..",
        help="S, kappa, uplink, train and others: with another value",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--explain", action="store_true", help="show the calculation")


def _add_offers(commands: Commands) -> None:
    text = "what can be rented, by what a million useful tokens of this run would cost on it"
    parser = add_command(commands, "offers", "offers:run_offers", text, takes_overrides=True)
    _add_model_arguments(parser)
    parser.add_argument("--provider", action="append", default=[], help="only of this one; may be repeated")
    parser.add_argument("--gpu", action="append", default=[], help="only this kind, such as RTX4090; may be repeated")
    parser.add_argument("--region", default="", help="only regions whose name holds this")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--spot", action="store_true", help="only spot machines")
    kinds.add_argument("--on-demand", action="store_true", help="no spot machines")
    parser.add_argument("--usd-per-hour-max", type=float, default=math.inf, metavar="USD", help="no dearer machines")
    parser.add_argument(
        "--sort", choices=["price", "speed", "tokens"], default="tokens", help="by USD per token, by price or by speed"
    )
    parser.add_argument("--rows", type=int, help="so many lines, 0: all (default: the best of each kind of GPU)")
    fetching = parser.add_mutually_exclusive_group()
    fetching.add_argument("--refresh", action="store_true", help="fetch prices now, or fail")
    fetching.add_argument("--offline", action="store_true", help="open no connection")
    parser.add_argument(
        "--max-age", default="1h", metavar="AGE", help="fetch where kept prices are older (default: 1h)"
    )
    fetching.add_argument("--recorded", type=Path, metavar="FILE", help="a recorded catalogue instead of the market")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep what was found in a file, for --recorded")
    parser.add_argument("--json", action="store_true", help="print them as JSON")


if __name__ == "__main__":
    sys.exit(main())
