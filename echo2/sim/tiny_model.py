"""A model small enough to simulate: real weights under the real codec, and a made-up training step.

Guarantees: the weights after a step are a function of the weights before it and of the batch alone. Leaves to others: the
model's distribution over tokens (tiny_policy).
"""

from __future__ import annotations

import hashlib
import random

import torch
from torch import Tensor

from echo2.base.ids import Version
from echo2.base.rng import derived_seed
from echo2.learner.rollouts.groups import Batch
from echo2.weights import HostWeights

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
