"""The roofline's two sides, and that it follows sequences, lengths, experts and GPUs as physics has it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from echo2.coordinator.runtime.catalogue import built_in_catalogue, built_in_models
from echo2.cost_model.roofline import (
    BANDWIDTH_SHARE,
    DECODE_FLOPS_SHARE,
    PREFILL_STEP_TOKENS,
    STEP_S,
    prefill_tokens_per_s,
    step_s,
    tokens_per_s,
)
from echo2.cost_model.sizing import Quantisation, model_size, spread_speed

CATALOGUE, MODELS = built_in_catalogue(), built_in_models()
H100, SIZE = CATALOGUE["H100"], MODELS["qwen3-8b"]


def test_one_sequence_takes_as_long_as_reading_the_weights() -> None:
    reading_s = SIZE.gpu_weight_bytes / (BANDWIDTH_SHARE * H100.bandwidth_gb_per_s * 1e9)
    assert step_s(H100, SIZE, 1, 0.0) == pytest.approx(reading_s + STEP_S)


def test_rounded_weights_are_read_sooner_and_multiplied_no_faster() -> None:
    exact, rounded = (step_s(H100, SIZE, 1, 0.0, quantisation=each) for each in (Quantisation.NONE, Quantisation.FP8))
    assert exact - rounded == pytest.approx(SIZE.linear_parameters / (BANDWIDTH_SHARE * H100.bandwidth_gb_per_s * 1e9))
    assert step_s(H100, SIZE, 4096, 0.0, quantisation=Quantisation.FP8) == step_s(H100, SIZE, 4096, 0.0)


def test_many_short_sequences_take_as_long_as_their_products() -> None:
    computing_s = 2 * 4096 * SIZE.parameters / (DECODE_FLOPS_SHARE * H100.train_tflops * 1e12)
    assert step_s(H100, SIZE, 4096, 0.0) == pytest.approx(computing_s + STEP_S)


def test_the_cache_of_long_sequences_takes_bandwidth() -> None:
    short, long = (tokens_per_s(H100, SIZE, 64, tokens) for tokens in (256, 16_384))
    cache_s = 64 * (16_384 - 256) * 2 * SIZE.kv_values_per_token / (BANDWIDTH_SHARE * H100.bandwidth_gb_per_s * 1e9)
    assert 64 / long - 64 / short == pytest.approx(cache_s)


def test_one_more_sequence_never_lowers_the_rate() -> None:
    rates = [tokens_per_s(CATALOGUE["RTX4090"], SIZE, count, 1280.0) for count in range(1, 512)]
    assert all(after >= before for before, after in pairwise(rates))


def test_experts_that_a_token_does_not_see_cost_no_products() -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    }  # fmt: skip
    size = model_size(config)
    assert size.parameters == pytest.approx(30.5e9, rel=0.02) and size.active_parameters == pytest.approx(
        3.3e9, rel=0.05
    )
    dense = replace(size, idle_parameters=0)
    assert tokens_per_s(H100, size, 4096, 0.0) > 4 * tokens_per_s(H100, dense, 4096, 0.0)


def test_two_gpus_are_faster_than_one_and_slower_than_twice() -> None:
    one, two = (step_s(H100, SIZE, 64, 1280.0, spread_speed(count)) - STEP_S for count in (1, 2))
    assert 1.0 < one / two < 2.0


def test_prefill_takes_as_long_as_its_products_and_attention() -> None:
    short, long = (prefill_tokens_per_s(H100, SIZE, tokens) for tokens in (0.0, 16_384.0))
    rate = DECODE_FLOPS_SHARE * H100.train_tflops * 1e12
    products_s = 2 * SIZE.parameters / rate
    assert 1 / short == pytest.approx(products_s + STEP_S / PREFILL_STEP_TOKENS)
    # Of each pair of a token and one before it 4 FLOP a value of the queries, in each layer; half of the pairs are there.
    attended_s = 4 * SIZE.layer_count * SIZE.query_width * 16_384 / 2 / rate
    assert 1 / long - 1 / short == pytest.approx(attended_s)
    assert prefill_tokens_per_s(H100, SIZE, 0.0, spread_speed(2)) > short
