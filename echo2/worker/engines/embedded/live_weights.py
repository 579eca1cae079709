"""The shape of a decoder-only transformer, read from its Hugging Face config, and its live weights, in float32 or bf16.

Guarantees: a shape is complete and supported by the fused path, otherwise reading fails and names the field. An update is checked
completely before a bit is touched; applying it either succeeds or leaves every weight as it was; bits read back are the published
ones (bf16 widens to float32 and narrows again without loss). The fused path has one matrix for q, k, v and one for gate, up, of
which the published tensors are views.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from echo2.base.errors import ConfigError, EngineError
from echo2.base.staged import StagedVersion, TensorUpdate
from echo2.weights.elements import TensorSpec, bits_of, element_type_of
from echo2.weights.fingerprint import MODULUS, fingerprint_tensor, header_term, sum_bits
from echo2.worker.engines.adapter import Adapter
from echo2.worker.engines.engine import UpdateCheck

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "rope_parameters",
)  # fmt: skip
_MORE_FIELDS = {
    "llama": ("head_dim", "attention_bias", "mlp_bias"),
    "mistral": ("head_dim", "sliding_window"),
    "qwen2": ("layer_types",),
    "qwen3": ("head_dim", "attention_bias", "layer_types"),
}
"""Fields read from a config besides _FIELDS. A config written by transformers, as the learner's is, contains all of them."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the forward pass needs to know. `rope_frequencies`: float32 [head_dim / 2], scaling included."""

    model_type: str
    vocab_count: int
    hidden: int
    intermediate: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    norm_epsilon: float
    has_qk_norm: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    is_tied: bool
    context_tokens: int
    rope_frequencies: np.ndarray
    rope_scale: float


def why_not_fused(fields: Mapping[str, object]) -> str:
    """The feature of a transformers config that the fused path does not support; empty: it supports the model."""
    model_type = fields.get("model_type")
    if model_type not in SUPPORTED:
        return f"model_type: the fused path knows {', '.join(SUPPORTED)}, got {model_type!r}"
    return _difference(_whole(fields))


def read_shape(fields: Mapping[str, object]) -> ModelShape:
    """Parses a transformers config. Raises ConfigError, naming the field, for what the fused path cannot run."""
    reason = why_not_fused(fields)
    if reason:
        raise ConfigError(reason)
    config = _whole(fields)
    model_type, heads = config["model_type"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    frequencies, scale = _rope(config, head_dim)
    biased = model_type in ("llama", "qwen3") and bool(config["attention_bias"])
    return ModelShape(
        model_type=str(model_type),
        vocab_count=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layer_count=config["num_hidden_layers"],
        head_count=heads,
        kv_head_count=config["num_key_value_heads"] or heads,
        head_dim=head_dim,
        norm_epsilon=config["rms_norm_eps"],
        has_qk_norm=model_type == "qwen3",
        has_qkv_bias=biased or model_type == "qwen2",
        has_output_bias=biased,
        has_mlp_bias=model_type == "llama" and bool(config["mlp_bias"]),
        is_tied=bool(config["tie_word_embeddings"]),
        context_tokens=config["max_position_embeddings"],
        rope_frequencies=frequencies,
        rope_scale=scale,
    )


def library_config(fields: Mapping[str, object]) -> Any:
    """transformers' own config of these fields: what its functions take, which rely on the class's methods and defaults. Raises
    ConfigError for a model type that transformers does not know."""
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**copy.deepcopy(dict(fields)))  # the class fills in nested fields in place
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"model_type: transformers does not know {fields.get('model_type')!r}: {error}") from error


def _whole(known: Mapping[str, object]) -> dict[str, Any]:
    """The fields with their defaults filled in. Only transformers knows them, and importing it costs 60 MiB, so this does so only
    if fields are missing."""
    if all(name in known for name in (*_FIELDS, *_MORE_FIELDS[str(known["model_type"])])):
        return dict(known)
    fields: dict[str, Any] = library_config(known).to_dict()
    return fields


def _difference(config: Mapping[str, Any]) -> str:
    if config["hidden_act"] != "silu":
        return f"hidden_act: expected silu, got {config['hidden_act']!r}"
    is_windowed = config["model_type"] == "mistral" and config["sliding_window"] is not None
    if is_windowed or any(kind != "full_attention" for kind in config.get("layer_types") or []):
        return "sliding_window: the fused path attends to the whole context; expected null"
    rope_type = config["rope_parameters"].get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        return f"rope_type: expected one of {', '.join(_ROPE_TYPES)}, got {rope_type!r}"
    return ""


def _rope(config: Mapping[str, Any], head_dim: int) -> tuple[np.ndarray, float]:
    rope = config["rope_parameters"]
    rope_type = rope.get("rope_type", "default")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return (1.0 / rope["rope_theta"] ** exponents).numpy(), 1.0  # to the bit: far positions multiply an error
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](library_config(config), torch.device("cpu"))
    return frequencies.float().numpy(), float(scale)


PIECE_ELEMENTS = 1 << 16  # fits into a core's second cache
_BF16 = element_type_of("", torch.zeros(0, dtype=torch.bfloat16))


