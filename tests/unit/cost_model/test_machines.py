"""What a machine does before it is measured: its kind by name, the roofline's sides, and what prefill costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from echo2.coordinator.money.market import built_in_catalogue, built_in_models
from echo2.cost_model.machines import (
    BANDWIDTH_SHARE,
    DECODE_FLOPS_SHARE,
    STEP_S,
    Roofline,
    kind_of_name,
    prefill_cost,
    train_s_prior,
    worker_prior,
)
from echo2.cost_model.question import PlanQuestion
from echo2.cost_model.sizing import Quantisation, RunLengths, spread_speed
from tests.unit.cost_model.test_question import question

CATALOGUE, MODELS = built_in_catalogue(), built_in_models()
H100, SIZE = CATALOGUE["H100"], MODELS["qwen3-8b"]


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [
        ("1 x NVIDIA GeForce RTX 4090", "RTX4090", 1),
        ("2 x NVIDIA H100 80GB HBM3", "H100", 2),
        ("8 x NVIDIA A100-SXM4-80GB", "A100-80G", 8),
        ("NVIDIA RTX A6000", "A6000", 1),
        ("1 x NVIDIA RTX 6000 Ada Generation", "RTX6000Ada", 1),
        ("NVIDIA A100", "", 1),  # of which size?
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "", 1),
        ("1 x NVIDIA L4 + 1 x NVIDIA H100", "", 1),
        ("0 x NVIDIA L4", "", 1),
        ("cpu", "cpu", 1),
    ],
)
def test_a_name_gives_its_kind_and_how_many(text: str, kind: str, count: int) -> None:
    assert kind_of_name(text, CATALOGUE) == (kind, count)


def test_a_decode_step_takes_the_longer_of_reading_and_multiplying() -> None:
    def step_s(sequences: int, quantisation: Quantisation = Quantisation.NONE) -> float:
        return Roofline(H100, SIZE, quantisation=quantisation).step_s(sequences, 0.0)

    bandwidth = BANDWIDTH_SHARE * H100.bandwidth_gb_per_s * 1e9
    assert step_s(1) == pytest.approx(SIZE.gpu_weight_bytes / bandwidth + STEP_S)
    computing_s = 2 * 4096 * SIZE.parameters / (DECODE_FLOPS_SHARE * H100.train_tflops * 1e12)
    assert step_s(4096) == pytest.approx(computing_s + STEP_S)
    assert step_s(1) - step_s(1, Quantisation.FP8) == pytest.approx(SIZE.linear_parameters / bandwidth)
    assert step_s(4096, Quantisation.FP8) == step_s(4096), "rounded weights are multiplied no faster"
    short, long = (Roofline(H100, SIZE).tokens_per_s(64, tokens) for tokens in (256, 16_384))
    cache_s = 64 * (16_384 - 256) * 2 * SIZE.kv_values_per_token / bandwidth
    assert 64 / long - 64 / short == pytest.approx(cache_s)


def test_rates_follow_sequences_experts_and_gpus() -> None:
    rates = [Roofline(CATALOGUE["RTX4090"], SIZE).tokens_per_s(count, 1280.0) for count in range(1, 512)]
    assert all(after >= before for before, after in pairwise(rates))
    experts = replace(SIZE, parameters=30_500_000_000, idle_parameters=27_200_000_000)
    dense = replace(experts, idle_parameters=0)
    assert Roofline(H100, experts).tokens_per_s(4096, 0.0) > 4 * Roofline(H100, dense).tokens_per_s(4096, 0.0)
    one, two = (Roofline(H100, SIZE, spread_speed(count)).step_s(64, 1280.0) - STEP_S for count in (1, 2))
    assert 1.0 < one / two < 2.0
    small, large = (worker_prior(CATALOGUE["RTX4090"], MODELS[n], RunLengths(4096)) for n in ("qwen3-4b", "qwen3-32b"))
    assert small.gpu_count == 1 < large.gpu_count
    assert small.tokens_per_s > large.tokens_per_s / large.gpu_count
    assert train_s_prior(H100, 4, 8.0, 1e6) == pytest.approx(0.1 + 48e15 / (4 * 990e12 * 0.23))


def asked(*, recomputes: bool) -> PlanQuestion:
    """Two RTX3090, a card with much bandwidth for its arithmetic."""
    found = question()
    return replace(found, offers=(replace(found.offers[0], gpu="RTX3090", gpus=2),), recomputes_caches=recomputes)


def test_what_is_prefilled_beside_sampling_is_in_a_prior_rate_once_and_in_a_measured_one_not_again() -> None:
    told = asked(recomputes=True)
    prior, cost = told.prior(told.offers[0]), told.prefill_cost(told.offers[0])
    assert cost.recompute_tokens == pytest.approx(44 * told.tokens_in_cache)
    assert cost.recompute_s == pytest.approx(cost.recompute_tokens / prior.prefill_tokens_per_s)
    worker, plain = told.worker(told.offers[0], 0), asked(recomputes=False).worker(told.offers[0], 0)
    assert worker.swap_s == cost.recompute_s > 0.0 == plain.swap_s
    assert worker.tokens_per_s == plain.tokens_per_s == prior.tokens_per_s
    measured = replace(told, offers=(replace(told.offers[0], tokens_per_s=1000.0),)).worker
    worker = measured(replace(told.offers[0], tokens_per_s=1000.0), 0)
    assert (worker.tokens_per_s, worker.swap_s) == (1000.0, 0.0)
    full = prefill_cost(prior, 1e9, recomputes=True)
    assert full.recompute_tokens == prior.fit.engine_count * prior.fit.cache_tokens, "the cache holds no more"
