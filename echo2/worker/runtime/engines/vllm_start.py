"""Prepares vLLM's start: its environment, the GPUs it sees, its arguments.

Guarantees: an option that the model or the device does not support is refused here, by the option's name, before vLLM starts.
Leaves to others: starting it (vllm.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from echo2.base.errors import ConfigError
from echo2.cost_model.sizing import Quantisation
from echo2.worker.runtime.engines.adapter import AdapterSpec

GPU_MEMORY_SHARE = 0.9  # share of a GPU's memory that vLLM may use
CPU_CACHE_GIB = 1
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM supports; an adapter gets the next larger one."""
_ROUNDINGS = {Quantisation.NONE: None, Quantisation.FP8: "fp8_per_channel"}
"""vLLM's names of roundings. fp8_per_channel has one scale per row of a matrix, and one per token for the activations."""
_UNROUNDED = {
    "num_experts": "experts", "num_local_experts": "experts", "n_routed_experts": "experts",
}  # fmt: skip
"""Layers that cannot be rounded, by the field of a model's config that announces them."""


@dataclass(frozen=True, slots=True)
class BaseOfAdapter:
    """For a learner that publishes an adapter: the adapter's spec, and the folder or hub id of its base model."""

    spec: AdapterSpec
    base_path: str


def check_attention(config: Mapping[str, object]) -> None:
    """Raises ConfigError for latent attention: vLLM derives further matrices from such weights when it loads them. An update in
    place would not reach those, and the fingerprint of the weights would not show it."""
    if rank := _text_config(config).get("kv_lora_rank"):
        raise ConfigError(
            f"model: vLLM's workers do not follow changes of latent attention (kv_lora_rank {rank!r}); expected a model without it"
        )


def _text_config(config: Mapping[str, object]) -> dict[str, object]:
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, Mapping) else {})}


def check_rounding(config: Mapping[str, object], quantisation: Quantisation, adapter: BaseOfAdapter | None) -> None:
    """Raises ConfigError if vLLM cannot round this way, or not this model."""
    whose = f"worker.quantisation: {quantisation.value}"
    if quantisation not in _ROUNDINGS:
        raise ConfigError(f"{whose} is the embedded engine's; vLLM rounds linear layers to fp8: expected fp8 or none")
    if quantisation is Quantisation.NONE:
        return
    if adapter is not None:
        raise ConfigError(f"{whose} is for whole weights, but the learner publishes an adapter alone; expected none")
    said = _text_config(config)
    for field, what in _UNROUNDED.items():
        if said.get(field):
            raise ConfigError(f"{whose} is not for models with {what} ({field} {said[field]!r}); expected none")


def check_device(quantisation: Quantisation) -> None:
    """Raises ConfigError if the GPU has no fp8 matrix products. On a CPU torch computes them, slowly, which suffices for trials."""
    if quantisation is Quantisation.NONE or is_cpu():
        return
    from vllm.platforms import current_platform

    if not current_platform.supports_fp8():
        raise ConfigError(
            f"worker.quantisation: {quantisation.value} needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell) "
            f"or an MI300, got {current_platform.get_device_name()}; expected none"
        )


def rounding_arguments(quantisation: Quantisation) -> dict[str, Any]:
    """vLLM's arguments for rounding, and the dtype in which it loads and computes layers."""
    name = _ROUNDINGS[quantisation]
    if name is None:
        return {"dtype": "float32" if is_cpu() else "bfloat16"}
    return {"dtype": "bfloat16", "quantization": name}


def drafting_arguments(count: int) -> dict[str, Any]:
    """vLLM's arguments for drafting `count` tokens ahead; none if 0."""
    if not count:
        return {}
    guesses = {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return {"speculative_config": guesses}


def adapter_arguments(adapter: BaseOfAdapter | None) -> dict[str, Any]:
    """vLLM's arguments if the learner publishes an adapter. ConfigError if its rank is too large."""
    if adapter is None:
        return {}
    rank = next((size for size in _LORA_RANKS if size >= adapter.spec.rank), None)
    if rank is None:
        raise ConfigError(f"adapter: expected a rank of at most {_LORA_RANKS[-1]} for vLLM, got {adapter.spec.rank}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


@contextmanager
def only_gpus(gpus: Sequence[int]) -> Iterator[None]:
    """Processes started within the context see only these GPUs, numbered among those visible now; empty: all."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus:
        yield
        return
    names = seen.split(",") if seen else []
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu].strip() if names else str(gpu) for gpu in gpus)
    try:
        yield
    finally:
        if seen is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = seen


def is_cpu() -> bool:
    """Whether vLLM computes on the CPU here."""
    import torch

    return not torch.cuda.is_available()


def environment() -> dict[str, str]:
    """Environment variables for vLLM; the caller keeps any that the operator has set."""
    common = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if not is_cpu():
        return common
    cpu = {"VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return common | cpu