class LiveTensors:
    """`tensors` are what the forward pass reads, by Hugging Face name: float32 or bf16, contiguous and on the CPU. With an
    `adapter`, its tensors are published and checked instead, and `tensors` are computed from the adapter and its base."""

    context_tokens: int
    vocab_count: int
    carries_state = False  # whether layers carry a state along, which is computed again when the weights change

    def __init__(self, model_type: str, tensors: Mapping[str, torch.Tensor], adapter: Adapter | None = None) -> None:
        self._tensors = tensors
        self._adapter = adapter
        self._published = tensors if adapter is None else adapter.tensors
        self._check = UpdateCheck(model_type, {name: tuple(t.shape) for name, t in self._published.items()})
        self._bits = {name: bits_of(tensor) for name, tensor in self._published.items()}
        if adapter is not None:
            adapter.lay_base(tensors)

    def checked(self, staged: StagedVersion) -> list[TensorUpdate]:
        """The staged updates, checked against the model. Touches no weight. Positions are uint32 if the last one fits: all of a
        version's are in memory at the same time."""
        updates = []
        for update in self._check.checked(staged):
            if update.bits.itemsize > self._bits[update.name].itemsize:
                raise EngineError(
                    f"version {staged.version}, tensor {update.name}: expected bfloat16 (model.weights_dtype) for an engine in "
                    f"bf16, got {update.dtype}; or worker.quantisation none"
                )
            places = update.indices
            if places is None or not len(places) or places[-1] > np.iinfo(np.uint32).max:
                updates.append(update)
            else:
                updates.append(replace(update, indices=places.astype(np.uint32)))
        return updates

    def apply(self, updates: Iterable[TensorUpdate]) -> None:
        """Writes checked updates in place. On any failure undoes every change and raises EngineError. Whole tensors come last,
        piece by piece and without keeping the old values: they were checked to fit, so that cannot fail."""
        undo: list[tuple[TensorUpdate, np.ndarray]] = []
        written: list[TensorUpdate] = []
        try:
            for update in sorted(updates, key=lambda update: update.indices is None):
                live = self._bits[update.name]
                if update.indices is None:
                    _put_whole(live, update.bits)
                else:
                    old = live[update.indices]
                    undo.append((update, old if update.bits.dtype == old.dtype else _upper_halves(old)))
                    live[update.indices] = _as_in(live, update.bits)
                written.append(update)
        except (IndexError, ValueError, MemoryError) as error:
            for changed, old in reversed(undo):
                live = self._bits[changed.name]
                live[changed.indices] = _as_in(live, old)
            raise EngineError(f"tensor {update.name}: the update failed, old weights are back: {error}") from error
        self._check.applied(written)
        if self._adapter is not None:
            self._adapter.merge(self._tensors, [update.name for update in written])

    def fingerprint(self, key: int) -> int:
        """Keyed fingerprint of the weights as published; float32 copies of bf16 weights are narrowed piece by piece."""
        return int(sum(self._fingerprint_of(name, tensor, key) for name, tensor in self._published.items()) % MODULUS)

    def _fingerprint_of(self, name: str, tensor: torch.Tensor, key: int) -> int:
        bits = self._bits[name]
        if self._check.dtypes.get(name) != "bfloat16" or bits.itemsize < 4:  # as it was published
            return fingerprint_tensor(name, tensor, key)
        starts = range(0, len(bits), PIECE_ELEMENTS)
        pieces = (sum_bits(name, _upper_halves(bits[begin : begin + PIECE_ELEMENTS]), key, begin) for begin in starts)
        return header_term(key, TensorSpec(name, _BF16, tuple(tensor.shape))) + sum(pieces)


def _upper_halves(bits: np.ndarray) -> np.ndarray:
    """The bf16 patterns of float32 patterns that were widened from bf16."""
    return bits.view(np.uint16)[1::2].copy()


def _as_in(live: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """The patterns in the dtype of the live ones: the same, or bf16 widened to float32."""
    return bits if bits.dtype == live.dtype else bits.astype(np.uint32) << 16


def _put_whole(live: np.ndarray, bits: np.ndarray) -> None:
    """Writes a whole tensor, in pieces that stay in the processor's cache."""
    for begin in range(0, len(live), PIECE_ELEMENTS):
        piece = live[begin : begin + PIECE_ELEMENTS]
        piece[:] = bits[begin : begin + PIECE_ELEMENTS]
        if bits.dtype != live.dtype:
            piece <<= 16


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, with q, k, v and gate, up as one matrix each. Norms and biases that the shape does not have are None."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class LiveWeights(LiveTensors):
    """All weights of one model. `tensors` are views, by Hugging Face name, of the fused storage that the forward pass reads."""

    def __init__(self, shape: ModelShape, adapter: Adapter | None = None, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self.shape, self.context_tokens, self.vocab_count = shape, shape.context_tokens, shape.vocab_count
        self.tensors: dict[str, torch.Tensor] = {}
        self.embedding = self._whole("model.embed_tokens.weight", shape.vocab_count, shape.hidden)
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(shape.layer_count)]
        self.final_norm = self._whole("model.norm.weight", shape.hidden)
        tied = shape.is_tied
        self.head = self.embedding if tied else self._whole("lm_head.weight", shape.vocab_count, shape.hidden)
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
