"""Which way a node takes to the newest version: what is known of its link and speed goes into the rule (catch_up).

Guarantees: a kind of way other than the usual one is logged once, with its reason. Never waits. Leaves to others: the rule,
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
    """One node's. `plan` is the newest one, once there is one."""

    def __init__(self, me: PeerId, library: Library, meter: Meter, shape: LinkShape) -> None:
        self.plan: BroadcastPlan | None = None
        self._me = me
        self._library = library
        self._meter = meter
        self._shape = shape
        self._way: Way | None = None
        self._stalls = Stalls()
        self._decode_bytes_per_s = {False: 0.0, True: 0.0}  # of full weights; by whether it was a keyframe's

    def choose(self, version: Version | None) -> Way | None:
        """The way from `version` to the newest one; None where nothing newer is known."""
        way, known = self._library.way(version), self._way
        if way is None:
            return None
        if known is None or known.kind != way.kind:
            level = logging.DEBUG if way.kind == "delta" else logging.INFO
            log.log(level, "catching up by %s: %s", way.kind, way.reason)
        self._way = way
        return way

    def look(self, version: Version | None, is_connected: bool, now: float) -> list[ArtifactKey] | None:
        """None while the way stays as it is. Else it is to be chosen anew: these on it have just stopped coming and are to
        be asked for no more; none of them where something is tried again."""
        entries, before = self._library.entries, self._library.stalled
        wanted = {key: len(entries[key].digests) for key in self._library.path(version) if not entries[key].is_complete}
        known = {key: len(entries[key].digests) for key in before if key in entries}
        is_late = self.plan is not None and self._me in self.plan.late  # it is served when nothing waits for others
        if not self._stalls.look(wanted, known, is_connected, now, is_late):
            return None
        self._library.set_stalled(self._stalls.keys)
        found = [key for key in wanted if key in self._stalls.keys]
        for key in found:
            log.warning("%s has stopped: no peer has the missing chunks", entries[key].header.artifact)
        return found

    def describe(self) -> str:
        """The last choice and its reason; empty before the first."""
        return f"{self._way.kind}: {self._way.reason}" if self._way is not None else ""

    def decoded(self, is_keyframe: bool, weights_bytes: int, seconds: float) -> None:
        """How long the consumer took to decode an artifact: it counts in later choices."""
        if seconds > 0:
            known, rate = self._decode_bytes_per_s[is_keyframe], weights_bytes / seconds
            self._decode_bytes_per_s[is_keyframe] = rate if known == 0.0 else 0.5 * (known + rate)

    def keyframe_s(self, weights_bytes: int) -> float:
        """About how long one would take over this node's link; `weights_bytes` 0: not known."""
        return weights_bytes / self.link().bytes_per_s if weights_bytes else math.inf

    def link(self) -> WorkerLink:
        """What is known of this node's link, best first: emulated, measured, what the plan says."""
        mine = self.plan.index_of(self._me) if self.plan is not None else None
        planned = self.plan.nodes[mine] if self.plan is not None and mine is not None else None
        down = self._shape.downlink_bytes_per_s or self._meter.downlink.bytes_per_s
        return link_of(
            down or (planned.downlink_bytes_per_s if planned is not None else 0.0),
            self._shape.rtt_s or (planned.rtt_s if planned is not None else 0.0),
            self._decode_bytes_per_s[False],
            self._decode_bytes_per_s[True],
        )
