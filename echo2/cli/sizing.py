"""A run's model, lengths and the learner's needs, and the options that follow from them, before any weights are loaded.

Guarantees: opens no connection; imports torch only to count a family that the formula does not know.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal, TypeVar

from echo2.base.errors import ConfigError, ResourceError
from echo2.base.units import format_bytes, format_seconds
from echo2.config.run import RunConfig
from echo2.coordinator.money.market import built_in_catalogue, built_in_models
from echo2.cost_model import sizing as rule
from echo2.cost_model.machines import CPU, GpuType, WorkerPrior, worker_prior
from echo2.cost_model.question import billions_in
from echo2.cost_model.sizing import Checkpointing, LearnerMemory, LearnerRun, ModelSize, RunLengths
from echo2.worker.machine import local_gpus, memory_total_bytes

DEFAULT_BILLIONS = 8.0  # a guess where the name has no number
MEAN_SHARE, TAIL_SHARE = 0.35, 0.85  # of the longest completion, if no lengths are given
CHECKPOINTING_WORDS = {
    Checkpointing.OFF: "", Checkpointing.FULL: ", checkpointed", Checkpointing.SELECTIVE: ", selectively checkpointed",
}  # fmt: skip
# As they stand in the table.
FIT_COLUMNS = ("machine", "GPUs a worker", "sequences", "at full length", "tokens of cache", "what would fit")


def model_of(path: str) -> tuple[ModelSize, str]:
    """Returns the model's size and the source of it: config.json in a local folder, then in the hub's cache on this machine, then
    the built-in shapes. Raises ConfigError if the model is unknown."""
    if (known := _known(path)) is not None:
        return known
    ways = "give the parameters in billions by --billions, or [model] billions in the fleet file"
    if not path:
        raise ConfigError("model.path: expected a model, got none: give RUN.toml, or --model.path Qwen/Qwen3-4B")
    if path.startswith((".", "/", "~")):
        raise ConfigError(
            f"model.path {path}: expected config.json in that folder, found none. Name another, or {ways}"
        )
    raise ConfigError(
        f"model.path {path}: expected its config.json, in that folder or in the hub's cache on this machine, found none. "
        f"Fetch it (hf download {path} config.json), or {ways}"
    )


def guessed_model_of(path: str) -> tuple[ModelSize, str]:
    """Like `model_of`, but guesses the size of an unknown model from the parameter count in its name."""
    if (known := _known(path)) is not None:
        return known
    billions = billions_in(path)
    origin = "a guess by its name" if billions else "a guess: model.path names no model that is known here"
    return rule.size_by_billions(built_in_models(), billions or DEFAULT_BILLIONS), origin


def _known(path: str) -> tuple[ModelSize, str] | None:
    folder = Path(path).expanduser()
    for file in [folder / "config.json", *_cached(path)]:
        if path and file.is_file():
            return _read(file), str(file)
    name = path.rstrip("/").rpartition("/")[2].lower().removesuffix("-instruct")
    size = built_in_models().get(name)
    return None if size is None else (size, "the shapes that come with echo2")


def turns_max(config: RunConfig) -> int:
    """Returns the most completions of one rollout: an agent's turns, or those of the task with most turns."""
    from echo2.tasks.registry import turns_of
    from echo2.tasks.task import TaskSpec

    if config.agent.is_on:
        return config.agent.turns
    further = ((each.task, each.args) for each in config.task.eval_sets.values())
    return max(turns_of(TaskSpec(name, args)) for name, args in (*config.task.asked, *further))


def lengths_of(config: RunConfig) -> RunLengths:
    """Returns the run's longest sequence and the limits that its config sets for workers."""
    sampling, worker = config.sampling, config.worker
    longest = rule.longest_sequence(sampling.max_prompt_tokens, sampling.max_new_tokens, turns_max(config))
    return RunLengths(longest, worker.slots, rule.Quantisation(worker.quantisation))


