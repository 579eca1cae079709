"""Seeded randomness: every stream of random numbers is named, so that adding one does not shift another."""

from __future__ import annotations

import hashlib
import random


def derived_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream that `names` name, a pure function of `seed` and the names."""
    text = "/".join([str(seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derived_rng(seed: int, *names: str | int) -> random.Random:
    """A generator for the stream that `names` name."""
    return random.Random(derived_seed(seed, *names))
