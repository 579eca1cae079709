"""A model small enough to simulate: real weights under the real codec, a made-up training step and distribution over tokens, how
engines sample from it, and the audits' scorer.

Guarantees: the weights after a step are a function of the weights before it and of the batch alone; a token and its log-probability
of the bits of the weights, the leased group, the position and its random number. Two versions differ by about `DRIFT_NATS`. Lengths
have a heavy tail.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo2.base.ids import GroupId, Version
from echo2.base.rng import derived_seed, uniform
from echo2.learner.audit import FLOOR_NATS, Passage, Piece, TokenScores
from echo2.learner.rollouts.groups import Batch, TurnOf
from echo2.weights import HostWeights
from echo2.worker.engines.engine import GenerateRequest

FINGERPRINT_KEY = 0x5EED  # any; fixed so that traces repeat
VOCABULARY = 97  # small: scores are computed for every token
STOP_TOKEN = 1
# Three tensors of two shapes: blocks with several and with part of one.
SHAPES = {"embed.weight": (24, 8), "layer.weight": (16, 12), "norm.weight": (12,)}
BLOCK_ELEMENTS = 32  # several blocks a version although it is tiny


def base_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(derived_seed(seed, "base"))
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def fingerprint_of(weights: dict[str, Tensor]) -> int:
    return HostWeights.from_tensors(weights, Version(0), FINGERPRINT_KEY, copy=False).fingerprint()


def trained(weights: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """The weights one step later: flips bits in a few elements of each tensor, chosen by a hash of the batch."""
    digest = hashlib.sha256(str(batch.step).encode())
    for group in batch.groups:
        digest.update(group.spec.group_id.encode())
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
            digest.update(repr((rollout.index, rollout.token_ids, rollout.logprobs, reward)).encode())
    rng = random.Random(digest.digest())
    moved = copied(weights)
    for tensor in moved.values():
        bits = tensor.view(torch.int16).view(-1)
        for _ in range(max(1, bits.numel() // 16)):
            bits[rng.randrange(bits.numel())] ^= 1 << rng.randrange(6)
    return moved


def reward_of(token_ids: tuple[int, ...]) -> float:
    return (sum(token_ids) % 7) / 6.0


MEDIAN_TOKENS, SIGMA = 20.0, 0.9  # lengths are log-normal, with a tail of some ten medians
SPREAD_NATS, DRIFT_NATS = 1.5, 0.1  # far above float32's noise, so that audits find a wrong version
FIRST_TOKEN = 3
"""Lower token IDs are never drawn, except the stop token."""
_ROWS = 512  # many contexts, some 200 KB
# Drawn once: the scores of every context.
_TABLE = np.random.Generator(np.random.PCG64(0)).standard_normal((_ROWS, VOCABULARY - FIRST_TOKEN + 1))
_NORMAL = NormalDist()  # of the lengths

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

    def score(
        self, version: Version, asked: Sequence[tuple[Passage, Piece]], cached: int | None = None
    ) -> list[TokenScores]:
        return [self._scores(version, passage, piece) for passage, piece in asked]

    def _scores(self, version: Version, passage: Passage, piece: Piece) -> TokenScores:
        rows = []
        for place, (group_id, position) in enumerate(_places_of(passage)):
            if piece.start <= place < piece.stop:
                logprobs = logprobs_of(self._fingerprints[version], group_id, position)
                rows.append(_scores(logprobs, passage.rollout.token_ids[place], passage.uniforms[place]))
        return TokenScores(*np.array(rows).T)


def _places_of(passage: Passage) -> Iterator[tuple[GroupId, int]]:
    """Yields, for each sampled token, the group ID under which its turn was leased and its position in that turn."""
    turn = position = 0
    before = int(passage.places[0])
    for place in map(int, passage.places):
        if place > before + 1:
            turn, position = turn + 1, 0
        yield TurnOf(passage.rollout.group_id, passage.rollout.index, turn).group_id, position
        before, position = place, position + 1


def _scores(logprobs: Column, token: int, number: float) -> tuple[float, ...]:
    """One row of `TokenScores`."""
    chances = np.exp(logprobs)
    drawn = max(2 * FLOOR_NATS, float(logprobs[token]))
    expected = float(chances @ np.maximum(logprobs, FLOOR_NATS))
    pick, sums, squares = picked(logprobs, number), chances.cumsum() / chances.sum(), np.square(chances).cumsum()
    edges = [(float(sums[at]), float(squares[at])) if at >= 0 else (0.0, 0.0) for at in (pick - 1, pick)]
    spreads = [((1 - edge) ** 2 * below + edge**2 * (squares[-1] - below)) ** 0.5 for edge, below in edges]
    return drawn, drawn, expected, float(pick == token), edges[0][0], edges[1][0], *spreads


Pick = Callable[[int, GenerateRequest, int], tuple[int, float]]
"""The token at a position of a completion and its log-probability, given the fingerprint of the weights."""


def seeded_pick(bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
    """The pick of an honest engine."""
    return seeded(bits, group_of(request), request.sampling.seed, position)


def seeded(bits: int, group_id: GroupId, seed: int, position: int) -> tuple[int, float]:
    """The token that this seed's random number selects, and its log-probability."""
    logprobs = logprobs_of(bits, group_id, position)
    token = picked(logprobs, uniform(seed, position))
    return token, float(logprobs[token])


def group_of(request: GenerateRequest) -> GroupId:
    """The request's group: its prefix key is the group ID."""
    return GroupId(request.prefix_key)
