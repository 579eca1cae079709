"""Which artifacts lead to the newest version soonest, which of them are kept, and when one has stalled. Pure rules."""

import math

import pytest
from hypothesis import given, strategies as st

from echo2.base.ids import Version
from echo2.broadcast.artifact import ArtifactId, ArtifactKey
from echo2.broadcast.route import (
    FIRST_STALLS,
    FORGOTTEN_S,
    LATE_STALL_S,
    STALL_S,
    ArtifactOffer,
    BaseCheckpoint,
    Stalls,
    WorkerLink,
    dropped_to_fit,
    offer_s,
    plan_catch_up,
    plan_route,
)

SNAPSHOT = 10**9
LINK = WorkerLink(1e6, 0.1, 1e12, 1e12)
BASE = BaseCheckpoint(Version(0), 0.0)


def offer(parent: int | None, version: int, missing: float, *, begun: bool = False) -> ArtifactOffer:
    artifact = ArtifactId(Version(version), None if parent is None else Version(parent))
    is_pushed = parent is not None and version - parent == 1
    key = ArtifactKey(f"{parent}>{version}".encode())
    return ArtifactOffer(key, artifact, missing, SNAPSHOT, is_pushed, begun)


STEPS = [offer(v, v + 1, 1e6) for v in range(8)]
MERGED = offer(0, 8, 4e6)
KEYFRAME = offer(None, 8, 6e8)
ALL = (*STEPS, MERGED, KEYFRAME)
TWO = (offer(0, 1, 0.3e6), offer(1, 2, 1e6))
CHAIN = "0>1 1>2 2>3 3>4 4>5 5>6 6>7 7>8"


@pytest.mark.parametrize(
    ("start", "offers", "base", "kind", "keys"),
    [
        (7, ALL, None, "delta", "7>8"),
        (6, ALL, None, "chain", "6>7 7>8"),
        (0, ALL, None, "merged", "0>8"),
        (0, (*STEPS, KEYFRAME), None, "chain", CHAIN),
        (None, ALL, None, "keyframe", "None>8"),
        (None, (*STEPS, MERGED, offer(None, 0, 6e8)), None, "keyframe+merged", "None>0 0>8"),
        (8, (*STEPS, KEYFRAME), None, None, ""),
        (None, STEPS, None, None, ""),
        # whoever has the base begins there where that is sooner, and a keyframe's seal proves the base
        (None, ALL, BASE, "base+merged", "0>8"),
        (None, (*STEPS, KEYFRAME), BASE, "base+chain", CHAIN),
        (None, (offer(None, 0, 6e8),), BASE, "keyframe", "None>0"),
        (None, (), BASE, None, ""),
        (6, (*STEPS, offer(0, 8, 1e5), offer(None, 0, 1)), BASE, "chain", "6>7 7>8"),  # on from what it has
        (None, (offer(0, 8, 7e8), KEYFRAME), BASE, "keyframe", "None>8"),
        # what comes by itself, or was begun, is left only for a clear gain: its bytes are on their way in any case
        (0, (*TWO, offer(0, 2, 1.1e6)), None, "chain", "0>1 1>2"),
        (0, (*TWO, offer(0, 2, 0.2e6)), None, "merged", "0>2"),
        (0, (offer(0, 2, 1e6), offer(2, 4, 1e6), offer(0, 4, 2.05e6)), None, "merged", "0>4"),  # each is asked for
        (0, (*STEPS, offer(0, 8, 3.9e6, begun=True), offer(0, 4, 1.9e6), offer(4, 8, 1.9e6)), None, "merged", "0>8"),
    ],
)
def test_a_worker_takes_what_is_expected_first(
    start: int | None, offers: tuple[ArtifactOffer, ...], base: BaseCheckpoint | None, kind: str | None, keys: str
) -> None:
    found = plan_route(offers, None if start is None else Version(start), LINK, (), base)
    assert (found.kind if found else None) == kind
    assert " ".join(key.decode() for key in (found.keys if found else ())) == keys


def test_a_slow_decoder_rather_takes_a_keyframe_than_a_long_chain() -> None:
    slow = WorkerLink(1e9, 0.001, 1e9, 1e9)
    found = plan_route([*STEPS, KEYFRAME], Version(0), slow)
    assert found is not None and found.kind == "keyframe" and "expected to take 1 s" in found.reason


def test_a_way_that_has_stopped_coming_is_left_for_one_that_leads_as_far() -> None:
    """A chunk of 6>7 is lost to its publisher's disk: the keyframe is dearer, and comes."""
    lost = {STEPS[6].key}
    found = plan_route([*STEPS, KEYFRAME], Version(6), LINK, lost)
    assert found is not None and found.keys == (KEYFRAME.key,) and "has stalled" in found.reason
    only = plan_route(STEPS, Version(6), LINK, lost)
    assert only is not None and only.keys == (STEPS[6].key, STEPS[7].key), "there is no other way to version 8"
    older = plan_route([*STEPS, offer(None, 7, 6e8)], Version(6), LINK, {STEPS[7].key})
    assert older is not None and older.keys[-1] == STEPS[7].key, "version 7 is not as far"


