"""Puts a published LoRA adapter into vLLM's own LoRA layers, from tensors in memory.

Runs inside vLLM's worker process. Guarantees: the adapter never touches the disk; vLLM's own layers determine where its tensors go
(fused layers, tensor parallel slices); the adapter is registered once, and later changes are written in place. Leaves to others:
the base's weights (weight_map.py), selecting the adapter in every request (vllm.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from echo2.base.errors import EngineError
from echo2.worker.runtime.engines.derived import Scaled
from echo2.worker.runtime.engines.vllm_weights import ADAPTER_ID
from echo2.worker.runtime.engines.weight_map import WeightMap, record_pieces

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, the model is as its loader expects it: without LoRA's wrappers around layers."""
    wrapped = [(name, module) for name, module in model.named_modules() if hasattr(module, "base_layer")]
    for name, module in wrapped:
        _put(model, name, module.base_layer)
    try:
        yield
    finally:
        for name, module in wrapped:
            _put(model, name, module)


def _put(model: torch.nn.Module, name: str, module: Any) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def map_adapter(runner: Any, shapes: Mapping[str, tuple[int, ...]], factor: float) -> WeightMap:
    """Registers an adapter with these tensors, whose product is scaled by `factor`, and returns the map to its live values.

    EngineError, naming the tensor, if vLLM has no LoRA layer for it.
    """
    manager = runner.lora_manager._adapter_manager
    runner.lora_manager.remove_all_adapters()

    def load(probes: Mapping[str, torch.Tensor]) -> None:
        manager.add_adapter(LoRAModel(ADAPTER_ID, _rank(shapes), _layers(probes)))
        manager.activate_adapter(ADAPTER_ID)

    dtype = manager.lora_config.lora_dtype
    pieces = record_pieces(load, shapes, dtype, {})
    for name in shapes:
        if not pieces[name]:
            raise EngineError(f"tensor {name}: vLLM has no LoRA layer that takes it")
    derived = {
        name: [Scaled(p.offset, p.strides, p.live, factor if name.endswith(_B) else 1.0) for p in found]
        for name, found in pieces.items()
    }
    return WeightMap(shapes, {name: [] for name in shapes}, derived)


def _rank(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return next(shape[0] for name, shape in shapes.items() if name.endswith(_A))


def _layers(probes: Mapping[str, torch.Tensor]) -> dict[str, LoRALayerWeights]:
    layers = {}
    for name, a in probes.items():
        if not name.endswith(_A):
            continue
        module = name.removeprefix(_PREFIX).removesuffix(_A)
        b = probes.get(f"{_PREFIX}{module}{_B}")
        if b is None:
            raise EngineError(f"tensor {name}: expected its partner {module}{_B}, got none")
        layers[module] = LoRALayerWeights(module, a.shape[0], a.shape[0], a, b, scaling=1.0)
    return layers
