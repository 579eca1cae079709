"""A model small enough to simulate: real weights under the real codec, a made-up training and a made-up sampling.

Guarantees: weights after a step are a function of the weights before it and of the very batch; a token's
log-probability is a function of the bits of the weights that sampled it, so whoever knows a version's fingerprint can
tell whether a token was sampled by it. Lengths have a heavy tail. Leaves to others: what real models do.
"""

from __future__ import annotations

import hashlib
import random

import torch
from torch import Tensor

from echo2.base.ids import GroupId, Version
from echo2.base.rng import derived_rng, derived_seed
from echo2.learner.batch import Batch
from echo2.sim.lengths import Lengths
from echo2.weights import HostWeights

FINGERPRINT_KEY = 0x5EED
VOCABULARY = 97
STOP_TOKEN = 1
SHAPES = {"embed.weight": (24, 8), "layer.weight": (16, 12), "norm.weight": (12,)}
BLOCK_ELEMENTS = 32


def base_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(derived_seed(seed, "base"))
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def fingerprint_of(weights: dict[str, Tensor]) -> int:
    return HostWeights.from_tensors(weights, Version(0), FINGERPRINT_KEY, copy=False).fingerprint()


def trained(weights: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """The weights one step later: a few elements of each tensor move, which ones the batch decides."""
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


class Sampler:
    """Which token comes next, and with which log-probability. `seed` is the run's."""

    def __init__(self, seed: int, lengths: Lengths) -> None:
        self._seed = seed
        self._lengths = lengths
        self._length_of: dict[tuple[GroupId, int], int] = {}

    def length(self, group_id: GroupId, index: int) -> int:
        """How long this completion will be."""
        known = self._length_of.get((group_id, index))
        if known is None:
            known = int(self._lengths.draw(derived_rng(self._seed, "length", group_id, index)))
            self._length_of[(group_id, index)] = known
        return known

    def token(self, fingerprint: int, group_id: GroupId, index: int, position: int) -> tuple[int, float]:
        """The token at `position` of a completion, and its log-probability under the weights of that fingerprint."""
        drawn = _digest(fingerprint, group_id, index, position)
        is_last = position + 1 >= self.length(group_id, index)
        token = STOP_TOKEN if is_last else 3 + drawn % (VOCABULARY - 3)
        return token, logprob_of(fingerprint, group_id, index, position)


def _digest(fingerprint: int, group_id: GroupId, index: int, position: int) -> int:
    text = f"{fingerprint:x}/{group_id}/{index}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def logprob_of(fingerprint: int, group_id: GroupId, index: int, position: int) -> float:
    """Exact in float32: a multiple of 1/1024."""
    return -(1 + (_digest(fingerprint, group_id, index, position) >> 20) % 8191) / 1024.0


def reward_of(token_ids: tuple[int, ...]) -> float:
    return (sum(token_ids) % 7) / 6.0
