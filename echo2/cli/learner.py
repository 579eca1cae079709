"""`echo-learner`: trains the policy of a run and publishes it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.base.errors import ConfigError, EchoError
from echo2.base.rollout import SamplingParams
from echo2.cli.extras import require_extra
from echo2.cli.link_text import link_file, link_text
from echo2.cli.objective import policy_loss_of
from echo2.cli.options import add_config_arguments, add_log_arguments, parse
from echo2.cli.parser import Parser
from echo2.cli.process import Daemon, ended_by_interrupt, report_error, run_daemon, set_up_logging
from echo2.cli.resolved import gradient_checkpointing, threads, token_budget
from echo2.cli.run_shape import turns_max
from echo2.config.run import RunConfig
from echo2.tasks.runtime.rewards import available_cores

if TYPE_CHECKING:
    from echo2.learner.runtime.options import (
        AgentOptions,
        EvaluationOptions,
        LearnerOptions,
        TaskOptions,
        TrainerOptions,
    )


JOIN = "join a run as its learner and train to the last step; the same command goes on after a stop"


@ended_by_interrupt()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = Parser(prog="echo-learner", description="The learner: trains the model of a run.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    join = commands.add_parser("join", help=JOIN, description=JOIN)
    join.add_argument("link", help="learner join link, or @FILE that holds it")
    join.add_argument("--folder", type=Path, help="checkpoints, journal, metrics, model (default: RUNS/NAME/learner)")
    add_config_arguments(join)
    add_log_arguments(join)
    try:
        own, config = parse(parser, arguments)
        set_up_logging(own.log_json, own.verbose)
        require_extra("learner", "echo-learner")
        if not config.model.path:
            raise ConfigError("model.path: expected a model folder or hub id, got nothing")
        folder = own.folder or Path(config.run.folder) / config.run.name / "learner"
        is_follower = int(os.environ.get("RANK") or 0) > 0
        # Only rank 0 joins: other ranks, perhaps on another machine, need neither a link nor a file with one.
        options = learner_options(config, "" if is_follower else own.link, folder)
    except EchoError as error:
        return report_error(error)
    return follow_rank_0(options) if is_follower else run_daemon(lambda: _daemon(options), folder)


def learner_options(config: RunConfig, link: str, folder: Path) -> LearnerOptions:
    """Returns the learner's options from the resolved config. `link`: a join link or @FILE; empty if none is needed."""
    from echo2.broadcast.link_shape import LinkShape
    from echo2.cost_model.checkpoint_interval import STEPS_MAX
    from echo2.learner.runtime.options import CheckpointOptions, LearnerOptions

    learner = config.learner
    return LearnerOptions(
        folder=folder,
        run_id=config.run.name,
        steps=learner.steps,
        rollouts_per_step=learner.prompts_per_step * learner.rollouts_per_prompt,
        rollouts_per_group=learner.rollouts_per_prompt,
        staleness_bound=config.staleness.bound,
        trainer=_trainer_options(config),
        task=_task_options(config),
        sampling=_sampling(config),
        evaluation=_evaluation_options(config),
        checkpoint=CheckpointOptions(
            learner.checkpoint_every_steps or STEPS_MAX,
            learner.checkpoints_kept,
            follows_cost=not learner.checkpoint_every_steps,
        ),
        kappa=config.staleness.kappa or None,
        seed=config.run.seed,
        host=learner.host,
        port=learner.port,
        advertise=learner.advertise,
        relay_port=learner.relay_port,
        join_link=link_text(link),
        link_file=link_file(link),
        chunk_bytes=config.broadcast.chunk_bytes,
        store_bytes=config.learner.store_bytes,
        delta_setting=config.broadcast.delta_setting,
        uplink_limit_bytes_per_s=config.broadcast.uplink_limit,
        link=LinkShape(
            config.broadcast.emulated_uplink, config.broadcast.emulated_downlink, config.broadcast.emulated_rtt
        ),
        keyframe_chain_max=learner.keyframe_every_versions,
        drops_equal_rewards=learner.drop_equal_groups,
        overlong_buffer_tokens=learner.overlong_buffer_tokens,
        audit_share=learner.audit_share,
        audit_fleet_share=learner.audit_fleet_share,
        requires_seeds=not learner.drafting_workers,
        prunes_hopeless=learner.prune_hopeless,
        prompt_tokens_max=config.sampling.max_prompt_tokens,
        turns_max=turns_max(config),
        agent=_agent_options(config),
        metrics_port=learner.metrics_port,
        sinks=learner.sinks,
    )


