"""Builds decoder-only models from transformers' own modules, for architectures that the fused path does not support.

Guarantees: the modules' parameters are the live weights, checked and proven like those of the fused path; a model with anything but
causal attention, full or windowed (state spaces, chunks, encoders), is refused by name before any weight is fetched. Leaves to
others: the cache and attention over it (general).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from echo2.base.errors import ConfigError
from echo2.scoring.routers import Routers
from echo2.worker.runtime.engines.adapter import Adapter
from echo2.worker.runtime.engines.live import LiveTensors
from echo2.worker.runtime.engines.shape import load_config

ATTENTION = "echo2_blocks"
"""The name under which transformers finds the attention over a cache in blocks."""
_WINDOWS = ("full_attention", "sliding_attention")


class ModuleWeights(LiveTensors):
    """`model` is a causal LM in float32 on the CPU; its parameters are zeros until the first version arrives. `routers` records the
    experts chosen, if `tells_routing`."""

    def __init__(
        self,
        source: str | Path | Mapping[str, object],
        adapter: Adapter | None = None,
        *,
        tells_routing: bool = False,
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        given = load_config(source)
        try:
            config = AutoConfig.for_model(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"model_type: expected one that transformers knows, got {given.get('model_type')!r}"
            ) from error
        self.model_type = str(config.model_type)
        self._text = config.get_text_config(decoder=True)
        _refuse_other_attention(self.model_type, self._text)
        try:
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"model_type {self.model_type}: transformers cannot make a causal LM of it: {error}"
            ) from error
        model.tie_weights()  # no_init_weights has skipped it
        self.model: Any = model.eval().requires_grad_(False)
        for parameter in self.model.parameters():
            parameter.zero_()
        self.tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        super().__init__(self.model_type, self.tensors, adapter)
        self.routers = Routers(self.model, f"model_type {self.model_type}") if tells_routing else None

    @property
    def vocab_count(self) -> int:
        return int(self._text.vocab_size)

    @property
    def logit_softcap(self) -> float:
        """Soft cap of the head's logits; 0: none."""
        return float(getattr(self._text, "final_logit_softcapping", None) or 0.0)

    @property
    def context_tokens(self) -> int:
        """The model's context; with longrope only its original length, because longer sequences use another rotation."""
        most = int(self._text.max_position_embeddings)
        ropes = _ropes(self._text)
        unchanged = [
            int(rope["original_max_position_embeddings"]) for rope in ropes if rope.get("rope_type") == "longrope"
        ]
        return min([most, *unchanged])


def _refuse_other_attention(model_type: str, config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or []) - set(_WINDOWS)
    if kinds:
        raise ConfigError(
            f"model_type {model_type}: the embedded engine attends over the whole context or a window, got layers of "
            f"{', '.join(sorted(kinds))}"
        )
    for name in ("num_attention_heads", "max_position_embeddings", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise ConfigError(f"model_type {model_type}: expected a decoder with attention, its config has no {name}")
    if any(rope.get("rope_type") == "dynamic" for rope in _ropes(config)):
        raise ConfigError(
            f"model_type {model_type}, rope_type: dynamic rotates cached keys again, which no engine here does"
        )


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The rotary embeddings of a config: one, or one per kind of layer."""
    said = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in said.values() if isinstance(value, Mapping)]
    return nested or [said]
