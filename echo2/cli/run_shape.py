"""Derives a run's model size and sequence lengths from its config, before any weights are loaded.

`model_of` looks for the model's config.json in a local folder, then in the hub's cache on this machine, then among the built-in
shapes; it returns the source, and refuses an unknown model. `guessed_model_of` guesses from the parameter count in the name
instead, for settings that need some value.
Guarantees: opens no connection, imports no torch. Leaves to others: what fits (cost_model/sizing).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from echo2.base.errors import ConfigError, ResourceError
from echo2.base.units import format_bytes, format_seconds
from echo2.broadcast.room import store_bytes_for
from echo2.config.run import RunConfig
from echo2.coordinator.runtime.catalogue import built_in_models
from echo2.cost_model.catalogue import CPU, GpuType, WorkerPrior, worker_prior
from echo2.cost_model.memory import (
    Checkpointing,
    LearnerMemory,
    LearnerRun,
    checkpointing_of,
    learner_memory,
    token_budget_for,
)
from echo2.cost_model.question import billions_in
from echo2.cost_model.sizing import (
    ModelSize,
    Quantisation,
    RunLengths,
    longest_sequence,
    model_size,
    size_by_billions,
)

DEFAULT_BILLIONS = 8.0
MEAN_SHARE, TAIL_SHARE = 0.35, 0.85  # of the longest completion, if no lengths are given
SCORED_VERSIONS = 2  # the audit scores each rollout under its version and an older one
CHECKPOINTING_WORDS = {
    Checkpointing.OFF: "", Checkpointing.FULL: ", checkpointed", Checkpointing.SELECTIVE: ", selectively checkpointed",
}  # fmt: skip
FIT_COLUMNS = ("machine", "GPUs a worker", "sequences", "at full length", "tokens of cache", "what would fit")


@dataclass(frozen=True, slots=True)
class ForeseenAudit:
    """Predicted cost of the audit.

    `fleet_share`: tokens that workers prefill for it, per token trained on. `own_s_per_step`: the learner's seconds per step for
    known answers and for rollouts that no worker may score. `alone_s_per_step`: its seconds per step if it scores everything.
    `kept_share`: share of tokens in rollouts that keep their KV cache across versions, which the learner scores itself; 0 if
    caches are recomputed.
    """

    fleet_share: float
    own_s_per_step: float
    alone_s_per_step: float
    kept_share: float = 0.0


def model_of(path: str) -> tuple[ModelSize, str]:
    """Returns the model's size and the source of it. Raises ConfigError if the model is unknown."""
    found = _known(path)
    if found is not None:
        return found
    ways = "give the parameters in billions by --billions, or [model] billions in the fleet file"
    if not path:
        raise ConfigError(
            f"model.path: expected a model to plan for, got none: give RUN.toml or --model.path; or {ways}"
        )
    if path.startswith((".", "/", "~")):
        raise ConfigError(
            f"model.path {path}: expected config.json in that folder, found none. Name another, or {ways}"
        )
    raise ConfigError(
        f"model.path {path}: expected its config.json, in that folder or in the hub's cache on this machine, found none. "
        f"Fetch it (hf download {path} config.json), or {ways}"
    )


def guessed_model_of(path: str) -> tuple[ModelSize, str]:
    """Like `model_of`, but guesses the size of an unknown model."""
    found = _known(path)
    if found is not None:
        return found
    billions = billions_in(path)
    origin = "a guess by its name" if billions else "a guess: model.path names no model that is known here"
    return size_by_billions(built_in_models(), billions or DEFAULT_BILLIONS), origin


def _known(path: str) -> tuple[ModelSize, str] | None:
    folder = Path(path).expanduser()
    for file in [folder / "config.json", *_cached(path)]:
        if path and file.is_file():
            return _read(file), str(file)
    name = path.rstrip("/").rpartition("/")[2].lower().removesuffix("-instruct")
    if name in built_in_models():
        return built_in_models()[name], "the shapes that come with echo2"
    return None


