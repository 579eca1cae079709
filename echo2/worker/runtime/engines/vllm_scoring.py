"""Scores given tokens with vLLM's model, without disturbing the sequences that it generates.

Runs inside vLLM's worker process, while generation is paused. vLLM's own prompt log-probabilities are not enough (an audit needs
statistics of the whole distribution behind each token), and they go through its scheduler, which knows no former weights. So this
module runs the model on the tokens itself, `READ_TOKENS` at a time; meanwhile the attention layers use keys and values kept here,
for one sequence. Guarantees: the columns of `TokenScores`, to the rounding of vLLM's kernels; vLLM's cache and running sequences
are not touched; a model with attention other than causal, grouped-query and windowed is reported as unable to score. Leaves to
others: which weights are live meanwhile (weight_map), pausing (vllm.py).

Shapes: Q tokens read now, T tokens read so far, H query heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from echo2.base.rollout import SamplingParams
from echo2.scoring.columns import chunk_scores, joined
from echo2.scoring.request import TokenScores

READ_TOKENS = 1_024
SCORED_LOGITS = 1 << 22
"""Logits processed at a time: with their sorted copies 160 MB of the memory that vLLM leaves free."""


class ScoringAttention:
    """Replaces one layer's kernel: causal attention within one sequence."""

    def __init__(self, layer: Any, tokens: int) -> None:
        self._window = layer.sliding_window or 0
        self._scale = float(layer.impl.scale)
        self._tokens = tokens
        self._count = 0
        self._keys_TKD = self._values_TKD = torch.empty(0)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: object,
        attn_metadata: object,
        output: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        """The interface that vLLM calls: `query` is [Q, H, D], `key` and `value` are [Q, K, D]; writes `output` [Q, H, D]."""
        if not self._count:
            self._keys_TKD = key.new_empty(self._tokens, *key.shape[1:])
            self._values_TKD = value.new_empty(self._tokens, *value.shape[1:])
        begin, end = self._count, self._count + len(query)
        self._keys_TKD[begin:end], self._values_TKD[begin:end] = key, value
        self._count = end
        found_HQD = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            self._keys_TKD[:end].transpose(0, 1)[None],
            self._values_TKD[:end].transpose(0, 1)[None],
            attn_mask=self._mask(begin, end, query.device),
            scale=self._scale,
            enable_gqa=True,
        )[0]
        output.copy_(found_HQD.transpose(0, 1))
        return output

    def _mask(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """[Q, T]: which positions each token attends to."""
        at_Q = torch.arange(begin, end, device=device)[:, None]
        of_T = torch.arange(end, device=device)
        seen_QT = of_T <= at_Q
        return seen_QT & (of_T > at_Q - self._window) if self._window else seen_QT


def attention_layers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, AttentionLayerBase)]


def why_not_scoring(runner: Any) -> str:
    """The model's feature that scoring does not support; empty: it can score."""
    if runner.uses_mrope or runner.model_config.is_encoder_decoder or runner.lora_config is not None:
        return "it scores text by whole weights alone"
    for layer in attention_layers(runner.model):
        if type(layer) is not Attention or layer.attn_type != "decoder" or layer.kv_sharing_target_layer_name:
            return f"attention of the kind {type(layer).__name__} ({getattr(layer, 'layer_name', '')})"
        for what in ("logits_soft_cap", "alibi_slopes", "sinks"):
            value = getattr(layer.impl, what, None)
            if isinstance(value, torch.Tensor) or value:
                return f"attention with {what}"
    return ""


@contextmanager
def _own_attention(model: torch.nn.Module, tokens: int) -> Iterator[None]:
    """Within the context, attention layers keep the keys and values of one sequence of up to `tokens` tokens here."""
    kept = [(layer, layer.impl) for layer in attention_layers(model)]
    try:
        for layer, _ in kept:
            layer.impl = ScoringAttention(layer, tokens)
        yield
    finally:
        for layer, impl in kept:
            layer.impl = impl


@torch.inference_mode()
def scores(runner: Any, tokens: Sequence[int], first: int, stop: int, sampling: SamplingParams) -> TokenScores | None:
    """Scores of the tokens at positions `first` to `stop` (exclusive) under the live weights; None on a rank without logits."""
    model, device = runner.model, runner.device
    token_ids = torch.tensor(tokens[:stop], device=device)
    positions = torch.arange(stop, device=device)
    rows = max(1, SCORED_LOGITS // runner.model_config.get_vocab_size())
    at_once = min(READ_TOKENS, runner.max_num_tokens)
    parts = []
    with _own_attention(model, stop - 1):
        for begin in range(0, stop - 1, at_once):
            end = min(begin + at_once, stop - 1)
            with set_forward_context(
                None, runner.vllm_config, num_tokens=end - begin, slot_mapping={}, skip_compiled=True
            ):
                read = model(input_ids=token_ids[begin:end], positions=positions[begin:end])
            hidden_QD = read[0] if isinstance(read, tuple) else read
            for place in range(max(begin, first - 1), end, rows):
                upto = min(place + rows, end)
                logits = model.compute_logits(hidden_QD[place - begin : upto - begin])
                if logits is not None:
                    parts.append(chunk_scores(logits, token_ids[place + 1 : upto + 1], sampling))
    return joined(parts) if parts else None