def fit_rows(model: ModelSize, lengths: RunLengths, gpus: Iterable[GpuType]) -> Iterator[tuple[str, ...]]:
    """Yields rows of FIT_COLUMNS: how the model fits each kind of machine, with the number of GPUs that gives most tokens for its
    price. If that is more than one and the model also fits one GPU, a row for one GPU comes first."""
    for gpu in gpus:
        name, priors = f"{gpu.name} ({format_bytes(gpu.memory_bytes)})", list[WorkerPrior]()
        try:
            priors.append(worker_prior(gpu, model, lengths))
        except ResourceError as error:
            yield name, "", "", "", "", str(error).rpartition("what would fit: ")[2]
            continue
        if priors[0].gpu_count > 1:
            with contextlib.suppress(ResourceError):
                priors.insert(0, worker_prior(gpu, model, lengths, gpu_count=1))
        for prior in priors:
            fit, count = prior.fit, "" if gpu.name == CPU else str(prior.gpu_count)
            sequences, tokens = fit.engine_count * fit.whole_sequences, fit.engine_count * fit.cache_tokens
            yield name, count, str(prior.slots), str(sequences), str(tokens), ""


def learner_run(config: RunConfig, model: ModelSize) -> LearnerRun:
    """Returns what the learner keeps for this run. Rollouts of at most S + 1 steps are open or wait to be trained on."""
    from echo2.broadcast.artifact import store_bytes_for  # loads signatures, which most commands need not

    learner, bound = config.learner, config.staleness.bound
    rollouts = learner.prompts_per_step * learner.rollouts_per_prompt * (bound + 1)
    run = LearnerRun(
        staleness_bound=bound,
        published_value_bytes=4 if config.model.weights_dtype == "float32" else 2,
        rollout_tokens=rollouts * turns_max(config) * MEAN_SHARE * config.sampling.max_new_tokens,
        replicas=learner.replicas,
        adapter_rank=config.model.lora_rank,
        optimizer_state=learner.optimizer_state,
        has_nf4_base=config.model.weights_dtype == "nf4",
        is_audited=learner.audit_share > 0,
        reference=guessed_model_of(learner.teacher)[0]
        if learner.teacher
        else model
        if learner.kl_coefficient > 0 and not config.model.lora_rank  # without its adapter, the policy is the base
        else None,
    )
    return replace(run, store_bytes=store_bytes_for(run.published_bytes(model)))


LEARNER_GPU = "H100"  # of a learner, unless another is named


@dataclass(frozen=True, slots=True)
class LearnerMachine:
    """A learner's hardware. `gpu_count`: GPUs of `gpu_memory_bytes` each on all the learner's machines; 0: it runs on the CPU.
    `memory_bytes`, `disk_bytes`: this host's; 0: unknown. `gpus_here`: GPUs on this host; 0: all of them."""

    gpu_count: int
    gpu_memory_bytes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    gpus_here: int = 0

    @property
    def device_bytes(self) -> int:
        return self.gpu_memory_bytes if self.gpu_count else self.memory_bytes


@dataclass(frozen=True, slots=True)
class LearnerNeeds:
    budget: int
    checkpointing: Checkpointing
    memory: LearnerMemory


def learner_needs(config: RunConfig, model: ModelSize, machine: LearnerMachine, budget: int = 0) -> LearnerNeeds:
    """Computes the needs of the learner on this machine, for plan, doctor and the learner itself. `budget` 0: the configured one,
    else as large as the machine allows."""
    run, gpu_count = learner_run(config, model), machine.gpu_count
    longest = lengths_of(config).of(model)
    budget = budget or config.learner.token_budget
    budget = budget or rule.token_budget_for(model, longest, machine.device_bytes, gpu_count, run)
    keeps = rule.checkpointing_of(config.learner.gradient_checkpointing, model, budget, 2 if gpu_count else 4)
    return LearnerNeeds(budget, keeps, rule.learner_memory(model, budget, keeps, gpu_count=gpu_count, run=run))


