"""`echo-learner`: trains the policy of a run and publishes it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.base.errors import ConfigError, EchoError
from echo2.cli.options import Parser, add_daemon_arguments, link_file, link_text, parse, require_extra
from echo2.cli.process import Daemon, die_with_parent, ended_by_interrupt, report_error, run_daemon, set_up_logging
from echo2.config.run import RunConfig
from echo2.learner.training.model_files import checked_path
from echo2.outside.net import EVERY_ADDRESS

if TYPE_CHECKING:
    from echo2.learner.options import LearnerOptions

# Help and description of the commands.
ABOUT = {
    "join": "join a run as its learner and train to the last step; the same command goes on after a stop",
    "serve": "join a run in the learner's place, for a trainer of another project (docs/doors.md)",
}


@ended_by_interrupt()
def main(arguments: Sequence[str] | None = None) -> int:
    die_with_parent()
    parser = Parser(prog="echo-learner", description="The learner: trains the model of a run.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in ABOUT.items():
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(is_served=name == "serve")
        add = command.add_argument
        add("link", help="learner join link, or @FILE that holds it")
        add("--folder", type=Path, help="checkpoints, journal, metrics, model (default: RUNS/NAME/learner)")
        about = "port of its Prometheus page on loopback (default: none)"
        add("--metrics-port", type=int, default=0, metavar="PORT", help=about)
        if name == "serve":
            add("--trains", action="store_true", help="a client of Tinker's API trains the model here")
        add_daemon_arguments(command)
    try:
        args, config = parse(parser, arguments)
        set_up_logging(args.log_json, args.verbose)
        require_extra("learner", "echo-learner")
        check_start(config, trains=not args.is_served)
        folder = args.folder or Path(config.run.folder) / config.run.name / "learner"
        is_follower = int(os.environ.get("RANK") or 0) > 0
        # Only rank 0 joins: other ranks, perhaps on another machine, need neither a link nor a file with one.
        options = learner_options(config, "" if is_follower else args.link, folder, args.metrics_port)
        if args.is_served:
            return run_daemon(lambda: _serving(options, trains=args.trains), folder)
        if not is_follower:
            from echo2.learner.rollouts.prompts import (
                check_rewards_of,
                check_teacher,
                read_conversations_of,  # slow imports, needed only here
            )

            read_conversations_of(config)
            check_teacher(config)
            options = check_rewards_of(options)
    except EchoError as error:
        return report_error(error)
    try:
        return follow_rank_0(options) if is_follower else run_daemon(lambda: _daemon(options), folder)
    except RuntimeError as error:
        from echo2.learner.training.ranks import lost_rank

        return report_error(lost_rank(error))


def learner_options(config: RunConfig, link: str, folder: Path, metrics_port: int = 0) -> LearnerOptions:
    """`link`: a join link or @FILE; empty if none is needed."""
    from echo2.cli.sizing import gradient_checkpointing, loss, threads, token_budget, turns_max
    from echo2.learner.options import LearnerOptions
    from echo2.tasks.rewards import available_cores

    auto = {"loss": loss, "token_budget": token_budget, "gradient_checkpointing": gradient_checkpointing}
    learner = config.learner.model_copy(update={name: rule(config).value for name, rule in auto.items()})
    return LearnerOptions(
        folder, config.model_copy(update={"learner": learner}), threads(available_cores()), turns_max(config),
        "127.0.0.1" if config.coordinator.is_local else EVERY_ADDRESS,
        link_text(link), link_file(link), metrics_port,
    )  # fmt: skip


def check_start(config: RunConfig, *, trains: bool) -> None:
    """Raises ConfigError for what can be told before torch is imported: no model or damaged files; if the learner trains itself, no
    such task or a single rollout for a prompt: every advantage compares rollouts of one prompt, so all would be 0."""
    from echo2.cli.sizing import turns_max

    path = config.model.path
    if not path:
        raise ConfigError("model.path: expected a model folder or hub id, got nothing")
    checked_path(path, has_weights=True)
    if trains:
        turns_max(config)
    if trains and config.learner.rollouts_per_prompt < 2 and not config.learner.teacher:
        raise ConfigError(
            f"learner.rollouts_per_prompt: expected 2 or more, because learner.advantage {config.learner.advantage} compares the "
            "rollouts of a prompt with one another and one alone teaches nothing, got 1; take 4 to 16, and fewer prompts_per_step"
        )


def follow_rank_0(options: LearnerOptions) -> int:
    """Runs a torchrun rank above 0, which follows rank 0's orders; rank 0 runs the daemon. Returns the exit code. Ignores
    SIGINT, SIGTERM and SIGHUP: rank 0 answers them with a last checkpoint, for which it needs the other ranks."""
    from echo2.learner.startup import new_team
    from echo2.learner.training.ranks import ranks_of_environment

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        new_team(options, ranks_of_environment(options.config.learner.replicas)).follow()
    except EchoError as error:
        return report_error(error)
    return 0


def _daemon(options: LearnerOptions) -> Daemon:
    from echo2.learner.learner import LearnerDaemon  # imports torch, so only after bad arguments were refused
    from echo2.learner.startup import prepare
    from echo2.learner.training.ranks import ranks_of_environment

    # Before the daemon runs: the other ranks wait here for this one, and the coordinator may take long.
    ranks = ranks_of_environment(options.config.learner.replicas)
    return LearnerDaemon(options, make_prepared=lambda o, f: prepare(o, f, ranks))


def _serving(options: LearnerOptions, *, trains: bool) -> Daemon:
    from echo2.learner.learner import LearnerDaemon
    from echo2.learner.serve import VersionServer, prepare_served, served_options

    door = options.config.agent
    if not trains:
        served = served_options(options)
        return LearnerDaemon(served, make_prepared=prepare_served, make_server=lambda loop: VersionServer(loop, door))
    require_extra("tinker", "--trains")
    from echo2.learner.driven import driven_server, prepare_driven

    served = served_options(options, trains=True)
    return LearnerDaemon(served, make_prepared=prepare_driven, make_server=lambda loop: driven_server(loop, door))


if __name__ == "__main__":
    sys.exit(main())
