"""How engines of the virtual world sample tokens.

Guarantees: an honest engine samples the tokens that its leases' random numbers select (base/noise), with log-probabilities from
the weights it holds. Leaves to others: the distribution (tiny_policy), dishonest engines (lies).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from echo2.base.ids import GroupId, Version
from echo2.base.noise import uniform
from echo2.scoring.request import ScoreRequest, Stretch, TokenScores
from echo2.sim.tiny_policy import logprobs_of, picked, scores_of
from echo2.worker.engine import GenerateRequest


class Picks(Protocol):
    """Samples tokens for an engine. `draws_by_seed`: whether the engine claims to sample by the leases' seeds."""

    @property
    def draws_by_seed(self) -> bool: ...

    def pick(self, bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        """The token at `position` of a completion and its log-probability, under weights with the fingerprint `bits`."""
        ...


Says = Callable[[Mapping[Version, int], ScoreRequest, Stretch], TokenScores]
"""Scores a stretch of another worker's tokens. The first argument: fingerprints of the versions that the engine keeps."""


def honest_scores(past: Mapping[Version, int], request: ScoreRequest, stretch: Stretch) -> TokenScores:
    return scores_of(past[stretch.version], request, stretch)


class SeededPicks:
    """The picks of an honest engine."""

    draws_by_seed = True

    def pick(self, bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        return seeded(bits, group_of(request), request.sampling.seed, position)


def seeded(bits: int, group_id: GroupId, seed: int, position: int) -> tuple[int, float]:
    """The token that this seed's random number selects, and its log-probability."""
    logprobs = logprobs_of(bits, group_id, position)
    token = picked(logprobs, uniform(seed, position))
    return token, float(logprobs[token])


def group_of(request: GenerateRequest) -> GroupId:
    """The request's group: its prefix key is the group ID."""
    return GroupId(request.prefix_key)
