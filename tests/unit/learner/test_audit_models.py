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
    by_reward,
    copied,
    cut_short,
    dishonest_tail,
    engine_of,
    fabricated,
    fleet_noise,
    forged_raw,
    honest,
    honest_over_a_swap,
    leased_numbers,
    make_bench,
    memorised,
    near_misses,
    one_behind,
    one_token,
    others_tokens,
    perturbed,
    quantised,
    sampled,
    watched,
)
from echo2.base.rollout import Rollout
from echo2.learner.audit import Habits, KindNoise
from tests.contract.engine_rig import fp8_rows, rounded_to_fp8


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("audit"))


def test_honest_workers_of_another_dtype_and_batch_size_are_left_alone(bench: Bench) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert watched(bench, honest(bench, dtype), 6)[2] is None, dtype
    assert watched(bench, honest(bench, siblings=1), 12)[2] is None
    assert watched(bench, honest_over_a_swap(bench), 6)[2] is None
    own_numbers = best_of(bench, by_reward, tries=1)
    assert watched(bench, own_numbers, 6, habits=Habits(False, kind="vllm none"))[2] is None


def known() -> KindNoise:
    """Others of its kind, whose noise is that of bf16 on this model."""
    return fleet_noise("embedded none", 0.002)


@pytest.mark.soak
def test_a_worker_that_rounds_to_fp8_as_vllm_can_is_left_alone_among_its_kind(bench: Bench) -> None:
    """Weights by row, and what they are multiplied with by token, as its kernels for fp8 do; the rest in bf16."""
    engine = rounded_to_fp8(engine_of(bench, NEWEST)).bfloat16()
    for name, module in engine.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, given: (by_token(given[0]),))
    make, habits = partial(fp8_rollouts, engine), Habits(True, kind="vllm fp8")
    held, _, accusation = watched(bench, make, 40, habits=habits)
    assert accusation is None and 0.01 < held.noise_nats < 0.03
    assert watched(bench, make, 40, habits=habits, noise=fleet_noise("vllm fp8", held.noise_nats))[2] is None
    _, _, accusation = watched(bench, make, 60, noise=known())
    assert accusation is not None and not accusation.is_certain, "one that says it does not round is set aside"


def by_token(values_BTC: torch.Tensor) -> torch.Tensor:
    codes, scales = fp8_rows(values_BTC.flatten(0, 1))
    return (codes.float() * scales).to(values_BTC.dtype).view(values_BTC.shape)


def fp8_rollouts(engine: Any, group: int) -> list[Rollout]:
    return sampled([(engine, NEWEST, TOKENS)], group, leased_numbers(group))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.soak), torch.bfloat16])
def test_a_worker_on_the_previous_version_is_found_out(bench: Bench, dtype: torch.dtype) -> None:
    _, rollouts, accusation = watched(bench, one_behind(bench, dtype), 20, noise=known())
    assert accusation is not None and rollouts <= 80


def test_a_worker_that_fabricates_its_numbers_is_found_out(bench: Bench) -> None:
    held, _, accusation = watched(bench, fabricated(bench), 20)
    assert accusation is not None and accusation.bet == "fabrication" and held.tokens <= 1024 and accusation.is_certain


@pytest.mark.parametrize("how", ["cut short", "copies", "greedy", "memorised", "best of four", "behind a version"])
def test_tokens_that_are_not_those_of_the_lease_are_found_whatever_they_were_chosen_by(bench: Bench, how: str) -> None:
    """The numbers are honest, and most are draws of the version named; nothing is known of other workers."""
    make = {
        "cut short": cut_short, "copies": copied, "memorised": memorised, "behind a version": dishonest_tail,
        "greedy": lambda bench: altered(bench, None, coldness=8.0), "best of four": lambda bench: best_of(bench, by_reward),
    }[how](bench)  # fmt: skip
    _, rollouts, accusation = watched(bench, make, 20)
    assert accusation is not None and accusation.bet in ("draw", "choice") and rollouts <= 100


@pytest.mark.parametrize(("name", "alter"), [("4 bits", quantised(4)), ("perturbed by a tenth", perturbed(0.1))])
def test_an_altered_model_is_found_out_and_set_aside(bench: Bench, name: str, alter: Alter) -> None:
    _, _, accusation = watched(bench, altered(bench, alter), 20, noise=known())
    assert accusation is not None and not accusation.is_certain, name


@pytest.mark.parametrize("version", [PREVIOUS, pytest.param(OLDEST, marks=pytest.mark.soak)])
def test_tokens_of_an_older_version_are_found_out_though_their_numbers_were_recomputed(
    bench: Bench, version: int
) -> None:
    """By the tokens at which the two versions, given the lease's random numbers, part."""
    held, rollouts, accusation = watched(bench, others_tokens(bench, version), 20)
    assert accusation is not None and accusation.bet == "draw" and rollouts <= 160 and held.noise_nats < 1e-4


def test_a_selection_within_the_noise_that_is_allowed_is_found_out(bench: Bench) -> None:
    """It draws anywhere within the band of the largest noise of any kind, and keeps the best of four."""
    for noise in (known(), KindNoise()):
        _, rollouts, accusation = watched(bench, near_misses(bench, 0.6, tries=4), 20, noise=noise)
        assert accusation is not None and rollouts <= 60


def test_what_intake_refuses_is_never_audited(bench: Bench) -> None:
    for make in (forged_raw(bench), one_token(bench)):
        _, rollouts, accusation = watched(bench, make, 1)
        assert accusation is not None and accusation.bet == "intake" and rollouts == 1
