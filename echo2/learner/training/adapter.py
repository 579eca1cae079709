"""LoRA: a low-rank adapter on every linear layer except the head; only the adapter is trained and published.

Guarantees: the base is frozen and held at the published precision (nf4: in 4 bits, in memory too), so that a worker with the same
base computes the same policy; a start with the same seed draws the same adapter; names are those of peft's adapter files.
Leaves to others: training (trainer), the worker's side (worker/engines/adapter).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echo2.base.errors import ConfigError
from echo2.weights import fingerprint
from echo2.weights.precision import PRECISIONS, dequantise, linear_layers, quantise, round_parameters

CONFIG_KEY = "echo2_adapter"
"""Key in the workers' config that describes the published adapter."""
_PREFIX = "base_model.model."


SCALE = 2.0  # of the product of the adapter's matrices: alpha / rank


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """As workers hear of it. `base_fingerprint`: of the base's parameters in the published dtype, with key 0, in hex."""

    rank: int
    scale: float
    dtype: str
    base_fingerprint: str


def put_on_adapter(hf_model: Any, rank: int, weights_dtype: str, device: torch.device) -> TrainedAdapter:
    """Freezes the model, rounds it to the published precision and attaches a fresh adapter, all in place. With nf4, linear layers
    are moved to `device` as codes; the rest stays where it is.

    Raises `ConfigError` if peft is missing or the model has no linear layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"model.lora_rank: expected the package peft, got: {error}") from None
    dtype, layers = PRECISIONS[weights_dtype], linear_layers(hf_model)
    round_parameters(hf_model, weights_dtype, device)
    found = fingerprint({name: p.detach().to(dtype) for name, p in hf_model.named_parameters()}, 0)
    if not layers:
        raise ConfigError("model.lora_rank: expected a model with linear layers, found none")
    config = LoraConfig(
        r=rank, lora_alpha=round(SCALE * rank), target_modules=list(layers), lora_dropout=0.0, bias="none"
    )
    inject_adapter_in_model(config, hf_model)
    if weights_dtype == "nf4":
        for name in list(layers):
            hf_model.get_submodule(name).base_layer = Nf4Linear(layers.pop(name), device)
    return TrainedAdapter(rank, SCALE, weights_dtype, f"{found:016x}")


@contextmanager
def without_adapter(hf_model: Any) -> Iterator[None]:
    """Within the context, the model computes as its base; without an adapter it does so anyway."""
    layers = [module for module in hf_model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:  # peft's enable_adapters would also change requires_grad, under a graph that is waiting
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight lies in memory as NF4 codes, and is made anew for each pass."""

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.shape, self.bias = layer.weight.shape, layer.bias
        codes, scales = quantise(layer.weight.to(device))
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = _Nf4Product.apply(inputs, self.codes, self.scales, self.bias, self.shape)  # type: ignore[no-untyped-call]
        return found


class _Nf4Product(torch.autograd.Function):
    """Keeps the codes for the backward pass, not the weight."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.shape = shape
        return F.linear(inputs, dequantise(codes, scales, shape).to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = gradients
        codes, scales = ctx.saved_tensors
        return gradient @ dequantise(codes, scales, ctx.shape).to(gradient.dtype), None, None, None, None


def published_name(name: str) -> str:
    """Turns a name like `model.layers.0.self_attn.q_proj.lora_A.default.weight` into the name in peft's adapter files."""
    return _PREFIX + name.replace(".default.", ".")


def merge_into(base: Any, policy: Mapping[str, Tensor], weights_dtype: str) -> None:
    """Adds the adapter `policy` to `base`, a whole float32 model, and rounds that to the published precision."""
    round_parameters(base, weights_dtype)
    with torch.no_grad():
        for name, a in policy.items():
            module, mark, _ = name.removeprefix(_PREFIX).rpartition(".lora_A.")
            if not mark:
                continue
            b = policy[f"{_PREFIX}{module}.lora_B.weight"]
            weight = base.get_submodule(module).weight
            weight.add_(b.float() @ a.float(), alpha=SCALE)
    base.to(PRECISIONS[weights_dtype])
