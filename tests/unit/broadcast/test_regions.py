"""Fleets in regions: what traffic costs is counted, and plans cross into each region about once where that is charged."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.broadcast_model.network import KEY, BroadcastNetwork
from benchmarks.broadcast_model.scenarios import wan_fleet
from echo2.base.ids import PeerId
from echo2.broadcast.events import (
    ChunkSeen,
    ChunkSent,
    Event,
    Have,
    HeaderSeen,
    PeerUp,
    PlanSet,
    RelayAck,
    Request,
    Route,
    SendChunk,
    Woken,
)
from echo2.broadcast.plan import BY_REGION, BroadcastPlan, NodeLink, Tree, degree_of, fluid_bound, is_sound
from echo2.broadcast.session import BroadcastSession
from echo2.broadcast.trees import GIB, Needs, egress_usd, is_crossing, plan, regional, weighted_plan
from tests.unit.broadcast.acts import acts

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


def two_regions(near: int = 4, far: int = 4, is_named: bool = False) -> list[NodeLink]:
    """The seed's, and one across an ocean: by name, or by round trips alone."""
    nodes = [replace(node(0, "use"), rtt_s=0.02)]
    for number in range(1, near + far + 1):
        region, rtt_s = ("use", 0.02) if number <= near else ("eu", 0.08)
        nodes.append(replace(node(number, region, 500 * MBIT, 0.0), rtt_s=0.05 if is_named else rtt_s))
    return nodes if is_named else [replace(one, region="") for one in nodes]


@pytest.mark.parametrize("is_named", [True, False])
def test_a_chunk_crosses_the_ocean_once_where_that_takes_no_longer(is_named: bool) -> None:
    nodes, named = two_regions(is_named=is_named), two_regions(is_named=True)
    made = plan(nodes, 1, SIZE)
    assert made.topology == "by_region" and is_sound(nodes, made.trees)
    assert crossings(named, made.trees) == {"eu": pytest.approx(1.0)}
    assert made.predicted_all_s <= 1.06 * SIZE / fluid_bound(nodes).rate_bytes_per_s
    relaying = {parent for tree in made.trees for parent in tree.parents}
    assert relaying == set(range(9)), "every uplink helps"


def test_where_one_region_could_not_keep_up_or_there_is_but_one_nothing_is_by_region() -> None:
    weak = [replace(one, uplink_bytes_per_s=50 * MBIT) if i > 4 else one for i, one in enumerate(two_regions())]
    alone = [replace(one, rtt_s=0.05 + 0.001 * i) for i, one in enumerate(two_regions())]
    assert {plan(nodes, 1, SIZE).topology for nodes in (weak, alone)} == {"multi_tree"}


@pytest.mark.parametrize("lost", [2, 6])
def test_by_region_all_are_done_near_the_bound_and_survive_a_head(lost: int) -> None:
    nodes = two_regions()
    size = SIZE * 5 // 8
    bound_s = size / fluid_bound(nodes).rate_bytes_per_s
    for is_killed in (False, True):
        net = BroadcastNetwork(plan(nodes, 1, size, 512 << 10))
        net.publish(size, 512 << 10)
        if is_killed:
            net.at(bound_s / 2, lambda net=net: net.kill(nodes[lost].peer_id))  # type: ignore[misc]
        net.run(60)
        times = [time_s for name, time_s in net.worker_times().items() if name != nodes[lost].name or not is_killed]
        assert all(time_s is not None and time_s < (2.0 if is_killed else 1.1) * bound_s for time_s in times)


def member_of(nodes: list[NodeLink], number: int, made: BroadcastPlan | None = None) -> BroadcastSession:
    """Of the node of that number, which knows of an artifact and is connected to all others."""
    session, others = BroadcastSession(nodes[number].peer_id), [node for node in nodes if node is not nodes[number]]
    told = HeaderSeen(others[0].peer_id if number else None, KEY, is_wanted=True)
    acts(session, 0.0, PlanSet(made or plan(nodes, 1, SIZE)), *(PeerUp(peer.peer_id) for peer in others), told)
    return session


def test_one_member_of_a_region_asks_afar_for_a_chunk_and_the_others_ask_that_one() -> None:
    nodes, asked_by = two_regions(), dict[PeerId, set[tuple[PeerId, int]]]()
    for number in range(5, 9):
        session, me = member_of(nodes, number), nodes[number].peer_id
        session.handle(Have(nodes[1].peer_id, KEY, 0b1111, False), 0.0)
        for tick in range(80):
            now = 0.1 * tick
            events: list[Event] = [ChunkSeen(nodes[2].peer_id, KEY, 100 + tick, 1000)]  # pushes go on
            if tick == 40:
                mate = nodes[5 if number != 5 else 6].peer_id
                events.append(Have(mate, KEY, 0b0001, False))
            for request in acts(session, now, *events, kind=Request):
                asked_by.setdefault(me, set()).update((request.peer, index) for index in request.indices)
    afar = [index for asked in asked_by.values() for peer, index in asked if peer == nodes[1].peer_id]
    assert sorted(afar) == [0, 1, 2, 3], "each of them once"
    assert sum((nodes[5].peer_id, 0) in asked or (nodes[6].peer_id, 0) in asked for asked in asked_by.values()) >= 3


