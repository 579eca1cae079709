"""Which artifacts have stopped coming, so that another way to the newest version is taken where there is one.

Somebody may have told that they hold what they can no longer give: the publisher whose disk changed a chunk, a liar, a
peer that dropped it. Requests then go round without end. What is looked at is only what counts: whether anything new of
what is wanted came.

Guarantees: an artifact counts as stalled when nothing of any wanted artifact came for STALL_S (LATE_STALL_S where the plan
serves the node last) while a peer was connected, and no longer once a chunk of it comes, or after FORGOTTEN_S. Pure: `look`
is told the time. Leaves to others: the other way (catch_up).
"""

from __future__ import annotations

from collections.abc import Mapping

from echo2.broadcast.manifest import ArtifactKey

STALL_S = 20.0
"""Twice the longest time that one request is given (pulling.note_requests)."""
FORGOTTEN_S = 5 * STALL_S
"""What stalled is tried again after this time: somebody may have it again."""
LATE_STALL_S = 4 * STALL_S
"""STALL_S of a node that the plan serves last: it may wait long for its turn, and not for ever."""


class Stalls:
    """One node's."""

    def __init__(self) -> None:
        self.keys: frozenset[ArtifactKey] = frozenset()
        self._held: dict[ArtifactKey, int] = {}
        self._since: dict[ArtifactKey, float] = {}
        self._quiet_since = float("-inf")

    def look(
        self,
        wanted: Mapping[ArtifactKey, int],
        known: Mapping[ArtifactKey, int],
        is_connected: bool,
        now: float,
        is_late: bool = False,
    ) -> bool:
        """Whether `keys` changed. `wanted`: what is on the way and not whole, with the chunks held of it; `known`: the
        chunks held of whatever counts as stalled and is still heard of. To be called every second or so."""
        before, stalled = self.keys, self._since
        self._since = {
            key: since for key, since in self._since.items()
            if key in known and known[key] <= self._held[key] and now - since < FORGOTTEN_S
        }  # fmt: skip
        waiting = {key: held for key, held in wanted.items() if key not in self._since}
        is_tried_again = len(self._since) < len(stalled)  # it is given the whole time once more
        if is_tried_again or not (is_connected and waiting and waiting.items() <= self._held.items()):
            self._quiet_since = now
        elif now - self._quiet_since >= (LATE_STALL_S if is_late else STALL_S):
            self._since.update(dict.fromkeys(waiting, now))
        self._held = {**{key: self._held[key] for key in self._since.keys() - waiting.keys()}, **waiting}
        self.keys = frozenset(self._since)
        return self.keys != before
