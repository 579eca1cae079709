"""What is asked of whoever scores, and what it answers, on every plane.

Guarantees: a `ScoreRequest` is consistent with itself (its stretches lie within its tokens, behind the first). Leaves to others:
who scores what (learner/scorings), the forward pass (engines, learner/runtime/snapshots), what the numbers say
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
"""Log-probabilities below this count as this where a token's likelihood is judged, so that the judgement is bounded."""

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of consecutive tokens, under one version. `logprobs`: of the number that is trained on (nats). Of the sampling
    distribution: `drawn`, the token's log-probability; `expected`, the mean of max(log-probability, FLOOR_NATS);
    `stop_chances`, the probability that the sequence ends there, and `stopped`, whether it did (0 or 1); `below`, the
    probability of all tokens with lower ids; `collisions`, that of drawing the same token twice."""

    logprobs: Column
    drawn: Column
    expected: Column
    stop_chances: Column
    stopped: Column
    below: Column
    collisions: Column

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True, slots=True)
class Stretch:
    """`count` sampled tokens from place `first` on, to be scored under `version` behind a cache computed anew under it.
    `prefix_key`, `position`: the group that they were leased as, and the first one's place in that completion."""

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
    """`token_ids`: prompt, world and policy, up to the last token that is asked for. `sampling`: how they were drawn; its seed
    is not told."""

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
        """Tokens that the forward passes read: what it costs."""
        return sum(stretch.stop for stretch in self.stretches)
