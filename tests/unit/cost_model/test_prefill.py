"""What workers prefill beside what they sample is in a prior rate once, and in a measured one not again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.cost_model.machines import prefill_cost
from echo2.cost_model.planner import plan
from echo2.cost_model.question import PlanQuestion
from tests.unit.cost_model.test_question import CATALOGUE, question


def asked(*, recomputes: bool) -> PlanQuestion:
    """22 or more workers of two RTX3090, a card with much bandwidth for its arithmetic."""
    found = question()
    return replace(
        found, offers=(replace(found.offers[0], gpu="RTX3090", gpus=2, count=60),), recomputes_caches=recomputes
    )


def test_a_version_costs_the_caches_of_all_sequences() -> None:
    told = asked(recomputes=True)
    prior, cost = told.prior(told.offers[0]), told.prefill_cost(told.offers[0])
    assert cost.recompute_tokens == pytest.approx(44 * told.tokens_in_cache)
    assert cost.recompute_s == pytest.approx(cost.recompute_tokens / prior.prefill_tokens_per_s)
    assert 25.0 < cost.recompute_s < 40.0
    worker, plain = told.worker(told.offers[0], 0), asked(recomputes=False).worker(told.offers[0], 0)
    assert worker.swap_s == cost.recompute_s and plain.swap_s == 0.0
    assert worker.tokens_per_s == plain.tokens_per_s == prior.tokens_per_s


def test_the_pool_of_compute_poor_cards_grows_by_what_they_prefill() -> None:
    pools = {}
    for recomputes in (False, True):
        told = asked(recomputes=recomputes).what_if("kappa", "1")
        answer = plan(told.snapshot(), told.wishes)
        assert answer.is_feasible
        pools[recomputes] = len(answer.pool)
    assert 1.05 < pools[True] / pools[False] < 1.35, pools


def test_a_measured_rate_has_its_prefill_in_it() -> None:
    told = asked(recomputes=True)
    named = replace(told, offers=(replace(told.offers[0], tokens_per_s=1000.0),))
    worker = named.worker(named.offers[0], 0)
    assert (worker.tokens_per_s, worker.swap_s) == (1000.0, 0.0)
    assert told.worker(told.offers[0], 0).swap_s > 0, "a predicted one has not"


def test_a_cache_that_holds_less_than_all_sequences_is_read_once() -> None:
    told = asked(recomputes=True)
    prior = told.prior(told.offers[0])
    full = prefill_cost(prior, 1e9, recomputes=True)
    assert full.recompute_tokens == prior.fit.engine_count * prior.fit.cache_tokens


def test_the_catalogues_kinds_prefill_between_two_and_sixteen_times_as_fast_as_they_sample() -> None:
    """With Qwen3-8B, so that no constant stands for all of them."""
    told = question()
    for gpu in CATALOGUE.values():
        if gpu.name != "cpu":
            prior = told.prior(replace(told.offers[0], gpu=gpu.name))
            assert 2.0 < prior.prefill_tokens_per_s / prior.tokens_per_s < 16.0