@given(
    edges=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9), st.integers(1, 10**7)), max_size=25),
    keyframes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10**8)), max_size=3), at=st.integers(0, 9),
)  # fmt: skip
def test_no_other_way_is_faster(edges, keyframes, at) -> None:  # type: ignore[no-untyped-def]
    all_edges = [offer(a, b, size) for a, b, size in edges if a < b] + [offer(None, v, size) for v, size in keyframes]
    best = dict.fromkeys(range(10), math.inf)
    best[at] = 0.0
    for _ in range(11):
        for edge in all_edges:
            start = 0.0 if edge.artifact.parent is None else best[edge.artifact.parent]
            best[edge.artifact.version] = min(best[edge.artifact.version], start + offer_s(edge, LINK, SNAPSHOT))
    plan = plan_catch_up(Version(at), Version(9), all_edges, LINK)
    if plan is None:
        assert best[9] == math.inf
        return
    assert plan.expected_s == pytest.approx(best[9])
    here: int | None = at
    for piece in plan.offers:
        assert piece.artifact.parent in (None, here)
        here = piece.artifact.version
    assert here == 9


def test_what_workers_need_stays_within_the_budget_and_the_rest_goes() -> None:
    edges = [offer(v, v + 1, 10) for v in range(20)] + [offer(12, 20, 40), offer(None, 16, 100), offer(None, 0, 100)]
    held = {Version(12), Version(19)}
    kept = set(edges) - dropped_to_fit(edges, Version(20), held, 200)
    assert {offer(12, 20, 40), offer(19, 20, 10), offer(None, 16, 100)} <= kept
    assert {offer(v, v + 1, 10) for v in range(16, 20)} <= kept
    assert sum(edge.size_bytes for edge in kept) <= 200 and offer(None, 0, 100) not in kept
    for base, is_kept in ((offer(0, 12, 10), True), (offer(0, 12, 11), False)):  # by 12 more than half a keyframe
        assert (base not in dropped_to_fit([*edges, base], Version(20), held, 180 + base.size_bytes)) is is_kept
    least = set(edges) - dropped_to_fit(edges, Version(20), held, 60)
    assert {offer(12, 20, 40), offer(19, 20, 10)} <= least and sum(edge.size_bytes for edge in least) <= 60


A, B = ArtifactKey(b"a"), ArtifactKey(b"b")


@pytest.mark.parametrize(("is_late", "after_s"), [(False, STALL_S), (True, LATE_STALL_S)])
def test_what_stops_coming_is_stalled_until_a_chunk_of_it_comes_or_it_is_gone(is_late: bool, after_s: float) -> None:
    stalls = Stalls()
    assert not stalls.look({A: 3}, {}, True, 0.0, is_late)
    assert not stalls.look({A: 4}, {}, True, 10.0, is_late)
    assert not stalls.look({A: 4}, {}, True, 9.9 + after_s, is_late)
    assert stalls.look({A: 4}, {}, True, 10.0 + after_s, is_late) and stalls.keys == {A}
    assert not stalls.look({B: 0}, {A: 4}, True, 11.0 + after_s, is_late), "another way was taken"
    assert not stalls.look({B: 1}, {A: 4}, True, 12.0 + after_s, is_late) and stalls.keys == {A}
    assert stalls.look({B: 1}, {A: 5}, True, 13.0 + after_s, is_late) and not stalls.keys


@pytest.mark.parametrize(("known", "at_s"), [({A: 3}, STALL_S + FORGOTTEN_S), ({}, 2 * STALL_S)])
def test_what_stalled_is_tried_again_later_and_at_once_where_it_was_dropped(
    known: dict[ArtifactKey, int], at_s: float
) -> None:
    stalls = Stalls()
    stalls.look({A: 3}, {}, True, 0.0)
    stalls.look({A: 3}, {}, True, 0.5)
    assert stalls.look({A: 3}, {}, True, STALL_S) and stalls.keys == {A}
    assert not stalls.look({}, {A: 3}, True, at_s - 1.0)
    assert stalls.look({}, known, True, at_s) and not stalls.keys


def test_what_all_else_waits_for_has_stalled_also_where_new_versions_come_all_the_time() -> None:
    stalls, second = Stalls(), 0
    while not stalls.look({A: 3, ArtifactKey(bytes([second // 2])): second % 2}, {}, True, float(second)):
        second += 1
    assert stalls.keys == {A} and second == FIRST_STALLS * STALL_S


def test_nothing_stalls_while_anything_wanted_comes_or_nobody_is_there() -> None:
    stalls = Stalls()
    for second in range(100):
        assert not stalls.look({A: 3, B: second // 15}, {}, True, float(second)), "B comes, and A waits for its turn"
    for second in range(100, 200):
        assert not stalls.look({A: 3, B: 6}, {}, False, float(second)), "a cut link is no stall"