def gpus_text(count: int) -> str:
    return "one GPU" if count == 1 else f"each of {count} GPUs"


def learner_line(config: RunConfig, model: ModelSize, machine: LearnerMachine) -> str:
    needs, replicas, gpu_count = learner_needs(config, model, machine), config.learner.replicas, machine.gpu_count
    memory = needs.memory
    where = gpus_text(gpu_count) if gpu_count else "the CPU, in memory"
    if replicas > 1:
        where += f", {replicas} copies" + (f" of {gpu_count // replicas} each" if gpu_count >= replicas else "")
    if gpu_count % replicas:
        where += f" (learner.replicas = {replicas} does not divide {gpu_count} ranks: such a learner does not start)"
    return (
        f"learner: {format_bytes(memory.device_bytes)} on {where} ({format_bytes(memory.state_bytes)} of state and about "
        f"{format_bytes(memory.activation_bytes)} of activations for {needs.budget} tokens"
        f"{CHECKPOINTING_WORDS[needs.checkpointing]}), {format_bytes(memory.host_bytes)} of host memory beside it, "
        f"{format_bytes(memory.disk_bytes)} of disk for checkpoints and chunks"
    )


def audit_s_per_step(config: RunConfig, prompt_tokens: float, completion_tokens: float, train_s: float) -> float | None:
    """Predicts the learner's seconds per step for the audit; None if it is off, as with an adapter. `train_s`: training time of a
    step. Training on a token costs three forward passes, scoring it costs one."""
    if not config.learner.audit_share or config.model.lora_rank:
        return None
    read = (prompt_tokens + completion_tokens) / completion_tokens
    return config.learner.audit_share * read * train_s / 3


def _read(file: Path) -> ModelSize:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: expected a model's config as JSON, got: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: expected a model's config, got {type(config).__name__}")
    is_known = config.get("model_type") in rule.DENSE
    return rule.model_size(config) if is_known else _counted(str(file.parent), json.dumps(config))


@functools.cache
def _counted(folder: str, config: str) -> ModelSize:
    """The size of a family that the formula does not know."""
    try:
        from echo2.learner.training.loading import read_config, size_of  # takes seconds, and torch
    except ImportError:
        return rule.model_size(json.loads(config))
    return size_of(read_config(folder))


def _cached(path: str) -> list[Path]:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()
    if path.count("/") != 1 or path.startswith(("/", ".", "~")):
        return []
    return sorted(cache.glob(f"models--{path.replace('/', '--')}/snapshots/*/config.json"))


@dataclass(frozen=True, slots=True)
class Shortage:
    """A resource that is too small. `text`: what is needed and what there is. `would_fit`: hardware or settings that would do."""

    what: str
    text: str
    would_fit: str


def gpus_needed(config: RunConfig, model: ModelSize, gpu_memory_bytes: int) -> int:
    budget, asked = config.learner.token_budget or rule.TOKEN_BUDGET_MAX, config.learner.gradient_checkpointing
    return rule.fewest_gpus(model, budget, gpu_memory_bytes, learner_run(config, model), asked)


