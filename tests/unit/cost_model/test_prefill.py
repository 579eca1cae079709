"""What workers prefill beside what they sample is in a prior rate once, and in a measured one not again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.cost_model.experience import Experience, KindRecord
from echo2.cost_model.planner import plan
from echo2.cost_model.prefill import NO_PREFILL, PrefillWork, kept_cache_share, prefill_cost
from echo2.cost_model.question import PlanQuestion
from tests.unit.cost_model.test_question import CATALOGUE, question

BOTH = PrefillWork(recomputes=True, audit_share=0.28)


def asked(work: PrefillWork) -> PlanQuestion:
    """22 or more workers of two RTX3090, a card with much bandwidth for its arithmetic."""
    found = question()
    return replace(found, offers=(replace(found.offers[0], gpu="RTX3090", gpus=2, count=60),), prefill=work)


def test_a_version_costs_the_caches_of_all_sequences_and_audits_their_share_of_the_rate() -> None:
    told = asked(BOTH)
    prior, cost = told.prior(told.offers[0]), told.prefill_cost(told.offers[0])
    assert cost.recompute_tokens == pytest.approx(44 * told.tokens_in_cache)
    assert cost.recompute_s == pytest.approx(cost.recompute_tokens / prior.prefill_tokens_per_s)
    assert 25.0 < cost.recompute_s < 40.0
    # Of a second, `d` tokens are sampled at the prior's rate and 0.28 d read at the rate of prefill.
    sampled = cost.rate_share * prior.tokens_per_s
    assert sampled / prior.tokens_per_s + 0.28 * sampled / prior.prefill_tokens_per_s == pytest.approx(1.0)
    worker, plain = told.worker(told.offers[0], 0), asked(NO_PREFILL).worker(told.offers[0], 0)
    assert worker.swap_s == cost.recompute_s and plain.swap_s == 0.0
    assert worker.tokens_per_s == pytest.approx(sampled) and plain.tokens_per_s == prior.tokens_per_s
    assert worker.rollouts_per_s * worker.rollout_s_mean == pytest.approx(plain.rollouts_per_s * plain.rollout_s_mean)


def test_the_pool_of_compute_poor_cards_grows_by_what_they_prefill() -> None:
    """At a version a step, by 10 to 30 %; with caches kept and no audit, by nothing."""
    found = {}
    for work in (NO_PREFILL, BOTH, PrefillWork(recomputes=True), PrefillWork(audit_share=0.28)):
        told = asked(work).what_if("kappa", "1")
        answer = plan(told.snapshot(), told.wishes)
        assert answer.is_feasible
        found[work] = len(answer.pool)
    more = found[BOTH] / found[NO_PREFILL] - 1
    assert 0.1 < more < 0.35, found
    assert found[NO_PREFILL] < found[PrefillWork(audit_share=0.28)] < found[BOTH] > found[PrefillWork(recomputes=True)]


def test_a_measured_rate_has_its_prefill_in_it() -> None:
    told = asked(BOTH)
    named = replace(told, offers=(replace(told.offers[0], tokens_per_s=1000.0),))
    worker = named.worker(named.offers[0], 0)
    assert (worker.tokens_per_s, worker.swap_s) == (1000.0, 0.0)
    record = KindRecord("r", "RTX3090", "", False, 1.0, ratios=(0.9, 0.9, 0.9))
    seen = replace(told, experience=Experience((record,)))
    worker = seen.worker(seen.offers[0], 0)
    assert worker.swap_s == 0.0 and worker.tokens_per_s == seen.prior(seen.offers[0]).tokens_per_s
    other = replace(told.offers[0], gpu="RTX4090")
    assert seen.worker(other, 0).swap_s > 0, "of that kind none was seen"


def test_a_cache_that_holds_less_than_all_sequences_is_read_once() -> None:
    told = asked(BOTH)
    prior = told.prior(told.offers[0])
    full = prefill_cost(BOTH, prior, 1e9)
    assert full.recompute_tokens == prior.fit.engine_count * prior.fit.cache_tokens


def test_longer_rollouts_and_shorter_periods_meet_more_versions() -> None:
    shares = [kept_cache_share(2800, 7000, 8192, 0.03, period_s) for period_s in (1.0, 100.0, 200.0, 1e9)]
    assert shares == sorted(shares, reverse=True) and shares[0] == 1.0 and shares[-1] < 1e-4
    # Where none outlasts the period, a rollout of n tokens meets a version with chance n * 0.03 / period.
    assert kept_cache_share(2800, 7000, 8192, 0.03, 400.0) > 2800 * 0.03 / 400.0


def test_the_catalogues_kinds_prefill_between_two_and_sixteen_times_as_fast_as_they_sample() -> None:
    """With Qwen3-8B, so that no constant stands for all of them."""
    told = question()
    for gpu in CATALOGUE.values():
        if gpu.name != "cpu":
            prior = told.prior(replace(told.offers[0], gpu=gpu.name))
            assert 2.0 < prior.prefill_tokens_per_s / prior.tokens_per_s < 16.0
