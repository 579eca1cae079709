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

from echo2.base.errors import ConfigError, EchoError, Unreachable
from echo2.base.units import address_of, mapped_address
from echo2.cli.options import Parser, add_daemon_arguments, link_file, link_text, parse, require_extra, with_values
from echo2.cli.process import Daemon, die_with_parent, ended_by_interrupt, report_error, run_daemon, set_up_logging
from echo2.config.run import RunConfig
from echo2.worker.control import ask
from echo2.worker.options import WorkerOptions

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")  # it is a folder name, too
# Help and descriptions of the commands.
JOIN = "join a run and generate rollouts for it until stopped, or until the run is finished"
HELP = {
    "status": "what the worker of this machine does and waits for",
    "drain": "let it finish what it holds, then leave the run",
    "leave": "make it hand back what it holds and leave the run at once",
}


@ended_by_interrupt()
def main(arguments: Sequence[str] | None = None) -> int:
    die_with_parent()
    parser: argparse.ArgumentParser = Parser(prog="echo-worker", description="A worker: generates rollouts for a run.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    join = commands.add_parser("join", help=JOIN, description=JOIN)
    add = join.add_argument
    add("link", help="join link, or @FILE that holds it")
    add("--name", default="", help="how the operator sees this machine (default: its host name)")
    text = "where it keeps its identity and weights (default: ~/.local/share/echo2/worker-NAME)"
    add("--folder", type=Path, help=text)
    text = "hand work back when the cloud takes the machine: aws, azure, gcp, or the address to ask"
    add("--preemption", default="", help=text)
    text = "public address and port that are mapped to worker.port (RunPod, Vast, a forwarded port)"
    add("--advertise", default="", metavar="ADDRESS:PORT", help=text)
    add_daemon_arguments(join)
    for name, text in HELP.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--name", default="", help="which worker, if several run here")
        command.add_argument("--folder", type=Path, help="the worker's folder, such as RUNS/NAME/workers/w1")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(control=name)
    try:
        if (control := parser.parse_known_args(with_values(arguments))[0]) and hasattr(control, "control"):
            return run_control(parser.parse_args(arguments))
        args, config = parse(parser, arguments)
        set_up_logging(args.log_json, args.verbose)
        require_extra("engine", "echo-worker")
        options = worker_options(args, config)
    except EchoError as error:
        return report_error(error)
    return run_daemon(lambda: _daemon(options, args.log_json), options.folder)


def worker_options(args: argparse.Namespace, config: RunConfig) -> WorkerOptions:
    if args.name and not NAME.fullmatch(args.name):
        raise ConfigError(f"--name: expected up to 63 letters, digits, _ . or -, not _ . - first, got {args.name!r}")
    name = args.name or re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "worker"
    return WorkerOptions(
        join_link=link_text(args.link),
        folder=args.folder or _default_folder(config, name),
        config=config,
        name=name,
        advertised_addresses=(address_of(*mapped_address(args.advertise, "--advertise")),) if args.advertise else (),
        link_file=link_file(args.link),
        preemption_notice=args.preemption,
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


def run_control(args: argparse.Namespace) -> int:
    """Asks the worker of the given folder, else of the default one of its name, else of the only default one; prints its answer."""
    home = _default_folder(RunConfig(), args.name or "*")
    folders = [home] if args.name else sorted(home.parent.glob(home.name))
    if args.folder is None and len(folders) != 1:
        found = ", ".join(map(str, folders)) or "none"
        raise Unreachable(f"worker: expected one in {home.parent}, found {found}; choose by --name or --folder")
    answer = asyncio.run(ask(args.folder or folders[0], args.control))
    if args.json:
        print(json.dumps(answer))
    elif set(answer) == {"text"}:
        print(answer["text"])
    else:
        width = max(map(len, answer))
        print("\n".join(f"{key.replace('_', ' '):<{width}}  {value}" for key, value in answer.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
