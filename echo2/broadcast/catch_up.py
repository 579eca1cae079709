"""One node on its way to the newest version: which artifacts it takes, and their blocks in the order in which they apply.

Guarantees: each block once, in order; an artifact's parent is handed out completely before it; an artifact that is abandoned
half-way is reported as dropped. Never waits.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from echo2.base.ids import PeerId, Version
from echo2.base.units import LinkShape
from echo2.broadcast.artifact import ArtifactId, ArtifactKey, BlockAssembler, Header
from echo2.broadcast.library import Library
from echo2.broadcast.pace import Meter
from echo2.broadcast.plan import BroadcastPlan
from echo2.broadcast.route import ArtifactOffer, BaseCheckpoint, CatchUp, Stalls, WorkerLink, plan_route
from echo2.broadcast.store import Entry

log = logging.getLogger("echo2.broadcast")


class CatchUpPlanner:
    """Plans one node's catch-up. `plan`: the newest broadcast plan, None before the first; `stalled`: artifacts that no peer sends,
    which are avoided if possible; `base`: a version that the node got elsewhere (a base checkpoint)."""

    def __init__(self, me: PeerId, library: Library, meter: Meter, shape: LinkShape) -> None:
        self.plan: BroadcastPlan | None = None
        self.base: BaseCheckpoint | None = None
        self._me, self._library, self._meter, self._shape = me, library, meter, shape
        self._stalls = Stalls()
        self._chosen: CatchUp | None = None
        self._planned: tuple[tuple[object, ...], CatchUp | None] | None = None
        self._decode_bytes_per_s = {False: 0.0, True: 0.0}  # bytes of full weights per second, by is_keyframe

    @property
    def stalled(self) -> frozenset[ArtifactKey]:
        return self._stalls.keys

    def route(self, version: Version | None) -> CatchUp | None:
        """How to get from `version` to the newest one soonest; None if no newer version is reachable. The answer stays until an
        artifact is added, sealed, completed or dropped, so what is asked for is what the reader waits for."""
        state = (version, self.base, self.stalled, self._library.revision)
        if self._planned is None or self._planned[0] != state:
            offers = [
                ArtifactOffer(
                    key, entry.artifact, entry.missing_bytes, entry.header.full_snapshot_bytes,
                    entry.header.is_pushed, bool(entry.digests),
                )
                for key, entry in reversed(self._library.entries.items())  # of equals, the newer publication
            ]  # fmt: skip
            self._planned = state, plan_route(offers, version, self.link(), self.stalled, self.base)
        return self._planned[1]

    def choose(self, version: Version | None) -> CatchUp | None:
        """The same, for the log and the status."""
        chosen, before = self.route(version), self._chosen
        if chosen is None:
            return None
        if before is None or before.kind != chosen.kind:
            level = logging.DEBUG if chosen.kind == "delta" else logging.INFO
            log.log(level, "catching up by %s: %s", chosen.kind, chosen.reason)
        self._chosen = chosen
        return chosen

    def path(self, version: Version | None) -> tuple[ArtifactKey, ...]:
        route = self.route(version)
        return route.keys if route is not None else ()

    def look(self, version: Version | None, is_connected: bool, now: float) -> list[ArtifactKey] | None:
        """None while the stalled artifacts stay the same. Otherwise the path must be chosen again: returns the artifacts on it that
        have just stalled, which must no longer be requested; empty if a stalled one is to be tried again."""
        entries = self._library.entries
        wanted = {key: len(entries[key].digests) for key in self.path(version) if not entries[key].is_complete}
        known = {key: len(entries[key].digests) for key in self.stalled if key in entries}
        is_late = self.plan is not None and self._me in self.plan.late  # served only when nobody else could be
        if not self._stalls.look(wanted, known, is_connected, now, is_late):
            return None
        stalled = [key for key in wanted if key in self.stalled]
        for key in stalled:
            log.warning("%s has stalled: no peer sends the missing chunks", entries[key].artifact)
        return stalled

    def describe(self) -> str:
        """The last choice and its reason; empty before the first."""
        return f"{self._chosen.kind}: {self._chosen.reason}" if self._chosen is not None else ""

    def waits_for(self, version: Version | None) -> str:
        """Describes the first incomplete artifact on the path; empty if none."""
        path = [self._library.entries[key] for key in self.path(version)]
        missing = [entry for entry in path if not entry.is_complete]
        return f"chunks of {missing[0].artifact} ({len(missing[0].digests)} held)" if missing else ""

    def on_decoded(self, is_keyframe: bool, weights_bytes: int, seconds: float) -> None:
        if seconds > 0:
            known, rate = self._decode_bytes_per_s[is_keyframe], weights_bytes / seconds
            self._decode_bytes_per_s[is_keyframe] = rate if known == 0.0 else 0.5 * (known + rate)

    def keyframe_s(self, weights_bytes: int) -> float:
        """About how long one would take over this node's link; `weights_bytes` 0: not known."""
        return weights_bytes / self.link().bytes_per_s if weights_bytes else math.inf

    def link(self) -> WorkerLink:
        """This node's link: emulated values if set, else measured ones, else the plan's, else the defaults."""
        number = self.plan.index_of(self._me) if self.plan is not None else None
        planned = self.plan.nodes[number] if self.plan is not None and number is not None else None
        down = self._shape.downlink_bytes_per_s or self._meter.downlink.bytes_per_s
        usual = WorkerLink()
        return WorkerLink(
            down or (planned.downlink_bytes_per_s if planned is not None else 0.0) or usual.bytes_per_s,
            self._shape.rtt_s or (planned.rtt_s if planned is not None else 0.0) or usual.round_trip_s,
            self._decode_bytes_per_s[False] or usual.delta_bytes_per_s,
            self._decode_bytes_per_s[True] or usual.keyframe_bytes_per_s,
        )


