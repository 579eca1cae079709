"""Checks whether a machine has room for a run's learner (device memory, host memory, disk), and says what would fit instead.

Guarantees: `echo2 plan` and `echo2 doctor` both judge by this module only. Leaves to others: what a learner needs
(cost_model/memory through run_shape), inspecting the machine (worker/runtime/machine).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echo2.base.units import format_bytes
from echo2.cli.run_shape import LearnerNeeds, gpus_text, learner_needs, learner_run, lengths_of
from echo2.config.run import RunConfig
from echo2.coordinator.runtime.catalogue import built_in_catalogue
from echo2.cost_model.memory import GPUS_MAX, TOKEN_BUDGET_MAX, TOKEN_BUDGET_MIN, checkpointing_of, fewest_gpus
from echo2.cost_model.memory import learner_memory as memory_of
from echo2.cost_model.sizing import GPU_MEMORY_SHARE, ModelSize

LEARNER_GPU = "H100"
"""Default GPU of a learner."""


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
    def host_share(self) -> float:
        """This host's share of what all ranks keep in host memory."""
        return (self.gpus_here or self.gpu_count) / self.gpu_count if self.gpu_count else 1.0


@dataclass(frozen=True, slots=True)
class Shortage:
    """A resource that is too small. `text`: what is needed and what there is. `would_fit`: hardware or settings that would do."""

    what: str
    text: str
    would_fit: str


def needs_on(config: RunConfig, model: ModelSize, machine: LearnerMachine) -> LearnerNeeds:
    """Computes what the learner needs on this machine."""
    return learner_needs(config, model, machine.gpu_count, machine.gpu_memory_bytes or machine.memory_bytes)


def gpus_needed(config: RunConfig, model: ModelSize, gpu_memory_bytes: int) -> int:
    """Returns the smallest number of GPUs with this memory that the learner fits on."""
    budget, asked = config.learner.token_budget or TOKEN_BUDGET_MAX, config.learner.gradient_checkpointing
    return fewest_gpus(model, budget, gpu_memory_bytes, learner_run(config, model), asked)


def shortages(config: RunConfig, model: ModelSize, machine: LearnerMachine) -> list[Shortage]:
    """Lists what this machine lacks for the learner; empty if it fits."""
    needs = needs_on(config, model, machine)
    return [*_of_device(config, model, machine, needs), *_of_host(machine, needs)]


def verdict(config: RunConfig, model: ModelSize, machine: LearnerMachine) -> str:
    """Returns the text to append to the learner's needs; empty if it fits."""
    found = shortages(config, model, machine)
    return "".join(f"; {one.what} is SHORT: {one.text}; what would fit: {one.would_fit}" for one in found)


def _of_device(config: RunConfig, model: ModelSize, machine: LearnerMachine, needs: LearnerNeeds) -> Iterator[Shortage]:
    if not machine.gpu_count:
        needed = needs.memory.device_bytes + needs.memory.host_bytes
        if needed > machine.memory_bytes:
            text = f"{format_bytes(needed)} needed on the CPU, {format_bytes(machine.memory_bytes)} there"
            yield Shortage("memory", text, "; ".join(_instead(config, model, machine, needed)))
        return
    room = int(GPU_MEMORY_SHARE * machine.gpu_memory_bytes)
    if needs.memory.device_bytes > room:
        text = (
            f"{format_bytes(needs.memory.device_bytes)} needed on {gpus_text(machine.gpu_count)}, "
            f"{format_bytes(room)} there ({GPU_MEMORY_SHARE:.0%} of {format_bytes(machine.gpu_memory_bytes)})"
        )
        each = int(needs.memory.device_bytes / GPU_MEMORY_SHARE)
        yield Shortage("GPU memory", text, "; ".join(_instead(config, model, machine, each)))


def _of_host(machine: LearnerMachine, needs: LearnerNeeds) -> Iterator[Shortage]:
    host_bytes = int(needs.memory.host_bytes * machine.host_share)
    if machine.gpu_count and machine.memory_bytes and host_bytes > machine.memory_bytes:
        text = f"{format_bytes(host_bytes)} needed, {format_bytes(machine.memory_bytes)} there"
        yield Shortage("host memory", text, f"a host with {format_bytes(host_bytes)} of memory")
    if machine.disk_bytes and needs.memory.disk_bytes > machine.disk_bytes:
        text = f"{format_bytes(needs.memory.disk_bytes)} needed, {format_bytes(machine.disk_bytes)} free"
        would = f"{format_bytes(needs.memory.disk_bytes)} of free disk (--folder names another); fewer learner.checkpoints_kept"
        yield Shortage("disk", text, would)


def _instead(config: RunConfig, model: ModelSize, machine: LearnerMachine, needed_bytes: int) -> Iterator[str]:
    """Yields alternatives: more GPUs, larger ones or more memory, smaller micro-batches."""
    gpu = built_in_catalogue()[LEARNER_GPU]
    memory_bytes, kind = (machine.gpu_memory_bytes, "such") if machine.gpu_count else (gpu.memory_bytes, gpu.name)
    count = gpus_needed(config, model, memory_bytes)
    if count < config.learner.replicas * GPUS_MAX or _fits(config, model, count, memory_bytes, 0):
        yield f"{count} {kind} GPU{'' if count == 1 else 's'}"
    yield f"GPUs of {format_bytes(needed_bytes)}" if machine.gpu_count else f"{format_bytes(needed_bytes)} of memory"
    budget = needs_on(config, model, machine).budget // 2
    least = max(TOKEN_BUDGET_MIN, lengths_of(config).of(model))
    here_bytes = machine.gpu_memory_bytes or machine.memory_bytes
    while budget >= least and not _fits(config, model, machine.gpu_count, here_bytes, budget):
        budget //= 2
    if budget >= least:
        yield f"learner.token_budget {budget}"


def _fits(config: RunConfig, model: ModelSize, gpu_count: int, memory_bytes: int, budget: int) -> bool:
    """Whether the learner fits with micro-batches of `budget` tokens; 0: the configured or largest budget."""
    budget = budget or config.learner.token_budget or TOKEN_BUDGET_MAX
    keeps = checkpointing_of(config.learner.gradient_checkpointing, model, budget, 2 if gpu_count else 4)
    found = memory_of(model, budget, keeps, gpu_count=gpu_count, run=learner_run(config, model))
    if not gpu_count:
        return found.device_bytes + found.host_bytes <= memory_bytes
    return found.device_bytes <= GPU_MEMORY_SHARE * memory_bytes
