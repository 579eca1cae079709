"""Seeded randomness: every random stream has a name, so that adding one does not shift another."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import numpy.typing as npt


def derived_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream identified by `names`: a pure function of `seed` and the names."""
    text = "/".join([str(seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derived_rng(seed: int, *names: str | int) -> random.Random:
    return random.Random(derived_seed(seed, *names))


_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64 (Steele, Lea, Flood 2014): 2^64 divided by the golden ratio, odd
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's multipliers (Stafford's mix 13)
_MASK = (1 << 64) - 1  # arithmetic is modulo 2^64


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
