"""Priors by GPU type: the assumed performance of a worker until it has been measured.

Guarantees: an unknown GPU or field, or a number out of range, raises `ConfigError` naming it. Leaves to others: reading
the file (`gpus.toml` beside this module, or the user's), measuring (calibration).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from echo2.base.errors import ConfigError, ResourceError
from echo2.cost_model.roofline import prefill_tokens_per_s, tokens_per_s
from echo2.cost_model.sizing import (
    FILL,
    Fit,
    ModelSize,
    Quantisation,
    RunLengths,
    cpu_fit,
    gpu_fit,
    model_size,
    spread_speed,
)
from echo2.cost_model.snapshot import checked_positive

TRAIN_FLOPS_SHARE = 0.35
GPUS_PER_WORKER = (1, 2, 4, 8, 16)
CPU = "cpu"
"""The kind for machines on which the embedded engine generates."""


@dataclass(frozen=True, slots=True)
class GpuType:
    """One GPU type, from its data sheet. `train_tflops`: dense bf16."""

    name: str
    memory_gib: float
    bandwidth_gb_per_s: float
    usd_per_hour: float
    train_tflops: float

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name != "name":
                checked_positive(f"GPU {self.name}", one.name, getattr(self, one.name))

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * (1 << 30))


@dataclass(frozen=True, slots=True)
class WorkerPrior:
    """Assumed performance of a worker with `gpu_count` GPUs. `tokens_per_s`: decode rate with all slots busy;
    `prefill_tokens_per_s`: prefill rate while nothing is decoded. `fit`: how the model fits on it."""

    gpu_count: int
    slots: int
    tokens_per_s: float
    fit: Fit
    prefill_tokens_per_s: float

    @property
    def sequence_tokens_per_s(self) -> float:
        return self.tokens_per_s / self.slots


def parse_catalogue(tables: Mapping[str, object]) -> dict[str, GpuType]:
    """Parses the GPU types of the TOML file."""
    found: dict[str, GpuType] = {}
    wanted = {one.name for one in fields(GpuType)} - {"name"}
    for name, table in tables.items():
        if not isinstance(table, Mapping) or set(table) != wanted:
            got = ", ".join(sorted(table)) if isinstance(table, Mapping) else repr(table)
            raise ConfigError(f"catalogue: GPU {name}: expected the fields {', '.join(sorted(wanted))}, got {got}")
        numbers: dict[str, float] = {}
        for field_name, value in table.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"catalogue: GPU {name}: {field_name}: expected a number, got {value!r}")
            numbers[str(field_name)] = float(value)
        found[name] = GpuType(name, **numbers)
    return found


def gpu_of(catalogue: Mapping[str, GpuType], name: str) -> GpuType:
    """The GPU type called `name`; raises ConfigError if the catalogue has none."""
    if name not in catalogue:
        raise ConfigError(f"gpu: expected one of {', '.join(sorted(catalogue))}, got {name!r}")
    return catalogue[name]


def worker_prior(
    gpu: GpuType, size: ModelSize, run: RunLengths, tokens_each: float = 0.0, gpu_count: int = 0
) -> WorkerPrior:
    """The prior of a worker with `gpu_count` GPUs, laid out as the worker would; 0: the count with the most tokens/s per GPU,
    the smallest of equals. Raises ResourceError if the model does not fit.

    tokens_each: average cached tokens per sequence; 0: half of the longest.
    """
    if gpu.name == CPU:
        return _prior(gpu, 1, size, cpu_fit(size, gpu.memory_bytes, run), tokens_each, run.quantisation)
    priors, refusal = [], ""
    for count in (gpu_count,) if gpu_count else GPUS_PER_WORKER:
        try:
            fit = gpu_fit(size, [gpu.memory_bytes] * count, run)
            priors.append(_prior(gpu, count, size, fit, tokens_each, run.quantisation))
        except ResourceError as error:
            refusal = str(error)
    if not priors:
        raise ResourceError(f"GPU {gpu.name}: {refusal}")
    return max(priors, key=lambda prior: (round(prior.tokens_per_s / prior.gpu_count, 6), -prior.gpu_count))


def _prior(
    gpu: GpuType, gpu_count: int, size: ModelSize, fit: Fit, tokens_each: float, quantisation: Quantisation
) -> WorkerPrior:
    """Builds the prior from the roofline's rates."""
    speed = spread_speed(fit.tensor_parallel)
    held = tokens_each or fit.sequence_tokens / FILL
    sampled = fit.engine_count * tokens_per_s(gpu, size, fit.sequences, held, speed, quantisation)
    read = fit.engine_count * prefill_tokens_per_s(gpu, size, held, speed, quantisation)
    return WorkerPrior(gpu_count, fit.engine_count * fit.sequences, sampled, fit, read)


def parse_models(tables: Mapping[str, object]) -> dict[str, ModelSize]:
    """Parses model sizes from tables of transformers configs, by model name in lower case."""
    found = {}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"models: {name}: expected a table, got {table!r}")
        found[name] = model_size(table)
    return found


STEP_S_MIN = 0.1
"""Seconds to draw a batch and launch a step's kernels: thousands of launches of 10 us each, whatever their size. For a small model
this is all the time a step takes."""


def train_s_prior(gpu: GpuType, gpu_count: int, model_billions: float, tokens: float) -> float:
    """Seconds of one optimiser step over `tokens` tokens: 6 FLOP per parameter and token at a typical efficiency, plus the
    minimum time of any step."""
    return STEP_S_MIN + 6 * model_billions * 1e9 * tokens / (gpu_count * gpu.train_tflops * 1e12 * TRAIN_FLOPS_SHARE)
