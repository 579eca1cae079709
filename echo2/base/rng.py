"""Seeded randomness: every random stream has a name, so that adding one does not shift another."""

from __future__ import annotations

import hashlib
import random


def derived_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream identified by `names`: a pure function of `seed` and the names."""
    text = "/".join([str(seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derived_rng(seed: int, *names: str | int) -> random.Random:
    """A generator for the stream identified by `names`."""
    return random.Random(derived_seed(seed, *names))
