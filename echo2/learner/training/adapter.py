"""LoRA: a low-rank adapter on every linear layer except the head; only the adapter is trained and published.

Guarantees: the base is frozen and held at the published precision, so that a worker with the same base computes the same policy;
a start with the same seed draws the same adapter; names are those of peft's adapter files.
Leaves to others: training (trainer), the worker's side (worker/engines/adapter).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echo2.base.errors import ConfigError
from echo2.weights import fingerprint

CONFIG_KEY = "echo2_adapter"
"""Key in the workers' config that describes the published adapter."""
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """The product of the adapter's matrices is scaled by `alpha / rank`."""

    rank: int
    alpha: int


@dataclass(frozen=True, slots=True)
class PutOn:
    """An adapter attached to a model. `base_fingerprint`: fingerprint of the base's parameters in the published dtype, with key 0,
    in hex."""

    options: AdapterOptions
    dtype: str
    base_fingerprint: str

    @property
    def scale(self) -> float:
        return self.options.alpha / self.options.rank

    def for_workers(self) -> dict[str, object]:
        return {
            "rank": self.options.rank,
            "scale": self.scale,
            "dtype": self.dtype,
            "base_fingerprint": self.base_fingerprint,
        }


def put_on_adapter(hf_model: Any, options: AdapterOptions, weights_dtype: str) -> PutOn:
    """Freezes the model, rounds it to the published precision and attaches a fresh adapter, all in place.

    Raises `ConfigError` if peft is missing or the model has no linear layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"model.lora_rank: expected the package peft, got: {error}") from None
    dtype = _dtype(weights_dtype)
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.copy_(parameter.to(dtype))
    found = fingerprint({name: p.detach().to(dtype) for name, p in hf_model.named_parameters()}, 0)
    head = hf_model.get_output_embeddings()
    targets = [
        name for name, module in hf_model.named_modules() if isinstance(module, nn.Linear) and module is not head
    ]
    if not targets:
        raise ConfigError("model.lora_rank: expected a model with linear layers, found none")
    config = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=targets, lora_dropout=0.0, bias="none")
    inject_adapter_in_model(config, hf_model)
    return PutOn(options, weights_dtype, f"{found:016x}")


def published_name(name: str) -> str:
    """Turns a name like `model.layers.0.self_attn.q_proj.lora_A.default.weight` into the name in peft's adapter files."""
    return _PREFIX + name.replace(".default.", ".")


def merge_into(base: Any, policy: Mapping[str, Tensor], adapter: PutOn, weights_dtype: str) -> None:
    """Adds the adapter `policy` to `base`, a whole float32 model, and rounds that to the published precision."""
    dtype = _dtype(weights_dtype)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(parameter.to(dtype))
        for name, a in policy.items():
            module, mark, _ = name.removeprefix(_PREFIX).rpartition(".lora_A.")
            if not mark:
                continue
            b = policy[f"{_PREFIX}{module}.lora_B.weight"]
            weight = base.get_submodule(module).weight
            weight.add_(b.float() @ a.float(), alpha=adapter.scale)
    base.to(dtype)


def _dtype(weights_dtype: str) -> torch.dtype:
    return torch.bfloat16 if weights_dtype == "bfloat16" else torch.float32
