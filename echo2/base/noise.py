"""The random numbers that tokens are sampled with: one per position of a rollout, a function of the seed alone.

Guarantees: a number does not depend on batch, slot, engine, worker or earlier draws, so a continuation on another worker
uses the same stream, and anyone who knows the seed can recompute it. Leaves to others: the token that a number
picks (worker/runtime/engines/sampling), checking a worker's tokens against it (learner/suspicion).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echo2.base.rng import derived_seed

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def rollout_seed(group_seed: int, index: int) -> int:
    """The seed of rollout `index` of a group whose sampling has this seed."""
    return derived_seed(group_seed, "rollout", index)


def turn_seed(group_seed: int, index: int, turn: int) -> int:
    """The seed of the group that leases a later turn of rollout `index`."""
    return derived_seed(group_seed, "turn", index, turn)


def uniform(stream_seed: int, position: int) -> float:
    """The number in [0, 1) of one position of one stream: splitmix64 of a counter."""
    x = (stream_seed + (position + 1) * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


def uniforms(stream_seed: int, count: int) -> npt.NDArray[np.float64]:
    """The numbers of positions 0..count-1."""
    positions = np.arange(1, count + 1, dtype=np.uint64)
    x = np.uint64(stream_seed & _MASK) + positions * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
