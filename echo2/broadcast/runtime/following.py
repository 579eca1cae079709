"""Chooses this node's way to the newest version: feeds what is known of its link and speed into the rule (catch_up).

Guarantees: each change to another kind of way is logged with its reason. Never waits. Leaves to others: the rule,
fetching what was chosen (node).
"""

from __future__ import annotations

import logging
import math

from echo2.base.ids import PeerId, Version
from echo2.broadcast.catch_up import Way, link_of
from echo2.broadcast.link_shape import LinkShape
from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.runtime.library import Library
from echo2.broadcast.runtime.meter import Meter
from echo2.broadcast.stalls import Stalls
from echo2.broadcast.topology import BroadcastPlan
from echo2.weights.policy import WorkerLink

log = logging.getLogger("echo2.broadcast")


class Following:
    """The way of one node. `plan`: the newest broadcast plan, None before the first."""

    def __init__(self, me: PeerId, library: Library, meter: Meter, shape: LinkShape) -> None:
        self.plan: BroadcastPlan | None = None
        self._me = me
        self._library = library
        self._meter = meter
        self._shape = shape
        self._way: Way | None = None
        self._stalls = Stalls()
        self._decode_bytes_per_s = {False: 0.0, True: 0.0}  # bytes of full weights per second, by is_keyframe

    def choose(self, version: Version | None) -> Way | None:
        """The way from `version` to the newest one; None if no newer version is known."""
        way, known = self._library.way(version), self._way
        if way is None:
            return None
        if known is None or known.kind != way.kind:
            level = logging.DEBUG if way.kind == "delta" else logging.INFO
            log.log(level, "catching up by %s: %s", way.kind, way.reason)
        self._way = way
        return way

    def look(self, version: Version | None, is_connected: bool, now: float) -> list[ArtifactKey] | None:
        """None while the way stays the same. Otherwise the way must be chosen again: returns the artifacts on it that have just
        stalled, which must no longer be requested; empty if a stalled one is to be tried again."""
        entries, before = self._library.entries, self._library.stalled
        wanted = {key: len(entries[key].digests) for key in self._library.path(version) if not entries[key].is_complete}
        known = {key: len(entries[key].digests) for key in before if key in entries}
        is_late = (
            self.plan is not None and self._me in self.plan.late
        )  # it is served only when nothing is queued for others
        if not self._stalls.look(wanted, known, is_connected, now, is_late):
            return None
        self._library.set_stalled(self._stalls.keys)
        stalled = [key for key in wanted if key in self._stalls.keys]
        for key in stalled:
            log.warning("%s has stalled: no peer sends the missing chunks", entries[key].header.artifact)
        return stalled

    def describe(self) -> str:
        """The last choice and its reason; empty before the first."""
        return f"{self._way.kind}: {self._way.reason}" if self._way is not None else ""

    def decoded(self, is_keyframe: bool, weights_bytes: int, seconds: float) -> None:
        """Records how long the consumer took to decode an artifact; later choices use it."""
        if seconds > 0:
            known, rate = self._decode_bytes_per_s[is_keyframe], weights_bytes / seconds
            self._decode_bytes_per_s[is_keyframe] = rate if known == 0.0 else 0.5 * (known + rate)

    def keyframe_s(self, weights_bytes: int) -> float:
        """About how long one would take over this node's link; `weights_bytes` 0: not known."""
        return weights_bytes / self.link().bytes_per_s if weights_bytes else math.inf

    def link(self) -> WorkerLink:
        """This node's link: emulated values if set, else measured ones, else the plan's."""
        mine = self.plan.index_of(self._me) if self.plan is not None else None
        planned = self.plan.nodes[mine] if self.plan is not None and mine is not None else None
        down = self._shape.downlink_bytes_per_s or self._meter.downlink.bytes_per_s
        return link_of(
            down or (planned.downlink_bytes_per_s if planned is not None else 0.0),
            self._shape.rtt_s or (planned.rtt_s if planned is not None else 0.0),
            self._decode_bytes_per_s[False],
            self._decode_bytes_per_s[True],
        )
