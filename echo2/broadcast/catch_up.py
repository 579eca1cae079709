"""Which artifacts lead to the newest version, and in which order they are handed to whoever decodes them.

Guarantees: the path costs the fewest bytes still missing; artifacts are handed out one after the other, each chunk
once and in order, so decoding overlaps receiving. An artifact that falls off the path half-way is said to be dropped.
Leaves to others: fetching (session), bytes (runtime).
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


@dataclass(slots=True)
class Delivery:
    """How far the artifacts have been handed out. `version`: the newest that was handed out whole."""

    version: Version | None = None
    current: ArtifactKey | None = None
    next_index: int = 0
    has_begun: bool = False

    def begin(self, key: ArtifactKey) -> None:
        self.current, self.next_index, self.has_begun = key, 0, True

    def finish(self, version: Version) -> None:
        self.version, self.current, self.next_index, self.has_begun = version, None, 0, False

    def abandon(self) -> None:
        self.current, self.next_index, self.has_begun = None, 0, False
