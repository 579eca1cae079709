"""What vLLM is started with: its environment, the GPUs it sees, its arguments.

Guarantees: what a model or a device cannot do is refused here, by the option's name, before vLLM starts. Leaves to others:
starting it (vllm.py).
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

GPU_MEMORY_SHARE = 0.9  # of a GPU, what vLLM may take
CPU_CACHE_GIB = 1
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for; an adapter gets the next larger one."""
_ROUNDINGS = {Quantisation.NONE: None, Quantisation.FP8: "fp8_per_channel"}
"""vLLM's names. One scale a row of a matrix, and one a token for what it is multiplied with."""
_UNROUNDED = {
    "num_experts": "experts", "num_local_experts": "experts", "n_routed_experts": "experts",
}  # fmt: skip
"""By the field of a model's config that says so, layers that are not rounded."""


@dataclass(frozen=True, slots=True)
class BaseOfAdapter:
    """The learner publishes an adapter: of what kind, and the folder or hub id of the base beneath it."""

    spec: AdapterSpec
    base_path: str


def check_attention(config: Mapping[str, object]) -> None:
    """ConfigError for latent attention: vLLM derives further matrices from such weights when it loads them. A change in place would
    not reach those, and the fingerprint of the weights would not show it."""
    if rank := _text_config(config).get("kv_lora_rank"):
        raise ConfigError(
            f"model: vLLM's workers do not follow changes of latent attention (kv_lora_rank {rank!r}); expected a model without it"
        )


def _text_config(config: Mapping[str, object]) -> dict[str, object]:
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, Mapping) else {})}


def check_rounding(config: Mapping[str, object], quantisation: Quantisation, adapter: BaseOfAdapter | None) -> None:
    """ConfigError where vLLM, or this model on it, cannot round so."""
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
    """ConfigError where the GPU has no products of fp8. A CPU multiplies them by torch, slowly: for trials."""
    if quantisation is Quantisation.NONE or is_cpu():
        return
    from vllm.platforms import current_platform

    if not current_platform.supports_fp8():
        raise ConfigError(
            f"worker.quantisation: {quantisation.value} needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell) "
            f"or an MI300, got {current_platform.get_device_name()}; expected none"
        )


def rounding_arguments(quantisation: Quantisation) -> dict[str, Any]:
    """Of vLLM's, with the dtype that its layers are loaded and computed in."""
    name = _ROUNDINGS[quantisation]
    if name is None:
        return {"dtype": "float32" if is_cpu() else "bfloat16"}
    return {"dtype": "bfloat16", "quantization": name}


def drafting_arguments(count: int) -> dict[str, Any]:
    """Of vLLM's, where it guesses so many tokens ahead."""
    if not count:
        return {}
    guesses = {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return {"speculative_config": guesses}


def adapter_arguments(adapter: BaseOfAdapter | None) -> dict[str, Any]:
    """Of vLLM's, where the learner publishes an adapter."""
    if adapter is None:
        return {}
    rank = next((size for size in _LORA_RANKS if size >= adapter.spec.rank), None)
    if rank is None:
        raise ConfigError(f"adapter: expected a rank of at most {_LORA_RANKS[-1]} for vLLM, got {adapter.spec.rank}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


@contextmanager
def only_gpus(gpus: Sequence[int]) -> Iterator[None]:
    """The processes that vLLM starts meanwhile see these GPUs alone, by their places among those seen now; none: all."""
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
    """vLLM computes on the CPU here."""
    import torch

    return not torch.cuda.is_available()


def environment() -> dict[str, str]:
    """What vLLM should find in its environment, unless the operator set it."""
    common = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if not is_cpu():
        return common
    cpu = {"VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return common | cpu
