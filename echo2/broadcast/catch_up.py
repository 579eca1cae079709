"""Which artifacts lead to the newest version soonest: whether to finish, skip or drop what is in flight.

Guarantees: of all ways from the live version, or from a keyframe, to the newest reachable version, chooses the one
expected to arrive first over the node's link (weights/policy); gives up artifacts that are pushed anyway for ones that
must be requested only if that is clearly faster. A way through a stalled artifact (stalls) is replaced if another one
leads as far. Leaves to others: fetching (session), handing blocks out (runtime/reader).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from echo2.base.ids import Version
from echo2.broadcast.manifest import ArtifactId, ArtifactKey
from echo2.weights.container import CodecSetting
from echo2.weights.policy import BaseCheckpoint, CatchUp, Edge, WorkerLink, newest_reachable, plan_catch_up

SWITCH_SHARE = 0.8
"""Requested artifacts must arrive in less than this share of the time of pushed ones, because their bytes are paid for twice."""

DELTA_BYTES_PER_S, KEYFRAME_BYTES_PER_S = 1e9, 3.5e8
"""Assumed decoding speed in bytes of full weights per second, until measured: about one core's (make bench-delta)."""
DOWNLINK_BYTES_PER_S = 2e6
ROUND_TRIP_S = 0.1


@dataclass(frozen=True, slots=True)
class ArtifactOffer:
    """An artifact that can be fetched, and how many of its bytes are still missing here."""

    key: ArtifactKey
    artifact: ArtifactId
    missing_bytes: float
    full_snapshot_bytes: int = 0
    is_pushed: bool = True
    is_begun: bool = False

    @property
    def is_coming(self) -> bool:
        """Whether it arrives without a request. A keyframe not begun yet was pushed before this node joined."""
        return self.is_begun or (self.is_pushed and not self.artifact.is_keyframe)


@dataclass(frozen=True, slots=True)
class Way:
    """The artifacts to apply, in order. `kind`: one of CatchUp's kinds, or `delta` for a delta that is pushed to all."""

    kind: str
    keys: tuple[ArtifactKey, ...]
    expected_s: float
    reason: str


def link_of(
    downlink_bytes_per_s: float, round_trip_s: float, delta_bytes_per_s: float = 0.0, keyframe_bytes_per_s: float = 0.0
) -> WorkerLink:
    """A node's link and decoding speed; 0 (unknown) becomes the default."""
    decoding = dict.fromkeys(CodecSetting, delta_bytes_per_s or DELTA_BYTES_PER_S)
    return WorkerLink(
        downlink_bytes_per_s or DOWNLINK_BYTES_PER_S,
        round_trip_s or ROUND_TRIP_S,
        decoding,
        keyframe_bytes_per_s or KEYFRAME_BYTES_PER_S,
    )


UNKNOWN_LINK = link_of(0.0, 0.0)


def plan_way(
    offers: Sequence[ArtifactOffer],
    start: Version | None,
    link: WorkerLink,
    stalled: Collection[ArtifactKey] = (),
    base: BaseCheckpoint | None = None,
) -> Way | None:
    """The way from `start` (or from nothing) to the newest reachable version; None: no newer version is reachable.

    `base`: a version that the node got elsewhere (a checkpoint); deltas may start from it if `start` is None.
    """
    way = _quickest(offers, start, link, base)
    if way is None or not set(way.keys) & set(stalled):
        return way
    around = _quickest([offer for offer in offers if offer.key not in stalled], start, link, base)
    target_of = {offer.key: offer.artifact.version for offer in offers}
    if around is None or target_of[around.keys[-1]] < target_of[way.keys[-1]]:
        return way
    return replace(around, reason=f"{around.reason}; part of a faster way has stalled")


def _quickest(
    offers: Sequence[ArtifactOffer], start: Version | None, link: WorkerLink, base: BaseCheckpoint | None
) -> Way | None:
    of_edge: dict[Edge, ArtifactOffer] = {}
    for offer in offers:
        if start is None or offer.artifact.version > start:
            edge = Edge(
                offer.artifact.parent, offer.artifact.version, round(offer.missing_bytes),
                is_coming=offer.is_coming,
            )  # fmt: skip
            of_edge[edge] = offer
    base = base if start is None else None
    newest = newest_reachable(start, list(of_edge), base)
    if base is not None and newest == base.version:  # only a keyframe can confirm that the base really is that version
        base, newest = None, newest_reachable(start, list(of_edge))
    if newest is None or newest == start:
        return None
    weights_bytes = max(offer.full_snapshot_bytes for offer in offers)
    plan = plan_catch_up(start, newest, list(of_edge), link, weights_bytes, base)
    assert plan is not None, "a version that is reachable has a way to it"
    coming = [edge for edge in of_edge if edge.is_coming]
    if not all(piece.is_coming for piece in plan.pieces):
        by_itself = plan_catch_up(start, newest, coming, link, weights_bytes)
        if by_itself is not None and plan.expected_s >= SWITCH_SHARE * by_itself.expected_s:
            plan = by_itself
    return _way(plan, of_edge)


def _way(plan: CatchUp, of_edge: dict[Edge, ArtifactOffer]) -> Way:
    offers = [of_edge[piece] for piece in plan.pieces]
    is_plain = plan.kind == "merged" and offers[0].is_pushed
    return Way(
        "delta" if is_plain else plan.kind, tuple(offer.key for offer in offers), plan.expected_s, plan.reason
    )  # fmt: skip
