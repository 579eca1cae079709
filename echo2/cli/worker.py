"""`echo-worker`: joins a run and generates rollouts for it."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from echo2.base.errors import ConfigError, EchoError
from echo2.base.hosts import joined, mapped_address
from echo2.cli.options import (
    Parser,
    add_config_arguments,
    add_log_arguments,
    link_file,
    link_text,
    parse,
    require_extra,
    with_values,
)
from echo2.cli.process import Daemon, die_with_parent, ended_by_interrupt, report_error, run_daemon, set_up_logging
from echo2.config.run import RunConfig
from echo2.worker.control import CommandAnswer, ask, ask_at, running_workers, the_one
from echo2.worker.options import WorkerOptions

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")  # it is a folder name, too


# Help and description of the command.
JOIN = "join a run and generate rollouts for it until stopped, or until the run is finished"


@ended_by_interrupt()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    die_with_parent()
    parser: argparse.ArgumentParser = Parser(prog="echo-worker", description="A worker: generates rollouts for a run.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    join = commands.add_parser("join", help=JOIN, description=JOIN)
    join.add_argument("link", help="join link, or @FILE that holds it")
    join.add_argument("--name", default="", help="how the operator sees this machine (default: its host name)")
    join.add_argument(
        "--folder",
        type=Path,
        help="where it keeps its identity and weights (default: ~/.local/share/echo2/worker-NAME)",
    )
    join.add_argument(
        "--preemption",
        default="",
        help="hand work back when the cloud takes the machine: aws, azure, gcp, or the address to ask",
    )
    join.add_argument(
        "--advertise",
        default="",
        metavar="ADDRESS:PORT",
        help="public address and port that are mapped to worker.port (RunPod, Vast, a forwarded port)",
    )
    add_config_arguments(join)
    add_log_arguments(join)
    add_control_commands(commands)
    try:
        if (control := parser.parse_known_args(with_values(arguments))[0]) and hasattr(control, "control"):
            return run_control(parser.parse_args(arguments))
        own, config = parse(parser, arguments)
        set_up_logging(own.log_json, own.verbose)
        require_extra("engine", "echo-worker")
        options = worker_options(own, config)
    except EchoError as error:
        return report_error(error)
    return run_daemon(lambda: _daemon(options, own.log_json), options.folder)


def worker_options(own: argparse.Namespace, config: RunConfig) -> WorkerOptions:
    """The worker's options from the command line and the config."""
    if own.name and not NAME.fullmatch(own.name):
        raise ConfigError(f"--name: expected up to 63 letters, digits, _ . or -, not _ . - first, got {own.name!r}")
    name = own.name or re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "worker"
    return WorkerOptions(
        join_link=link_text(own.link),
        folder=own.folder or _default_folder(config, name),
        config=config,
        name=name,
        advertised_addresses=(joined(*mapped_address(own.advertise, "--advertise")),) if own.advertise else (),
        link_file=link_file(own.link),
        preemption_notice=own.preemption,
    )


def _default_folder(config: RunConfig, name: str) -> Path:
    """Returns a folder in the run's folder if the config names the run, else one under the home folder."""
    if config.run.name != RunConfig().run.name:
        return Path(config.run.folder) / config.run.name / "workers" / name
    return Path(f"~/.local/share/echo2/worker-{name}").expanduser()


def _daemon(options: WorkerOptions, as_json: bool) -> Daemon:
    from echo2.outside.allocator import limit_arenas

    limit_arenas()  # before the first thread
    from echo2.worker.heartbeat import LogTail
    from echo2.worker.weights import progress_for
    from echo2.worker.worker import WorkerDaemon  # imports gRPC, so only after bad arguments were refused

    tail = LogTail()
    logging.getLogger("echo2").addHandler(tail)
    return WorkerDaemon(options, progress_for(sys.stderr, as_json), log=tail)


# Of flags that are no options of the run.
HELP = {
    "status": "what the worker of this machine does and waits for",
    "drain": "let it finish what it holds, then leave the run",
    "leave": "make it hand back what it holds and leave the run at once",
}


def add_control_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, text in HELP.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--name", default="", help="which worker, if several run here")
        command.add_argument("--folder", type=Path, help="the worker's folder, if it is not the default one")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(control=name)


def run_control(own: argparse.Namespace) -> int:
    """Asks the worker and prints its answer."""
    answer = asyncio.run(_asked(own.folder, own.name, own.control))
    print(json.dumps(answer) if own.json else _as_text(answer))
    return 0


async def _asked(folder: Path | None, name: str, command: str) -> CommandAnswer:
    """Asks the worker of `folder` if given, else the running worker called `name`, or the only one."""
    if folder is not None:
        return await ask(folder, command)
    worker = the_one(await running_workers(), name)
    return await ask_at(worker.socket, command, f"worker {worker}")


def _as_text(answer: CommandAnswer) -> str:
    if set(answer) == {"text"}:
        return str(answer["text"])
    width = max(map(len, answer))
    return "\n".join(f"{key.replace('_', ' '):<{width}}  {value}" for key, value in answer.items())


if __name__ == "__main__":
    sys.exit(main())
