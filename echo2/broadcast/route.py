"""Which artifacts lead to the newest version soonest, which of them to keep, and when one has stalled. Pure.

Artifacts are edges between versions: a delta from its parent, a keyframe from nothing. The catch-up is the shortest path in
seconds: an artifact takes the longer of transfer and decoding, which overlap, and a round trip unless it is pushed. Guarantees:
pushed artifacts are given up for requested ones only for a clear gain; a stalled artifact is avoided if another path leads as far.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from echo2.base.ids import Version
from echo2.base.units import format_seconds
from echo2.broadcast.artifact import ArtifactId, ArtifactKey

SWITCH_SHARE = 0.8
"""Requested artifacts must arrive in less than this share of the time of pushed ones, because their bytes are paid for twice."""
BASE_SHARE_MAX = 0.5
"""Deltas from the base that exceed this share of a keyframe's bytes save a newcomer too little to be kept."""


@dataclass(frozen=True, slots=True)
class ArtifactOffer:
    """An artifact that can be had. `size_bytes`: what is still missing here; of one that is kept, all of it."""

    key: ArtifactKey
    artifact: ArtifactId
    size_bytes: float
    full_snapshot_bytes: int = 0
    is_pushed: bool = True
    is_begun: bool = False

    @property
    def is_unrequested(self) -> bool:
        """Whether it arrives without a request. A keyframe not begun yet was pushed before this node joined."""
        return self.is_begun or (self.is_pushed and not self.artifact.is_keyframe)


@dataclass(frozen=True, slots=True)
class WorkerLink:
    """A worker's link, and how fast it decodes (bytes of full weights per second, on all its cores). The defaults stand for what is
    not measured yet; those of decoding are about one core's (make bench-delta)."""

    bytes_per_s: float = 2e6
    round_trip_s: float = 0.1
    delta_bytes_per_s: float = 1e9
    keyframe_bytes_per_s: float = 3.5e8


