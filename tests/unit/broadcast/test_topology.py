"""Plans: sound trees, bounded degree, and the least predicted time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.broadcast_model.scenarios import broadcast, wan_fleet
from echo2.base.ids import PeerId
from echo2.broadcast.artifact import CHUNK_BYTES_MAX, CHUNKS_MAX
from echo2.broadcast.plan import (
    DEGREE_MAX,
    NodeLink,
    Tree,
    can_connect,
    chunk_bytes_for,
    degree_of,
    fluid_bound,
    is_sound,
    predict,
)
from echo2.broadcast.trees import plan, strong_relays, weighted_multi_tree

MBIT = 125e3


def fleet(uplinks_mbit: list[float], seed_up_mbit: float = 200, natted: int = 0) -> list[NodeLink]:
    nodes = [NodeLink(PeerId("seed"), "seed", ("seed:1",), seed_up_mbit * MBIT, 400 * MBIT, 0.02)]
    for i, up in enumerate(uplinks_mbit):
        addresses = () if i < natted else (f"w{i}:1",)
        nodes.append(NodeLink(PeerId(f"w{i}"), f"w{i}", addresses, up * MBIT, 2 * up * MBIT + 100 * MBIT, 0.04))
    return nodes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(10, 1000), min_size=1, max_size=80), st.floats(20, 2000), st.integers(0, 10), st.integers(0, 99)
)
def test_every_plan_is_sound_and_no_faster_than_the_fluid_bound(
    ups: list[float], seed_up: float, natted: int, epoch: int
) -> None:
    nodes = fleet(ups, seed_up, min(natted, len(ups) // 2))
    made = plan(nodes, epoch)
    assert is_sound(nodes, made.trees)
    assert made.epoch == epoch and made.topology in made.reason
    assert made.predicted_all_s >= made.predicted_bytes / fluid_bound(nodes).rate_bytes_per_s * 0.999
    assert plan(nodes, epoch) == made


@pytest.mark.parametrize("uplink", [100.0, 20.0])  # all uplinks alike, and one that is weak: only the strong ones relay
def test_a_worker_over_a_satellite_relays_nothing_unless_all_are_so_far(uplink: float) -> None:
    nodes = fleet([100.0] * 5 + [uplink], seed_up_mbit=100)
    far = [*nodes[:-1], replace(nodes[-1], rtt_s=0.6)]
    relaying = {parent for tree in plan(far, 1, 64 << 20).trees if tree.weight for parent in tree.parents}
    assert relaying and len(nodes) - 1 not in relaying
    all_far = [replace(node, rtt_s=0.6) for node in nodes]
    assert [tree.parents for tree in weighted_multi_tree(all_far)] == [t.parents for t in weighted_multi_tree(nodes)]


@pytest.mark.parametrize("count", [4, 8, 16, 31])
@pytest.mark.parametrize("kind", ["homogeneous", "heterogeneous"])
def test_multi_tree_is_near_the_bound_for_small_fleets(count: int, kind: str) -> None:
    cycle = [100.0] if kind == "homogeneous" else [50.0, 200.0, 75.0, 100.0, 150.0, 50.0, 100.0, 75.0]
    nodes = fleet([cycle[i % len(cycle)] for i in range(count)])
    made = plan(nodes, 1, artifact_bytes=128 << 20, chunk_bytes=128 << 10)
    assert made.topology == "multi_tree"
    assert made.predicted_all_s <= 1.1 * made.predicted_bytes / fluid_bound(nodes).rate_bytes_per_s
    assert degree_of(made.trees, len(nodes)) <= DEGREE_MAX


def test_weak_uplinks_do_not_relay_where_strong_ones_suffice() -> None:
    """One giant and seven of 20 Mbit/s: chunks as small as the weak ones need would cost all of them."""
    nodes = fleet([1000, *[20] * 7], seed_up_mbit=100)
    made = plan(nodes, 1, artifact_bytes=64 << 20)
    assert made.topology == "strong_relays" and made.trees[0] == Tree(1.0, (0, *[1] * 7))
    assert [tree.weight for tree in made.trees[1:]] == [0.0] * 7, "spares"
    assert made.predicted_all_s <= 1.02 * made.predicted_bytes / fluid_bound(nodes).rate_bytes_per_s
    assert (
        chunk_bytes_for(made, 1 << 20) == 256 << 10 and chunk_bytes_for(plan(fleet([20] * 8), 1), 1 << 20) == 32 << 10
    )


@pytest.mark.parametrize(
    ("ups", "seed_up", "why"),
    [
        ([140, *[20] * 7], 100, "the giant carries it, but with less than a quarter to spare"),
        ([1000, *[60] * 7], 100, "chunks would not grow"),
        ([30, *[20] * 7], 100, "all are needed"),
        ([100] * 8, 1000, "all are alike"),
    ],
)
def test_all_relay_where_strong_ones_alone_gain_nothing(ups: list[float], seed_up: float, why: str) -> None:
    assert strong_relays(fleet(ups, seed_up)) == (), why


def test_workers_behind_nat_are_reached_through_one_that_can_be_dialled() -> None:
    nodes = fleet([100] * 8, natted=2)
    made = plan(nodes, 1)
    for tree in made.trees:
        for child, parent in enumerate(tree.parents, start=1):
            assert can_connect(nodes[child], nodes[parent])
    assert PeerId("w1") not in made.neighbours(PeerId("w0"))
    assert set(made.neighbours(PeerId("w0"))) == {PeerId("seed"), *(PeerId(f"w{i}") for i in range(2, 8))}


@pytest.mark.parametrize(("count", "natted", "share"), [(8, 2, 0.95), (8, 4, 0.7), (31, 10, 0.7)])
def test_weights_relieve_those_who_pass_chunks_between_unreachable_nodes(count: int, natted: int, share: float) -> None:
    nodes = fleet([100] * count, natted=natted)
    made = plan(nodes, 1, 128 << 20, 64 << 10)
    rate = predict(nodes, made.trees, 128 << 20, 64 << 10).rate_bytes_per_s
    assert made.topology == "multi_tree" and is_sound(nodes, made.trees)
    assert rate >= share * fluid_bound(nodes).rate_bytes_per_s
    assert all(tree.weight > 0 for tree in made.trees)


def test_a_tree_with_a_loop_is_not_sound() -> None:
    nodes = fleet([100, 100, 100])
    assert not is_sound(nodes, (Tree(1.0, (0, 3, 2)),))
    assert not is_sound(nodes, (Tree(0.5, (0, 0, 0)),))


@pytest.mark.parametrize(("kind", "count"), [("homogeneous", 64), ("heterogeneous", 256), ("heterogeneous", 1000)])
def test_large_fleets_get_shallow_trees_of_bounded_degree_near_the_bound(kind: str, count: int) -> None:
    nodes = wan_fleet(kind, count)
    made = plan(nodes, 1, artifact_bytes=128 << 20, chunk_bytes=128 << 10)
    assert is_sound(nodes, made.trees)
    assert degree_of(made.trees, len(nodes)) <= DEGREE_MAX
    assert all(len(made.neighbours(node.peer_id)) <= DEGREE_MAX for node in nodes[:: max(1, count // 50)])
    assert made.predicted_all_s <= 1.15 * made.predicted_bytes / fluid_bound(nodes).rate_bytes_per_s


HUNDRED, WEAKEST_TEN = [100.0] * 8, [*[100.0] * 7, 10.0]


@pytest.mark.parametrize(
    ("ups", "most", "artifact_bytes", "expected"),
    [
        (None, 1 << 20, 0, 1 << 20),
        (None, 256 << 10, 11e9, 1 << 20),  # 10,500 chunks of a keyframe of 8 B parameters
        (None, 256 << 10, 4e9, 256 << 10),
        (None, 256 << 10, 1e15, CHUNK_BYTES_MAX),
        (HUNDRED, 1 << 20, 0, 256 << 10),  # the slowest uplink that forwards: 12.5 MB/s x 25 ms = 313 kB
        (HUNDRED, 64 << 10, 0, 64 << 10),
        (HUNDRED, 256 << 10, 11e9, 1 << 20),
        (HUNDRED, 256 << 10, 1e15, 4 << 20),  # 12.5 MB/s x 0.5 s = 6.25 MB
        (WEAKEST_TEN, 1 << 20, 0, 16 << 10),
        (WEAKEST_TEN, 256 << 10, 11e9, 512 << 10),  # 1.25 MB/s x 0.5 s
        ([0.1], 1 << 20, 0, 512 << 10),  # a star: only the seed forwards
        # of a small version they are smaller, so that copies at a relay do not delay it
        (HUNDRED, 1 << 20, 64 << 20, 256 << 10),
        (HUNDRED, 1 << 20, 20 << 20, 64 << 10),
        (HUNDRED, 1 << 20, 2 << 20, 16 << 10),  # less would cost a signature for little
    ],
)
def test_chunks_follow_the_slowest_uplink_that_forwards_and_the_versions_size(
    ups: list[float] | None, most: int, artifact_bytes: float, expected: int
) -> None:
    made = plan(fleet(ups), 1) if ups is not None else None
    assert chunk_bytes_for(made, most, artifact_bytes) == expected


def test_sessions_of_40_nodes_reach_what_the_plan_predicts() -> None:
    got = broadcast(wan_fleet("heterogeneous", 40), 4 << 20, 128 << 10)
    assert got.duplicate_bytes == 0
    assert got.slowest_s <= 1.3 * got.predicted_s


def test_what_uplinks_can_spare_is_spread_over_all_of_them() -> None:
    """The slowest downlink (150 Mbit/s) binds: without spreading, the workers' uplinks would be full and the seed's 87 %."""
    ups, downs = (50, 200, 75, 100), (150, 400, 200, 200)
    nodes = [NodeLink(PeerId("seed"), "seed", ("seed:1",), 200 * MBIT, 400 * MBIT, 0.02)]
    nodes += [
        NodeLink(PeerId(f"w{i}"), "", ("w:1",), u * MBIT, d * MBIT)
        for i, (u, d) in enumerate(zip(ups, downs, strict=True))
    ]
    trees, rate = weighted_multi_tree(nodes), fluid_bound(nodes).rate_bytes_per_s
    used = [0.0] * len(nodes)
    for tree in trees:
        for parent in tree.parents:
            used[parent] += tree.weight * rate / nodes[parent].up
    assert max(used) == pytest.approx(min(used), rel=0.02)
    assert max(used) < 0.97


@given(st.lists(st.floats(10, 1000), min_size=2, max_size=32), st.floats(20, 2000), st.floats(10, 1000))
def test_the_seed_sends_hardly_more_than_it_must(ups: list[float], seed_up: float, slowest: float) -> None:
    nodes = fleet(ups, seed_up)
    nodes[1] = NodeLink(PeerId("w0"), "w0", ("w0:1",), ups[0] * MBIT, slowest * MBIT)
    rate, total = fluid_bound(nodes).rate_bytes_per_s, sum(node.up for node in nodes[1:])
    least = max(1.0, len(ups) - total / rate)
    sent = sum(tree.weight * tree.parents.count(0) for tree in weighted_multi_tree(nodes))
    assert sent <= 1.11 * least


@pytest.mark.parametrize("uplink_mbit", [1e-6, 0.1, 1.0, 10.0, 1000.0])
def test_however_slow_the_slowest_uplink_an_artifact_has_no_more_chunks_than_it_may(uplink_mbit: float) -> None:
    made = plan(fleet([uplink_mbit, 100.0, 100.0]), 1)
    for size in (1 << 30, 20 << 30, 150 << 30):
        assert size / chunk_bytes_for(made, 256 << 10, size) <= CHUNKS_MAX / 10
