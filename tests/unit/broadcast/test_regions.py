"""Fleets in regions: what traffic costs is counted, and plans cross into each region about once where that is charged."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.ids import PeerId
from echo2.broadcast.plan import NodeLink, Tree, degree_of, fluid_bound, is_sound
from echo2.broadcast.trees import GIB, Needs, egress_usd, is_crossing, plan, regional, weighted_plan

MBIT = 1e6 / 8
SIZE = 512 << 20
USD_PER_GIB = 0.09
POOL_USD_PER_S = 64 * 0.5 / 3600


def node(number: int, region: str, up: float = 500 * MBIT, usd: float = USD_PER_GIB) -> NodeLink:
    peer = PeerId(f"n{number:03}")
    return NodeLink(peer, f"n{number}", (f"h{number}:1",), up, 2 * up, 0.04, region=region, egress_usd_per_gib=usd)


def fleet(workers: int, regions: int, usd: float = USD_PER_GIB, seed_up: float = 1000 * MBIT) -> list[NodeLink]:
    rng = random.Random(workers * 7 + regions)
    made = [node(i, f"aws/r{i % regions}", rng.choice([200, 500, 1000]) * MBIT, usd) for i in range(1, workers + 1)]
    return [node(0, "", seed_up, 0.0), *made]


def crossings(nodes: list[NodeLink], trees: tuple[Tree, ...]) -> dict[str, float]:
    """Per region, how many copies of an artifact enter it from outside."""
    copies: dict[str, float] = defaultdict(float)
    for tree in trees:
        for child, parent in enumerate(tree.parents, start=1):
            if is_crossing(nodes[parent], nodes[child]):
                copies[nodes[child].region] += tree.weight
    return dict(copies)


def uncharged(nodes: list[NodeLink]) -> list[NodeLink]:
    return [replace(one, egress_usd_per_gib=0.0) for one in nodes]


@pytest.mark.parametrize("workers, regions", [(64, 2), (256, 6)])
def test_where_traffic_is_charged_a_plan_crosses_into_each_region_once_and_costs_a_tenth(
    workers: int, regions: int
) -> None:
    nodes = fleet(workers, regions)
    made, free = plan(nodes, 1, SIZE, usd_per_s=POOL_USD_PER_S), plan(uncharged(nodes), 1, SIZE)
    assert is_sound(nodes, made.trees) and degree_of(made.trees, len(nodes)) <= 32
    assert max(crossings(nodes, made.trees).values()) == pytest.approx(1.0)
    assert made.egress_usd == pytest.approx(egress_usd(nodes, made.trees, SIZE))
    assert made.egress_usd < 0.1 * egress_usd(nodes, free.trees, SIZE)
    assert "USD of traffic" in made.reason and made.topology.startswith("regional")
    paid = POOL_USD_PER_S * (made.predicted_all_s - free.predicted_all_s)
    assert made.egress_usd + paid < egress_usd(nodes, free.trees, SIZE), "the time that it takes longer is worth it"


def test_where_nothing_is_charged_or_time_is_dear_or_has_no_price_no_time_is_given_away() -> None:
    free, cheap, poor = fleet(64, 4, usd=0.0), fleet(64, 4, usd=0.0001), fleet(64, 4, seed_up=100 * MBIT)
    made = plan(free, 1, SIZE, usd_per_s=POOL_USD_PER_S)
    as_before = plan([replace(one, region="") for one in free], 1, SIZE)
    assert (made.trees, made.topology, made.egress_usd) == (as_before.trees, as_before.topology, 0.0)
    assert "USD" not in made.reason
    made, fastest = plan(cheap, 1, SIZE, usd_per_s=10.0), plan(uncharged(cheap), 1, SIZE)
    assert made.predicted_all_s <= 1.05 * fastest.predicted_all_s and made.egress_usd > 0
    assert plan(poor, 1, SIZE).predicted_all_s <= 1.06 * plan(uncharged(poor), 1, SIZE).predicted_all_s


def test_gateways_pass_on_to_one_another_where_the_seed_is_poor() -> None:
    nodes = fleet(64, 4, seed_up=100 * MBIT)
    chain, spread = (regional(nodes, 32, is_chain=is_chain) for is_chain in (True, False))
    assert [sum(parent == 0 for parent in trees[0].parents) for trees in (chain, spread)] == [1, 4]
    made = plan(nodes, 1, SIZE, usd_per_s=POOL_USD_PER_S)
    assert made.topology == "regional_chain"
    assert made.predicted_all_s < 1.3 * SIZE / fluid_bound(nodes).rate_bytes_per_s


def test_workers_that_come_late_are_charged_as_well() -> None:
    nodes = [replace(one, downlink_bytes_per_s=5 * MBIT) if n in (3, 9) else one for n, one in enumerate(fleet(64, 4))]
    needs = Needs(tuple(0.0 if number in (3, 9) else 1.0 for number in range(1, 65)), 0.9)
    made = weighted_plan(nodes, needs, 1, SIZE, usd_per_s=POOL_USD_PER_S)
    assert {nodes[3].peer_id, nodes[9].peer_id} <= made.late and made.topology.startswith("regional")
    assert made.egress_usd == pytest.approx(egress_usd(nodes, made.trees, SIZE)) and made.egress_usd > 0


def test_what_leaves_a_region_is_charged_at_its_senders_price() -> None:
    nodes = [node(0, "", usd=0.0), node(1, "a"), node(2, "a"), node(3, "b", usd=0.02)]
    half_back = (Tree(0.5, (0, 1, 2)), Tree(0.5, (3, 1, 0)))  # seed -> a -> a -> b; the other half: seed -> b -> a -> a
    assert egress_usd(nodes, half_back, int(GIB)) == pytest.approx(0.5 * USD_PER_GIB + 0.5 * 0.02)
    unknown = [node(0, "", usd=0.0), node(1, ""), node(2, "")]
    assert egress_usd(unknown, (Tree(1.0, (0, 1)),), int(GIB)) == pytest.approx(USD_PER_GIB), "nobody's own region"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", "b", "c"]), st.sampled_from([50, 500]), st.booleans()),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from(["", "a", "z"]),
    st.booleans(),
)
def test_regional_trees_reach_everybody_or_are_none(
    workers: list[tuple[str, int, bool]], home: str, is_chain: bool
) -> None:
    nodes = [node(0, home)]
    for number, (region, up, is_hidden) in enumerate(workers, start=1):
        made = node(number, region, up * MBIT)
        nodes.append(replace(made, addresses=()) if is_hidden else made)
    trees = regional(nodes, 32, is_chain=is_chain)
    assert not trees or is_sound(nodes, trees)
    if trees:
        assert all(times <= 1.0 + 1e-9 for region, times in crossings(nodes, trees).items() if region)