def turns_max(config: RunConfig) -> int:
    """Returns the most completions of one rollout: an agent's turns, or those of the task with most turns."""
    from echo2.tasks.runtime.registry import turns_of
    from echo2.tasks.task import TaskSpec

    if config.agent.is_on:
        return config.agent.turns
    further = ((one.task, one.args) for one in config.task.eval_sets.values())
    return max(turns_of(TaskSpec(name, args)) for name, args in (*config.task.asked, *further))


def lengths_of(config: RunConfig) -> RunLengths:
    """Returns the run's longest sequence and the limits that its config sets for workers."""
    sampling, worker = config.sampling, config.worker
    longest = longest_sequence(sampling.max_prompt_tokens, sampling.max_new_tokens, turns_max(config))
    return RunLengths(longest, worker.slots, worker.context_tokens, Quantisation(worker.quantisation))


def fit_rows(model: ModelSize, lengths: RunLengths, gpus: Iterable[GpuType]) -> Iterator[tuple[str, ...]]:
    """Yields rows of FIT_COLUMNS: how the model fits each kind of machine, with the number of GPUs that gives most tokens for its
    price. If that is more than one and the model also fits one GPU, a row for one GPU comes first."""
    for gpu in gpus:
        name = f"{gpu.name} ({format_bytes(gpu.memory_bytes)})"
        try:
            prior = worker_prior(gpu, model, lengths)
        except ResourceError as error:
            yield name, "", "", "", "", str(error).rpartition("what would fit: ")[2]
            continue
        if prior.gpu_count > 1:
            with contextlib.suppress(ResourceError):
                yield _fit_row(gpu, worker_prior(gpu, model, lengths, gpu_count=1))
        yield _fit_row(gpu, prior)


def _fit_row(gpu: GpuType, prior: WorkerPrior) -> tuple[str, ...]:
    fit = prior.fit
    return (
        f"{gpu.name} ({format_bytes(gpu.memory_bytes)})", "" if gpu.name == CPU else str(prior.gpu_count), str(prior.slots),
        str(fit.engine_count * fit.whole_sequences), str(fit.engine_count * fit.cache_tokens), "",
    )  # fmt: skip


def learner_run(config: RunConfig, model: ModelSize) -> LearnerRun:
    """Returns what the learner keeps for this run. Rollouts of at most S + 1 steps are open or wait to be trained on."""
    learner, bound = config.learner, config.staleness.bound
    rollouts = learner.prompts_per_step * learner.rollouts_per_prompt * (bound + 1)
    made = LearnerRun(
        staleness_bound=bound,
        checkpoints_kept=learner.checkpoints_kept,
        published_value_bytes=2 if config.model.weights_dtype == "bfloat16" else 4,
        rollout_tokens=rollouts * turns_max(config) * MEAN_SHARE * config.sampling.max_new_tokens,
        replicas=learner.replicas,
        adapter_rank=config.model.lora_rank,
        is_audited=learner.audit_share > 0,
        has_reference=learner.kl_coefficient > 0,
    )
    return replace(made, store_bytes=learner.store_bytes or store_bytes_for(made.published_bytes(model)))


@dataclass(frozen=True, slots=True)
class LearnerNeeds:
    """Needs of a learner on `gpu_count` GPUs (0: on the CPU) with micro-batches of `budget` tokens."""

    gpu_count: int
    budget: int
    checkpointing: Checkpointing
    memory: LearnerMemory


def learner_needs(config: RunConfig, model: ModelSize, gpu_count: int, memory_bytes: int) -> LearnerNeeds:
    """Computes the needs of a learner on `gpu_count` GPUs (0: on the CPU) of `memory_bytes` each, for plan and doctor."""
    run = learner_run(config, model)
    budget = config.learner.token_budget or token_budget_for(
        model, lengths_of(config).of(model), memory_bytes, gpu_count, run
    )
    keeps = checkpointing_of(config.learner.gradient_checkpointing, model, budget, 2 if gpu_count else 4)
    return LearnerNeeds(gpu_count, budget, keeps, learner_memory(model, budget, keeps, gpu_count=gpu_count, run=run))


