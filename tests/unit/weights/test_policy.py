from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import Version
from echo2.weights.container import CodecSetting
from echo2.weights.policy import (
    BaseCheckpoint,
    Edge,
    SettingCost,
    WorkerLink,
    choose_setting,
    dropped_to_fit,
    parents_to_publish,
    piece_s,
    plan_catch_up,
)  # fmt: skip

FAST_DECODING = dict.fromkeys(CodecSetting, 1000000000000000.0)
LINK = WorkerLink(1e6, 0.1, FAST_DECODING, 1e15)
WEIGHTS = 10**9


def delta(parent: int, target: int, size: int) -> Edge:
    return Edge(Version(parent), Version(target), size)


def keyframe(target: int, size: int) -> Edge:
    return Edge(None, Version(target), size)


def test_each_way_is_chosen_where_it_arrives_first() -> None:
    steps = [delta(v, v + 1, 10**6) for v in range(8)]
    merged = delta(0, 8, 4 * 10**6)
    whole = keyframe(8, 66 * 10**7)

    def kind(at: int | None, edges: list[Edge], base: BaseCheckpoint | None = None) -> str:
        plan = plan_catch_up(None if at is None else Version(at), Version(8), edges, LINK, WEIGHTS, base)
        return "none" if plan is None else plan.kind

    everything = [*steps, merged, whole]
    assert kind(8, everything) == "current"
    assert kind(0, everything) == "merged"
    assert kind(0, steps) == "chain"
    assert kind(6, everything) == "chain"
    assert kind(None, everything) == "keyframe"
    assert kind(None, everything, BaseCheckpoint(Version(0), 20.0)) == "base+merged"
    assert kind(3, [merged, whole]) == "keyframe"
    assert kind(3, [merged]) == "none"
    assert kind(None, [keyframe(4, 66 * 10**7), *steps]) == "keyframe+chain"


def test_a_slow_decoder_turns_the_choice() -> None:
    slow = WorkerLink(1e9, 0.0, {CodecSetting.FAST: 1e9, CodecSetting.DENSE: 1e9}, 5e9)
    steps = [delta(v, v + 1, 10**6) for v in range(8)]
    plan = plan_catch_up(Version(0), Version(8), [*steps, keyframe(8, 66 * 10**7)], slow, WEIGHTS)
    assert plan is not None
    assert plan.kind == "keyframe"


@given(
    edges=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9), st.integers(1, 10**7)), max_size=25),
    keyframes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10**8)), max_size=3), at=st.integers(0, 9),
)  # fmt: skip
def test_no_other_way_is_faster(edges, keyframes, at) -> None:  # type: ignore[no-untyped-def]
    all_edges = [delta(a, b, size) for a, b, size in edges] + [keyframe(v, size) for v, size in keyframes]
    best = dict.fromkeys(range(10), math.inf)
    best[at] = 0.0
    for _ in range(11):
        for edge in all_edges:
            start = 0.0 if edge.parent is None else best[edge.parent]
            best[edge.target] = min(best[edge.target], start + piece_s(edge, LINK, WEIGHTS))
    plan = plan_catch_up(Version(at), Version(9), all_edges, LINK, WEIGHTS)
    if plan is None:
        assert best[9] == math.inf
        return
    assert plan.expected_s == pytest.approx(best[9])
    here: int | None = at
    for piece in plan.pieces:
        assert piece.parent is None or piece.parent == here
        here = piece.target
    assert here == 9


@given(start=st.integers(0, 500), lag=st.integers(1, 500))
def test_any_lag_is_caught_up_in_logarithmically_many_pieces(start: int, lag: int) -> None:
    end = start + lag
    edges = [delta(p, v, 1) for v in range(start, end + 1) for p in parents_to_publish(v, 1024)]
    plan = plan_catch_up(Version(start), Version(end), edges, LINK, WEIGHTS)
    assert plan is not None
    assert len(plan.pieces) <= 2 * math.log2(lag) + 1


def test_edges_are_few_and_reach_no_farther_than_asked() -> None:
    assert parents_to_publish(0, 64) == ()
    assert parents_to_publish(1, 64) == (0,)
    assert parents_to_publish(12, 64) == (11, 10, 8)
    assert parents_to_publish(64, 16) == (63, 62, 60, 56, 48)
    assert sum(len(parents_to_publish(v, 1024)) for v in range(1, 1025)) < 2.1 * 1024


def test_the_setting_follows_uplink_and_cores() -> None:
    costs = {
        CodecSetting.FAST: SettingCost(0.009 * 16e9, 2e9, 3e9),
        CodecSetting.DENSE: SettingCost(0.006 * 16e9, 0.7e9, 0.8e9),
    }
    slow, why = choose_setting(costs, 16 * 10**9, 5e6, 8, 2)
    assert slow is CodecSetting.DENSE
    assert "sending" in why
    quick, why = choose_setting(costs, 16 * 10**9, 1e9, 8, 2)
    assert quick is CodecSetting.FAST
    assert "decoding" in why


def test_what_workers_need_stays_within_the_budget_and_the_rest_goes() -> None:
    edges = [delta(v, v + 1, 10) for v in range(20)] + [delta(12, 20, 40), keyframe(16, 100), keyframe(0, 100)]
    held = [Version(12), Version(19)]
    kept = set(edges) - dropped_to_fit(edges, Version(20), held, 200)
    assert {delta(12, 20, 40), delta(19, 20, 10), keyframe(16, 100)} <= kept
    assert {delta(v, v + 1, 10) for v in range(16, 20)} <= kept
    assert sum(edge.encoded_bytes for edge in kept) <= 200 and keyframe(0, 100) not in kept
    least = set(edges) - dropped_to_fit(edges, Version(20), held, 60)
    assert {delta(12, 20, 40), delta(19, 20, 10)} <= least and sum(edge.encoded_bytes for edge in least) <= 60
