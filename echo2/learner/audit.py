"""Exact behaviour log-probabilities from kept snapshots, and what they say about the worker that claimed others.

Guarantees: every token is scored under the very version that its span names, each version's weights being needed once;
the verdict is a pure function of claimed and exact numbers. Leaves to others: keeping the snapshots and running the
forward pass (`ScoreUnderVersion`), quarantine.

Two questions are asked. Are the log-probabilities those of the claimed version (an old or altered model fails)? And are
the tokens a likely draw from it (greedy, cold or forged tokens with honest log-probabilities fail)? A sequence that
kept its KV cache across a swap matches no version exactly after it: under `keep_kv` audit first spans only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2.base.errors import ConfigError
from echo2.base.ids import Version
from echo2.base.rollout import Rollout


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens `start` to `stop - 1` of rollout number `rollout` in a list of them."""

    rollout: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of consecutive tokens, under one version: log-probability, and mean and variance of the log-probability of a
    token drawn there (minus the entropy, and the varentropy).
    """

    logprobs: tuple[float, ...]
    expected: tuple[float, ...]
    variance: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.logprobs) == len(self.expected) == len(self.variance), "three numbers a token"


class ScoreUnderVersion(Protocol):
    """The forward pass under a kept snapshot: scores of `token_ids[start:stop]` after the prompt and what precedes.

    Under the sampling temperature, without filters; learner/runtime/snapshots has the real one.
    """

    def __call__(self, version: Version, rollout: Rollout, start: int, stop: int) -> TokenScores: ...


@dataclass(frozen=True, slots=True)
class AuditTolerance:
    """How far honest numbers may differ: two engines, or two precisions, never agree to the bit.

    Defaults suit bf16 on both sides; float32 engines agree a hundred times better. `surprise_max`: standard deviations
    by which the sum of log-probabilities may differ from its expectation.
    """

    mean_difference_max: float = 0.05
    outlier_nats: float = 1.0
    outlier_fraction_max: float = 0.02
    surprise_max: float = 6.0

    def __post_init__(self) -> None:
        if min(self.mean_difference_max, self.outlier_nats, self.surprise_max) <= 0 or self.outlier_fraction_max < 0:
            raise ConfigError(f"audit tolerance: expected limits above 0, got {self}")


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """`problem` is empty for an honest rollout. `surprise` is in standard deviations, positive: likelier than drawn."""

    token_count: int
    mean_difference: float
    max_difference: float
    outlier_fraction: float
    surprise: float
    problem: str

    @property
    def is_honest(self) -> bool:
        return not self.problem


def ranges_by_version(
    rollouts: Sequence[Rollout], first_span_only: bool = False
) -> Mapping[Version, tuple[TokenRange, ...]]:
    """Which tokens to score under which version, oldest version first, so that each snapshot is loaded once."""
    ranges: dict[Version, list[TokenRange]] = {}
    for number, rollout in enumerate(rollouts):
        start = 0
        for span in rollout.version_spans[: 1 if first_span_only else None]:
            ranges.setdefault(span.version, []).append(TokenRange(number, start, start + span.count))
            start += span.count
    return {version: tuple(ranges[version]) for version in sorted(ranges)}


def exact_scores(
    rollouts: Sequence[Rollout], score: ScoreUnderVersion, first_span_only: bool = False
) -> tuple[TokenScores, ...]:
    """Scores of each rollout's tokens, each under the version that sampled it."""
    pieces: list[dict[int, TokenScores]] = [{} for _ in rollouts]
    for version, ranges in ranges_by_version(rollouts, first_span_only).items():
        for place in ranges:
            scores = score(version, rollouts[place.rollout], place.start, place.stop)
            assert len(scores.logprobs) == place.stop - place.start, "one score a token asked for"
            pieces[place.rollout][place.start] = scores
    return tuple(_joined([by_start[start] for start in sorted(by_start)]) for by_start in pieces)


def audited(
    claimed: Sequence[float], exact: TokenScores, tolerance: AuditTolerance, is_filtered: bool = False
) -> AuditFinding:
    """Compares the log-probabilities that a worker claimed with the exact ones of the same tokens.

    `is_filtered`: sampled with top-p or top-k. Such tokens are likelier than draws from the whole distribution, so only
    the first question is asked, of the raw log-probabilities.
    """
    count = len(exact.logprobs)
    differences = [abs(c - e) for c, e in zip(claimed[:count], exact.logprobs, strict=True)]
    mean = sum(differences) / max(1, count)
    outliers = sum(difference > tolerance.outlier_nats for difference in differences) / max(1, count)
    surprise = 0.0 if is_filtered else _surprise(exact)
    return AuditFinding(
        token_count=count,
        mean_difference=mean,
        max_difference=max(differences, default=0.0),
        outlier_fraction=outliers,
        surprise=surprise,
        problem=_problem(mean, outliers, surprise, tolerance),
    )


def _problem(mean: float, outliers: float, surprise: float, tolerance: AuditTolerance) -> str:
    if not mean <= tolerance.mean_difference_max:
        return (
            f"log-probabilities are not those of the version claimed: expected a mean difference of at most "
            f"{tolerance.mean_difference_max} nats, got {mean:.4f}"
        )
    if outliers > tolerance.outlier_fraction_max:
        return (
            f"log-probabilities are not those of the version claimed: expected at most "
            f"{tolerance.outlier_fraction_max:.1%} of tokens off by more than {tolerance.outlier_nats} nats, "
            f"got {outliers:.1%}"
        )
    if not abs(surprise) <= tolerance.surprise_max:
        return (
            f"tokens are no draw from the version claimed: expected a likelihood within {tolerance.surprise_max} "
            f"standard deviations, got {surprise:+.1f}"
        )
    return ""


def _surprise(exact: TokenScores) -> float:
    excess = math.fsum(exact.logprobs) - math.fsum(exact.expected)
    # One hundredth of a nat squared a token: a model that is sure of everything has no variance to divide by.
    return excess / math.sqrt(math.fsum(exact.variance) + 1e-4 * max(1, len(exact.logprobs)))


def _joined(pieces: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(
        tuple(x for piece in pieces for x in piece.logprobs),
        tuple(x for piece in pieces for x in piece.expected),
        tuple(x for piece in pieces for x in piece.variance),
    )