def shortages(config: RunConfig, model: ModelSize, machine: LearnerMachine) -> list[Shortage]:
    """Lists what this machine lacks for the learner; empty if it fits."""
    memory = learner_needs(config, model, machine).memory
    host_share = (machine.gpus_here or machine.gpu_count) / machine.gpu_count if machine.gpu_count else 1.0
    host_bytes = int(memory.host_bytes * host_share)
    needs = []
    if not _fits(memory, machine):
        if machine.gpu_count:
            what, where, needed = "GPU memory", gpus_text(machine.gpu_count), memory.device_bytes
            each, room = int(needed / rule.GPU_MEMORY_SHARE), int(rule.GPU_MEMORY_SHARE * machine.gpu_memory_bytes)
            there = (
                f"{format_bytes(room)} there ({rule.GPU_MEMORY_SHARE:.0%} of {format_bytes(machine.gpu_memory_bytes)})"
            )
        else:
            what, where, needed = "memory", "the CPU", memory.device_bytes + memory.host_bytes
            each, there = needed, f"{format_bytes(machine.memory_bytes)} there"
        would = "; ".join(_instead(config, model, machine, each))
        needs.append(Shortage(what, f"{format_bytes(needed)} needed on {where}, {there}", would))
    if machine.gpu_count and machine.memory_bytes and host_bytes > machine.memory_bytes:
        text = f"{format_bytes(host_bytes)} needed, {format_bytes(machine.memory_bytes)} there"
        needs.append(Shortage("host memory", text, f"a host with {format_bytes(host_bytes)} of memory"))
    if machine.disk_bytes and memory.disk_bytes > machine.disk_bytes:
        text = f"{format_bytes(memory.disk_bytes)} needed, {format_bytes(machine.disk_bytes)} free"
        would = f"{format_bytes(memory.disk_bytes)} of free disk (--folder names another)"
        needs.append(Shortage("disk", text, would))
    return needs


def _instead(config: RunConfig, model: ModelSize, machine: LearnerMachine, needed_bytes: int) -> Iterator[str]:
    """Yields alternatives: more GPUs, larger ones or more memory, smaller micro-batches, the optimiser's state on the host, or an
    adapter's base in 4 bits."""

    def fits(machine: LearnerMachine, budget: int = 0, config: RunConfig = config) -> bool:
        budget = budget or config.learner.token_budget or rule.TOKEN_BUDGET_MAX
        return _fits(learner_needs(config, model, machine, budget).memory, machine)

    gpu = built_in_catalogue()[LEARNER_GPU]
    memory_bytes, kind = (machine.gpu_memory_bytes, "such") if machine.gpu_count else (gpu.memory_bytes, gpu.name)
    count = gpus_needed(config, model, memory_bytes)
    if count < config.learner.replicas * rule.COPY_GPUS_MAX or fits(LearnerMachine(count, memory_bytes)):
        yield f"{count} {kind} GPU{'' if count == 1 else 's'}"
    yield f"GPUs of {format_bytes(needed_bytes)}" if machine.gpu_count else f"{format_bytes(needed_bytes)} of memory"
    budget = learner_needs(config, model, machine).budget // 2
    least = max(rule.TOKEN_BUDGET_MIN, lengths_of(config).of(model))
    while budget >= least and not fits(machine, budget):
        budget //= 2
    if budget >= least:
        yield f"learner.token_budget {budget}"
    lora = bool(config.model.lora_rank)
    room, option, value = ("model", "weights_dtype", "nf4") if lora else ("learner", "optimizer_state", "host")
    leaner = config.model_copy(update={room: getattr(config, room).model_copy(update={option: value})})
    if machine.gpu_count and leaner != config and fits(machine, config=leaner):
        beside = learner_needs(leaner, model, machine).memory.host_bytes
        yield f"{room}.{option} {value}, with {format_bytes(beside)} of host memory"


def _fits(memory: LearnerMemory, machine: LearnerMachine) -> bool:
    if not machine.gpu_count:
        return memory.device_bytes + memory.host_bytes <= machine.memory_bytes
    return memory.device_bytes <= rule.GPU_MEMORY_SHARE * machine.gpu_memory_bytes


