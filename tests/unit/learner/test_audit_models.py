"""The audit on real models: who samples from what it claims is left alone, who does not is found out.

How soon, and from which size on, is measured by `benchmarks/bench_audit.py`, whose workers these are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.audit_workers import (
    NEWEST,
    OLDEST,
    PREVIOUS,
    TOKENS,
    Alter,
    Bench,
    altered,
    best_of,
    by_likelihood,
    by_reward,
    copied,
    cut_short,
    dishonest_tail,
    engine_of,
    fabricated,
    forged_raw,
    honest,
    honest_over_a_swap,
    leased_numbers,
    make_bench,
    memorised,
    one_behind,
    one_token,
    others_tokens,
    perturbed,
    quantised,
    sampled,
    watched,
)
from echo2.base.rollout import Rollout
from echo2.worker.runtime.engines.rounded import rounded_rows
from tests.contract.engine_rig import fp8_rows, rounded_to_fp8


def widened(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.float() * scales[:, None]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("audit"))


def test_honest_workers_of_another_dtype_and_batch_size_are_left_alone(bench: Bench) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert watched(bench, honest(bench, dtype), 24)[2] is None, dtype
    assert watched(bench, honest(bench, siblings=1), 60)[2] is None
    assert watched(bench, honest_over_a_swap(bench), 24)[2] is None
    own_numbers = best_of(bench, by_reward, tries=1)
    assert watched(bench, own_numbers, 24, draws_by_seed=False)[2] is None


def test_a_worker_that_rounds_to_int8_as_the_embedded_engine_can_is_left_alone(bench: Bench) -> None:
    held, _, accusation = watched(bench, altered(bench, lambda weight: widened(*rounded_rows(weight.bfloat16()))), 60)
    assert accusation is None
    assert 0 < held.noise_nats < held.config.noise_nats / 3


def test_a_worker_that_rounds_to_fp8_as_vllm_can_is_left_alone(bench: Bench) -> None:
    """Weights by row, and what they are multiplied with by token, as its kernels for fp8 do; the rest in bf16."""
    engine = rounded_to_fp8(engine_of(bench, NEWEST)).bfloat16()
    for name, module in engine.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, given: (by_token(given[0]),))
    make = partial(fp8_rollouts, engine)
    held, _, accusation = watched(bench, make, 60)
    assert accusation is None
    assert held.config.noise_nats / 5 < held.noise_nats < held.config.noise_nats / 2


def by_token(values_BTC: torch.Tensor) -> torch.Tensor:
    codes, scales = fp8_rows(values_BTC.flatten(0, 1))
    return (codes.float() * scales).to(values_BTC.dtype).view(values_BTC.shape)


def fp8_rollouts(engine: Any, group: int) -> list[Rollout]:
    return sampled([(engine, NEWEST, TOKENS)], group, leased_numbers(group))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_worker_on_the_previous_version_is_found_out(bench: Bench, dtype: torch.dtype) -> None:
    _, _, accusation = watched(bench, one_behind(bench, dtype), 150)
    assert accusation is not None and accusation.bet == "version" and accusation.is_certain


def test_a_worker_that_fabricates_its_numbers_is_found_out(bench: Bench) -> None:
    held, _, accusation = watched(bench, fabricated(bench), 20)
    assert accusation is not None and accusation.bet == "fabrication" and held.tokens <= 1024 and accusation.is_certain


def test_a_worker_that_cuts_its_completions_short_is_found_out(bench: Bench) -> None:
    _, _, accusation = watched(bench, cut_short(bench), 60)
    assert accusation is not None and accusation.bet == "length" and accusation.is_certain


def test_a_worker_that_hands_completions_in_twice_is_found_out(bench: Bench) -> None:
    held, _, accusation = watched(bench, copied(bench), 20)
    assert accusation is not None and accusation.bet == "copies" and held.tokens <= 4096 and accusation.is_certain


def test_a_worker_that_samples_greedily_is_found_out(bench: Bench) -> None:
    _, _, accusation = watched(bench, altered(bench, None, coldness=8.0), 40)
    assert accusation is not None and accusation.bet in ("draw", "copies", "choice") and accusation.is_certain


@pytest.mark.parametrize(("name", "alter"), [("4 bits", quantised(4)), ("perturbed by a tenth", perturbed(0.1))])
def test_an_altered_model_is_found_out_and_set_aside(bench: Bench, name: str, alter: Alter) -> None:
    _, _, accusation = watched(bench, altered(bench, alter), 100)
    assert accusation is not None and not accusation.is_certain, name


def test_a_choice_among_completions_is_found_out_by_the_numbers_of_its_lease(bench: Bench) -> None:
    """Whatever it chose by: the numbers are honest and the tokens are draws of the version named."""
    for make in (best_of(bench, by_reward), best_of(bench, by_likelihood), memorised(bench), dishonest_tail(bench)):
        held, rollouts, accusation = watched(bench, make, 4)
        assert accusation is not None and accusation.bet == "choice" and accusation.is_certain
        assert rollouts <= 8 and held.noise_nats < 1e-4


@pytest.mark.parametrize("version", [PREVIOUS, OLDEST])
def test_tokens_of_an_older_version_are_found_out_though_their_numbers_were_recomputed(
    bench: Bench, version: int
) -> None:
    """By the tokens at which the two versions, given the lease's random numbers, part."""
    held, rollouts, accusation = watched(bench, others_tokens(bench, version), 20)
    assert accusation is not None and accusation.bet == "older" and accusation.is_certain
    assert rollouts <= 160 and held.noise_nats < 1e-4


def test_what_intake_refuses_is_never_audited(bench: Bench) -> None:
    for make in (forged_raw(bench), one_token(bench)):
        _, rollouts, accusation = watched(bench, make, 1)
        assert accusation is not None and accusation.bet == "intake" and rollouts == 1
