"""A node's part of a broadcast plan says to it what the whole plan says, and is small."""

import random
from dataclasses import replace

import pytest

from echo2.base.ids import PeerId
from echo2.broadcast.plan import DEGREE_MAX, BroadcastPlan, NodeLink
from echo2.broadcast.trees import Needs, plan, weighted_plan
from echo2.coordinator.planning.telemetry import PlanParts
from echo2.wire.broadcast import plan_from_message, plan_to_message


def fleet(count: int, seed: int) -> list[NodeLink]:
    rng = random.Random(seed)
    return [
        NodeLink(PeerId(f"p{i}"), f"w{i}", (f"10.0.0.1:{i}",) if i == 0 or rng.random() < 0.8 else (),
                 12.5e6 * rng.uniform(0.4, 4), 5e7 * rng.uniform(1, 4), rng.uniform(0.01, 0.1))
        for i in range(count)
    ]  # fmt: skip


def children_of(of: BroadcastPlan, peer_id: PeerId) -> list[list[tuple[PeerId, bool]]]:
    """As a node's session works them out: its children in each tree, and whether each passes chunks on."""
    mine = of.index_of(peer_id)
    found = []
    for number in range(len(of.trees)):
        children = of.pushed_to(number)
        found.append(sorted((of.nodes[c].peer_id, c in children) for c in children.get(mine if mine else -1, ())))
    return found


def of_a_fleet_partly_needed(count: int, seed: int) -> BroadcastPlan:
    """Every fourth worker has a slow link and is on standby."""
    nodes = fleet(count, seed)
    is_idle = [number % 4 == 3 for number in range(1, count)]
    slow = [
        replace(node, uplink_bytes_per_s=5e5, downlink_bytes_per_s=1e6) if idle else node
        for node, idle in zip(nodes[1:], is_idle, strict=True)
    ]
    made = weighted_plan([nodes[0], *slow], Needs(tuple(0.0 if idle else 1.0 for idle in is_idle)), 7, 10_000_000)
    assert len(made.late) >= sum(is_idle)
    return made


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("count", "seed"), [(2, 0), (34, 1), (35, 2), (90, 3), (400, 4)])
def test_a_part_tells_its_node_what_the_whole_plan_tells_it(count: int, seed: int, is_weighted: bool) -> None:
    whole = of_a_fleet_partly_needed(count, seed) if is_weighted else plan(fleet(count, seed), 7, 10_000_000)
    parts = PlanParts(whole)
    for node in whole.nodes[1:]:
        part = plan_from_message(plan_to_message(parts.part_of(node.peer_id)))
        assert part.seed == whole.seed
        assert (part.epoch, part.topology, len(part.trees)) == (whole.epoch, whole.topology, len(whole.trees))
        assert set(part.neighbours(node.peer_id)) == set(whole.neighbours(node.peer_id))
        assert children_of(part, node.peer_id) == children_of(whole, node.peer_id)
        for neighbour in part.neighbours(node.peer_id):
            mine, theirs = part.index_of(neighbour), whole.index_of(neighbour)
            assert mine is not None and theirs is not None and part.nodes[mine] == whole.nodes[theirs]
    assert parts.part_of(whole.nodes[0].peer_id) is whole


def test_a_part_of_a_large_plan_is_small_and_that_of_an_outsider_names_nodes_to_pull_from() -> None:
    whole = plan(fleet(2000, 5), 7, 10_000_000)
    parts, whole_bytes = PlanParts(whole), plan_to_message(whole).ByteSize()
    sizes = [plan_to_message(parts.part_of(node.peer_id)).ByteSize() for node in whole.nodes[1:]]
    assert sum(sizes) / len(sizes) < whole_bytes / 20
    outsider = parts.part_of(PeerId("standby"))
    assert outsider.index_of(PeerId("standby")) is None
    assert (outsider.seed, outsider.trees) == (whole.seed, ())
    assert DEGREE_MAX < len(outsider.nodes) < 2 * DEGREE_MAX
    assert outsider.neighbours(PeerId("standby")) == ()
    assert parts.part_of(PeerId("another")).nodes != outsider.nodes
