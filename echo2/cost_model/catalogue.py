"""Priors by GPU type: what a worker is taken to do until it has been measured.

Guarantees: an unknown GPU or field, or a number out of range, raises `ConfigError` naming it. Leaves to others: the
file (`gpus.toml` beside this module, or the user's), measuring (calibration).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from echo2.base.errors import ConfigError
from echo2.cost_model.snapshot import checked_positive

BYTES_PER_PARAMETER = 2
MEMORY_SHARE = 0.9
# Of one token: about 2 * layers * kv_heads * head_size * 2 bytes; Qwen3 4B to 32B lie within a third of this.
KV_BYTES_PER_TOKEN_AT_1B = 65_000
SLOTS_MAX = 256
BANDWIDTH_SHARE = 0.7
TRAIN_FLOPS_SHARE = 0.35
GPUS_PER_WORKER_MAX = 16


@dataclass(frozen=True, slots=True)
class Gpu:
    """One type. `token_rate_billion`: batched tokens/s times billions of parameters."""

    name: str
    memory_gb: float
    bandwidth_gb_per_s: float
    usd_per_hour: float
    token_rate_billion: float
    train_tflops: float

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name != "name":
                checked_positive(f"GPU {self.name}", one.name, getattr(self, one.name))


@dataclass(frozen=True, slots=True)
class WorkerPrior:
    """What a worker of `gpu_count` GPUs is taken to do."""

    gpu_count: int
    slots: int
    tokens_per_s: float

    @property
    def sequence_tokens_per_s(self) -> float:
        return self.tokens_per_s / self.slots


def parse_catalogue(tables: Mapping[str, object]) -> dict[str, Gpu]:
    """GPUs from the TOML file's tables."""
    found: dict[str, Gpu] = {}
    wanted = {one.name for one in fields(Gpu)} - {"name"}
    for name, table in tables.items():
        if not isinstance(table, Mapping) or set(table) != wanted:
            got = ", ".join(sorted(table)) if isinstance(table, Mapping) else repr(table)
            raise ConfigError(f"catalogue: GPU {name}: expected the fields {', '.join(sorted(wanted))}, got {got}")
        numbers: dict[str, float] = {}
        for field_name, value in table.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"catalogue: GPU {name}: {field_name}: expected a number, got {value!r}")
            numbers[str(field_name)] = float(value)
        found[name] = Gpu(name, **numbers)
    return found


def gpu_of(catalogue: Mapping[str, Gpu], name: str) -> Gpu:
    """The GPU called `name`."""
    if name not in catalogue:
        raise ConfigError(f"gpu: expected one of {', '.join(sorted(catalogue))}, got {name!r}")
    return catalogue[name]


def worker_prior(gpu: Gpu, model_billions: float, mean_tokens: float) -> WorkerPrior:
    """As many GPUs as the weights need, slots by the memory left, tokens/s by what slots and bandwidth allow."""
    checked_positive("model", "billions of parameters", model_billions)
    weights = model_billions * 1e9 * BYTES_PER_PARAMETER
    sequence = KV_BYTES_PER_TOKEN_AT_1B * model_billions**0.5 * mean_tokens
    memory = gpu.memory_gb * 1e9 * MEMORY_SHARE
    for gpu_count in range(1, GPUS_PER_WORKER_MAX + 1):
        slots = int(min(SLOTS_MAX, (memory * gpu_count - weights) / sequence))
        if slots >= 4:
            break
    else:
        raise ConfigError(
            f"GPU {gpu.name}: expected at most {GPUS_PER_WORKER_MAX} of them to hold {model_billions:g} billion "
            f"parameters and 4 sequences, got a need for more"
        )
    one_sequence = BANDWIDTH_SHARE * gpu.bandwidth_gb_per_s * 1e9 * gpu_count / weights
    return WorkerPrior(gpu_count, slots, min(gpu.token_rate_billion * gpu_count / model_billions, slots * one_sequence))


def train_s_prior(gpu: Gpu, gpu_count: int, model_billions: float, tokens: float) -> float:
    """Seconds of one optimiser step over `tokens` tokens: 6 FLOP a parameter and token at a usual efficiency."""
    return 6 * model_billions * 1e9 * tokens / (gpu_count * gpu.train_tflops * 1e12 * TRAIN_FLOPS_SHARE)