def _agent_options(config: RunConfig) -> AgentOptions | None:
    from echo2.learner.runtime.options import AgentOptions

    agent = config.agent
    if not agent.is_on:
        return None
    return AgentOptions(
        agent.harness, agent.listen, agent.tls_certificate, agent.tls_key, agent.idle_timeout, agent.episode_timeout,
        agent.restarts, agent.at_once, config.run.name,
    )  # fmt: skip


def _sampling(config: RunConfig) -> SamplingParams:
    sampling, stops = config.sampling, tuple(text.encode() for text in config.sampling.stop)
    return SamplingParams(
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens, stop_strings=stops
    )


def _evaluation_options(config: RunConfig) -> EvaluationOptions:
    from echo2.learner.runtime.options import EvaluationOptions, EvaluationSet

    task = config.task
    sets = (
        EvaluationSet(name, one.task, one.args, one.prompts, one.samples, one.temperature)
        for name, one in task.eval_sets.items()
    )
    return EvaluationOptions(
        sum(task.held_out.values()),
        task.eval_every_steps,
        task.eval_samples,
        task.eval_temperature,
        task.eval_patience,
        tuple(sets),
    )


def _task_options(config: RunConfig) -> TaskOptions:
    from echo2.learner.runtime.options import MixedTask, TaskOptions
    from echo2.tasks.runtime.chat_format import ChatOptions

    task = config.task
    held_out = task.held_out
    mixture = tuple(
        MixedTask(name, one.task, one.args, one.weight, held_out[name]) for name, one in task.mixture.items()
    )
    chat = ChatOptions(task.system_prompt, task.template_args, task.plain_prompts)
    return TaskOptions(
        task.name, task.args, task.curriculum, task.epochs, task.trusted_rewards, task.readable,
        task.reward_processes, task.ray, chat, mixture,
    )  # fmt: skip


def _trainer_options(config: RunConfig) -> TrainerOptions:
    from echo2.learner.advantage import ADVANTAGES
    from echo2.learner.runtime.options import TrainerOptions

    learner = config.learner
    return TrainerOptions(
        model_path=config.model.path,
        weights_dtype=config.model.weights_dtype,
        lora_rank=config.model.lora_rank,
        lora_alpha=config.model.lora_alpha,
        device=learner.device,
        threads=learner.threads or threads(available_cores()).value,
        emulated_step_s=learner.emulated_step_s,
        lr=learner.lr,
        warmup_steps=learner.warmup_steps,
        schedule=learner.schedule,
        scales_lr_by_ess=learner.scale_lr_by_ess,
        beta1=learner.beta1,
        beta2=learner.beta2,
        weight_decay=learner.weight_decay,
        grad_clip=learner.grad_clip,
        epsilon=learner.adam_epsilon,
        loss=policy_loss_of(config),
        updates_per_batch=learner.updates_per_batch,
        trains_on_truncated=learner.train_on_truncated,
        advantage=ADVANTAGES[learner.advantage],
        token_budget=token_budget(config).value,
        attention=learner.attention,
        replicas=learner.replicas,
        replays_routing=learner.replay_routing,
        gradient_checkpointing=(
            gradient_checkpointing(config).value
            if learner.gradient_checkpointing == "auto"
            else learner.gradient_checkpointing
        ),
    )


def follow_rank_0(options: LearnerOptions) -> int:
    """Runs a torchrun rank above 0, which follows rank 0's orders; rank 0 runs the daemon. Returns the exit code.

    Ignores SIGINT and SIGTERM: rank 0 answers them with a last checkpoint, for which it needs the other ranks.
    """
    from echo2.learner.runtime.ranks import ranks_of_environment
    from echo2.learner.runtime.startup import follow

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        follow(options, ranks_of_environment(options.trainer.replicas))
    except EchoError as error:
        return report_error(error)
    return 0


def _daemon(options: LearnerOptions) -> Daemon:
    from echo2.learner.runtime.daemon import LearnerDaemon  # imports torch, so only after bad arguments were refused
    from echo2.learner.runtime.ranks import ranks_of_environment
    from echo2.learner.runtime.startup import prepare

    # Before the daemon runs: the other ranks wait here for this one, and the coordinator may take long.
    ranks = ranks_of_environment(options.trainer.replicas)
    return LearnerDaemon(options, make_prepared=lambda given, folder: prepare(given, folder, ranks))


if __name__ == "__main__":
    sys.exit(main())
