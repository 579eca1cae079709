"""What runs inside vLLM's worker process: the weight map, updates in place, the fingerprint, both log-probabilities.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and reaches its methods by collective RPC.
Importing this module keeps vLLM's CPU backend from packing linear weights away, which must happen before the model is
built: a packed copy would go on computing with the old weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm._custom_ops as vllm_ops
from vllm.v1.sample.sampler import Sampler

from echo2.base.errors import EchoError, EngineError
from echo2.worker.runtime.engines.weight_map import Patch, WeightMap, record_map

vllm_ops._supports_onednn = False

RAW_LOGPROB_ID = -1
"""Stands in for a token id: the entry that carries the raw model's log-probability of the sampled token."""

_BACKENDS_AS_LOADED = ("TRITON", "BATCHED_TRITON")
_NUMBERS_EXACT_MAX = 1 << 24  # what float32 counts exactly

_SIGNED: dict[str, np.dtype[np.signedinteger]] = {"bfloat16": np.dtype(np.int16), "float32": np.dtype(np.int32)}


class SamplerOfBoth(Sampler):  # type: ignore[misc]
    """vLLM's sampler; in place of the likeliest alternative it reports the raw log-probability of the token."""

    def forward(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raw = self.compute_logprobs(logits)
        output = super().forward(logits, *args, **kwargs)
        reported = output.logprobs_tensors
        if reported is not None and reported.logprobs.shape[1] >= 2:
            sampled = output.sampled_token_ids[:, :1].long()
            reported.logprob_token_ids[:, 1] = RAW_LOGPROB_ID
            reported.logprobs[:, 1] = raw.gather(1, sampled)[:, 0]
        return output


class WorkerExtension:
    """Every method returns text or numbers; `error: ...` texts, because exceptions lose their class on the way."""

    _echo2_map: WeightMap | None = None
    model_runner: Any

    def echo2_report_both_logprobs(self) -> str:
        """Makes vLLM report sampling and raw log-probabilities of each sampled token."""
        sampler = self.model_runner.sampler
        if type(sampler) is not Sampler:
            return f"error: expected the sampler {Sampler.__name__}, got {type(sampler).__name__}"
        self.model_runner.sampler = SamplerOfBoth(logprobs_mode="processed_logprobs")
        return ""

    def echo2_map(self, shapes: list[tuple[str, list[int]]]) -> str:
        """Builds the map for published tensors of these names and shapes."""
        try:
            model = self.model_runner.model
            named = {name: tuple(shape) for name, shape in shapes}
            self._echo2_map = record_map(model.load_weights, named, model, _expert_orders(model))
        except EchoError as error:
            return f"error: {error}"
        return ""

    def echo2_apply(self, path: str, entries: list[tuple[str, str, int, int, int]]) -> str:
        """Applies the patches in the file: (name, dtype, offset, position count or -1, value count) of each."""
        if self._echo2_map is None:
            return "error: expected a keyframe first, got a change"
        try:
            raw = np.memmap(Path(path), np.uint8, "r")
            self._echo2_map.apply([_patch(raw, entry) for entry in entries])
        except EchoError as error:
            return f"error: {error}"
        return ""

    def echo2_fingerprint(self, key: int) -> str:
        """Keyed fingerprint of the live weights, in decimal."""
        if self._echo2_map is None:
            raise EngineError("expected a keyframe first, got a question for the fingerprint")
        return str(self._echo2_map.fingerprint(key))

    def echo2_piece_count(self) -> int:
        """How many pieces the map has; 0 before the first keyframe."""
        return 0 if self._echo2_map is None else self._echo2_map.piece_count


def _expert_orders(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """How kernels for experts order their weights, by storage address; refuses kernels that change them otherwise.

    The CPU kernel keeps a packed permutation under the parameter's old shape. Packing the elements' own numbers shows it.
    """
    orders: dict[int, torch.Tensor] = {}
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        if backend is None or backend in _BACKENDS_AS_LOADED:
            continue
        experts = getattr(method, "experts_cls", None)
        if backend != "CPU" or experts is None:
            raise EngineError(
                f"{name}: expected experts on {', '.join(_BACKENDS_AS_LOADED)} or CPU, got {backend}, which changes "
                "weights after loading"
            )
        for parameter in (module.w13_weight, module.w2_weight):
            orders[parameter.untyped_storage().data_ptr()] = _packed_order(name, parameter, experts.isa)
    return orders


def _packed_order(name: str, parameter: torch.Tensor, isa: str) -> torch.Tensor:
    count = parameter.numel()
    if count > _NUMBERS_EXACT_MAX:
        raise EngineError(f"{name}: expected at most {_NUMBERS_EXACT_MAX} packed weights, got {count}")
    numbers = torch.arange(count, dtype=torch.float32).reshape(parameter.shape)
    packed = vllm_ops.cpu_prepack_moe_weight(numbers, isa).reshape(-1).long()
    if not torch.equal(packed.sort().values, torch.arange(count)):
        raise EngineError(f"{name}: expected a kernel that packs weights without changing them, got {isa}")
    order = torch.empty(count, dtype=torch.int64)
    order[packed] = torch.arange(count)
    return order


def _patch(raw: np.ndarray, entry: tuple[str, str, int, int, int]) -> Patch:
    name, dtype, offset, position_count, value_count = entry
    positions = None
    if position_count >= 0:
        positions = torch.from_numpy(np.array(raw[offset : offset + 8 * position_count]).view(np.int64))
        offset += 8 * position_count
    signed = _SIGNED[dtype]
    bits = np.array(raw[offset : offset + signed.itemsize * value_count]).view(signed)
    return Patch(name, dtype, positions, torch.from_numpy(bits))
