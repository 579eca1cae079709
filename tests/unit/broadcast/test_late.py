"""Who is late, for whom nobody waits, and what the plan then promises and the sessions keep."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.broadcast_model.network import BroadcastNetwork
from benchmarks.broadcast_model.scenarios import partly_needed_fleet, wan_fleet
from benchmarks.broadcast_scene import own_earliest
from echo2.base.ids import PeerId
from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.events import ChunkSeen, ChunkSent, HeaderSeen, PeerUp, PlanSet, RelayAck, Route, SendChunk
from echo2.broadcast.plan import DEGREE_MAX, NodeLink, chunk_bytes_for, degree_of, fluid_bound, is_sound
from echo2.broadcast.session import BroadcastSession
from echo2.broadcast.trees import (
    GAIN_MIN,
    HOSTS,
    Needs,
    PlanPace,
    is_worth_sending,
    late_of,
    plan,
    serves,
    slow_of,
    weighted_plan,
)
from tests.unit.broadcast.acts import acts
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


@settings(max_examples=50, deadline=None)
@given(LINKS, st.floats(20, 2000), st.floats(0.3, 1.0), st.integers(0, 10))
def test_a_plan_is_sound_and_never_later_for_those_that_are_not_late(
    links: list[tuple[float, float, float]], seed_up: float, share: float, natted: int
) -> None:
    nodes, needs = nodes_of(links, seed_up, min(natted, len(links) // 2)), Needs(tuple(w for *_, w in links), share)
    made, alike = weighted_plan(nodes, needs, 1), plan(nodes, 1)
    assert is_sound(nodes, made.trees) and weighted_plan(nodes, needs, 1) == made
    assert len(nodes) <= DEGREE_MAX + 1 or degree_of(made.trees, len(nodes)) <= DEGREE_MAX
    late = {number for number, node in enumerate(made.nodes) if node.is_late}
    spared = late - slow_of(nodes)[1]
    assert not spared or sum(needs.weights[number - 1] for number in spared) <= needs.spare
    assert made.predicted_needed_s <= made.predicted_all_s and serves(made, nodes, needs)
    if late:
        assert made.predicted_needed_s * GAIN_MIN <= needs.needed_s(alike.predicted_s) * (1 + 1e-9)
        for tree, pushed in ((tree, made.pushed_to(number)) for number, tree in enumerate(made.trees)):
            assert not late & {child for children in pushed.values() for child in children} - set(tree.parents)
    else:
        assert made == alike


@pytest.mark.parametrize(("slow", "within"), [(1, 1.15), (2, 1.20)])
def test_beside_slow_downlinks_the_others_are_done_near_their_own_earliest_time(slow: int, within: float) -> None:
    nodes = nodes_of([*[(100.0, 200.0, 1.0)] * (6 - slow), *[(100.0, 20.0, 1.0)] * slow], 200.0)
    size = 64 << 20
    made = weighted_plan(nodes, Needs((1.0,) * 6), 1, size, 128 << 10)
    assert len(made.late) == slow and "would wait" in made.reason
    net = BroadcastNetwork(made)
    net.publish(size, chunk_bytes_for(made, 128 << 10))
    net.run(3600)
    times = [time_s for time_s in net.worker_times().values() if time_s is not None]
    earliest = [size * time_s for time_s in own_earliest(nodes)]
    assert max(times[: 6 - slow]) <= within * earliest[0]
    assert max(times) <= 1.25 * earliest[-1]


IDLE_OR_NOT = st.tuples(st.floats(5, 500), st.floats(10, 1000), st.sampled_from([0.0, 1.0]))


@settings(max_examples=40)
@given(st.lists(IDLE_OR_NOT, min_size=2, max_size=7), st.floats(20, 500))
def test_no_other_choice_among_those_that_weigh_nothing_is_faster(
    links: list[tuple[float, float, float]], seed_up: float
) -> None:
    nodes, needs = nodes_of(links, seed_up), Needs(tuple(w for *_, w in links))
    idle = [number for number, (*_, weight) in enumerate(links, start=1) if weight == 0]
    if needs.are_alike or slow_of(nodes)[0]:
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


@pytest.mark.parametrize(
    ("field", "mbit", "weights", "is_late"),
    [
        ("downlink_bytes_per_s", 20, (1.0,) * 8, True),  # whether or not it can be spared
        ("downlink_bytes_per_s", 20, (1.0, 1.0, 0.5, *[1.0] * 5), True),
        ("uplink_bytes_per_s", 10, (1.0, 1.0, 0.5, 1.1, *[1.0] * 4), True),  # the others are sooner done without it
        ("uplink_bytes_per_s", 10, (1.0, 1.0, 0.0, *[1.0] * 5), True),  # on standby
        ("uplink_bytes_per_s", 300, (1.0, 1.0, 0.0, *[1.0] * 5), False),  # on standby, and its uplink helps
    ],
)
def test_a_worker_is_late_if_the_others_would_wait_for_it(
    field: str, mbit: float, weights: tuple[float, ...], is_late: bool
) -> None:
    nodes = wan_fleet("homogeneous", 8)
    nodes[3] = replace(nodes[3], **{field: mbit * MBIT})  # type: ignore[arg-type]
    made = weighted_plan(nodes, Needs(weights, 0.9), 1)
    assert made.late == ({nodes[3].peer_id} if is_late else set())
    assert not is_late or made.predicted_needed_s <= 1.01 * plan([*nodes[:3], *nodes[4:]], 1).predicted_all_s


def test_a_plan_stays_while_its_late_workers_can_be_spared_and_others_would_hardly_be_better() -> None:
    nodes, needs = partly_needed_fleet(16, 4, 0.9)
    made = weighted_plan(nodes, needs, 1)
    wavering = Needs(tuple(weight * (0.9 + 0.05 * (i % 5)) for i, weight in enumerate(needs.weights)), needs.share)
    on_standby_before = Needs((1.0, 1.1) * 8)
    for known, now, is_replaced in (
        (made, needs, False), (made, wavering, False), (made, on_standby_before, True), (plan(nodes, 1), needs, True),
    ):  # fmt: skip
        assert is_worth_sending(known, weighted_plan(nodes, now, 2), now) is is_replaced


@pytest.mark.parametrize(("workers", "standby"), [(16, 4), (33, 4), (34, 2), (1000, 300)])
def test_late_workers_of_fleets_of_any_size_have_peers_to_pull_from(workers: int, standby: int) -> None:
    nodes, needs = partly_needed_fleet(workers, standby, 1.0)
    made = weighted_plan(nodes, needs, 1)
    assert len(made.late) == standby and is_sound(nodes, made.trees)
    for peer in made.late:
        assert len(made.neighbours(peer)) >= min(HOSTS, len(made.trees))
    for node in made.nodes[1 :: max(1, workers // 50)]:
        assert len(made.neighbours(node.peer_id)) <= DEGREE_MAX


def test_a_late_workers_requests_wait_for_what_the_others_are_sent() -> None:
    """Beside late workers the others are done hardly later than if those were not there."""
    nodes, needs = partly_needed_fleet(8, 3, 1.0)
    made = weighted_plan(nodes, needs, 1, 8 << 20, 128 << 10)
    assert len(made.late) == 3

    needed = [node for node in made.nodes if not node.is_late]

    def needed_s(by: BroadcastNetwork) -> float:
        by.publish(8 << 20, chunk_bytes_for(by.plan, 128 << 10))
        by.run(120)
        return max(by.nodes[node.peer_id].done_at or inf for node in needed[1:])

    alone = BroadcastNetwork(plan(needed, 1, 8 << 20, 128 << 10))
    assert needed_s(BroadcastNetwork(made)) <= 1.06 * needed_s(alone) < inf


def test_a_late_relay_that_freezes_does_not_stop_the_others() -> None:
    nodes = nodes_of([*[(200.0, 500.0, 1.0)] * 5, (200.0, 40.0, 1.0)], 400.0)
    made = weighted_plan(nodes, Needs((1.0,) * 6), 1, 24 << 20, 32 << 10)
    assert made.late == {nodes[-1].peer_id} and any(set(tree.parents[:-1]) == {6} for tree in made.trees)
    net = BroadcastNetwork(made)
    net.publish(24 << 20, 32 << 10)
    net.at(0.5, lambda: net.freeze(nodes[-1].peer_id))
    net.run(10)
    others = [net.nodes[node.peer_id].done_at for node in nodes[1:-1]]
    assert all(done_at is not None for done_at in others), "fresh chunks waited for room at the frozen relay"


def test_what_was_queued_for_a_leaf_that_becomes_late_is_acknowledged_and_owed_no_more() -> None:
    key, (seed, leaf) = ArtifactKey(b"0123456789abcdef"), (PeerId("seed"), PeerId("w1"))
    before = plan(fleet([100.0] * 2, 100.0), 1)
    tree = next(number for number, tree in enumerate(before.trees) if tree.parents == (0, 1) and tree.weight > 0)
    after = replace(before, epoch=2, nodes=(*before.nodes[:2], replace(before.nodes[2], is_late=True)), _index={})
    session = BroadcastSession(PeerId("w0"))
    acts(session, 0.0, PlanSet(before), PeerUp(seed), PeerUp(leaf), HeaderSeen(seed, key, is_wanted=True))
    chunks = [ChunkSeen(seed, key, index, 1000, Route(1, tree)) for index in range(10)]
    in_transport = acts(session, 0.1, *chunks[:8], kind=SendChunk)
    assert session.is_waiting and 0 < len(in_transport) < 8
    acks = acts(session, 0.2, PlanSet(after), *chunks[8:], kind=RelayAck)  # which were sent by the plan before
    acks += acts(session, 0.4, *(ChunkSent(leaf, key, sent.index) for sent in in_transport), kind=RelayAck)
    assert sorted(ack.index for ack in acks) == list(range(10))
    assert not session.is_waiting and not session.peers[leaf].needs({})


def test_a_plan_for_other_rates_is_worth_sending_only_for_a_gain_or_a_wrong_promise() -> None:
    nodes = nodes_of([(100.0, 400.0, 1.0)] * 8, 100.0)
    needs = Needs((1.0,) * 8)
    known = weighted_plan(nodes, needs, 1)

    def at(number: int, factor: float) -> list[NodeLink]:
        """The nodes with one's uplink at a multiple."""
        node = nodes[number]
        return [
            *nodes[:number], replace(node, uplink_bytes_per_s=factor * node.uplink_bytes_per_s), *nodes[number + 1 :]
        ]  # fmt: skip

    assert not is_worth_sending(known, weighted_plan(nodes, needs, 2), needs)
    for factor in (1.25, 3.0, 30.0):  # all wait for the learner's uplink: more of a worker's brings nothing
        assert not is_worth_sending(known, weighted_plan(at(3, factor), needs, 2), needs), factor
    assert is_worth_sending(known, weighted_plan(at(3, 0.05), needs, 2), needs), "others can do what it no longer does"
    assert is_worth_sending(known, weighted_plan(at(0, 3.0), needs, 2), needs), "the promise is three times too late"
    assert is_worth_sending(known, weighted_plan(nodes[:-1], Needs((1.0,) * 7), 2), Needs((1.0,) * 7))
    moved = [*nodes[:-1], replace(nodes[-1], addresses=("10.0.0.9:4000",))]
    assert is_worth_sending(known, weighted_plan(moved, needs, 2), needs)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 3.0)), min_size=1, max_size=200))
def test_however_often_links_change_plans_are_few_and_none_waits_for_long(changes: list[tuple[bool, float]]) -> None:
    pace, now, plans, of_rates = PlanPace(), 0.0, 0, []
    for are_rates_alone, later_s in changes:
        now += later_s
        wait_s = pace.wait_s(are_rates_alone, now)
        assert wait_s <= (pace.RATES_EVERY_S if are_rates_alone else pace.NODES_EVERY_S) + 1e-6
        if wait_s == 0:
            plans += 1
            of_rates += [now] if are_rates_alone else []
    assert plans <= pace.BURST + now / pace.NODES_EVERY_S + 1e-6
    assert all(later - sooner >= pace.RATES_EVERY_S - 1e-6 for sooner, later in pairwise(of_rates))
