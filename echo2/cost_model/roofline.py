"""How fast an engine decodes and prefills, from what a step moves and computes: the roofline (Williams, Waterman, Patterson,
CACM 2009).

A decoding step of n sequences reads every weight and every sequence's keys and values once, and multiplies n tokens with the
weights that each of them uses. A prefilling step reads every weight once and multiplies `PREFILL_STEP_TOKENS` tokens, each of which
attends to those before it. Either takes as long as the slower of the two, and `STEP_S` for what is neither.
Guarantees: pure; one more sequence never lowers the rate. Leaves to others: how many sequences fit (sizing), by how much a kind
of machine differs from this (rates).
"""

from __future__ import annotations

from typing import Protocol

from echo2.cost_model.sizing import GPU_BYTES, ModelSize, Quantisation

BANDWIDTH_SHARE = 0.7
"""Of the data sheet's: what attention and matrix-vector kernels reach, an assumption until a machine has been measured."""
DECODE_FLOPS_SHARE = 0.5
"""Of the data sheet's dense bf16."""
STEP_S = 0.003
"""Scheduling, sampling and launches of a step: an assumption of the order that vLLM's authors publish."""

PREFILL_STEP_TOKENS = 2048
"""Read in one step: vLLM's usual budget."""


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
    """Seconds of one step of `sequences` sequences that hold `tokens_each` tokens on average.

    speed: how many times as fast as one GPU the engine is (`sizing.spread_speed`). Rounded weights are fewer bytes to read;
    their products count as no faster.
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
    """Of all sequences together."""
    return sequences / step_s(sheet, size, sequences, tokens_each, speed, quantisation)


def prefill_tokens_per_s(
    sheet: Sheet,
    size: ModelSize,
    tokens_each: float,
    speed: float = 1.0,
    quantisation: Quantisation = Quantisation.NONE,
) -> float:
    """Prefill rate for sequences of `tokens_each` tokens that are read whole, many at a time."""
    attended = 2.0 * size.layer_count * size.query_width * tokens_each
    computed = PREFILL_STEP_TOKENS * (2.0 * size.active_parameters + attended)
    moving_s = size.card_bytes(quantisation) / (BANDWIDTH_SHARE * sheet.bandwidth_gb_per_s * 1e9 * speed)
    computing_s = computed / (DECODE_FLOPS_SHARE * sheet.train_tflops * 1e12 * speed)
    return PREFILL_STEP_TOKENS / (max(moving_s, computing_s) + STEP_S)
