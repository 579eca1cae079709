"""The roofline's two sides, and that it follows sequences, lengths, experts and GPUs as physics has it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from echo2.coordinator.money.market import built_in_catalogue, built_in_models
from echo2.cost_model.machines import (
    BANDWIDTH_SHARE,
    DECODE_FLOPS_SHARE,
    PREFILL_STEP_TOKENS,
    STEP_S,
    Roofline,
)
from echo2.cost_model.sizing import Quantisation, spread_speed

CATALOGUE, MODELS = built_in_catalogue(), built_in_models()
H100, SIZE = CATALOGUE["H100"], MODELS["qwen3-8b"]


def test_one_sequence_takes_as_long_as_reading_the_weights() -> None:
    reading_s = SIZE.gpu_weight_bytes / (BANDWIDTH_SHARE * H100.bandwidth_gb_per_s * 1e9)
    assert Roofline(H100, SIZE).step_s(1, 0.0) == pytest.approx(reading_s + STEP_S)


def test_rounded_weights_are_read_sooner_and_multiplied_no_faster() -> None:
    exact, rounded = (
        Roofline(H100, SIZE, quantisation=each).step_s(1, 0.0) for each in (Quantisation.NONE, Quantisation.FP8)
    )
    assert exact - rounded == pytest.approx(SIZE.linear_parameters / (BANDWIDTH_SHARE * H100.bandwidth_gb_per_s * 1e9))
    assert Roofline(H100, SIZE, quantisation=Quantisation.FP8).step_s(4096, 0.0) == Roofline(H100, SIZE).step_s(
        4096, 0.0
    )


def test_many_short_sequences_take_as_long_as_their_products() -> None:
    computing_s = 2 * 4096 * SIZE.parameters / (DECODE_FLOPS_SHARE * H100.train_tflops * 1e12)
    assert Roofline(H100, SIZE).step_s(4096, 0.0) == pytest.approx(computing_s + STEP_S)


def test_the_cache_of_long_sequences_takes_bandwidth() -> None:
    short, long = (Roofline(H100, SIZE).tokens_per_s(64, tokens) for tokens in (256, 16_384))
    cache_s = 64 * (16_384 - 256) * 2 * SIZE.kv_values_per_token / (BANDWIDTH_SHARE * H100.bandwidth_gb_per_s * 1e9)
    assert 64 / long - 64 / short == pytest.approx(cache_s)


def test_one_more_sequence_never_lowers_the_rate() -> None:
    rates = [Roofline(CATALOGUE["RTX4090"], SIZE).tokens_per_s(count, 1280.0) for count in range(1, 512)]
    assert all(after >= before for before, after in pairwise(rates))


def test_experts_that_a_token_does_not_see_cost_no_products() -> None:
    size = replace(SIZE, parameters=30_500_000_000, idle_parameters=27_200_000_000)
    dense = replace(size, idle_parameters=0)
    assert Roofline(H100, size).tokens_per_s(4096, 0.0) > 4 * Roofline(H100, dense).tokens_per_s(4096, 0.0)


def test_two_gpus_are_faster_than_one_and_slower_than_twice() -> None:
    one, two = (Roofline(H100, SIZE, spread_speed(count)).step_s(64, 1280.0) - STEP_S for count in (1, 2))
    assert 1.0 < one / two < 2.0


def test_prefill_takes_as_long_as_its_products_and_attention() -> None:
    short, long = (Roofline(H100, SIZE).prefill_tokens_per_s(tokens) for tokens in (0.0, 16_384.0))
    rate = DECODE_FLOPS_SHARE * H100.train_tflops * 1e12
    products_s = 2 * SIZE.parameters / rate
    assert 1 / short == pytest.approx(products_s + STEP_S / PREFILL_STEP_TOKENS)
    # Of each pair of a token and one before it 4 FLOP a value of the queries, in each layer; half of the pairs are there.
    attended_s = 4 * SIZE.layer_count * SIZE.query_width * 16_384 / 2 / rate
    assert 1 / long - 1 / short == pytest.approx(attended_s)
    assert Roofline(H100, SIZE, spread_speed(2)).prefill_tokens_per_s(0.0) > short
