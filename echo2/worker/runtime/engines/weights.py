"""The weights of the fused path: one matrix for q, k, v and one for gate, up; published tensors are views of them.

Guarantees: those of live.py. Leaves to others: architectures that this path does not support (module).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from echo2.base.staged import StagedVersion
from echo2.worker.runtime.engines.adapter import Adapter
from echo2.worker.runtime.engines.live import LiveTensors, Scatter
from echo2.worker.runtime.engines.rounded import Matrix
from echo2.worker.runtime.engines.shape import ModelShape


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, with q, k, v and gate, up as one matrix each. Norms and biases that the shape does not have are None."""

    input_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Matrix
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None


class Weights(Protocol):
    """What the step loop and the forward need of a model's weights."""

    shape: ModelShape
    embedding: torch.Tensor
    final_norm: torch.Tensor
    layers: list[LayerWeights]
    head: Matrix

    def checked(self, staged: StagedVersion) -> list[Scatter]: ...

    def apply(self, scatters: Iterable[Scatter]) -> None: ...

    def fingerprint(self, key: int) -> int: ...

    def bits_at(self, name: str, places: np.ndarray | None) -> np.ndarray: ...

    @property
    def published_bytes(self) -> int: ...


class LiveWeights(LiveTensors):
    """All weights of one model. `tensors` are views, by Hugging Face name, of the fused storage that the forward pass reads.

    `adapter` and `dtype`: see live.py.
    """

    def __init__(self, shape: ModelShape, adapter: Adapter | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.shape = shape
        self._dtype = dtype
        self.tensors: dict[str, torch.Tensor] = {}
        self.embedding = self._whole("model.embed_tokens.weight", shape.vocab_count, shape.hidden)
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(shape.layer_count)]
        self.final_norm = self._whole("model.norm.weight", shape.hidden)
        tied = shape.is_tied
        self.head: Matrix = self.embedding if tied else self._whole("lm_head.weight", shape.vocab_count, shape.hidden)
        super().__init__(shape.model_type, self.tensors, adapter)

    def _whole(self, name: str, *size: int) -> torch.Tensor:
        self.tensors[name] = torch.zeros(size, dtype=self._dtype)
        return self.tensors[name]

    def _fused(self, rows: dict[str, int], *columns: int) -> torch.Tensor:
        fused = torch.zeros(sum(rows.values()), *columns, dtype=self._dtype)
        start = 0
        for name, count in rows.items():
            self.tensors[name] = fused[start : start + count]
            start += count
        return fused

    def _layer(self, at: str) -> LayerWeights:
        shape = self.shape
        q_rows, kv_rows = shape.head_count * shape.head_dim, shape.kv_head_count * shape.head_dim
        qkv = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        gate_up = {"gate": shape.intermediate, "up": shape.intermediate}
        attention, mlp = at + "self_attn.", at + "mlp."

        def fused(prefix: str, rows: dict[str, int], kind: str, *columns: int) -> torch.Tensor:
            return self._fused({f"{prefix}{key}_proj.{kind}": count for key, count in rows.items()}, *columns)

        qkv_bias = fused(attention, qkv, "bias") if shape.has_qkv_bias else None
        gate_up_bias = fused(mlp, gate_up, "bias") if shape.has_mlp_bias else None
        has_norm, has_bias = shape.has_qk_norm, shape.has_output_bias
        return LayerWeights(
            input_norm=self._whole(at + "input_layernorm.weight", shape.hidden),
            qkv=fused(attention, qkv, "weight", shape.hidden),
            qkv_bias=qkv_bias,
            q_norm=self._whole(attention + "q_norm.weight", shape.head_dim) if has_norm else None,
            k_norm=self._whole(attention + "k_norm.weight", shape.head_dim) if has_norm else None,
            output=self._whole(attention + "o_proj.weight", shape.hidden, q_rows),
            output_bias=self._whole(attention + "o_proj.bias", shape.hidden) if has_bias else None,
            mlp_norm=self._whole(at + "post_attention_layernorm.weight", shape.hidden),
            gate_up=fused(mlp, gate_up, "weight", shape.hidden),
            gate_up_bias=gate_up_bias,
            down=self._whole(mlp + "down_proj.weight", shape.hidden, shape.intermediate),
            down_bias=self._whole(mlp + "down_proj.bias", shape.hidden) if shape.has_mlp_bias else None,
        )