@dataclass(frozen=True, slots=True)
class ArtifactBegun:
    """The first event of an artifact. Its parent, if any, has been handed out completely before."""

    header: Header


@dataclass(frozen=True, slots=True)
class BlockArrived:
    """The next block, exactly as it was published."""

    artifact: ArtifactId
    payload: bytes


@dataclass(frozen=True, slots=True)
class ArtifactSealed:
    """All blocks were handed out; the weights must have this fingerprint."""

    artifact: ArtifactId
    fingerprint: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ArtifactDropped:
    """The artifact is abandoned half-way: discard what was decoded of it. `reason`: for the log."""

    artifact: ArtifactId
    reason: str


Progress = ArtifactBegun | BlockArrived | ArtifactSealed | ArtifactDropped


class ArtifactReader:
    """One consumer's position. `version`: the newest version that was handed out completely."""

    def __init__(self, library: Library, planner: CatchUpPlanner) -> None:
        self._library, self._planner = library, planner
        self.version: Version | None = None
        self._current: tuple[ArtifactKey, ArtifactId] | None = None
        self._next_index = 0
        self._assembler = BlockAssembler()
        self._was_restarted = False

    @property
    def artifact(self) -> ArtifactId | None:
        return self._current[1] if self._current is not None else None

    def restart_from(self, version: Version | None) -> None:
        self.version = version
        self._was_restarted = self._current is not None

    def awaits(self, key: ArtifactKey, index: int) -> bool:
        """Whether this chunk, now that it has come, is the next to hand out."""
        return self._current is not None and (self._current[0], self._next_index) == (key, index)

    def next(self) -> Progress | None:
        if self._was_restarted:
            return self._drop("the consumer switched to another version")
        path = self._planner.path(self.version)
        if self._current is None:
            return self._begin(path[0]) if path else None
        key, artifact = self._current
        entry = self._library.entries.get(key)
        if entry is None:
            return self._drop("it was replaced or dropped")
        if key not in path and not entry.is_complete:
            return self._drop("another way to a newer version is faster")
        block = self._next_block(key, entry)
        if block is not None:
            return BlockArrived(artifact, block)
        if entry.seal is None or self._next_index < entry.seal.chunk_count:
            return None
        self._current, self.version = None, artifact.version
        return ArtifactSealed(artifact, entry.seal.fingerprint, entry.seal.total_bytes)

    def _begin(self, key: ArtifactKey) -> ArtifactBegun:
        header = self._library.entries[key].header
        self._current, self._next_index, self._assembler = (key, header.artifact), 0, BlockAssembler()
        return ArtifactBegun(header)

    def _next_block(self, key: ArtifactKey, entry: Entry) -> bytes | None:
        while self._next_index in entry.digests:
            chunk = self._library.chunk(key, self._next_index)
            self._next_index += 1
            block = self._assembler.add(chunk.payload, chunk.ends_block)
            if block is not None:
                return block
        return None

    def _drop(self, reason: str) -> Progress:
        assert self._current is not None
        artifact = self._current[1]
        self._current, self._was_restarted = None, False
        return ArtifactDropped(artifact, reason)
