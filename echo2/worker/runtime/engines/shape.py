"""Reads the shape of a decoder-only transformer from a Hugging Face config.

Guarantees: a shape is complete and supported by the fused path of the embedded engine; otherwise reading fails and names the field.
Leaves to others: the weights, all other architectures (module).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from echo2.base.errors import ConfigError

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


def load_config(source: str | Path | Mapping[str, object]) -> dict[str, object]:
    """The config as a dict, from a folder in Hugging Face layout, a JSON file or a dict."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model config {path}: expected a readable JSON object: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"model config {path}: expected a JSON object, got {type(loaded).__name__}")
    return loaded


def why_not_fused(source: str | Path | Mapping[str, object]) -> str:
    """The feature of a transformers config that the fused path does not support; empty: it supports the model."""
    given = load_config(source)
    model_type = given.get("model_type")
    if model_type not in SUPPORTED:
        return f"model_type: the fused path knows {', '.join(SUPPORTED)}, got {model_type!r}"
    return _difference(_whole(given))


def read_shape(source: str | Path | Mapping[str, object]) -> ModelShape:
    """Parses a transformers config. Raises ConfigError, naming the field, for what the fused path cannot run."""
    given = load_config(source)
    reason = why_not_fused(given)
    if reason:
        raise ConfigError(reason)
    model_type, config = given["model_type"], _whole(given)
    frequencies, scale = _rope(config)
    heads = config.num_attention_heads
    biased = model_type in ("llama", "qwen3") and bool(config.attention_bias)
    return ModelShape(
        model_type=str(model_type),
        vocab_count=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layer_count=config.num_hidden_layers,
        head_count=heads,
        kv_head_count=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm_epsilon=config.rms_norm_eps,
        has_qk_norm=model_type == "qwen3",
        has_qkv_bias=biased or model_type == "qwen2",
        has_output_bias=biased,
        has_mlp_bias=model_type == "llama" and bool(config.mlp_bias),
        is_tied=bool(config.tie_word_embeddings),
        context_tokens=config.max_position_embeddings,
        rope_frequencies=frequencies,
        rope_scale=scale,
    )


def _whole(given: Mapping[str, object]) -> Any:
    """The config with its defaults filled in. Only transformers knows them, and importing it costs 60 MiB, so this does so only if
    fields are missing."""
    if all(name in given for name in (*_FIELDS, *_MORE_FIELDS[str(given["model_type"])])):
        return SimpleNamespace(**given)
    from transformers import AutoConfig

    return AutoConfig.for_model(**given)


def _difference(config: Any) -> str:
    if config.hidden_act != "silu":
        return f"hidden_act: expected silu, got {config.hidden_act!r}"
    layer_types = getattr(config, "layer_types", None) or []
    is_windowed = config.model_type == "mistral" and config.sliding_window is not None
    if is_windowed or any(kind != "full_attention" for kind in layer_types):
        return "sliding_window: the fused path attends to the whole context; expected null"
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        return f"rope_type: expected one of {', '.join(_ROPE_TYPES)}, got {rope_type!r}"
    return ""


def _rope(config: Any) -> tuple[np.ndarray, float]:
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        return (1.0 / np.float32(config.rope_parameters["rope_theta"]) ** exponents).astype(np.float32), 1.0
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return frequencies.float().numpy(), float(scale)
