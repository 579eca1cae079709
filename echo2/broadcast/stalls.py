"""Detects stalled artifacts, so that the node takes another way to the newest version if there is one.

A peer may announce chunks that it can no longer send: a publisher whose disk corrupted one, a liar, a peer that dropped
it. Requests then circulate without end. This module looks only at progress: whether any new chunk of a wanted
artifact arrived.

Guarantees: an artifact counts as stalled when no chunk of any wanted artifact came for STALL_S (LATE_STALL_S if the plan
serves the node last) while a peer was connected; it stops counting once a chunk of it comes, or after FORGOTTEN_S. Pure:
`look` takes the time. Leaves to others: choosing the other way (catch_up).
"""

from __future__ import annotations

from collections.abc import Mapping

from echo2.broadcast.manifest import ArtifactKey

STALL_S = 20.0
"""Twice the longest time that one request is given (pulling.note_requests)."""
FORGOTTEN_S = 5 * STALL_S
"""A stalled artifact is tried again after this time: a peer may have it by then."""
LATE_STALL_S = 4 * STALL_S
"""STALL_S for a node that the plan serves last: its turn may come late, but it must come."""


class Stalls:
    """The stalled artifacts of one node, in `keys`."""

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
        """Updates `keys`; returns whether it changed. Call it about once a second. `wanted`: incomplete artifacts being
        fetched, with the number of chunks held; `known`: chunks held of each stalled artifact that peers still announce."""
        before, stalled = self.keys, self._since
        self._since = {
            key: since for key, since in self._since.items()
            if key in known and known[key] <= self._held[key] and now - since < FORGOTTEN_S
        }  # fmt: skip
        waiting = {key: held for key, held in wanted.items() if key not in self._since}
        is_tried_again = len(self._since) < len(stalled)  # it gets the full STALL_S again
        if is_tried_again or not (is_connected and waiting and waiting.items() <= self._held.items()):
            self._quiet_since = now
        elif now - self._quiet_since >= (LATE_STALL_S if is_late else STALL_S):
            self._since.update(dict.fromkeys(waiting, now))
        self._held = {**{key: self._held[key] for key in self._since.keys() - waiting.keys()}, **waiting}
        self.keys = frozenset(self._since)
        return self.keys != before
