"""The tiny model's next-token distribution, a different one for each version, and the scorer that audits use.

Guarantees: a pure function of the bits of the weights, the leased group and the position, so that a version's fingerprint and the
random number of a position determine the token and its log-probability. Two versions differ by about `DRIFT_NATS`. Lengths have a
heavy tail.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from torch import Tensor

from echo2.base.ids import GroupId, Version
from echo2.learner.audit import Passage, Piece
from echo2.learner.episodes import TurnOf
from echo2.scoring.request import FLOOR_NATS, ScoreRequest, Stretch, TokenScores
from echo2.sim.tiny_model import STOP_TOKEN, VOCABULARY, fingerprint_of

MEDIAN_TOKENS, SIGMA = 20.0, 0.9
SPREAD_NATS, DRIFT_NATS = 1.5, 0.1
FIRST_TOKEN = 3
"""Lower token IDs are never drawn, except the stop token."""
_ROWS = 512
_TABLE = np.random.Generator(np.random.PCG64(0)).standard_normal((_ROWS, VOCABULARY - FIRST_TOKEN + 1))
_NORMAL = NormalDist()

Column = npt.NDArray[np.float64]


@functools.lru_cache(maxsize=1 << 14)
def logprobs_of(fingerprint: int, group_id: GroupId, position: int) -> Column:
    """Log-probabilities of all tokens (VOCABULARY values), rounded to float32 as in messages."""
    base = _number(group_id, position)
    drift = _TABLE[_number(f"{fingerprint:x}", group_id, position) % _ROWS] * DRIFT_NATS
    scores = _TABLE[base % _ROWS] * SPREAD_NATS + drift
    others = scores[1:] - math.log(np.exp(scores[1:]).sum())
    ends = min(0.9, _ends_per_token(group_id) * math.exp(drift[0]))
    logprobs = np.full(VOCABULARY, -np.inf)
    logprobs[FIRST_TOKEN:] = others + math.log1p(-ends)
    logprobs[STOP_TOKEN] = math.log(ends)
    return logprobs.astype(np.float32).astype(np.float64)


@functools.lru_cache(maxsize=1 << 12)
def _ends_per_token(group_id: GroupId) -> float:
    share = (_number("length", group_id) % 9973 + 0.5) / 9973
    return 1.0 / (1.0 + MEDIAN_TOKENS * math.exp(SIGMA * _NORMAL.inv_cdf(share)))


def _number(*names: object) -> int:
    text = "/".join(map(str, names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def picked(logprobs: Column, number: float) -> int:
    """The first token whose cumulative probability exceeds `number`, which is in [0, 1)."""
    sums = np.exp(logprobs).cumsum()
    return int(np.searchsorted(sums, number * sums[-1], side="right"))


class TinyScorer:
    """A `Scorer` of the tiny model."""

    is_of_trainer = False

    def __init__(self, versions_max: int) -> None:
        self._versions_max = versions_max
        self._fingerprints: dict[Version, int] = {}

    @property
    def versions(self) -> list[Version]:
        return list(self._fingerprints)

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        if self._fingerprints and version <= max(self._fingerprints):
            return
        self._fingerprints[version] = fingerprint_of(dict(tensors))
        while len(self._fingerprints) > self._versions_max:
            del self._fingerprints[next(iter(self._fingerprints))]

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def together(self, version: Version, asked: Sequence[tuple[Passage, Piece]]) -> list[TokenScores]:
        return [self(version, passage, piece, None)[0] for passage, piece in asked]

    def __call__(
        self, version: Version, passage: Passage, piece: Piece, cache: object | None
    ) -> tuple[TokenScores, object]:
        rows = []
        for place, (group_id, position) in enumerate(_places_of(passage)):
            if piece.start <= place < piece.stop:
                logprobs = logprobs_of(self._fingerprints[version], group_id, position)
                rows.append(_scores(logprobs, passage.rollout.token_ids[place]))
        return TokenScores(*np.array(rows).T), None


def _places_of(passage: Passage) -> Iterator[tuple[GroupId, int]]:
    """Yields, for each sampled token, the group ID under which its turn was leased and its position in that turn."""
    turn = position = 0
    before = int(passage.places[0])
    for place in map(int, passage.places):
        if place > before + 1:
            turn, position = turn + 1, 0
        yield TurnOf(passage.rollout.group_id, passage.rollout.index, turn).group_id, position
        before, position = place, position + 1


def scores_of(fingerprint: int, request: ScoreRequest, stretch: Stretch) -> TokenScores:
    """Scores a stretch under the version with this fingerprint."""
    rows = [
        _scores(
            logprobs_of(fingerprint, stretch.prefix_key, stretch.position + number),
            request.token_ids[stretch.first + number],
        )
        for number in range(stretch.count)
    ]
    return TokenScores(*np.array(rows).T)


def _scores(logprobs: Column, token: int) -> tuple[float, ...]:
    """One row of `TokenScores`."""
    chances = np.exp(logprobs)
    drawn = max(2 * FLOOR_NATS, float(logprobs[token]))
    expected = float(chances @ np.maximum(logprobs, FLOOR_NATS))
    ends, below = float(chances[STOP_TOKEN]), float(chances[:token].sum())
    return drawn, drawn, expected, ends, float(token == STOP_TOKEN), below, float(chances @ chances)
