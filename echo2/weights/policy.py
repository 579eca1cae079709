"""Which pieces bring a worker to the newest version soonest, which edges to publish, which setting to use. Pure.

A piece (edge) is an available delta or keyframe. Versions and edges form a graph; the plan is its shortest path in
seconds. A piece takes the longer of transfer and decoding, because these overlap, plus one round trip to request it,
unless it arrives unrequested.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo2.base.ids import Version
from echo2.weights.container import CodecSetting


@dataclass(frozen=True, slots=True)
class Edge:
    """A container that can be fetched. `parent` None: a keyframe. `is_coming`: it arrives without a request.

    For a worker that holds part of it, `encoded_bytes` counts only the missing bytes.
    """

    parent: Version | None
    target: Version
    encoded_bytes: int
    setting: CodecSetting = CodecSetting.FAST
    is_coming: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLink:
    """A worker's link, and how fast it decodes (bytes of full weights per second, on all its cores)."""

    bytes_per_s: float
    round_trip_s: float
    decode_bytes_per_s: Mapping[CodecSetting, float]
    keyframe_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class BaseCheckpoint:
    """A version available elsewhere (model hub, mirror, local disk), and the seconds to get it."""

    version: Version
    seconds: float


@dataclass(frozen=True, slots=True)
class CatchUp:
    """How a worker catches up. `kind`: current, chain, merged, keyframe, base, or base+merged and the like."""

    kind: str
    pieces: tuple[Edge, ...]
    uses_base: bool
    expected_s: float
    reason: str


def piece_s(edge: Edge, link: WorkerLink, weights_bytes: int) -> float:
    """Seconds to request, transfer and decode a piece."""
    rate = link.keyframe_bytes_per_s if edge.parent is None else link.decode_bytes_per_s[edge.setting]
    asking_s = 0.0 if edge.is_coming else link.round_trip_s
    return asking_s + max(edge.encoded_bytes / link.bytes_per_s, weights_bytes / rate)


def newest_reachable(at: Version | None, edges: Sequence[Edge], base: BaseCheckpoint | None = None) -> Version | None:
    """The newest version that edges lead to; `at` itself if none is newer."""
    leaving: dict[Version | None, list[Version]] = {}
    for edge in edges:
        leaving.setdefault(edge.parent, []).append(edge.target)
    to_see = [
        *leaving.get(None, []),
        *((base.version,) if base is not None else ()),
        *((at,) if at is not None else ()),
    ]
    seen: set[Version] = set()
    while to_see:
        version = to_see.pop()
        if version not in seen:
            seen.add(version)
            to_see += leaving.get(version, [])
    return max(seen, default=None)


def plan_catch_up(
    at: Version | None,
    to: Version,
    edges: Sequence[Edge],
    link: WorkerLink,
    weights_bytes: int,
    base: BaseCheckpoint | None = None,
) -> CatchUp | None:
    """The way from `at` (None: no weights) to `to` that is expected to finish first; None if there is none.

    Among equally fast ways, the one with fewer pieces.
    """
    if at == to:
        return CatchUp("current", (), False, 0.0, f"the worker is at version {to}")
    leaving: dict[Version | None, list[Edge]] = {}
    for edge in edges:
        leaving.setdefault(edge.parent, []).append(edge)
    ways: list[tuple[float, int, int, Version, tuple[Edge, ...], bool]] = []
    order = 0

    def push(seconds: float, version: Version, pieces: tuple[Edge, ...], uses_base: bool) -> None:
        nonlocal order
        order += 1
        heapq.heappush(ways, (seconds, len(pieces), order, version, pieces, uses_base))

    if at is not None:
        push(0.0, at, (), False)
    if base is not None:
        push(base.seconds, base.version, (), True)
    for keyframe in leaving.get(None, ()):
        push(piece_s(keyframe, link, weights_bytes), keyframe.target, (keyframe,), False)
    done: set[Version] = set()
    while ways:
        seconds, _, _, version, pieces, uses_base = heapq.heappop(ways)
        if version == to:
            return _described(pieces, uses_base, seconds, at, to)
        if version in done:
            continue
        done.add(version)
        for edge in leaving.get(version, ()):
            push(seconds + piece_s(edge, link, weights_bytes), edge.target, (*pieces, edge), uses_base)
    return None


def _described(pieces: tuple[Edge, ...], uses_base: bool, seconds: float, at: Version | None, to: Version) -> CatchUp:
    deltas = [piece for piece in pieces if piece.parent is not None]
    begins = "base" if uses_base else "keyframe" if len(deltas) < len(pieces) else ""
    then = "" if not deltas else "merged" if len(deltas) == 1 else "chain"
    kind = "+".join(part for part in (begins, then) if part)
    total = sum(piece.encoded_bytes for piece in pieces)
    start = "no weights" if at is None else f"version {at}"
    reason = f"from {start} to {to}: {len(pieces)} pieces with {total} bytes, expected to take {seconds:.3g} s"
    return CatchUp(kind, pieces, uses_base, seconds, reason)


