"""Which artifacts lead to the newest version: finish, skip or drop what is in flight, by the bytes still missing.

Guarantees: of all chains of deltas from the live version, or from a keyframe, the path returned costs the fewest
missing bytes. Leaves to others: fetching (session), handing out (runtime/reader).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from echo2.base.ids import Version
from echo2.broadcast.manifest import ArtifactId, ArtifactKey


@dataclass(frozen=True, slots=True)
class Offer:
    """An artifact that can be fetched, and the bytes of it that are still missing here."""

    key: ArtifactKey
    artifact: ArtifactId
    missing_bytes: float


def best_path(offers: Sequence[Offer], start: Version | None) -> list[ArtifactKey]:
    """The cheapest chain from `start` (or from a keyframe) to the newest version that can be reached."""
    by_parent: dict[Version | None, list[Offer]] = {}
    for offer in offers:
        if start is None or offer.artifact.version > start:
            by_parent.setdefault(offer.artifact.parent, []).append(offer)
    costs: dict[Version, tuple[float, int]] = {}
    arrived_by: dict[Version, Offer] = {}
    heap: list[tuple[float, int, int, Version]] = []
    tie = 0

    def offer_all(parent: Version | None, cost: float, hops: int) -> None:
        nonlocal tie
        for offer in by_parent.get(parent, ()):
            total = (cost + offer.missing_bytes, hops + 1)
            version = offer.artifact.version
            if version not in costs or total < costs[version]:
                costs[version], arrived_by[version] = total, offer
                tie += 1
                heapq.heappush(heap, (*total, tie, version))

    if start is not None:
        offer_all(start, 0.0, 0)
    offer_all(None, 0.0, 0)
    while heap:
        cost, hops, _, version = heapq.heappop(heap)
        if (cost, hops) == costs[version]:
            offer_all(version, cost, hops)
    if not costs:
        return []
    path: list[ArtifactKey] = []
    at: Version | None = max(costs)
    while at is not None and at != start:
        offer = arrived_by[at]
        path.append(offer.key)
        at = offer.artifact.parent
    return path[::-1]
