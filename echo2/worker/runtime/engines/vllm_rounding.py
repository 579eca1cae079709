"""Updates layers that vLLM rounded when it loaded them, from bf16 masters on the host.

Runs inside vLLM's worker process. Guarantees: a master is rounded by the layer's own vLLM method on the layer's own device, with
the kernel's layout and the ranks' agreement on scales, so that the values written in place equal those of a fresh load; a layer
rounded by any other method is refused by name. Leaves to others: when to round (rounded_map), asking vLLM to round (vllm_start).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod, OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.parameter import ModelWeightParameter

from echo2.base.errors import EngineError
from echo2.worker.runtime.engines.rounded_map import RoundedLayer, RoundedMap
from echo2.worker.runtime.engines.weight_map import record_map

_DONE = "_already_called_process_weights_after_loading"


def rounded_layers(model: torch.nn.Module) -> list[RoundedLayer]:
    """The layers that vLLM rounded, in the model's order, each with a master of zeros. EngineError for an unsupported method."""
    found = []
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method) is Fp8PtpcOnlineLinearMethod:
            found.append(_layer(name, module))
        elif isinstance(method, OnlineLinearBase | OnlineMoEMethodBase):
            raise EngineError(
                f"{name}: expected layers rounded by {Fp8PtpcOnlineLinearMethod.__name__}, got {type(method).__name__}, "
                "which cannot be fed with changes; expected worker.quantisation none"
            )
    return found


def map_rounded(
    model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], layers: Sequence[RoundedLayer]
) -> RoundedMap:
    """The map of published tensors for a model with these rounded `layers`."""
    device = next(iter(layers[0].live.values())).device
    with _masters_in_place(model, layers):
        weights = record_map(model.load_weights, shapes, model, device=device)  # type: ignore[arg-type]
    return RoundedMap(weights, layers)


def _layer(name: str, module: Any) -> RoundedLayer:
    live = {key: each.data for key, each in module.named_parameters(recurse=False) if key != "bias"}
    size = (module.output_size_per_partition, module.input_size_per_partition)
    master = torch.zeros(size, dtype=module.orig_dtype, device="cpu")
    layer = RoundedLayer(name, master, live, partial(_rounded, module, live["weight"].device))
    expected, got = _forms(live), _forms(layer.rounded(master))
    if expected != got:
        raise EngineError(f"{name}: expected rounding anew to give {expected}, got {got}")
    return layer


def _forms(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in sorted(tensors.items())}


def _rounded(module: Any, device: torch.device, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rounds a master with vLLM's own method, on a copy of the layer object that holds only the master."""
    double = object.__new__(type(module))
    double.__dict__.update({key: value for key, value in module.__dict__.items() if key != _DONE})
    double._parameters = {"weight": torch.nn.Parameter(master.to(device), requires_grad=False)}
    with torch.no_grad(), device:
        module.quant_method.process_weights_after_loading(double)
    return {name: each.data for name, each in double._parameters.items() if each is not None}


@contextmanager
def _masters_in_place(model: torch.nn.Module, layers: Sequence[RoundedLayer]) -> Iterator[None]:
    """Within the context, the layers are as the model's loader expects them: with the masters instead of the rounded values."""
    kept: list[tuple[Any, Any]] = []
    try:
        for layer in layers:
            module: Any = model.get_submodule(layer.name)
            kept.append((module, module._parameters))
            weight = ModelWeightParameter(
                data=layer.master, input_dim=1, output_dim=0, weight_loader=module.weight_loader
            )
            others = {name: each for name, each in module._parameters.items() if name not in layer.live}
            module._parameters = {"weight": weight, **others}
        yield
    finally:
        for module, parameters in kept:
            module._parameters = parameters