def gpus_text(count: int) -> str:
    """Names the GPUs that each hold one copy of something."""
    return "one GPU" if count == 1 else f"each of {count} GPUs"


def learner_line(config: RunConfig, model: ModelSize, gpu_count: int, memory_bytes: int) -> str:
    """Describes what the learner needs, in one line."""
    needs, replicas = learner_needs(config, model, gpu_count, memory_bytes), config.learner.replicas
    found = needs.memory
    where = gpus_text(gpu_count) if gpu_count else "the CPU, in memory"
    if replicas > 1:
        where += f", {replicas} copies" + (f" of {gpu_count // replicas} each" if gpu_count >= replicas else "")
    if gpu_count % replicas:
        where += f" (learner.replicas = {replicas} does not divide {gpu_count} ranks: such a learner does not start)"
    parts = (
        f"{format_bytes(found.state_bytes)} of state and about {format_bytes(found.activation_bytes)} of activations"
    )
    return (
        f"learner: {format_bytes(found.device_bytes)} on {where} ({parts} for {needs.budget} tokens"
        f"{CHECKPOINTING_WORDS[needs.checkpointing]}), {format_bytes(found.host_bytes)} of host memory beside it, "
        f"{format_bytes(found.disk_bytes)} of disk for checkpoints and chunks"
    )


def audit_costs(
    config: RunConfig, prompt_tokens: float, completion_tokens: float, train_s: float, kept_share: float = 0.0
) -> ForeseenAudit | None:
    """Predicts the cost of the audit; None if it is off, as with an adapter. `train_s`: training time of a step. Training on a
    token costs three forward passes, scoring it costs one. `kept_share`: see ForeseenAudit."""
    from echo2.learner.scorings import VERIFIED_SHARE  # imports numpy, needed only here

    given = config.learner
    if not given.audit_share or config.model.lora_rank:
        return None
    read = (prompt_tokens + completion_tokens) / completion_tokens
    wanted = given.audit_share * SCORED_VERSIONS * read
    own_s = wanted * train_s / 3
    for_workers = wanted * (1.0 - kept_share)
    share = min(for_workers, given.audit_fleet_share)
    # If the fleet limit caps the workers' share, everything is sampled less.
    drawn = share / for_workers if given.audit_fleet_share and for_workers > 0 else 1.0
    own = drawn * kept_share + VERIFIED_SHARE * share / wanted
    return ForeseenAudit(share, own * own_s, own_s, kept_share)


def audit_line(found: ForeseenAudit | None) -> str:
    """Describes the audit's cost in one line."""
    if found is None:
        return "audit: off"
    alone = f"{format_seconds(found.alone_s_per_step)} where no worker can score"
    if not found.fleet_share:
        return f"audit: no worker scores; the learner scores {format_seconds(found.alone_s_per_step)} a step"
    kept = f"{found.kept_share:.0%} of the tokens are of rollouts that keep their cache across versions, "
    kept = f"{kept}which the learner scores itself; " if found.kept_share else ""
    return (
        f"audit: {kept}workers read {found.fleet_share:.0%} of the tokens trained on once more, by prefill; the learner scores "
        f"about {format_seconds(found.own_s_per_step)} a step itself, {alone}"
    )


def _read(file: Path) -> ModelSize:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: expected a model's config as JSON, got: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: expected a model's config, got {type(config).__name__}")
    return model_size(config)


def _cached(path: str) -> list[Path]:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()
    if path.count("/") != 1 or path.startswith(("/", ".", "~")):
        return []
    return sorted(cache.glob(f"models--{path.replace('/', '--')}/snapshots/*/config.json"))
