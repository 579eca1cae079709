"""Resolves options whose default depends on the machine and the model, each with the reason.

`echo2 config show` prints the result after the option; `echo-learner` uses it. Guarantees: a value that the user gave is kept.
Leaves to others: the rules (cost_model).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Generic, TypeVar

from echo2.base.units import format_bytes, format_seconds
from echo2.broadcast.topology import CHUNKS_AIM, chunk_bytes_for
from echo2.cli.run_shape import guessed_model_of, learner_run, lengths_of
from echo2.config.run import RunConfig
from echo2.cost_model.checkpoint_interval import REPLAY_S, STEPS_MAX
from echo2.cost_model.memory import (
    CHECKPOINTING_FROM_BYTES,
    TOKEN_BUDGET_MAX_CPU,
    Checkpointing,
    activation_bytes,
    checkpointing_of,
    learner_memory,
    token_budget_for,
    wants_checkpointing,
)
from echo2.cost_model.sizing import ModelSize
from echo2.tasks.runtime.rewards import available_cores, reward_processes
from echo2.worker.runtime.machine import local_gpus, memory_total_bytes

_T_co = TypeVar("_T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[_T_co]):
    """An option's resolved value, and why it is this one."""

    value: _T_co
    why: str


def resolved(config: RunConfig, cores: int = 0) -> dict[str, Resolved[object]]:
    """Resolves all such options, by name; leaves out those that the user set. `cores` 0: this machine's."""
    found: dict[str, Resolved[object]] = {}
    if not (config.task.reward_processes or config.task.ray):
        found["task.reward_processes"] = scorers(cores or available_cores())
    if not config.learner.threads:
        found["learner.threads"] = threads(cores or available_cores())
    if not config.learner.token_budget:
        found["learner.token_budget"] = token_budget(config)
    if config.learner.gradient_checkpointing == "auto":
        found["learner.gradient_checkpointing"] = gradient_checkpointing(config)
    if config.learner.objective == "auto":
        found["learner.objective"] = objective(config)
    if config.learner.normalisation == "auto":
        found["learner.normalisation"] = normalisation(config)
    if not config.learner.checkpoint_every_steps:
        found["learner.checkpoint_every_steps"] = Resolved(
            f"at most {STEPS_MAX}",
            f"as many as cost least with what a kill has trained again, and train for {format_seconds(REPLAY_S)} at most; the "
            "learner's log says how many",
        )
    if config.model.path:
        size, origin = guessed_model_of(config.model.path)
        longest = lengths_of(config).of(size)
        if (chunks := chunk_bytes(config, size)) is not None:
            found["broadcast.chunk_bytes"] = chunks
        if not config.worker.context_tokens:
            found["worker.context_tokens"] = Resolved(
                longest, f"max_prompt_tokens + max_new_tokens of each turn, within the model's context ({origin})"
            )
        if not config.worker.slots:
            found["worker.slots"] = Resolved("by memory", f"sequences of {longest} tokens that fit: see echo2 doctor")
    return found


TOKEN_CLIP_BOUND_MAX = 4
"""Largest S at which the token-level clip learns about as much as on policy (benchmarks/results/corrections.json)."""


def objective(config: RunConfig) -> Resolved[str]:
    """Resolves the policy loss's objective: the user's choice, unless that is auto."""
    named, bound = config.learner.objective, config.staleness.bound
    if named != "auto":
        return Resolved(named, "given")
    if bound <= TOKEN_CLIP_BOUND_MAX:
        return Resolved(
            "token", f"the staleness bound {bound} is at most {TOKEN_CLIP_BOUND_MAX}: docs/algorithms.md has the table"
        )
    return Resolved(
        "gspo",
        f"the staleness bound {bound} is above {TOKEN_CLIP_BOUND_MAX}, where clipping by token loses: docs/algorithms.md",
    )


def normalisation(config: RunConfig) -> Resolved[str]:
    """Resolves the policy loss's normalisation: that of the objective's paper, or luspo if gspo was chosen for a large bound."""
    if config.learner.normalisation != "auto":
        return Resolved(config.learner.normalisation, "given")
    chosen = objective(config).value
    if chosen == "gspo" and config.learner.objective == "auto":
        return Resolved(
            "luspo", f"with gspo above a staleness bound of {TOKEN_CLIP_BOUND_MAX} it lost least: docs/algorithms.md"
        )
    by_rollout = chosen in ("gspo", "sapo")
    return Resolved(
        "grpo" if by_rollout else "dapo", "each rollout weighs the same" if by_rollout else "each token does"
    )


def threads(cores: int) -> Resolved[int]:
    """Resolves the trainer's thread count: all cores but one."""
    if cores <= 1:
        return Resolved(1, "there is one core")
    return Resolved(cores - 1, f"{cores} cores, one of them for sockets, rewards and the codec")


def scorers(cores: int) -> Resolved[int]:
    """Resolves the number of processes that compute contained rewards."""
    return Resolved(reward_processes(cores), f"a quarter of {cores} cores, two at least")


def chunk_bytes(config: RunConfig, size: ModelSize) -> Resolved[str] | None:
    """Resolves the chunk size of a keyframe on fast links; None if it is the configured size."""
    keyframe_bytes = size.gpu_weight_bytes
    most = config.broadcast.chunk_bytes
    taken = chunk_bytes_for(None, most, keyframe_bytes)
    if taken == most:
        return None
    why = f"for a keyframe of up to {format_bytes(keyframe_bytes)}, at most {CHUNKS_AIM} chunks; slow uplinks take smaller ones"
    return Resolved(format_bytes(taken), why)


def token_budget(config: RunConfig) -> Resolved[int]:
    """Resolves the tokens per micro-batch of the trainer on this machine."""
    if config.learner.token_budget:
        return Resolved(config.learner.token_budget, "given")
    if not config.model.path:
        return Resolved(TOKEN_BUDGET_MAX_CPU, "no model is named")
    size, _ = guessed_model_of(config.model.path)
    gpus = () if config.learner.device == "cpu" else local_gpus()
    gpu_count = int(os.environ.get("WORLD_SIZE", "1")) if gpus else 0
    memory_bytes = min((gpu.memory_bytes for gpu in gpus), default=memory_total_bytes())
    longest = lengths_of(config).of(size)
    run = learner_run(config, size)
    budget = token_budget_for(size, longest, memory_bytes, gpu_count, run)
    where = f"each of {gpu_count} GPUs" if gpu_count else "memory"
    keeps = checkpointing_of(config.learner.gradient_checkpointing, size, budget, 2 if gpu_count else 4)
    needed = learner_memory(size, budget, keeps, gpu_count=gpu_count, run=run).device_bytes
    why = (
        f"the learner then takes {format_bytes(needed)} of {format_bytes(memory_bytes)} on {where}, sequences of up to "
        f"{longest} tokens"
    )
    return Resolved(budget, why)


def gradient_checkpointing(config: RunConfig) -> Resolved[bool]:
    """Resolves whether the backward pass recomputes layers."""
    if not config.model.path:
        return Resolved(False, "no model is named")
    size, _ = guessed_model_of(config.model.path)
    value_bytes = 4 if config.learner.device == "cpu" else 2
    budget = token_budget(config).value
    kept = activation_bytes(size, budget, Checkpointing.OFF, value_bytes)
    does = wants_checkpointing(size, budget, value_bytes)
    than = "more" if does else "less"
    return Resolved(
        does,
        f"{format_bytes(kept)} of activations for {budget} tokens without it, {than} than "
        f"{format_bytes(CHECKPOINTING_FROM_BYTES)}",
    )
