"""`echo-worker`: joins a run and generates rollouts for it."""

from __future__ import annotations

import argparse
import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from echo2.base.errors import ConfigError, EchoError
from echo2.base.hosts import joined, mapped_address
from echo2.broadcast.link_shape import LinkShape
from echo2.cli.extras import require_extra
from echo2.cli.link_text import link_file, link_text
from echo2.cli.options import add_config_arguments, add_log_arguments, parse, with_values
from echo2.cli.parser import Parser
from echo2.cli.process import Daemon, ended_by_interrupt, report_error, run_daemon, set_up_logging
from echo2.cli.worker_control import add_control_commands, run_control
from echo2.config.run import RunConfig
from echo2.cost_model.sizing import Quantisation
from echo2.worker.engine import SwapMode
from echo2.worker.options import EngineChoice, MachinePlace, WorkerOptions
from echo2.worker.place import place_of

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")  # it is a folder name, too


JOIN = "join a run and generate rollouts for it until stopped, or until the run is finished"


@ended_by_interrupt()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
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
    """The worker's options from the command line and the config's [worker] section."""
    if own.name and not NAME.fullmatch(own.name):
        raise ConfigError(f"--name: expected up to 63 letters, digits, _ . or -, not _ . - first, got {own.name!r}")
    name = own.name or re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "worker"
    worker = config.worker
    return WorkerOptions(
        join_link=link_text(own.link),
        folder=own.folder or _default_folder(config, name),
        name=name,
        engine=EngineChoice(worker.engine),
        slot_count=worker.slots,
        context_tokens_max=worker.context_tokens,
        price_usd_per_hour=worker.price_usd_per_hour,
        is_spot=worker.is_spot,
        listen_host=worker.host,
        listen_port=worker.port,
        advertised_addresses=_advertised(own.advertise or worker.advertise),
        link=LinkShape(worker.emulated_uplink, worker.emulated_downlink, worker.emulated_rtt),
        uplink_limit_bytes_per_s=worker.uplink_limit,
        store_bytes=worker.store_bytes,
        slowdown=worker.slowdown,
        draft_tokens=worker.draft_tokens,
        quantisation=Quantisation(worker.quantisation),
        swap_mode=SwapMode(worker.swap_mode),
        preemption_notice=own.preemption,
        link_file=link_file(own.link),
        seed=config.run.seed,
        model_path=config.model.path,
        place=place_of(MachinePlace(worker.provider, worker.region), os.environ),
    )


def _advertised(text: str) -> tuple[str, ...]:
    return (joined(*mapped_address(text, "--advertise")),) if text else ()


def _default_folder(config: RunConfig, name: str) -> Path:
    """Returns a folder in the run's folder if the config names the run, else one under the home folder."""
    if config.run.name != RunConfig().run.name:
        return Path(config.run.folder) / config.run.name / "workers" / name
    return Path(f"~/.local/share/echo2/worker-{name}").expanduser()


def _daemon(options: WorkerOptions, as_json: bool) -> Daemon:
    from echo2.outside.allocator import limit_arenas

    limit_arenas()  # before the first thread
    from echo2.worker.runtime.daemon import WorkerDaemon  # imports gRPC, so only after bad arguments were refused
    from echo2.worker.runtime.log_tail import LogTail
    from echo2.worker.runtime.progress import progress_for

    tail = LogTail()
    logging.getLogger("echo2").addHandler(tail)
    return WorkerDaemon(options, progress_for(sys.stderr, as_json), log=tail)


if __name__ == "__main__":
    sys.exit(main())
