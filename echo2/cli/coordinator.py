"""`echo-coordinator`: keeps a run's control state and decides which workers work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from echo2.base.errors import EchoError
from echo2.base.ids import RunId
from echo2.cli.options import add_config_arguments, add_log_arguments, parse
from echo2.cli.parser import Parser
from echo2.cli.process import Daemon, ended_by_interrupt, report_error, run_daemon, set_up_logging
from echo2.config.run import RunConfig
from echo2.coordinator.options import CoordinatorOptions, PlannerMode
from echo2.coordinator.runtime.experience_file import place


@ended_by_interrupt()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = Parser(prog="echo-coordinator", description="The coordinator: leases, plan and dashboard of a run.")
    parser.add_argument("--folder", type=Path, help="where the run's state and join links lie (default: RUNS/NAME)")
    add_config_arguments(parser)
    add_log_arguments(parser)
    try:
        own, config = parse(parser, arguments)
        set_up_logging(own.log_json, own.verbose)
        folder = own.folder or Path(config.run.folder) / config.run.name
        options = coordinator_options(config, folder)
    except EchoError as error:
        return report_error(error)
    return run_daemon(lambda: _daemon(options), folder)


def coordinator_options(config: RunConfig, folder: Path) -> CoordinatorOptions:
    """The coordinator's options from the resolved config."""
    section = config.coordinator
    return CoordinatorOptions(
        run_id=RunId(config.run.name),
        folder=folder,
        staleness_bound=config.staleness.bound,
        fixed_kappa=config.staleness.kappa,
        host=section.host,
        advertise_host=section.advertise,
        enrol_port=section.enrol_port,
        port=section.port,
        dashboard_port=section.dashboard_port,
        relay_port=section.relay_port,
        heartbeat_interval_s=section.heartbeat_interval,
        suspect_after_s=section.suspect_after,
        gone_after_s=section.gone_after,
        lease_timeout_s=section.lease_timeout,
        report_interval_s=section.report_interval,
        target_utilisation=section.target_utilisation,
        usd_per_hour_cap=section.usd_per_hour_cap,
        usd_budget=section.usd_budget,
        planner_mode=PlannerMode(section.planner_mode),
        offers_file=Path(section.offers) if section.offers else None,
        machines_file=place(section.machines_file),
        model_path=config.model.path,
        over_provision=section.over_provision,
        quantised_workers=section.quantised_workers,
        database_url=section.database_url,
        exit_when_finished=section.exit_when_finished,
        dashboard_host=section.dashboard_host,
    )


def _daemon(options: CoordinatorOptions) -> Daemon:
    from echo2.coordinator.runtime.daemon import (
        CoordinatorDaemon,
    )  # imports gRPC, so only after bad arguments were refused

    return CoordinatorDaemon(options)


if __name__ == "__main__":
    sys.exit(main())
