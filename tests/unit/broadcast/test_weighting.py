"""Whose version matters first: who may be late, and what the plan then promises and the sessions keep."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.ids import PeerId
from echo2.broadcast.topology import DEGREE_MAX, NodeLink, chunk_bytes_for, degree_of, fluid_bound, is_sound
from echo2.broadcast.trees import plan
from echo2.broadcast.weighting import GAIN_MIN, HOSTS, Needs, is_fit, late_of, weighted_plan
from echo2.sim.broadcast_network import BroadcastNetwork
from echo2.sim.broadcast_scenarios import partly_needed_fleet, wan_fleet, weighted_and_alike
from tests.unit.broadcast.test_topology import MBIT, fleet

LINKS = st.lists(
    st.tuples(st.floats(5, 500), st.floats(10, 1000), st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])),
    min_size=1,
    max_size=60,
)


def nodes_of(links: list[tuple[float, float, float]], seed_up: float, natted: int = 0) -> list[NodeLink]:
    nodes = fleet([up for up, _, _ in links], seed_up, natted)
    downs = [nodes[0].down, *(down * MBIT for _, down, _ in links)]
    return [replace(node, downlink_bytes_per_s=down) for node, down in zip(nodes, downs, strict=True)]


@settings(max_examples=80, deadline=None)
@given(LINKS, st.floats(20, 2000), st.floats(0.3, 1.0), st.integers(0, 10))
def test_a_weighted_plan_is_sound_and_never_later_for_the_needed_part(
    links: list[tuple[float, float, float]], seed_up: float, share: float, natted: int
) -> None:
    nodes, needs = nodes_of(links, seed_up, min(natted, len(links) // 2)), Needs(tuple(w for *_, w in links), share)
    made, alike = weighted_plan(nodes, needs, 1), plan(nodes, 1, weights=needs.weights)
    assert is_sound(nodes, made.trees) and weighted_plan(nodes, needs, 1) == made
    assert len(nodes) <= DEGREE_MAX + 1 or degree_of(made.trees, len(nodes)) <= DEGREE_MAX
    late = [number for number, node in enumerate(made.nodes) if node.is_late]
    assert sum(needs.weights[number - 1] for number in late) <= needs.spare
    assert needs.needed_s(made.predicted_s) <= made.predicted_needed_s <= made.predicted_all_s
    if late:
        assert "weighting decided" in made.reason
        rival = plan(nodes, 1, is_paced=False)
        assert needs.needed_s(made.predicted_s) * GAIN_MIN <= needs.needed_s(rival.predicted_s)
        assert all(not set(late) & set(made.pushed_to(tree)) for tree in range(len(made.trees)))
    else:
        assert made == alike


@given(LINKS, st.floats(20, 2000), st.floats(0.0, 1.0), st.just(0.0) | st.floats(1e-6, 5.0))
def test_where_all_weigh_alike_the_plan_is_that_without_weights(
    links: list[tuple[float, float, float]], seed_up: float, share: float, weight: float
) -> None:
    nodes = nodes_of(links[:20], seed_up)
    assert weighted_plan(nodes, Needs((weight,) * (len(nodes) - 1), share), 3) == plan(nodes, 3)


IDLE_OR_NOT = st.tuples(st.floats(5, 500), st.floats(10, 1000), st.sampled_from([0.0, 1.0]))


@settings(max_examples=60)
@given(st.lists(IDLE_OR_NOT, min_size=2, max_size=7), st.floats(20, 500))
def test_no_other_choice_among_those_that_weigh_nothing_is_faster(
    links: list[tuple[float, float, float]], seed_up: float
) -> None:
    nodes, needs = nodes_of(links, seed_up), Needs(tuple(w for *_, w in links))
    idle = [number for number, (*_, weight) in enumerate(links, start=1) if weight == 0]
    if needs.are_alike:
        assert not late_of(nodes, needs)
        return

    def rate(late: tuple[int, ...]) -> float:
        return fluid_bound([node for number, node in enumerate(nodes) if number not in late]).rate_bytes_per_s

    best = max(rate(late) for count in range(len(idle) + 1) for late in combinations(idle, count))
    assert rate(tuple(late_of(nodes, needs))) * GAIN_MIN >= best * (1 - 1e-9)


def test_the_needed_time_is_a_quantile_by_weight_and_idle_workers_do_not_count() -> None:
    needs = Needs((1.0, 0.0, 2.0, 1.0), 0.75)
    assert needs.needed_s((1.0, 99.0, 2.0, 3.0)) == 2.0
    assert Needs((1.0, 0.0, 2.0, 1.0)).needed_s((1.0, 99.0, 2.0, 3.0)) == 3.0
    assert Needs((1.0, 1.0), 0.5).needed_s((1.0, 3.0)) == 3.0


def test_a_slow_worker_that_can_be_spared_is_late_and_one_that_cannot_is_not() -> None:
    nodes = wan_fleet("homogeneous", 8)
    nodes[3] = replace(nodes[3], downlink_bytes_per_s=20 * MBIT)
    weights = [1.0, 1.0, 0.5, 1.1, 1.0, 1.0, 1.0, 1.0]
    assert late_of(nodes, Needs(tuple(weights), 0.9)) == {3}
    assert not late_of(nodes, Needs(tuple(weights), 0.95))
    made = weighted_plan(nodes, Needs(tuple(weights), 0.9), 1)
    assert made.late == {nodes[3].peer_id}
    assert made.predicted_all_s > 2 * made.predicted_needed_s
    assert made.predicted_needed_s == plan([*nodes[:3], *nodes[4:]], 1).predicted_all_s


def test_one_without_whose_uplink_and_downlink_the_others_are_sooner_done_is_late() -> None:
    nodes = wan_fleet("homogeneous", 8)
    nodes[3] = replace(nodes[3], uplink_bytes_per_s=10 * MBIT)
    needs = Needs((1.0, 1.0, 0.5, 1.1, 1.0, 1.0, 1.0, 1.0), 0.9)
    made = weighted_plan(nodes, needs, 1)
    assert made.late == {nodes[3].peer_id}
    assert made.predicted_needed_s == plan([*nodes[:3], *nodes[4:]], 1).predicted_all_s


def test_a_standby_worker_whose_uplink_helps_is_a_relay_like_others() -> None:
    nodes, needs = wan_fleet("homogeneous", 8), Needs((0.0, *[1.0] * 7))
    nodes[1] = replace(nodes[1], uplink_bytes_per_s=300 * MBIT)
    assert not weighted_plan(nodes, needs, 1).late
    nodes[1] = replace(nodes[1], uplink_bytes_per_s=10 * MBIT)
    assert weighted_plan(nodes, needs, 1).late == {nodes[1].peer_id}


def test_a_plan_stays_while_its_late_workers_can_be_spared_and_others_would_hardly_be_better() -> None:
    nodes, needs = partly_needed_fleet(16, 4, 0.9)
    made = weighted_plan(nodes, needs, 1)
    assert made.late and is_fit(made, nodes, needs)
    assert not is_fit(made, nodes[:-1], Needs(needs.weights[:-1], needs.share))
    wavering = Needs(tuple(weight * (0.9 + 0.05 * (i % 5)) for i, weight in enumerate(needs.weights)), needs.share)
    assert is_fit(made, nodes, wavering)
    assert not is_fit(made, nodes, Needs((1.0, 1.1) * 8))  # those on standby are at work now
    assert not is_fit(plan(nodes, 1), nodes, needs)


@pytest.mark.parametrize(("workers", "standby"), [(16, 4), (33, 4), (34, 2), (40, 8), (64, 24), (1000, 300)])
def test_late_workers_of_fleets_of_any_size_have_peers_to_pull_from(workers: int, standby: int) -> None:
    nodes, needs = partly_needed_fleet(workers, standby, 1.0)
    made = weighted_plan(nodes, needs, 1)
    assert len(made.late) == standby and is_sound(nodes, made.trees)
    for peer in made.late:
        assert len(made.neighbours(peer)) >= min(HOSTS, len(made.trees))
    for node in made.nodes[1 :: max(1, workers // 50)]:
        assert len(made.neighbours(node.peer_id)) <= DEGREE_MAX


def test_the_needed_part_is_done_sooner_and_all_are_done() -> None:
    nodes, needs = partly_needed_fleet(16, 4, 0.9)
    weighted, alike = weighted_and_alike(nodes, needs, 16 << 20, 128 << 10)
    assert weighted.needed_s <= 0.9 * alike.needed_s
    assert weighted.needed_s <= 1.15 * weighted.predicted_needed_s
    assert weighted.all_s < 60


def test_a_late_workers_requests_wait_for_what_the_others_are_sent() -> None:
    """Beside late workers the others are done hardly later than if those were not there."""
    nodes, needs = partly_needed_fleet(8, 3, 1.0)
    made = weighted_plan(nodes, needs, 1, 32 << 20, 128 << 10)
    assert len(made.late) == 3

    def needed_s(of: list[NodeLink], by: BroadcastNetwork) -> float:
        by.connect_all()
        by.publish(32 << 20, chunk_bytes_for(by.plan, 128 << 10))
        by.run(120)
        times = [by.nodes[node.peer_id].done_at for node in of[1:]]
        assert None not in times
        return max(time for time in times if time is not None)

    needed = [node for node in made.nodes if not node.is_late]
    beside = needed_s(needed, BroadcastNetwork(made))
    alone = needed_s(needed, BroadcastNetwork(plan(needed, 1, 32 << 20, 128 << 10)))
    assert beside <= 1.06 * alone


def test_a_late_worker_gets_all_though_one_that_it_pulls_from_dies() -> None:
    nodes, needs = partly_needed_fleet(8, 2, 1.0)
    net = BroadcastNetwork(weighted_plan(nodes, needs, 1, 8 << 20, 128 << 10))
    net.connect_all()
    net.publish(8 << 20, 128 << 10)
    net.at(0.5, lambda: net.kill(PeerId("w1")))
    net.run(120)
    assert all(node.done_at is not None for node in net.nodes.values() if node.is_alive)
