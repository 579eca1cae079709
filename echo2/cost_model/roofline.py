"""Decode and prefill rates of an engine, from the bytes a step moves and the FLOPs it computes: the roofline (Williams, Waterman,
Patterson, CACM 2009).

A decode step of n sequences reads all weights and every sequence's KV cache once, and multiplies n tokens with the weights that
each of them uses. A prefill step reads all weights once and multiplies `PREFILL_STEP_TOKENS` tokens, each of which attends to
those before it. A step takes the longer of moving and computing, plus `STEP_S` of overhead.
Guarantees: pure; one more sequence never lowers the rate. Leaves to others: how many sequences fit (sizing), how a kind of
machine deviates from this (rates).
"""

from __future__ import annotations

from typing import Protocol

from echo2.cost_model.sizing import GPU_BYTES, ModelSize, Quantisation

BANDWIDTH_SHARE = 0.7
"""Share of the data sheet's bandwidth that attention and matrix-vector kernels reach; assumed until a machine is measured."""
DECODE_FLOPS_SHARE = 0.5
"""Share of the data sheet's dense bf16 FLOPs that is reached."""
STEP_S = 0.003
"""Seconds per step for scheduling, sampling and kernel launches; assumed, of the order that vLLM's authors publish."""

PREFILL_STEP_TOKENS = 2048
"""Tokens prefilled per step: vLLM's usual budget."""


class Sheet(Protocol):
    """A GPU's data sheet."""

    @property
    def bandwidth_gb_per_s(self) -> float: ...

    @property
    def train_tflops(self) -> float: ...


def step_s(
    sheet: Sheet,
    size: ModelSize,
    sequences: int,
    tokens_each: float,
    speed: float = 1.0,
    quantisation: Quantisation = Quantisation.NONE,
) -> float:
    """Seconds of one decode step of `sequences` sequences with `tokens_each` cached tokens on average.

    speed: of the engine, relative to one GPU (`sizing.spread_speed`). Quantised weights reduce the bytes read but are not
    assumed to speed up the matrix products.
    """
    moved = size.card_bytes(quantisation) + sequences * tokens_each * GPU_BYTES * size.kv_values_per_token
    computed = 2.0 * sequences * size.active_parameters
    moving_s = moved / (BANDWIDTH_SHARE * sheet.bandwidth_gb_per_s * 1e9 * speed)
    computing_s = computed / (DECODE_FLOPS_SHARE * sheet.train_tflops * 1e12 * speed)
    return max(moving_s, computing_s) + STEP_S


def tokens_per_s(
    sheet: Sheet,
    size: ModelSize,
    sequences: int,
    tokens_each: float,
    speed: float = 1.0,
    quantisation: Quantisation = Quantisation.NONE,
) -> float:
    """Decode rate of all sequences together, in tokens/s."""
    return sequences / step_s(sheet, size, sequences, tokens_each, speed, quantisation)


def prefill_tokens_per_s(
    sheet: Sheet,
    size: ModelSize,
    tokens_each: float,
    speed: float = 1.0,
    quantisation: Quantisation = Quantisation.NONE,
) -> float:
    """Prefill rate in tokens/s for whole sequences of `tokens_each` tokens, many at a time."""
    attended = 2.0 * size.layer_count * size.query_width * tokens_each
    computed = PREFILL_STEP_TOKENS * (2.0 * size.active_parameters + attended)
    moving_s = size.card_bytes(quantisation) / (BANDWIDTH_SHARE * sheet.bandwidth_gb_per_s * 1e9 * speed)
    computing_s = computed / (DECODE_FLOPS_SHARE * sheet.train_tflops * 1e12 * speed)
    return PREFILL_STEP_TOKENS / (max(moving_s, computing_s) + STEP_S)