_T_co = TypeVar("_T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ResolvedValue(Generic[_T_co]):
    """An option's resolved value, and why it is this one; "given" if the user set it."""

    value: _T_co
    why: str


def resolved(config: RunConfig) -> dict[str, ResolvedValue[object]]:
    """Resolves all such options, by name; leaves out those that the user set."""
    values: dict[str, ResolvedValue[object]] = {
        "learner.token_budget": token_budget(config),
        "learner.gradient_checkpointing": gradient_checkpointing(config),
        "learner.loss": loss(config),
    }
    values = {name: value for name, value in values.items() if value.why != "given"}
    if not config.learner.checkpoint_every_steps:
        values["learner.checkpoint_every_steps"] = ResolvedValue(
            f"at most {rule.STEPS_MAX}",
            f"as many as cost least with what a kill has trained again, and train for {format_seconds(rule.REPLAY_S)} at most; the "
            "learner's log says how many",
        )
    if config.model.path and not config.worker.slots:
        size, origin = guessed_model_of(config.model.path)
        why = f"max_prompt_tokens + max_new_tokens of each turn, within the model's context ({origin})"
        values["worker.slots"] = ResolvedValue(
            "by memory", f"sequences of {lengths_of(config).of(size)} tokens ({why}) that fit: see echo2 doctor"
        )
    return values


TOKEN_CLIP_BOUND_MAX = 4
"""Largest S at which the token-level clip learns about as much as on policy (benchmarks/results/corrections.json)."""


def loss(config: RunConfig) -> ResolvedValue[str]:
    """Resolves the name of the loss: the user's choice, unless that is auto."""
    if config.learner.loss != "auto":
        return ResolvedValue(config.learner.loss, "given")
    bound = f"the staleness bound {config.staleness.bound} is"
    if config.staleness.bound <= TOKEN_CLIP_BOUND_MAX:
        return ResolvedValue("dapo", f"{bound} at most {TOKEN_CLIP_BOUND_MAX}: docs/algorithms.md has the table")
    return ResolvedValue("luspo", f"{bound} above {TOKEN_CLIP_BOUND_MAX}, where it lost least: docs/algorithms.md")


def threads(cores: int) -> int:
    """The trainer's threads: OMP_NUM_THREADS, as for torch anywhere, else all cores but one, for sockets, rewards and the codec."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdecimal() and int(setting) else max(1, cores - 1)


def token_budget(config: RunConfig) -> ResolvedValue[int]:
    """Resolves the tokens per micro-batch of the trainer on this machine."""
    if config.learner.token_budget:
        return ResolvedValue(config.learner.token_budget, "given")
    if not config.model.path:
        return ResolvedValue(rule.TOKEN_BUDGET_MAX_CPU, "no model is named")
    size, machine, needs = _needs_here(config)
    where = gpus_text(machine.gpu_count) if machine.gpu_count else "memory"
    why = (
        f"the learner then takes {format_bytes(needs.memory.device_bytes)} of {format_bytes(machine.device_bytes)} on {where}, "
        f"sequences of up to {lengths_of(config).of(size)} tokens"
    )
    return ResolvedValue(needs.budget, why)


def gradient_checkpointing(config: RunConfig) -> ResolvedValue[bool | Literal["selective"]]:
    """Resolves whether the backward pass recomputes layers: the user's choice, unless that is auto."""
    asked = config.learner.gradient_checkpointing
    if asked != "auto":
        return ResolvedValue(asked, "given")
    if not config.model.path:
        return ResolvedValue(False, "no model is named")
    size, machine, needs = _needs_here(config)
    activations = rule.activation_bytes(size, needs.budget, Checkpointing.OFF, 2 if machine.gpu_count else 4)
    does = needs.checkpointing is Checkpointing.FULL
    more, most = "more" if does else "less", format_bytes(rule.CHECKPOINTING_FROM_BYTES)
    why = f"{format_bytes(activations)} of activations for {needs.budget} tokens without it, {more} than {most}"
    return ResolvedValue(does, why)


def _needs_here(config: RunConfig) -> tuple[ModelSize, LearnerMachine, LearnerNeeds]:
    """The model, this machine and what the learner needs on it. Of GPUs, unless the learner is to run on the CPU, those of all
    torchrun's ranks count; else one."""
    size, _ = guessed_model_of(config.model.path)
    gpus = () if config.learner.device == "cpu" else local_gpus()
    gpu_count = int(os.environ.get("WORLD_SIZE", "1")) if gpus else 0
    least_bytes = min((gpu.memory_bytes for gpu in gpus), default=0)
    machine = LearnerMachine(gpu_count, least_bytes, memory_total_bytes())
    return size, machine, learner_needs(config, size, machine)
