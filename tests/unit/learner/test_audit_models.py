"""The audit on real models: who samples from what it claims is left alone, who does not is found out.

How soon, and from which size on, is measured by `benchmarks/bench_audit.py`, whose workers these are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.audit_workers import (
    NEWEST,
    OLDEST,
    PREVIOUS,
    TOKENS,
    Bench,
    Maker,
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
    assert watched(bench, honest(bench, siblings=1), 3)[2] is None
    assert watched(bench, honest_over_a_swap(bench), 6)[2] is None
    own_numbers = best_of(bench, by_reward, tries=1)
    assert watched(bench, own_numbers, 4, habits=Habits(False, kind="vllm none"))[2] is None


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


@dataclass(frozen=True, slots=True)
class Lie:
    """What a worker does, the bets that find it among so many rollouts, and whether for certain. `is_known`: whether noise was
    measured of others of its kind."""

    make: Callable[[Bench], Maker]
    bets: tuple[str, ...]
    rollouts_max: int
    is_certain: bool | None = None
    is_known: bool = False


TOKENS_CHOSEN, ANY = ("draw", "choice"), ("numbers", "fabrication", "draw", "choice", "sums")
LIES = {
    "the version before": Lie(lambda bench: one_behind(bench, torch.bfloat16), ANY, 80, is_known=True),
    "made up numbers": Lie(fabricated, ("fabrication",), 64, is_certain=True),
    "cut short": Lie(cut_short, TOKENS_CHOSEN, 100),
    "copies": Lie(copied, TOKENS_CHOSEN, 100),
    "memorised": Lie(memorised, TOKENS_CHOSEN, 100),
    "behind a version": Lie(dishonest_tail, TOKENS_CHOSEN, 100),
    "greedy": Lie(lambda bench: altered(bench, None, coldness=8.0), TOKENS_CHOSEN, 100),
    "best of four": Lie(lambda bench: best_of(bench, by_reward), TOKENS_CHOSEN, 100),
    "4 bits": Lie(lambda bench: altered(bench, quantised(4)), ANY, 160, is_certain=False, is_known=True),
    "perturbed by a tenth": Lie(lambda bench: altered(bench, perturbed(0.1)), ANY, 160, is_certain=False, is_known=True),
    "an older version's tokens, numbers recomputed": Lie(lambda bench: others_tokens(bench, PREVIOUS), ("draw",), 160),
    "best of four within the largest noise": Lie(lambda bench: near_misses(bench, 0.6, tries=4), ANY, 60),
    "the same, of a known kind": Lie(lambda bench: near_misses(bench, 0.6, tries=4), ANY, 60, is_known=True),
    "one of a token's two numbers forged": Lie(forged_raw, ("intake",), 1),
    "one token": Lie(one_token, ("intake",), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_worker_that_does_not_sample_from_what_it_claims_is_found_out(bench: Bench, name: str) -> None:
    lie = LIES[name]
    _, rollouts, accusation = watched(bench, lie.make(bench), 20, noise=known() if lie.is_known else None)
    assert accusation is not None and accusation.bet in lie.bets and rollouts <= lie.rollouts_max
    assert lie.is_certain in (None, accusation.is_certain)


@pytest.mark.soak
def test_it_is_found_out_in_float32_and_two_versions_behind_too(bench: Bench) -> None:
    for make in (one_behind(bench), others_tokens(bench, OLDEST)):
        _, rollouts, accusation = watched(bench, make, 20, noise=known())
        assert accusation is not None and rollouts <= 160
