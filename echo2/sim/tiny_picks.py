"""Which tokens the engines of the virtual world pick.

Guarantees: an honest engine's are those that the random numbers of their leases pick (base/noise), with the numbers of the
weights that it holds. Leaves to others: the distribution (tiny_policy), lies (lies).
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
    """`draws_by_seed`: what the engine says of itself."""

    @property
    def draws_by_seed(self) -> bool: ...

    def pick(self, bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        """The token at `position` of a completion and its log-probability, of weights with the fingerprint `bits`."""
        ...


Says = Callable[[Mapping[Version, int], ScoreRequest, Stretch], TokenScores]
"""What an engine says of a stretch of another's tokens. The first argument: fingerprints of the versions that it keeps."""


def honest_scores(past: Mapping[Version, int], request: ScoreRequest, stretch: Stretch) -> TokenScores:
    return scores_of(past[stretch.version], request, stretch)


class SeededPicks:
    """An honest engine's."""

    draws_by_seed = True

    def pick(self, bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        return seeded(bits, group_of(request), request.sampling.seed, position)


def seeded(bits: int, group_id: GroupId, seed: int, position: int) -> tuple[int, float]:
    """What the numbers of this seed pick."""
    logprobs = logprobs_of(bits, group_id, position)
    token = picked(logprobs, uniform(seed, position))
    return token, float(logprobs[token])


def group_of(request: GenerateRequest) -> GroupId:
    """The prefix key is the group's name."""
    return GroupId(request.prefix_key)