@dataclass(frozen=True, slots=True)
class BaseCheckpoint:
    """A version available elsewhere (model hub, mirror, local disk), and the seconds to get it."""

    version: Version
    seconds: float


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The artifacts to apply, in order. `kind`: `delta` for one that is pushed to all, else chain, merged, keyframe, base, or
    base+merged and the like."""

    kind: str
    offers: tuple[ArtifactOffer, ...]
    expected_s: float
    reason: str

    @property
    def keys(self) -> tuple[ArtifactKey, ...]:
        return tuple(offer.key for offer in self.offers)


def plan_route(
    offers: Sequence[ArtifactOffer],
    start: Version | None,
    link: WorkerLink,
    stalled: Collection[ArtifactKey] = (),
    base: BaseCheckpoint | None = None,
) -> CatchUp | None:
    """How to get from `start` (or from nothing) to the newest reachable version; None: no newer version is reachable. `base`: a
    version that the node got elsewhere (a checkpoint); deltas may start from it if `start` is None."""
    best = _quickest(offers, start, link, base)
    if best is None or not set(best.keys) & set(stalled):
        return best
    around = _quickest([offer for offer in offers if offer.key not in stalled], start, link, base)
    if around is None or around.offers[-1].artifact.version < best.offers[-1].artifact.version:
        return best
    return replace(around, reason=f"{around.reason}; part of a faster way has stalled")


def _quickest(
    offers: Sequence[ArtifactOffer], start: Version | None, link: WorkerLink, base: BaseCheckpoint | None
) -> CatchUp | None:
    offers = [offer for offer in offers if start is None or offer.artifact.version > start]
    best = plan_catch_up(start, None, offers, link, base if start is None else None)
    if best is not None and not best.offers:  # only a keyframe can confirm that the base really is that version
        best = plan_catch_up(start, None, offers, link)
    if best is None or not best.offers:
        return None
    if not all(offer.is_unrequested for offer in best.offers):
        newest = best.offers[-1].artifact.version
        unrequested = plan_catch_up(start, newest, [offer for offer in offers if offer.is_unrequested], link)
        if unrequested is not None and best.expected_s >= SWITCH_SHARE * unrequested.expected_s:
            best = unrequested
    return replace(best, kind="delta") if best.kind == "merged" and best.offers[0].is_pushed else best


def plan_catch_up(
    start: Version | None,
    to: Version | None,
    offers: Sequence[ArtifactOffer],
    link: WorkerLink,
    base: BaseCheckpoint | None = None,
) -> CatchUp | None:
    """The path from `start` (None: no weights) to `to` (None: the newest version that can be reached) that is expected to finish
    first, of equally fast ones the shortest; None if there is none."""
    weights_bytes = max((offer.full_snapshot_bytes for offer in offers), default=0)
    leaving: dict[Version | None, list[ArtifactOffer]] = {}
    for offer in offers:
        leaving.setdefault(offer.artifact.parent, []).append(offer)
    paths: list[tuple[float, int, int, Version, tuple[ArtifactOffer, ...], str]] = []
    order = 0

    def push(seconds: float, version: Version, path: tuple[ArtifactOffer, ...], begins: str) -> None:
        nonlocal order
        order += 1
        heapq.heappush(paths, (seconds, len(path), order, version, path, begins))

    if start is not None:
        push(0.0, start, (), "")
    if base is not None:
        push(base.seconds, base.version, (), "base")
    for keyframe in leaving.get(None, ()):
        push(offer_s(keyframe, link, weights_bytes), keyframe.artifact.version, (keyframe,), "keyframe")
    reached: dict[Version, tuple[tuple[ArtifactOffer, ...], str, float]] = {}
    while paths and to not in reached:
        seconds, _, _, version, path, begins = heapq.heappop(paths)
        if version in reached:
            continue
        reached[version] = path, begins, seconds
        for offer in leaving.get(version, ()):
            push(seconds + offer_s(offer, link, weights_bytes), offer.artifact.version, (*path, offer), begins)
    end = max(reached, default=None) if to is None else to
    return _described(*reached[end], start, end) if end in reached else None


def offer_s(offer: ArtifactOffer, link: WorkerLink, weights_bytes: int) -> float:
    """Seconds to request, transfer and decode an artifact."""
    rate = link.keyframe_bytes_per_s if offer.artifact.is_keyframe else link.delta_bytes_per_s
    asking_s = 0.0 if offer.is_unrequested else link.round_trip_s
    return asking_s + max(offer.size_bytes / link.bytes_per_s, weights_bytes / rate)


def _described(
    path: tuple[ArtifactOffer, ...], begins: str, seconds: float, start: Version | None, to: Version
) -> CatchUp:
    deltas = sum(not offer.artifact.is_keyframe for offer in path)
    then = "" if not deltas else "merged" if deltas == 1 else "chain"
    kind = "+".join(part for part in (begins, then) if part) or "current"
    size = round(sum(offer.size_bytes for offer in path))
    origin = "no weights" if start is None else f"version {start}"
    reason = f"from {origin} to {to}: {len(path)} pieces with {size} bytes, expected to take {format_seconds(seconds)}"
    return CatchUp(kind, path, seconds, reason)


def dropped_to_fit(
    offers: Sequence[ArtifactOffer], newest: Version, in_use: Collection[Version], budget_bytes: float
) -> frozenset[ArtifactOffer]:
    """Which artifacts to drop so that the rest fits the budget. What stays first: those that lead to the newest version from a
    version that workers hold; then what anyone can join by (`joining_path`); then the rest, newest versions first."""
    joining = joining_path(offers, newest)

    def rank(offer: ArtifactOffer) -> tuple[int, int, float]:
        is_essential = offer.artifact.version == newest and offer.artifact.parent in in_use
        return 0 if is_essential else 1 if offer in joining else 2, -offer.artifact.version, offer.size_bytes

    dropped = []
    for offer in sorted(offers, key=rank):
        if offer.size_bytes <= budget_bytes:
            budget_bytes -= offer.size_bytes
        else:
            dropped.append(offer)
    return frozenset(dropped)


def joining_path(offers: Sequence[ArtifactOffer], newest: Version) -> frozenset[ArtifactOffer]:
    """The newest keyframe from which the newest version can be reached, and the fewest bytes from there; also the fewest bytes
    from the base checkpoint (version 0), if that is light enough, for workers that have it."""
    by_bytes = WorkerLink(1.0, 0.0, math.inf, math.inf)
    deltas = [offer for offer in offers if not offer.artifact.is_keyframe]
    keyframes = (offer for offer in offers if offer.artifact.is_keyframe)
    for keyframe in sorted(keyframes, key=lambda offer: -offer.artifact.version):
        path = plan_catch_up(keyframe.artifact.version, newest, deltas, by_bytes)
        if path is None:
            continue
        of_base = plan_catch_up(Version(0), newest, deltas, by_bytes)
        is_light = of_base is not None and of_base.expected_s <= BASE_SHARE_MAX * keyframe.size_bytes
        return frozenset((keyframe, *path.offers, *(of_base.offers if of_base is not None and is_light else ())))
    return frozenset()


STALL_S = 20.0  # twice the longest time that one request is given (pulling.note_requests)
FORGOTTEN_S = 5 * STALL_S  # a stalled artifact is tried again after this time: a peer may have it by then
FIRST_STALLS = 6  # times STALL_S: it may have to wait for its turn
LATE_STALL_S = 4 * STALL_S  # STALL_S for a node that the plan serves last: its turn may come late, but it must come


class Stalls:
    """The stalled artifacts of one node, in `keys`."""

    def __init__(self) -> None:
        self.keys: frozenset[ArtifactKey] = frozenset()
        self._held: dict[ArtifactKey, int] = {}
        self._since: dict[ArtifactKey, float] = {}
        self._quiet_since = self._first_since = float("-inf")
        self._first: tuple[ArtifactKey, int] | None = None  # what the reader waits for, and how much of it is here

    def look(
        self,
        wanted: Mapping[ArtifactKey, int],
        known: Mapping[ArtifactKey, int],
        is_connected: bool,
        now: float,
        is_late: bool = False,
    ) -> bool:
        """Updates `keys`; returns whether it changed. Call it about once a second. `wanted`: incomplete artifacts being
        fetched in the order in which they apply, with the number of chunks held; `known`: chunks held of each stalled artifact that
        peers still announce. The first has stalled also if others go on, as where new versions come all the time."""
        before, stalled = self.keys, self._since
        self._since = {
            key: since for key, since in self._since.items()
            if key in known and known[key] <= self._held[key] and now - since < FORGOTTEN_S
        }  # fmt: skip
        waiting = {key: held for key, held in wanted.items() if key not in self._since}
        is_tried_again = len(self._since) < len(stalled)  # it gets the full STALL_S again
        stall_s, first = LATE_STALL_S if is_late else STALL_S, next(iter(waiting.items()), None)
        if first != self._first or not is_connected:
            self._first, self._first_since = first, now
        if is_tried_again or not (is_connected and waiting and waiting.items() <= self._held.items()):
            self._quiet_since = now
        elif now - self._quiet_since >= stall_s:
            self._since.update(dict.fromkeys(waiting, now))
        if first is not None and now - self._first_since >= FIRST_STALLS * stall_s:
            self._since[first[0]] = now
        self._held = {**{key: self._held[key] for key in self._since.keys() - waiting.keys()}, **waiting}
        self.keys = frozenset(self._since)
        return self.keys != before
