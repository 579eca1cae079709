"""The audit: tokens are scored under their own version, honest workers pass, four kinds of cheats do not."""

from __future__ import annotations

import math
import random

import pytest

from echo2.base.errors import ConfigError
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, Rollout, VersionSpan
from echo2.learner.audit import AuditTolerance, TokenScores, audited, exact_scores, ranges_by_version

VOCABULARY = 16
TOKENS = 200


def distribution(version: int, position: int) -> list[float]:
    """A model in miniature: next-token probabilities that depend on version and place."""
    rng = random.Random(f"{version}/{position}")
    weights = [math.exp(1.5 * rng.gauss(0, 1)) for _ in range(VOCABULARY)]
    return [weight / sum(weights) for weight in weights]


def score(version: Version, rollout: Rollout, start: int, stop: int) -> TokenScores:
    places = [distribution(version, position) for position in range(start, stop)]
    logs = [[math.log(p) for p in place] for place in places]
    expected = [sum(p * x for p, x in zip(place, log, strict=True)) for place, log in zip(places, logs, strict=True)]
    variance = [
        sum(p * (x - mean) ** 2 for p, x in zip(place, log, strict=True))
        for place, log, mean in zip(places, logs, expected, strict=True)
    ]
    chosen = [log[token] for log, token in zip(logs, rollout.token_ids[start:stop], strict=True)]
    return TokenScores(tuple(chosen), tuple(expected), tuple(variance))


def sampled(spans: list[tuple[int, int]], claimed: int = 0, coldness: float = 1.0, seed: int = 0) -> Rollout:
    """A worker's rollout: tokens drawn under `spans` plus `claimed` versions, at temperature 1 / `coldness`."""
    rng = random.Random(seed)
    versions = [version for version, count in spans for _ in range(count)]
    token_ids, logprobs = [], []
    for position, version in enumerate(versions):
        probabilities = distribution(version + claimed, position)
        token = rng.choices(range(VOCABULARY), [p**coldness for p in probabilities])[0]
        token_ids.append(token)
        logprobs.append(math.log(probabilities[token]))
    version_spans = tuple(VersionSpan(Version(version), count) for version, count in spans)
    return Rollout(
        GroupId("g"), 0, tuple(token_ids), tuple(logprobs), tuple(logprobs), version_spans, FinishReason.STOP
    )


def finding_of(rollout: Rollout, claimed: list[float] | None = None) -> str:
    exact = exact_scores([rollout], score)[0]
    return audited(claimed or rollout.logprobs, exact, AuditTolerance()).problem


def test_each_token_is_scored_under_the_version_that_sampled_it_and_each_version_is_loaded_once() -> None:
    rollouts = [sampled([(4, 3), (6, 2)]), sampled([(6, 4)]), sampled([(2, 1), (4, 1)])]
    ranges = ranges_by_version(rollouts)
    assert list(ranges) == [2, 4, 6]
    assert [(r.rollout, r.start, r.stop) for r in ranges[Version(4)]] == [(0, 0, 3), (2, 1, 2)]
    for rollout, exact in zip(rollouts, exact_scores(rollouts, score), strict=True):
        assert exact.logprobs == pytest.approx(rollout.logprobs)


@pytest.mark.parametrize("seed", range(20))
def test_honest_workers_pass_even_with_the_noise_of_another_engine(seed: int) -> None:
    rollout = sampled([(4, TOKENS // 2), (6, TOKENS // 2)], seed=seed)
    rng = random.Random(seed)
    assert finding_of(rollout, [x + rng.gauss(0, 0.02) for x in rollout.logprobs]) == ""


def test_a_worker_on_another_version_is_found_out() -> None:
    assert "not those of the version claimed" in finding_of(sampled([(4, TOKENS)], claimed=1))


def test_a_few_altered_log_probabilities_are_found_out() -> None:
    rollout = sampled([(4, TOKENS)])
    altered = [x - 1.5 if i % 40 == 0 else x for i, x in enumerate(rollout.logprobs)]
    assert "off by more than 1.0 nats, got 2.5%" in finding_of(rollout, altered)


def test_cold_sampling_with_honest_log_probabilities_is_found_out() -> None:
    assert "no draw from the version claimed" in finding_of(sampled([(4, TOKENS)], coldness=4.0))


def test_forged_tokens_with_honest_log_probabilities_are_found_out() -> None:
    assert "no draw from the version claimed" in finding_of(sampled([(4, TOKENS)], coldness=0.0))


def test_after_a_swap_that_kept_the_cache_only_the_first_span_is_judged() -> None:
    rollout = sampled([(4, 5), (6, 5)])
    exact = exact_scores([rollout], score, first_span_only=True)[0]
    assert len(exact.logprobs) == 5
    assert audited(rollout.logprobs, exact, AuditTolerance()).is_honest


def test_an_empty_rollout_is_honest_and_senseless_tolerances_are_refused() -> None:
    assert audited([], TokenScores((), (), ()), AuditTolerance()).is_honest
    with pytest.raises(ConfigError, match="above 0"):
        AuditTolerance(surprise_max=0.0)
