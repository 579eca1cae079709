"""Checks that the parts of weights held by several processes make a whole, and combines their fingerprints.

Guarantees: a tensor with elements that no rank holds is refused by name; a part that several ranks hold counts once, and must have
the same sum on each of them. Leaves to others: the parts themselves (weight_map.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo2.base.errors import EngineError
from echo2.weights.fingerprint import MODULUS

Covers = Sequence[tuple[str, int, str]]
"""For each tensor: its name, how many of its elements a rank holds, and a text that is equal on ranks that hold the same ones."""
Sums = Sequence[tuple[int, int]]
"""For each tensor: its header's term of the fingerprint, and the sum over the elements that a rank holds."""


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Which ranks hold the same part of a tensor: for each tensor, its name and groups of rank numbers."""

    holders: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]

    def fingerprint(self, sums: Sequence[Sums]) -> int | None:
        """The fingerprint from the sums of every rank; None if ranks differ in a part that they share."""
        total = 0
        for at, (_, groups) in enumerate(self.holders):
            total += sums[0][at][0]
            for group in groups:
                if len({tuple(sums[rank][at]) for rank in group}) > 1:
                    return None
                total += sums[group[0]][at][1]
        return total % MODULUS


def joined(shapes: Mapping[str, tuple[int, ...]], covers: Sequence[Covers]) -> RankGroups:
    """Groups the ranks by the parts that they hold; EngineError, naming the tensor, unless together they hold all of it."""
    holders = []
    for at, (name, shape) in enumerate(shapes.items()):
        groups: dict[str, list[int]] = {}
        counts: dict[str, int] = {}
        for rank, cover in enumerate(covers):
            _, count, part = cover[at]
            groups.setdefault(part, []).append(rank)
            counts[part] = count
        expected, found = math.prod(shape), sum(counts.values())
        if found != expected:
            raise EngineError(f"tensor {name}: the model's loader places {found} of its {expected} elements")
        holders.append((name, tuple(tuple(ranks) for ranks in groups.values())))
    return RankGroups(tuple(holders))
