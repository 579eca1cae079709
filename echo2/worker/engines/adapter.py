"""A low-rank adapter over a base model that the worker loads itself: only the adapter is published.

Guarantees: the base equals, bit for bit, the one that the learner trains on (its fingerprint is checked before anything is
sampled); after each update every touched matrix is base + scale * B A, computed in float32.

Names are those of peft's adapter files: `base_model.model.<module>.lora_A.weight` and `lora_B`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from echo2.base.errors import ConfigError, VersionMismatch
from echo2.weights.elements import published_tensors
from echo2.weights.fingerprint import fingerprint
from echo2.weights.precision import PRECISIONS, linear_layers, round_parameters

CONFIG_KEY = "echo2_adapter"
"""The field of the learner's model config that says that it publishes an adapter, and describes it."""
_PREFIX = "base_model.model."
_RANK_MAX = 4096  # as the option model.lora_rank


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The learner's description of its adapter. `base_fingerprint`: of the base's parameters in `dtype`, with key 0, in hex."""

    rank: int
    scale: float
    dtype: str
    base_fingerprint: str


def adapter_spec(config: Mapping[str, object]) -> AdapterSpec | None:
    """The adapter described by a learner's model config; None if whole weights are published. ConfigError if it is malformed."""
    data = config.get(CONFIG_KEY)
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise ConfigError(f"{CONFIG_KEY}: expected an object, got {type(data).__name__}")
    try:
        spec = AdapterSpec(int(data["rank"]), float(data["scale"]), str(data["dtype"]), str(data["base_fingerprint"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{CONFIG_KEY}: expected rank, scale, dtype and base_fingerprint, got {data}") from error
    if not 1 <= spec.rank <= _RANK_MAX or spec.dtype not in PRECISIONS:
        raise ConfigError(
            f"{CONFIG_KEY}: expected a rank of 1 to {_RANK_MAX} and one of {', '.join(PRECISIONS)}, got {data}"
        )
    return spec


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """By Hugging Face name: the base's `parameters` in the learner's dtype, the `numbers` that it keeps beside them, and the linear
    `layers`, each of which has an adapter."""

    parameters: Mapping[str, torch.Tensor]
    numbers: Mapping[str, torch.Tensor]
    layers: tuple[str, ...]


def load_base(path: str, spec: AdapterSpec) -> AdapterBase:
    """Loads the base model. May take seconds. Raises ConfigError if it cannot be loaded, VersionMismatch if it is not the learner's
    base."""
    if not path:
        raise ConfigError("model.path: the learner publishes an adapter only; expected its base, a folder or hub id")
    from transformers import AutoModelForCausalLM

    local = Path(path).expanduser()
    try:
        model = AutoModelForCausalLM.from_pretrained(local if local.is_dir() else path, dtype=PRECISIONS[spec.dtype])
    except Exception as error:  # noqa: BLE001 - anything, by what a file holds
        raise ConfigError(f"model.path {path}: cannot be loaded as a causal LM: {error}") from None
    round_parameters(model, spec.dtype)
    dtype = PRECISIONS[spec.dtype]  # also of those that transformers keeps in float32
    parameters = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    found_fingerprint = f"{fingerprint(parameters, 0):016x}"
    if found_fingerprint != spec.base_fingerprint:
        raise VersionMismatch(
            f"model.path {path}: expected the learner's base model, fingerprint {spec.base_fingerprint}, got {found_fingerprint}"
        )
    numbers = {name: each for name, each in published_tensors(model).items() if name not in parameters}
    return AdapterBase(parameters, numbers, tuple(linear_layers(model)))


class Adapter:
    def __init__(self, base: AdapterBase, spec: AdapterSpec) -> None:
        self._base = {**base.parameters, **base.numbers}
        self._scale = spec.scale
        self.tensors: dict[str, torch.Tensor] = {}
        for module in base.layers:
            rows, columns = base.parameters[f"{module}.weight"].shape
            self.tensors[f"{_PREFIX}{module}.lora_A.weight"] = torch.zeros(spec.rank, columns)
            self.tensors[f"{_PREFIX}{module}.lora_B.weight"] = torch.zeros(rows, spec.rank)

    def lay_base(self, live: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in live.items():
            if name not in self._base or self._base[name].shape != tensor.shape:
                raise ConfigError(f"base model: expected {name} of shape {tuple(tensor.shape)}, found none")
            tensor.copy_(self._base[name])

    def merge(self, live: Mapping[str, torch.Tensor], touched: Iterable[str]) -> None:
        """Recomputes the matrices to which the `touched` adapter tensors belong."""
        for module in {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in touched}:
            a = self.tensors[f"{_PREFIX}{module}.lora_A.weight"]
            b = self.tensors[f"{_PREFIX}{module}.lora_B.weight"]
            weight = live[f"{module}.weight"]
            weight.copy_(torch.addmm(self._base[f"{module}.weight"].float(), b, a, alpha=self._scale))