def test_a_relay_says_what_waits_before_the_head_of_another_region_and_at_it() -> None:
    nodes = two_regions()
    made, session = plan(nodes, 1, SIZE), member_of(nodes, 1)
    tree = next(n for n, tree in enumerate(made.trees) if tree.parents[0] == 0 and 1 in tree.parents[4:])
    head = nodes[5 + made.trees[tree].parents[4:].index(1)].peer_id
    session.handle(RelayAck(head, KEY, 999, 7), 0.0)
    acks: list[RelayAck] = []
    sent = acts(session, 0.1, ChunkSeen(nodes[0].peer_id, KEY, 0, 1000, route=Route(1, tree)), Woken())
    while chunks := [action for action in sent if isinstance(action, SendChunk)]:
        sent = acts(session, 0.2, *(ChunkSent(chunk.peer, KEY, chunk.index) for chunk in chunks))
        acks += [action for action in sent if isinstance(action, RelayAck)]
    assert [ack.backlog for ack in acks] == [7]


@pytest.mark.parametrize(("uplinks", "is_slow"), [(1.0, False), (0.7, True)], ids=["as planned", "slower than planned"])
def test_trees_by_region_give_way_where_no_pipe_is_thin_and_come_back_for_good_where_one_is(
    uplinks: float, is_slow: bool
) -> None:
    nodes = two_regions()
    made = plan(nodes, 1, SIZE)
    session, size = member_of(nodes, 0), 1 << 20
    bound_per_tick = 0.05 * fluid_bound(nodes).rate_bytes_per_s / size
    published, credit, now, owed = 0, 0.0, 0.0, list[tuple[PeerId, int]]()

    def trees_used(seconds: float, share: float) -> set[bool]:
        """Relays pass on `share` of what uplinks could: whether the plan's others, of the last second's chunks."""
        nonlocal published, credit, now
        used: list[tuple[float, bool]] = []
        until = now + seconds
        while now < until:
            now, credit = now + 0.05, min(20.0, credit + share * bound_per_tick)
            events: list[Event] = [Woken()]
            events += [ChunkSeen(None, KEY, published + i, size, is_fresh=True) for i in range(8)]
            published += 8
            while owed and credit >= 1:
                peer, index = owed.pop(0)
                events.append(RelayAck(peer, KEY, index, 1, is_slow))
                credit -= 1
            while events:
                for chunk in acts(session, now, events.pop(), kind=SendChunk):
                    events.append(ChunkSent(chunk.peer, KEY, chunk.index))
                    if chunk.route is not None:
                        owed.append((chunk.peer, chunk.index))
                        used.append((now, chunk.route.tree >= len(made.trees)))
        return {is_other for at, is_other in used if at > until - 1}

    assert trees_used(6.0, 0.7) == {is_slow}, "a pipe holds them back, or the uplinks do and say so"
    assert trees_used(4.0, uplinks) == {True}
    assert trees_used(4.0, 0.8 * uplinks) == {True}, "uplinks that change are no pipe"
    assert trees_used(16.0, 0.5 * uplinks) == {False}
    assert trees_used(6.0, uplinks) == {False}, "the pipe has been seen"


@pytest.mark.parametrize("every_s, within", [(3.0, 1.3), (4.0, 1.18), (8.0, 1.15)])
def test_uplinks_that_change_twofold_all_the_time_hold_nobody_up_for_long(every_s: float, within: float) -> None:
    nodes = [
        replace(node, uplink_bytes_per_s=node.up / 4, downlink_bytes_per_s=node.down / 4)
        for node in wan_fleet("homogeneous", 8)
    ]
    net, size = BroadcastNetwork(plan(nodes, 1, 64 << 20, 64 << 10)), 64 << 20

    def change() -> None:
        for number, sim in enumerate(list(net.nodes.values())[1:]):
            is_low = (int(net.now / every_s) + number) % 2
            sim.link = replace(nodes[number + 1], uplink_bytes_per_s=nodes[number + 1].up * (0.5 if is_low else 1.0))
        net.at(net.now + every_s, change)

    net.publish(size, 64 << 10)
    change()
    net.run(60)
    bound_s = 8 * size / (nodes[0].up + 0.75 * sum(node.up for node in nodes[1:]))
    assert net.slowest_s < within * bound_s


def test_fresh_chunks_are_sent_by_a_plan_by_region_whose_trees_have_no_relay() -> None:
    nodes = two_regions(near=1, far=1)
    made = replace(plan(nodes, 1, SIZE), trees=(Tree(1.0, (0, 0)),), topology=BY_REGION, others=())
    sent = acts(member_of(nodes, 0, made), 0.1, ChunkSeen(None, KEY, 0, 1000, is_fresh=True), kind=SendChunk)
    assert {chunk.peer for chunk in sent} == {one.peer_id for one in nodes[1:]}


def test_where_some_come_late_the_others_trees_are_not_by_region() -> None:
    """A late worker pulls from whoever is pushed to, wherever that is."""
    nodes = [replace(one, downlink_bytes_per_s=5 * MBIT) if i == 8 else one for i, one in enumerate(two_regions())]
    made = weighted_plan(nodes, Needs((1.0,) * 7 + (0.0,), 0.9), 1, SIZE)
    assert made.late == {nodes[8].peer_id} and made.topology == "multi_tree"


@pytest.mark.parametrize("slow, is_acknowledged", [(1, True), (2, False)])
def test_for_one_of_many_children_that_takes_chunks_slowly_the_seed_does_not_wait(
    slow: int, is_acknowledged: bool
) -> None:
    nodes = [replace(one, rtt_s=0.05) for one in two_regions()]
    made, session = plan(nodes, 1, SIZE), member_of(nodes, 1)
    tree = next(number for number, tree in enumerate(made.trees) if 1 in tree.parents[1:])
    sent = acts(session, 0.1, ChunkSeen(nodes[0].peer_id, KEY, 0, 1000, route=Route(1, tree)), kind=SendChunk)
    assert len(sent) == 7
    taken = (ChunkSent(chunk.peer, KEY, 0) for chunk in sent[slow:])
    assert bool(acts(session, 0.2, *taken, kind=RelayAck)) == is_acknowledged