def parents_to_publish(ordinal: int, lag_max: int) -> tuple[int, ...]:
    """The earlier publications from which the `ordinal`-th one gets an edge: one back, and 2^j back if 2^j divides it.

    So any lag of k is caught up with at most 2 log2(k) + 1 pieces, while on average two edges are kept per version. No edge
    reaches back farther than `lag_max`.
    """
    parents = []
    reach = 1
    while reach <= min(ordinal, lag_max) and ordinal % reach == 0:
        parents.append(ordinal - reach)
        reach *= 2
    return tuple(parents)


@dataclass(frozen=True, slots=True)
class SettingCost:
    """The cost of a setting: encoded bytes, and coding speeds in bytes of full weights per second and core."""

    encoded_bytes: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


STAY_SHARE = 0.9


def choose_setting(
    costs: Mapping[CodecSetting, SettingCost],
    weights_bytes: int,
    uplink_bytes_per_s: float,
    cores: int,
    worker_cores: int,
    current: CodecSetting | None = None,
) -> tuple[CodecSetting, str]:
    """The setting whose slowest stage (encoding, sending, decoding; they overlap) finishes first, and why.

    The current setting stays unless another one takes less than `STAY_SHARE` of its time.
    """
    by_setting: dict[CodecSetting, tuple[float, str]] = {}
    for setting in CodecSetting:
        cost = costs[setting]
        stages = {
            "encoding": weights_bytes / (cost.encode_bytes_per_s * cores),
            "sending": cost.encoded_bytes / uplink_bytes_per_s,
            "decoding": weights_bytes / (cost.decode_bytes_per_s * worker_cores),
        }
        slowest = max(stages, key=lambda name: stages[name])
        why = f"{setting.name.lower()}: {slowest} takes {stages[slowest]:.3g} s, the other stages less"
        by_setting[setting] = (stages[slowest], why)
    best = min(by_setting, key=lambda setting: by_setting[setting][0])
    if current is not None and by_setting[best][0] > STAY_SHARE * by_setting[current][0]:
        best = current
    return best, by_setting[best][1]


def dropped_to_fit(
    edges: Sequence[Edge], newest: Version, in_use: Sequence[Version], budget_bytes: int
) -> frozenset[Edge]:
    """The containers to drop so that the rest fits the budget; the most useful ones stay."""
    dropped = []
    for edge in by_usefulness(edges, newest, in_use):
        if edge.encoded_bytes <= budget_bytes:
            budget_bytes -= edge.encoded_bytes
        else:
            dropped.append(edge)
    return frozenset(dropped)


def by_usefulness(edges: Sequence[Edge], newest: Version, in_use: Sequence[Version]) -> list[Edge]:
    """Sorts edges: first those that lead to the newest version from a version that workers hold; then the newest keyframe and the
    shortest chain from it to the newest version, so that anyone can join; then the rest, newest targets first.
    """
    held = set(in_use)
    essential = {edge for edge in edges if edge.target == newest and edge.parent in held}
    joining = joining_path(edges, newest)

    def rank(edge: Edge) -> tuple[int, int, int]:
        importance = 0 if edge in essential else 1 if edge in joining else 2
        return importance, -edge.target, edge.encoded_bytes

    return sorted(set(edges), key=rank)


BASE_SHARE_MAX = 0.5
"""Deltas from the base that exceed this share of a keyframe's bytes save a newcomer too little to be kept."""


def joining_path(edges: Sequence[Edge], newest: Version) -> frozenset[Edge]:
    """The newest keyframe from which the newest version can be reached, and the fewest bytes from there; also the fewest bytes
    from the base checkpoint (version 0), if that is light enough, for workers that have it.
    """
    keyframes = sorted((edge for edge in edges if edge.parent is None), key=lambda edge: -edge.target)
    link = WorkerLink(1.0, 0.0, dict.fromkeys(CodecSetting, math.inf), math.inf)
    deltas = [edge for edge in edges if edge.parent is not None]
    for keyframe in keyframes:
        way = plan_catch_up(keyframe.target, newest, deltas, link, 0)
        if way is None:
            continue
        of_base = plan_catch_up(Version(0), newest, deltas, link, 0)
        limit = BASE_SHARE_MAX * keyframe.encoded_bytes
        is_light = of_base is not None and sum(piece.encoded_bytes for piece in of_base.pieces) <= limit
        return frozenset((keyframe, *way.pieces, *(of_base.pieces if of_base is not None and is_light else ())))
    return frozenset()
