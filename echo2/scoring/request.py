"""Scoring requests and their answers, shared by all planes.

Guarantees: a `ScoreRequest` is self-consistent (its stretches lie within its tokens, after the first). Leaves to others:
who scores what (learner/scorings), the forward pass (engines, learner/runtime/snapshots), what the numbers mean
(learner/suspicion).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from echo2.base.errors import MalformedMessage
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import SamplingParams

FLOOR_NATS = -12.0
"""Floor for log-probabilities when a token's likelihood is judged, so that a single token has bounded weight."""

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of consecutive tokens under one version. `logprobs`: the log-probabilities that training uses (nats). Under the
    sampling distribution: `drawn`, the token's log-probability; `expected`, the mean of max(log-probability, FLOOR_NATS);
    `stop_chances`, the probability that the sequence ends there; `stopped`, whether it did (0 or 1); `below`, the
    probability of all tokens with lower ids; `collisions`, the probability of drawing the same token twice."""

    logprobs: Column
    drawn: Column
    expected: Column
    stop_chances: Column
    stopped: Column
    below: Column
    collisions: Column

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(getattr(self, column.name) for column in fields(self))


@dataclass(frozen=True, slots=True)
class Stretch:
    """`count` sampled tokens from index `first` on, to be scored under `version` with a freshly computed KV cache.
    `prefix_key`, `position`: the group that they were leased as, and the first token's index in that completion."""

    version: Version
    first: int
    count: int
    prefix_key: GroupId
    position: int

    @property
    def stop(self) -> int:
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """`token_ids`: tokens of prompt, environment and policy, up to the last one to score. `sampling`: how they were drawn,
    without the seed."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stretches: tuple[Stretch, ...]

    def __post_init__(self) -> None:
        for stretch in self.stretches:
            if stretch.count < 1 or stretch.first < 1 or stretch.stop > len(self.token_ids):
                raise MalformedMessage(
                    f"scoring {self.request_id}: expected tokens 1 to {len(self.token_ids) - 1}, got {stretch.count} from "
                    f"{stretch.first} on"
                )

    @property
    def versions(self) -> frozenset[Version]:
        return frozenset(stretch.version for stretch in self.stretches)

    @property
    def read_tokens(self) -> int:
        """Tokens that the forward passes read: the cost of the request."""
        return sum(stretch.stop for stretch in self.stretches)
