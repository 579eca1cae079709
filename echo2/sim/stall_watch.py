"""What has stopped coming to a simulated node, as broadcast/runtime/following.py watches it, and for how long it counts so.

Guarantees: the real core (broadcast/stalls) decides; every change is counted by how it came about. Leaves to others: the
other way, asking (broadcast_driver), for how long something may count as stalled (checkers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.stalls import Stalls

STOPPED = "artifact stops coming"
AGAIN_CAME = "stalled artifact: a chunk of it comes after all"
AGAIN_TRIED = "stalled artifact: tried again after a while"
AGAIN_GONE = "stalled artifact: dropped or published anew"


class StallWatch:
    """One process's. `keys`: what counts as stalled now; `since`: from when on, and how many chunks were held then.

    `is_for_good`: as a sabotage."""

    def __init__(self, counts: Counter[str]) -> None:
        self.keys: frozenset[ArtifactKey] = frozenset()
        self.since: dict[ArtifactKey, tuple[float, int]] = {}
        self.is_for_good = False
        self._stalls = Stalls()
        self._counts = counts

    def look(
        self,
        wanted: Mapping[ArtifactKey, int],
        held: Mapping[ArtifactKey, int],
        is_connected: bool,
        now: float,
        is_late: bool,
    ) -> list[ArtifactKey] | None:
        """None while nothing changed; else what of `wanted` has stopped coming. `held`: chunks of all that is known."""
        known = {key: held[key] for key in self.keys if key in held}
        if not self._stalls.look(wanted, known, is_connected, now, is_late):
            return None
        before, keys = self.keys, self._stalls.keys
        self.keys = before | keys if self.is_for_good else keys
        for key in before - self.keys:
            _, count = self.since.pop(key)
            self._counts[self._why(key, count, held)] += 1
        for key in self.keys - before:
            self.since[key] = (now, held[key])
            self._counts[STOPPED] += 1
        return [key for key in wanted if key in self.keys]

    def _why(self, key: ArtifactKey, count: int, held: Mapping[ArtifactKey, int]) -> str:
        if key not in held:
            return AGAIN_GONE
        return AGAIN_CAME if held[key] > count else AGAIN_TRIED

    def longest_s(self, there: Collection[ArtifactKey], now: float) -> float:
        """For how long anything that is `there` has counted as stalled."""
        return max((now - since for key, (since, _) in self.since.items() if key in there), default=0.0)
