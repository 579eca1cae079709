"""`echo-coordinator`: keeps a run's control state and decides which workers work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from echo2.base.errors import EchoError
from echo2.cli.options import Parser, add_daemon_arguments, parse
from echo2.cli.process import die_with_parent, ended_by_interrupt, report_error, run_daemon, set_up_logging
from echo2.coordinator.hub import CoordinatorOptions


@ended_by_interrupt()
def main(arguments: Sequence[str] | None = None) -> int:
    die_with_parent()
    parser = Parser(prog="echo-coordinator", description="The coordinator: leases, plan and dashboard of a run.")
    parser.add_argument("--folder", type=Path, help="where the run's state and join links lie (default: RUNS/NAME)")
    parser.add_argument("--free-ports", action="store_true", help="where a port is taken, listen on a free one")
    parser.add_argument(
        "--exit-when-finished", action="store_true", help="end with the run; else the dashboard stays up"
    )
    add_daemon_arguments(parser)
    try:
        args, config = parse(parser, arguments)
        set_up_logging(args.log_json, args.verbose)
        folder = args.folder or Path(config.run.folder) / config.run.name
        options = CoordinatorOptions(folder, config, args.exit_when_finished, args.free_ports)
    except EchoError as error:
        return report_error(error)
    from echo2.coordinator.coordinator import CoordinatorDaemon  # gRPC: only after bad arguments were refused

    return run_daemon(lambda: CoordinatorDaemon(options), folder)


if __name__ == "__main__":
    sys.exit(main())
